"""MPOLoss with discrete actions, all of which are weighted, against formulas by enumeration."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.objectives import HardUpdate, ValueEstimators

from minerva_torchrl import MPOLoss
from minerva_torchrl.objectives.functional import solve_temperature
from tests.objectives.base import (
    OBSERVATION_DIM,
    LossTestBase,
    assert_equal,
    gradients,
    make_actor,
    make_critic,
    total_loss,
    with_updater,
)
from tests.objectives.discrete_problem import (
    CRITICS,
    GAMMA,
    KINDS,
    NUM_ACTIONS,
    ActionTable,
    DiscreteProblem,
    make_discrete_actor,
    make_discrete_critic,
    make_discrete_data,
    uniform_log_prob,
)

POLICY_STATES = ["next", "current", "both"]


class TestMPODiscrete(LossTestBase):
    loss_parameters: ClassVar = {
        "loss_qvalue": "qvalue_network_params",
        "loss_actor": "actor_network_params",
        "loss_temperature": "duals.temperature",
        "loss_alpha_policy": "duals.alpha_policy",
    }

    def make_loss(self, **kwargs: Any) -> MPOLoss:
        return DiscreteProblem(**kwargs).loss

    # The whole loss ------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("critic", CRITICS)
    @pytest.mark.parametrize(
        "kwargs",
        [
            *({"policy_states": states} for states in POLICY_STATES),
            *({"num_critics": 2, "qvalue_reduction": r} for r in ("min", "mean")),
            {"num_critics": 2, "deactivate_vmap": True},
            {"epsilon": 0.5, "epsilon_policy": 0.3, "init_alpha_policy": 3.0},
            {"init_temperature": 0.2, "num_action_samples": 1},
        ],
        ids=str,
    )
    def test_numerical_contract(self, kind: str, critic: str, kwargs: dict[str, Any]) -> None:
        """Losses and gradients are those of w ~ pi'(a) exp(Q / eta) over all actions."""
        problem, data = DiscreteProblem(kind, critic, **kwargs), make_discrete_data(kind, 9)
        with self.input_steady_test(data, added=("td_error",)):
            output = problem.loss(data)
        expected = problem.reference(data)
        assert {key for key in output.keys() if key.startswith("loss_")} == set(expected)
        assert sorted(output.keys()) == sorted(problem.loss.out_keys)
        for key, value in expected.items():
            torch.testing.assert_close(output[key], value, msg=lambda m, key=key: f"{key}: {m}")
            assert_equal(gradients(problem.loss, output[key]), gradients(problem.loss, value))

    def test_worked_example(self) -> None:
        """One state, two actions with probabilities 1/4 and 3/4, values log 9 and 0."""
        policy, table = nn.Linear(1, 2).double(), ActionTable(1, 2).double()
        loss = MPOLoss(
            make_discrete_actor("categorical", policy),
            make_discrete_critic("all actions", table),
            init_temperature=1.0,
            init_alpha_policy=2.0,
            epsilon=0.1,
            epsilon_policy=0.01,
        ).double()
        for dual in loss.dual_variables():
            dual.reset_parameters()
        with torch.no_grad():
            policy.bias.copy_(torch.tensor([1.0, 3.0]).double().log())
            table.bias.copy_(torch.tensor([math.log(9), 0.0]))
        with_updater(loss.make_value_estimator(gamma=0.5).double())
        with torch.no_grad():
            policy.bias.zero_()  # the online policy is uniform, the target policy stays
        zero = torch.zeros(1, 1, dtype=torch.float64)
        never = torch.zeros(1, 1, dtype=torch.bool)
        following = {"observation": zero, "reward": zero + 6, "done": never, "terminated": never}
        data = {"observation": zero, "action": torch.zeros(1, dtype=torch.long), "next": following}
        output = loss(TensorDict(data, [1]))
        log = math.log
        kl = 0.25 * log(0.25 / 0.5) + 0.75 * log(0.75 / 0.5)
        expected = {
            "loss_qvalue": (6 + 0.5 * log(9) / 4 - log(9)) ** 2,
            # The weights are 3/4 and 1/4, as 9 / 4 to 3 / 4.
            "loss_temperature": 0.1 + log(3),
            "kl_q_rel": (0.75 * log(3) - 0.25 * log(3)) / 0.1,
            "ess": 1 / (0.75**2 + 0.25**2),
            "q_mean": log(9) / 4,
            "q_min": 0.0,
            "q_max": log(9),
            "cross_entropy": log(2),
            "kl_policy": kl,
            "kl_policy_rel": kl / 0.01,
            "loss_actor": log(2) + 2 * kl,
            "loss_alpha_policy": 2 * (0.01 - kl),
            "entropy": log(2),
        }
        for key, value in expected.items():
            assert output[key].item() == pytest.approx(value, rel=1e-6), key
        # d/d logits: p - w, and alpha (p - p')
        (gradient,) = torch.autograd.grad(output["loss_actor"], policy.bias)
        by_first = (0.5 - 0.75) + 2 * (0.5 - 0.25)
        assert gradient.tolist() == pytest.approx([by_first, -by_first])

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("td_est", [None, ValueEstimators.TDLambda, "retrace"])
    def test_critics_agree(self, td_est: Any, kind: str) -> None:
        """A critic that reads the action and one that values all of them give the same losses."""
        outputs = []
        for critic in CRITICS:
            loss = DiscreteProblem(kind, critic, td_est, num_critics=2).loss
            output = loss(uniform_log_prob(make_discrete_data(kind, 4, 3)))
            outputs.append((output, gradients(loss, total_loss(output))))
        assert_equal(outputs[0][0], outputs[1][0])
        assert_equal(outputs[0][1], outputs[1][1])

    def test_retrace(self) -> None:
        """A policy far from the behaviour cuts the traces; what it would do often does not."""
        data = uniform_log_prob(make_discrete_data("categorical", 4, 3))
        one_step, traced = (
            DiscreteProblem(td_est=td_est).loss(data.clone())["loss_qvalue"]
            for td_est in (None, "retrace")
        )
        assert not torch.isclose(one_step, traced)
        data["action_log_prob"] += 1e4
        cut = DiscreteProblem(td_est="retrace").loss(data)["loss_qvalue"]
        torch.testing.assert_close(cut, one_step)

    @pytest.mark.parametrize("kind", KINDS)
    def test_gradient_isolation(self, kind: str) -> None:
        self.gradient_isolation_test(DiscreteProblem(kind).loss, make_discrete_data(kind, 9))

    # E-step --------------------------------------------------------------------------------------

    def test_e_step(self) -> None:
        """The weights of the actions and the expected value, by torch.distributions."""
        problem, data = DiscreteProblem(), make_discrete_data("categorical", 9)
        trained, metrics = problem.loss.e_step(data)
        e_step = trained["e_step"]
        following = data["next", "observation"]
        q_value = problem.target_tables[0](following)
        prior = problem.target_policy(following).softmax(-1)
        weights = prior * (q_value / problem.loss.temperature()).exp()
        weights = (weights / weights.sum(-1, keepdim=True)).detach()
        torch.testing.assert_close(e_step.statistics["weights"], weights)
        valid = ~data["next", "terminated"].squeeze(-1)
        assert torch.equal(e_step.mask, valid)
        value = (prior * q_value).sum(-1, keepdim=True)
        target = data["next", "reward"] + GAMMA * ~data["next", "terminated"] * value
        torch.testing.assert_close(trained["value_target"], target.detach())
        kl = (weights * (weights / prior).log()).sum(-1)
        expected = kl[valid].mean() / problem.loss.epsilon
        torch.testing.assert_close(metrics["kl_q_rel"], expected.detach())

    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    def test_solve(self, policy_states: Any) -> None:
        """The solved temperature meets the bound over the states that count."""
        for epsilon in (0.05, 0.3):
            kwargs = {"temperature_update": "solve", "policy_states": policy_states}
            loss = DiscreteProblem(epsilon=epsilon, **kwargs).loss
            with torch.no_grad():  # values that differ enough for the bound to be within reach
                loss.target_qvalue_network_params["module", "weight"].mul_(5.0)
            output = loss(make_discrete_data("categorical", 9))
            assert output["kl_q_rel"].item() == pytest.approx(1.0, abs=1e-6)
            assert not output["loss_temperature"].requires_grad
            assert [id(p) for p in loss.dual_parameters()] == [id(loss.alpha_policy.raw)]

    def test_mask(self) -> None:
        """Steps that are left out count nowhere."""
        for policy_states in POLICY_STATES:
            loss = DiscreteProblem(policy_states=policy_states).loss
            data = make_discrete_data("categorical", 8)
            mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
            expected = loss(data[mask])
            data["next", "reward"][~mask] = math.nan
            data["collector", "mask"] = mask
            output = loss(data)
            assert_equal(output, expected)
            assert all(g.isfinite().all() for g in gradients(loss, total_loss(output)).values())

    def test_impossible_actions(self) -> None:
        """Actions that the policy can't take have no weight, whatever their value."""

        class Possible(nn.Linear):
            def forward(self, observation: Tensor) -> Tensor:
                never = torch.arange(NUM_ACTIONS) == 2
                return super().forward(observation).masked_fill(never, -math.inf)

        class Rubbish(ActionTable):
            def forward(self, observation: Tensor) -> Tensor:
                never = torch.arange(NUM_ACTIONS) == 2
                return super().forward(observation).masked_fill(never, math.nan)

        torch.manual_seed(0)
        actor = make_discrete_actor("categorical", Possible(OBSERVATION_DIM, NUM_ACTIONS).double())
        table = Rubbish(OBSERVATION_DIM, NUM_ACTIONS).double()
        critic = make_discrete_critic("all actions", table)
        loss = with_updater(MPOLoss(actor, critic)).double()
        data = make_discrete_data("categorical", 9)
        data["action"] %= 2
        trained, _ = loss.e_step(data)
        assert (trained["e_step"].statistics["weights"][..., 2] == 0).all()
        output = loss(data)
        extremes = ("q_min", "q_max")  # of all actions, this one too
        assert output.exclude(*extremes).isfinite().all()
        assert all(g.isfinite().all() for g in gradients(loss, total_loss(output)).values())

    # In use --------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("kind", "critic"), [*zip(KINDS, CRITICS, strict=True)])
    def test_bandit(self, kind: str, critic: str) -> None:
        """From a uniform policy the best one within the bound is the softmax of the values."""
        torch.manual_seed(0)
        table = torch.tensor([1.0, 0.0, -1.0, 0.5])
        policy, values = nn.Linear(1, NUM_ACTIONS), ActionTable(1, NUM_ACTIONS)
        for parameter in policy.parameters():
            nn.init.zeros_(parameter)
        loss = with_updater(
            MPOLoss(
                make_discrete_actor(kind, policy),
                make_discrete_critic(critic, values),
                policy_states="current",
                epsilon=0.2,
                epsilon_policy=1.0,  # out of reach, so that its multiplier vanishes
                init_alpha_policy=1e-3,
                delay_qvalue=False,
            )
        )
        optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
        loss.project_duals_after(optimizer)
        ends = torch.ones(16, 1, dtype=torch.bool)
        state = torch.ones(16, 1)
        for _ in range(300):
            index = torch.randint(NUM_ACTIONS, (16,))
            action = nn.functional.one_hot(index, NUM_ACTIONS) if kind == "one-hot" else index
            following = {"observation": state, "reward": table[index].unsqueeze(-1)}
            following |= {"done": ends, "terminated": ends}
            data = {"observation": state, "action": action, "next": following}
            optimizer.zero_grad()
            total_loss(loss(TensorDict(data, [16]))).backward()
            optimizer.step()
        temperature = solve_temperature(table, 0.2)
        torch.testing.assert_close(loss.temperature().detach(), temperature, rtol=0.05, atol=0)
        probability = policy(state[0]).softmax(-1).detach()
        expected = (table / temperature).softmax(-1)
        torch.testing.assert_close(probability, expected, rtol=0, atol=0.02)

    @pytest.mark.parametrize("kind", KINDS)
    def test_state_dict(self, kind: str) -> None:
        losses = [DiscreteProblem(kind, seed=seed).loss for seed in (0, 1)]
        self.state_dict_test(*losses, make_discrete_data(kind, 9))

    def test_targets(self) -> None:
        """The prior is the target policy's: it follows the online one as the updater says."""
        loss, data = DiscreteProblem().loss, make_discrete_data("categorical", 9)
        updater = HardUpdate(loss, value_network_update_interval=1)
        assert loss(data)["kl_policy"].item() == pytest.approx(0.0, abs=1e-12)
        with torch.no_grad():
            loss.actor_network_params["module", "0", "module", "bias"].add_(torch.arange(4.0))
        assert loss(data)["kl_policy"] > 0.1
        updater.step()
        updater.step()
        assert loss(data)["kl_policy"].item() == pytest.approx(0.0, abs=1e-12)

    # What is refused -----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            *(
                ({name: 0.1}, f"^{name} does not apply .* constraints are policy; got 0.1")
                for name in ("epsilon_mean", "epsilon_stddev", "init_alpha_mean")
            ),
            ({"init_alpha_stddev": 1.0}, "^init_alpha_stddev does not apply"),
            ({"per_dim_constraining": True}, "^per_dim_constraining=True is for Gaussian policies"),
            ({"action_penalization": True}, "^action_penalization=True needs .* discrete policy"),
            ({"epsilon_policy": 0.0}, "^epsilon_policy must be positive and finite, got 0.0"),
            ({"init_alpha_policy": -1.0}, "^init_alpha_policy must be positive and finite, got -1"),
        ],
        ids=str,
    )
    def test_rejects_arguments(self, kwargs: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DiscreteProblem(**kwargs)

    @pytest.mark.parametrize("name", ["epsilon_policy", "init_alpha_policy"])
    def test_rejects_arguments_for_gaussian(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"^{name} does not apply .* mean, stddev; got 0.1"):
            MPOLoss(make_actor(), make_critic(), **{name: 0.1}, action_spec=Bounded(-1, 1, (2,)))

    @pytest.mark.parametrize(
        ("kind", "shape", "message"),
        [
            ("categorical", (9, 1), r"'action' is an index and must have shape \(9,\), got \(9, 1"),
            ("one-hot", (9,), r"'action' is one-hot and must have shape \(9, 'A'\), got \(9,\)"),
        ],
    )
    def test_rejects_actions(self, kind: str, shape: tuple[int, ...], message: str) -> None:
        loss, data = DiscreteProblem(kind).loss, make_discrete_data(kind, 9)
        data["action"] = torch.zeros(shape, dtype=torch.long)
        with pytest.raises(ValueError, match=message):
            loss(data)
