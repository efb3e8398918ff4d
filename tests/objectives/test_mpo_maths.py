"""The numbers of MPOLoss against formulas written out with torch.distributions."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Bounded, Unbounded
from torchrl.modules import ProbabilisticActor, TanhNormal

from minerva_torchrl import MPOLoss
from tests.objectives.base import (
    ACTION_DIM,
    InjectedNoise,
    assert_equal,
    gradients,
    make_actor,
    make_critic,
    run,
    total_loss,
    with_updater,
)
from tests.objectives.mpo_problem import (
    DISTANCES,
    GAMMA,
    NUM_SAMPLES,
    Critic,
    Policy,
    Problem,
    make_data,
    make_noise,
)

POLICY_STATES = ["next", "current", "both"]


# The whole loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        *({"policy_states": s, "per_dim_constraining": c} for s in POLICY_STATES for c in (1, 0)),
        *({"policy_states": s, "action_penalization": False} for s in POLICY_STATES),
        *({"num_critics": 2, "qvalue_reduction": r} for r in ("min", "mean")),
        *({"num_critics": 2, "loss_function": f} for f in DISTANCES),
        {"epsilon": 0.5, "epsilon_mean": 0.3, "epsilon_stddev": 0.2, "epsilon_penalty": 0.1},
        {"init_temperature": 0.1, "init_alpha_mean": 3.0, "init_penalty_temperature": 0.4},
    ],
    ids=str,
)
def test_mpo_numerical_contract(kwargs: dict[str, Any]) -> None:
    """Losses and gradients equal those of the formulas, by torch.distributions and autograd."""
    problem = Problem(**kwargs)
    loss, data, noise = problem.loss, make_data(9), make_noise(2, NUM_SAMPLES, 9)
    draws = noise[:1] if loss.policy_states == "next" else noise
    loss.policy._draw_noise = InjectedNoise(*draws)
    output = loss(data)
    expected = problem.reference(data, noise)
    assert {key for key in output.keys() if key.startswith("loss_")} == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(output[key], value, msg=lambda m, key=key: f"{key}: {m}")
        assert_equal(gradients(loss, output[key]), gradients(loss, value))


def test_mpo_worked_example() -> None:
    """One state, two samples, one action dimension: every number by hand."""

    class Constant(nn.Module):
        def __init__(self, *values: float) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.tensor(values, dtype=torch.float64))

        def forward(self, observation: Tensor) -> Tensor:
            return tuple(v.expand(*observation.shape[:-1], 1) for v in self.values)

    class Identity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, observation: Tensor, action: Tensor) -> Tensor:
            return self.gain * action

    policy, critic = Constant(0.5, 1.0), Identity()
    actor = make_actor(policy, spec=Bounded(-1.0, 1.0, (1,)))
    loss = MPOLoss(
        actor,
        make_critic(critic),
        num_action_samples=2,
        init_temperature=2.0,
        init_alpha_mean=3.0,
        init_alpha_stddev=5.0,
        init_penalty_temperature=0.5,
        epsilon=0.1,
        epsilon_mean=0.01,
        epsilon_stddev=0.001,
        epsilon_penalty=0.2,
    ).double()
    for dual in loss.dual_variables():
        dual.reset_parameters()
    with_updater(loss.make_value_estimator(gamma=0.5).double())
    with torch.no_grad():
        policy.values.copy_(torch.tensor([0.7, 2.0]))  # the target policy stays at (0.5, 1)
        loss.qvalue_network_params["module", "gain"].fill_(4.0)  # the target critic at gain 1
    data = TensorDict(
        {
            "observation": torch.zeros(1, 1, dtype=torch.float64),
            "action": torch.full((1, 1), -0.25, dtype=torch.float64),
            "next": {
                "observation": torch.zeros(1, 1, dtype=torch.float64),
                "reward": torch.full((1, 1), 6.0, dtype=torch.float64),
                "done": torch.zeros(1, 1, dtype=torch.bool),
                "terminated": torch.zeros(1, 1, dtype=torch.bool),
            },
        },
        [1],
    )
    # Samples 2.0 and 0.0, seen by the critic as 1.0 and 0.0.
    loss.policy._draw_noise = InjectedNoise(torch.tensor([[[1.5]], [[-0.5]]]))
    output = loss(data)

    exp, log = math.exp, math.log
    # Q = (1, 0): expected value 0.5, target 6 + 0.5 * 0.5, prediction 4 * -0.25.
    expected = {"target_value": 6.25, "pred_value": -1.0, "loss_qvalue": 7.25**2}
    expected |= {"q_min": 0.0, "q_max": 1.0, "q_mean": 0.5}
    # Weights softmax(1/2, 0) and, for the distance 1 of the first sample from the bounds,
    # softmax(-1 / 0.5, 0).
    w = exp(0.5) / (exp(0.5) + 1)
    p = exp(-2) / (exp(-2) + 1)
    expected["loss_temperature"] = 2 * (0.1 + log((exp(0.5) + 1) / 2))
    expected["loss_penalty_temperature"] = 0.5 * (0.2 + log((exp(-2) + 1) / 2))
    expected["weight_entropy"] = -w * log(w) - (1 - w) * log(1 - w)
    expected["kl_q_rel"] = (log(2) - expected["weight_entropy"]) / 0.1
    expected["ess"] = 1 / (w**2 + (1 - w) ** 2)
    # KL(N(0.5, 1) || N(0.7, 1)) and KL(N(0.5, 1) || N(0.5, 2)).
    kl_mean = 0.2**2 / 2
    kl_stddev = 0.5 * (1 / 4 - 1) + log(2)
    expected |= {"kl_mean": kl_mean, "kl_stddev": kl_stddev}
    expected |= {"kl_mean_rel": kl_mean / 0.01, "kl_stddev_rel": kl_stddev / 0.001}
    expected["loss_alpha_mean"] = 3 * (0.01 - kl_mean)
    expected["loss_alpha_stddev"] = 5 * (0.001 - kl_stddev)

    # Likelihoods of 2.0 and 0.0 under N(0.7, 1) and N(0.5, 2), with weights that sum to two.
    def likelihood(x: float, loc: float, scale: float) -> float:
        return -0.5 * ((x - loc) / scale) ** 2 - log(scale) - 0.5 * log(2 * math.pi)

    first, second = w + p, 2 - w - p
    expected["cross_entropy"] = -first * (likelihood(2, 0.7, 1) + likelihood(2, 0.5, 2))
    expected["cross_entropy"] -= second * (likelihood(0, 0.7, 1) + likelihood(0, 0.5, 2))
    expected["loss_actor"] = expected["cross_entropy"] + 3 * kl_mean + 5 * kl_stddev
    for key, value in expected.items():
        assert output[key].item() == pytest.approx(value, rel=1e-6), key
    assert data["td_error"].item() == pytest.approx(7.25)

    # d/d loc: -sum w (x - loc) / sigma'^2 + alpha (loc - loc') / sigma'^2
    # d/d scale: -sum w ((x - loc')^2 / sigma^3 - 1 / sigma) + alpha (1 / sigma - 1 / sigma^3)
    by_loc = -(first * (2 - 0.7) + second * (0 - 0.7)) + 3 * 0.2
    by_scale = -(first * (1.5**2 / 8 - 0.5) + second * (0.5**2 / 8 - 0.5)) + 5 * (1 / 2 - 1 / 8)
    (gradient,) = torch.autograd.grad(output["loss_actor"], policy.values)
    assert gradient.tolist() == pytest.approx([by_loc, by_scale])
    gain = loss.qvalue_network_params["module", "gain"]
    (gradient,) = torch.autograd.grad(output["loss_qvalue"], gain)
    assert gradient.item() == pytest.approx(2 * -7.25 * -0.25)


# E-step ------------------------------------------------------------------------------------------


class TestMPOEStep:
    @staticmethod
    def problem_with_values(offset: float, **kwargs: Any) -> Problem:
        """The target critic's values are shifted by a constant."""
        problem = Problem(**kwargs)
        with torch.no_grad():
            problem.loss.target_qvalue_network_params["module", "linear", "bias"].add_(offset)
        return problem

    def test_mpo_shift_of_values(self) -> None:
        """A constant added to the values leaves the weights and the temperature's gradient."""
        data, noise = make_data(9), make_noise(1, NUM_SAMPLES, 9)
        results = []
        for offset in (0.0, 100.0):
            loss = self.problem_with_values(offset).loss
            loss.policy._draw_noise = InjectedNoise(*noise)
            output = loss(data)
            gradient = gradients(loss, output["loss_temperature"])["duals.temperature.raw"]
            results.append((output["loss_actor"], gradient, output["ess"], output["q_mean"]))
        assert results[1][3] - results[0][3] == pytest.approx(100.0)
        for before, after in zip(results[0][:3], results[1][:3], strict=True):
            torch.testing.assert_close(before, after)

    def test_mpo_constant_values(self) -> None:
        """Values that do not depend on the action make uniform weights; then dL/deta = epsilon."""
        loss = Problem().loss
        with torch.no_grad():
            for key in (("module", "linear", "weight"), ("module", "curvature")):
                loss.target_qvalue_network_params[key].zero_()
        output = loss(make_data(9))
        assert output["ess"].item() == pytest.approx(NUM_SAMPLES)
        assert output["kl_q_rel"].item() == pytest.approx(0.0, abs=1e-12)
        gradient = gradients(loss, output["loss_temperature"])["duals.temperature.raw"]
        slope = torch.sigmoid(loss.temperature.raw)  # of softplus
        assert (gradient / slope).item() == pytest.approx(0.1)

    def test_mpo_temperature_gradient(self) -> None:
        """dL/deta = epsilon - KL(w || uniform)."""
        loss = Problem(init_temperature=0.2).loss
        output = loss(make_data(9))
        gradient = gradients(loss, output["loss_temperature"])["duals.temperature.raw"]
        slope = torch.sigmoid(loss.temperature.raw)
        expected = 0.1 * (1 - output["kl_q_rel"])
        torch.testing.assert_close(gradient / slope, expected)

    def test_mpo_out_of_bounds(self) -> None:
        """The share of the online policy's means, over valid states and dimensions."""
        problem, data = Problem(), make_data(9)
        data["next", "observation"] *= 5
        loc, _ = problem.policy(data["next", "observation"])
        outside = (loc.abs() > 1).double().mean(-1)
        valid = ~data["next", "terminated"].squeeze(-1)
        share = problem.loss(data)["out_of_bounds"]
        torch.testing.assert_close(share, outside[valid].mean().to(share))
        assert 0 < share < 1
        without = Problem(action_penalization=False).loss(data)
        assert without["out_of_bounds"] == share

    def test_mpo_penalty_inside(self) -> None:
        """When every sample is inside the bounds the penalty's weights are uniform."""
        problem = Problem()
        noise = make_noise(1, NUM_SAMPLES, 9)
        old_loc, old_scale = problem.target_policy(make_data(9)["next", "observation"])
        inside = ((0.9 * torch.tanh(noise) - old_loc) / old_scale).detach()
        outputs = []
        for penalty in (True, False):
            loss = Problem(action_penalization=penalty).loss
            loss.policy._draw_noise = InjectedNoise(*inside)
            outputs.append(loss(make_data(9)))
        with_penalty, without = outputs
        assert with_penalty["kl_penalty_rel"] == pytest.approx(0.0, abs=1e-9)
        assert "kl_penalty_rel" not in without.keys()
        # What the penalty adds to the cross-entropy is that of uniform weights.
        data = make_data(9)
        valid = ~data["next", "terminated"].squeeze(-1)
        loc, scale = problem.policy(data["next", "observation"])
        action = old_loc + old_scale * inside[0]
        uniform = -sum(
            D.Normal(*parameters).log_prob(action).sum(-1).mean(0)
            for parameters in ((loc, old_scale), (old_loc, scale))
        )
        added = with_penalty["loss_actor"] - without["loss_actor"]
        torch.testing.assert_close(added, uniform[valid].mean())

    def test_mpo_penalty_outside(self) -> None:
        """Samples further outside get less weight: the mean is pulled back inside."""
        problem = Problem(epsilon_penalty=1.0, init_penalty_temperature=0.1)
        data = make_data(9)
        first_moment = {}
        for penalty in (True, False):
            loss = Problem(
                action_penalization=penalty, init_penalty_temperature=0.1, init_temperature=1e6
            ).loss
            # Half of the samples far to the right, half in the middle.
            old_loc, old_scale = problem.target_policy(data["next", "observation"])
            targets = torch.tensor([3.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.0])
            noise = (targets.view(-1, 1, 1) - old_loc) / old_scale
            loss.policy._draw_noise = InjectedNoise(noise.detach())
            moments = loss.e_step(data)[0]["e_step"].statistics
            first_moment[penalty] = old_loc + old_scale * moments["first"] / moments["total"]
        assert (first_moment[False] - 9 / 7).abs().max() < 1e-3
        assert (first_moment[True] - 9 / 14).abs().max() < 1e-3

    def test_mpo_num_value_samples(self) -> None:
        data = make_data(9)
        noise, few = make_noise(NUM_SAMPLES, 9), make_noise(4, 9)
        for policy_states, with_value, without in (
            ("next", [few, noise], [noise]),
            ("current", [few, noise], [noise, noise]),
            ("both", [few, noise, noise], [noise, noise]),
        ):
            for num_value_samples, draws in ((4, with_value), (None, without)):
                problem = Problem(policy_states=policy_states, num_value_samples=num_value_samples)
                problem.loss.policy._draw_noise = InjectedNoise(*draws)
                output = problem.loss(data)
                assert not problem.loss.policy._draw_noise.draws, "every draw is used"
                # The critic's target uses the first draw, the policy the others.
                problem.loss.policy._draw_noise = InjectedNoise(*draws)
                target = problem.loss.e_step(data)[0]["value_target"]
                next_q_value, _ = problem.at_states(data["next", "observation"], draws[0])
                bootstrap = next_q_value.mean(0).unsqueeze(-1) * ~data["next", "terminated"]
                expected = data["next", "reward"] + GAMMA * bootstrap
                torch.testing.assert_close(target, expected)
                reference = problem.reference(data, torch.stack([noise, noise]))
                torch.testing.assert_close(output["loss_actor"], reference["loss_actor"])

    def test_mpo_qvalue_loss_alone(self) -> None:
        """The critic's loss by itself draws as many samples as the whole loss would."""
        for kwargs, count in (({}, NUM_SAMPLES), ({"num_value_samples": 4}, 4)):
            problem, data = Problem(**kwargs), make_data(9)
            noise = make_noise(1, count, 9)
            problem.loss.policy._draw_noise = InjectedNoise(*noise)
            loss_qvalue, metrics = problem.loss.qvalue_loss(data)
            expected = problem.reference(data, noise)["loss_qvalue"]
            torch.testing.assert_close(loss_qvalue, expected)
            torch.testing.assert_close(metrics["td_error"], data["td_error"])

    def test_mpo_solve(self) -> None:
        """A solved temperature meets the bound and takes no gradient."""
        for epsilon, epsilon_penalty in ((0.1, 1e-3), (0.5, 0.05)):
            loss = Problem(
                temperature_update="solve",
                epsilon=epsilon,
                epsilon_penalty=epsilon_penalty,
                policy_states="both",
            ).loss
            before = loss.temperature().item()
            output = loss(make_data(9))
            assert output["kl_q_rel"].item() == pytest.approx(1.0, abs=1e-6)
            assert output["kl_penalty_rel"].item() == pytest.approx(1.0, abs=1e-6)
            assert output["temperature"] != before
            assert not output["loss_temperature"].requires_grad
            total_loss(output).backward()
            assert loss.temperature.raw.grad is None
            assert loss.penalty_temperature.raw.grad is None
            parameters = loss.dual_parameters()
            assert [id(p) for p in parameters] == [
                id(loss.alpha_mean.raw),
                id(loss.alpha_stddev.raw),
            ]

    def test_mpo_solve_leaves_out_terminal_states(self) -> None:
        loss, data = Problem(temperature_update="solve").loss, make_data(9)
        expected = run(loss, data)["temperature"]
        data["next", "observation"][data["next", "terminated"].squeeze(-1)] += 10.0
        torch.testing.assert_close(run(loss, data)["temperature"], expected)


# M-step ------------------------------------------------------------------------------------------


class TestMPOMStep:
    @pytest.mark.parametrize("name", ["mean", "stddev"])
    @pytest.mark.parametrize("per_dim", [True, False])
    def test_mpo_alpha_gradient_sign(self, per_dim: bool, name: str) -> None:
        """A multiplier falls while its divergence is below the bound, and rises above it."""
        for bound, sign in ((1e3, 1), (1e-9, -1)):
            loss = Problem(per_dim_constraining=per_dim, **{f"epsilon_{name}": bound}).loss
            gradient = gradients(loss, loss(make_data(9))[f"loss_alpha_{name}"])
            gradient = gradient[f"duals.alpha_{name}.raw"]
            assert gradient.shape == ((ACTION_DIM,) if per_dim else ())
            assert (gradient.sign() == sign).all()

    def test_mpo_per_dim(self) -> None:
        """The divergences add up to the joint one, and the constraint sees each or their sum."""
        outputs = {}
        for per_dim in (True, False):
            problem = Problem(per_dim_constraining=per_dim, action_penalization=False)
            problem.loss.policy._draw_noise = InjectedNoise(*make_noise(1, NUM_SAMPLES, 9))
            outputs[per_dim] = problem.loss(make_data(9))
        for name in ("kl_mean", "kl_stddev"):
            torch.testing.assert_close(outputs[True][name] * ACTION_DIM, outputs[False][name])
        assert_equal(
            outputs[True].select("cross_entropy", "kl_q_rel"),
            outputs[False].select("cross_entropy", "kl_q_rel"),
        )

    def test_mpo_no_movement(self) -> None:
        """Online policy equal to the target: the divergences and their gradients are zero."""
        problem = Problem(action_penalization=False, init_alpha_mean=1e4, init_alpha_stddev=1e4)
        problem.policy.load_state_dict(problem.target_policy.state_dict())
        loss = problem.loss
        output = run(loss, make_data(9))
        assert output["kl_mean"] == 0
        assert output["kl_stddev"] == 0
        steep = gradients(loss, output["loss_actor"])
        with torch.no_grad():
            loss.alpha_mean.raw.fill_(1.0)
            loss.alpha_stddev.raw.fill_(1.0)
        assert_equal(gradients(loss, run(loss, make_data(9))["loss_actor"]), steep)

    @pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 3.0)])
    @pytest.mark.parametrize("td_est", [None, "retrace"])
    def test_mpo_tanh(self, td_est: Any, low: float, high: float) -> None:
        """TanhNormal is scored before the tanh: as a Gaussian whose critic applies the tanh."""

        def squash(action: Tensor) -> Tensor:
            return low + (high - low) * (action.tanh() + 1) / 2

        class Squashing(Critic):
            def forward(self, observation: Tensor, action: Tensor) -> Tensor:
                return super().forward(observation, squash(action))

        torch.manual_seed(0)
        policy, critic, squashing = Policy(), Critic(), Squashing()
        squashing.load_state_dict(critic.state_dict())
        spec = Bounded(low, high, (ACTION_DIM,), dtype=torch.float64)
        squashed_actor = ProbabilisticActor(
            TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
            in_keys=["loc", "scale"],
            spec=spec,
            distribution_class=TanhNormal,
            distribution_kwargs={"low": low, "high": high},
            return_log_prob=True,
        )
        plain_actor = make_actor(copy.deepcopy(policy), spec=Unbounded((ACTION_DIM,)))
        losses = [
            with_updater(
                MPOLoss(actor, make_critic(network)).make_value_estimator(td_est, gamma=GAMMA)
            ).double()
            for actor, network in ((squashed_actor, critic), (plain_actor, squashing))
        ]
        assert not any(loss.action_penalization for loss in losses)
        for loss in losses:
            torch.manual_seed(3)
            with torch.no_grad():
                for parameter in loss.actor_network_params.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))

        plain = make_data(4, 3)
        # The behaviour policy: N(0, 1.5) before the tanh.
        scale = torch.full((ACTION_DIM,), 1.5, dtype=torch.float64)
        plain["action_log_prob"] = D.Normal(0.0, scale).log_prob(plain["action"]).sum(-1)
        squashed = plain.clone()
        squashed["action"] = squash(plain["action"])
        behaviour = TanhNormal(torch.zeros_like(scale), scale, low=low, high=high)
        squashed["action_log_prob"] = behaviour.log_prob(squashed["action"])
        outputs = [run(loss, data) for loss, data in zip(losses, (squashed, plain), strict=True)]
        # What depends on the action itself, not on its distribution, is squashed.
        of_actions = ("mean_abs_action", "saturation")
        assert_equal(*(output.exclude(*of_actions) for output in outputs), rtol=1e-5)
        assert_equal(
            *(gradients(loss, total_loss(o)) for loss, o in zip(losses, outputs, strict=True)),
            rtol=1e-5,
        )
