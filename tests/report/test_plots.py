from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from minerva_torchrl.report import Group, Reference, group_runs, load_runs
from minerva_torchrl.report.plots import draw_task, file_names, line_styles
from tests.report.synthetic import straight, write_run, write_seeds


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """Figures that were drawn, which is left out to save time."""
    drawn: list[Figure] = []

    def keep(self: FigureCanvasAgg, file: Any, **_: Any) -> None:
        drawn.append(self.figure)

    monkeypatch.setattr(FigureCanvasAgg, "print_png", keep)
    yield drawn
    assert drawn


def axes_of(figure: Figure) -> Axes:
    (axes,) = figure.axes
    return axes


def legend_of(figure: Figure) -> Legend:
    (legend,) = figure.legends
    return legend


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in legend_of(figure).get_texts()]


def groups_in(folder: Path, **kwargs: bool) -> list[Group]:
    return group_runs(load_runs(folder, **kwargs).runs)


def test_a_picture(tmp_path: Path) -> None:
    from matplotlib.image import imread

    write_seeds(tmp_path, [100.0, 200.0])
    data = draw_task("walker-walk", groups_in(tmp_path))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "plot.png").write_bytes(data)
    picture = imread(tmp_path / "plot.png")[..., :3]
    assert picture.shape[1] == 1176
    line = np.abs(picture * 255 - np.array([31, 95, 168])).max(-1) <= 8
    rows, columns = line[:600].nonzero()
    assert columns.max() - columns.min() > 800
    # Up to the right: rows are counted from the top.
    assert rows[columns < 300].mean() > rows[columns > 900].mean() + 200
    # Nothing is cut off at the edges.
    for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
        assert (edge > 0.99).all()


def test_mean_and_interval(tmp_path: Path, figures: list[Figure]) -> None:
    write_seeds(tmp_path / "m", [100.0, 150.0, 200.0])
    write_run(tmp_path / "p", "ppo", straight(80_000, top=40.0), total_frames=80_000)
    groups = groups_in(tmp_path)
    draw_task("walker-walk", groups)
    axes = axes_of(figures[0])
    mpo, ppo = axes.lines
    assert np.asarray(mpo.get_xdata()).tolist() == list(range(0, 100_001, 10_000))
    assert np.asarray(mpo.get_ydata())[-1] == 150.0
    assert np.asarray(ppo.get_xdata())[-1] == 80_000
    (band,) = axes.collections  # of three seeds, and none of one
    corners = band.get_paths()[0].vertices
    assert {100.0, 200.0} <= set(np.asarray(corners)[:, 1])
    assert texts(figures[0]) == ["MPO: 3 seeds", "PPO: 1 seed"]
    assert legend_of(figures[0]).get_title().get_text() == "mean over seeds and its 95 % interval"
    assert axes.get_title(loc="left") == "walker-walk"


@pytest.mark.parametrize(
    ("returns", "label"), [([100.0], "MPO: 1 seed"), ([100.0, 200.0], "MPO: 2 seeds")]
)
def test_one_or_two_seeds_have_no_band(
    returns: list[float], label: str, tmp_path: Path, figures: list[Figure]
) -> None:
    write_seeds(tmp_path, returns)
    draw_task("walker-walk", groups_in(tmp_path))
    assert not axes_of(figures[0]).collections
    assert texts(figures[0]) == [label]
    assert "interval" not in legend_of(figures[0]).get_title().get_text()


def test_references(tmp_path: Path, figures: list[Figure]) -> None:
    write_seeds(tmp_path, [100.0])
    references = [
        Reference("walker-walk", "tonic 642 ± 160", 642.0, algo="mpo", frames=100_000),
        Reference("walker-walk", "far away", 30.0, frames=1_000_000),
        Reference("walker-walk", "_under $score$", -5.0),
    ]
    draw_task("walker-walk", groups_in(tmp_path), references)
    axes = axes_of(figures[0])
    curve, first, marker, second, third = axes.lines
    assert [line.get_ydata()[0] for line in (first, second, third)] == [642.0, 30.0, -5.0]
    for line in (first, second, third):
        assert line.get_linestyle() == "--"
    assert len({line.get_dash_capstyle() for line in axes.lines}) == 1
    assert (marker.get_xdata()[0], marker.get_ydata()[0]) == (100_000, 642.0)
    assert first.get_color() == marker.get_color() == curve.get_color()
    assert second.get_color() != curve.get_color()
    assert axes.get_xlim()[1] == pytest.approx(102_000)  # the one far away is not shown
    low, high = axes.get_ylim()
    assert low < -5.0
    assert high > 642.0
    assert texts(figures[0]) == [
        "MPO: 1 seed",
        "tonic 642 ± 160 (at 100,000 frames)",
        "far away (at 1,000,000 frames)",
        " _under $score$",
    ]
    assert not any(text.get_parse_math() for text in legend_of(figures[0]).get_texts())


def test_unfinished_runs_are_marked(tmp_path: Path, figures: list[Figure]) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, points=straight(20_000), finished=False)
    draw_task("walker-walk", groups_in(tmp_path, include_unfinished=True))
    finished, unfinished = axes_of(figures[0]).lines
    assert texts(figures[0]) == ["MPO: 1 seed", "MPO, unfinished: 1 seed"]
    assert (finished.get_linestyle(), unfinished.get_linestyle()) == ("-", "--")


def test_no_frames_in_common(tmp_path: Path, figures: list[Figure]) -> None:
    write_run(tmp_path / "a", seed=0, points=[(0, 1.0), (10, 1.0)])
    write_run(tmp_path / "b", seed=1, points=[(20, 1.0), (30, 1.0)])
    draw_task("walker-walk", groups_in(tmp_path))
    assert texts(figures[0]) == ["MPO: 2 seeds, no frames in common"]


def test_long_labels_are_broken(tmp_path: Path, figures: list[Figure]) -> None:
    write_seeds(tmp_path, [100.0])
    references = [Reference("walker-walk", "many words " * 12, 50.0)]
    draw_task("walker-walk", groups_in(tmp_path), references)
    draw_task("walker-walk", groups_in(tmp_path))
    assert max(len(line) for line in texts(figures[0])[1].split("\n")) <= 62
    assert figures[0].get_figheight() > figures[1].get_figheight() + 0.3


def test_nothing_global(tmp_path: Path) -> None:
    import sys

    write_seeds(tmp_path, [100.0])
    before = "matplotlib.pyplot" in sys.modules
    draw_task("walker-walk", groups_in(tmp_path))
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_styles_are_the_same_on_all_tasks(tmp_path: Path) -> None:
    for task in ("walker-walk", "cheetah-run"):
        for algo in ("ppo", "mpo"):
            write_run(tmp_path / f"{task}-{algo}", algo, task=task)
    write_run(tmp_path / "v", "vmpo")
    groups = groups_in(tmp_path)
    styles = line_styles(groups)
    assert list(styles) == ["MPO", "V-MPO", "PPO"]
    assert len(set(styles.values())) == 3
    assert line_styles(reversed(groups)) == styles


def test_many_lines_can_be_told_apart(tmp_path: Path) -> None:
    for number in range(20):
        write_run(tmp_path / f"{number:02d}", loss__gamma=0.5 + number / 100)
    styles = line_styles(groups_in(tmp_path))
    assert len(set(styles.values())) == 20


@pytest.mark.parametrize(
    ("tasks", "names"),
    [
        (["walker-walk"], ["walker-walk.png"]),
        (
            ["gym:HalfCheetah-v5", "gym:ALE/Pong-v5"],
            ["gym-HalfCheetah-v5.png", "gym-ALE-Pong-v5.png"],
        ),
        (["a:b", "a/b", "A b"], ["a-b.png", "a-b-2.png", "A-b-3.png"]),
        (["../../etc", "..", "<é>"], ["etc.png", "task.png", "task-2.png"]),
        (["x" * 300], ["x" * 80 + ".png"]),
    ],
)
def test_file_names(tasks: list[str], names: list[str]) -> None:
    assert list(file_names(tasks).values()) == names
