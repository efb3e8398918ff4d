"""The learning curves of all tasks in one picture: `python docs/pictures/results.py`.

From the runs in results/: mean over seeds, and from the lowest to the highest of them. Stars are
published results (results/references.yaml).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from minerva_torchrl.report import Group, group_runs, load_references, load_runs

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("results.png")
COLOURS = {"mpo": "tab:blue", "vmpo": "tab:green", "ppo": "tab:orange"}
NAMES = {"mpo": "MPO", "vmpo": "V-MPO", "ppo": "PPO"}


def draw(axes: plt.Axes, group: Group) -> None:
    """Mean and range of the seeds, up to the end of the shortest run."""
    end = min(run.last_frame for run in group.runs)
    frames = np.linspace(0, end, 60)
    returns = [np.interp(frames, run.frames, run.returns) for run in group.runs]
    colour = COLOURS[group.algo]
    label = f"{NAMES[group.algo]}, {len(returns)} seeds"
    axes.plot(frames / 1e3, np.mean(returns, 0), color=colour, label=label)
    axes.fill_between(
        frames / 1e3, np.min(returns, 0), np.max(returns, 0), color=colour, alpha=0.2, lw=0
    )


def main() -> None:
    """Write the picture."""
    groups = [g for g in group_runs(load_runs(ROOT / "results").runs) if g.preset == "default"]
    references = load_references(ROOT / "results" / "references.yaml").references
    tasks = list(dict.fromkeys(group.task for group in groups))
    figure, all_axes = plt.subplots(
        1, len(tasks), figsize=(2.9 * len(tasks), 2.9), layout="constrained"
    )
    for axes, task in zip(all_axes, tasks, strict=True):
        for group in groups:
            if group.task == task:
                draw(axes, group)
        for line in references:
            if line.task == task and line.frames and line.algo:
                place = (line.frames / 1e3, line.value)
                axes.plot(*place, "*", color=COLOURS[line.algo], markersize=11, mec="white")
        axes.set(title=task.removeprefix("gym:"), xlabel="thousand steps")
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    all_axes[0].set_ylabel("return")
    figure.savefig(FILE, dpi=90)


if __name__ == "__main__":
    main()
