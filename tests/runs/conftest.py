from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

from minerva_torchrl import make_env
from minerva_torchrl.runs.checkpoints import CheckpointStore
from tests.envs.recorder import registered_recorder
from tests.runs.policies import MakeEnv


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


@pytest.fixture
def recorder() -> Iterator[MakeEnv]:
    """Makes environments with given spaces."""
    box = spaces.Box(-1.0, 1.0, (2,))

    def make(observations: spaces.Space = box, actions: spaces.Space = box, **kwargs: Any) -> Any:
        kwargs |= {"observation_space": observations, "action_space": actions}
        return make_env("gym:Recorder-v0", **kwargs)

    with registered_recorder():
        yield make
