"""PPO on TorchRL's ``Trainer``: its hooks, and when to stop the epochs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.collectors import BaseCollector
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers import Trainer, TrainerHookBase

from minerva_torchrl.objectives.checks import check_count, check_positive
from minerva_torchrl.objectives.clip_ppo import DirectClipPPOLoss
from minerva_torchrl.objectives.ppo import estimate_advantage, ppo_kl_k3
from minerva_torchrl.trainers.annealing import register_lr_scheduler
from minerva_torchrl.trainers.hooks import (
    FiniteBatches,
    Minibatches,
    refuse_random_frames,
    run_first,
    weights_to_collector,
)
from minerva_torchrl.trainers.stepping import GuardedStepper

__all__ = ["KLEarlyStop", "PPOOptimizationStepper", "make_ppo_trainer"]


def make_ppo_trainer(
    *,
    collector: BaseCollector,
    total_frames: int,
    frames_per_batch: int,
    loss_module: ClipPPOLoss,
    optimization_stepper: PPOOptimizationStepper,
    num_epochs: int = 10,
    minibatch_size: int = 64,
    target_kl: float | None = None,
    lr_scheduler: LRScheduler | None = None,
    max_skipped: int = 10,
    frame_skip: int = 1,
    **kwargs: Any,
) -> Trainer:
    """TorchRL's ``Trainer`` with what PPO needs registered.

    Per rollout: advantages and value targets are estimated **once**, then every epoch goes through
    all frames in shuffled minibatches, until ``num_epochs`` or ``target_kl`` is reached.

    Keyword Args:
        collector (BaseCollector): yields rollouts ``[*K, T]``.
        total_frames (int): frames to collect.
        frames_per_batch (int): frames in a rollout, a multiple of ``minibatch_size``.
        loss_module (ClipPPOLoss): from :func:`~minerva_torchrl.objectives.ppo.make_ppo_loss`.
        optimization_stepper (PPOOptimizationStepper): takes the steps.
        num_epochs (int): passes over a rollout. Defaults to ``10``.
        minibatch_size (int): frames in a minibatch. Defaults to ``64``.
        target_kl (float, optional): see :class:`KLEarlyStop`.
        lr_scheduler (LRScheduler, optional): stepped after each rollout, for example from
            :func:`~minerva_torchrl.trainers.linear_lr_annealing`.
        max_skipped (int): see :class:`~minerva_torchrl.trainers.hooks.FiniteBatches`. Defaults to
            ``10``.
        frame_skip (int): frames per environment step. Defaults to ``1``.
        **kwargs: go to :class:`~torchrl.trainers.Trainer`.

    Returns:
        The trainer. ``trainer.finite_batches`` counts what was left out.
    """
    refuse_random_frames(collector)
    check_count("minibatch_size", minibatch_size)
    if frames_per_batch % minibatch_size:
        raise ValueError(
            "frames_per_batch must be a multiple of minibatch_size, got "
            f"{frames_per_batch} and {minibatch_size}."
        )
    trainer = Trainer(
        collector=collector,
        total_frames=total_frames,
        frame_skip=frame_skip,
        optim_steps_per_batch=frames_per_batch // minibatch_size,
        loss_module=loss_module,
        optimization_stepper=optimization_stepper,
        num_epochs=num_epochs,
        **kwargs,
    )
    device = next(loss_module.parameters()).device

    def with_advantage(rollout: TensorDictBase) -> TensorDictBase:
        return estimate_advantage(loss_module, rollout.to(device))

    trainer.register_op("batch_process", with_advantage)
    keys = loss_module.tensor_keys
    needed = [*loss_module.in_keys, keys.advantage, keys.value_target, keys.value]
    trainer.minibatches = Minibatches(minibatch_size, keys=needed, num_epochs=num_epochs)
    trainer.minibatches.register(trainer)
    if target_kl is not None:
        KLEarlyStop(target_kl).register(trainer)
    if lr_scheduler is not None:
        register_lr_scheduler(trainer, lr_scheduler)
    trainer.finite_batches = FiniteBatches(max_skipped)
    trainer.finite_batches.register(trainer)
    trainer.register_op("post_steps", weights_to_collector(trainer))
    return trainer


class KLEarlyStop(TrainerHookBase):
    r"""Ends the epochs over a rollout when the policy has moved too far from the one that acted.

    After each epoch the estimate :math:`k_3` of its **last minibatch**
    (:func:`~minerva_torchrl.objectives.ppo.kl_k3`) is compared
    with ``target_kl``. If it is larger, or not a number, the remaining epochs over this rollout are
    left out. Training goes on with the next rollout. Reading the estimate costs one host
    synchronisation per epoch.

    In a loop of one's own, call :meth:`start_rollout` before the epochs, :meth:`observe` with the
    output of the loss after each minibatch, and leave the loop when :meth:`epoch_done` says so.

    With a :class:`~torchrl.trainers.Trainer`, call :meth:`register` after everything else is
    registered. A Trainer always runs its ``num_epochs`` epochs; the ones left out become empty,
    because the hook ends them before a minibatch is drawn. Their ``pre_epoch`` and ``post_epoch``
    hooks still run, and ``optim_steps`` counts one step for each of them. The hook sees the losses
    through the trainer's ``OptimizationStepper`` if it has one, else through ``process_loss``, and
    logs ``kl_k3`` and ``epochs_run``.

    Args:
        target_kl (float, optional): largest estimate with which another epoch is run. ``None``, or
            a number that is not positive, never stops.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
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
        # Written so that an estimate that is not a number stops as well.
        self.stopped = self.target_kl is not None and not self.last_kl <= self.target_kl
        return self.stopped

    def register(self, trainer: Trainer, name: str = "kl_early_stop") -> None:
        """Attach to a trainer.

        Args:
            trainer (Trainer): a trainer that is complete, its optimisation stepper included.
            name (str): name under which the trainer keeps the hook.
        """
        if trainer.optimization_stepper is not None:
            self._observe_stepper(trainer.optimization_stepper)
        else:
            with warnings.catch_warnings():
                # TorchRL announces that steppers will replace this stage; both are supported here.
                warnings.simplefilter("ignore", FutureWarning)
                trainer.register_op("process_loss", self._process_loss)
        minibatches: Minibatches | None = getattr(trainer, "minibatches", None)
        if minibatches is not None:  # any epoch may now be the last one
            minibatches.num_epochs = None
        trainer.register_op("pre_optim_steps", self.start_rollout)
        # First in line, or a minibatch would be drawn from the buffer and thrown away.
        run_first(trainer, "process_optim_batch", self._skip_if_stopped)
        trainer.register_op("post_epoch", self._post_epoch)
        trainer.register_op("post_steps_log", self._log)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the state does not outlive a rollout."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""

    def _observe_stepper(self, stepper: Any) -> None:
        step: Callable[..., TensorDictBase] = stepper.step

        def observed_step(*args: Any, **kwargs: Any) -> TensorDictBase:
            losses = step(*args, **kwargs)
            self.observe(losses)
            return losses

        stepper.step = observed_step

    def _process_loss(self, sub_batch: TensorDictBase, losses: TensorDictBase) -> TensorDictBase:
        self.observe(losses)
        return losses

    def _skip_if_stopped(self, batch: TensorDictBase) -> TensorDictBase:
        if self.stopped:
            raise StopIteration
        return batch

    def _post_epoch(self) -> None:
        if self._observed is not None:  # an epoch left out has no minibatch
            self.epoch_done()

    def _log(self, batch: TensorDictBase) -> dict[str, float]:
        if self.last_kl is None:
            return {}
        return {"kl_k3": self.last_kl, "epochs_run": float(self.epochs_run)}


class PPOOptimizationStepper(GuardedStepper):
    r"""One joint step of policy and critic on the loss of PPO, per minibatch.

    It plugs into TorchRL's ``Trainer`` as ``optimization_stepper=``, and works in a loop of one's
    own through :meth:`update`.

    Args:
        optimizer (Optimizer): over the parameters of policy and critic.

    Keyword Args:
        clip (float, optional): largest joint gradient norm. Defaults to ``0.5``.

    Examples:
        >>> from minerva_torchrl import make_ppo_loss
        >>> from tensordict import TensorDict
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
        >>> stepper = PPOOptimizationStepper(optimizer)
        >>> minibatch = TensorDict({"observation": torch.randn(8, 3)}, [8])
        >>> with torch.no_grad():
        ...     minibatch = actor(minibatch)  # what a collector does
        >>> for key in ("advantage", "value_target", "state_value"):
        ...     minibatch[key] = torch.randn(8, 1)  # what estimate_advantage does
        >>> metrics = stepper.update(loss, minibatch)
        >>> metrics["mean_ratio"].item()
        1.0
    """

    def __init__(self, optimizer: Optimizer, *, clip: float | None = 0.5) -> None:
        if clip is not None:
            check_positive("clip", clip)
        super().__init__({"optimizer": optimizer})
        self.optimizer = optimizer
        self.clip = clip

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDict:
        """One update inside a TorchRL ``Trainer``."""
        minibatches: Minibatches | None = getattr(trainer, "minibatches", None)
        with_metrics = minibatches is None or minibatches.metrics_count
        return self.update(trainer.loss_module, sub_batch, with_metrics=with_metrics)

    def update(
        self, loss: ClipPPOLoss, tensordict: TensorDictBase, *, with_metrics: bool = True
    ) -> TensorDict:
        """One step on a minibatch that has its advantages.

        Args:
            loss (ClipPPOLoss): the loss whose parameters the optimiser holds.
            tensordict (TensorDictBase): the minibatch.

        Keyword Args:
            with_metrics (bool): whether to return anything. Defaults to ``True``.

        Returns:
            The detached losses and metrics, 0-d.
        """
        self._refuse_unreduced(loss)
        direct = isinstance(loss, DirectClipPPOLoss) and not with_metrics
        output = loss.losses(tensordict) if direct else loss(tensordict)
        losses = [value for name, value in output.items() if name.startswith("loss_")]
        taken = self._backward(torch.stack(losses).sum(), {"optimizer": self.clip})
        self._step_if(taken, "optimizer")
        self._count(taken)
        if not with_metrics:
            return TensorDict()
        metrics = {name: value.detach() for name, value in output.items()}
        return TensorDict({name: x.mean() if x.ndim else x for name, x in metrics.items()})
