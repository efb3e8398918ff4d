"""Learning curves of several seeds and algorithms as pictures."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.report.groups import Group
from minerva_torchrl.report.references import Reference
from minerva_torchrl.report.values import count
from minerva_torchrl.runs.curve import TEXT_COLOUR, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["COLOURS", "draw_task", "file_names", "line_styles", "new_figure"]

_DOTS_PER_INCH = 240
_WIDTH, _HEIGHT = 4.9, 3.1  # inches, without the legend: text stays readable on a phone
_LEGEND_ROW = 0.18
_ONE_COLUMN, _TWO_COLUMNS = 62, 31  # characters that fit into a line of the legend
COLOURS = ("#1f5fa8", "#d1602f", "#2b8a5e", "#8b4fa0", "#a67c00", "#c2416b", "#2596a8", "#5c6670")
"""Told apart by those who see colours differently as well, and dark enough for white paper."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_FAINT_COLOUR = "#6b7580"
_REFERENCE_COLOURS = ("#3c434b", "#7d8792", "#a8895a")
_REFERENCE_DASHES = ((4, 2), (1, 1.4), (6, 1.5, 1, 1.5), (2.4, 1.2))

LineStyle = tuple[str, str]
"""Colour and marker."""


def line_styles(groups: Iterable[Group]) -> dict[str, LineStyle]:
    """A colour and a marker for each label, the same on all tasks.

    Args:
        groups (iterable of Group): all groups of a report.
    """
    order = list(ALGORITHMS)
    algorithms = {group.label: order.index(group.algo) for group in groups}
    ordered = sorted(algorithms, key=lambda label: algorithms[label])
    return {
        label: (COLOURS[index % len(COLOURS)], _MARKERS[index % len(_MARKERS)])
        for index, label in enumerate(ordered)
    }


def file_names(tasks: Iterable[str]) -> dict[str, str]:
    """A file name for the plot of each task, safe everywhere and different from the others.

    Args:
        tasks (iterable of str): names of tasks.

    Examples:
        >>> file_names(["gym:HalfCheetah-v5", "a/b", "a:b"])
        {'gym:HalfCheetah-v5': 'gym-HalfCheetah-v5.png', 'a/b': 'a-b.png', 'a:b': 'a-b-2.png'}
    """
    names: dict[str, str] = {}
    taken = set()
    for task in tasks:
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", task).strip("-.")[:80] or "task"
        name, number = stem, 1
        while name.lower() in taken:  # some file systems don't know capital letters
            number += 1
            name = f"{stem}-{number}"
        taken.add(name.lower())
        names[task] = f"{name}.png"
    return names


def new_figure(width: float, height: float) -> tuple[Figure, FigureCanvasAgg]:
    """An empty picture of some inches, and what turns it into a file."""
    # Only here, because it takes long.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure((width, height), dpi=_DOTS_PER_INCH, facecolor="white", layout=layout)
    return figure, FigureCanvasAgg(figure)


def draw_task(
    title: str,
    groups: Sequence[Group],
    references: Sequence[Reference] = (),
    *,
    styles: Mapping[str, LineStyle] | None = None,
) -> bytes:
    """Draw the learning curves of a task: a line for each group, and its interval as a band.

    Args:
        title (str): text above the curves.
        groups (sequence of Group): their runs.
        references (sequence of Reference): dashed lines. Those with a number of frames have a
            marker there, if the curves go that far.

    Keyword Args:
        styles (mapping, optional): colours and markers by label. By default there are new ones.

    Returns:
        A PNG file.
    """
    styles = line_styles(groups) if styles is None else styles
    texts = [_group_text(group) for group in groups] + [_reference_text(r) for r in references]
    labels = ["\n".join(textwrap.wrap(text, _ONE_COLUMN)) or " " for text in texts]
    # Matplotlib leaves out what begins with an underscore.
    labels = [f" {label}" if label.startswith("_") else label for label in labels]
    columns = 2 if max(map(len, labels)) <= _TWO_COLUMNS and len(labels) > 1 else 1
    rows = 1 + sum(label.count("\n") + 1 for label in labels) / columns
    height = _HEIGHT + _LEGEND_ROW * math.ceil(rows)
    figure, canvas = new_figure(_WIDTH, height)
    axes = figure.add_subplot()
    style_axes(axes, title)
    lines = [_draw_group(axes, group, styles[group.label]) for group in groups]
    end = max([1, *(int(frame) for group in groups for frame in group.curve.frames[-1:])])
    axes.set_xlim(-0.02 * end, 1.02 * end)
    colours = {group.algo: styles[group.label][0] for group in reversed(groups)}
    for number, reference in enumerate(references):
        colour = colours.get(reference.algo or "", "")
        lines.append(_draw_reference(axes, reference, number, colour, end))
    has_bands = any(group.curve.low is not None for group in groups)
    legend = figure.legend(
        lines,
        labels,
        loc="outside lower center",
        ncols=columns,
        borderaxespad=0,
        borderpad=0.1,
        handlelength=2.6,
        frameon=False,
        fontsize=8,
        labelcolor=TEXT_COLOUR,
        title="mean over seeds and its 95 % interval" if has_bands else None,
        title_fontsize=8,
    )
    legend.get_title().set_color(_FAINT_COLOUR)
    for text in legend.get_texts():
        text.set_parse_math(False)
    file = io.BytesIO()
    canvas.print_png(file)
    return file.getvalue()


def _draw_group(axes: Axes, group: Group, style: LineStyle) -> Line2D:
    colour, marker = style
    curve = group.curve
    if curve.low is not None and curve.high is not None:
        axes.fill_between(
            curve.frames, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0, zorder=2
        )
    (line,) = axes.plot(
        curve.frames,
        curve.mean,
        color=colour,
        linewidth=1.6,
        linestyle="-" if group.finished else (0, (5, 1.2)),
        marker=marker,
        markersize=3.6,
        markeredgewidth=0,
        markevery=max(1, len(curve.frames) // 12),
        zorder=3,
    )
    return line


def _draw_reference(axes: Axes, reference: Reference, number: int, colour: str, end: int) -> Line2D:
    colour = colour or _REFERENCE_COLOURS[number % len(_REFERENCE_COLOURS)]
    dashes = _REFERENCE_DASHES[number % len(_REFERENCE_DASHES)]
    line = axes.axhline(
        reference.value, color=colour, linewidth=1.1, linestyle=(0, dashes), alpha=0.85, zorder=2.5
    )
    if reference.frames is not None and reference.frames <= end:
        axes.plot(
            [reference.frames],
            [reference.value],
            marker="*",
            markersize=9,
            markeredgewidth=0.8,
            markeredgecolor="white",
            color=colour,
            clip_on=False,
            zorder=4,
        )
    return line


def _group_text(group: Group) -> str:
    text = f"{group.label}: {count(len(group.runs), 'seed')}"
    return text if group.curve.frames.size else f"{text}, no frames in common"


def _reference_text(reference: Reference) -> str:
    text = reference.label
    if reference.deviation is not None:
        text = f"{text}: {reference.result}"
    return text if reference.frames is None else f"{text} (at {reference.frames:,} frames)"
