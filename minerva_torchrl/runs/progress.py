"""How far a run is, for the person who watches it."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from tqdm import tqdm

from minerva_torchrl.objectives.checks import check_count
from minerva_torchrl.text import format_duration

__all__ = ["Progress"]

_BAR_INTERVAL = 0.1
_SHORTEST_BAR = 5
_WIDEST_LINE = 120
_USUAL_WIDTH = 100


class Progress:
    """Frames, speed, returns and time left of a run: a bar on a terminal, else some lines.

    On a terminal it is one bar that is drawn again and again, with evaluations as lines above it.
    Where there is no terminal (a file, a pipe, a notebook's log) it is one line from time to time,
    one for each evaluation and one at the end.

    Speeds and the time left are averages since this object was made. What a run did before it was
    interrupted and resumed does not count.

    Args:
        total (int): frames at the end of the run.

    Keyword Args:
        initial (int): frames at the beginning, if the run is resumed. Defaults to ``0``.
        initial_updates (int): updates at the beginning. Defaults to ``0``.
        title (str): text in front of the bar.
        stream (text stream, optional): where to write to. Defaults to ``sys.stderr``.
        min_interval (float): fewest seconds between two lines, where there is no terminal.
            Defaults to ``30``.
        clock (callable): time in seconds. Defaults to :func:`time.perf_counter`.

    Examples:
        >>> clock = iter([0.0, 85.0, 95.0]).__next__
        >>> progress = Progress(20_000, title="mpo", stream=sys.stdout, clock=clock)
        >>> progress.update(frames=6_800, updates=3_400, episode_return=612.31)
        frames 6,800/20,000 (34%)  80 frames/s  40 updates/s  return 612.3  left 2m45s
        >>> row = {"frames": 6_800, "return_mean": 701.2, "return_std": 12.3}
        >>> progress.evaluated({**row, "return_min": 680.0, "return_max": 720.0})
           6,800 frames   evaluation 701.2 ± 12.3   (min 680, max 720)
        >>> progress.close()
        frames 6,800/20,000 (34%)  80 frames/s ... return 612.3  eval 701.2  took 1m35s
    """

    def __init__(
        self,
        total: int,
        *,
        initial: int = 0,
        initial_updates: int = 0,
        title: str,
        stream: TextIO | None = None,
        min_interval: float = 30.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_count("total", total)
        self._total = total
        self._initial = self._frames = initial
        self._initial_updates = self._updates = initial_updates
        self._episode_return: float | None = None
        self._evaluation: float | None = None
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._start = self._now = self._last_shown = clock()
        self._closed = False
        self._title = self._encodable(title)
        self._bar: _Bar | None = None
        self._interval = min_interval
        if self._stream.isatty():
            self._interval = _BAR_INTERVAL
            self._bar = _Bar(
                total=total,
                initial=min(initial, total),
                file=self._stream,
                ncols=self._width(),
                nrows=20,  # any number: tqdm hides the bar if the terminal says it has no rows
                bar_format=self._bar_format(),
            )

    @property
    def frames_per_second(self) -> float:
        """Average from the beginning of this session to the last update; ``0`` before it."""
        return self._per_second(self._frames - self._initial)

    @property
    def updates_per_second(self) -> float:
        """Average from the beginning of this session to the last update; ``0`` before it."""
        return self._per_second(self._updates - self._initial_updates)

    def update(self, frames: int, updates: int, episode_return: float | None = None) -> None:
        """Take note of how far the run is.

        Args:
            frames (int): frames since the beginning of the run.
            updates (int): updates since the beginning of the run.
            episode_return (float, optional): return of the last episode that ended, if one did.
        """
        self._frames = frames
        self._updates = updates
        if episode_return is not None and not math.isnan(episode_return):
            self._episode_return = episode_return
        self._now = self._clock()
        if self._now - self._last_shown >= self._interval:
            self._show()

    def evaluated(self, row: Mapping[str, float]) -> None:
        """Show an evaluation.

        Args:
            row (mapping): ``frames``, ``return_mean``, ``return_std``, ``return_min`` and
                ``return_max``.
        """
        self._evaluation = row["return_mean"]
        names = ("return_mean", "return_std", "return_min", "return_max")
        mean, std, low, high = (_format_score(row[name]) for name in names)
        frames = f"{row['frames']:,}".rjust(len(f"{self._total:,}") + 2)
        self.write(f"{frames} frames   evaluation {mean} ± {std}   (min {low}, max {high})")

    def write(self, line: str) -> None:
        """Write a line that stays."""
        line = self._encodable(line)
        if self._bar is None:
            self._stream.write(line + "\n")
        else:
            self._set_bar()
            _Bar.write(line, file=self._stream)
        self._stream.flush()

    def close(self) -> None:
        """Show the state at the end. Lines can still be written."""
        if self._closed:
            return
        self._closed = True
        if self._bar is None:
            self.write(self._line(f"took {format_duration(self._clock() - self._start)}"))
        else:
            self._set_bar()
            self._bar.close()

    def _show(self) -> None:
        self._last_shown = self._now
        if self._bar is None:
            left = self._time_left()
            self.write(self._line("" if left is None else f"left {format_duration(left)}"))
        else:
            self._set_bar()
            self._bar.refresh()

    def _per_second(self, count: int) -> float:
        elapsed = self._now - self._start
        return count / elapsed if elapsed > 0 else 0.0

    def _time_left(self) -> float | None:
        if self._frames >= self._total:
            return 0.0
        speed = self.frames_per_second
        return (self._total - self._frames) / speed if speed > 0 else None

    def _percentage(self) -> int:
        return min(100 * self._frames // self._total, 100)

    def _scores(self, digits: int) -> list[str]:
        scores = {"return": self._episode_return, "eval": self._evaluation}
        return [
            f"{name} {_format_score(value, digits)}"
            for name, value in scores.items()
            if value is not None
        ]

    def _line(self, end: str) -> str:
        parts = [
            f"frames {self._frames:,}/{self._total:,} ({self._percentage()}%)",
            f"{_format_count(self.frames_per_second)} frames/s",
            f"{_format_count(self.updates_per_second)} updates/s",
            *self._scores(digits=4),
            end,
        ]
        return "  ".join(part for part in parts if part)

    def _set_bar(self) -> None:
        if self._bar is not None:
            self._bar.n = min(self._frames, self._total)  # beyond it tqdm would show no bar
            self._bar.ncols = self._width()
            self._bar.bar_format = self._bar_format()

    def _bar_format(self) -> str:
        """The bar with as many details as the terminal has room for."""
        left = self._time_left()
        times = format_duration(self._now - self._start)
        times += f"<{'?' if left is None else format_duration(left)}"
        frames = _format_count(self.frames_per_second)
        updates = _format_count(self.updates_per_second)
        scores = self._scores(digits=3)
        start = f"{self._title} {self._percentage():>3}%|"
        count = f"| {_format_count(self._frames)}/{_format_count(self._total)}"
        for details in (
            [times, f"{frames} frames/s", f"{updates} updates/s", *scores],
            [times, f"{frames} frames/s", *scores],
            [times, f"{frames} frames/s", *scores[-1:]],
            [times, f"{frames} frames/s"],
            [times],
        ):
            end = f"{count} [{', '.join(details)}]"
            if len(start) + _SHORTEST_BAR + len(end) <= self._width():
                break
        start = start.replace("{", "{{").replace("}", "}}")
        return f"{start}{{bar}}{end}"

    def _width(self) -> int:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (AttributeError, OSError, ValueError):  # a stream without a file
            columns = 0
        # The last column stays free, because some terminals would begin a new line after it.
        return min(columns - 1, _WIDEST_LINE) if columns > 1 else _USUAL_WIDTH

    def _encodable(self, text: str) -> str:
        """A sign that the stream does not know must not end the run."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)


class _Bar(tqdm):
    # Without this tqdm starts a thread that redraws the bar. Here the run does it.
    monitor_interval = 0


def _format_count(value: float) -> str:
    for suffix in ("", "k", "M"):
        if value < 999.5:  # what is rounded up to 1000 belongs to the next suffix
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g}G"


def _format_score(value: float, digits: int = 4) -> str:
    if abs(value) < 10 ** (digits - 1):
        return f"{value:.{digits}g}"
    return f"{value:,.0f}"
