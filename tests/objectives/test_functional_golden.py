"""The functional layer against DeepMind's rlax."""

from __future__ import annotations

import math

import pytest
import torch

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.value import functional as V
from tests.golden_data import assert_close, cases


def _indices(group: str) -> list[int]:
    return list(range(len(cases("rlax", group))))


@pytest.mark.parametrize("index", _indices("mpo_estep"))
def test_golden_mpo_weights_and_temperature_loss(index: int) -> None:
    case = cases("rlax", "mpo_estep")[index]
    temperature = case["temperature"].clone().requires_grad_()
    weights, loss = F.mpo_weights_and_temperature_loss(
        case["q_values"], temperature, case["epsilon"]
    )
    loss.mean().backward()
    assert_close(weights, case["weights"])
    assert_close(loss.mean(), case["loss"])
    assert_close(temperature.grad, case["grad_temperature"])


@pytest.mark.parametrize("index", _indices("vmpo_estep"))
def test_golden_vmpo_weights_and_temperature_loss(index: int) -> None:
    case = cases("rlax", "vmpo_estep")[index]
    temperature = case["temperature"].clone().requires_grad_()
    weights, loss, selected = F.vmpo_weights_and_temperature_loss(
        case["advantage"],
        temperature,
        case["epsilon"],
        top_k_fraction=float(case["top_k_fraction"]),
        restarting_weights=case["restarting_weights"],
        importance_weights=case["importance_weights"],
    )
    loss.backward()
    # The reference takes the logarithm of the number of samples in single precision, which moves
    # the gradient by that rounding and the loss by it times the temperature.
    rounding = torch.finfo(torch.float32).eps * max(1.0, math.log(selected.sum()))
    assert_close(weights, case["weights"])
    assert_close(loss, case["loss"], atol=rounding * case["temperature"].item())
    assert_close(temperature.grad, case["grad_temperature"], atol=rounding)
    assert_close(selected.sum(), case["num_samples"])


@pytest.mark.parametrize("index", _indices("mpo_loss"))
def test_golden_mpo_loss(index: int) -> None:
    case = cases("rlax", "mpo_loss")[index]
    weights, temperature_loss = F.mpo_weights_and_temperature_loss(
        case["q_values"], case["temperature"], case["epsilon"]
    )
    policy_loss = -(weights * case["sample_log_prob"]).sum(0)
    kl_loss, alpha_loss = 0.0, 0.0
    for name in ("mean", "std"):
        on_policy, on_multiplier = F.lagrangian_losses(
            case[f"kl_{name}"], case[f"alpha_{name}"], case[f"epsilon_{name}"]
        )
        if case["per_dimension"]:
            on_policy, on_multiplier = on_policy.sum(-1), on_multiplier.sum(-1)
        kl_loss = kl_loss + on_policy
        alpha_loss = alpha_loss + on_multiplier
    assert_close(policy_loss, case["policy_loss"])
    assert_close(temperature_loss, case["temperature_loss"])
    assert_close(kl_loss, case["kl_loss"])
    assert_close(alpha_loss, case["alpha_loss"])
    assert_close(policy_loss + kl_loss + alpha_loss + temperature_loss, case["loss"])


@pytest.mark.parametrize("estimate", [V.retrace_return_estimate, V.vec_retrace_return_estimate])
@pytest.mark.parametrize("index", _indices("retrace"))
def test_golden_retrace(index: int, estimate) -> None:
    case = cases("rlax", "retrace")[index]
    terminated = case["terminated"].bool()
    target = estimate(
        case["gamma"],
        case["lmbda"],
        case["log_rho"],
        torch.zeros_like(case["log_rho"]),
        case["q_value"],
        case["next_state_value"],
        case["reward"],
        terminated,
        terminated,
        time_dim=0,
    )
    assert_close(target, case["target"])
