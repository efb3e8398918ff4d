from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_disks() -> None:
    """What tests write need not survive a power failure, and a run waits for the disk often."""
    os.fsync = lambda descriptor: None
