"""Tables of results: at a glance, at fixed budgets, next to published ones, and speeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minerva_torchrl.report.document import Block, Code, Paragraph, Table, Text
from minerva_torchrl.report.estimates import (
    FEWEST_SEEDS,
    area_under_curve,
    bootstrap_interval,
    iqm,
    standard_deviation,
    value_at,
)
from minerva_torchrl.report.groups import Group
from minerva_torchrl.report.reading import RecordedRun
from minerva_torchrl.report.references import Reference
from minerva_torchrl.report.values import (
    interval,
    mean_and_deviation,
    number,
    seed_list,
)
from minerva_torchrl.text import format_duration

__all__ = [
    "Measurement",
    "budget_table",
    "default_budgets",
    "individual_runs",
    "measure",
    "overview",
    "published_table",
    "throughput",
]

_INTERPOLATED = "†"
_FOOTNOTE = Paragraph(
    f"{_INTERPOLATED} Interpolated linearly between the evaluations before and after."
)
_ROUND_BUDGETS = (50_000, 100_000, 250_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000)


@dataclass(frozen=True)
class Measurement:
    """A group's result at a budget, over the seeds that got there."""

    values: tuple[float, ...]
    areas: tuple[float, ...]
    """Of the same seeds, or none if one of them has no evaluation at frame 0."""
    interpolated: bool

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.values))

    def text(self) -> str:
        """Mean and standard deviation, with a sign if there is something interpolated."""
        text = mean_and_deviation(self.mean, standard_deviation(self.values))
        return f"{text} {_INTERPOLATED}" if self.interpolated else text


def measure(group: Group, budget: int) -> Measurement | None:
    """What a group reached after so many frames; ``None`` if no seed was evaluated that late.

    Args:
        group (Group): the runs.
        budget (int): number of frames.
    """
    runs = [run for run in group.runs if run.frames[0] <= budget <= run.last_frame]
    if not runs:
        return None
    found = [value_at(run.frames, run.returns, budget) for run in runs]
    areas = []
    if all(run.frames[0] == 0 for run in runs):
        areas = [area_under_curve(run.frames, run.returns, budget) for run in runs]
    return Measurement(
        values=tuple(value for value, _ in found),
        areas=tuple(areas),
        interpolated=any(between for _, between in found),
    )


def default_budgets(groups: Sequence[Group]) -> list[int]:
    """Round numbers of frames that all seeds of some group reach, and the end of the shortest run.

    Unfinished runs do not count, unless there are no others.

    Args:
        groups (sequence of Group): all groups of a task.
    """
    counting = [group for group in groups if group.finished] or groups
    ends = [min(run.last_frame for run in group.runs) for group in counting]
    budgets = {budget for budget in _ROUND_BUDGETS if budget <= max(ends)}
    return sorted(budgets | {min(ends)} - {0})


# Tables ------------------------------------------------------------------------------------------


def overview(groups: Sequence[Group]) -> list[Block]:
    """A row for each group, with its final evaluation."""
    columns = (
        *("Task", "Algorithm", "Seeds", "Frames", "Final evaluation"),
        *("Wall-clock per run", "Frames/s"),
    )
    rows = []
    for group in groups:
        final = [float(run.returns[-1]) for run in group.runs]
        rows.append(
            (
                Code(group.task),
                group.label,
                seed_list(group.seeds),
                _range(run.last_frame for run in group.runs),
                mean_and_deviation(float(np.mean(final)), standard_deviation(final)),
                _wall_clock(group.runs),
                _speed(group.runs, "frames_per_second"),
            )
        )
    episodes = _range(run.settings["eval.episodes"] for group in groups for run in group.runs)
    note = (
        "Final evaluation: return of the last evaluation of each run, mean ± standard deviation "
        f"over seeds. An evaluation is the mean over {episodes} episodes of the deterministic "
        "policy."
    )
    return [Table(columns, tuple(rows), numbers=(3, 4, 5, 6)), Paragraph(note)]


def budget_table(
    groups: Sequence[Group],
    references: Sequence[Reference] = (),
    budgets: Sequence[int] | None = None,
) -> list[Block]:
    """Results of a task at fixed numbers of frames, with references in between.

    Args:
        groups (sequence of Group): all groups of the task.
        references (sequence of Reference): those of the task.
        budgets (sequence of int, optional): numbers of frames. Groups that did not get there have
            an empty row. Defaults to :func:`default_budgets`, with the rows that are not empty.
    """
    chosen = default_budgets(groups) if budgets is None else sorted(set(budgets))
    rows: list[tuple[float, tuple[Text, ...]]] = []
    interpolated = False
    for budget in chosen:
        for group in groups:
            measured = measure(group, budget)
            if measured is not None or budgets is not None:
                rows.append((budget, _budget_row(group, budget, measured)))
            interpolated |= measured is not None and measured.interpolated
    for reference in references:
        position = float("inf") if reference.frames is None else reference.frames
        frames = "" if reference.frames is None else f"{reference.frames:,}"
        label = f"reference: {reference.label}"
        rows.append((position, (frames, label, "", reference.result, "", "", "")))
    rows.sort(key=lambda row: row[0])
    columns = ("Frames", "Algorithm", "Seeds", "Mean ± std", "95 % interval", "IQM", "Area")
    table = Table(columns, tuple(row for _, row in rows), numbers=(0, 2, 3, 4, 5, 6))
    blocks: list[Block] = (
        [table] if rows else [Paragraph("No run has an evaluation after frame 0.")]
    )
    if interpolated:
        blocks.append(_FOOTNOTE)
    return blocks


def published_table(references: Sequence[Reference], groups: Sequence[Group]) -> list[Block]:
    """Published results, each beside those of finished runs after as many frames.

    Args:
        references (sequence of Reference): those without a number of frames are left out.
        groups (sequence of Group): runs of the same task, and of the reference's algorithm if it
            says one, are put beside it.
    """
    columns = ("Task", "Frames", "Published", "Return", "Here", "Return here", "Seeds")
    rows: list[tuple[Text, ...]] = []
    interpolated = False
    for reference in references:
        for group in groups:
            same = group.task == reference.task and reference.algo in (None, group.algo)
            if not (same and group.finished and reference.frames):
                continue
            measured = measure(group, reference.frames)
            if measured is None:
                continue
            published = (f"{reference.frames:,}", reference.label, reference.result)
            here = (group.label, measured.text(), _reached(group, measured))
            rows.append((Code(reference.task), *published, *here))
            interpolated |= measured.interpolated
    table: list[Block] = [Table(columns, tuple(rows), numbers=(1, 3, 5, 6))] if rows else []
    return [*table, _FOOTNOTE] if interpolated else table


def throughput(groups: Sequence[Group]) -> list[Block]:
    """How fast the runs were."""
    columns = ("Task", "Algorithm", "Runs", "Frames/s", "Updates/s", "Wall-clock per run")
    rows = [
        (
            Code(group.task),
            group.label,
            str(len(group.runs)),
            _speed(group.runs, "frames_per_second"),
            _speed(group.runs, "updates_per_second"),
            _wall_clock(group.runs),
        )
        for group in groups
    ]
    note = "Means over runs, evaluations and checkpoints included."
    return [Table(columns, tuple(rows), numbers=(2, 3, 4, 5)), Paragraph(note)]


def individual_runs(groups: Sequence[Group]) -> Table:
    """A row for each run."""
    columns = ("Folder", "Task", "Algorithm", "Seed", "Frames", "Final evaluation", "Wall-clock")
    rows = [
        (
            Code(str(run.folder)),
            Code(run.task),
            group.label,
            str(run.seed),
            f"{run.last_frame:,}",
            number(float(run.returns[-1])),
            _wall_clock([run]),
        )
        for group in groups
        for run in group.runs
    ]
    return Table(columns, tuple(rows), numbers=(3, 4, 5, 6))


# Cells -------------------------------------------------------------------------------------------


def _budget_row(group: Group, budget: int, measured: Measurement | None) -> tuple[Text, ...]:
    start = (f"{budget:,}", group.label)
    if measured is None:
        return (*start, f"0 of {len(group.runs)}", "-", "-", "-", "-")
    values = measured.values
    spread = "-"
    if len(values) >= FEWEST_SEEDS:
        spread = interval(*(float(end) for end in bootstrap_interval(values)))
    area = number(float(np.mean(measured.areas))) if measured.areas else "-"
    seeds = _reached(group, measured)
    return (*start, seeds, measured.text(), spread, number(iqm(values)), area)


def _reached(group: Group, measured: Measurement) -> str:
    reached, total = len(measured.values), len(group.runs)
    return str(total) if reached == total else f"{reached} of {total}"


def _range(values: Iterable[int]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:,}" if ordered[0] == ordered[-1] else f"{ordered[0]:,}–{ordered[-1]:,}"


def _speed(runs: Sequence[RecordedRun], name: str) -> str:
    speeds = [run.speed[name] for run in runs if name in run.speed]
    return f"{np.mean(speeds):,.1f}" if speeds else "-"


def _wall_clock(runs: Sequence[RecordedRun]) -> str:
    seconds = [run.speed["wall_seconds"] for run in runs if "wall_seconds" in run.speed]
    return format_duration(float(np.mean(seconds))) if seconds else "-"
