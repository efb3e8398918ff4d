"""Initialisers of networks: what each row of the table says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from minerva_torchrl.modules import initialize_

N, M = 400, 200
SMALL, KAIMING = 0.01 / math.sqrt(N), 1 / math.sqrt(N)
XAVIER, FAN_OUT = math.sqrt(6 / (N + M)) / math.sqrt(3), 1 / math.sqrt(3 * M)
PYTORCH = 1 / math.sqrt(3 * N)  # uniform with the bound 1 / sqrt(n)
# Standard deviations of weights of hidden layers, and of heads of means, scales and values.
TABLE = {
    "small_heads": (None, SMALL, SMALL, 0.01),
    "pytorch": (None, None, None, None),
    "kaiming_mean": (None, KAIMING, None, 0.01),
    "xavier_heads": (None, XAVIER, XAVIER, XAVIER),
    "fan_out": (FAN_OUT, SMALL, SMALL, SMALL),
    "orthogonal": (
        math.sqrt(2) * KAIMING,
        0.01 * KAIMING,
        0.01 * KAIMING,
        KAIMING,
    ),
}
CASES = [
    (name, part, std)
    for name, row in TABLE.items()
    for part, std in zip(("hidden", "loc", "scale", "value"), row, strict=True)
]


@pytest.mark.parametrize(("initializer", "part", "std"), CASES)
def test_table(initializer: Any, part: Any, std: float | None) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(N, M), nn.LayerNorm(M))
    before = network[0].weight.clone()
    assert initialize_(network, part, initializer) is network
    if std is None:
        assert torch.equal(network[0].weight, before)
        assert network[0].bias.abs().max() > 0
    else:
        assert network[0].weight.std().item() == pytest.approx(std, rel=0.02)
        assert not network[0].bias.any()
    assert network[1].weight.eq(1).all()


def test_orthogonal_rows() -> None:
    weight = initialize_(nn.Linear(8, 3), "value", "orthogonal").weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(3), atol=1e-6, rtol=0)


def test_unknown_name() -> None:
    wrong: Any = "small"
    with pytest.raises(ValueError, match=r"one of 'small_heads', .*, got 'small'"):
        initialize_(nn.Linear(2, 2), "loc", wrong)
