"""PPO on TorchRL's ``Trainer``: epochs of minibatches, and when to stop them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.collectors import BaseCollector
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers import Trainer

from minerva_torchrl.modules.clip_ppo import DirectClipPPOLoss
from minerva_torchrl.objectives.checks import check_count, check_positive
from minerva_torchrl.objectives.ppo import estimate_advantage, ppo_kl_k3
from minerva_torchrl.objectives.reductions import explained_variance
from minerva_torchrl.trainers.annealing import register_lr_scheduler
from minerva_torchrl.trainers.hooks import (
    FiniteBatches,
    refuse_random_frames,
    to_device,
    weights_to_collector,
)
from minerva_torchrl.trainers.stepping import GuardedStepper, Learner

__all__ = ["KLEarlyStop", "PPOOptimizationStepper", "make_ppo_trainer"]


class PPOOptimizationStepper(GuardedStepper):
    r"""All steps of PPO on a rollout: epochs of shuffled minibatches, and when to stop them.

    Every epoch goes through all frames in a new order, cut into minibatches, and takes one joint
    step of policy and critic on each. The epochs end early once the policy has moved too far from
    the one that acted, see :class:`KLEarlyStop`.

    It plugs into TorchRL's ``Trainer`` as ``optimization_stepper=`` with ``num_epochs=1`` and
    ``optim_steps_per_batch=1``, and works in a loop of one's own through :meth:`update`. Either way
    the rollout needs its advantages:
    :func:`~minerva_torchrl.objectives.ppo.estimate_advantage` writes them.

    Args:
        optimizer (Optimizer): over the parameters of policy and critic.

    Keyword Args:
        num_epochs (int): passes over a rollout. Defaults to ``10``.
        minibatch_size (int): frames in a minibatch. A rollout must be a multiple of it. Defaults to
            ``64``.
        target_kl (float, optional): see :class:`KLEarlyStop`. Defaults to ``None``: no early stop.
        clip (float, optional): largest joint gradient norm. Defaults to ``0.5``.

    Examples:
        >>> from minerva_torchrl import make_ppo_loss
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torch import nn
        >>> from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
        >>> policy = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(policy, ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ...     return_log_prob=True,
        ... )
        >>> loss = make_ppo_loss(actor, ValueOperator(nn.Linear(3, 1), in_keys=["observation"]))
        >>> optimizer = torch.optim.Adam(loss.parameters(), lr=3e-4, eps=1e-5, fused=True)
        >>> stepper = PPOOptimizationStepper(optimizer, num_epochs=4, minibatch_size=16)
        >>> end = torch.zeros(2, 64, 1, dtype=torch.bool)
        >>> following = {"observation": torch.randn(2, 64, 3), "reward": torch.randn(2, 64, 1)}
        >>> following |= {"done": end, "terminated": end}
        >>> rollout = TensorDict({"observation": torch.randn(2, 64, 3), "next": following}, [2, 64])
        >>> with torch.no_grad():
        ...     rollout = actor(rollout)  # what a collector does
        >>> metrics = stepper.update(loss, estimate_advantage(loss, rollout))
        >>> metrics["epochs_run"].item(), metrics["kl_k3"].item() < 0.1
        (4.0, True)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        num_epochs: int = 10,
        minibatch_size: int = 64,
        target_kl: float | None = None,
        clip: float | None = 0.5,
    ) -> None:
        check_count("num_epochs", num_epochs)
        check_count("minibatch_size", minibatch_size)
        if clip is not None:
            check_positive("clip", clip)
        super().__init__({"optimizer": optimizer})
        self.optimizer = optimizer
        self.num_epochs = num_epochs
        self.minibatch_size = minibatch_size
        self.target_kl = KLEarlyStop(target_kl).target_kl
        self.clip = clip

    def _update(self, learner: Learner, rollout: TensorDictBase) -> TensorDict:
        """All epochs.

        Returns:
            The detached losses and metrics, 0-d: means over the minibatches of the last epoch that
            ran, ``epochs_run``, ``kl_k3`` of the last minibatch, with which ``target_kl`` is
            compared, and ``rollout_explained_variance`` of the values that made the advantages.
        """
        loss: Any = learner.loss_module
        self._refuse_unreduced(loss)
        frames = self._frames(loss, rollout)
        # All at once: the random numbers after a rollout do not depend on when its epochs stop.
        orders = [torch.randperm(len(frames), device=frames.device) for _ in range(self.num_epochs)]
        early_stop = KLEarlyStop(self.target_kl)
        for epoch, order in enumerate(orders, start=1):
            may_be_last = epoch == self.num_epochs or self.target_kl is not None
            # Nobody sees the metrics of an epoch that is not the last.
            losses_only = not may_be_last and isinstance(loss, DirectClipPPOLoss)
            losses_only = losses_only and not self._one_graph
            method = "losses" if losses_only else None
            outputs = [
                self._take_step(learner, minibatch, method)
                # One copy of everything, so that the minibatches can be views.
                for minibatch in frames[order].split(self.minibatch_size)
            ]
            if may_be_last:
                kl = self._mean_over_processes(ppo_kl_k3(outputs[-1]))
                if early_stop.is_exceeded_by(kl):
                    break
        names = outputs[-1].keys()
        metrics = {name: torch.stack([output[name] for output in outputs]).mean() for name in names}
        metrics |= {"kl_k3": kl, "epochs_run": kl.new_full((), epoch)}
        keys = loss.tensor_keys
        target, value = frames.get(keys.value_target), frames.get(keys.value, None)
        if value is not None:
            metrics["rollout_explained_variance"] = explained_variance(target, value)
        return TensorDict(metrics)

    def _frames(self, loss: ClipPPOLoss, rollout: TensorDictBase) -> TensorDictBase:
        """What the loss needs of a rollout, ``[F]``."""
        keys = loss.tensor_keys
        if rollout.get(keys.advantage, None) is None:
            raise ValueError(
                f"rollout must have its advantages in {keys.advantage!r}. Write them with "
                "estimate_advantage(loss, rollout)."
            )
        if rollout.numel() % self.minibatch_size:
            raise ValueError(
                f"rollout must have a multiple of minibatch_size={self.minibatch_size} frames, got "
                f"{rollout.numel()}."
            )
        # The next states were for the advantages.
        needed = [key for key in loss.in_keys if isinstance(key, str) or key[0] != "next"]
        needed += [keys.advantage, keys.value_target, keys.value, *loss._loss_mask_keys()]
        return rollout.select(*needed, strict=False).reshape(-1)

    def _take_step(
        self, learner: Learner, minibatch: TensorDictBase, method: str | None
    ) -> dict[str, Tensor]:
        """One step on the loss of a minibatch, unless it is not finite; returns it detached."""
        losses, taken = self._evaluate(learner, minibatch, method, {"optimizer": self.clip})
        self._step_if(taken, "optimizer")
        self._count(taken)
        return losses

    def _mean_over_processes(self, x: Tensor) -> Tensor:
        """So that all of them stop, or none."""
        if self._group is None:
            return x
        x = x.clone()
        dist.all_reduce(x, group=self._group)
        return x / dist.get_world_size(self._group)


class KLEarlyStop:
    r"""Ends the epochs over a rollout when the policy has moved too far from the one that acted.

    After each epoch the estimate :math:`k_3` of its **last minibatch**
    (:func:`~minerva_torchrl.objectives.ppo.kl_k3`) is compared with ``target_kl``. If it is larger,
    or not a number, the remaining epochs over this rollout are left out. Training goes on with the
    next rollout. Reading the estimate costs one host synchronisation per epoch.

    :class:`PPOOptimizationStepper` does so with its ``target_kl``. In a loop of one's own, call
    :meth:`start_rollout` before the epochs, :meth:`observe` with the output of the loss after each
    minibatch, and leave the loop when :meth:`epoch_done` says so.

    Args:
        target_kl (float, optional): largest estimate with which another epoch is run. ``None``, or
            a number that is not positive, never stops.

    Examples:
        >>> early_stop = KLEarlyStop(target_kl=0.02)
        >>> early_stop.start_rollout()
        >>> for epoch in range(10):
        ...     for minibatch in range(4):  # each would compute a loss and take a step
        ...         mean_ratio = torch.tensor(1.0 + 0.01 * epoch)
        ...         losses = {"mean_ratio": mean_ratio, "kl_approx": torch.tensor(0.0)}
        ...         early_stop.observe(TensorDict(losses))
        ...     if early_stop.epoch_done():
        ...         break
        >>> early_stop.epochs_run
        4
    """

    def __init__(self, target_kl: float | None) -> None:
        if target_kl is not None and target_kl != target_kl:
            raise ValueError(f"target_kl must be a number or None, got {target_kl}.")
        self.target_kl = None if target_kl is None or target_kl <= 0.0 else float(target_kl)
        self.start_rollout()

    def start_rollout(self) -> None:
        """Forget the previous rollout: its epochs are over."""
        self.stopped = False
        self.epochs_run = 0
        self.last_kl: float | None = None
        self._observed: Tensor | None = None

    def observe(self, losses: TensorDictBase) -> None:
        """Remember the estimate of a minibatch, without synchronising with the host.

        Args:
            losses (TensorDictBase): output of the loss.
        """
        self._observed = ppo_kl_k3(losses)

    def epoch_done(self) -> bool:
        """Compare the last minibatch of the epoch with the target.

        Returns:
            Whether the remaining epochs over this rollout should be left out.
        """
        if self._observed is None:
            raise RuntimeError("epoch_done() needs at least one observe() in every epoch.")
        self.last_kl = float(self._observed)
        self._observed = None
        self.epochs_run += 1
        self.stopped = self.is_exceeded_by(self.last_kl)
        return self.stopped

    def is_exceeded_by(self, kl: Tensor | float) -> bool:
        """Whether an estimate is above the target. Without a target it is not looked at."""
        # Written so that an estimate that is not a number is too large as well.
        return self.target_kl is not None and not float(kl) <= self.target_kl


def make_ppo_trainer(
    *,
    collector: BaseCollector,
    total_frames: int,
    frames_per_batch: int,
    loss_module: ClipPPOLoss,
    optimization_stepper: PPOOptimizationStepper,
    lr_scheduler: LRScheduler | None = None,
    max_skipped: int = 10,
    frame_skip: int = 1,
    **kwargs: Any,
) -> Trainer:
    """TorchRL's ``Trainer`` with what PPO needs registered.

    Per rollout: advantages and value targets are estimated **once**, then the stepper takes all its
    steps on them.

    Keyword Args:
        collector (BaseCollector): yields rollouts ``[*K, T]``.
        total_frames (int): frames to collect.
        frames_per_batch (int): frames in a rollout, a multiple of the stepper's ``minibatch_size``.
        loss_module (ClipPPOLoss): from :func:`~minerva_torchrl.objectives.ppo.make_ppo_loss`.
        optimization_stepper (PPOOptimizationStepper): takes the steps.
        lr_scheduler (LRScheduler, optional): stepped after each rollout, for example from
            :func:`~minerva_torchrl.trainers.linear_lr_annealing`.
        max_skipped (int): see :class:`~minerva_torchrl.trainers.hooks.FiniteBatches`. Defaults to
            ``10``.
        frame_skip (int): frames per environment step. Defaults to ``1``.
        **kwargs: go to :class:`~torchrl.trainers.Trainer`.

    Returns:
        The trainer. ``trainer.finite_batches`` counts what was left out.

    Examples:
        See :class:`PPOOptimizationStepper`.
    """
    refuse_random_frames(collector)
    _move_to_stepper(kwargs, optimization_stepper)
    if frames_per_batch % optimization_stepper.minibatch_size:
        raise ValueError(
            "frames_per_batch must be a multiple of minibatch_size, got "
            f"{frames_per_batch} and {optimization_stepper.minibatch_size}."
        )
    trainer = Trainer(
        collector=collector,
        total_frames=total_frames,
        frame_skip=frame_skip,
        optim_steps_per_batch=1,
        loss_module=loss_module,
        optimization_stepper=optimization_stepper,
        **kwargs,
    )
    device = next(loss_module.parameters()).device

    def with_advantage(rollout: TensorDictBase) -> TensorDictBase:
        return estimate_advantage(loss_module, to_device(rollout, device))

    trainer.register_op("batch_process", with_advantage)
    if lr_scheduler is not None:
        register_lr_scheduler(trainer, lr_scheduler)
    trainer.finite_batches = FiniteBatches(max_skipped)
    trainer.finite_batches.register(trainer)
    trainer.register_op("post_steps", weights_to_collector(trainer))
    return trainer


def _move_to_stepper(kwargs: dict[str, Any], stepper: PPOOptimizationStepper) -> None:
    """Give the stepper those of its settings that were once settings of the trainer."""
    names = ("num_epochs", "minibatch_size", "target_kl")
    moved = {name: kwargs.pop(name) for name in names if name in kwargs}
    if not moved:
        return
    warnings.warn(
        f"{', '.join(moved)} of make_ppo_trainer: give this to PPOOptimizationStepper instead.",
        DeprecationWarning,
        stacklevel=3,
    )
    checked = PPOOptimizationStepper(stepper.optimizer, **moved)
    for name in moved:
        setattr(stepper, name, getattr(checked, name))
