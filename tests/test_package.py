"""The package's front door."""

from __future__ import annotations

import subprocess
import sys

import pytest

import minerva_torchrl


@pytest.mark.parametrize("name", minerva_torchrl.__all__)
def test_public_names(name: str) -> None:
    assert getattr(minerva_torchrl, name) is not None


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DMPOLoss'"):
        _ = minerva_torchrl.DMPOLoss


def test_losses_need_no_simulator() -> None:
    code = "import sys, minerva_torchrl; print('dm_control' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "False"
