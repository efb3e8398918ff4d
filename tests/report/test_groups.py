from __future__ import annotations

from pathlib import Path

import pytest

from minerva_torchrl.report import Group, group_runs, load_runs
from minerva_torchrl.report.document import Code, Details, Listing, Paragraph, Table
from minerva_torchrl.report.hyperparameters import differences_blocks, settings_blocks
from minerva_torchrl.report.references import Name
from tests.report.synthetic import straight, write_run


def groups_in(folder: Path, **kwargs: bool) -> list[Group]:
    return group_runs(load_runs(folder, **kwargs).runs)


def names(groups: list[Group]) -> list[tuple[str, str, list[int]]]:
    return [(group.task, group.label, group.seeds) for group in groups]


def test_seeds_are_together(tmp_path: Path) -> None:
    for seed in (2, 10, 1):
        write_run(tmp_path / f"m{seed}", seed=seed)
    write_run(tmp_path / "p", "ppo", seed=5)
    write_run(tmp_path / "v", "vmpo", seed=5)
    write_run(tmp_path / "c", task="cheetah-run")
    assert names(groups_in(tmp_path)) == [
        ("cheetah-run", "MPO", [0]),
        ("walker-walk", "MPO", [1, 2, 10]),
        ("walker-walk", "V-MPO", [5]),
        ("walker-walk", "PPO", [5]),
    ]


def test_bookkeeping_does_not_separate(tmp_path: Path) -> None:
    different = {
        "device": "cpu",
        "num_threads": 2,
        "total_frames": 90_000,
        "eval__interval": 1,
        "eval__episodes": 3,
        "eval__seed": 4,
        "checkpoint__keep": 5,
        "checkpoint__replay_buffer": False,
        "logger__backend": "tensorboard",
        "logger__interval": 7,
    }
    write_run(tmp_path / "0", seed=0)
    for seed, (name, value) in enumerate(different.items(), start=1):
        write_run(tmp_path / str(seed), seed=seed, **{name: value})
    (group,) = groups_in(tmp_path)
    assert group.seeds == list(range(len(different) + 1))
    assert group.label == "MPO"


@pytest.mark.parametrize(
    ("name", "value"),
    [("env__num_envs", 2), ("loss__gamma", 0.9), ("network__actor_sizes", [8]), ("max_skipped", 1)],
)
def test_other_settings_separate(tmp_path: Path, name: str, value: object) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, **{name: value})
    assert [group.seeds for group in groups_in(tmp_path)] == [[0], [1]]


# Names of variants -------------------------------------------------------------------------------


def test_named_by_preset(tmp_path: Path) -> None:
    write_run(tmp_path / "a", preset="tonic")
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", preset="acme", task="cheetah-run")
    assert [group.label for group in groups_in(tmp_path)] == [
        "MPO (acme)",
        "MPO (default)",
        "MPO (tonic)",
    ]


def test_named_by_settings(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", optim__lr_actor=2e-3)
    write_run(tmp_path / "p", "ppo")
    assert [group.label for group in groups_in(tmp_path)] == [
        "MPO (default)",
        "MPO (optim.lr_actor=2e-3)",
        "PPO",
    ]


def test_each_is_named_by_its_own_changes(tmp_path: Path) -> None:
    write_run(tmp_path / "a", optim__clip_actor=1.0)
    write_run(tmp_path / "b", loss__gamma=0.9, optim__clip_actor=1.0)
    write_run(tmp_path / "c", loss__gamma=0.9, optim__clip_actor=40.0)
    assert [group.label for group in groups_in(tmp_path)] == [
        "MPO (optim.clip_actor=1)",
        "MPO (loss.gamma=0.9, optim.clip_actor=1)",
        "MPO (loss.gamma=0.9)",
    ]


def test_the_preset_alone_is_not_the_name_of_a_changed_one(tmp_path: Path) -> None:
    write_run(tmp_path / "a", loss__gamma=0.9)
    write_run(tmp_path / "b", loss__gamma=0.9, optim__lr_actor=2e-3)
    assert [group.label for group in groups_in(tmp_path)] == [
        "MPO (optim.lr_actor=5e-4)",
        "MPO (optim.lr_actor=2e-3)",
    ]


def test_named_by_length_if_the_learning_rate_falls(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "ppo", straight(100_000))
    write_run(tmp_path / "b", "ppo", straight(200_000))
    assert [group.label for group in groups_in(tmp_path)] == [
        "PPO (total_frames=100_000)",
        "PPO (total_frames=200_000)",
    ]


def test_longer_runs_with_the_same_seeds_are_a_group_of_their_own(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"short-{seed}", points=straight(50_000), seed=seed)
        write_run(tmp_path / f"long-{seed}", points=straight(100_000), seed=seed)
    write_run(tmp_path / "run", points=straight(70_000), task="walker-run")
    write_run(tmp_path / "run-1", points=straight(80_000), task="walker-run", seed=1)
    found = [(group.task, group.label, len(group.runs)) for group in groups_in(tmp_path)]
    assert found == [
        ("walker-run", "MPO", 2),  # other seeds: one group
        ("walker-walk", "MPO, 50,000 frames", 2),
        ("walker-walk", "MPO, 100,000 frames", 2),
    ]


def test_named_by_both(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", loss__gamma=0.9, env__num_envs=2)
    write_run(tmp_path / "c", preset="acme")
    assert [group.label for group in groups_in(tmp_path)] == [
        "MPO (default)",
        "MPO (default, env.num_envs=2, loss.gamma=0.9)",
        "MPO (acme)",
    ]


def test_long_names_are_short_and_different(tmp_path: Path) -> None:
    many = {"env__frame_skip": 2, "loss__gamma": 0.9, "optim__lr_actor": 2e-3}
    write_run(tmp_path / "a", **many, optim__clip_actor=1.0)
    write_run(tmp_path / "b", **many, optim__clip_actor=2.0)
    write_run(tmp_path / "c")
    labels = [group.label for group in groups_in(tmp_path)]
    assert len(set(labels)) == 3
    assert labels[0].startswith("MPO (env.frame_skip=2, loss.gamma=0.9, optim.lr_actor=2e-3, …")
    assert [label.count("=") for label in labels] == [3, 3, 0]


def test_the_same_settings_have_the_same_name_everywhere(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", optim__lr_actor=2e-3)
    write_run(tmp_path / "c", task="cheetah-run")
    labels = {(g.task, g.label) for g in groups_in(tmp_path)}
    assert labels == {
        ("cheetah-run", "MPO (default)"),
        ("walker-walk", "MPO (default)"),
        ("walker-walk", "MPO (optim.lr_actor=2e-3)"),
    }


def test_different_settings_on_different_tasks_are_no_variants(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", task="cheetah-run", optim__lr_actor=2e-3)
    assert [group.label for group in groups_in(tmp_path)] == ["MPO", "MPO"]


def test_unfinished_runs_are_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, points=straight(20_000), finished=False)
    finished, unfinished = groups_in(tmp_path, include_unfinished=True)
    assert (finished.label, finished.seeds) == ("MPO", [0])
    assert (unfinished.label, unfinished.seeds) == ("MPO, unfinished", [1])


# Settings ----------------------------------------------------------------------------------------


def test_differences(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", optim__lr_actor=2e-3, optim__clip_actor=None)
    write_run(tmp_path / "c", task="cheetah-run", env__num_envs=2)
    heading, table = differences_blocks(groups_in(tmp_path))
    assert heading == Paragraph("MPO:")
    assert isinstance(table, Table)
    assert table.columns[0] == "Setting"
    assert len(table.columns) == 4
    assert table.rows == (
        (Code("env.num_envs"), Code("2"), Code("1"), Code("1")),
        (Code("optim.lr_actor"), Code("5e-4"), Code("5e-4"), Code("2e-3")),
        (Code("optim.clip_actor"), Code("40"), Code("40"), Code("null")),
    )


def test_differences_between_tasks_name_the_tasks(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", task="cheetah-run", optim__lr_actor=2e-3)
    _, table = differences_blocks(groups_in(tmp_path))
    assert isinstance(table, Table)
    assert table.columns == ("Setting", "MPO on cheetah-run", "MPO on walker-walk")
    assert table.rows == ((Code("optim.lr_actor"), Code("2e-3"), Code("5e-4")),)


def test_no_differences(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, task="cheetah-run", eval__episodes=7)
    groups = groups_in(tmp_path)
    assert differences_blocks(groups) == [
        Paragraph("MPO: none. All its runs share the same settings.")
    ]
    sentence, details = settings_blocks(groups)
    assert sentence == Paragraph("All runs of MPO share these settings.")
    assert isinstance(details, Details)
    (listing,) = details.blocks
    assert isinstance(listing, Listing)
    lines = listing.text.splitlines()
    assert "optim.lr_actor: 5e-4" in lines
    assert "eval.episodes: 7, 5" in lines
    assert "env.name: cheetah-run, walker-walk" in lines
    assert not any(line.startswith(("seed", "run_dir", "resume")) for line in lines)


def test_all_settings_of_each_variant(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", preset="acme")
    blocks = settings_blocks(groups_in(tmp_path))
    assert [block.summary for block in blocks if isinstance(block, Details)] == [
        "Settings of MPO (default)",
        "Settings of MPO (acme)",
    ]


def test_names_that_are_given(tmp_path: Path) -> None:
    write_run(tmp_path / "a", loss__gamma=0.9)
    write_run(tmp_path / "b", loss__gamma=0.9, loss__epsilon=0.2)
    write_run(tmp_path / "c")
    write_run(tmp_path / "d", task="cheetah-run", loss__gamma=0.9)
    write_run(tmp_path / "e", "ppo", loss__gamma=0.9)
    given = [
        Name("other", {"algo": "mpo", "loss.gamma": 0.8}),
        Name("short-sighted", {"algo": "mpo", "loss.gamma": 0.9}),
        Name("too late", {"algo": "mpo", "loss.gamma": 0.9}),
    ]
    assert names(group_runs(load_runs(tmp_path).runs, given)) == [
        ("cheetah-run", "short-sighted", [0]),
        ("walker-walk", "short-sighted", [0]),
        ("walker-walk", "short-sighted (2)", [0]),  # other settings that fit as well
        ("walker-walk", "MPO (default)", [0]),
        ("walker-walk", "PPO", [0]),
    ]
