"""The driver's side of the collectors: gives them work, and replaces those that are lost."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from tensordict import TensorDictBase
from torchrl.collectors.distributed import RayCollector

from minerva_torchrl.envs import EnvironmentFailure
from minerva_torchrl.runs.distributed import WorkersLost
from minerva_torchrl.runs.distributed.statistics import Statistics
from minerva_torchrl.runs.distributed.worker import Report, Task, WorkerCollector, Workplace

__all__ = ["ClusterCollector"]

# Collectors in a row that may be lost before any of them has given a batch.
_LOST_IN_A_ROW = 5


@dataclass
class _Member:
    """A collector, and what it has to do."""

    workplace: Workplace
    actor: Any
    ready: Any
    """Becomes available when the collector is."""
    loaded: Any = None
    """Becomes available when the weights that were published last are in use."""
    is_ready: bool = False
    work: list[Any] = field(default_factory=list)
    """Batches that were asked for, the first one first."""
    since: float = field(default_factory=time.monotonic)
    """When the first of them, or the start, began to be waited for."""


class ClusterCollector(RayCollector):
    """Collectors on a Ray cluster that together give batches of a certain number of frames.

    A batch of ``frames_per_batch`` actions consists of one part per collector, or more of those
    that are quicker, if collection is asynchronous or a collector is missing. While a batch is
    learned from, as many parts as fit into ``frames_ahead`` are being collected; none by default.

    A collector that dies, or does not answer in time, is replaced by a new one in new episodes. The
    parts that it had not finished are collected again. An error that is raised in a collector is
    raised here.

    Args:
        task (Task): what the collectors are for.
        policy (nn.Module): the policy they begin with.

    Keyword Args:
        frames_ahead (int): actions that may be collected while others are learned from. Defaults to
            ``0``.
        replay_buffer (optional): the replay service, if collectors store what they collect.
        statistics (Statistics): those of the driver, which those of the collectors are merged into.
        first_number (callable): gives the number of the first collector, when they start.
        on_lost (callable): called with a line for the user when a collector was replaced.
    """

    def __init__(
        self,
        task: Task,
        policy: Any,
        *,
        frames_ahead: int = 0,
        replay_buffer: Any = None,
        statistics: Statistics,
        first_number: Callable[[], int],
        on_lost: Callable[[str], None],
    ) -> None:
        settings = task.config.ray
        self._task, self._statistics, self._on_lost = task, statistics, on_lost
        self._members: list[_Member] = []
        self._first_number = first_number
        self._frames_ahead = frames_ahead
        self._timeout = settings.timeout
        self.replaced = 0
        """Collectors that were lost and replaced."""
        self.version = -1
        """Updates that the weights had that were published last."""
        self._published: Any = None
        self._lost_in_a_row = 0
        super().__init__(
            [task.make_env] * settings.collectors,
            policy,
            frames_per_batch=task.config.collector.frames_per_batch,
            total_frames=2**62,
            trust_policy=True,
            sync=True,
            collector_class=WorkerCollector,
            remote_configs={
                "num_cpus": settings.cpus_per_collector,
                "num_gpus": settings.gpus_per_collector,
                "max_restarts": 0,  # done here, because a new one must be given its weights
            },
            weight_sync_schemes={},
            replay_buffer=replay_buffer,
            collector_kwargs={},
        )
        self.frames_per_part = self.frames_per_batch // settings.collectors

    # What TorchRL calls --------------------------------------------------------------------------

    def add_collectors(
        self,
        create_env_fn: list[Any],
        num_envs: int,
        policy: Any,
        collector_kwargs: list[dict[str, Any]],
        remote_configs: list[dict[str, Any]],
    ) -> None:
        """Note how to make collectors. They start with the first batch."""
        self._make_env, self._remote_config = create_env_fn[0], remote_configs[0]

    def _learner_weight_sync(self, *, new_generation: bool = False) -> None:
        """Weights go through :meth:`publish`, which can reach collectors that come later."""

    def _weight_update_impl(
        self, policy_or_weights: TensorDictBase | None = None, **_: Any
    ) -> None:
        """Publish weights after an update, for trainers in the driver."""
        assert policy_or_weights is not None
        self.publish(policy_or_weights, self.version + 1)

    def iterator(self) -> Iterator[Any]:
        """Batches: lists of reports, or, if collectors return what they collect, its frames."""
        self.start_members()
        self._wait_for_all()
        arrived: list[Report] = []
        while not self._stop_event.is_set():
            parts = self.frames_per_batch // self.frames_per_part
            while len(arrived) < parts:
                self._hand_out(parts + self._frames_ahead // self.frames_per_part - len(arrived))
                arrived += self._wait()
            batch, arrived = arrived[:parts], arrived[parts:]
            self._hand_out(self._frames_ahead // self.frames_per_part - len(arrived))
            self.collected_frames += self.frames_per_batch
            yield batch if self.replay_buffer is not None else self._together(batch)

    def shutdown(self, timeout: float | None = None, shutdown_ray: bool = False) -> None:
        """End all collectors. Can be called again."""
        self._stop_event.set()
        for member in self._members:
            ray.kill(member.actor)
        self._members = []
        self._runtime_lease.release()

    # Weights -------------------------------------------------------------------------------------

    def publish(self, weights: TensorDictBase, version: int) -> None:
        """Give weights to all collectors, to be used from their next part on.

        Nothing waits: a collector gets them when it has finished what it has begun.

        Args:
            weights (TensorDictBase): parameters of the policy.
            version (int): updates that they had.
        """
        self.version = version
        self._published = ray.put(weights.detach().to("cpu").clone())
        for member in self._members:
            self._load(member)

    def _load(self, member: _Member) -> None:
        if self._published is not None:
            statistics = self._statistics.get()
            member.loaded = member.actor.load.remote(self._published, self.version, statistics)

    # Collectors ----------------------------------------------------------------------------------

    def start_members(self) -> None:
        """Start all collectors, if that is not done yet."""
        if not self._members:
            self._next_number = self._first_number()
            self._members = [self._start(index) for index in range(self.num_collectors)]

    def _wait_for_all(self) -> None:
        """Let all collectors have a share in the first batch, unless one takes too long."""
        for member in self._members:
            member.since = time.monotonic()  # nobody has waited for them before
        end = time.monotonic() + self._timeout
        while self.num_ready < self.num_collectors and time.monotonic() < end:
            self._wait()

    @property
    def last_number(self) -> int:
        """The number of the collector that was started last."""
        return self._next_number - 1

    @property
    def num_ready(self) -> int:
        """Collectors that are at work."""
        return sum(member.is_ready for member in self._members)

    def _start(self, index: int) -> _Member:
        workplace = Workplace(index, self._next_number)
        self._next_number += 1
        kwargs = dict(self.collector_kwargs[index])
        actor = self.collector_class.as_remote(self._remote_config).remote(
            self._make_env,
            self.policy,
            task=self._task,
            workplace=workplace,
            frames_per_batch=self._frames_per_batch_corrected,
            replay_buffer=kwargs.get("replay_buffer"),
        )
        member = _Member(workplace, actor, actor.ping.remote())
        self._load(member)
        return member

    def _replace(self, member: _Member, why: str) -> None:
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= _LOST_IN_A_ROW * self.num_collectors:
            raise WorkersLost(f"collectors are lost again and again; the last one {why}.")
        ray.kill(member.actor)  # which may be gone already
        index = member.workplace.index
        self._members[index] = self._start(index)
        self.replaced += 1
        self._on_lost(f"collector {index} {why}, and is replaced")

    # Work ----------------------------------------------------------------------------------------

    def _hand_out(self, parts: int) -> None:
        """Ask for as many parts as are missing, of those with the least to do."""
        missing = parts - sum(len(member.work) for member in self._members)
        ready = enumerate(self._members)
        queue = [(len(member.work), index) for index, member in ready if member.is_ready]
        heapq.heapify(queue)
        for _ in range(missing if queue else 0):
            length, index = queue[0]
            member = self._members[index]
            if not member.work:
                member.since = time.monotonic()
            member.work.append(member.actor.collect.remote())
            heapq.heapreplace(queue, (length + 1, index))

    def _wait(self) -> list[Report]:
        """What came in, as soon as anything did."""
        waiting = {}
        for member in self._members:
            if not member.is_ready:
                waiting[member.ready] = member
            elif member.work:
                waiting[member.work[0]] = member
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=1.0)
        if done:  # together with the others that are there
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        reports = []
        for answer in done:
            report = self._receive(waiting[answer], answer)
            if report is not None:
                reports.append(report)
        self._give_up_silent()
        return reports

    def _receive(self, member: _Member, answer: Any) -> Report | None:
        try:
            with _explained():
                result = ray.get(answer)
        except RayActorError as error:
            if error.actor_init_failed:  # as any other would
                reason = str(error).strip().splitlines()[-1]
                raise EnvironmentFailure(f"a collector can't be started: {reason}") from None
            self._replace(member, "died")
            return None
        member.since = time.monotonic()
        if not member.is_ready:
            member.is_ready = True
            return None
        member.work.pop(0)
        self._lost_in_a_row = 0
        report: Report = result
        if report.version < (self.version if report.batch is not None else 0):
            with _explained():
                ray.get(member.loaded)  # raises if the weights can't be used there
            return None  # of an older policy: collected again
        if report.added:
            self._statistics.merge(report.added)
        return report

    def _give_up_silent(self) -> None:
        now = time.monotonic()
        has_ready = any(member.is_ready for member in self._members)
        for member in list(self._members):
            if now - member.since <= self._timeout:
                continue
            if member.is_ready and member.work:
                self._replace(member, f"did not answer for {self._timeout:g} s")
            elif not member.is_ready and not has_ready:
                raise WorkersLost(
                    f"no collector could be started within {self._timeout:g} s: the cluster may "
                    "have too few free processors."
                )

    def _together(self, reports: list[Report]) -> TensorDictBase:
        """One batch ``[N, T]`` of all parts."""
        parts = [report.batch for report in reports]
        batch: Any = torch.cat([part for part in parts if part is not None], 0)
        versions = torch.full(batch.shape, reports[0].version, dtype=torch.int64)
        return batch.set(("collector", "policy_version"), versions)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise what a collector raised; a loss, if it could not reach the replay service."""
    try:
        yield
    except RayTaskError as error:
        cause: BaseException = error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, RayError):
            raise WorkersLost("the replay service was lost.") from error
        raise cause from None
