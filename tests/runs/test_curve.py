from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minerva_torchrl.runs.curve import draw_curve

BLUE = (31, 95, 168)  # of the evaluations


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "curve.png"


def evaluation(frames: int, mean: float = 500.0, spread: float = 50.0) -> dict[str, float]:
    return {
        "frames": frames,
        "return_mean": mean,
        "return_min": mean - spread,
        "return_max": mean + spread,
    }


def pixels(path: Path) -> np.ndarray:
    """The picture, which must be a PNG of the right size."""
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert list(path.parent.iterdir()) == [path]
    picture = (imread(path)[..., :3] * 255).round().astype(int)
    assert picture.shape == (500, 800, 3)
    return picture


def axes_of(picture: np.ndarray) -> np.ndarray:
    """The part with the curve, without title, labels and legend."""
    return picture[60:380, 100:]


def count(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((np.abs(picture - np.array(colour)).max(-1) <= 8).sum())


def test_curve(path: Path) -> None:
    evaluations = [evaluation(frames, frames / 20) for frames in range(2_000, 20_001, 2_000)]
    draw_curve(path, evaluations, title="mpo cartpole-balance")
    curve = axes_of(pixels(path))
    line = np.abs(curve - np.array(BLUE)).max(-1) <= 8
    rows, columns = line.nonzero()
    assert columns.max() - columns.min() > 400
    # Up to the right: rows are counted from the top.
    assert rows[columns < columns.mean()].mean() > rows[columns > columns.mean()].mean() + 50


def test_band(path: Path) -> None:
    drawn = []
    for spread in (20.0, 200.0):
        rows = [evaluation(1_000, 0.0, 200.0), evaluation(2_000, 0.0, spread)]
        draw_curve(path, rows, title="band")
        curve = axes_of(pixels(path))
        drawn.append(int(((curve[..., 2] - curve[..., 0]) > 25).sum()))
    assert drawn[1] > 1.3 * drawn[0] > 10_000


def test_no_evaluation(path: Path) -> None:
    draw_curve(path, [], title="a")
    empty = pixels(path)
    assert count(axes_of(empty), BLUE) == 0
    draw_curve(path, [{"frames": 5, "return_mean": math.nan}], title="a")
    assert np.array_equal(pixels(path), empty)
    draw_curve(path, [], [{"frames": 5, "episode_return": 3.0}], title="a")
    assert not np.array_equal(pixels(path), empty)


@pytest.mark.parametrize("frames", [0, 1, 5_000])
def test_one_evaluation(path: Path, frames: int) -> None:
    draw_curve(path, [evaluation(frames)], title="a")
    assert count(pixels(path)[60:380], BLUE) > 20


def test_training_returns(path: Path) -> None:
    evaluations = [evaluation(1_000), evaluation(2_000)]
    draw_curve(path, evaluations, title="a")
    without = pixels(path)
    episodes = [{"frames": frames, "episode_return": 470.0} for frames in range(1_000, 2_000, 50)]
    draw_curve(path, evaluations, episodes, title="a")
    assert (np.abs(pixels(path) - without)[60:380].max(-1) > 20).sum() > 100


def test_holes_are_left_out(path: Path) -> None:
    evaluations = [evaluation(1_000), evaluation(2_000, 600.0)]
    training = [{"frames": 500, "episode_return": 100.0}]
    draw_curve(path, evaluations, training, title="a")
    complete = pixels(path)
    holes = [
        {"frames": 1_500},
        {"frames": 1_500, "return_mean": math.nan, "episode_return": math.nan},
        {"frames": 9_500, "return_mean": math.inf, "episode_return": -math.inf},
        {"frames": math.nan, "return_mean": 1e6, "episode_return": 1e6},
    ]
    draw_curve(path, evaluations + holes, holes + training, title="a")
    assert np.array_equal(pixels(path), complete)


def test_band_with_holes(path: Path) -> None:
    rows = [evaluation(frames) for frames in range(1_000, 6_000, 1_000)]
    rows[2] |= {"return_min": math.nan, "return_max": math.nan}
    draw_curve(path, rows, title="a")
    assert count(axes_of(pixels(path)), BLUE) > 500


def test_titles_are_no_formulas(path: Path) -> None:
    draw_curve(path, [], title=r"cost $\notaformula 5 and 6$")
    with_signs = pixels(path)
    draw_curve(path, [], title="cost")
    assert not np.array_equal(pixels(path), with_signs)


def test_failure_leaves_the_old_picture(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    draw_curve(path, [], title="old")
    old = path.read_bytes()
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_curve(path, [evaluation(1)], title="new")
    assert path.read_bytes() == old
    pixels(path)


HEADLESS = """
import sys
from minerva_torchrl.runs.curve import draw_curve
assert "matplotlib" not in sys.modules
import warnings
warnings.simplefilter("error")
draw_curve(sys.argv[1], [{"frames": 10, "return_mean": 1.0}], title="a")
assert "matplotlib.pyplot" not in sys.modules
"""


def test_needs_no_display_and_no_backend(path: Path) -> None:
    environment = {**os.environ, "MPLBACKEND": "module://no.such.backend"}
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        environment.pop(name, None)
    command = [sys.executable, "-c", HEADLESS, str(path)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    pixels(path)
