"""What the runs were made with: settings that differ, all settings, and commands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.report.commands import commands
from minerva_torchrl.report.document import (
    Block,
    Code,
    Details,
    Listing,
    Paragraph,
    Table,
    Text,
)
from minerva_torchrl.report.groups import Group, differing_settings, settings_key
from minerva_torchrl.report.values import setting_text

__all__ = ["command_blocks", "differences_blocks", "settings_blocks"]

_NOT_LISTED = ("algo", "seed", "run_dir", "resume", "trust")


def differences_blocks(groups: Sequence[Group]) -> list[Block]:
    """For each algorithm, the settings in which its groups differ."""
    blocks: list[Block] = []
    for algo, algorithm in ALGORITHMS.items():
        kinds = _kinds(groups, algo)
        if len(kinds) == 1:
            blocks.append(
                Paragraph(f"{algorithm.title}: none. All its runs share the same settings.")
            )
        elif kinds:
            blocks += [Paragraph(f"{algorithm.title}:"), _differences(kinds)]
    return blocks


def settings_blocks(groups: Sequence[Group]) -> list[Block]:
    """For each algorithm, all settings of its groups."""
    blocks: list[Block] = []
    for algo, algorithm in ALGORITHMS.items():
        kinds = _kinds(groups, algo)
        if len(kinds) == 1:
            blocks.append(Paragraph(f"All runs of {algorithm.title} share these settings."))
        for kind in kinds:
            title = f"Settings of {_title(kind, kinds)}"
            blocks.append(Details(title, (Listing(_all_settings(kind), "yaml"),)))
    return blocks


def command_blocks(groups: Sequence[Group]) -> list[Block]:
    """For each group, the commands that train its runs again."""
    blocks: list[Block] = []
    for group in groups:
        blocks.append(Paragraph((f"{group.label} on ", Code(group.task), ":")))
        blocks.append(Listing("\n".join(commands(group)), "bash"))
    return blocks


def _kinds(groups: Sequence[Group], algo: str) -> list[list[Group]]:
    """An algorithm's groups, those together that have the same settings on whatever task."""
    kinds: dict[Hashable, list[Group]] = defaultdict(list)
    for group in groups:
        if group.algo == algo:
            kinds[settings_key(group.runs[0])].append(group)
    return list(kinds.values())


def _title(kind: Sequence[Group], kinds: Sequence[Sequence[Group]]) -> str:
    """The name, and the tasks if it stands for other settings on others."""
    name = kind[0].name
    if sum(other[0].name == name for other in kinds) > 1:
        tasks = dict.fromkeys(group.task for group in kind)
        return f"{name} on {', '.join(tasks)}"
    return name


def _differences(kinds: Sequence[Sequence[Group]]) -> Table:
    settings = [kind[0].runs[0].learning_settings for kind in kinds]
    names = differing_settings(settings)
    rows: list[tuple[Text, ...]] = [
        (Code(name), *(Code(setting_text(some[name])) if name in some else "" for some in settings))
        for name in names
    ]
    return Table(("Setting", *(_title(kind, kinds) for kind in kinds)), tuple(rows))


def _all_settings(kind: Sequence[Group]) -> str:
    """A line for each setting; more than one value where bookkeeping or tasks differ."""
    runs = [run for group in kind for run in group.runs]
    lines = []
    for name in runs[0].settings:
        if name not in _NOT_LISTED:
            values = dict.fromkeys(setting_text(run.settings[name]) for run in runs)
            lines.append(f"{name}: {', '.join(values)}")
    return "\n".join(lines)
