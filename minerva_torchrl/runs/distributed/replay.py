"""The replay service: a replay buffer in a process of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer

from minerva_torchrl.runs import snapshot
from minerva_torchrl.runs.distributed import WorkersLost

__all__ = ["ReplayService", "SamplingClient"]


class SamplingClient:
    """What a learner draws its batches with, the next one while it learns from the present one.

    Args:
        actor (ActorHandle): the process of the replay buffer.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._next: tuple[int, Any] | None = None

    def sample(self, batch_size: int) -> TensorDictBase:
        """A batch.

        Args:
            batch_size (int): transitions, or sequences.
        """
        if self._next is None or self._next[0] != batch_size:
            self._next = (batch_size, self._actor.sample.remote(batch_size))
        batch: TensorDictBase = ray.get(self._next[1])
        self._next = (batch_size, self._actor.sample.remote(batch_size))
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_next": None}


class ReplayService(RayReplayBuffer):
    """TorchRL's replay service for the replay buffer of a run.

    Args:
        buffer (TensorDictReplayBuffer): a buffer as a local run would have it, empty.
        learners (int): processes that share a batch.
    """

    def __init__(self, buffer: TensorDictReplayBuffer, learners: int) -> None:
        self.max_size = int(buffer.storage.max_size)
        super().__init__(
            replay_buffer_cls=TensorDictReplayBuffer,
            storage=partial(LazyTensorStorage, self.max_size),
            sampler=buffer.sampler,
            batch_size=buffer.batch_size // learners,
            remote_config={"num_cpus": 1, "num_gpus": 0, "max_restarts": 0},
        )

    def samplers(self, count: int) -> list[SamplingClient]:
        """One client for each learner."""
        return [SamplingClient(self._rb) for _ in range(count)]

    def check(self) -> None:
        """Raise :class:`WorkersLost` if the process is gone."""
        try:
            ray.get(self._rb.__len__.remote())
        except RayError as error:
            raise WorkersLost("the replay service was lost.") from error

    def capture(self) -> dict[str, Any]:
        """What checkpoints keep, all of one moment."""
        return self._call(snapshot.capture_replay)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`capture` returned."""
        self._call(snapshot.restore_replay, state)

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return ray.get(self._rb.__ray_call__.remote(function, *arguments))
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise WorkersLost("the replay service was lost.") from error
