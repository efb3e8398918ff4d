"""V-MPO on TorchRL's ``Trainer``."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch.optim.lr_scheduler import LRScheduler
from torchrl.collectors import BaseCollector
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TargetNetUpdaterHook

from minerva_torchrl.objectives.vmpo import VMPOLoss
from minerva_torchrl.trainers.annealing import register_lr_scheduler
from minerva_torchrl.trainers.hooks import (
    FiniteBatches,
    refuse_random_frames,
    weights_to_collector,
)
from minerva_torchrl.trainers.steppers import VMPOOptimizationStepper

__all__ = ["VMPOTrainer"]


class VMPOTrainer(Trainer):
    r"""Collects a rollout, takes V-MPO's E-step and policy steps on it, and throws it away.

    Advantages and value targets are estimated once per rollout, by the loss. The stepper takes all
    policy steps on one E-step. Rollouts that are not finite are left out, see
    :class:`~minerva_torchrl.trainers.hooks.FiniteBatches`.

    Everything else is TorchRL's :class:`~torchrl.trainers.Trainer`, whose keyword arguments
    (``logger``, ``progress_bar``, ``checkpoint``, ``log_interval``, ...) are passed on.

    Keyword Args:
        collector (BaseCollector): yields rollouts ``[*K, T]``. Its policy stores the parameters of
            its distribution.
        total_frames (int): frames to collect.
        loss_module (VMPOLoss): the loss.
        optimization_stepper (VMPOOptimizationStepper): takes the steps.
        target_net_updater (TargetNetUpdater, optional): updates the old policy after each rollout,
            for a loss with ``old_policy="target"``.
        lr_scheduler (LRScheduler, optional): stepped after each rollout, for example from
            :func:`~minerva_torchrl.trainers.linear_lr_annealing`.
        max_skipped (int): rollouts in a row that may be left out before
            :class:`~minerva_torchrl.trainers.NonFiniteError` is raised. Defaults to ``10``.
        frame_skip (int): frames per environment step. Defaults to ``1``.
        device (torch.device, optional): device of the loss. Defaults to that of its parameters.
        **kwargs: go to :class:`~torchrl.trainers.Trainer`.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.collectors import Collector
        >>> from torchrl.modules import IndependentNormal, MLP, ProbabilisticActor, ValueOperator
        >>> from minerva_torchrl import make_env
        >>> from minerva_torchrl.modules import GaussianPolicy
        >>> env = make_env("cartpole-balance", num_envs=4, seed=0)
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(GaussianPolicy(5, 1, (16,)), ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     spec=env.action_spec,
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = ValueOperator(MLP(5, 1, num_cells=[16]), in_keys=["observation"])
        >>> loss = VMPOLoss(actor, critic)
        >>> networks = [*loss.actor_network_params.parameters()]
        >>> networks += loss.critic_network_params.parameters()
        >>> trainer = VMPOTrainer(
        ...     collector=Collector(env, actor, frames_per_batch=200, total_frames=-1),
        ...     total_frames=400,
        ...     loss_module=loss,
        ...     optimization_stepper=VMPOOptimizationStepper(
        ...         torch.optim.Adam(networks, lr=3e-4),
        ...         torch.optim.Adam(loss.alpha_parameters(), lr=1e-2),
        ...         num_policy_steps=4,
        ...     ),
        ...     progress_bar=False,
        ... )
        >>> trainer.train()
        >>> trainer.collected_frames
        400
    """

    def __init__(
        self,
        *,
        collector: BaseCollector,
        total_frames: int,
        loss_module: VMPOLoss,
        optimization_stepper: VMPOOptimizationStepper,
        target_net_updater: TargetNetUpdater | None = None,
        lr_scheduler: LRScheduler | None = None,
        max_skipped: int = 10,
        frame_skip: int = 1,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_random_frames(collector)
        if (target_net_updater is not None) != (loss_module.old_policy == "target"):
            raise ValueError(
                "target_net_updater must be given exactly if the loss has old_policy='target'; it "
                f"has {loss_module.old_policy!r}."
            )
        super().__init__(
            collector=collector,
            total_frames=total_frames,
            frame_skip=frame_skip,
            optim_steps_per_batch=1,
            loss_module=loss_module,
            optimization_stepper=optimization_stepper,
            target_net_updater=target_net_updater,
            **kwargs,
        )
        self._device = next(loss_module.parameters()).device if device is None else device
        self.finite_batches = FiniteBatches(max_skipped)
        self.register_op("batch_process", self._to_device)
        self.finite_batches.register(self)
        if target_net_updater is not None:
            self.register_op("post_optim", TargetNetUpdaterHook(target_net_updater))
            self.register_module("target_net_updater", target_net_updater)
        if lr_scheduler is not None:
            register_lr_scheduler(self, lr_scheduler)
        self.register_op("post_steps", weights_to_collector(self))

    def _to_device(self, batch: TensorDictBase) -> TensorDictBase:
        return batch.to(self._device)
