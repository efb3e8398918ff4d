"""Runs that differ only in their seed, and what to call them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.report.estimates import MeanCurve, mean_curve
from minerva_torchrl.report.reading import RecordedRun
from minerva_torchrl.report.references import Name
from minerva_torchrl.report.values import settings_text

__all__ = ["Group", "differing_settings", "group_runs", "settings_key"]

_SETTINGS_IN_A_LABEL = 3


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one task, one algorithm and the same settings, with different seeds."""

    name: str
    """Algorithm, and what sets its settings apart from others of the same algorithm."""
    runs: tuple[RecordedRun, ...]
    """One for each seed."""

    @property
    def label(self) -> str:
        """The name, and whether the runs are unfinished."""
        return self.name if self.finished else f"{self.name}, unfinished"

    @property
    def task(self) -> str:
        """Name of the environment."""
        return self.runs[0].task

    @property
    def algo(self) -> str:
        """Name of the algorithm, for example ``mpo``."""
        return self.runs[0].algo

    @property
    def preset(self) -> str:
        """Name of the preset that the settings started from."""
        return self.runs[0].preset

    @property
    def finished(self) -> bool:
        """Whether the runs are at their end. They all are, or none is."""
        return self.runs[0].finished

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs, in order."""
        return [run.seed for run in self.runs]

    @cached_property
    def curve(self) -> MeanCurve:
        """Mean over the seeds."""
        return mean_curve([(run.frames, run.returns) for run in self.runs])


def group_runs(runs: Sequence[RecordedRun], names: Sequence[Name] = ()) -> list[Group]:
    """Put runs together that differ only in their seed, in order of task and algorithm.

    If a task has groups of the same algorithm with different settings, then all groups of this
    algorithm are named after their preset, or if that is not enough after those settings in which
    they differ from each other and from the preset. The same settings have the same name on all
    tasks. Unfinished runs are groups of their own, and so are longer ones if they have the same
    seeds.

    Args:
        runs (sequence of RecordedRun): no two of them the same.
        names (sequence of Name, optional): what to call runs with certain settings instead.

    Returns:
        The groups.

    Examples:
        >>> group_runs([])
        []
    """
    found: dict[Hashable, list[RecordedRun]] = defaultdict(list)
    for run in runs:
        found[run.task, run.algo, run.finished, settings_key(run)].append(run)
    named = _names(runs, names)
    groups = []
    for members in found.values():
        name = named[members[0].algo, settings_key(members[0])]
        parts = _with_every_seed_once(members)
        for part in parts:
            length = f", {part[0].settings['total_frames']:,} frames" if len(parts) > 1 else ""
            groups.append(Group(name + length, tuple(sorted(part, key=lambda run: run.seed))))
    listed = list(named.values())

    def place(group: Group) -> int:
        return listed.index(named[group.algo, settings_key(group.runs[0])])

    return sorted(groups, key=lambda group: (*_order(group), place(group)))


def _with_every_seed_once(runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    """The runs, or those of each length if some have the same seed."""
    if len({run.seed for run in runs}) == len(runs):
        return [list(runs)]
    lengths: dict[int, list[RecordedRun]] = defaultdict(list)
    for run in runs:
        lengths[run.settings["total_frames"]].append(run)
    return [lengths[length] for length in sorted(lengths)]


def settings_key(run: RecordedRun) -> Hashable:
    """The same for two runs if nothing that is learned depends on how their settings differ."""
    return tuple(sorted(run.learning_settings.items()))


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted names of the settings that are not the same everywhere, in the order they are in.

    Examples:
        >>> differing_settings([{"seed": 0, "lr": 1e-3}, {"seed": 0, "lr": 1e-4, "tau": None}])
        ['lr', 'tau']
    """
    names = dict.fromkeys(name for some in settings for name in some)
    missing = object()
    return [
        name
        for name in names
        if any(some.get(name, missing) != settings[0].get(name, missing) for some in settings)
    ]


def _order(group: Group) -> tuple[str, int, bool, bool]:
    algorithm = list(ALGORITHMS).index(group.algo)
    return group.task, algorithm, not group.finished, group.preset != "default"


def _names(runs: Sequence[RecordedRun], given: Sequence[Name]) -> dict[tuple[str, Hashable], str]:
    """What to call the runs of an algorithm with some settings."""
    names: dict[tuple[str, Hashable], str] = {}
    uses: Counter[str] = Counter()
    for run in runs:
        of_run, name = (run.algo, settings_key(run)), _given_name(run, given)
        if name is not None and of_run not in names:
            uses[name] += 1
            names[of_run] = name if uses[name] == 1 else f"{name} ({uses[name]})"
    for algo in ALGORITHMS:
        kinds: dict[Hashable, RecordedRun] = {}
        per_task: dict[str, set[Hashable]] = defaultdict(set)
        for run in runs:
            if run.algo == algo:
                per_task[run.task].add(settings_key(run))
                if (algo, settings_key(run)) not in names:
                    kinds.setdefault(settings_key(run), run)
        if all(len(keys) == 1 for keys in per_task.values()):
            names.update({(algo, key): ALGORITHMS[algo].title for key in kinds})
        else:
            for key, variant in _variants(kinds).items():
                names[algo, key] = f"{ALGORITHMS[algo].title} ({variant})"
    return names


def _given_name(run: RecordedRun, given: Sequence[Name]) -> str | None:
    """The first one whose settings are those of the run."""
    missing = object()
    return next(
        (
            one.name
            for one in given
            if all(run.settings.get(k, missing) == value for k, value in one.settings.items())
        ),
        None,
    )


def _variants(kinds: Mapping[Hashable, RecordedRun]) -> dict[Hashable, str]:
    """Presets, where these are different, and settings where they are not."""
    by_preset: dict[str, dict[Hashable, RecordedRun]] = defaultdict(dict)
    for key, run in kinds.items():
        by_preset[run.preset][key] = run
    variants = {}
    for preset, same in by_preset.items():
        names = differing_settings([run.learning_settings for run in same.values()])
        for number, (key, run) in enumerate(same.items(), start=1):
            texts = settings_text(run.learning_settings, _telling_settings(run, names))
            parts = [preset] if len(by_preset) > 1 or not texts else []
            parts += texts[:_SETTINGS_IN_A_LABEL]
            if len(texts) > _SETTINGS_IN_A_LABEL:
                parts.append(f"… {number}")  # what is left out may be all that differs
            variants[key] = ", ".join(parts)
    return variants


def _telling_settings(run: RecordedRun, names: Sequence[str]) -> Sequence[str]:
    """Those of the settings that are not the preset's.

    If none is, then the name of the preset says it all, unless the run has other changes.
    """
    changes = run.changes_to_preset
    telling = [name for name in names if name in changes or name == "total_frames"]
    others = [name for name in changes if name in run.learning_settings]
    return telling if telling or not others else names
