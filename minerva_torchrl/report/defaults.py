"""What the settings of a run would be without any changes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from minerva_torchrl.report.reading import RecordedRun, flatten

__all__ = ["changes_to_preset", "preset_settings"]

# They belong to a run, not to a preset.
_OF_A_RUN = ("algo", "preset", "seed", "run_dir", "resume", "env.name", "total_frames")


@cache
def preset_settings(algo: str, preset: str) -> Mapping[str, Any]:
    """All settings of a preset, by dotted name.

    Args:
        algo (str): name of the algorithm.
        preset (str): one of its presets.

    Examples:
        >>> preset_settings("mpo", "acme")["optim.updates_per_frame"]
        0.125
    """
    # Only here: simulators are imported along with it.
    from minerva_torchrl.runs.settings import parse_config

    return flatten(parse_config(algo, {"preset": preset}))


def changes_to_preset(run: RecordedRun) -> dict[str, Any]:
    """The settings of a run that are not those of its preset, by dotted name.

    Seed, task, folder and number of frames are not among them.

    Args:
        run (RecordedRun): the run.
    """
    settings = preset_settings(run.algo, run.preset)
    return {
        name: value
        for name, value in run.settings.items()
        if name not in _OF_A_RUN and value != settings[name]
    }
