"""MPO on TorchRL's ``Trainer``."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TargetNetUpdaterHook

from minerva_torchrl.objectives.mpo import MPOLoss
from minerva_torchrl.trainers.hooks import (
    FiniteBatches,
    ReplayMemory,
    refuse_random_frames,
    weights_to_collector,
)
from minerva_torchrl.trainers.steppers import MPOOptimizationStepper

__all__ = ["MPOTrainer"]


class MPOTrainer(Trainer):
    r"""Collects, stores, and takes MPO's optimisation steps on what is stored.

    Per collected batch: store it, take ``optim_steps_per_batch`` steps, each on a batch drawn from
    the replay buffer and followed by a step of the target updater, then give the new weights to the
    collector. Steps begin once ``warmup_frames`` are collected. The policy acts from the first
    frame on (a collector's ``init_random_frames`` would store log-probabilities of zero, which is
    refused). Batches that are not finite are left out, see
    :class:`~minerva_torchrl.trainers.hooks.FiniteBatches`.

    Everything else is TorchRL's :class:`~torchrl.trainers.Trainer`, whose keyword arguments
    (``logger``, ``progress_bar``, ``checkpoint``, ``log_interval``, ...) are passed on.

    Keyword Args:
        collector (BaseCollector): yields batches ``[*K, T]``.
        total_frames (int): frames to collect.
        loss_module (MPOLoss): the loss.
        optimization_stepper (MPOOptimizationStepper): takes the steps.
        replay_buffer (ReplayBuffer): a buffer of transitions, with a ``batch_size``. For sequences
            its sampler is a :class:`~torchrl.data.SliceSampler` by trajectory.
        target_net_updater (TargetNetUpdater): updates the target networks, for example from
            :func:`~minerva_torchrl.trainers.make_target_updater`.
        optim_steps_per_batch (int): optimisation steps per collected batch.
        warmup_frames (int): frames to collect before the first step. Defaults to ``0``.
        n_steps (int): steps that a stored transition spans. Defaults to ``1``.
        gamma (float): discount of their rewards, that of the loss's value estimator. Defaults to
            ``0.99``.
        sequence_length (int): length of the sequences that the buffer draws; ``1`` for transitions.
            Defaults to ``1``.
        max_skipped (int): batches in a row that may be left out before
            :class:`~minerva_torchrl.trainers.NonFiniteError` is raised. Defaults to ``10``.
        frame_skip (int): frames per environment step. Defaults to ``1``.
        device (torch.device, optional): device of the loss. Defaults to that of its parameters.
        **kwargs: go to :class:`~torchrl.trainers.Trainer`.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.collectors import Collector
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
        >>> from minerva_torchrl import make_env
        >>> from minerva_torchrl.modules import GaussianPolicy, StateActionCritic
        >>> from minerva_torchrl.trainers import make_target_updater
        >>> env = make_env("cartpole-balance", seed=0)
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(GaussianPolicy(5, 1, (16,)), ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     spec=env.action_spec,
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = ValueOperator(
        ...     StateActionCritic(5, 1, (16,)), in_keys=["observation", "action"]
        ... )
        >>> loss = MPOLoss(actor, critic)
        >>> trainer = MPOTrainer(
        ...     collector=Collector(env, actor, frames_per_batch=50, total_frames=-1),
        ...     total_frames=200,
        ...     loss_module=loss,
        ...     optimization_stepper=MPOOptimizationStepper(
        ...         torch.optim.Adam(loss.qvalue_network_params.parameters(), lr=3e-4),
        ...         torch.optim.Adam(loss.actor_network_params.parameters(), lr=3e-4),
        ...         torch.optim.Adam(loss.dual_parameters(), lr=1e-2),
        ...     ),
        ...     replay_buffer=TensorDictReplayBuffer(
        ...         storage=LazyTensorStorage(1000), batch_size=16
        ...     ),
        ...     target_net_updater=make_target_updater(loss, period=100),
        ...     optim_steps_per_batch=5,
        ...     n_steps=5,
        ...     progress_bar=False,
        ... )
        >>> trainer.train()
        >>> len(trainer.replay_buffer)  # the last n steps wait for their successors
        195
    """

    def __init__(
        self,
        *,
        collector: BaseCollector,
        total_frames: int,
        loss_module: MPOLoss,
        optimization_stepper: MPOOptimizationStepper,
        replay_buffer: ReplayBuffer,
        target_net_updater: TargetNetUpdater,
        optim_steps_per_batch: int,
        warmup_frames: int = 0,
        n_steps: int = 1,
        gamma: float = 0.99,
        sequence_length: int = 1,
        max_skipped: int = 10,
        frame_skip: int = 1,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_random_frames(collector)
        discount = float(loss_module.value_estimator.gamma)
        if n_steps > 1 and not math.isclose(discount, gamma, rel_tol=1e-6):
            raise ValueError(
                "gamma must be that of the loss's value estimator if n_steps is above 1, "
                f"got {gamma} and {discount:g}."
            )
        super().__init__(
            collector=collector,
            total_frames=total_frames,
            frame_skip=frame_skip,
            optim_steps_per_batch=optim_steps_per_batch,
            loss_module=loss_module,
            optimization_stepper=optimization_stepper,
            replay_buffer=replay_buffer,
            target_net_updater=target_net_updater,
            **kwargs,
        )
        self.warmup_frames = warmup_frames
        if device is None:
            device = next(loss_module.parameters()).device
        self.memory = ReplayMemory(
            replay_buffer,
            keys=stored_keys(loss_module),
            n_steps=n_steps,
            gamma=gamma,
            sequence_length=sequence_length,
            device=device,
        )
        self.memory.register(self)
        self.finite_batches = FiniteBatches(max_skipped)
        self.register_op("batch_process", self._store)
        self.finite_batches.register(self)
        self.register_op("post_optim", TargetNetUpdaterHook(target_net_updater))
        self.register_module("target_net_updater", target_net_updater)
        self.register_op("post_steps", weights_to_collector(self))

    def _store(self, batch: TensorDictBase) -> None:
        if self.finite_batches.rejected:
            self.memory.leave_gap()
        else:
            self.memory.extend(batch)

    def optim_steps(self, batch: TensorDictBase) -> None:
        """The optimisation steps after a collected batch; none during warm-up."""
        if self.collected_frames >= self.warmup_frames and len(self.replay_buffer):
            super().optim_steps(batch)


def stored_keys(loss: MPOLoss) -> list[NestedKey]:
    """Entries of the data that the loss and the samplers of sequences read."""
    extra: list[NestedKey] = [("next", "truncated"), ("collector", "traj_ids"), "steps_to_next_obs"]
    return [*loss.in_keys, *extra]
