from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minerva_torchrl.report import Group, Reference, group_runs, load_runs
from minerva_torchrl.report.document import Block, Code, Paragraph, Table
from minerva_torchrl.report.tables import (
    budget_table,
    default_budgets,
    individual_runs,
    measure,
    overview,
    published_table,
    throughput,
)
from tests.report.synthetic import straight, write_run, write_seeds


def groups_in(folder: Path, **kwargs: bool) -> list[Group]:
    return group_runs(load_runs(folder, **kwargs).runs)


def table_of(blocks: list[Block]) -> Table:
    assert isinstance(blocks[0], Table)
    return blocks[0]


def has_footnote(blocks: list[Block]) -> bool:
    return any(isinstance(b, Paragraph) and str(b.text).startswith("† Interp") for b in blocks)


# Overview ----------------------------------------------------------------------------------------


def test_overview(tmp_path: Path) -> None:
    write_seeds(tmp_path / "m", [100.0, 110.0, 150.0], seconds=1000.0)
    write_run(tmp_path / "p", "ppo", [(0, 1.0), (100_352, 0.5)], total_frames=100_000)
    table = table_of(overview(groups_in(tmp_path)))
    task = Code("walker-walk")
    assert table.rows == (
        (task, "MPO", "0, 1, 2", "100,000", "120.0 ± 26.5", "16m40s", "100.0"),
        (task, "PPO", "0", "100,352", "0.500 ± -", "8m20s", "200.7"),
    )


def test_overview_says_what_an_evaluation_is(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, eval__episodes=5)
    write_run(tmp_path / "b", seed=1, eval__episodes=10)
    _, note = overview(groups_in(tmp_path))
    assert isinstance(note, Paragraph)
    assert "the mean over 5–10 episodes" in str(note.text)


def test_overview_of_runs_that_end_at_different_frames(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, points=straight(200_000))
    (row,) = table_of(overview(groups_in(tmp_path))).rows
    assert row[3] == "100,000–200,000"


# Budgets -----------------------------------------------------------------------------------------


def test_budget_table_by_hand(tmp_path: Path) -> None:
    # At 25,000: 25, 50 and 75, between evaluations; at 100,000: 100, 200 and 300.
    write_seeds(tmp_path, [100.0, 200.0, 300.0])
    blocks = budget_table(groups_in(tmp_path), budgets=[100_000, 25_000])
    assert table_of(blocks).rows == (
        ("25,000", "MPO", "3", "50.0 ± 25.0 †", "25.0 to 75.0", "50.0", "25.0"),
        ("100,000", "MPO", "3", "200.0 ± 100.0", "100.0 to 300.0", "200.0", "100.0"),
    )
    assert has_footnote(blocks)


def test_no_footnote_without_interpolation(tmp_path: Path) -> None:
    write_seeds(tmp_path, [100.0, 200.0])
    blocks = budget_table(groups_in(tmp_path), budgets=[50_000])
    assert len(blocks) == 1
    assert "†" not in str(blocks)


def test_one_seed_has_neither_deviation_nor_interval(tmp_path: Path) -> None:
    write_seeds(tmp_path, [100.0])
    (row,) = table_of(budget_table(groups_in(tmp_path), budgets=[50_000])).rows
    assert row == ("50,000", "MPO", "1", "50.0 ± -", "-", "50.0", "25.0")


def test_only_seeds_that_got_there_count(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, points=straight(50_000, top=1000.0))
    write_run(tmp_path / "b", seed=1, points=straight(100_000, top=100.0))
    write_run(tmp_path / "c", seed=2, points=straight(100_000, top=300.0))
    rows = table_of(budget_table(groups_in(tmp_path), budgets=[50_000, 100_000, 200_000])).rows
    assert [row[2] for row in rows] == ["3", "2 of 3", "0 of 3"]
    assert rows[0][3].startswith("400.0 ± ")  # type: ignore[union-attr]
    assert rows[1][3] == "200.0 ± 141.4"
    assert rows[2][3:] == ("-", "-", "-", "-")


def test_no_area_without_the_beginning(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, points=[(5_000, 1.0), (100_000, 3.0)])
    write_run(tmp_path / "b", seed=1)
    (group,) = groups_in(tmp_path)
    measured = measure(group, 100_000)
    assert measured is not None
    assert measured.values == (3.0, 100.0)
    assert measured.areas == ()
    (row,) = table_of(budget_table([group], budgets=[100_000])).rows
    assert row[-1] == "-"
    assert measure(group, 1_000) is not None  # of the other seed only
    assert len(measure(group, 1_000).values) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("ends", "budgets"),
    [
        ([30_000], [30_000]),
        ([100_000], [50_000, 100_000]),
        ([100_352], [50_000, 100_000, 100_352]),
        ([120_000, 80_000], [50_000, 80_000]),  # seeds of a group
    ],
)
def test_default_budgets(tmp_path: Path, ends: list[int], budgets: list[int]) -> None:
    for seed, end in enumerate(ends):
        write_run(tmp_path / str(seed), seed=seed, points=straight(end, step=end))
    assert default_budgets(groups_in(tmp_path)) == budgets


def test_default_budgets_of_a_long_and_a_short_group(tmp_path: Path) -> None:
    write_run(tmp_path / "m", points=straight(60_000))
    write_run(tmp_path / "p", "ppo", points=straight(1_000_000, step=50_000))
    groups = groups_in(tmp_path)
    assert default_budgets(groups) == [50_000, 60_000, 100_000, 250_000, 500_000, 1_000_000]
    rows = table_of(budget_table(groups)).rows
    assert [row[:2] for row in rows if row[1] == "MPO"] == [("50,000", "MPO"), ("60,000", "MPO")]
    assert [row[0] for row in rows if row[1] == "PPO"][-1] == "1,000,000"


def test_unfinished_runs_do_not_set_budgets(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, points=straight(12_000, step=6_000), finished=False)
    groups = groups_in(tmp_path, include_unfinished=True)
    assert default_budgets(groups) == [50_000, 100_000]
    assert default_budgets(groups[1:]) == [12_000]


def test_nothing_at_a_budget(tmp_path: Path) -> None:
    write_run(tmp_path / "a", points=[(0, 1.0)], finished=False)
    assert budget_table(groups_in(tmp_path, include_unfinished=True)) == [
        Paragraph("No run has an evaluation after frame 0.")
    ]


def test_references_are_listed(tmp_path: Path) -> None:
    write_seeds(tmp_path, [100.0])
    references = [
        Reference("walker-walk", "best known", 970.0),
        Reference("walker-walk", "tonic | 642", 642.0, frames=50_000),
        Reference("walker-walk", "later", 7.0, frames=900_000),
    ]
    rows = table_of(budget_table(groups_in(tmp_path), references)).rows
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("50,000", "MPO", "50.0 ± -"),
        ("50,000", "reference: tonic | 642", "642.0"),
        ("100,000", "MPO", "100.0 ± -"),
        ("900,000", "reference: later", "7.000"),
        ("", "reference: best known", "970.0"),
    ]


# Published results -------------------------------------------------------------------------------


def published(frames: int | None = 100_000, **more: Any) -> Reference:
    return Reference("walker-walk", "tonic", 592.0, frames=frames, **more)


def beside(folder: Path, *references: Reference, **kwargs: bool) -> list[tuple[object, ...]]:
    blocks = published_table(references, groups_in(folder, **kwargs))
    return [row[1:] for row in table_of(blocks).rows] if blocks else []


def test_published_results(tmp_path: Path) -> None:
    write_seeds(tmp_path, [100.0, 200.0, 300.0])
    assert beside(tmp_path, published(algo="mpo", deviation=82.0)) == [
        ("100,000", "tonic", "592.0 ± 82.0", "MPO", "200.0 ± 100.0", "3")
    ]


def test_published_results_that_nothing_stands_beside(tmp_path: Path) -> None:
    """Of other algorithms and tasks, without a budget, or with one that no run reached."""
    write_seeds(tmp_path, [100.0])
    other = Reference("cheetah-run", "tonic", 5.0, frames=100_000)
    assert beside(tmp_path, published(None), published(200_000), published(algo="ppo"), other) == []


def test_published_results_are_of_their_budget(tmp_path: Path) -> None:
    """What comes later does not help, and neither does what came before."""
    points = [(0, 0.0), (50_000, 900.0), (75_000, 100.0), (100_000, 950.0)]
    write_run(tmp_path / "run", points=points)
    ((*_, measured, _),) = beside(tmp_path, published(75_000))
    assert measured == "100.0 ± -"


def test_interpolated_results_are_marked(tmp_path: Path) -> None:
    write_seeds(tmp_path, [100.0])
    blocks = published_table([published(55_000)], groups_in(tmp_path))
    assert table_of(blocks).rows[0][5] == "55.0 ± - †"
    assert has_footnote(blocks)
    assert not has_footnote(published_table([published()], groups_in(tmp_path)))


def test_a_published_result_beside_presets_and_variants(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", optim__lr_actor=2e-3, eval__episodes=9)
    write_run(tmp_path / "c", preset="acme")
    assert len({row[3] for row in beside(tmp_path, published())}) == 3


def test_unfinished_runs_stand_beside_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "a", points=straight(), total_frames=200_000, finished=False)
    assert beside(tmp_path, published(), include_unfinished=True) == []


# Speed -------------------------------------------------------------------------------------------


def test_throughput(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, seconds=100.0)
    write_run(tmp_path / "b", seed=1, seconds=200.0)
    write_run(tmp_path / "p", "ppo", summary={"frames_per_second": None, "wall_seconds": 7300})
    assert table_of(throughput(groups_in(tmp_path))).rows == (
        (Code("walker-walk"), "MPO", "2", "750.0", "375.0", "2m30s"),
        (Code("walker-walk"), "PPO", "1", "-", "100.0", "2h01m"),
    )


def test_individual_runs(tmp_path: Path) -> None:
    write_seeds(tmp_path, [100.0, 200.0])
    rows = individual_runs(groups_in(tmp_path)).rows
    folder = Code(str(tmp_path / "seed1"))
    end = ("1", "100,000", "200.0", "8m20s")
    assert rows[1] == (folder, Code("walker-walk"), "MPO", *end)
