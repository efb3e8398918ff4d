"""The settings of a run on a Ray cluster, and what is impossible about them. Ray is not imported.

What an algorithm must say of itself is in :class:`~minerva_torchrl.algorithms.config.RunConfig`:
``shared_batch``, the samples of an update that learners elsewhere could share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from minerva_torchrl.algorithms.config import RunConfig

__all__ = ["RayConfig", "problems_with_ray"]

# Fewer frames at a time cost a collector more to hand over than to collect.
_FRAMES_PER_PART = 10
_ADDRESS = re.compile(r"auto|(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class RayConfig:
    """A Ray cluster to collect and learn on; without ``collectors`` there is none."""

    collectors: int = 0
    """Processes that collect. With 0 the run stays in one process, and Ray is not used."""
    envs_per_collector: int | None = None
    """Copies of the task in each of them; null is ``env.num_envs``."""
    cpus_per_collector: float = 1.0
    """Processors that Ray sets aside for a collector."""
    gpus_per_collector: float = 0.0
    """GPUs, which may be shares of one. Then the policy acts on it."""
    learners: int = 1
    """Processes that learn together, each with its share of every batch. On-policy algorithms
    learn in the process that was started, and have one."""
    cpus_per_learner: float = 1.0
    """Processors for a learner."""
    gpus_per_learner: float = 0.0
    """GPUs for a learner."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What learners exchange gradients with; ``auto`` is nccl on GPUs and gloo elsewhere."""
    address: str | None = None
    """``host:port`` of a cluster, or ``auto`` for the one that this machine is part of; null starts
    one on this machine, for this run."""
    sync: bool = True
    """Collect, then learn. If false, collectors go on while the learners learn."""
    max_frames_ahead: int | None = None
    """Actions by which collection may then run ahead of learning; null is one batch."""
    publish_interval: int = 1
    """Batches from one publication of the policy's weights to the next."""
    timeout: float = 300.0
    """Seconds without an answer after which a process is given up."""
    max_restarts: int = 3
    """How often a run that lost a learner or its replay goes back to its last checkpoint by
    itself."""


def parse_address(address: str) -> tuple[str, int] | None:
    """Host and port of an address; ``None`` for ``auto``.

    Examples:
        >>> parse_address("10.0.0.7:6379"), parse_address("auto")
        (('10.0.0.7', 6379), None)
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address!r} is neither 'auto' nor host:port")
    return None if match["host"] is None else (match["host"].strip("[]"), int(match["port"]))


def problems_with_ray(config: RunConfig) -> Iterator[str]:
    """What is impossible about the section ``ray``, one line each.

    Args:
        config (RunConfig): all settings.
    """
    ray = config.ray
    if ray.collectors < 0:
        yield f"ray.collectors must not be negative, got {ray.collectors}."
    if ray.collectors <= 0:
        for field in fields(ray):
            value: Any = getattr(ray, field.name)
            if field.name != "collectors" and value != field.default:
                yield f"ray.{field.name}={value} is for runs on Ray: set ray.collectors, too."
        return
    yield from _problems_with_numbers(ray)
    copies = config.copies_per_collector
    frames = config.collector.frames_per_batch
    unit = ray.collectors * copies
    if copies > 0 and frames % unit:
        enough = math.ceil(max(frames, _FRAMES_PER_PART * ray.collectors) / unit) * unit
        yield (
            "collector.frames_per_batch must be a multiple of ray.collectors times the copies in "
            f"each, got {frames}, {ray.collectors} and {copies}; {enough} is one."
        )
    if config.env.num_workers > 0:
        yield (
            "env.num_workers is for one machine, and must be 0 with ray.collectors; got "
            f"{config.env.num_workers}."
        )
    yield from _problems_with_learners(config)
    if ray.address is not None:
        try:
            parse_address(ray.address)
        except ValueError:
            yield f"ray.address must be host:port or auto, got {ray.address!r}."


def _problems_with_numbers(ray: RayConfig) -> Iterator[str]:
    for name in ("envs_per_collector", "learners", "publish_interval", "timeout"):
        value = getattr(ray, name)
        if value is not None and not value > 0:
            yield f"ray.{name} must be positive, got {value}."
    for name in ("cpus_per_collector", "cpus_per_learner", "gpus_per_collector"):
        if getattr(ray, name) < 0:
            yield f"ray.{name} must not be negative, got {getattr(ray, name)}."
    if ray.gpus_per_learner < 0 or not float(ray.gpus_per_learner).is_integer():
        yield f"ray.gpus_per_learner must be a whole number, got {ray.gpus_per_learner}."
    if ray.max_restarts < 0:
        yield f"ray.max_restarts must not be negative, got {ray.max_restarts}."
    if ray.max_frames_ahead is not None and ray.max_frames_ahead < 0:
        yield f"ray.max_frames_ahead must not be negative, got {ray.max_frames_ahead}."
    if ray.sync and ray.max_frames_ahead:
        yield (
            f"ray.max_frames_ahead={ray.max_frames_ahead} is for ray.sync=false: otherwise "
            "collection waits for learning."
        )


def _problems_with_learners(config: RunConfig) -> Iterator[str]:
    ray, batch = config.ray, config.shared_batch
    if batch is None:
        if ray.learners != 1:
            yield (
                f"ray.learners must be 1 for {config.algo}, which learns from whole rollouts in "
                f"the process that was started; got {ray.learners}."
            )
        if not ray.sync:
            yield f"ray.sync must be true for {config.algo}, which learns on-policy."
        if ray.publish_interval != 1:
            yield (
                f"ray.publish_interval must be 1 for {config.algo}, which learns on-policy; got "
                f"{ray.publish_interval}."
            )
        if ray.gpus_per_learner:
            yield (
                f"ray.gpus_per_learner must be 0 for {config.algo}, which learns on the device of "
                f"the process that was started; got {ray.gpus_per_learner}."
            )
    elif ray.learners > 0 and batch % ray.learners:
        yield (
            "replay_buffer.batch_size must be a multiple of ray.learners, got "
            f"{batch} and {ray.learners}."
        )
    if ray.backend == "nccl" and ray.gpus_per_learner < 1:
        yield f"ray.backend=nccl needs ray.gpus_per_learner=1, got {ray.gpus_per_learner}."
