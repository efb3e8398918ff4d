"""Whole reports, and the command line."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from minerva_torchrl.report import (
    LoadedRuns,
    Reference,
    References,
    load_references,
    load_runs,
    make,
    make_report,
)
from tests.report.synthetic import (
    REFERENCES,
    write_realistic_runs,
    write_run,
    write_seeds,
)
from tests.report.test_documents import Page

SECTIONS = [
    *(
        "Overview",
        "Next to published results",
        "Learning curves",
        "Throughput",
        "Settings that differ",
        "Commands",
    ),
    *("Problems", "How to read the numbers", "Every run", "All settings"),
]


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def words_of(folder: Path) -> str:
    """All that a report says, without its pictures."""
    page = (folder / "report.html").read_text()
    return re.sub(r"base64,[^\"]*", "", page) + (folder / "report.md").read_text()


def markdown_cells(text: str) -> list[str]:
    """What is in the cells of all tables, as it is shown."""
    cells = []
    for line in text.splitlines():
        if line.startswith("| "):
            cells += re.split(r" (?<!\\)\| ", line[2:-2])
    return [re.sub(r"\\(.)|`", r"\1", cell).strip() for cell in cells]


# The report --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("realistic")
    (folder / "references.yaml").write_text(REFERENCES)
    make_report(
        load_runs(write_realistic_runs(folder / "runs")),
        folder / "report",
        references=load_references(folder / "references.yaml"),
        machine="2 cores, <no> GPU",
    )
    return folder / "report"


def test_files(realistic: Path) -> None:
    assert set(files(realistic)) == {
        "report.html",
        "report.md",
        "plots/cartpole-swingup.png",
        "plots/gym-HalfCheetah-v5.png",
        "plots/walker-walk.png",
    }


def test_pictures_are_in_both(realistic: Path) -> None:
    text = (realistic / "report.md").read_text()
    linked = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(linked) == 3
    embedded = []
    for image in Page((realistic / "report.html").read_text()).attributes("img"):
        kind, data = str(image["src"]).split(",")
        assert kind == "data:image/png;base64"
        embedded.append(base64.b64decode(data, validate=True))
    assert embedded == [(realistic / name).read_bytes() for name in linked]
    assert all(data.startswith(b"\x89PNG\r\n\x1a\n") for data in embedded)


def test_page_needs_nothing_else(realistic: Path) -> None:
    page = (realistic / "report.html").read_text()
    assert not re.search(r"https?://", re.sub(r"base64,[^\"]*", "", page))
    assert "script" not in dict(Page(page).tags)


def test_both_say_the_same(realistic: Path) -> None:
    parsed = Page((realistic / "report.html").read_text())
    text = (realistic / "report.md").read_text()
    cells = markdown_cells(text)
    assert cells == parsed.cells
    assert len(cells) > 200


def test_sections(realistic: Path) -> None:
    text = (realistic / "report.md").read_text()
    assert re.findall("^## (.*)$", text, re.MULTILINE) == SECTIONS
    tasks = ["cartpole-swingup", "gym:HalfCheetah-v5", "walker-walk"]
    assert re.findall("^### (.*)$", text, re.MULTILINE) == tasks
    assert "Machine: 2 cores, \\<no\\> GPU" in text
    assert "16 runs on 3 tasks, 6 groups of runs that differ only in their seed." in text
    assert "2 more runs could not be used: see Problems." in text
    assert "mpo-broken`: line 3 of eval.csv has no finite return_mean." in text
    assert "mpo-unfinished`: unfinished: it has no summary.json." in text
    assert "| reference: tonic |  | 642.0 ± 160.0 |" in text


def test_the_same_runs_make_the_same_report(realistic: Path, tmp_path: Path) -> None:
    make_report(
        load_runs(realistic.parent / "runs"),
        tmp_path,
        references=load_references(realistic.parent / "references.yaml"),
        machine="2 cores, <no> GPU",
    )
    assert files(tmp_path) == files(realistic)


@pytest.mark.usefixtures("no_drawing")
def test_never_the_best_evaluation(tmp_path: Path) -> None:
    for seed in range(3):
        points = [(0, 1.0), (60_000, 987.25 + seed), (90_000, 400.0 + seed), (100_000, 500.0)]
        write_run(tmp_path / "runs" / str(seed), points=points, seed=seed)
    loaded = load_runs(tmp_path / "runs")
    make_report(loaded, tmp_path / "report", budgets=[95_000, 100_000])
    words = words_of(tmp_path / "report")
    assert "500.0 ± 0.0" in words
    assert not re.search(r"98[789]", words)
    # It would be seen, if it was asked for.
    make_report(loaded, tmp_path / "report", budgets=[60_000])
    assert "988.2 ± 1.0" in words_of(tmp_path / "report")


@pytest.mark.usefixtures("no_drawing")
def test_special_characters(tmp_path: Path) -> None:
    task = "gym:<b>a|b</b>_*x*-v0"
    write_run(tmp_path / "runs" / "a|b <i>", task=task)
    references = References((Reference(task, "<u>1|2</u>", 3.0),))
    make_report(load_runs(tmp_path / "runs"), tmp_path / "report", references=references)
    assert [path.name for path in (tmp_path / "report" / "plots").iterdir()] == [
        "gym-b-a-b-b-_-x--v0.png"
    ]
    parsed = Page((tmp_path / "report" / "report.html").read_text())
    assert not {"b", "i", "u"} & set(dict(parsed.tags))
    assert task in parsed.cells
    assert "reference: <u>1|2</u>" in parsed.cells
    text = (tmp_path / "report" / "report.md").read_text()
    assert markdown_cells(text) == parsed.cells
    without_code = re.sub("```.*?```|`.*?`", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)</?[biu]>", without_code)


@pytest.mark.usefixtures("no_drawing")
def test_references_without_runs_are_mentioned(tmp_path: Path) -> None:
    write_seeds(tmp_path / "runs", [100.0])
    references = References((Reference("waker-walk", "misspelt", 3.0),))
    make_report(load_runs(tmp_path / "runs"), tmp_path / "report", references=references)
    words = words_of(tmp_path / "report")
    assert "There are references, but no runs, of waker-walk." in words
    assert "misspelt" not in words


@pytest.mark.usefixtures("no_drawing")
def test_no_problems_no_machine_no_references(tmp_path: Path) -> None:
    write_seeds(tmp_path / "runs", [100.0])
    make_report(load_runs(tmp_path / "runs"), tmp_path / "report")
    words = words_of(tmp_path / "report")
    assert "None: every run that was found is in this report." in words
    assert "Machine:" not in words
    assert "Next to published results" not in words
    assert "1 run on 1 task, 1 group of" in words


@pytest.mark.parametrize("budgets", [[], [0], [100, -1]])
def test_wrong_budgets(tmp_path: Path, budgets: list[int]) -> None:
    loaded = load_runs(write_seeds(tmp_path / "runs", [100.0]))
    with pytest.raises(ValueError, match="budgets must be positive numbers of frames"):
        make_report(loaded, tmp_path / "report", budgets=budgets)


def test_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        make_report(LoadedRuns((), ()), tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_out_is_a_file(tmp_path: Path) -> None:
    loaded = load_runs(write_seeds(tmp_path / "runs", [100.0]))
    (tmp_path / "report").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"out must be a folder, but .*report is a file"):
        make_report(loaded, tmp_path / "report")
    assert (tmp_path / "report").read_text() == "mine"


# Nothing is half-written -------------------------------------------------------------------------


def two_tasks(folder: Path) -> LoadedRuns:
    write_run(folder / "a")
    write_run(folder / "b", task="cheetah-run")
    return load_runs(folder)


@pytest.mark.parametrize("before", [False, True])
def test_drawing_fails_midway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    loaded, out = two_tasks(tmp_path / "runs"), tmp_path / "report"
    drawn: list[str] = []

    def draw(title: str, *_: object, **__: object) -> bytes:
        drawn.append(title)
        if len(drawn) == 2:
            raise MemoryError
        return b"new"

    if before:
        out.mkdir()
        (out / "report.html").write_text("old page")
    kept = files(tmp_path)
    monkeypatch.setattr("minerva_torchrl.report.make.draw_task", draw)
    with pytest.raises(MemoryError):
        make_report(loaded, out)
    assert drawn == ["cheetah-run", "walker-walk"]
    assert files(tmp_path) == kept
    assert out.exists() == before


@pytest.mark.usefixtures("no_drawing")
def test_writing_fails_midway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, out = two_tasks(tmp_path / "runs"), tmp_path / "report"
    make_report(loaded, out, machine="old machine")
    original = make.replace_file

    def fails(path: Path):  # type: ignore[no-untyped-def]
        if path.name == "report.md":
            raise OSError(28, "No space left on device")
        return original(path)

    monkeypatch.setattr(make, "replace_file", fails)
    with pytest.raises(OSError, match="No space left"):
        make_report(loaded, out, machine="new machine")
    assert "old machine" in (out / "report.html").read_text()
    assert "old machine" in (out / "report.md").read_text()
    assert not [name for name in files(out) if ".tmp" in name]


@pytest.mark.usefixtures("no_drawing")
def test_the_page_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    original = make.replace_file

    def noted(path: Path):  # type: ignore[no-untyped-def]
        written.append(path.name)
        return original(path)

    monkeypatch.setattr(make, "replace_file", noted)
    page = make_report(two_tasks(tmp_path / "runs"), tmp_path / "report")
    assert page == tmp_path / "report" / "report.html"
    assert written == ["cheetah-run.png", "walker-walk.png", "report.md", "report.html"]


@pytest.mark.usefixtures("no_drawing")
def test_other_files_stay(tmp_path: Path) -> None:
    out = tmp_path / "report"
    (out / "plots").mkdir(parents=True)
    (out / "plots" / "mine.png").write_text("mine")
    (out / "report.md").write_text("old")
    make_report(two_tasks(tmp_path / "runs"), out)
    assert (out / "plots" / "mine.png").read_text() == "mine"
    assert (out / "report.md").read_text().startswith("# Learning results")
