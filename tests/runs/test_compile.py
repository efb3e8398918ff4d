"""The section ``compile``."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from minerva_torchrl.runs.assemble import assemble
from tests.runs.tiny import make_run, tiny_config

ALGOS = ["mpo", "vmpo", "ppo"]

# Of torch's own parts when its compiler is imported.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`torch\.jit\.script_method` is deprecated:DeprecationWarning"
)


def compiled(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.modules() if child._compiled_call_impl is not None]


@pytest.mark.parametrize("algo", ALGOS)
def test_networks_are_compiled_if_asked_for(algo: str) -> None:
    names = ("actor_network", "critic_network", "qvalue_network")
    for enabled in (False, True):
        loss = assemble(tiny_config(algo, compile__enabled=enabled)).loss
        networks = [getattr(loss, name) for name in names if hasattr(loss, name)]
        assert len(networks) == 2
        assert [len(compiled(network)) for network in networks] == ([1, 1] if enabled else [0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_compiled_runs(algo: str, tmp_path: Path) -> None:
    summary = make_run(tiny_config(algo, compile__enabled=True), tmp_path).train()
    assert summary["final_return"] is not None
