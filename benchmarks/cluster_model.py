"""A model of runs on larger clusters, from costs that ``cluster.py`` measures.

    python benchmarks/cluster_model.py                      # a table
    python benchmarks/cluster_model.py --out scaling.png    # and a plot
    python benchmarks/cluster_model.py --costs costs.json   # with costs measured elsewhere

MPO, networks 256-256, batches of 128, an update for every two frames.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

FRAMES_PER_BATCH = 200
UPDATES_PER_FRAME = 0.5


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes that a model of a cluster is made of."""

    frame: float
    """A collector, per frame: simulator and policy."""
    part: float
    """A collector, per part of a batch: being asked for it, and storing it."""
    update: float
    """The learners, per update, with one of them: drawing the batch included."""
    exchange: float
    """The learners, per update, with more than one: exchange of gradients."""
    driver: float
    """The driver, per batch, whatever the number of collectors."""
    publication: float
    """The driver, per batch and collector: weights, statistics, reports."""
    replay_frame: float
    """The replay service, per frame: storing it."""
    replay_part: float
    """The replay service, per call that stores."""
    replay_sample: float
    """The replay service, per batch drawn, of 128 transitions."""
    frame_bytes: float
    """Of a stored transition."""
    batch_bytes: float
    """Of a batch drawn."""
    weight_bytes: float
    """Of the weights of the policy."""
    bandwidth: float = 1.25e8
    """Bytes per second that reach a node: a gigabit network. Assumed, not measured."""


# What `python benchmarks/cluster.py --costs costs.json` wrote: two processors beside other work,
# ray 2.60.
HERE = Costs(
    frame=3.0e-4,
    part=2.3e-2,
    update=2.0e-2,
    exchange=3.5e-2,
    driver=1.8e-2,
    publication=1.5e-3,
    replay_frame=1.3e-6,
    replay_part=2.4e-3,
    replay_sample=2.7e-3,
    frame_bytes=64,
    batch_bytes=11_000,
    weight_bytes=275_000,
)
# A simulator of this many seconds per frame is what larger clusters are for.
SLOW_FRAME = 1.0e-2


@dataclass(frozen=True)
class Case:
    """A cluster, and what it costs beside what was measured."""

    title: str
    sync: bool = True
    learners: int = 1
    copies: int = 1
    quicker: float = 1.0
    """How much quicker its learners are."""
    updates_per_frame: float = UPDATES_PER_FRAME

    def seconds(self, costs: Costs, collectors: int) -> dict[str, float]:
        """Seconds per batch: by name, and ``total``."""
        quick = replace(
            costs, update=costs.update / self.quicker, exchange=costs.exchange / self.quicker
        )
        return seconds_per_batch(
            quick,
            collectors,
            self.learners,
            sync=self.sync,
            copies=self.copies,
            updates_per_frame=self.updates_per_frame,
        )

    def frames_per_second(self, costs: Costs, collectors: int) -> float:
        """Actions per second of the cluster."""
        return FRAMES_PER_BATCH * self.copies / self.seconds(costs, collectors)["total"]

    def limit(self, costs: Costs, collectors: int) -> str:
        """What takes the longest."""
        parts = self.seconds(costs, collectors)
        parts.pop("total")
        return max(parts, key=lambda name: parts[name])


CASES = (
    Case("sync, 1 learner"),
    Case("async, 1 learner", sync=False),
    Case("async, 1 learner, 1/8 update per frame", sync=False, updates_per_frame=0.125),
    Case("async, 1 learner 10x quicker, batches x10", sync=False, quicker=10.0, copies=10),
    Case(
        "the same, 1/8 update per frame",
        sync=False,
        quicker=10.0,
        copies=10,
        updates_per_frame=0.125,
    ),
)
COLLECTORS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)


def seconds_per_batch(
    costs: Costs,
    collectors: int,
    learners: int = 1,
    *,
    sync: bool = True,
    copies: int = 1,
    updates_per_frame: float = UPDATES_PER_FRAME,
) -> dict[str, float]:
    """Seconds that each part of a cluster needs for a batch, by name, and ``total``.

    Args:
        costs (Costs): measured.
        collectors (int): how many.
        learners (int): how many.

    Keyword Args:
        sync (bool): whether collection waits for learning.
        copies (int): how many times 200 frames a batch has: larger clusters have larger batches.
        updates_per_frame (float): updates for each frame.
    """
    frames = FRAMES_PER_BATCH * copies
    updates = updates_per_frame * frames
    collecting = frames / collectors * costs.frame + costs.part
    learning = updates * (costs.update / learners + costs.exchange * (learners > 1))
    driving = costs.driver + collectors * costs.publication
    replay = (
        frames * costs.replay_frame
        + collectors * costs.replay_part
        + updates * (costs.replay_sample + (learners - 1) * costs.replay_part)
    )
    moved = frames * costs.frame_bytes + updates * costs.batch_bytes
    moved += collectors * costs.weight_bytes
    network = moved / costs.bandwidth
    parts = {
        "collecting": collecting,
        "learning": learning,
        "driver": driving,
        "replay": replay,
        "network": network,
    }
    # Drawing from the replay service and the network are hidden behind updates, unless slower.
    behind = max(learning, replay, network)
    total = collecting + behind + driving if sync else max(collecting, behind + driving)
    return {**parts, "total": total}


def table(costs: Costs) -> Iterator[str]:
    """Frames per second and what takes the longest, as lines of a Markdown table."""
    yield "| collectors | " + " | ".join(case.title for case in CASES) + " |"
    yield "|" + "---|" * (1 + len(CASES))
    for collectors in COLLECTORS:
        cells = (
            f"{case.frames_per_second(costs, collectors):,.0f} {case.limit(costs, collectors)}"
            for case in CASES
        )
        yield f"| {collectors:,} | " + " | ".join(cells) + " |"


def draw(costs: Costs, out: Path) -> None:
    """Frames per second over collectors.

    Args:
        costs (Costs): of the model.
        out (Path): the file.
    """
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    counts = sorted({round(1000 ** (step / 150)) for step in range(151)})
    for case in CASES:
        rates = [case.frames_per_second(costs, count) for count in counts]
        axes.plot(counts, rates, label=case.title)
    ideal = [count / costs.frame for count in counts]
    axes.plot(counts, ideal, color="grey", linestyle=":", label="collecting alone")
    top = max(case.frames_per_second(costs, count) for case in CASES for count in counts)
    axes.set(
        xlabel="collectors",
        ylabel="frames/s",
        xscale="log",
        yscale="log",
        ylim=(None, 2 * top),
        title=f"Model: simulator of {1e3 * costs.frame:.3g} ms per frame",
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--costs", type=Path, help="what cluster.py --costs wrote")
    parser.add_argument("--frame", type=float, default=SLOW_FRAME, help="seconds per frame (0.01)")
    parser.add_argument("--out", type=Path, help="file for a plot (PNG)")
    args = parser.parse_args()
    costs = HERE if args.costs is None else Costs(**json.loads(args.costs.read_text()))
    costs = replace(costs, frame=args.frame)
    print("\n".join(table(costs)))
    if args.out is not None:
        draw(costs, args.out)


if __name__ == "__main__":
    main()
