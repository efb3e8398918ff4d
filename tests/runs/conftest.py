from __future__ import annotations

from pathlib import Path

import pytest

from minerva_torchrl.runs.checkpoints import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")
