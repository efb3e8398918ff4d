"""Learning curves as pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minerva_torchrl.runs.atomic import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["TEXT_COLOUR", "draw_curve", "style_axes"]

_DOTS_PER_INCH = 120
_SIZE = (800 / _DOTS_PER_INCH, 500 / _DOTS_PER_INCH)
_EVALUATION_COLOUR = "#1f5fa8"
_TRAINING_COLOUR = "#8a94a0"
TEXT_COLOUR = "#333a42"
_LINE_COLOUR = "#d9dde2"


def draw_curve(
    path: str | Path,
    evaluations: Sequence[Mapping[str, float]],
    training: Sequence[Mapping[str, float]] = (),
    *,
    title: str,
) -> None:
    """Draw returns over frames into a PNG file.

    The file is replaced in one step, so that it can be looked at during the run. Nothing of
    Matplotlib's global state is used, and no display is needed.

    Args:
        path (str or Path): the file.
        evaluations (sequence of mappings): rows with ``frames`` and ``return_mean``, a line, and
            with ``return_min`` and ``return_max``, a band around it. Rows without a mean are left
            out.
        training (sequence of mappings): rows with ``frames`` and ``episode_return``, faint dots.
            Rows without a return are left out.

    Keyword Args:
        title (str): text above the curve.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "curve.png"
        >>> evaluation = {"frames": 5000, "return_mean": 250.0}
        >>> draw_curve(path, [evaluation], title="mpo cartpole-balance")
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    # Only here, because it takes long, and most of the package does without.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=_SIZE, dpi=_DOTS_PER_INCH, facecolor="white", layout=layout)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    style_axes(axes, title)
    trained = _draw_training(axes, training)
    evaluated = _draw_evaluations(axes, evaluations)
    end = max([1.0, *trained, *evaluated])
    axes.set_xlim(-0.02 * end, 1.02 * end)
    # Below the axes, where it hides nothing; to find a free place takes long with many dots.
    legend = figure.legend(
        reverse=True,
        borderaxespad=0,
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=8,
        labelcolor=TEXT_COLOUR,
        markerscale=1.2,
    )
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)  # readable, however faint the dots are
    with replace_file(path) as file:
        canvas.print_png(file)


def style_axes(axes: Axes, title: str) -> None:
    """Give the axes of a learning curve the look that all of them have.

    Args:
        axes (Axes): of Matplotlib.
        title (str): text above them.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_facecolor("white")
    axes.set_title(
        title, loc="left", fontsize=11, fontweight="bold", color=TEXT_COLOUR, parse_math=False
    )
    axes.set_xlabel("frames", fontsize=9, color=TEXT_COLOUR)
    axes.set_ylabel("episode return", fontsize=9, color=TEXT_COLOUR)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes.tick_params(labelsize=8, color=_LINE_COLOUR, labelcolor=TEXT_COLOUR)
    axes.grid(True, color=_LINE_COLOUR, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_LINE_COLOUR)


def _draw_training(axes: Axes, training: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
    frames, returns = _columns(training, "frames", "episode_return")
    # Dots that lie on each other add up, so many of them are smaller and fainter.
    many = len(frames) > 500
    axes.plot(
        frames,
        returns,
        linestyle="none",
        marker="o",
        markersize=2.4 if many else 3.6,
        markeredgewidth=0,
        color=_TRAINING_COLOUR,
        alpha=max(0.12, 10 / math.sqrt(len(frames))) if many else 0.6,
        label="training episodes",
        zorder=1.5,
    )
    return frames


def _draw_evaluations(
    axes: Axes, evaluations: Sequence[Mapping[str, float]]
) -> NDArray[np.float64]:
    names = ("frames", "return_mean", "return_min", "return_max")
    frames, mean, low, high = _columns(evaluations, *names)
    axes.fill_between(
        frames, low, high, color=_EVALUATION_COLOUR, alpha=0.22, linewidth=0, zorder=2
    )
    axes.plot(
        frames,
        mean,
        color=_EVALUATION_COLOUR,
        linewidth=1.8,
        marker="o",
        markersize=4 if len(frames) <= 50 else 0,
        label="evaluation: mean and range of episodes",
        zorder=3,
    )
    return frames


def _columns(rows: Sequence[Mapping[str, float]], *names: str) -> list[NDArray[np.float64]]:
    """Columns of the rows in which the first two are finite; other holes are NaN."""
    table = np.array([[row.get(name) for name in names] for row in rows], dtype=np.float64)
    table = table.reshape(-1, len(names))
    table[~np.isfinite(table)] = np.nan
    return list(table[~np.isnan(table[:, :2]).any(1)].T)
