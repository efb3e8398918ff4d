"""Hooks for TorchRL's ``Trainer``: from a collected batch to the batch of an optimisation step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import MultiStepTransform
from torchrl.objectives import HardUpdate, SoftUpdate
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import Trainer, TrainerHookBase
from torchrl.trainers.trainers import UpdateWeights

from minerva_torchrl.objectives.checks import check_count, check_fraction
from minerva_torchrl.trainers.stepping import GuardedStepper, NonFiniteError

__all__ = [
    "FiniteBatches",
    "ReplayMemory",
    "SeparateHardUpdate",
    "make_target_updater",
    "refuse_random_frames",
    "run_first",
    "to_device",
    "weights_to_collector",
]

_TRAJECTORY = ("collector", "traj_ids")
_IDS_PER_GAP = 2**40  # more than a collector gives out


class SeparateHardUpdate(HardUpdate):
    """Copies to target networks, to that of the policy at a period of its own.

    Args:
        loss (LossModule): a loss with target networks.

    Keyword Args:
        period (int): copy at every ``period``-th call of ``step()``.
        actor_period (int): that of the policy.
    """

    def __init__(self, loss: LossModule, *, period: int, actor_period: int) -> None:
        super().__init__(loss, value_network_update_interval=period - 1)
        self.period, self.actor_period = period, actor_period

    def step(self) -> None:
        """Count an update, and copy the networks that are due."""
        self.counter += 1
        for name, source in self._sources.items():
            period = self.actor_period if name == "actor_network_params" else self.period
            if self.counter % period == 0:
                self._step(source, self._targets.get(f"target_{name}"))

    def _step(self, p_source: Any, p_target: Any) -> None:
        p_target.data.copy_(p_source.data)


def make_target_updater(
    loss: LossModule,
    *,
    period: int | None = None,
    tau: float | None = None,
    actor_period: int | None = None,
) -> TargetNetUpdater:
    """The updater of a loss's target networks: a copy every so often, or a moving average.

    Args:
        loss (LossModule): a loss with target networks.

    Keyword Args:
        period (int, optional): copy the networks at every ``period``-th call of ``step()``.
        tau (float, optional): at every call, move the targets by this fraction.
        actor_period (int, optional): with ``period``, that of the policy if it differs.

    Returns:
        TorchRL's :class:`~torchrl.objectives.HardUpdate` or
        :class:`~torchrl.objectives.SoftUpdate`, or :class:`SeparateHardUpdate`.

    Examples:
        See :class:`~minerva_torchrl.MPOTrainer`, which takes one.
    """
    if (period is None) == (tau is None):
        raise ValueError(f"exactly one of period and tau must be given, got {period} and {tau}.")
    if tau is not None:
        check_fraction("tau", tau)
        if actor_period is not None:
            raise ValueError(f"actor_period is for period, not for tau; got {actor_period}.")
        return SoftUpdate(loss, tau=tau)
    check_count("period", period)
    assert period is not None
    if actor_period is not None:
        check_count("actor_period", actor_period)
        return SeparateHardUpdate(loss, period=period, actor_period=actor_period)
    # HardUpdate(n) copies at every call n + 1.
    return HardUpdate(loss, value_network_update_interval=period - 1)


def to_device(batch: TensorDictBase, device: torch.device | str) -> TensorDictBase:
    """A batch on a device. Nobody waits while it is copied from the host's memory to a GPU.

    Args:
        batch (TensorDictBase): the batch.
        device (torch.device): the device.
    """
    on_host = all(entry.device.type == "cpu" for entry in batch.values(True, True))
    if on_host and torch.device(device).type == "cuda":
        return batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device)


def refuse_random_frames(collector: BaseCollector) -> None:
    """Raise if a collector acts at random at first: it stores log-probabilities of zero then."""
    if getattr(collector, "init_random_frames", 0):
        raise ValueError(
            "collector must not have init_random_frames: it stores log-probabilities of zero for "
            "random actions. The policy acts from the first frame on; where that is not wanted for "
            "training, use warmup_frames of MPOTrainer."
        )


def run_first(trainer: Trainer, stage: str, hook: Any) -> None:
    """Register a hook in front of those that a stage has already."""
    trainer.register_op(stage, hook)
    hooks = getattr(trainer, f"_{stage}_ops")
    hooks.insert(0, hooks.pop())


def weights_to_collector(trainer: Trainer) -> UpdateWeights:
    """A hook for ``post_steps`` that gives the policy's weights to the collector.

    Args:
        trainer (Trainer): has the collector and a loss with ``actor_network``.
    """
    weights = partial(TensorDict.from_module, trainer.loss_module.actor_network)
    return UpdateWeights(trainer.collector, 1, policy_weights_getter=weights)


class FiniteBatches(TrainerHookBase):
    """Leaves out what is not finite in collected batches, and ends hopeless training.

    Steps that an environment lost (:class:`~minerva_torchrl.envs.batched.BatchedEnv` says how it
    marks them) are dropped, and the one before each is marked as truncated, with which its episode
    ends. So that batches keep their shape, the place of a lost step is taken by a copy of the step
    before it, as an episode of its own.

    A batch in which any number is infinite or not a number is neither stored nor trained on.
    Updates that the optimisation stepper left out because a loss or gradient was not finite count
    separately. Either kind raises :class:`~minerva_torchrl.trainers.NonFiniteError` when there were
    ``limit`` in a row. Reading the flags costs one host synchronisation per collected batch.

    Args:
        limit (int): number in a row that raises. Defaults to ``10``.
    """

    def __init__(self, limit: int = 10) -> None:
        check_count("limit", limit)
        self.limit = limit
        self.rejected = False
        self.skipped_frames = 0
        self.skipped_batches = 0
        self.first_lost: Tensor | None = None
        """Which copies lost the first step of the latest batch, ``[*K]``; ``None`` if none did."""
        self._in_a_row = 0
        self.frame_skip = 1
        """Frames of a step."""
        self._stepper: GuardedStepper | None = None

    @property
    def skipped_updates(self) -> int:
        """Updates that the stepper left out."""
        return 0 if self._stepper is None else self._stepper.skipped_updates

    def register(self, trainer: Trainer, name: str = "finite_batches") -> None:
        """Attach to a trainer whose other hooks are registered.

        Args:
            trainer (Trainer): the trainer.
            name (str): name under which the trainer keeps the hook.
        """
        if isinstance(trainer.optimization_stepper, GuardedStepper):
            self._stepper = trainer.optimization_stepper
        self.frame_skip = trainer.frame_skip
        run_first(trainer, "batch_process", self.inspect)
        if trainer.replay_buffer is None:  # trains on the collected batch itself
            run_first(trainer, "process_optim_batch", self._skip_if_rejected)
        trainer.register_op("post_steps", self._check_updates)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """The counters."""
        return {
            "skipped_frames": self.skipped_frames,
            "skipped_batches": self.skipped_batches,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.skipped_frames = state_dict.get("skipped_frames", 0)  # not in version 0.1
        self.skipped_batches = state_dict["skipped_batches"]
        self._in_a_row = state_dict["in_a_row"]

    def inspect(self, batch: TensorDictBase) -> TensorDictBase:
        """A collected batch ``[*K, T]`` without lost steps; ``rejected`` says if it can be used."""
        batch = self._without_lost_steps(batch)
        tensors = [tensor for tensor in batch.values(True, True) if tensor.is_floating_point()]
        self.rejected = not torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
        self._in_a_row = self._in_a_row + 1 if self.rejected else 0
        self.skipped_batches += self.rejected
        if self._in_a_row >= self.limit:
            raise NonFiniteError(
                f"{self._in_a_row} collected batches in a row had numbers that are not finite "
                f"(the limit is {self.limit}). Entries of the last: {_not_finite(batch)}."
            )
        return batch

    def _without_lost_steps(self, batch: TensorDictBase) -> TensorDictBase:
        after = batch.get("next")
        truncated, reward = after.get("truncated", None), after.get("reward", None)
        self.first_lost = None
        if truncated is None or reward is None or not (lost := truncated & reward.isnan()).any():
            return batch
        lost = lost.squeeze(-1)
        self.first_lost = lost[..., 0]
        if lost.all():  # nothing could take their place: the whole batch is left out
            self.skipped_frames += lost.numel() * self.frame_skip
            return batch
        batch = batch.clone()
        last = torch.zeros_like(lost)
        last[..., :-1] = lost[..., 1:] & ~lost[..., :-1]
        _truncate(batch, last)
        steps, lost = batch.reshape(-1), lost.reshape(-1)
        places, numbers = lost.nonzero().flatten(), torch.arange(len(lost), device=lost.device)
        kept = (~lost).nonzero().flatten()
        before = torch.where(lost, kept[0], numbers).cummax(0).values
        steps[places] = steps[before[places]]
        _truncate(steps, lost)
        if _TRAJECTORY in steps.keys(True):  # other numbers than collectors give
            used = self.skipped_frames // self.frame_skip
            steps.get(_TRAJECTORY)[places] = -1 - used - numbers[: len(places)].to(torch.int64)
        self.skipped_frames += len(places) * self.frame_skip
        return batch.update(steps.reshape(batch.shape))  # which keeps the names of dimensions

    def _skip_if_rejected(self, batch: TensorDictBase) -> TensorDictBase:
        if self.rejected:
            raise StopIteration  # ends the epoch
        return batch

    def _check_updates(self) -> None:
        if self._stepper is not None:
            self._stepper.check_finite(self.limit)


def _truncate(batch: TensorDictBase, ends: Tensor) -> None:
    """Mark some steps as the last ones of their episodes, in place."""
    after, ends = batch.get("next"), ends.unsqueeze(-1)
    after.set("truncated", after.get("truncated") | (ends & ~after.get("done")))
    after.set("done", after.get("done") | ends)


def _not_finite(batch: TensorDictBase) -> str:
    keys = [
        key if isinstance(key, str) else "/".join(key)
        for key, tensor in batch.items(True, True)
        if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    return ", ".join(keys)


class ReplayMemory(TrainerHookBase):
    """Stores what is collected in a replay buffer, and draws the batches to train on from it.

    Collected batches ``[*K, T]`` are stored as ``T`` transitions of each of ``K`` environments, one
    environment after the other. Nothing is written into them: TorchRL's own hook marks every
    stored step as truncated.

    Args:
        replay_buffer (ReplayBuffer): a buffer of transitions.

    Keyword Args:
        keys (iterable of NestedKey, optional): entries to store, if the data has them. Defaults to
            all of them.
        n_steps (int): steps that a stored transition spans: its reward is the discounted sum of
            theirs, and it ends with the episode at the latest. Defaults to ``1``.
        gamma (float): discount of those rewards. Defaults to ``0.99``.
        reward_keys (sequence of NestedKey): entries with rewards. Defaults to ``["reward"]``.
        every_next_state (bool): store the first ``n_steps - 1`` steps of an episode as transitions
            of one step, too. Without them none of the first ``n_steps`` states is the next state of
            a transition, with them all but the very first are. Where an episode begins is known
            from the entry ``step_count`` (of :class:`~torchrl.envs.StepCounter`); data without it
            is stored as it is. Defaults to ``False``.
        sequence_length (int): for a sampler that returns sequences one after the other, such as
            :class:`~torchrl.data.SliceSampler`: their length. They are returned as ``[B, T]``.
            Defaults to ``1``: what the buffer draws is returned as it is.
        device (torch.device, optional): device to train on.
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        *,
        keys: Iterable[NestedKey] | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        reward_keys: Sequence[NestedKey] = ("reward",),
        every_next_state: bool = False,
        sequence_length: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        check_count("n_steps", n_steps)
        check_count("sequence_length", sequence_length)
        drawn = getattr(replay_buffer.sampler, "sequence_length", sequence_length)
        if n_steps > 1 and drawn > 1:
            raise ValueError(
                "n_steps and sequence_length can't both be above 1: sequences consist of one-step "
                f"transitions. Got {n_steps} and {drawn}."
            )
        self.replay_buffer = replay_buffer
        self.keys = None if keys is None else list(keys)
        self.n_steps = n_steps
        self.every_next_state = every_next_state
        self.sequence_length = sequence_length
        self.device = device
        self.gaps = 0
        """Batches left out so far; trajectories behind each have numbers of their own."""
        # Without the empty done_keys a transition that reaches a terminal state after fewer than n
        # steps would not be marked as terminal, and its target would go on from there.
        self._multi_step = None
        if n_steps > 1:
            rewards = list(reward_keys)
            self._multi_step = MultiStepTransform(n_steps, gamma, reward_keys=rewards, done_keys=[])

    def register(self, trainer: Trainer, name: str = "replay_memory") -> None:
        """Attach to a trainer.

        Args:
            trainer (Trainer): the trainer.
            name (str): name under which the trainer keeps the hook.
        """
        trainer.register_op("process_optim_batch", self.sample)
        trainer.register_module(name, self)

    @torch.no_grad()
    def extend(self, batch: TensorDictBase) -> None:
        """Store a collected batch ``[*K, T]``."""
        step_count = batch.get("step_count", None) if self.every_next_state else None
        if self.keys is not None:
            batch = batch.select(*self.keys, strict=False)
        if self.gaps and _TRAJECTORY in batch.keys(True):
            ids = batch.get(_TRAJECTORY).to(torch.int64) + self.gaps * _IDS_PER_GAP
            batch = batch.copy().set(_TRAJECTORY, ids)
        if self._multi_step is None:
            self.replay_buffer.extend(batch.reshape(-1))
            return
        if step_count is not None:
            first = batch[step_count.reshape(batch.shape) < self.n_steps - 1]
            if len(first):
                one = torch.ones(len(first), dtype=torch.int64, device=first.device)
                self.replay_buffer.extend(first.set("steps_to_next_obs", one))
        batch = self._multi_step.inv(batch)
        # A copy: collectors may write their next batch into the same memory.
        self._multi_step._buffer = self._multi_step._buffer.clone()
        if batch is not None:  # else fewer steps so far than one transition spans
            batch = batch.exclude("gamma", "nonterminal", ("next", "original_reward"))
            self.replay_buffer.extend(batch.reshape(-1))

    def cut(self, copies: Tensor) -> None:
        """End the episodes of some copies with the step that was stored last.

        Args:
            copies (Tensor): which ones, ``[*K]``.
        """
        waiting = None if self._multi_step is None else self._multi_step._buffer
        if waiting is not None:
            ends = torch.zeros(waiting.shape, dtype=torch.bool, device=copies.device)
            ends[..., -1] = copies
            _truncate(waiting, ends)

    def leave_gap(self) -> None:
        """A batch was left out: let neither transitions nor sequences reach across it."""
        self.gaps += 1
        if self._multi_step is not None:
            self._multi_step._buffer = None

    def sample(self, batch: TensorDictBase | None = None) -> TensorDictBase:
        """Draw a batch to train on; what was collected last is not needed for it."""
        sample = self.replay_buffer.sample()
        if self.sequence_length > 1 and sample.ndim == 1:
            sample = sample.reshape(-1, self.sequence_length)
        return sample if self.device is None else to_device(sample, self.device)

    def state_dict(self) -> dict[str, Any]:
        """The steps that wait for their n-step transition; the buffer has a state of its own."""
        waiting = None if self._multi_step is None else self._multi_step._buffer
        if waiting is None:
            return {"gaps": self.gaps}
        return {
            "gaps": self.gaps,
            "waiting": waiting.to_dict(),
            "batch_size": list(waiting.batch_size),
            "names": waiting.names,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.gaps = state_dict["gaps"]
        if self._multi_step is None:
            return
        waiting = state_dict.get("waiting")
        if waiting is not None:
            names, batch_size = state_dict["names"], state_dict["batch_size"]
            waiting = TensorDict(waiting, batch_size=batch_size, names=names)
        self._multi_step._buffer = waiting
