"""The numbers of VMPOLoss against formulas written out with torch.distributions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Unbounded

from minerva_torchrl import VMPOLoss
from tests.objectives.base import ACTION_DIM, OBSERVATION_DIM, assert_equal, gradients, total_loss
from tests.objectives.vmpo_problem import (
    CONTINUOUS,
    CRITIC_DISTANCES,
    DISCRETE,
    KINDS,
    NUM_ACTIONS,
    Constant,
    Problem,
    column,
    constant_loss,
    losses_of,
    make_actor,
    make_critic,
    make_loss,
    make_rollout,
    parameter_names,
    weights_of,
    with_advantage,
    with_weights,
    worked_data,
)

UPDATES = ["solve", "gradient"]


# The whole loss ----------------------------------------------------------------------------------


CASES: list[tuple[list[str], tuple[str, ...], dict[str, Any]]] = [
    *((KINDS, (), {"temperature_update": u}) for u in UPDATES),
    *((KINDS, ("restarting_weight",), {"temperature_update": u}) for u in UPDATES),
    *((KINDS, ("importance_weight",), {"temperature_update": u}) for u in UPDATES),
    (KINDS, ("restarting_weight", "importance_weight"), {"kl_samples": "selected"}),
    *((KINDS, (), {"top_k_fraction": f, "kl_samples": "selected"}) for f in (0.1, 0.7, 1.0)),
    (KINDS, (), {"normalize_advantage": False}),
    (KINDS, (), {"normalize_advantage": False, "temperature_update": "gradient"}),
    (KINDS, (), {"init_temperature": 0.3, "temperature_update": "gradient"}),
    *((KINDS[:1], (), {"loss_critic_type": t, "critic_coeff": 2.0}) for t in CRITIC_DISTANCES),
    (CONTINUOUS, (), {"per_dim_constraining": True, "kl_samples": "selected"}),
    (CONTINUOUS, (), {"epsilon": 0.3, "epsilon_mean": 0.2, "init_alpha_stddev": 3.0}),
    (DISCRETE, (), {"epsilon": 0.02, "epsilon_policy": 0.2, "init_alpha_policy": 0.5}),
]


@pytest.mark.parametrize(
    ("kind", "weights", "kwargs"), [(k, w, kw) for kinds, w, kw in CASES for k in kinds], ids=str
)
def test_vmpo_numerical_contract(
    kind: str, weights: tuple[str, ...], kwargs: dict[str, Any]
) -> None:
    """Losses, weights and gradients equal those of the formulas, by torch.distributions."""
    problem = Problem(kind, **kwargs)
    data = with_weights(problem.data(), *weights)
    expected = problem.reference(data)
    e_step = problem.loss.e_step(data)[0]["e_step"]
    temperature = problem.temperature(data)
    weights = e_step.policy_weight.flatten() / data.numel()
    torch.testing.assert_close(weights, problem.weigh(data, temperature))
    torch.testing.assert_close(e_step.selected.flatten(), problem.select(data)[1])
    output = problem.loss(data)
    assert set(losses_of(output)) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(output[key], value, msg=lambda m, key=key: f"{key}: {m}")
        if value.requires_grad:
            actual = gradients(problem.loss, output[key])
            assert_equal(actual, gradients(problem.loss, value), atol=1e-8)
    torch.testing.assert_close(output["temperature"], temperature.detach())


def test_vmpo_worked_example_continuous() -> None:
    """Four samples of one dimension: every number by hand."""
    policy = Constant(0.5, 2.0)
    settings = {"init_alpha_mean": 3.0, "init_alpha_stddev": 5.0}
    settings |= {"epsilon_mean": 0.01, "epsilon_stddev": 0.001}
    loss = constant_loss("normal", policy, **settings)
    data = worked_data(action=column(9, 1, -1, 9), loc=column(0, 0, 0, 1), scale=column(1, 1, 1, 2))
    output = loss(data)
    exp, log = math.exp, math.log
    w = exp(2) / (exp(2) + exp(1))  # 4 / 2 and 2 / 2
    assert weights_of(loss, data).tolist() == pytest.approx([0, w, 1 - w, 0])

    def nll(x: float) -> float:
        return 0.5 * ((x - 0.5) / 2) ** 2 + log(2) + 0.5 * log(2 * math.pi)

    # KL(N(m, s) || N(0.5, s)) and KL(N(m, s) || N(m, 2)) for (m, s) = (0, 1) three times and (1, 2)
    kl_mean = (3 * 0.5**2 / 2 + (0.5 / 2) ** 2 / 2) / 4
    kl_stddev = 3 * (0.5 * (1 / 4 - 1) + log(2)) / 4
    expected = {
        "cross_entropy": w * nll(1) + (1 - w) * nll(-1),
        "kl_mean": kl_mean,
        "kl_stddev": kl_stddev,
        "kl_mean_selected": 0.5**2 / 2,
        "kl_stddev_selected": 0.5 * (1 / 4 - 1) + log(2),
        "loss_alpha_mean": 3 * (0.01 - kl_mean),
        "loss_alpha_stddev": 5 * (0.001 - kl_stddev),
        "loss_temperature": 2 * (0.3 + log((exp(2) + exp(1)) / 2)),
        "loss_critic": 0.5 * (1 + 0 + 1 + 16) / 4,
        "penalty_mean": 3 * kl_mean,
        "penalty_stddev": 5 * kl_stddev,
        "ess": 1 / (w**2 + (1 - w) ** 2),
        "entropy": 0.5 + 0.5 * log(2 * math.pi) + log(2),
        "mean_abs_action": 0.5,
        "stddev_min": 2.0,
        "advantage_threshold": 2.0,
        "selected_fraction": 0.5,
    }
    expected["loss_actor"] = expected["cross_entropy"] + 3 * kl_mean + 5 * kl_stddev
    expected["kl_q_rel"] = (log(2) + w * log(w) + (1 - w) * log(1 - w)) / 0.3
    for key, value in expected.items():
        assert output[key].item() == pytest.approx(value, rel=1e-6), key

    # d/d loc: -sum psi (x - loc) / sigma^2 + alpha mean (loc - m) / s^2
    # d/d scale: -sum psi ((x - loc)^2 / sigma^3 - 1 / sigma) + alpha mean (1 / sigma - s^2/sigma^3)
    by_loc = -(w * 0.5 - (1 - w) * 1.5) / 4 + 3 * (3 * 0.5 - 0.5 / 4) / 4
    by_scale = -(w * 0.25 + (1 - w) * 2.25) / 8 + 0.5 + 5 * 3 * (1 / 2 - 1 / 8) / 4
    (gradient,) = torch.autograd.grad(output["loss_actor"], policy.values)
    assert gradient.tolist() == pytest.approx([by_loc, by_scale])


@pytest.mark.parametrize("kind", DISCRETE)
def test_vmpo_worked_example_discrete(kind: str) -> None:
    """Two actions with probabilities 1/4 and 3/4, which were 1/2 each."""
    policy = Constant(0.0, math.log(3), together=True)
    loss = constant_loss(kind, policy, init_alpha_policy=3.0, epsilon_policy=0.01)
    action = torch.tensor([0, 0, 1, 1])
    action = nn.functional.one_hot(action) if kind == "one-hot" else action
    logits = torch.full((4, 2), 7.0, dtype=torch.float64)
    output = loss(worked_data(action=action, logits=logits))
    w = math.e / (math.e + 1)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    nll = -w * math.log(1 / 4) - (1 - w) * math.log(3 / 4)
    expected = {"kl_policy": kl, "cross_entropy": nll, "loss_actor": nll + 3 * kl}
    expected |= {"loss_alpha_policy": 3 * (0.01 - kl), "alpha_policy": 3.0}
    expected["entropy"] = -math.log(1 / 4) / 4 - math.log(3 / 4) * 3 / 4
    for key, value in expected.items():
        assert output[key].item() == pytest.approx(value, rel=1e-6), key
    # d/d logits: p - psi, and alpha (p - p')
    by_first = (1 / 4 - w) + 3 * (1 / 4 - 1 / 2)
    (gradient,) = torch.autograd.grad(output["loss_actor"], policy.values)
    assert gradient.tolist() == pytest.approx([by_first, -by_first])


# E-step ------------------------------------------------------------------------------------------


class TestVMPOEStep:
    @pytest.mark.parametrize("temperature_update", UPDATES)
    @pytest.mark.parametrize("fraction", [0.01, 0.33, 0.5, 0.7, 1.0])
    def test_weights(self, fraction: float, temperature_update: Any) -> None:
        """They sum to one over the best floor(fraction n) samples, at least one, and rise."""
        loss = make_loss(temperature_update=temperature_update, top_k_fraction=fraction)
        data = with_advantage(make_rollout("normal", 3, 5))
        weights, selected = weights_of(loss, data), loss.e_step(data)[0]["e_step"].selected
        count = max(1, math.floor(fraction * 15))
        best = data["advantage"].flatten().argsort(descending=True)
        in_order = weights.flatten()[best]
        assert weights.shape == (3, 5)
        assert not weights.requires_grad
        assert in_order.sum().item() == pytest.approx(1.0)
        assert (in_order[:count] > 0).all()
        assert (in_order[count:] == 0).all()
        assert (in_order.diff() <= 0).all()
        assert torch.equal(selected, weights > 0)
        assert loss(data)["selected_fraction"].item() == pytest.approx(count / 15)

    @pytest.mark.parametrize("temperature_update", UPDATES)
    def test_ties(self, temperature_update: Any) -> None:
        """Samples tied with the last one kept are kept too, with the same weight."""
        loss = make_loss(temperature_update=temperature_update)
        data = with_advantage(make_rollout("normal", 6))
        data["advantage"] = column(3, 1, 1, 1, 1, 0).float()
        weights = weights_of(loss, data)
        assert (weights > 0).tolist() == [True] * 5 + [False]
        assert len(set(weights[1:5].tolist())) == 1
        assert weights.sum().item() == pytest.approx(1.0)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("temperature_update", UPDATES)
    def test_equal_advantages(self, temperature_update: Any, kind: str) -> None:
        """Uniform weights, and nothing that is not finite."""
        loss = make_loss(kind, temperature_update=temperature_update)
        data = with_advantage(make_rollout(kind, 6))
        data["advantage"] = torch.full((6, 1), 7.0)
        output = loss(data)
        assert output.isfinite().all()
        assert output["ess"].item() == pytest.approx(6.0)
        assert output["kl_q_rel"].item() == pytest.approx(0.0, abs=1e-5)
        assert all(g.isfinite().all() for g in gradients(loss, total_loss(output)).values())

    @pytest.mark.parametrize("temperature_update", UPDATES)
    def test_restarting(self, temperature_update: Any) -> None:
        """Restarting samples carry no weight; they count in the batch and in its statistics."""
        loss = make_loss(temperature_update=temperature_update, top_k_fraction=0.3)
        data = with_advantage(make_rollout("normal", 10))
        data["advantage"] = torch.arange(10.0).unsqueeze(-1)
        data["restarting_weight"] = torch.ones(10, 1)
        data["restarting_weight"][[9, 7]] = 0.0
        weights = weights_of(loss, data)
        assert weights.nonzero().flatten().tolist() == [5, 6, 8]
        output = loss(data)
        assert output["restarting_fraction"].item() == pytest.approx(0.2)
        assert output["advantage_mean"].item() == pytest.approx(4.5)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("temperature_update", UPDATES)
    @pytest.mark.parametrize("kl_samples", ["all", "selected"])
    def test_all_restarting(self, kl_samples: Any, temperature_update: Any, kind: str) -> None:
        """Without a usable sample there are no weights, and the temperature stays."""
        settings = {"temperature_update": temperature_update, "kl_samples": kl_samples}
        loss = make_loss(kind, init_temperature=3.0, **settings)
        data = with_advantage(make_rollout(kind))
        data["restarting_weight"] = torch.zeros(4, 5)
        assert (weights_of(loss, data) == 0).all()
        output = loss(data)
        assert output["cross_entropy"] == output["loss_temperature"] == 0
        assert output["temperature"].item() == pytest.approx(3.0)
        assert output["restarting_fraction"] == 1
        assert all(value.isfinite() for value in losses_of(output).values())
        grads = gradients(loss, total_loss(output))
        assert all(g.isfinite().all() for g in grads.values())
        moved = any(g.any() for k, g in grads.items() if k.startswith("actor"))
        assert moved is (kl_samples == "all")  # by the penalty alone

    def test_metrics_without_selection(self) -> None:
        data = with_advantage(make_rollout())
        data["restarting_weight"] = torch.zeros(4, 5)
        output = make_loss()(data)
        assert output["selected_fraction"] == 0
        assert {key: value.item() for key, value in output.items() if not value.isfinite()} == {}

    @pytest.mark.parametrize("temperature_update", ["solve", "gradient"])
    def test_no_importance_at_all(self, temperature_update: Any) -> None:
        """Weights of zero select nothing: finite losses, and the temperature stays."""
        data = with_advantage(make_rollout())
        data["importance_weight"] = torch.zeros(4, 5)
        loss = make_loss(temperature_update=temperature_update)
        before = loss.temperature().item()
        output = loss(data)
        assert (weights_of(loss, data) == 0).all()
        assert {key: value.item() for key, value in output.items() if not value.isfinite()} == {}
        assert loss.temperature().item() == pytest.approx(before)

    def test_importance(self) -> None:
        """Twice the importance is twice the weight; the scale of all of them is of no effect."""
        loss = make_loss(temperature_update="gradient", top_k_fraction=1.0)
        data = with_advantage(make_rollout("normal", 6))
        plain = weights_of(loss, data)
        data["importance_weight"] = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0, 1.0])
        weighted = weights_of(loss, data)
        ratio = weighted / plain
        torch.testing.assert_close(ratio[[0, 2, 3, 5]], ratio[1] * torch.tensor([2.0, 1, 1, 1]))
        assert weighted[4] == 0
        assert weighted.sum().item() == pytest.approx(1.0)
        assert loss(data)["importance_mean"].item() == pytest.approx(1.0)
        data["importance_weight"] *= 10
        torch.testing.assert_close(weights_of(loss, data), weighted)

    @pytest.mark.parametrize("temperature_update", UPDATES)
    def test_standardisation(self, temperature_update: Any) -> None:
        """Standardised advantages make scale and offset irrelevant; raw ones do not."""
        data = with_advantage(make_rollout())
        scaled = data.clone().set("advantage", 100 * data["advantage"] - 30)
        for normalize in (True, False):
            kwargs = {"normalize_advantage": normalize, "temperature_update": temperature_update}
            a, b = (weights_of(make_loss(**kwargs), td) for td in (data, scaled))
            same = torch.allclose(a, b, atol=1e-5)
            # A solved temperature follows the scale by itself.
            assert same is (normalize or temperature_update == "solve")
        _, metrics = make_loss().e_step(scaled)
        torch.testing.assert_close(metrics["advantage_mean"], scaled["advantage"].mean())

    @pytest.mark.parametrize("weights", [(), ("restarting_weight",), ("importance_weight",)])
    def test_solver_meets_the_bound(self, weights: tuple[str, ...]) -> None:
        for epsilon in (0.01, 0.1, 0.5):
            loss = make_loss(epsilon=epsilon)
            data = with_weights(with_advantage(make_rollout("normal", 8, 16)), *weights)
            for scale in (1.0, 1e-3, 1e3):
                scaled = data.clone().set("advantage", scale * data["advantage"])
                _, metrics = loss.e_step(scaled)
                assert metrics["kl_q_rel"].item() == pytest.approx(1.0, abs=1e-3)

    @pytest.mark.parametrize(
        ("fraction", "solutions"),
        [
            (0.5, [4.455, 3.205, 1.530, 1.279, 1.025, 0.764]),
            (0.7, [5.141, 3.685, 1.734, 1.442, 1.147, 0.844]),
        ],
    )
    def test_solved_temperatures(self, fraction: float, solutions: list[float]) -> None:
        """Temperatures for normal advantages, by bisection in double precision."""
        quantiles = D.Normal(0.0, 1.0).icdf((torch.arange(4096) + 0.5) / 4096)
        data = with_advantage(make_rollout("normal", 4096))
        data["advantage"] = 50 * quantiles[torch.randperm(4096)].unsqueeze(-1) + 10
        for epsilon, solution in zip((0.01, 0.02, 0.1, 0.15, 0.25, 0.5), solutions, strict=True):
            loss = make_loss(epsilon=epsilon, top_k_fraction=fraction)
            assert loss(data)["temperature"].item() == pytest.approx(solution, rel=2e-3)

    @pytest.mark.parametrize("init_temperature", [0.3, 1.0, 5.0])
    def test_temperature_gradient(self, init_temperature: float) -> None:
        """It is the bound minus the divergence of the weights from uniform."""
        problem = Problem(temperature_update="gradient", init_temperature=init_temperature)
        loss, data = problem.loss, problem.data()
        output = loss(data)
        (gradient,) = torch.autograd.grad(output["loss_temperature"], loss.temperature.raw)
        divergence = problem.divergence(data, loss.temperature())
        slope = loss.temperature.raw.sigmoid()
        torch.testing.assert_close(gradient / slope, loss.epsilon - divergence)
        torch.testing.assert_close(output["kl_q_rel"], divergence / loss.epsilon)


# M-step ------------------------------------------------------------------------------------------


class TestVMPOMStep:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("kl_samples", ["all", "selected"])
    @pytest.mark.parametrize("factor", [0.5, 2.0])
    def test_alpha_gradient(self, factor: float, kl_samples: Any, kind: str) -> None:
        """A multiplier falls while its divergence is below the bound and rises above it."""
        loss, data = make_loss(kind, kl_samples=kl_samples), with_advantage(make_rollout(kind))
        output = loss(data)
        suffix = "" if kl_samples == "all" else "_selected"
        for key in [key for key in losses_of(output) if "alpha" in key]:
            name = key.removeprefix("loss_alpha_")
            kl, dual = output[f"kl_{name}{suffix}"].item(), getattr(loss, f"alpha_{name}")
            setattr(loss, f"epsilon_{name}", factor * kl)
            moved = loss(data)
            (gradient,) = torch.autograd.grad(moved[key], dual.raw)
            assert (gradient > 0) == (factor > 1)
            expected = (factor - 1) * kl * dual.raw.sigmoid().item()
            assert gradient.item() == pytest.approx(expected, rel=1e-4)
            assert moved[f"kl_{name}_rel"].item() == pytest.approx(1 / factor)

    def test_per_dim(self) -> None:
        """A multiplier per dimension moves by its own dimension's divergence."""
        for kind in CONTINUOUS:
            spec = Unbounded((ACTION_DIM,))
            loss = make_loss(kind, per_dim_constraining=True, action_spec=spec)
            full = make_loss(kind, per_dim_constraining=False)
            data = with_advantage(make_rollout(kind))
            output, summed = loss(data), full(data)
            divergences = loss._m_step(loss.e_step(data)[0])[-1]
            for name in ("mean", "stddev"):
                dual, kl = getattr(loss, f"alpha_{name}"), divergences[name]
                assert dual().shape == (ACTION_DIM,)
                assert kl.shape == (4, 5, ACTION_DIM)
                (gradient,) = torch.autograd.grad(output[f"loss_alpha_{name}"], dual.raw)
                epsilon = getattr(loss, f"epsilon_{name}")
                expected = (epsilon - kl.detach().mean((0, 1))) * dual.raw.sigmoid()
                torch.testing.assert_close(gradient, expected.detach())
                torch.testing.assert_close(summed[f"kl_{name}"], kl.sum(-1).mean().detach())
                torch.testing.assert_close(output[f"kl_{name}"], kl.mean().detach())
            torch.testing.assert_close(output["loss_actor"], summed["loss_actor"])

    @pytest.mark.parametrize("kind", DISCRETE)
    def test_impossible_actions(self, kind: str) -> None:
        """Actions that neither policy takes have logits of minus infinity."""

        class Possible(nn.Linear):
            def forward(self, observation: Tensor) -> Tensor:
                impossible = torch.arange(NUM_ACTIONS) == 2
                return super().forward(observation).masked_fill(impossible, -math.inf)

        torch.manual_seed(0)
        network = Possible(OBSERVATION_DIM, NUM_ACTIONS)
        loss = VMPOLoss(make_actor(kind, network), make_critic())
        data = with_advantage(make_rollout(kind))
        index = torch.randint(2, (4, 5))
        # Nor does it matter that an action without weight has become impossible.
        index.view(-1)[data["advantage"].argmin()] = 2
        data["action"] = nn.functional.one_hot(index, NUM_ACTIONS) if kind == "one-hot" else index
        data["logits"][..., 2] = -math.inf
        output = loss(data)
        old = D.Categorical(logits=data["logits"])
        new = D.Categorical(logits=network(data["observation"]))
        kl = D.kl_divergence(old, new)
        assert kl.isfinite().all()
        torch.testing.assert_close(output["kl_policy"], kl.mean().detach())
        assert output.isfinite().all()
        total_loss(output).backward()
        assert all(p.grad.isfinite().all() for p in loss.parameters() if p.requires_grad)

    @pytest.mark.parametrize("kind", KINDS)
    def test_same_policy(self, kind: str) -> None:
        """Before the first step the policy is the one that collected the data."""
        loss, data = make_loss(kind), with_advantage(make_rollout(kind))
        data = loss.actor_network(data.exclude(*parameter_names(kind)))
        loss_of_same = loss(data.detach())
        for key, value in loss_of_same.items():
            if key.startswith(("kl_mean", "kl_stddev", "kl_policy", "penalty")):
                assert value.item() == pytest.approx(0.0, abs=1e-6), key
        grads = gradients(loss, loss_of_same["loss_actor"] - loss_of_same["cross_entropy"])
        assert any(g.any() for g in grads.values())  # of the likelihood
