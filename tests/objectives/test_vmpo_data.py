"""How VMPOLoss treats its data: advantages, masks, the critic and the metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrl.data import Bounded

from minerva_torchrl import VMPOLoss
from tests.objectives.base import OBSERVATION_DIM, assert_equal, gradients
from tests.objectives.vmpo_problem import (
    CONTINUOUS,
    CRITIC_DISTANCES,
    GAMMA,
    KINDS,
    Problem,
    connected,
    losses_of,
    make_actor,
    make_critic,
    make_loss,
    make_padded,
    make_rollout,
    make_worked_rollout,
    weights_of,
    with_advantage,
    with_weights,
)

# Advantages --------------------------------------------------------------------------------------


class TestVMPOEstimators:
    def test_worked_returns(self) -> None:
        """Rewards and ends of two environments over three steps, by hand."""
        loss, rollout, value = make_worked_rollout()
        loss.make_value_estimator("returns", gamma=0.9)
        loss(rollout)
        expected = torch.tensor([[3.88, 1.10], [3.20, -1], [3, 0.72]]).T.unsqueeze(-1)
        torch.testing.assert_close(rollout["value_target"], expected)
        torch.testing.assert_close(rollout["advantage"], expected - value)

    @pytest.mark.parametrize(
        ("td_est", "lmbda"),
        [("gae", 0.8), ("td0", 0.0), ("dae", 0.0), ("returns", 1.0), ("tdlambda", 0.8)],
    )
    def test_recursion(self, td_est: str, lmbda: float) -> None:
        """A truncation cuts the trace and bootstraps; a termination cuts without."""
        problem = Problem()
        settings = {"lmbda": lmbda} if td_est in ("gae", "tdlambda") else {}
        problem.loss.make_value_estimator(td_est, gamma=GAMMA, **settings)
        data = connected(make_rollout("normal", 3, 12, dtype=torch.float64))
        following = data["next"]
        assert (following["done"] & ~following["terminated"]).any()
        problem.loss(data)
        value, target = problem.lambda_return(data, lmbda)
        torch.testing.assert_close(data["value_target"], target)
        torch.testing.assert_close(data["advantage"], target - value)

    @pytest.mark.parametrize(("lmbda", "same_as"), [(0.0, "td0"), (1.0, "returns")])
    def test_gae_limits(self, lmbda: float, same_as: str) -> None:
        for kind in KINDS:
            gae = make_loss(kind, "gae", estimator={"lmbda": lmbda})
            data = connected(make_rollout(kind, 3, 12))
            assert_equal(gae(data.clone()), make_loss(kind, same_as)(data), rtol=1e-4)


# Masks -------------------------------------------------------------------------------------------


class TestVMPOMask:
    """Steps that pad a batch change nothing."""

    @pytest.mark.parametrize("fraction", [0.5, 1.0])
    @pytest.mark.parametrize("kl_samples", ["all", "selected"])
    @pytest.mark.parametrize("fill", ["nan", "zero"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_mask(self, kind: str, fill: str, kl_samples: Any, fraction: float) -> None:
        flat, padded = make_padded(kind, fill)
        settings = {"kl_samples": kl_samples, "top_k_fraction": fraction}
        first, second = make_loss(kind, **settings), make_loss(kind, **settings)
        expected = first(flat)
        weights = weights_of(second, padded)
        assert (weights[0, 3:] == 0).all()
        torch.testing.assert_close(weights[padded["collector", "mask"]], weights_of(first, flat))
        assert_equal(losses_of(second(padded)), losses_of(expected))
        elements = make_loss(kind, reduction="none", **settings)(padded)
        for key in set(elements.keys()) - {"loss_temperature"}:
            assert (elements[key][0, 3:] == 0).all(), key
            torch.testing.assert_close(elements[key].sum() / 8, expected[key])

    @pytest.mark.parametrize("fill", ["nan", "zero"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_mask_gradients(self, kind: str, fill: str) -> None:
        flat, padded = make_padded(kind, fill)
        first, second = (make_loss(kind, top_k_fraction=1.0) for _ in range(2))
        for key in losses_of(first(flat)):
            if key != "loss_temperature":
                actual = gradients(second, second(padded)[key])
                assert_equal(actual, gradients(first, first(flat)[key]))

    @pytest.mark.parametrize("fill", ["nan", "zero"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_mask_metrics(self, kind: str, fill: str) -> None:
        flat, padded = make_padded(kind, fill)
        first, second = (make_loss(kind, top_k_fraction=1.0) for _ in range(2))
        assert_equal(second(padded), first(flat))

    def test_mask_key(self) -> None:
        """The mask can have another name, or be ignored."""
        flat, padded = make_padded("normal", "nan")
        padded["valid"] = padded["collector"].pop("mask")
        loss = make_loss(top_k_fraction=1.0)
        loss.loss_mask_key = "valid"
        assert_equal(losses_of(loss(padded)), losses_of(make_loss(top_k_fraction=1.0)(flat)))
        loss.loss_mask_key = None
        assert not loss(padded)["loss_critic"].isfinite()


# Critic and metrics ------------------------------------------------------------------------------


class TestVMPOCritic:
    @pytest.mark.parametrize("loss_critic_type", CRITIC_DISTANCES)
    def test_value_clipping(self, loss_critic_type: Any) -> None:
        """The larger of the errors of the value and of the clipped value, by hand."""
        problem = Problem(clip_value=0.2, loss_critic_type=loss_critic_type)
        data = problem.data()
        with pytest.raises(ValueError, match=r"needs the entries \['state_value'\]"):
            problem.loss(data)
        value, target = problem.critic(data["observation"]), data["value_target"]
        old = data["state_value"] = value.detach() + 0.4 * torch.randn_like(value)
        near = (value - old).abs() < 0.2
        clipped = torch.where(near, value, old + 0.2 * (value.detach() - old).sign())
        distance = CRITIC_DISTANCES[loss_critic_type]
        errors, clipped_errors = distance(value - target), distance(clipped - target)
        gains = (clipped_errors > errors) & ~near
        assert gains.any()
        assert ((clipped_errors < errors) & ~near).any()
        expected = 0.5 * torch.where(gains, clipped_errors, errors).mean()
        actual = problem.loss(data)["loss_critic"]
        torch.testing.assert_close(actual, expected)
        assert_equal(gradients(problem.loss, actual), gradients(problem.loss, expected))


class TestVMPOMetrics:
    @pytest.mark.parametrize("kind", KINDS)
    def test_metrics(self, kind: str) -> None:
        problem = Problem(kind, kl_samples="selected")
        loss, data = problem.loss, with_weights(problem.data(), "restarting_weight")
        output = loss(data)
        for key, value in output.items():
            assert value.shape == (), key
            assert not (value.requires_grad and not key.startswith("loss_")), key
        expected = problem.metrics(data)
        for key, value in expected.items():
            assert output[key].item() == pytest.approx(value.item(), rel=1e-6), key

    @pytest.mark.parametrize(
        ("kind", "spec", "share"),
        [
            *((kind, Bounded(-1.0, 1.0, (2,)), 5 / 8) for kind in CONTINUOUS),
            # A dimension may be without bounds, or have one only.
            ("normal", Bounded(*torch.tensor([[-1.0, -math.inf], [1.0, math.inf]])), 2 / 8),
            ("normal", Bounded(*torch.tensor([[-1.0, -1.0], [math.inf, 1.0]])), 4 / 8),
            ("normal", None, None),
        ],
        ids=["normal", "tanh", "one dimension bounded", "one bound", "no bounds"],
    )
    def test_saturation(self, kind: str, spec: Any, share: float | None) -> None:
        """The share of deterministic actions that are at a bound or beyond, by dimension."""
        action = torch.tensor([[0.0, 2.0], [-1.0, 0.98], [0.5, -0.995], [3.0, -4.0]])
        loc = action if kind == "normal" else action.clamp(-0.999, 0.999).atanh()

        class Lookup(nn.Linear):
            def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
                return loc + 0 * super().forward(observation), torch.ones_like(loc)

        actor = make_actor(kind, Lookup(OBSERVATION_DIM, 2), spec=None)
        loss = VMPOLoss(actor, make_critic(), action_spec=spec)
        output = loss(with_advantage(make_rollout(kind, 4)))
        assert ("saturation" in output.keys()) is ("saturation" in loss.out_keys)
        assert output.get("saturation", None) == share
