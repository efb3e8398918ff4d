"""What a suite's runs reach next to runs with other settings: after as many frames, and as long."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from minerva_torchrl.report.document import Block, Code, Paragraph, Picture, Table, Text
from minerva_torchrl.report.groups import Group
from minerva_torchrl.report.plots import COLOURS, new_figure
from minerva_torchrl.report.suite import probability_of_improvement, with_interval
from minerva_torchrl.report.tables import Measurement, measure
from minerva_torchrl.runs.curve import style_axes

__all__ = ["comparison_blocks", "minutes_of"]

PICTURE = "comparison.png"
OURS = "here"

Results = Mapping[str, Mapping[str, Measurement]]
"""By name of the settings and task. Those of the suite come first."""


def comparison_blocks(
    frames: int, suite: Mapping[str, Group], others: Sequence[Group]
) -> tuple[list[Block], dict[str, bytes]]:
    """Tables and a picture of runs with other settings; nothing if there are none.

    Args:
        frames (int): when they are compared.
        suite (mapping): the runs of the suite, by task.
        others (sequence of Group): runs with other settings. Only those on the suite's tasks count.

    Returns:
        Blocks, and pictures by name.
    """
    groups: dict[str, dict[str, Group]] = defaultdict(dict)
    for group in others:
        if group.task in suite and measure(group, frames) and measure(suite[group.task], frames):
            groups[group.name][group.task] = group
    tasks = [task for task in suite if any(task in of_name for of_name in groups.values())]
    if not tasks:
        return [], {}
    by_name = {OURS: {task: suite[task] for task in tasks}, **groups}
    budgets = {task: dict.fromkeys(by_name, frames) for task in tasks}
    equal_frames = _results(by_name, budgets)
    blocks: list[Block] = [
        Paragraph("Next to runs with other settings:"),
        _table_of_frames(frames, by_name, equal_frames, tasks),
    ]
    equal_time: Results = {}
    shortest = _shortest(by_name, tasks)
    if shortest is not None:
        budgets = {
            task: {
                name: round(frames * shortest[task] / minutes)
                for name, of_name in by_name.items()
                if task in of_name and (minutes := minutes_of(of_name[task]))
            }
            for task in tasks
        }
        equal_time = _results(by_name, budgets)
        blocks += [
            _table_of_time(shortest, equal_time, tasks),
            Paragraph(
                "Equal time is that of the fastest settings on a task. The return there is "
                "interpolated between evaluations, as if all frames of a run took the same time."
            ),
        ]
    what = "after as many frames, and after as much time" if equal_time else "after as many frames"
    blocks.append(Picture(PICTURE, f"Returns of runs with other settings, {what}"))
    return blocks, {PICTURE: _draw(frames, equal_frames, equal_time, tasks)}


def minutes_of(group: Group) -> float | None:
    """Mean wall-clock of a group's runs; ``None`` if nobody knows it.

    Args:
        group (Group): the runs.
    """
    known = [run.speed["wall_seconds"] for run in group.runs if "wall_seconds" in run.speed]
    return float(np.mean(known)) / 60 if known else None


def _shortest(
    groups: Mapping[str, Mapping[str, Group]], tasks: Sequence[str]
) -> dict[str, float] | None:
    """By task, how long the fastest settings took; ``None`` if that is not known of all runs."""
    shortest = {}
    for task in tasks:
        minutes = [minutes_of(of_name[task]) for of_name in groups.values() if task in of_name]
        known = [m for m in minutes if m]
        if len(known) < len(minutes):
            return None
        shortest[task] = min(known)
    return shortest


def _results(
    groups: Mapping[str, Mapping[str, Group]], budgets: Mapping[str, Mapping[str, int]]
) -> Results:
    """What all of them reached after so many frames, by task and name."""
    return {
        name: {
            task: found
            for task, group in of_name.items()
            if (found := measure(group, budgets[task][name])) is not None
        }
        for name, of_name in groups.items()
    }


def _table_of_frames(
    frames: int,
    groups: Mapping[str, Mapping[str, Group]],
    results: Results,
    tasks: Sequence[str],
) -> Table:
    rows: list[tuple[Text, ...]] = []
    ours = results[OURS]
    for name, found in results.items():
        minutes = [minutes_of(group) for group in groups[name].values()]
        known = [m for m in minutes if m]
        chance = ""
        if name != OURS:
            theirs = {task: result.values for task, result in found.items()}
            same = {task: ours[task].values for task in theirs}
            estimate = with_interval(probability_of_improvement, same, theirs)
            chance = f"{estimate.value:.0%} [{estimate.low:.0%}, {estimate.high:.0%}]"
        time = f"{np.mean(known):.1f}" if known else "-"
        rows.append((name, *_cells(found, tasks), time, chance))
    chance_column = "Chance that a run here is better"
    of_tasks: tuple[Text, ...] = tuple(Code(task) for task in tasks)
    columns = (f"After {frames:,} frames", *of_tasks, "Minutes", chance_column)
    return Table(columns, tuple(rows), numbers=tuple(range(1, len(columns))))


def _table_of_time(shortest: Mapping[str, float], results: Results, tasks: Sequence[str]) -> Table:
    rows: list[tuple[Text, ...]] = [("minutes", *(f"{shortest[task]:.1f}" for task in tasks))]
    rows += [(name, *_cells(found, tasks)) for name, found in results.items()]
    columns: tuple[Text, ...] = ("After equal time", *map(Code, tasks))
    return Table(columns, tuple(rows), numbers=tuple(range(1, len(columns))))


def _cells(found: Mapping[str, Measurement], tasks: Sequence[str]) -> list[str]:
    return [found[task].text() if task in found else "-" for task in tasks]


def _draw(frames: int, equal_frames: Results, equal_time: Results, tasks: Sequence[str]) -> bytes:
    """A panel for each task: a row for each of the settings, a dot for each of its runs."""
    names = list(equal_frames)
    figure, canvas = new_figure(2.2 + 2.4 * len(tasks), 1.3 + 0.42 * len(names))
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    kinds = [(f"after {frames:,} frames", equal_frames, -0.13, COLOURS[0], "o")]
    if equal_time:
        kinds.append(("after equal time", equal_time, 0.13, COLOURS[1], "s"))
    for axes, task in zip(panels, tasks, strict=True):
        style_axes(axes, task)
        for label, results, shift, colour, marker in kinds:
            for row, name in enumerate(names):
                if task not in results[name]:
                    continue
                found = results[name][task]
                values, place = found.values, row + shift
                axes.plot(values, [place] * len(values), marker, color=colour, ms=3.5, alpha=0.45)
                axes.plot([found.mean] * 2, [place - 0.12, place + 0.12], color=colour, lw=2.5)
            axes.plot([], [], marker, color=colour, ms=4, label=label)
        axes.axvline(equal_frames[OURS][task].mean, color=COLOURS[0], lw=0.8, ls=":")
        axes.set_xlim(left=0)
        axes.set_xlabel("return")
        axes.set_ylabel("")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()
