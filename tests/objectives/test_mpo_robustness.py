"""What MPOLoss refuses, and that it says why."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.modules import (
    MLP,
    IndependentNormal,
    TanhNormal,
    TruncatedNormal,
)
from torchrl.objectives import ValueEstimators

from minerva_torchrl import MPOLoss
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    assert_equal,
    make_actor,
    make_critic,
    make_transitions,
    run,
    total_loss,
    with_updater,
)

BOUNDS = ["epsilon", "epsilon_mean", "epsilon_stddev", "epsilon_penalty"]
INITS = ["init_temperature", "init_alpha_mean", "init_alpha_stddev", "init_penalty_temperature"]


class NoReset(nn.Module):
    """A layer with a parameter but without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.gain * action[..., :1]


def deterministic_actor() -> TensorDictModule:
    return TensorDictModule(nn.Linear(OBSERVATION_DIM, ACTION_DIM), ["observation"], ["action"])


# Arguments ---------------------------------------------------------------------------------------


class TestMPOArguments:
    @pytest.mark.parametrize(
        ("name", "value", "error", "allowed"),
        [
            *((n, 0, ValueError, "at least 1") for n in ("num_action_samples", "num_qvalue_nets")),
            *((n, -1, ValueError, "at least 1") for n in ("num_action_samples", "num_qvalue_nets")),
            *((n, 1.5, TypeError, "integer") for n in ("num_action_samples", "num_qvalue_nets")),
            ("num_action_samples", True, TypeError, "integer"),
            ("num_action_samples", None, TypeError, "integer"),
            ("num_value_samples", 0, ValueError, "at least 1"),
            ("num_value_samples", 2.0, TypeError, "integer"),
            *(
                (name, value, ValueError, "positive and finite")
                for name in (*BOUNDS, *INITS)
                for value in (0.0, -0.1, math.inf, math.nan)
            ),
            *((name, "0.1", TypeError, "a number") for name in (*BOUNDS, *INITS)),
            *((name, None, TypeError, "a number") for name in ("epsilon", "epsilon_penalty")),
            ("init_temperature", None, TypeError, "a number"),
            ("reduction", "median", ValueError, "'mean', 'sum', 'none'"),
            ("policy_states", "previous", ValueError, "'next', 'current', 'both'"),
            ("loss_function", "l3", ValueError, "'l2', 'l1', 'smooth_l1'"),
            ("qvalue_reduction", "max", ValueError, "'min', 'mean'"),
            ("sequence_steps", "last", ValueError, "'all', 'first'"),
            ("temperature_update", "newton", ValueError, "'gradient', 'solve'"),
            ("scalar_output_mode", "list", ValueError, "None, 'exclude', 'non_tensor'"),
            ("use_prioritized_weights", "yes", ValueError, "True, False, 'auto'"),
        ],
    )
    def test_rejects_values(
        self, name: str, value: Any, error: type[Exception], allowed: str
    ) -> None:
        with pytest.raises(error, match=f"^{name} must be .*{re.escape(allowed)}.*, got "):
            MPOLoss(make_actor(), make_critic(), **{name: value})

    @pytest.mark.parametrize("name", BOUNDS)
    def test_accepts_tensors(self, name: str) -> None:
        loss = MPOLoss(make_actor(), make_critic(), **{name: torch.tensor(0.5)})
        assert getattr(loss, name).item() == 0.5

    def test_rejects_unknown_arguments(self) -> None:
        with pytest.raises(TypeError, match="unheard_of"):
            MPOLoss(make_actor(), make_critic(), unheard_of=1)

    @pytest.mark.parametrize("make", [deterministic_actor, lambda: nn.Linear(3, 2)])
    def test_rejects_actor_without_distribution(self, make: Any) -> None:
        allowed = "actor_network must be a ProbabilisticTensorDictSequential"
        with pytest.raises(TypeError, match=allowed):
            MPOLoss(make(), make_critic())

    def test_rejects_other_distributions(self) -> None:
        """One that looks like a Gaussian is found out at the first call if not before."""
        with_truncation = functools.partial(TruncatedNormal, low=-1.0, high=1.0)
        actor = make_actor(distribution_class=with_truncation)
        with pytest.raises(NotImplementedError, match=r"diagonal Gaussian .*TruncatedNormal"):
            with_updater(MPOLoss(actor, make_critic()))(make_transitions(4))

    def test_distribution_factory(self) -> None:
        """A factory of a supported distribution gives what the distribution gives."""
        data = make_transitions(4, action_scale=0.3)
        for distribution_class in (IndependentNormal, TanhNormal):
            outputs = []
            factory = functools.partial(distribution_class)
            for maker in (distribution_class, factory):
                torch.manual_seed(0)
                loss = with_updater(MPOLoss(make_actor(distribution_class=maker), make_critic()))
                outputs.append(run(loss, data.clone()))
            assert_equal(*outputs)

    def test_distribution_function(self) -> None:
        """A function may make the distribution, for one by torch.distributions."""

        def independent(loc: Tensor, scale: Tensor) -> D.Distribution:
            return D.Independent(D.Normal(loc, scale), 1)

        outputs = []
        for maker in (IndependentNormal, independent):
            torch.manual_seed(0)
            loss = with_updater(MPOLoss(make_actor(distribution_class=maker), make_critic()))
            outputs.append(run(loss, make_transitions(4)))
        assert_equal(*outputs)

    def test_rejects_per_dim_without_spec(self) -> None:
        actor = make_actor(spec=None)
        with pytest.raises(ValueError, match=r"per_dim_constraining=True needs .* action_spec="):
            MPOLoss(actor, make_critic())
        loss = with_updater(MPOLoss(actor, make_critic(), per_dim_constraining=False))
        assert not loss.action_penalization
        assert total_loss(loss(make_transitions(4))).isfinite()
        assert MPOLoss(actor, make_critic(), action_spec=Unbounded((2,))).alpha_mean().shape == (2,)

    @pytest.mark.parametrize("spec", [None, Unbounded((ACTION_DIM,))])
    def test_rejects_penalty_without_bounds(self, spec: Any) -> None:
        with pytest.raises(ValueError, match=r"action_penalization=True needs actions that can"):
            MPOLoss(
                make_actor(spec=spec),
                make_critic(),
                action_penalization=True,
                per_dim_constraining=False,
            )

    def test_rejects_penalty_with_tanh(self) -> None:
        actor = make_actor(distribution_class=TanhNormal)
        with pytest.raises(ValueError, match=r"action_penalization=True needs .* squashed"):
            MPOLoss(actor, make_critic(), action_penalization=True)
        for choice in (None, False):
            assert not MPOLoss(actor, make_critic(), action_penalization=choice).action_penalization

    def test_action_spec(self) -> None:
        """The bounds of a given spec go before those of the actor; batch dimensions are dropped."""
        bounds = torch.tensor([2.0, 3.0])
        for spec in (
            Bounded(-bounds, bounds),
            Bounded(-bounds.expand(4, 2), bounds.expand(4, 2)),
            Composite(action=Bounded(-bounds, bounds)),
        ):
            loss = MPOLoss(make_actor(), make_critic(), action_spec=spec)
            assert torch.equal(loss.policy.low, -bounds)
            assert torch.equal(loss.policy.high, bounds)
            assert loss.alpha_mean().shape == (2,)

    @pytest.mark.parametrize("count", [2, 4])
    def test_rejects_contradicting_ensemble(self, count: int) -> None:
        critics = [make_critic() for _ in range(3)]
        with pytest.raises(ValueError, match=f"num_qvalue_nets={count} .* list of 3 critics"):
            MPOLoss(make_actor(), critics, num_qvalue_nets=count)
        assert MPOLoss(make_actor(), critics, num_qvalue_nets=3).num_qvalue_nets == 3

    def test_rejects_empty_ensemble(self) -> None:
        with pytest.raises(ValueError, match="qvalue_network must not be an empty list"):
            MPOLoss(make_actor(), [])

    @pytest.mark.parametrize("critic", [nn.Linear(5, 1), [nn.Linear(5, 1)], "critic", None])
    def test_rejects_other_critics(self, critic: Any) -> None:
        with pytest.raises(TypeError, match="qvalue_network must be a TensorDictModule or a list"):
            MPOLoss(make_actor(), critic)

    def test_rejects_critic_without_reset(self) -> None:
        critic = make_critic(NoReset())
        with pytest.raises(ValueError, match=r"NoReset.* has no reset_parameters\(\).*list of"):
            MPOLoss(make_actor(), critic, num_qvalue_nets=2)
        MPOLoss(make_actor(), [critic, make_critic(NoReset())])

    def test_rejects_gamma(self) -> None:
        with pytest.raises(TypeError, match="gamma"):
            MPOLoss(make_actor(), make_critic(), gamma=0.99)


# Data --------------------------------------------------------------------------------------------


def remove(*key: str) -> Any:
    return lambda data: data.exclude(key if len(key) > 1 else key[0])


def replace(key: Any, value: Any) -> Any:
    return lambda data: data.set(key, value(data.get(key)))


class TestMPOData:
    """Wrong data is refused at the call, with the name of the entry and what it should be."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (remove("observation"), r"needs the entries \['observation'\]"),
            (remove("action"), r"needs the entries \['action'\]"),
            (remove("next", "observation"), r"needs the entries \[\('next', 'observation'\)\]"),
            (remove("next", "reward"), r"needs the entries \[\('next', 'reward'\)\].*set_keys"),
            (remove("next", "done"), r"needs the entries \[\('next', 'done'\)\]"),
            (remove("next", "terminated"), r"needs the entries \[\('next', 'terminated'\)\]"),
            (remove("action_log_prob"), "'action_log_prob' is missing.* return_log_prob=True"),
            (remove("next"), r"needs the entries .*'reward'"),
            (
                replace(("next", "reward"), lambda x: x.squeeze(-1)),
                r"\('next', 'reward'\) must have shape \(4, 3, 1\) .*got \(4, 3\)",
            ),
            (
                replace(("next", "reward"), lambda x: x.expand(4, 3, 2)),
                r"\('next', 'reward'\) must have shape \(4, 3, 1\) .*got \(4, 3, 2\)",
            ),
            (
                replace(("next", "done"), lambda x: x.squeeze(-1)),
                r"\('next', 'done'\) must have shape \(4, 3, 1\)",
            ),
            (
                replace(("next", "terminated"), lambda x: x.squeeze(-1)),
                r"\('next', 'terminated'\) must have shape \(4, 3, 1\)",
            ),
            (
                replace("action", lambda x: x.long()),
                r"'action' must be a floating-point tensor of shape .*got torch.int64",
            ),
            (
                replace("action", lambda x: x[..., 0]),
                r"'action' must be a floating-point tensor of shape \(4, 3, 'D'\), .*\(4, 3\)",
            ),
        ],
    )
    def test_rejects_data(self, change: Any, message: str) -> None:
        loss = with_updater(MPOLoss(make_actor(), make_critic()).make_value_estimator("retrace"))
        data = change(make_transitions(4, 3))
        for call in (loss, loss.e_step, loss.qvalue_loss, loss.actor_loss):
            with pytest.raises(ValueError, match=message):
                call(data)

    @pytest.mark.parametrize(
        ("distribution_class", "spec"),
        [
            (IndependentNormal, "bounded"),
            (IndependentNormal, Unbounded((ACTION_DIM,))),
            (TanhNormal, "bounded"),
        ],
    )
    @pytest.mark.parametrize("td_est", [None, "retrace"])
    def test_rejects_action_size(self, td_est: Any, distribution_class: Any, spec: Any) -> None:
        actor = make_actor(distribution_class=distribution_class, spec=spec)
        loss = with_updater(MPOLoss(actor, make_critic()).make_value_estimator(td_est))
        data = make_transitions(4, 3)
        data["action"] = torch.zeros(4, 3, ACTION_DIM + 1)
        with pytest.raises(ValueError, match=r"'action' must have 2 dimensions .*got 3"):
            loss(data)

    def test_rejects_spec_of_other_size(self) -> None:
        loss = with_updater(MPOLoss(make_actor(), make_critic(), action_spec=Bounded(-1, 1, (3,))))
        with pytest.raises(ValueError, match="must have 3 dimensions as in action_spec, got 2"):
            loss(make_transitions(4))

    def test_rejects_no_batch(self) -> None:
        loss = with_updater(MPOLoss(make_actor(), make_critic()))
        with pytest.raises(ValueError, match="at least one batch dimension"):
            loss(make_transitions(1)[0])

    @pytest.mark.parametrize("outputs", [0, 2])
    @pytest.mark.parametrize("num_qvalue_nets", [1, 2])
    def test_rejects_critic_output(self, num_qvalue_nets: int, outputs: int) -> None:
        class Output(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(OBSERVATION_DIM, max(outputs, 1))

            def forward(self, observation: Tensor, action: Tensor) -> Tensor:
                value = self.linear(observation)
                return value if outputs else value.squeeze(-1)

        loss = MPOLoss(make_actor(), make_critic(Output()), num_qvalue_nets=num_qvalue_nets)
        message = r"qvalue_network must write 'state_action_value' of shape \(20, 4, 1\), got"
        with pytest.raises(ValueError, match=message):
            with_updater(loss)(make_transitions(4))

    def test_rejects_zero_log_probs(self) -> None:
        loss = with_updater(MPOLoss(make_actor(), make_critic()).make_value_estimator("retrace"))
        data = make_transitions(4, 3)
        data["action_log_prob"][0] = 0.0
        with pytest.raises(ValueError, match="behaviour log-probabilities in 'action_log_prob'"):
            loss(data)

    def test_other_value_key(self) -> None:
        """A critic that writes another entry works once its name is given."""
        critic = make_critic(value_key="q")
        loss = with_updater(MPOLoss(make_actor(), critic))
        loss.set_keys(state_action_value="q")
        assert total_loss(loss(make_transitions(4))).isfinite()

    @pytest.mark.parametrize("td_est", [None, ValueEstimators.TDLambda, "retrace"])
    def test_empty_time(self, td_est: Any) -> None:
        """Sequences of a single step are allowed."""
        loss = with_updater(MPOLoss(make_actor(), make_critic()).make_value_estimator(td_est))
        assert total_loss(loss(make_transitions(4, 1))).isfinite()

    def test_several_observations(self) -> None:
        """Networks may read different entries, and several."""

        class Wide(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mlp = MLP(in_features=6, out_features=1, num_cells=[8])

            def forward(self, pixels: Tensor, vector: Tensor, action: Tensor) -> Tensor:
                return self.mlp(torch.cat([pixels, vector, action], -1))

        network = nn.Sequential(nn.Linear(OBSERVATION_DIM, 4), NormalParamExtractor())
        actor = make_actor(network, observation_key="vector")
        critic = TensorDictModule(
            Wide(), in_keys=["pixels", "vector", "action"], out_keys=["state_action_value"]
        )
        loss = with_updater(MPOLoss(actor, critic, num_qvalue_nets=2, policy_states="both"))
        data = make_transitions(4)
        for td in (data, data["next"]):
            td["vector"], td["pixels"] = td.pop("observation"), torch.randn(4, 1)
        assert set(loss.in_keys) >= {"vector", "pixels", ("next", "vector"), ("next", "pixels")}
        output: TensorDict = loss(data)
        total_loss(output).backward()
        assert all(p.grad.norm() > 0 for p in loss.parameters())
