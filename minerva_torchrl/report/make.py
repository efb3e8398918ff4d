"""A report, from runs to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minerva_torchrl.report.document import (
    Block,
    Bullets,
    Code,
    Details,
    Document,
    Heading,
    Paragraph,
    Picture,
)
from minerva_torchrl.report.groups import Group, group_runs
from minerva_torchrl.report.hyperparameters import (
    command_blocks,
    differences_blocks,
    settings_blocks,
)
from minerva_torchrl.report.markdown import to_markdown
from minerva_torchrl.report.plots import draw_task, file_names, line_styles
from minerva_torchrl.report.reading import LoadedRuns, Problem
from minerva_torchrl.report.references import References
from minerva_torchrl.report.suite_page import load_published, suite_blocks
from minerva_torchrl.report.tables import (
    budget_table,
    individual_runs,
    overview,
    published_table,
    throughput,
)
from minerva_torchrl.report.values import count
from minerva_torchrl.report.webpage import to_html
from minerva_torchrl.runs.atomic import replace_file

__all__ = ["build_document", "make_report"]

_PICTURES = "plots"
_METHOD = (
    (
        "Mean ± std: over seeds, of the evaluation after exactly so many frames. Std is the sample "
        "standard deviation (divided by n − 1), which a single seed does not have."
    ),
    (
        "95 % interval: percentile bootstrap of the mean over seeds, with 10,000 resamples. It is "
        "also the band around a curve. With few seeds it is rough, and rather too narrow; fewer "
        "than three have none."
    ),
    (
        "IQM: interquartile mean over seeds, the mean of the middle half; a seed at its edge "
        "counts in part."
    ),
    (
        "Area: mean return along the way, the area under the learning curve up to the budget "
        "divided by the budget; mean over seeds."
    ),
    (
        "Curves: mean over seeds, which are interpolated linearly where their evaluations are at "
        "different frames. A curve ends where the first of its seeds ends."
    ),
    (
        "No number here is the best of several evaluations, and no seed is left out, unless it is "
        "named under Problems."
    ),
)


def make_report(
    loaded: LoadedRuns,
    out: str | Path,
    *,
    budgets: Sequence[int] | None = None,
    references: References | None = None,
    machine: str | None = None,
    name: str = "report",
) -> Path:
    """Write ``report.html``, ``report.md`` and ``plots/`` about some runs.

    Everything is made before anything is written. Each file is replaced in one step, the page last.

    Args:
        loaded (LoadedRuns): from :func:`load_runs`. It must have at least one run.
        out (str or Path): folder to write to. It is made if it is not there.

    Keyword Args:
        budgets (sequence of int, optional): numbers of frames to compare at. By default round
            ones, and the end of each task's shortest run.
        references (References, optional): from :func:`load_references`.
        machine (str, optional): what the runs were made on.
        name (str): name of the files, without their ending. Defaults to ``"report"``.

    Returns:
        The page, ``report.html``.

    Examples:
        >>> import tempfile
        >>> make_report(LoadedRuns((), ()), tempfile.mkdtemp())
        Traceback (most recent call last):
        ...
        ValueError: there must be at least one run to report.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"out must be a folder, but {out} is a file.")
    if not name or Path(name).name != name:
        raise ValueError(f"name must be that of a file, without a folder, got {name!r}.")
    document = build_document(loaded, budgets=budgets, references=references, machine=machine)
    files = {out / _PICTURES / name: data for name, data in document.pictures.items()}
    files[out / f"{name}.md"] = to_markdown(document, _PICTURES).encode()
    page = out / f"{name}.html"
    files[page] = to_html(document).encode()
    (out / _PICTURES).mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        with replace_file(path) as file:
            file.write(data)
    return page


def build_document(
    loaded: LoadedRuns,
    *,
    budgets: Sequence[int] | None = None,
    references: References | None = None,
    machine: str | None = None,
) -> Document:
    """All that a report says, with its pictures. The arguments are those of :func:`make_report`."""
    if not loaded.runs:
        raise ValueError("there must be at least one run to report.")
    if budgets is not None and (not budgets or min(budgets) < 1):
        raise ValueError(f"budgets must be positive numbers of frames, got {list(budgets)}.")
    references = references or References()
    groups = group_runs(loaded.runs, references.names)
    tasks = list(dict.fromkeys(group.task for group in groups))
    names = file_names(tasks)
    styles = line_styles(groups)
    pictures: dict[str, bytes] = {}
    blocks = _introduction(loaded, groups)
    for suite in references.suites:
        found, drawn = suite_blocks(
            suite, groups, load_published(references.folder / suite.published)
        )
        blocks += [Heading(2, suite.title), *found] if found else []
        pictures |= drawn
    blocks += [Heading(2, "Overview"), *overview(groups)]
    published = published_table(references.references, groups)
    if published:
        blocks += [Heading(2, "Next to published results"), *published]
    blocks.append(Heading(2, "Learning curves"))
    for task in tasks:
        of_task = [group for group in groups if group.task == task]
        lines = [line for line in references.references if line.task == task]
        pictures[names[task]] = draw_task(task, of_task, lines, styles=styles)
        blocks += [Heading(3, task), Picture(names[task], f"Learning curves of {task}")]
        blocks += budget_table(of_task, lines, budgets)
    blocks += _unused_references(references, tasks)
    blocks += [Heading(2, "Throughput"), *throughput(groups)]
    if machine:
        blocks.append(Paragraph(f"Machine: {machine}"))
    blocks += [Heading(2, "Settings that differ"), *differences_blocks(groups)]
    blocks += [Heading(2, "Commands"), *command_blocks(groups)]
    blocks += [Heading(2, "Problems"), *_problems(loaded.problems)]
    blocks += [Heading(2, "How to read the numbers"), Bullets(_METHOD)]
    blocks += [Heading(2, "Every run"), Details("One row per run", (individual_runs(groups),))]
    blocks += [Heading(2, "All settings"), *settings_blocks(groups)]
    return Document("Learning results", tuple(blocks), pictures)


def _introduction(loaded: LoadedRuns, groups: Sequence[Group]) -> list[Block]:
    tasks = {group.task for group in groups}
    text = (
        f"{count(len(loaded.runs), 'run')} on {count(len(tasks), 'task')}, "
        f"{count(len(groups), 'group')} of runs that differ only in their seed."
    )
    unfinished = sum(not run.finished for run in loaded.runs)
    if unfinished:
        text += f" {count(unfinished, 'run')} unfinished, and marked as such."
    if loaded.problems:
        text += f" {count(len(loaded.problems), 'more run')} could not be used: see Problems."
    return [Paragraph(text)]


def _unused_references(references: References, tasks: Sequence[str]) -> list[Block]:
    """Say so if there are references for tasks without runs: a name may be misspelt."""
    unused = dict.fromkeys(r.task for r in references.references if r.task not in tasks)
    if not unused:
        return []
    return [Paragraph(f"There are references, but no runs, of {', '.join(unused)}.")]


def _problems(problems: Sequence[Problem]) -> list[Block]:
    if not problems:
        return [Paragraph("None: every run that was found is in this report.")]
    return [Bullets(tuple((Code(str(p.folder)), f": {p.reason}.") for p in problems))]
