"""Folders of runs that never were, with the files of real ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from minerva_torchrl.report import LoadedRuns, load_runs
from minerva_torchrl.runs import parse_config
from minerva_torchrl.runs.folder import EVAL_COLUMNS, plain_settings
from tests.runs.tiny import nested

Points = Sequence[tuple[int, float]]
"""Frames and returns of evaluations."""


def straight(end: int = 100_000, top: float = 100.0, step: int = 10_000) -> Points:
    """A learning curve that rises evenly from zero."""
    return [(frames, top * frames / end) for frames in range(0, end + 1, step)]


def config_text(config: dict[str, Any]) -> str:
    """Settings as a run writes them; OmegaConf would take ten times as long."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(config, Dumper=dumper, sort_keys=False, allow_unicode=True)


def write_run(
    folder: Path,
    algo: str = "mpo",
    points: Points | None = None,
    *,
    task: str = "walker-walk",
    seed: int = 0,
    seconds: float = 500.0,
    summary: dict[str, Any] | None = None,
    finished: bool = True,
    **settings: Any,
) -> Path:
    """Write a run, as ``Run`` does; ``__`` in names of settings stands for a dot."""
    points = straight() if points is None else points
    end = points[-1][0]
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    dotted = {"total_frames": max(end, 1), **dotted, "env.name": task, "seed": seed}
    config = plain_settings(parse_config(algo, nested(dotted)), folder)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config_text(config))
    with (folder / "eval.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(EVAL_COLUMNS)
        writer.writerows([frames, value, 1.0, value, value, 1000.0] for frames, value in points)
    if finished:
        content = {
            "algo": algo,
            "env": task,
            "seed": seed,
            "frames": end,
            "final_return": points[-1][1],
            "best_return": max(value for _, value in points),
            "skipped_frames": 0,
            "wall_seconds": seconds,
            "frames_per_second": round(end / seconds, 2),
            "updates_per_second": round(end / seconds / 2, 2),
            **(summary or {}),
        }
        (folder / "summary.json").write_text(json.dumps(content))
    return folder


def write_seeds(folder: Path, tops: Sequence[float], algo: str = "mpo", **kwargs: Any) -> Path:
    """Write a run for each number, in which the return rises evenly up to it."""
    for seed, top in enumerate(tops):
        write_run(folder / f"seed{seed}", algo, straight(top=top), seed=seed, **kwargs)
    return folder


def loaded_seeds(
    folder: Path, tops: Sequence[float], algo: str = "mpo", **kwargs: Any
) -> LoadedRuns:
    return load_runs(write_seeds(folder, tops, algo, **kwargs))


def learning(
    rng: np.random.Generator, end: int, step: int, start: float, top: float, speed: float
) -> Points:
    """A learning curve as they often are: an S with noise."""
    frames = np.arange(0, end + 1, step)
    middle = end / speed * rng.uniform(0.8, 1.2)
    rise = 1 / (1 + np.exp(-(frames - middle) / (0.12 * end)))
    rise = (rise - rise[0]) / (rise[-1] - rise[0])
    noise = rng.normal(0, 0.04 * (top - start), len(frames)) * (0.2 + rise)
    returns = np.clip(start + (top - start) * rise * rng.uniform(0.85, 1.0) + noise, 0, 1000)
    return [(int(frame), float(value)) for frame, value in zip(frames, returns, strict=True)]


def write_realistic_runs(folder: Path) -> Path:
    """Two tasks, two algorithms and three seeds, a variant, and runs that can't be used."""
    rng = np.random.default_rng(7)
    kinds: list[tuple[str, str, str, int, float, float, dict[str, Any]]] = [
        ("walker-walk", "mpo", "mpo", 100_000, 940, 2.6, {}),
        ("walker-walk", "mpo-lr", "mpo", 100_000, 720, 2.0, {"optim__lr_actor": 2e-3}),
        ("walker-walk", "ppo", "ppo", 100_352, 420, 1.5, {"total_frames": 100_000}),
        ("cartpole-swingup", "mpo", "mpo", 100_000, 860, 3.2, {}),
        ("cartpole-swingup", "ppo", "ppo", 100_352, 540, 1.8, {"total_frames": 100_000}),
        ("gym:HalfCheetah-v5", "vmpo", "vmpo", 301_056, 880, 1.6, {"total_frames": 300_000}),
    ]
    for task, name, algo, end, top, speed, settings in kinds:
        for seed in range(1 if algo == "vmpo" else 3):
            points = learning(rng, end, 5_000 if algo == "mpo" else 2048 * 3, 25, top, speed)
            points = [*(p for p in points if p[0] < end), (end, points[-1][1])]
            seconds = end / (75 if algo == "mpo" else 900) * rng.uniform(0.9, 1.1)
            write_run(
                folder / f"{name}-{task.replace(':', '-')}-s{seed}",
                algo,
                points,
                task=task,
                seed=seed,
                seconds=round(seconds, 2),
                eval__episodes=10,
                **settings,
            )
    broken = write_run(folder / "mpo-broken", seed=7)
    (broken / "eval.csv").write_text("frames,return_mean\n0,12.5\n5000,nan\n")
    write_run(folder / "mpo-unfinished", points=straight(40_000), seed=8, finished=False)
    return folder


REFERENCES = """\
references:
- {task: cartpole-swingup, algo: mpo, label: tonic, value: 642, deviation: 160, frames: 100_000}
- {task: walker-walk, label: "Acme, 1M frames", value: 960}
- {task: walker-walk, label: "random policy", value: 40}
"""
