"""The benchmark of policies and critics has all of them, and each takes an update."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import family

from minerva_torchrl.algorithms.mpo import MPONetworkConfig


def test_all_are_timed() -> None:
    for setting in ("policy", "critic"):
        names = set(get_args(get_type_hints(MPONetworkConfig)[setting]))
        default = getattr(MPONetworkConfig(), setting)
        assert {case.get(setting, default) for case in family.CASES.values()} == names
    used = {case.get("actions", "continuous") for case in family.CASES.values()}
    assert used == family.SPECS.keys()


@pytest.mark.parametrize("case", family.CASES)
def test_takes_an_update(case: str) -> None:
    family.make_update(**family.CASES[case])()
