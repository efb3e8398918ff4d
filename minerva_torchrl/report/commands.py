"""The commands that reproduce runs."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from minerva_torchrl.report.groups import Group
from minerva_torchrl.report.reading import RecordedRun
from minerva_torchrl.report.values import setting_text
from minerva_torchrl.runs.settings import hydra_text

__all__ = ["commands", "override"]

_WIDTH = 100


def commands(group: Group) -> list[str]:
    """Commands that train all runs of a group again.

    There is one, unless the runs differ in settings that what is learned does not depend on, for
    example in their length. Lines are broken as a shell understands it.

    Args:
        group (Group): the runs.
    """
    seeds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for run in group.runs:
        seeds[tuple(_arguments(run))].append(run.seed)
    start = ["python", "-m", "minerva_torchrl", "train", group.algo]
    lines = []
    for arguments, numbers in seeds.items():
        seed = "seed=" + ",".join(map(str, numbers))
        several = ["--multirun"] if len(numbers) > 1 else []
        lines.append(_joined([*start, *several, arguments[0], seed, *arguments[1:]]))
    return lines


def override(name: str, value: Any) -> str:
    """A setting as Hydra reads it on the command line.

    Args:
        name (str): dotted name.
        value: a number, a text, ``None``, true or false, or a list of these.

    Examples:
        >>> override("optim.lr_actor", 1e-3), override("optim.lr_scaling", "1/sqrt(M)")
        ('optim.lr_actor=1e-3', 'optim.lr_scaling="1/sqrt(M)"')
    """
    if isinstance(value, str):
        return f"{name}={hydra_text(value)}"
    return f"{name}={setting_text(value)}"


def _arguments(run: RecordedRun) -> list[str]:
    """Everything but the seed, the task first."""
    arguments = [override("env.name", run.task)]
    if run.preset != "default":
        arguments.append(override("preset", run.preset))
    arguments.append(override("total_frames", run.settings["total_frames"]))
    return arguments + [override(name, value) for name, value in run.changes_to_preset.items()]


def _joined(arguments: Sequence[str]) -> str:
    lines = [""]
    for argument in map(shlex.quote, arguments):
        longer = f"{lines[-1]} {argument}" if lines[-1] else argument
        if len(longer) > _WIDTH and lines[-1].strip():
            lines.append("    " + argument)
        else:
            lines[-1] = longer
    return " \\\n".join(lines)
