"""What runs on a suite of tasks say together, next to published results on the same tasks."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from minerva_torchrl.report.comparison import comparison_blocks, minutes_of
from minerva_torchrl.report.document import Block, Code, Paragraph, Picture, Table, Text
from minerva_torchrl.report.groups import Group
from minerva_torchrl.report.plots import COLOURS, new_figure
from minerva_torchrl.report.references import ReferencesError, Suite
from minerva_torchrl.report.suite import (
    Estimate,
    performance_profile,
    suite_iqm,
    suite_mean,
    suite_median,
    with_interval,
)
from minerva_torchrl.report.tables import measure
from minerva_torchrl.report.values import count, mean_and_deviation, number
from minerva_torchrl.runs.curve import style_axes

__all__ = ["Published", "load_published", "suite_blocks"]

PICTURE = "suite.png"


Published = Mapping[str, Mapping[int, Mapping[str, tuple[float, float]]]]
"""By method, number of frames and task: mean and standard deviation."""


def load_published(path: str | Path) -> Published:
    r"""Read a table of published returns.

    Args:
        path (str or Path): a CSV file with the columns ``task, method, env_steps, mean, std``.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "published.csv"
        >>> _ = path.write_text("task,method,env_steps,seeds,mean,std\nwalk,SAC,1000,5,300,20\n")
        >>> load_published(path)["SAC"][1000]["walk"]
        (300.0, 20.0)
    """
    found: dict[str, dict[int, dict[str, tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    try:
        with Path(path).open(newline="") as file:
            for row in csv.DictReader(file):
                result = float(row["mean"]), float(row["std"] or "nan")
                found[row["method"]][int(row["env_steps"])][row["task"]] = result
    except OSError as error:
        raise ReferencesError(f"{path}: can't be read: {error.strerror}.") from None
    except (KeyError, TypeError, ValueError) as error:
        columns = "task, method, env_steps, mean and std"
        raise ReferencesError(f"{path}: must have the columns {columns}; {error!r}.") from None
    return found


def suite_blocks(
    suite: Suite, groups: Sequence[Group], published: Published
) -> tuple[list[Block], dict[str, bytes]]:
    """Tables and a picture of a suite; nothing if it has no runs.

    Args:
        suite (Suite): which tasks and runs.
        groups (sequence of Group): all groups of a report.
        published (mapping): from :func:`load_published`.

    Returns:
        Blocks, and pictures by name.
    """
    of_task = {
        group.task: group
        for group in groups
        if group.finished and group.task in suite.tasks and _in_folder(group, suite.folder)
    }
    scores = {
        frames: {
            task: found.values
            for task in suite.tasks
            if task in of_task and (found := measure(of_task[task], frames)) is not None
        }
        for frames in suite.frames
    }
    end = suite.frames[-1]
    ours = scores[end]
    if not ours:
        return [], {}
    tasks = list(ours)
    theirs = {
        method: {task: result[0] for task, result in published[method][end].items() if task in ours}
        for method in suite.methods
        if set(tasks) <= published.get(method, {}).get(end, {}).keys()
    }
    elsewhere = [g for g in groups if g.finished and _in_folder(g, suite.compared)]
    compared, pictures = comparison_blocks(end, of_task, elsewhere)
    blocks: list[Block] = [
        Paragraph(_introduction(suite, of_task, tasks)),
        Picture(PICTURE, f"{suite.title}: means over tasks, and shares of runs above a return"),
        _totals(end, ours, theirs),
        Paragraph(_explanation(suite, ours)),
        _by_task(suite, of_task, ours, published),
        *compared,
    ]
    return blocks, {PICTURE: _draw(suite, scores, published, tasks), **pictures}


def _in_folder(group: Group, folder: str | None) -> bool:
    return all(run.folder.parent.name == folder for run in group.runs)


def _introduction(suite: Suite, of_task: Mapping[str, Group], tasks: Sequence[str]) -> str:
    seeds = sorted({len(of_task[task].runs) for task in tasks})
    each = count(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    text = f"{suite.title}: {each} of {count(len(tasks), 'task')}."
    missing = [task for task in suite.tasks if task not in tasks]
    if missing:
        text += f" Not run yet: {', '.join(missing)}. All numbers are of the others."
    return text


def _explanation(suite: Suite, ours: Mapping[str, Sequence[float]]) -> str:
    text = "Of published methods the numbers are of the means over seeds of each task."
    if _have_several_seeds(ours):
        text = (
            "In brackets: 95 % stratified bootstrap intervals, with seeds drawn within tasks. "
        ) + text
    return f"{text} {suite.note}".rstrip()


def _have_several_seeds(scores: Mapping[str, Sequence[float]]) -> bool:
    """Whether there is anything to draw an interval from."""
    return all(len(values) > 1 for values in scores.values())


def _totals(
    frames: int, ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Mapping[str, float]]
) -> Table:
    statistics = (suite_mean, suite_median, suite_iqm)
    rows: list[tuple[Text, ...]] = []
    for method, means in theirs.items():
        single = {task: [mean] for task, mean in means.items()}
        rows.append((method, *(number(statistic(single)) for statistic in statistics)))
    if _have_several_seeds(ours):
        estimates = [_estimate_text(with_interval(s, ours)) for s in statistics]
    else:
        estimates = [number(statistic(ours)) for statistic in statistics]
    rows.append(("here", *estimates))
    columns = (f"After {frames:,} frames", "Mean", "Median", "Interquartile mean")
    return Table(columns, tuple(rows), numbers=(1, 2, 3))


def _estimate_text(estimate: Estimate) -> str:
    return f"{estimate.value:.0f} [{estimate.low:.0f}, {estimate.high:.0f}]"


def _by_task(
    suite: Suite,
    of_task: Mapping[str, Group],
    ours: Mapping[str, Sequence[float]],
    published: Published,
) -> Table:
    end = suite.frames[-1]
    rows: list[tuple[Text, ...]] = []
    for task in ours:
        found = measure(of_task[task], end)
        assert found is not None
        results = (published.get(m, {}).get(end, {}).get(task) for m in suite.methods)
        cells = ("-" if one is None else mean_and_deviation(*one) for one in results)
        minutes = minutes_of(of_task[task])
        time = "-" if minutes is None else f"{minutes:.0f}"
        rows.append((Code(task), found.text(), str(len(found.values)), time, *cells))
    columns = ("Task", "Here", "Seeds", "Minutes", *suite.methods)
    return Table(columns, tuple(rows), numbers=tuple(range(1, len(columns))))


def _draw(
    suite: Suite,
    scores: Mapping[int, Mapping[str, Sequence[float]]],
    published: Published,
    tasks: Sequence[str],
) -> bytes:
    figure, canvas = new_figure(12.0, 4.2)
    *curves, profile = figure.subplots(1, 3)
    frames = [f for f in suite.frames if scores[f].keys() >= set(tasks)]
    for axes, statistic, title in zip(
        curves, (suite_mean, suite_iqm), ("Mean", "Interquartile mean"), strict=True
    ):
        style_axes(axes, f"{title} of {count(len(tasks), 'task')}")
        curve = [with_interval(statistic, scores[f], resamples=500) for f in frames]
        if all(_have_several_seeds(scores[f]) for f in frames):
            low, high = [e.low for e in curve], [e.high for e in curve]
            axes.fill_between(frames, low, high, color=COLOURS[0], alpha=0.18)
        axes.plot(frames, [e.value for e in curve], color=COLOURS[0], marker="o", label="here")
        for method, colour in zip(suite.methods, COLOURS[1:] * 3, strict=False):
            points = {
                f: statistic({t: [by_task[t][0]] for t in tasks})
                for f, by_task in sorted(published.get(method, {}).items())
                if f <= suite.frames[-1] and by_task.keys() >= set(tasks)
            }
            xs, ys = list(points), list(points.values())
            if points:
                axes.plot(xs, ys, "--s", color=colour, ms=4, lw=1, label=method)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("frames")
    handles, labels = curves[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    style_axes(profile, "Runs above a return")
    thresholds = np.linspace(0, 1000, 201)
    shares = performance_profile(scores[suite.frames[-1]], thresholds)
    profile.plot(thresholds, shares, color=COLOURS[0])
    profile.set_xlabel(f"return after {suite.frames[-1]:,} frames")
    profile.set_ylabel("share of runs")
    profile.set_ylim(0, 1.02)
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()
