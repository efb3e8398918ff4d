"""VMPOLoss without host synchronisation and compiled, whole and on parts of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from minerva_torchrl import VMPOLoss
from tests.objectives.base import assert_equal, compiles, gradients, total_loss
from tests.objectives.vmpo_problem import (
    KINDS,
    losses_of,
    make_actor,
    make_critic,
    make_loss,
    make_rollout,
    with_advantage,
)


def with_everything(kind: str) -> TensorDict:
    """A batch with masks and weights."""
    data = with_advantage(make_rollout(kind))
    data["collector", "mask"] = torch.arange(5).expand(4, 5) < 4
    data["restarting_weight"] = (torch.arange(20).reshape(4, 5) % 7 > 0).float()
    data["importance_weight"] = torch.linspace(0.5, 1.5, 20).reshape(4, 5)
    return data


# Parts of a batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("kl_samples", ["all", "selected"])
@pytest.mark.parametrize("kind", KINDS)
def test_minibatches_add_up(kind: str, kl_samples: Any) -> None:
    """The mean over equal parts of the samples is the loss of the whole, gradients included."""
    loss = make_loss(kind, kl_samples=kl_samples, temperature_update="gradient")
    data = with_advantage(make_rollout(kind))
    whole = losses_of(loss(data))
    with_e_step, _ = loss.e_step(data)
    shuffled = with_e_step.reshape(-1)[torch.randperm(20)]
    parts = [losses_of(loss.training_loss(part)) for part in shuffled.split(5)]
    for key, value in whole.items():
        mean = torch.stack([part[key] for part in parts]).mean()
        torch.testing.assert_close(mean, value)
        assert_equal(gradients(loss, mean), gradients(loss, value))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_keep_the_old_policy(kind: str) -> None:
    """The weights and the old policy stay those of the E-step while the policy moves."""
    loss, data = make_loss(kind), with_advantage(make_rollout(kind))
    with_e_step, metrics = loss.e_step(data)
    assert "next" not in with_e_step.keys()
    before = loss(with_e_step)
    assert not set(metrics) & set(before.keys()), "those are the E-step's"
    with torch.no_grad():
        for parameter in loss.actor_network_params.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    after = loss(with_e_step)
    again = loss(data)
    for key in losses_of(before):
        torch.testing.assert_close(after[key], again[key])
    assert after["loss_actor"] != before["loss_actor"]
    assert after["loss_temperature"] == before["loss_temperature"]


def test_training_loss_has_no_metrics() -> None:
    for kind in KINDS:
        loss, data = make_loss(kind), with_advantage(make_rollout(kind))
        output = loss.training_loss(data)
        assert_equal(output, losses_of(loss(data)), 0, 0)


# Meta device -------------------------------------------------------------------------------------


# TorchRL's TanhNormal reads its bounds on the host.
@pytest.mark.parametrize("kind", ["normal", "one-hot", "categorical"])
@pytest.mark.parametrize("kwargs", [{}, {"temperature_update": "gradient", "reduction": "sum"}])
def test_vmpo_meta(kwargs: dict[str, Any], kind: str) -> None:
    """Tensors on the meta device have no values: whatever reads one on the host fails."""
    loss = VMPOLoss(make_actor(kind).to("meta"), make_critic().to("meta"), **kwargs)
    data = with_everything(kind).to("meta")
    output = loss(data)
    assert all(value.is_meta and value.shape == () for value in output.values())
    part = loss.e_step(data)[0].reshape(-1)[:5]
    total_loss(loss.training_loss(part)).backward()
    learnable = [p for p in loss.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.is_meta for p in learnable)


# Compilation -------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["normal", "one-hot"])
@pytest.mark.usefixtures("fresh_compiler")
@compiles
def test_vmpo_compile(kind: str) -> None:
    """A policy step on part of a batch is one graph, with the values and gradients of the plain."""
    loss = make_loss(kind, temperature_update="gradient")
    with_e_step, _ = loss.e_step(with_everything(kind))
    parts = with_e_step.reshape(-1).split(10)
    # Code generation takes most of the time; this checks the graph that it starts from.
    compiled = torch.compile(loss.training_loss, fullgraph=True, backend="aot_eager")
    for part in parts:
        plain = loss.training_loss(part.clone())
        output = compiled(part.clone())
        assert_equal(output, plain, rtol=1e-4, atol=1e-5)
        actual, expected = (gradients(loss, total_loss(x)) for x in (output, plain))
        assert_equal(actual, expected, rtol=1e-4, atol=1e-5)
