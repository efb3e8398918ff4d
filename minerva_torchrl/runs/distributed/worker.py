"""What runs in the process of a collector."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import TransformedEnv

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.envs import StaggeredEpisodes
from minerva_torchrl.runs.assemble import make_training_env
from minerva_torchrl.runs.distributed.statistics import Moments, Statistics, added, merged
from minerva_torchrl.runs.parts import UserParts, find_parts
from minerva_torchrl.trainers.collector import DirectCollector
from minerva_torchrl.trainers.hooks import FiniteBatches, ReplayMemory

__all__ = ["Report", "Task", "WorkerCollector", "Workplace"]

_TRAJECTORY = ("collector", "traj_ids")
_ENDS = (("next", "done"), ("next", "episode_reward"), ("next", "step_count"))
# Numbers of trajectories that a collector can give out, and collectors between two gaps of
# ``ReplayMemory``, which are 2**40 apart.
_IDS_PER_COLLECTOR, _COLLECTORS_PER_GAP = 2**28, 2**12


@dataclass(frozen=True)
class Workplace:
    """Which of a run's collectors a process is.

    Attributes:
        index: its place among them.
        number: how many were started before it in the run, those of earlier starts included.
    """

    index: int
    number: int

    @property
    def first_trajectory(self) -> int:
        """The first number of a trajectory that is this collector's only."""
        gap, place = divmod(self.number, _COLLECTORS_PER_GAP)
        return gap * 2**40 + place * _IDS_PER_COLLECTOR

    @staticmethod
    def first_number(gaps: int) -> int:
        """The first number of a collector after so many gaps of a replay memory."""
        return gaps * _COLLECTORS_PER_GAP

    @staticmethod
    def gaps_until(number: int) -> int:
        """Gaps of a replay memory after which no collector up to this number has trajectories."""
        return number // _COLLECTORS_PER_GAP + 1


@dataclass(frozen=True)
class Task:
    """What a collector is for: the same for all collectors of a run.

    Attributes:
        config: the settings of the run.
        parts: what the run takes from its user, if it is not named in the settings.
        memory: arguments of the :class:`~minerva_torchrl.trainers.hooks.ReplayMemory` of collectors
            that store what they collect; ``None`` if they return it.
    """

    config: RunConfig
    parts: UserParts | None
    memory: dict[str, Any] | None

    def make_env(self, workplace: Workplace) -> TransformedEnv:
        """The environment of a collector, with seeds of its own."""
        config, copies = self.config, self.config.copies_per_collector
        parts = find_parts(config) if self.parts is None else self.parts
        sequence = np.random.SeedSequence([config.seed, workplace.number])
        seed = int(sequence.generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        env_config = replace(config.env, num_envs=copies)
        env = make_training_env(replace(config, env=env_config, seed=seed), parts)
        for transform in env.transform:
            if isinstance(transform, StaggeredEpisodes):
                transform.place = (copies * workplace.index, copies * config.ray.collectors)
        return env


@dataclass(frozen=True)
class Report:
    """What a collector says about a batch.

    Attributes:
        frames: actions of the batch.
        version: updates that the weights it acted with had.
        ends: the last steps of episodes, with returns and lengths, ``[E]``.
        added: what the batch added to the running statistics.
        skipped: frames and batches that were left out as not finite.
        stored: transitions that went into the replay buffer.
        seconds: time for collecting, and for storing.
        batch: the batch ``[K, T]``, of collectors that do not store it.
    """

    frames: int
    version: int
    ends: TensorDictBase
    added: list[Moments]
    skipped: tuple[int, int]
    stored: int
    seconds: tuple[float, float]
    batch: TensorDictBase | None


class WorkerCollector(DirectCollector):
    """A collector that stores what it collects in a replay service, or returns it.

    What is not finite is left out and n-step transitions are made here, so that neither reaches
    into the data of another collector. Trajectories have numbers that no other collector gives.

    Args:
        create_env (callable): makes the environment.
        policy (nn.Module): the policy.

    Keyword Args:
        task (Task): what the collector is for.
        workplace (Workplace): which one it is.
        frames_per_batch (int): actions in a batch.
        replay_buffer (client, optional): where to store.
        **others: arguments that TorchRL gives to collectors of other kinds.
    """

    def __init__(
        self,
        create_env: Callable[[Workplace], TransformedEnv],
        policy: Any,
        *,
        task: Task,
        workplace: Workplace,
        frames_per_batch: int,
        replay_buffer: Any = None,
        **others: Any,
    ) -> None:
        torch.set_num_threads(task.config.num_threads)
        device = "cuda" if task.config.ray.gpus_per_collector else "cpu"
        env = create_env(workplace)
        self.statistics = Statistics(env)
        self._known = self.statistics.get()
        super().__init__(
            env,
            policy.to(device),
            frames_per_batch=frames_per_batch,
            policy_device=device,
        )
        self.workplace = workplace
        self.version = -1
        self.finite = FiniteBatches(task.config.max_skipped)
        self.finite.frame_skip = task.config.env.frame_skip
        # The first observations, which were asked for just now: with the first batch they are
        # reported, though other statistics are loaded before that.
        self._unreported = self._since_report()
        self._known = self.statistics.get()
        self.memory = None
        if task.memory is not None:
            self.memory = ReplayMemory(_Counted(replay_buffer), **task.memory)

    def __bool__(self) -> bool:
        """True. Ray asks for it when it reports an error, and the length may be infinite."""
        return True

    def ping(self) -> int:
        """The collector's number, once it is ready."""
        return self.workplace.number

    def load(
        self, weights: TensorDictBase, version: int, statistics: Sequence[Moments] | None
    ) -> None:
        """Act with other weights from the next batch on.

        Args:
            weights (TensorDictBase): parameters of the policy.
            version (int): updates that they had.
            statistics (sequence of Moments, optional): those of all collectors together.
        """
        TensorDict.from_module(self._wrapped_policy).data.update_(weights)
        self.version = version
        if statistics is not None:
            self.statistics.set(list(statistics))
            self._known = self.statistics.get()

    def _since_report(self) -> list[Moments]:
        """What was added to the statistics since they were reported or loaded."""
        return [added(*pair) for pair in zip(self._known, self.statistics.get(), strict=True)]

    @torch.no_grad()
    def collect(self) -> Report:
        """Collect a batch, and store it if there is a replay service."""
        start = time.perf_counter()
        batch = self.rollout()
        before = self.finite.skipped_frames, self.finite.skipped_batches
        ends = batch.select(*_ENDS)[batch["next", "done"].squeeze(-1)].clone()
        if self.memory is not None:
            batch = self.finite.inspect(batch)
        ids = batch.get(_TRAJECTORY).to(torch.int64) + self.workplace.first_trajectory
        batch = batch.copy().set(_TRAJECTORY, ids)
        collected = time.perf_counter()
        stored = 0 if self.memory is None else self._store(self.memory, batch)
        added_now = self._since_report()
        report = Report(
            frames=batch.numel(),
            version=self.version,
            ends=ends,
            added=[merged(*pair) for pair in zip(self._unreported, added_now, strict=True)],
            skipped=(
                self.finite.skipped_frames - before[0],
                self.finite.skipped_batches - before[1],
            ),
            stored=stored,
            seconds=(collected - start, time.perf_counter() - collected),
            batch=batch.clone() if self.memory is None else None,
        )
        self._known = self.statistics.get()
        self._unreported = [added(known, known) for known in self._known]  # nothing
        return report

    def _store(self, memory: ReplayMemory, batch: TensorDictBase) -> int:
        buffer: Any = memory.replay_buffer
        before = buffer.stored
        if self.finite.rejected:
            memory.leave_gap()
            memory.gaps = 0  # which are for one collector: the trajectories get new numbers instead
            ids = self._traj_pool.get_traj_and_increment(self.n_env, device="cpu")
            self._carrier.set(_TRAJECTORY, ids.view(self.env.batch_size))
        else:
            if self.finite.first_lost is not None:
                memory.cut(self.finite.first_lost)
            memory.extend(batch)
        return int(buffer.stored - before)


class _Counted:
    """A client of a replay service that counts what it stores."""

    sampler = None

    def __init__(self, client: Any) -> None:
        self._client, self.stored = client, 0

    def extend(self, data: TensorDictBase) -> None:
        """Store transitions."""
        self._client.extend(data.contiguous())  # a lazy stack would be sent piece by piece
        self.stored += len(data)
