from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minerva_torchrl.report import ReferencesError, group_runs, load_references
from minerva_torchrl.report.document import Code, Paragraph, Picture, Table
from minerva_torchrl.report.make import build_document
from minerva_torchrl.report.references import Suite
from minerva_torchrl.report.suite_page import load_published, suite_blocks
from tests.report.synthetic import load_runs, straight, write_run

SUITE = Suite(
    title="Two tasks",
    folder="suite",
    tasks=("walker-walk", "walker-run", "hopper-hop"),
    frames=(50_000, 100_000),
    published="published.csv",
    methods=("SAC", "MPO", "unknown"),
)
PUBLISHED = """task,method,env_steps,seeds,mean,std
walker-walk,SAC,100000,5,800,50
walker-run,SAC,100000,5,400,30
hopper-hop,SAC,100000,5,10,3
walker-walk,MPO,100000,5,300,20
"""
FILE = """
suites:
- title: Two tasks
  folder: suite
  tasks: [walker-walk, walker-run, hopper-hop]
  frames: [50_000, 100_000]
  published: published.csv
  methods: [SAC, MPO, unknown]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs of a suite, one more that is not part of it, and a file of published returns."""
    for task, tops in {"walker-walk": (900.0, 700.0), "walker-run": (300.0, 300.0)}.items():
        for seed, top in enumerate(tops):
            path = tmp_path / "runs" / "suite" / f"{task}-{seed}"
            write_run(path, points=straight(top=top), task=task, seed=seed)
    other = tmp_path / "runs" / "other" / "walk"
    write_run(other, points=straight(top=5.0), seed=7, loss__gamma=0.5)
    (tmp_path / "published.csv").write_text(PUBLISHED)
    (tmp_path / "references.yaml").write_text(FILE)
    return tmp_path


def test_tables_have_the_runs_of_the_folder_beside_those_who_have_all_tasks(folder: Path) -> None:
    groups = group_runs(load_runs([folder / "runs"]).runs)
    blocks, pictures = suite_blocks(SUITE, groups, load_published(folder / "published.csv"))
    introduction, picture, totals, _, by_task = blocks
    assert isinstance(introduction, Paragraph)
    assert introduction.text == (
        "Two tasks: 2 seeds of 2 tasks. Not run yet: hopper-hop. All numbers are of the others."
    )
    assert isinstance(picture, Picture)
    assert pictures[picture.name].startswith(b"\x89PNG")
    assert isinstance(totals, Table)
    # MPO has no walker-run, and hopper-hop counts for nobody.
    assert [row[0] for row in totals.rows] == ["SAC", "here"]
    assert totals.rows[0][1:] == ("600.0", "600.0", "600.0")
    assert totals.rows[1][1:3] == ("550 [500, 600]", "550 [500, 600]")
    assert isinstance(by_task, Table)
    assert by_task.rows[0][1:] == (
        *("800.0 ± 141.4", "2", "8"),
        *("800.0 ± 50.0", "300.0 ± 20.0", "-"),
    )
    assert by_task.rows[1][4:] == ("400.0 ± 30.0", "-", "-")


def test_longer_runs_elsewhere_change_nothing(folder: Path) -> None:
    published = load_published(folder / "published.csv")
    before, _ = suite_blocks(SUITE, group_runs(load_runs([folder / "runs"]).runs), published)
    for seed in (0, 1):
        longer = straight(500_000, top=1.0)
        write_run(folder / "runs" / "long" / f"walk-{seed}", points=longer, seed=seed)
    after, _ = suite_blocks(SUITE, group_runs(load_runs([folder / "runs"]).runs), published)
    assert after == before


def test_runs_with_other_settings_stand_beside_the_suite(folder: Path) -> None:
    suite = replace(SUITE, compared="ablation")
    for seed, top in enumerate((800.0, 100.0)):
        path = folder / "runs" / "ablation" / f"walk-{seed}"
        write_run(path, points=straight(top=top), seed=seed, seconds=400.0, loss__gamma=0.9)
    write_run(folder / "runs" / "ablation" / "other", points=straight(), task="hopper-hop")
    groups = group_runs(load_runs([folder / "runs"]).runs)
    published = load_published(folder / "published.csv")
    blocks, pictures = suite_blocks(suite, groups, published)
    *_, sentence, table, of_time, _, picture = blocks
    assert isinstance(sentence, Paragraph)
    assert isinstance(table, Table)
    assert table.columns[1:] == (
        *(Code("walker-walk"), "Minutes"),
        "Chance that a run here is better",
    )
    here, other = table.rows
    assert here == ("here", "800.0 ± 141.4", "8.3", "")
    assert other[1:3] == ("450.0 ± 495.0", "6.7")
    # 900 beats both, 700 one of two.
    assert str(other[3]).startswith("75% [")
    # After 400 of 500 seconds ours were at four fifths of a straight line.
    assert isinstance(of_time, Table)
    assert of_time.rows[0] == ("minutes", "6.7")
    assert of_time.rows[1] == ("here", "640.0 ± 113.1")
    assert of_time.rows[2][1] == "450.0 ± 495.0"
    assert isinstance(picture, Picture)
    assert pictures[picture.name].startswith(b"\x89PNG")
    assert "comparison.png" not in suite_blocks(SUITE, groups, published)[1]


def test_equal_time_takes_times_that_are_known(folder: Path) -> None:
    suite = replace(SUITE, compared="ablation")
    path = folder / "runs" / "ablation" / "walk-0"
    summary = {"wall_seconds": None}
    write_run(path, points=straight(top=50.0), summary=summary, loss__gamma=0.9)
    groups = group_runs(load_runs([folder / "runs"]).runs)
    *_, table, picture = suite_blocks(suite, groups, load_published(folder / "published.csv"))[0]
    assert isinstance(table, Table)
    assert table.rows[1][1:3] == ("50.0 ± -", "-")
    assert isinstance(picture, Picture)
    assert picture.description.endswith("after as many frames")


def test_without_runs_there_is_nothing(folder: Path) -> None:
    groups = group_runs(load_runs([folder / "runs" / "other"]).runs)
    assert suite_blocks(SUITE, groups, load_published(folder / "published.csv")) == ([], {})


def test_a_report_has_it(folder: Path) -> None:
    references = load_references(folder / "references.yaml")
    assert references.suites == (SUITE,)
    document = build_document(load_runs([folder / "runs"]), references=references)
    titles = [getattr(block, "text", None) for block in document.blocks]
    assert "Two tasks" in titles
    assert "suite.png" in document.pictures


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("frames: [50_000, 100_000]", "suites\\[0\\]: frames is missing"),
        ("tasks: [walker-walk, walker-run, hopper-hop]", "suites\\[0\\]: tasks is missing"),
    ],
)
def test_what_a_suite_needs(folder: Path, change: str, message: str) -> None:
    (folder / "references.yaml").write_text(FILE.replace(change, ""))
    with pytest.raises(ReferencesError, match=message):
        load_references(folder / "references.yaml")


def test_a_suite_of_nothing(folder: Path) -> None:
    (folder / "references.yaml").write_text(FILE.replace("[50_000, 100_000]", "[]"))
    with pytest.raises(ReferencesError, match="tasks and frames must have at least one entry"):
        load_references(folder / "references.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "published.csv: can't be read: No such file"),
        ("task,method\nwalk,SAC\n", "published.csv: must have the columns task, method, env_steps"),
        ("task,method,env_steps,mean,std\nwalk,SAC,many,1,1\n", "must have the columns"),
    ],
)
def test_published_returns_that_are_none(folder: Path, content: str | None, message: str) -> None:
    path = folder / "published.csv"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ReferencesError, match=message):
        load_published(path)
