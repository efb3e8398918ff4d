from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from minerva_torchrl.trainers.compiled import CompiledGradients


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, data: TensorDict) -> TensorDict:
        return TensorDict({"loss_square": (self.weight * data["x"]).square().mean()})


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_ctrl_c_waits_for_a_compilation() -> None:
    """It would end the C++ compiler, which is in the same group of processes."""
    blocked: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        blocked.append(signal.SIGINT in mask)
        return graph.forward

    loss, compiled = Square(), CompiledGradients(backend="eager")
    compiled.backend = backend  # type: ignore[assignment]
    compiled(loss, TensorDict({"x": torch.ones(2)}, [2]), None, [(list(loss.parameters()), None)])
    assert blocked
    assert all(blocked)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
