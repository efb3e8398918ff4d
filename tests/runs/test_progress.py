from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import sys
import threading

import pytest

from minerva_torchrl.runs.progress import Progress

EVALUATION = {
    "frames": 6_800,
    "return_mean": 701.23,
    "return_std": 12.3,
    "return_min": 680.0,
    "return_max": 720.0,
}
EVALUATION_LINE = "   6,800 frames   evaluation 701.2 ± 12.3   (min 680, max 720)"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def drawn(stream: io.StringIO) -> list[str]:
    """All bars and lines, in the order in which they were written."""
    return [text for text in stream.getvalue().replace("\n", "\r").split("\r") if text.strip()]


# Lines --------------------------------------------------------------------------------------------


def test_lines(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(20_000, title="mpo", stream=stream, clock=clock)
    clock.now += 85
    progress.update(6_800, 3_400, 612.345)
    progress.evaluated(EVALUATION)
    clock.now += 82.5
    progress.update(13_400, 6_700)
    progress.write("saved a checkpoint")
    clock.now += 82.5
    progress.update(20_000, 10_000, 99.0)
    clock.now += 10
    progress.close()
    progress.close()
    rates = "80 frames/s  40 updates/s"
    assert stream.getvalue().splitlines() == [
        f"frames 6,800/20,000 (34%)  {rates}  return 612.3  left 2m45s",
        EVALUATION_LINE,
        f"frames 13,400/20,000 (67%)  {rates}  return 612.3  eval 701.2  left 1m22s",
        "saved a checkpoint",
        f"frames 20,000/20,000 (100%)  {rates}  return 99  eval 701.2  left 0s",
        f"frames 20,000/20,000 (100%)  {rates}  return 99  eval 701.2  took 4m20s",
    ]


@pytest.mark.parametrize(("interval", "lines"), [({}, 3), ({"min_interval": 10.0}, 9)])
def test_lines_are_rare(clock: Clock, interval: dict[str, float], lines: int) -> None:
    stream = io.StringIO()
    progress = Progress(2_000, title="mpo", stream=stream, clock=clock, **interval)
    for frames in range(1, 1_000):
        clock.now += 0.1
        progress.update(frames, frames)
    assert len(drawn(stream)) == lines
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    progress.close()
    assert len(drawn(stream)) == lines + 1


def test_default_stream(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    Progress(10, title="mpo", clock=clock).write("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_lines_are_flushed_at_once(clock: Clock) -> None:
    raw = io.BytesIO()
    progress = Progress(10, title="mpo", stream=io.TextIOWrapper(raw, "utf-8"), clock=clock)
    progress.write("hello")
    assert raw.getvalue() == b"hello\n"


def test_signs_that_the_stream_does_not_know(clock: Clock) -> None:
    raw = io.BytesIO()
    progress = Progress(20_000, title="→", stream=io.TextIOWrapper(raw, "ascii"), clock=clock)
    progress.evaluated(EVALUATION)
    assert raw.getvalue() == EVALUATION_LINE.replace("±", "?").encode() + b"\n"


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_only_this_session_counts(clock: Clock, stream: type[io.StringIO]) -> None:
    output = stream()
    progress = Progress(
        20_000, initial=10_000, initial_updates=5_000, title="", stream=output, clock=clock
    )
    assert progress.frames_per_second == progress.updates_per_second == 0.0
    clock.now += 50
    progress.update(12_000, 6_000)
    assert progress.frames_per_second == pytest.approx(40.0)
    assert progress.updates_per_second == pytest.approx(20.0)
    last = drawn(output)[-1]
    assert "40 frames/s" in last
    assert "20 updates/s" in last
    assert ("50s<3m20s" if output.isatty() else "left 3m20s") in last
    # Neither do pauses after the last update.
    clock.now += 1_000
    progress.close()
    assert progress.frames_per_second == pytest.approx(40.0)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_no_time_and_no_frames(clock: Clock, stream: type[io.StringIO]) -> None:
    output = stream()
    progress = Progress(1_000, title="", stream=output, min_interval=0.0, clock=clock)
    progress.update(100, 10)
    assert progress.frames_per_second == 0.0
    clock.now += 60
    progress.update(0, 0)
    last = drawn(output)[-1]
    assert "0 frames/s" in last
    assert "left" not in last  # nobody knows
    progress.close()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize(
    ("frames", "percentage"), [(999, "99%"), (1_000, "100%"), (1_300, "100%"), (0, "0%")]
)
def test_percentage(clock: Clock, stream: type[io.StringIO], frames: int, percentage: str) -> None:
    output = stream()
    progress = Progress(1_000, title="", stream=output, clock=clock)
    clock.now += 60
    progress.update(frames, 0)
    progress.close()
    last = drawn(output)[-1]
    assert re.findall(r"\d+%", last) == [percentage]
    if output.isatty() and frames >= 1_000:
        assert "|#####" in last
        assert "<0s" in last


def test_missing_returns_keep_the_last(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(10, title="", stream=stream, min_interval=0.0, clock=clock)
    for episode_return in (None, 5.0, None, float("nan")):
        progress.update(1, 1, episode_return)
    assert ["return 5" in line for line in drawn(stream)] == [False, True, True, True]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.01234567, "0.01235"),
        (-12.3456, "-12.35"),
        (999.96, "1000"),
        (-1234.56, "-1,235"),
        (98765.4, "98,765"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_scores(clock: Clock, value: float, text: str) -> None:
    stream = io.StringIO()
    progress = Progress(10, title="", stream=stream, clock=clock)
    progress.evaluated({**EVALUATION, "return_mean": value})
    assert stream.getvalue() == f"6,800 frames   evaluation {text} ± 12.3   (min 680, max 720)\n"


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (0, "0/"),
        (999, "999/"),
        (6_800, "6.8k/"),
        (999_499, "999k/"),
        (999_501, "1M/"),
        (1_234_567, "1.23M/"),
        (999_600_000, "1G/"),
        (12_000_000_000, "12G/"),
    ],
)
def test_counts(clock: Clock, frames: int, text: str) -> None:
    stream = Terminal()
    Progress(10**12, initial=frames, title="", stream=stream, clock=clock).close()
    assert f"| {text}" in drawn(stream)[-1]


def test_bad_total() -> None:
    with pytest.raises(ValueError, match="total must be at least 1, got 0"):
        Progress(0, title="mpo")


# Bars ---------------------------------------------------------------------------------------------


def test_bar(clock: Clock) -> None:
    stream = Terminal()
    progress = Progress(20_000, title="mpo cartpole", stream=stream, clock=clock)
    clock.now += 85
    progress.update(6_800, 3_400, 612.345)
    bar = drawn(stream)[-1]
    assert bar.startswith("mpo cartpole  34%|###")
    assert bar.endswith("| 6.8k/20k [1m25s<2m45s, 80 frames/s, 40 updates/s, return 612]")
    progress.evaluated(EVALUATION)
    *_, line, bar = drawn(stream)
    assert line == EVALUATION_LINE
    assert bar.endswith("return 612, eval 701]")
    progress.close()
    progress.close()
    assert drawn(stream)[-1] == bar
    assert stream.getvalue().endswith("]\n")
    progress.write("the end")
    assert stream.getvalue().endswith("]\nthe end\n")


def test_bar_begins_where_the_run_was_left(clock: Clock) -> None:
    stream = Terminal()
    progress = Progress(20_000, initial=10_000, title="mpo", stream=stream, clock=clock)
    [bar] = drawn(stream)
    assert bar.startswith("mpo  50%|####")
    assert "| 10k/20k [0s<?" in bar
    progress.close()


def test_bar_is_not_drawn_too_often(clock: Clock) -> None:
    stream = Terminal()
    progress = Progress(2_000, title="mpo", stream=stream, min_interval=30.0, clock=clock)
    for frames in range(1, 1_001):
        clock.now += 0.001
        progress.update(frames, frames)
    assert 9 <= len(drawn(stream)) <= 12


def test_lines_do_not_tear_the_bar(clock: Clock) -> None:
    stream = Terminal()
    progress = Progress(2_000, title="mpo", stream=stream, clock=clock)
    progress.write("hello")
    first, blank, line, second = stream.getvalue().removeprefix("\r").replace("\n", "").split("\r")
    assert line == "hello"
    assert blank == " " * len(first)
    assert second == first
    assert "\rhello\n\r" in stream.getvalue()


@pytest.mark.parametrize("title", ["mpo cartpole-balance", "x" * 150, "{braces} {bar} %d"])
def test_bar_fits_in_100_columns(clock: Clock, title: str) -> None:
    stream = Terminal()
    progress = Progress(20_000_000, title=title, stream=stream, clock=clock)
    clock.now += 99_999
    progress.update(6_812_345, 3_412_345, -12_345.678)
    progress.evaluated({**EVALUATION, "return_mean": -98_765.4})
    *_, bar = drawn(stream)
    assert len(bar) <= 100
    assert bar.startswith(title[:100])
    assert title.startswith("x") or "#" in bar


def on_terminal(columns: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> str:
    """The last bar on a real terminal, which says how wide it is, and that it has no rows."""
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
    with os.fdopen(theirs, "w", encoding="utf-8") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)  # tqdm knows this one to be a terminal
        progress = Progress(20_000, title="mpo", clock=clock)
        clock.now += 85
        progress.update(6_800, 3_400, 612.345)
        progress.evaluated(EVALUATION)
        progress.close()
    written = b""
    with contextlib.suppress(OSError):  # its end, as nobody writes any more
        while part := os.read(ours, 100_000):  # what is written arrives in parts
            written += part
    os.close(ours)
    text = written.decode()
    return [part for part in text.replace("\n", "\r").split("\r") if part.strip()][-1]


@pytest.mark.parametrize(
    ("columns", "details"),
    [
        (0, "1m25s<2m45s, 80 frames/s, 40 updates/s, return 612, eval 701"),  # it does not say
        (200, "1m25s<2m45s, 80 frames/s, 40 updates/s, return 612, eval 701"),
        (80, "1m25s<2m45s, 80 frames/s, return 612, eval 701"),
        (66, "1m25s<2m45s, 80 frames/s, eval 701"),
        (54, "1m25s<2m45s, 80 frames/s"),
        (45, "1m25s<2m45s"),
    ],
)
def test_details_that_fit(
    clock: Clock, columns: int, details: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = on_terminal(columns, clock, monkeypatch)
    assert bar.endswith(f"| 6.8k/20k [{details}]")
    assert "|██" in bar
    assert len(bar) == min(columns - 1, 120) if columns else 100


def test_no_thread_is_started(clock: Clock) -> None:
    before = threading.active_count()
    progress = Progress(10, title="mpo", stream=Terminal(), clock=clock)
    assert threading.active_count() == before
    progress.close()
