"""Draw the return of finished runs against another of their objectives.

    python examples/mpo_multi_objective.py --multirun loss.objectives.energy.epsilon=0.01,0.1,1
    python examples/pareto_front.py runs/... runs/... --label loss.objectives.energy.epsilon

Every run is a point: the mean over deterministic episodes of its last policy. `--objective` names
the entry of the data with the other reward, `--label` the setting whose value is written beside a
point. Code that the runs name is imported.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
from omegaconf import OmegaConf
from torchrl.envs.utils import ExplorationType, set_exploration_type

from minerva_torchrl.runs import load_policy

mpl.use("agg")
from matplotlib import pyplot as plt


@torch.no_grad()
def point(folder: Path, objective: str, episodes: int) -> tuple[float, float]:
    """The mean return of a run's policy, and that of the other reward."""
    policy = load_policy(folder, trust=True)
    env = policy.make_env(episodes=episodes)
    data, running = env.reset(), torch.ones(episodes, 1, dtype=torch.bool)
    totals = torch.zeros(2, episodes, 1)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        while running.any():
            step, data = env.step_and_maybe_reset(policy.actor(data))
            after = step["next"]
            if objective not in after:
                entries = ", ".join(sorted(after.keys()))
                raise SystemExit(f"error: {folder} has no {objective!r} among {entries}.")
            rewards = torch.stack([after["reward"], after[objective]])
            totals += torch.where(running, rewards, 0.0)
            running &= ~after["done"]
    env.close()
    main, other = totals.mean((1, 2)).tolist()
    return main, other


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those points that no other one is better than in both."""
    best, found = float("-inf"), []
    for main, other in sorted(points, reverse=True):
        if other > best:
            best = other
            found.append((main, other))
    return found


def name(folder: Path, label: str | None) -> str:
    """What to write beside a run's point."""
    if label is None:
        return folder.name
    value = OmegaConf.select(OmegaConf.load(folder / "config.yaml"), label)
    if value is None:
        raise SystemExit(f"error: {folder} has no setting {label!r}.")
    return f"{label.rpartition('.')[2]} {value}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--objective", default="energy", help="entry with the other reward")
    parser.add_argument("--label", help="a setting; the name of a run's folder without it")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("pareto.png"))
    arguments = parser.parse_args()
    names = {folder: name(folder, arguments.label) for folder in arguments.runs}
    points = {}
    for folder in arguments.runs:
        points[folder] = point(folder, arguments.objective, arguments.episodes)
        main, other = points[folder]
        print(f"{folder}: return {main:.4g}, {arguments.objective} {other:.4g}")
    figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    for main, other in points.values():
        axes.plot(other, main, "o", color="C0")
    mains, others = zip(*front(list(points.values())), strict=True)
    axes.step(others, mains, where="pre", color="C0", alpha=0.5)  # what is reached for certain
    for folder, (main, other) in points.items():
        near = {"xytext": (4, 4), "textcoords": "offset points", "size": 7}
        axes.annotate(names[folder], (other, main), **near)
    axes.margins(0.2, 0.15)  # room for the labels
    axes.set(xlabel=f"{arguments.objective} of an episode", ylabel="return")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=150)
    print(arguments.out)


if __name__ == "__main__":
    main()
