"""What a run on a Ray cluster costs beside a local one, and a model of larger clusters.

    python benchmarks/cluster.py                 # measures on this machine, then prints the model
    python benchmarks/cluster.py --sleep 0.01    # simulators that wait 10 ms per step
    python benchmarks/cluster.py --model         # the model only, with the figures below

MPO, networks 256-256, batches of 128, an update for every two frames. The simulator is Pendulum,
which with ``--sleep`` is as slow as one likes without using the processors: so that two of them
can carry several collectors, and the model can be checked against them.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FRAMES_PER_BATCH = 200
UPDATES_PER_FRAME = 0.5
WARMUP = 600


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes that a model of a cluster is made of."""

    frame: float
    """A collector, per frame: simulator and policy."""
    part: float
    """A collector, per part of a batch: storing it, and being asked for it."""
    update: float
    """The learners, per update, with one of them: drawing the batch included."""
    exchange: float
    """The learners, per update and further learner: exchange of gradients."""
    driver: float
    """The driver, per batch, whatever the number of collectors."""
    publication: float
    """The driver, per batch and collector: weights, statistics, reports."""
    replay_frame: float
    """The replay service, per frame: storing it."""
    replay_part: float
    """The replay service, per part of a batch."""
    replay_sample: float
    """The replay service, per batch drawn, of 128 transitions."""
    frame_bytes: float
    """Of a stored transition."""
    batch_bytes: float
    """Of a batch drawn."""
    weight_bytes: float
    """Of the weights of the policy."""
    bandwidth: float = 1.25e8
    """Bytes per second that reach the node of the replay service: a gigabit network."""


def seconds_per_batch(
    costs: Costs, collectors: int, learners: int = 1, *, sync: bool = True, copies: int = 1
) -> dict[str, float]:
    """Seconds that each part of a cluster needs for a batch, by name, and ``total``.

    Args:
        costs (Costs): measured.
        collectors (int): how many.
        learners (int): how many.

    Keyword Args:
        sync (bool): whether collection waits for learning.
        copies (int): how many batches' frames are collected at once: larger clusters have larger
            batches, of ``copies`` times as many frames.
    """
    frames = FRAMES_PER_BATCH * copies
    updates = UPDATES_PER_FRAME * frames
    collecting = frames / collectors * costs.frame + costs.part
    per_update = costs.update / learners + costs.exchange * (learners > 1)
    learning = updates * per_update
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


def frames_per_second(costs: Costs, collectors: int, learners: int = 1, **options: Any) -> float:
    """Frames per second of a cluster, by the model."""
    copies = options.get("copies", 1)
    total = seconds_per_batch(costs, collectors, learners, **options)["total"]
    return FRAMES_PER_BATCH * copies / total


# Measurements ------------------------------------------------------------------------------------


class Sleepy:
    """Pendulum that takes its time, without using a processor."""

    def __new__(cls, seconds: float = 0.0) -> Any:
        import gymnasium

        class Slow(gymnasium.Wrapper):  # type: ignore[type-arg]
            def step(self, action: Any) -> Any:
                time.sleep(seconds)
                return self.env.step(action)

        return Slow(gymnasium.make("Pendulum-v1"))


def settings(collectors: int, sleep: float, frames: int, address: str | None) -> dict[str, Any]:
    """Those of a run; without collectors it is a local one."""
    ray = {"collectors": collectors, "address": address} if collectors else {}
    return {
        "total_frames": frames,
        "env": {"name": "sleepy", "factory": "cluster:Sleepy", "kwargs": {"seconds": sleep}},
        "collector": {"frames_per_batch": FRAMES_PER_BATCH},
        "replay_buffer": {"warmup_frames": WARMUP, "size": 100_000},
        "optim": {"updates_per_frame": UPDATES_PER_FRAME},
        "compile": {"enabled": False},
        "eval": {"interval": 10**9, "episodes": 1},
        "checkpoint": {"interval": 10**9, "replay_buffer": False},
        "logger": {"interval": 10**9},
        "ray": ray,
    }


class Clock:
    """Adds up the time that calls of a method take."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def watch(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1

        setattr(owner, name, timed)

    @property
    def mean(self) -> float:
        return self.seconds / max(self.calls, 1)


def measure(
    collectors: int, *, sleep: float, frames: int, address: str | None, sync: bool = True
) -> dict[str, float]:
    """Times of a run, from the first batch after the warm-up to the last.

    Args:
        collectors (int): how many; 0 is a local run.

    Keyword Args:
        sleep (float): seconds that a step of the simulator takes besides.
        frames (int): frames of the run.
        address (str, optional): of a cluster.
        sync (bool): whether collection waits for learning.
    """
    from minerva_torchrl.runs import Callback, Run, parse_config

    given = settings(collectors, sleep, frames, address)
    if collectors:
        given["ray"]["sync"] = sync
    stamps: list[tuple[int, float]] = []

    class Stamps(Callback):
        def on_batch(self, run: Run, batch: Any) -> None:
            stamps.append((run.frames, time.perf_counter()))

    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            parse_config("mpo", given),
            Path(folder) / "run",
            callbacks=[Stamps()],
            stream=io.StringIO(),
        )
        run.callbacks[0].on_update = lambda *_: None  # type: ignore[method-assign]
        trainer: Any = run.assembly.trainer
        learning, publishing = Clock(), Clock()
        reports: list[Any] = []
        if collectors:
            learning.watch(trainer._execution_backend, "step")
            publishing.watch(trainer, "_publish")
            note = trainer._note
            trainer._note = lambda batch: (reports.extend(batch), note(batch))
        else:
            learning.watch(trainer, "optim_steps")
        run.train()
    begin = next(i for i, (count, _) in enumerate(stamps) if count >= WARMUP + FRAMES_PER_BATCH)
    (first, start), (last, end) = stamps[begin], stamps[-1]
    updates = UPDATES_PER_FRAME * FRAMES_PER_BATCH
    result = {
        "collectors": collectors,
        "frames_per_second": (last - first) / (end - start),
        "batch_ms": 1e3 * (end - start) / (last - first) * FRAMES_PER_BATCH,
        "update_ms": 1e3 * learning.mean / updates,
    }
    if collectors:
        late = reports[len(reports) // 2 :]
        actions = sum(report.frames for report in late)
        result |= {
            "frame_ms": 1e3 * sum(report.seconds[0] for report in late) / actions,
            "store_ms": 1e3 * sum(report.seconds[1] for report in late) / len(late),
            "publish_ms": 1e3 * publishing.mean,
        }
    return result


def sizes() -> dict[str, int]:
    """Bytes of a stored transition, of a batch drawn and of the weights of the policy."""
    from tensordict import TensorDict

    from minerva_torchrl.runs import parse_config
    from minerva_torchrl.runs.assemble import assemble

    given = settings(0, 0.0, 10_000, None)
    assembly = assemble(parse_config("mpo", given))
    trainer: Any = assembly.trainer
    for _, batch in zip(range(3), assembly.collector, strict=False):
        trainer.memory.extend(batch)
    assert assembly.replay_buffer is not None
    stored = assembly.replay_buffer[: len(assembly.replay_buffer)]
    weights = TensorDict.from_module(assembly.actor).data
    result = {
        "frame_bytes": len(pickle.dumps(stored)) // len(stored),
        "batch_bytes": len(pickle.dumps(assembly.replay_buffer.sample())),
        "weight_bytes": len(pickle.dumps(weights)),
    }
    assembly.shutdown()
    return result


# Command -----------------------------------------------------------------------------------------

# Two processors, ray 2.60, single runs beside other work. Measured with TorchRL's own trainer and
# small networks (64-64, batches of 256): an update with one learner 14 ms and with two 25 ms, a
# call of the replay service that stores 1000 frames (66 kB) 5 ms, of which 1 ms is the storing, one
# that draws 256 of them 4.3 ms, a publication of weights 6 to 12 ms. Assumed, not measured: a
# simulator of 10 ms per frame, and how publication and the driver's work share those 12 ms.
HERE = Costs(
    frame=1.0e-2,
    part=5.0e-3,
    update=1.4e-2,
    exchange=1.8e-2,
    driver=1.0e-2,
    publication=1.0e-3,
    replay_frame=1.0e-6,
    replay_part=1.0e-3,
    replay_sample=2.0e-3,
    frame_bytes=66,
    batch_bytes=17_000,
    weight_bytes=20_000,
)


def model_lines(costs: Costs) -> Iterator[str]:
    """The model as a table: frames per second, and what takes the longest."""
    yield "collectors  sync, 1 learner   async, 1 learner   async, 8 GPUs*, large batches"
    quick = replace(costs, update=costs.update / 10, exchange=costs.exchange / 10)
    for collectors in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000):
        cells = []
        for options, chosen in (
            ({"sync": True}, costs),
            ({"sync": False}, costs),
            ({"sync": False, "learners": 8, "copies": 10}, quick),
        ):
            parts = seconds_per_batch(chosen, collectors, **options)  # type: ignore[arg-type]
            rate = frames_per_second(chosen, collectors, **options)  # type: ignore[arg-type]
            parts.pop("total")
            cells.append(f"{rate:8.0f} {max(parts, key=lambda name: parts[name]):10}")
        yield f"{collectors:10}  " + "  ".join(cells)
    yield "* ten times quicker than the learner measured, and batches of ten times as many frames"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds per simulator step (0)")
    parser.add_argument("--frames", type=int, default=3000, help="frames per run (3000)")
    parser.add_argument("--collectors", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--address", help="of a cluster; by default one is started for each run")
    parser.add_argument("--async", dest="sync", action="store_false", help="collect while learning")
    parser.add_argument("--model", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.model:
        print(json.dumps(sizes()), flush=True)
        for collectors in args.collectors:
            row = measure(
                collectors,
                sleep=args.sleep,
                frames=args.frames,
                address=args.address,
                sync=args.sync,
            )
            print(json.dumps({key: round(value, 3) for key, value in row.items()}), flush=True)
    print(json.dumps(asdict(HERE)))
    print("\n".join(model_lines(HERE)))


if __name__ == "__main__":
    main()
