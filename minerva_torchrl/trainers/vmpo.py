"""V-MPO on TorchRL's ``Trainer``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.collectors import BaseCollector
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TargetNetUpdaterHook

from minerva_torchrl.objectives.checks import check_choice, check_count, check_positive
from minerva_torchrl.objectives.vmpo import VMPOLoss
from minerva_torchrl.trainers.annealing import register_lr_scheduler
from minerva_torchrl.trainers.hooks import (
    FiniteBatches,
    refuse_random_frames,
    to_device,
    weights_to_collector,
)
from minerva_torchrl.trainers.stepping import (
    GuardedStepper,
    Learner,
    LRScaling,
    Undo,
    scale_of_lr,
)

__all__ = ["VMPOOptimizationStepper", "VMPOTrainer"]


class VMPOOptimizationStepper(GuardedStepper):
    r"""One update of V-MPO: an E-step, and several steps of policy, critic and multipliers on it.

    Each of the ``num_policy_steps`` steps evaluates all losses at once, back-propagates their sum
    in one backward pass, and steps the optimisers; then the multipliers are projected. A
    temperature that is learned takes one step, with the first of them; a solved one is set by the
    E-step itself. With ``dual_order="dual_first"`` every step moves the multipliers before it
    evaluates the policy's loss, which takes a backward pass of its own.

    A step sees the whole batch, or a minibatch of it. Many small steps let policy and
    critic follow what is different from state to state; few large ones mostly move what all states
    have in common. Advantages, weights and temperature are those of the whole batch either way.

    It plugs into TorchRL's ``Trainer`` as ``optimization_stepper=``, and works in a loop of one's
    own through :meth:`update`.

    Args:
        optimizer (Optimizer): over ``loss.actor_network_params`` and
            ``loss.critic_network_params``.
        optimizer_alpha (Optimizer): over the multipliers, ``loss.alpha_parameters()``.
        optimizer_temperature (Optimizer, optional): over ``[loss.temperature.raw]``, for
            ``temperature_update="gradient"``.

    Keyword Args:
        num_policy_steps (int): policy steps on one E-step, ``M``. Defaults to ``1``.
        minibatch_size (int, optional): samples of a policy step. The batch is shuffled, cut into
            minibatches, and shuffled again when they are used up; the last of a pass may be
            smaller. Defaults to ``None``: all samples.
        dual_order (str): ``"simultaneous"`` (default) or ``"dual_first"``.
        lr_scaling (str, optional): scale the learning rates of ``optimizer`` and
            ``optimizer_alpha`` by ``"1/sqrt(M)"`` or ``"1/M"``.
        clip (float, optional): largest joint gradient norm of policy and critic. Defaults to ``1``.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torch import nn
        >>> from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
        >>> policy = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(policy, ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
        >>> loss = VMPOLoss(actor, critic)
        >>> networks = [*loss.actor_network_params.parameters()]
        >>> networks += loss.critic_network_params.parameters()
        >>> stepper = VMPOOptimizationStepper(
        ...     torch.optim.Adam(networks, lr=3e-4),
        ...     torch.optim.Adam(loss.alpha_parameters(), lr=1e-2),
        ...     num_policy_steps=4,
        ... )
        >>> end = torch.zeros(2, 20, 1, dtype=torch.bool)
        >>> following = {"observation": torch.randn(2, 20, 3), "reward": torch.randn(2, 20, 1)}
        >>> following |= {"done": end, "terminated": end}
        >>> rollout = TensorDict({"observation": torch.randn(2, 20, 3), "next": following}, [2, 20])
        >>> with torch.no_grad():
        ...     rollout = actor(rollout)  # what a collector does
        >>> metrics = stepper.update(loss, rollout)
        >>> round(metrics["kl_q_rel"].item(), 3)
        1.0
    """

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_alpha: Optimizer,
        optimizer_temperature: Optimizer | None = None,
        *,
        num_policy_steps: int = 1,
        minibatch_size: int | None = None,
        dual_order: Literal["simultaneous", "dual_first"] = "simultaneous",
        lr_scaling: LRScaling | None = None,
        clip: float | None = 1.0,
    ) -> None:
        check_count("num_policy_steps", num_policy_steps)
        check_count("minibatch_size", minibatch_size, optional=True)
        check_choice("dual_order", dual_order, ("simultaneous", "dual_first"))
        if clip is not None:
            check_positive("clip", clip)
        super().__init__(
            {
                "optimizer": optimizer,
                "optimizer_alpha": optimizer_alpha,
                "optimizer_temperature": optimizer_temperature,
            }
        )
        self.optimizer = optimizer
        self.optimizer_alpha = optimizer_alpha
        self.optimizer_temperature = optimizer_temperature
        self.num_policy_steps = num_policy_steps
        self.minibatch_size = minibatch_size
        self.dual_order = dual_order
        self.lr_scaling = lr_scaling
        self.lr_scale = scale_of_lr(lr_scaling, num_policy_steps)
        """Factor on the learning rates that ``lr_scaling`` stands for."""
        self.clip = clip

    def _update(self, learner: Learner, batch: TensorDictBase) -> TensorDict:
        loss: Any = learner.loss_module
        self._refuse_unreduced(loss)
        self._check_temperature(loss)
        undo = Undo(loss.solved_parameters())
        data, metrics = loss.e_step(batch)
        take_step = self._dual_first_step if self.dual_order == "dual_first" else self._joint_step
        minibatches = self._minibatches(data)
        taken = torch.ones((), dtype=torch.bool, device=data.get("e_step").mask.device)
        for i in range(self.num_policy_steps):
            last = i == self.num_policy_steps - 1
            # In compiled code one graph serves all steps.
            with_metrics = last and self.minibatch_size is None and self.compiled is None
            minibatch = next(minibatches)
            taken, losses = take_step(learner, minibatch, taken, i == 0, with_metrics)
            if i == 0:
                undo.unless(taken)
        self._count(taken)
        if not with_metrics:
            with torch.no_grad():
                losses = dict(loss(data).items())
        return TensorDict({**losses, **metrics, **loss.dual_values()})

    def _joint_step(
        self,
        learner: Learner,
        minibatch: TensorDictBase,
        taken: Tensor,
        first: bool,
        with_metrics: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All losses, one backward pass, all optimisers; left out unless ``taken``."""
        clips = {"optimizer": self.clip, **self._dual_clips(first)}
        # Nobody sees the metrics of the other steps.
        method = None if with_metrics else "training_loss"
        losses, finite = self._evaluate(learner, minibatch, method, clips)
        taken = taken & finite
        self._step_all(taken, clips)
        learner.loss_module.project_duals_()
        return taken, losses

    def _dual_first_step(
        self,
        learner: Learner,
        minibatch: TensorDictBase,
        taken: Tensor,
        first: bool,
        with_metrics: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The same with the duals stepped before the policy's loss is evaluated."""
        loss: Any = learner.loss_module
        clips, minibatch = self._dual_clips(first), loss.m_step(minibatch)
        undo = Undo((), *(self._optimizers[name] for name in clips))
        loss_dual, losses = learner.compute_loss(minibatch, "dual_loss")
        taken = taken & self._backward(loss_dual, clips)
        self._step_all(taken, clips)
        loss.project_duals_()
        if with_metrics:
            with torch.no_grad():
                losses = {**loss(minibatch), **losses}
        loss_networks, _ = learner.compute_loss(minibatch, "networks_loss")
        taken = taken & self._backward(loss_networks, {"optimizer": self.clip})
        self._step_all(taken, ["optimizer"])
        undo.unless(taken)
        return taken, {name: value.detach() for name, value in losses.items()}

    def _dual_clips(self, first: bool) -> dict[str, float | None]:
        """The optimisers of the duals; that of the temperature steps once per rollout."""
        learned = first and self.optimizer_temperature is not None
        return {"optimizer_alpha": None, **({"optimizer_temperature": None} if learned else {})}

    def _step_all(self, taken: Tensor, names: Iterable[str]) -> None:
        for name in names:
            self._step_if(taken, name)

    def _lr_factor(self, name: str) -> float:
        return 1.0 if name == "optimizer_temperature" else self.lr_scale

    def _minibatches(self, data: TensorDictBase) -> Iterator[TensorDictBase]:
        """The data of one policy step after the other, without end."""
        size = self.minibatch_size
        if size is None:
            while True:
                yield data
        samples = data.reshape(-1)
        while True:
            order = torch.randperm(samples.numel(), device=samples.get("advantage").device)
            # One copy of everything, so that the minibatches can be views.
            yield from samples[order].split(size)

    def _check_temperature(self, loss: VMPOLoss) -> None:
        learned = loss.temperature_update == "gradient"
        if learned != (self.optimizer_temperature is not None):
            raise ValueError(
                "optimizer_temperature must be given exactly if the loss has "
                f"temperature_update='gradient'; it has {loss.temperature_update!r}."
            )


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
        return to_device(batch, self._device)
