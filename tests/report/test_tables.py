from __future__ import annotations

from pathlib import Path

import pytest

from minerva_torchrl.report import Bar, Group, Reference, group_runs, load_runs
from minerva_torchrl.report.document import Block, Code, Paragraph, Table
from minerva_torchrl.report.tables import (
    bars_table,
    budget_table,
    default_budgets,
    individual_runs,
    measure,
    overview,
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


# Bars --------------------------------------------------------------------------------------------


def bar(at_least: float, frames: int = 100_000, preset: str = "default") -> Bar:
    return Bar("walker-walk", "mpo", frames, at_least, preset)


def results(folder: Path, *bars: Bar, **kwargs: bool) -> list[tuple[object, ...]]:
    return [row[1:] for row in table_of(bars_table(bars, groups_in(folder, **kwargs))).rows]


def test_bars(tmp_path: Path) -> None:
    write_seeds(tmp_path, [100.0, 200.0, 300.0])
    assert results(tmp_path, bar(150.0), bar(200.0), bar(250.5), bar(1.0, 200_000)) == [
        ("MPO, preset default", "100,000", "≥ 150.0", "200.0 ± 100.0", "3", "met, by 50.0"),
        ("MPO, preset default", "100,000", "≥ 200.0", "200.0 ± 100.0", "3", "met, by 0.000"),
        ("MPO, preset default", "100,000", "≥ 250.5", "200.0 ± 100.0", "3", "missed by 50.5"),
        (
            *("MPO, preset default", "200,000", "≥ 1.000", "-", "0 of 3"),
            "not run that far",
        ),
    ]


def test_a_bar_is_about_its_budget(tmp_path: Path) -> None:
    """What comes later does not help, and neither does what came before."""
    points = [(0, 0.0), (50_000, 900.0), (75_000, 100.0), (100_000, 950.0)]
    write_run(tmp_path / "run", points=points)
    ((*_, measured, _, result),) = results(tmp_path, bar(500.0, 75_000))
    assert (measured, result) == ("100.0 ± -", "missed by 400.0")


def test_interpolated_bars_are_marked(tmp_path: Path) -> None:
    write_seeds(tmp_path, [100.0])
    blocks = bars_table([bar(1.0, 55_000)], groups_in(tmp_path))
    assert table_of(blocks).rows[0][4] == "55.0 ± - †"
    assert has_footnote(blocks)
    assert not has_footnote(bars_table([bar(1.0)], groups_in(tmp_path)))


def test_bars_of_presets_and_variants(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", optim__lr_actor=2e-3, eval__episodes=9)
    write_run(tmp_path / "c", preset="acme")
    shown = results(tmp_path, bar(1.0), bar(1.0, preset="acme"), bar(1.0, preset="tonic"))
    assert [row[0] for row in shown] == [
        "MPO, preset default",
        "MPO, preset default, optim.lr_actor=2e-3",
        "MPO, preset acme",
        "MPO, preset tonic",
    ]
    assert shown[-1][-1] == "not run"
    assert shown[-2][-1] == "met, by 99.0"


def test_many_changes_are_shortened(tmp_path: Path) -> None:
    names = ("loss__gamma", "loss__epsilon", "loss__epsilon_mean", "loss__epsilon_penalty")
    write_run(tmp_path / "a", **dict.fromkeys(names, 0.123))
    ((settings, *_),) = results(tmp_path, bar(1.0))
    assert str(settings).endswith("loss.epsilon_mean=0.123, and 1 more")


def test_unfinished_runs_meet_no_bar(tmp_path: Path) -> None:
    write_run(tmp_path / "a", points=straight(), total_frames=200_000, finished=False)
    assert results(tmp_path, bar(1.0), include_unfinished=True)[0][-1] == "not run"


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
