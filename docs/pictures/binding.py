"""Draw which constraint binds in runs: ``python docs/pictures/binding.py runs/a runs/b``.

With ``--keep`` the columns that it drew are stored in ``docs/pictures/data``, from where it draws
them without arguments. With ``--medians`` it draws nothing, and prints the medians of the
divergences over their bounds after the first tenth of each run.
"""

from __future__ import annotations

import argparse
import csv
import sys
from itertools import compress
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RELATIVE = ("kl_q_rel", "kl_mean_rel", "kl_stddev_rel", "kl_policy_rel", "kl_penalty_rel")
DUALS = ("temperature", "alpha_mean", "alpha_stddev", "alpha_policy", "penalty_temperature")
Table = dict[str, list[float]]


def read(path: Path) -> Table:
    """Columns of a table, empty cells left out."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    keep = [r for r in rows if all(r.get(n) for n in ("frames",))]
    names = [
        n for n in ("frames", "return_mean", *RELATIVE, *DUALS) if n in (rows[0] if rows else {})
    ]
    return {n: [float(r[n]) if r[n] else float("nan") for r in keep] for n in names}


def keep(name: str, table: Table) -> None:
    """Store columns."""
    (HERE / "data").mkdir(exist_ok=True)
    with (HERE / "data" / name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        writer.writerows([f"{x:.5g}" for x in row] for row in zip(*table.values(), strict=True))


def medians(metrics: Table) -> str:
    """Those of the divergences over their bounds, after the first tenth of a run."""
    late = [frame > metrics["frames"][-1] / 10 for frame in metrics["frames"]]
    found = {n: median(compress(metrics[n], late)) for n in RELATIVE if n in metrics}
    return ", ".join(f"{name} {value:.2f}" for name, value in found.items())


def draw(title: str, metrics: Table, evaluations: Table, out: Path) -> None:
    """Returns, divergences over their bounds, and dual variables."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    axes[0].plot(evaluations["frames"], evaluations["return_mean"], marker=".")
    axes[0].set(title=title, ylabel="return of the deterministic policy", xlabel="frames")
    for name in RELATIVE:
        if name in metrics:
            axes[1].plot(metrics["frames"], metrics[name], label=name)
    axes[1].axhline(1.0, color="grey", linewidth=0.8)
    # At the first updates there is next to no divergence.
    axes[1].set(title="divergence / bound", yscale="log", ylim=(1e-2, 1e2), xlabel="frames")
    axes[1].set_ylim(bottom=1e-3)
    for name in DUALS:
        if name in metrics:
            axes[2].plot(metrics["frames"], metrics[name], label=name)
    axes[2].set(title="dual variables", yscale="log", xlabel="frames")
    for ax in axes:
        ax.locator_params(axis="x", nbins=5)
    for ax in axes[1:]:
        ax.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw runs, or what is stored of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--medians", action="store_true")
    arguments = parser.parse_args()
    folder = HERE / "data"
    kept = [path.name.removesuffix("-metrics.csv") for path in sorted(folder.glob("*-metrics.csv"))]
    sources = {run.name: (run / "metrics.csv", run / "eval.csv") for run in arguments.runs} or {
        name: (folder / f"{name}-metrics.csv", folder / f"{name}-eval.csv") for name in kept
    }
    for name, paths in sources.items():
        metrics, evaluations = map(read, paths)
        if arguments.medians:
            sys.stdout.write(f"{name}: {medians(metrics)}\n")
            continue
        if arguments.keep:
            keep(f"{name}-metrics.csv", metrics)
            keep(f"{name}-eval.csv", evaluations)
        draw(name, metrics, evaluations, HERE / f"{name}.png")


if __name__ == "__main__":
    main()
