"""Make the runs of results/ that are missing, in the order of results/PROTOCOL.md.

    python benchmarks/results.py --list
    python benchmarks/results.py --only suite --jobs 2
    python benchmarks/results.py --only suite --again

With ``--again`` runs are made that results/made.txt does not have: those of before the commit that
the protocol names. One with other evaluations takes the place of the former.

A run that was interrupted goes on where it was. What is kept of a run in results/ is its
evaluations, settings and summary; the policies of the suite's first seed go to pretrained/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MADE = RESULTS / "made.txt"
"""Runs with the frozen defaults; if they had been made before, whether they were the same."""
KEPT = ("config.yaml", "eval.csv", "summary.json")

SUITE = (
    *("acrobot-swingup", "ball_in_cup-catch", "cartpole-balance", "cartpole-balance_sparse"),
    *("cartpole-swingup", "cartpole-swingup_sparse", "cheetah-run", "finger-spin"),
    *("finger-turn_easy", "finger-turn_hard", "hopper-hop", "hopper-stand", "pendulum-swingup"),
    *("reacher-easy", "reacher-hard", "walker-run", "walker-stand", "walker-walk"),
)
"""The 18 tasks of DM Control for which returns of MPO are published."""
GYM = ("gym:HalfCheetah-v5", "gym:Walker2d-v5", "gym:Hopper-v5")
SEQUENCES = {"replay_buffer.n_steps": 1, "replay_buffer.sequence_length": 8}
SEQUENCES |= {"replay_buffer.batch_size": 16}
FORMER: dict[str, dict[str, object]] = {  # what version 0.1 had in the place of a change
    "former_updates": {"optim.updates_per_frame": 0.5, "replay_buffer.batch_size": 128}
    | {"optim.lr_actor": 1e-3, "optim.lr_critic": 1e-3, "replay_buffer.n_steps": 5},
    "former_norm": {"network.norm_every_layer": "false"},
    "former_exploration": {"collector.noise": "white", "network.tanh_mean": "false"},
    "former_bounds": {"network.scale_gain": 1.0, "loss.alpha_update": "gradient"}
    | {"optim.lr_dual": 1e-2, "optim.lr_temperature": "null"},
}
ENERGY = {"env.wrappers": "[minerva_torchrl.envs.energy:EnergyCost]"}
ENERGY |= {"loss.objectives.energy.reward": "energy"}
ONE_STEP: dict[str, object] = {"replay_buffer.n_steps": 1, "replay_buffer.batch_size": 128}
ONE_STEP |= {"optim.target_period": 25, "optim.target_period_actor": 100}
"""As in examples/mpo_discrete.py."""
WIDE = {"v_min": -100.0, "v_max": 100.0, "num_atoms": 101, "adaptive": "true"}
BINS: dict[str, dict[str, object]] = {
    "categorical": {"network.critic_kwargs.adaptive": "true"},
    "hl_gauss": {f"network.critic_kwargs.{name}": value for name, value in WIDE.items()},
}
"""Supports that grow where they must."""


INDEX = """# Trained policies

Weights, settings and a card with the command, seed and versions of each. They are of the first
seed, not of the best one.

```bash
python -m minerva_torchrl evaluate pretrained/mpo-walker-walk --video walk.mp4  # needs OpenGL
```

In Python, `minerva_torchrl.runs.load_policy("pretrained/mpo-walker-walk").predict(observation)`.

| policy | frames | seed | return of 10 episodes |
|---|---:|---:|---:|
"""


@dataclass(frozen=True)
class Runs:
    """Runs that differ in their task and seed only."""

    folder: str
    algo: str
    tasks: tuple[str, ...]
    frames: int
    seeds: tuple[int, ...] = (0, 1, 2)
    variant: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)

    def names(self) -> Iterator[tuple[str, str, int]]:
        """Folder, task and seed of each, all tasks with the first seed first."""
        for seed in self.seeds:
            for task in self.tasks:
                parts = (self.algo, task.removeprefix("gym:"), self.variant, str(seed))
                yield f"{self.folder}/{'-'.join(filter(None, parts))}", task, seed

    def command(self, task: str, seed: int, run_dir: Path) -> list[str]:
        """What makes one of them."""
        example = str(ROOT / "examples" / f"{self.algo}_dmc.py")
        if (run_dir / "config.yaml").exists():
            return [sys.executable, example, f"resume={run_dir}"]
        settings = {
            "env.name": task,
            "seed": seed,
            "total_frames": self.frames,
            "eval.interval": self.frames // 4 if self.frames <= 100_000 else 50_000,
            "eval.episodes": 10,
            "checkpoint.interval": 50_000,
            **self.settings,
            "run_dir": run_dir,
        }
        return [sys.executable, example, *(f"{name}={value}" for name, value in settings.items())]


ALL = (
    Runs("suite", "mpo", SUITE, 100_000),
    Runs("suite", "mpo", ("walker-walk", "cheetah-run"), 100_000, seeds=(3, 4)),
    Runs("long", "mpo", ("cheetah-run", "walker-run"), 500_000, seeds=(0, 1)),
    Runs("gym", "mpo", GYM, 200_000),
    *(
        Runs("on-policy", algo, ("cartpole-swingup", "walker-walk", "cheetah-run", *GYM), 500_000)
        for algo in ("ppo", "vmpo")
    ),
    Runs(
        "ablation",
        "mpo",
        ("cartpole-swingup", "walker-walk", "cheetah-run", "finger-spin"),
        100_000,
        variant="former",
        settings={name: value for change in FORMER.values() for name, value in change.items()},
    ),
    *(
        Runs("ablation", "mpo", ("walker-walk", "cheetah-run"), 100_000, variant=v, settings=s)
        for v, s in FORMER.items()
    ),
    *(
        Runs(
            *("discrete", "mpo", ("gym:CartPole-v1", "gym:Acrobot-v1"), 30_000),
            variant=variant,
            settings=settings,
        )
        for variant, settings in (("three_steps", {}), ("", ONE_STEP))
    ),
    *(
        Runs("estimators", "mpo", ("walker-walk", "cheetah-run"), 40_000, variant=name, settings=s)
        for name, s in {
            # as many steps as the sequences have
            "5_step": {"replay_buffer.n_steps": 5, "replay_buffer.batch_size": 128},
            "td_lambda": {"loss.value_estimator": "td_lambda", **SEQUENCES},
            "retrace": {"loss.value_estimator": "retrace", **SEQUENCES},
        }.items()
    ),
    *(
        Runs(
            *("critics", "mpo", tasks, frames),
            variant=critic,
            settings={"network.critic": critic, **settings},
        )
        for tasks, frames in (
            (("walker-walk", "cheetah-run"), 100_000),
            (("gym:HalfCheetah-v5",), 200_000),
        )
        for critic, settings in BINS.items()
    ),
    *(
        Runs(
            *("critics", "mpo", ("walker-walk",), 100_000, (0,), critic),
            {"network.critic": critic, **settings},
        )
        for critic, settings in (
            ("two_hot", BINS["hl_gauss"]),
            ("quantile", {}),
            ("gaussian_mixture", {}),
        )
    ),
    Runs(
        *("family", "mpo", ("walker-walk",), 100_000, (0,)),
        *("full_covariance", {"network.policy": "full_covariance"}),
    ),
    Runs(
        *("family", "mpo", ("geared-pendulum",), 30_000),
        settings={"env.factory": "mpo_hybrid:GearedPendulum"},
    ),
    *(
        Runs(
            *("pareto", "mpo", ("cheetah-run",), 100_000, (0,), f"energy_{epsilon}"),
            {**ENERGY, "loss.objectives.energy.epsilon": epsilon},
        )
        for epsilon in (0.01, 0.1, 0.3, 1.0, 3.0)
    ),
)
"""In the order in which they are made."""


def make(runs: Runs, name: str, task: str, seed: int, out: Path) -> str:
    """Train, and keep what results/ has of a run: in place of the former, if it is another."""
    run_dir, kept = out / name, RESULTS / name
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (run_dir.parent / f"{run_dir.name}.log").open("a") as log:
        command = runs.command(task, seed, run_dir)
        code = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
    if code:
        return f"{name}: exit code {code}, see {log.name}"
    evaluations, former = run_dir / "eval.csv", kept / "eval.csv"
    if former.exists() and former.read_bytes() == evaluations.read_bytes():
        return _made(f"{name}: done, the same")
    verdict = "done, another" if former.exists() else "done"
    kept.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        # Where this checkout is says nothing about the run.
        (kept / file).write_text((run_dir / file).read_text().replace(f"{ROOT}/", ""))
    if runs.folder == "suite" and seed == 0:
        pretrained = ROOT / "pretrained" / f"{runs.algo}-{task}"
        shutil.rmtree(pretrained, ignore_errors=True)
        publish = [sys.executable, "-m", "minerva_torchrl", "publish", str(run_dir)]
        subprocess.run([*publish, "--out", str(pretrained)], check=True, env=environment)
        (pretrained.parent / "README.md").write_text(index(pretrained.parent))
    return _made(f"{name}: {verdict}")


def _made(line: str) -> str:
    """Remember that a run was made."""
    with MADE.open("a") as file:
        file.write(f"{line}\n")
    return line


def index(pretrained: Path) -> str:
    """What there is in a folder of published policies."""
    cards = [json.loads(path.read_text()) for path in sorted(pretrained.glob("*/card.json"))]
    lines = []
    for card in cards:
        name = f"{card['algo']}-{card['task']}"
        result = f"{card['return_mean']:.0f} ± {card['return_std']:.0f}"
        cells = (f"[{name}]({name}/card.json)", f"{card['frames']:,}", str(card["seed"]), result)
        lines.append(f"| {' | '.join(cells)} |")
    return INDEX + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=sorted({runs.folder for runs in ALL}), help="one folder")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--out", type=Path, help="their folders (runs/results, runs/again)")
    parser.add_argument("--list", action="store_true", help="name those that are missing")
    parser.add_argument("--again", action="store_true", help="those that were made too early")
    args = parser.parse_args()
    made = {line.partition(":")[0] for line in MADE.read_text().splitlines()}
    there = {
        path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.glob("*/*/summary.json")
    }
    missing = [
        (runs, *names)
        for runs in ALL
        if args.only in (None, runs.folder) and not (args.again and runs.folder == "estimators")
        for names in runs.names()
        if (names[0] in there - made if args.again else names[0] not in there)
    ]
    if args.list:
        for _, name, _, _ in missing:
            sys.stdout.write(f"{name}\n")
        return 0
    out = args.out or ROOT / "runs" / ("again" if args.again else "results")
    failed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(lambda run: make(*run, out.resolve()), missing):
            failed += ": done" not in line
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
