"""Reductions over the positions that count, where all, some or none of them do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from minerva_torchrl.objectives.reductions import (
    masked_extreme,
    masked_mean,
    masked_means,
    masked_std,
)
from tests.objectives.base import gradients, make_transitions, run, total_loss
from tests.objectives.test_mpo import make_loss as make_mpo_loss
from tests.objectives.vmpo_problem import make_loss as make_vmpo_loss
from tests.objectives.vmpo_problem import make_rollout, with_advantage

REDUCTIONS = ["mean", "sum", "none"]
NAN = math.nan


# Functions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "expected"), [("min", -3.0), ("max", 5.0)])
def test_masked_extreme(which: Any, expected: float) -> None:
    x = torch.tensor([[1.0, 5.0], [-3.0, 2.0], [100.0, -100.0]])
    mask = torch.tensor([True, True, False])
    assert masked_extreme(x, mask, which) == expected
    assert masked_extreme(x[:2], None, which) == expected
    x[2] = NAN
    assert masked_extreme(x, mask, which) == expected
    assert masked_extreme(x, torch.zeros(3, dtype=torch.bool), which) == 0


def test_masked_means() -> None:
    values = {
        "a": torch.tensor([[1.0, 2.0], [3.0, NAN]]),
        "b": torch.tensor([[4.0, 0.0], [6.0, 9]]),
    }
    mask = torch.tensor([[True, False], [True, False]])
    means = masked_means(values, mask)
    assert {name: mean.item() for name, mean in means.items()} == {"a": 2.0, "b": 5.0}
    for name, value in values.items():
        torch.testing.assert_close(means[name], masked_mean(value, mask))
        of_all = masked_means(values, None)[name]
        torch.testing.assert_close(of_all, value.mean(), equal_nan=True)
    nothing = masked_means(values, torch.zeros_like(mask))
    assert all(mean.shape == () and mean == 0 for mean in nothing.values())


def test_masked_std() -> None:
    x = torch.tensor([1.0, 3.0, 8.0, NAN])
    mask = torch.tensor([True, True, True, False])
    torch.testing.assert_close(masked_std(x, mask), x[:3].std(correction=0))
    torch.testing.assert_close(masked_std(x[:3], None), x[:3].std(correction=0))
    assert masked_std(x, torch.zeros(4, dtype=torch.bool)) == 0


# In a loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_reduce(weighted: bool, masked: bool, reduction: Any) -> None:
    """Weighted mean, weighted sum, or each element by its weight, over what is not masked."""
    loss_fn = make_mpo_loss(reduction=reduction)
    x = torch.tensor([[1.0, -2.0, 4.0], [0.5, 3.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True], [True, True, False]]) if masked else None
    weights = torch.tensor([[0.5, 2.0, 0.0], [1.5, 1.0, 3.0]]) if weighted else None
    kept = torch.ones(2, 3) if mask is None else mask.float()
    if mask is not None:
        x = x.detach().where(mask, NAN).requires_grad_()
    scale = kept if weights is None else kept * weights
    expected = scale * torch.where(kept > 0, x, 0.0)
    if reduction != "none":
        expected = expected.sum() / (scale.sum() if reduction == "mean" else 1)
    actual = loss_fn._reduce(x, mask, weights)
    torch.testing.assert_close(actual, expected)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (actual, expected)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("mask", "weights"),
    [
        (torch.zeros(4, dtype=torch.bool), None),
        (torch.zeros(4, dtype=torch.bool), torch.rand(4)),
        (torch.zeros(4, dtype=torch.bool), torch.full((4,), NAN)),
        (None, torch.zeros(4)),
        (torch.tensor([True, True, False, False]), torch.tensor([0.0, 0.0, 1.0, 1.0])),
    ],
    ids=["masked", "masked-weights", "masked-nan", "weights", "both"],
)
def test_reduce_nothing(mask: Tensor | None, weights: Tensor | None, reduction: Any) -> None:
    """Where nothing counts the loss is zero, and so is its gradient."""
    x = torch.tensor([1.0, -2.0, 3.0, 4.0], requires_grad=True)
    reduced = make_mpo_loss(reduction=reduction)._reduce(x, mask, weights)
    assert reduced.shape == ((4,) if reduction == "none" else ())
    assert (reduced == 0).all()
    (gradient,) = torch.autograd.grad(reduced.sum(), x)
    assert (gradient == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("policy_states", ["next", "current", "both"])
def test_mpo_without_weight(policy_states: Any, reduction: Any) -> None:
    loss = make_mpo_loss(reduction=reduction, policy_states=policy_states, critics="count")
    data = make_transitions(8)
    data["priority_weight"] = torch.zeros(8)
    output = run(loss, data)
    for key in output.keys():
        assert output[key].isfinite().all(), key
        assert not key.startswith("loss_") or (output[key] == 0).all(), key
    assert not any(g.any() for g in gradients(loss, total_loss(output)).values())


@pytest.mark.parametrize("kind", ["normal", "one-hot"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("temperature_update", ["solve", "gradient"])
def test_vmpo_without_samples(temperature_update: Any, reduction: Any, kind: str) -> None:
    """A batch of padding only: finite metrics, losses of zero, and the temperature stays."""
    loss = make_vmpo_loss(kind, reduction=reduction, temperature_update=temperature_update)
    data = with_advantage(make_rollout(kind))
    for key in ("advantage", "value_target"):
        data[key].fill_(NAN)
    data["collector", "mask"] = torch.zeros(4, 5, dtype=torch.bool)
    before = loss.temperature().item()
    output = loss(data)
    for key in output.keys():
        assert output[key].isfinite().all(), key
        assert not key.startswith("loss_") or (output[key] == 0).all(), key
    assert not any(g.any() for g in gradients(loss, total_loss(output)).values())
    assert loss.temperature().item() == before
