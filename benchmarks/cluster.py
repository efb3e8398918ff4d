"""What a run on a Ray cluster costs beside a local one, on this machine.

    python benchmarks/cluster.py                         # local, 1 and 2 collectors
    python benchmarks/cluster.py --costs costs.json      # what the model is made of, too
    python benchmarks/cluster.py --check                 # the model against simulators that sleep

MPO, networks 256-256, batches of 128, an update for every two frames. The simulator is Pendulum,
which sleeps if it is told to: so it is as slow as one likes without using the processors, two of
them can carry several collectors, and the model of ``cluster_model.py`` can be checked.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cluster_model import FRAMES_PER_BATCH, HERE, UPDATES_PER_FRAME, Costs, seconds_per_batch
from tensordict import TensorDict

WARMUP = 400
UNTIMED = 3
"""Batches before the first that is timed: those of the warm-up, and the first with updates."""
SLEEP = 1e-2


class Sleepy:
    """Pendulum that takes its time, without using a processor."""

    def __new__(cls, seconds: float = 0.0) -> Any:
        import gymnasium

        class Slow(gymnasium.Wrapper):  # type: ignore[type-arg]
            def step(self, action: Any) -> Any:
                if seconds:
                    time.sleep(seconds)
                return self.env.step(action)

        return Slow(gymnasium.make("Pendulum-v1"))


def settings(sleep: float = 0.0, batches: int = 10, **ray: Any) -> dict[str, Any]:
    """Those of a run; without collectors it is a local one."""
    return {
        "total_frames": (UNTIMED + batches) * FRAMES_PER_BATCH,
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


# Runs --------------------------------------------------------------------------------------------


class Clock:
    """Notes how long calls of a method took, and when they ended."""

    def __init__(self, owner: Any, name: str) -> None:
        self.calls: list[tuple[float, float]] = []
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                end = time.perf_counter()
                self.calls.append((end, end - start))

        setattr(owner, name, timed)

    def seconds(self, start: float, end: float) -> float:
        """What calls took that ended between two moments."""
        return sum(taken for when, taken in self.calls if start < when <= end)


def measure(sleep: float = 0.0, batches: int = 10, **ray: Any) -> dict[str, Any]:
    """Where the time of a batch goes, from the first that is timed to the last.

    Args:
        sleep (float): seconds that a step of the simulator takes besides.
        batches (int): how many are timed.
        **ray: the section ``ray`` of the settings; without ``collectors`` the run is a local one.
    """
    from minerva_torchrl.runs import Run, parse_config

    stamps: list[float] = []
    clocks: dict[str, Clock] = {}
    reports: list[tuple[float, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config("mpo", settings(sleep, batches, **ray))
        begun = time.perf_counter()
        run = Run(config, Path(folder) / "run", stream=io.StringIO())
        trainer: Any = run.assembly.trainer
        trainer.register_op("post_steps", lambda: stamps.append(time.perf_counter()))
        if config.ray.collectors:
            clocks["learning"] = Clock(trainer._execution_backend, "step")
            clocks["publishing"] = Clock(trainer, "_publish")
            clocks["noting"] = Clock(trainer, "_note")
            note = trainer._note

            def note_reports(batch: list[Any]) -> None:
                reports.extend((time.perf_counter(), report) for report in batch)
                note(batch)

            trainer._note = note_reports
        else:
            clocks["learning"] = Clock(trainer, "optim_steps")
        run.train()
    start, end = stamps[UNTIMED - 1], stamps[-1]
    each = {name: clock.seconds(start, end) / batches for name, clock in clocks.items()}
    total = (end - start) / batches
    timed = [report for when, report in reports if start < when <= end]
    result = {
        "collectors": config.ray.collectors,
        "learners": config.ray.learners if config.ray.collectors else 0,
        "sync": config.ray.sync,
        "sleep": sleep,
        "frames_per_second": FRAMES_PER_BATCH / total,
        "updates_per_second": FRAMES_PER_BATCH * UPDATES_PER_FRAME / total,
        "batch_ms": 1e3 * total,
        **{f"{name}_ms": 1e3 * seconds for name, seconds in each.items()},
        "collecting_ms": 1e3 * (total - sum(each.values())),
        "update_ms": 1e3 * each["learning"] / (FRAMES_PER_BATCH * UPDATES_PER_FRAME),
        "start_s": stamps[0] - begun,
    }
    if timed:
        frames = sum(report.frames for report in timed)
        result["frame_ms"] = 1e3 * sum(report.seconds[0] for report in timed) / frames
        result["store_ms"] = 1e3 * sum(report.seconds[1] for report in timed) / len(timed)
    return {name: round(value, 3) for name, value in result.items()}


# Single costs ------------------------------------------------------------------------------------


@contextmanager
def filled_buffer() -> Iterator[Any]:
    """What a local run consists of, with some batches in its replay buffer."""
    from minerva_torchrl.runs import parse_config
    from minerva_torchrl.runs.assemble import assemble

    assembly = assemble(parse_config("mpo", settings()))
    trainer: Any = assembly.trainer
    for _, batch in zip(range(3), assembly.collector, strict=False):
        trainer.memory.extend(batch)
    try:
        yield assembly
    finally:
        assembly.shutdown()


def measure_sizes() -> dict[str, float]:
    """Bytes of a stored transition, of a batch drawn and of the weights of the policy."""
    with filled_buffer() as assembly:
        buffer = assembly.replay_buffer
        stored = buffer[: len(buffer)].clone()  # or all of the storage would count
        return {
            "frame_bytes": len(pickle.dumps(stored)) // len(stored),
            "batch_bytes": len(pickle.dumps(buffer.sample())),
            "weight_bytes": len(pickle.dumps(TensorDict.from_module(assembly.actor).data)),
        }


def measure_replay(calls: int = 200) -> dict[str, float]:
    """Seconds of the replay service per frame, per call that stores and per batch drawn.

    Many calls are sent at once, so that what counts is how long the service itself is busy.
    """
    import ray

    from minerva_torchrl.runs.distributed.replay import ReplayService

    with filled_buffer() as assembly:
        buffer = assembly.replay_buffer
        data = torch.cat([buffer[:500].clone()] * 4)
        service = ReplayService(buffer, 1)
        try:
            actor = service._rb
            ray.get(actor.extend.remote(data))
            sizes = (10, len(data))
            parts = [data[:size].clone() for size in sizes]
            stored = [_busy(partial(actor.extend.remote, part), calls) for part in parts]
            per_frame = max(stored[1] - stored[0], 0.0) / (sizes[1] - sizes[0])
            return {
                "replay_frame": per_frame,
                "replay_part": stored[0] - sizes[0] * per_frame,
                "replay_sample": _busy(partial(actor.sample.remote, 128), calls),
            }
        finally:
            service.close()


def measure_publication(calls: int = 1000) -> float:
    """Processor time of the driver per collector: giving it weights and work, reading a report."""
    import ray

    with filled_buffer() as assembly:
        weights = ray.put(TensorDict.from_module(assembly.actor).data.clone())
    actor = ray.remote(num_cpus=0)(Answering).remote()
    ray.get(actor.collect.remote())
    start = time.process_time()
    for _ in range(calls):
        actor.load.remote(weights, 1, [])
        report = actor.collect.remote()
        ray.wait([report], timeout=60)
        ray.get(report)
    return (time.process_time() - start) / calls


class Answering:
    """A collector that has nothing to do."""

    def load(self, *_: Any) -> None: ...

    def collect(self) -> Any:
        from minerva_torchrl.runs.distributed.worker import Report

        ends = TensorDict({"reward": torch.zeros(1)}, [1])
        return Report(10, 0, ends, [], (0, 0), 10, (0.0, 0.0), None)


def _busy(call: Callable[[], Any], calls: int) -> float:
    """Seconds per call, of many at once: the median of five rounds."""
    import ray

    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        ray.get([call() for _ in range(calls // 5)])
        rounds.append((time.perf_counter() - start) / (calls // 5))
    return float(np.median(rounds))


def costs_of(rows: list[dict[str, Any]], two_learners: dict[str, Any], **others: float) -> Costs:
    """What the model is made of.

    Args:
        rows (list): of runs with several numbers of collectors, the first of which has one.
        two_learners (dict): of a run with one collector and two learners.
        **others: of the replay service, of a publication, and sizes.
    """
    mean = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    run = {**costs_of_run(rows[0]), "update": mean["update_ms"] / 1e3}
    exchange = two_learners["update_ms"] / 1e3 - run["update"] / 2
    return Costs(**run, exchange=exchange, **others)


def costs_of_run(row: dict[str, Any]) -> dict[str, float]:
    """Seconds per frame, part, update and batch, from a run with one collector."""
    return {
        "frame": row["frame_ms"] / 1e3,
        "part": (row["collecting_ms"] - FRAMES_PER_BATCH * row["frame_ms"]) / 1e3,
        "update": row["update_ms"] / 1e3,
        "driver": (row["noting_ms"] + row["publishing_ms"]) / 1e3,
    }


def check(*, sync: bool, sleep: float, batches: int) -> Iterator[dict[str, Any]]:
    """Runs with 1, 2 and 4 collectors and simulators that sleep, beside what the model says.

    It knows the costs of a run with one collector that does not sleep, which comes first, and how
    long the updates of each run took: what else the machine does changes them the most.
    """
    one = measure(batches=batches, collectors=1)
    yield one
    known = replace(HERE, **costs_of_run(one))
    for collectors in (1, 2, 4):
        row = measure(sleep, batches, collectors=collectors, sync=sync)
        costs = replace(known, frame=known.frame + sleep, update=row["update_ms"] / 1e3)
        predicted = FRAMES_PER_BATCH / seconds_per_batch(costs, collectors, sync=sync)["total"]
        row["predicted"] = round(predicted, 3)
        row["measured_over_predicted"] = round(row["frames_per_second"] / predicted, 3)
        yield row


# Command -----------------------------------------------------------------------------------------


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """A connection for all runs: to a cluster, or to one on this machine."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # before Ray is imported
    import ray

    from minerva_torchrl.runs.distributed.cluster import own_cluster

    own = {"address": "local", "_node_ip_address": "127.0.0.1", **own_cluster(12)}
    ray.init(log_to_driver=False, **(own if address is None else {"address": address}))
    try:
        yield
    finally:
        ray.shutdown()


def show(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=10, help="batches that are timed (10)")
    parser.add_argument("--collectors", type=int, nargs="*", default=[0, 1, 2], help="0 1 2")
    parser.add_argument("--address", help="of a cluster; by default one is started")
    parser.add_argument("--costs", type=Path, help="measure what the model needs, into this file")
    parser.add_argument("--check", action="store_true", help="check the model instead")
    parser.add_argument("--sleep", type=float, default=SLEEP, help="seconds, for --check (0.01)")
    parser.add_argument("--async", dest="sync", action="store_false", help="for --check")
    args = parser.parse_args()
    with cluster(args.address):
        if args.check:
            for row in check(sync=args.sync, sleep=args.sleep, batches=args.batches):
                show(row)
            return
        rows = []
        for collectors in [1, 2, 4] if args.costs is not None else args.collectors:
            ray = {"collectors": collectors} if collectors else {}
            rows.append(show(measure(batches=args.batches, **ray)))
        if args.costs is not None:
            two = show(measure(batches=args.batches, collectors=1, learners=2))
            others = {"publication": measure_publication(), **measure_replay()}
            costs = costs_of(rows, two, **others, **measure_sizes())
            show(asdict(costs))
            args.costs.write_text(json.dumps(asdict(costs)))


if __name__ == "__main__":
    main()
