"""MPO on TorchRL's ``Trainer``."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.optim import Optimizer
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TargetNetUpdaterHook

from minerva_torchrl.objectives.checks import check_choice, check_count, check_positive
from minerva_torchrl.objectives.mpo import MPOLoss
from minerva_torchrl.trainers.hooks import (
    FiniteBatches,
    ReplayMemory,
    refuse_random_frames,
    weights_to_collector,
)
from minerva_torchrl.trainers.stepping import (
    GuardedStepper,
    Learner,
    LRScaling,
    Undo,
    scale_of_lr,
)

__all__ = ["MPOOptimizationStepper", "MPOTrainer"]


_GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it are spread evenly between whole numbers


class MPOOptimizationStepper(GuardedStepper):
    r"""One update of MPO: critic, policy and duals, each with its own optimiser and clipping.

    All losses are evaluated at once and back-propagated by one backward pass of their sum, which
    gives every parameter the gradient of its own loss. Then each optimiser clips and steps its own
    parameters, and the duals are projected.

    Two options take the update apart, into an E-step, a backward pass for the duals and one for
    critic and policy: ``num_policy_steps`` steps of the policy on one E-step, and
    ``dual_order="dual_first"``, with which the policy's loss uses the multipliers from after their
    step. The weights are those of the old temperature either way.

    It plugs into TorchRL's ``Trainer`` as ``optimization_stepper=``, and works in a loop of one's
    own through :meth:`update`.

    Args:
        optimizer_critic (Optimizer): over ``loss.qvalue_network_params``.
        optimizer_actor (Optimizer): over ``loss.actor_network_params``.
        optimizer_dual (Optimizer): over ``loss.dual_parameters()``.

    Keyword Args:
        num_policy_steps (int): policy steps on one E-step. Defaults to ``1``.
        dual_order (str): ``"simultaneous"`` (default) or ``"dual_first"``.
        lr_scaling (str, optional): scale the learning rate of ``optimizer_actor`` by
            ``"1/sqrt(M)"`` or ``"1/M"``, with M policy steps on one E-step.
        clip_critic (float, optional): largest gradient norm of the critic. Defaults to ``40``.
        clip_actor (float, optional): largest gradient norm of the policy. Defaults to ``40``.
        clip_dual (float, optional): largest joint gradient norm of the duals. A joint norm lets a
            large temperature gradient shrink the multipliers' steps, so the default is ``None``.
        metrics_interval (int): evaluate losses and metrics with one of so many updates, the first
            of all among them; the others return nothing. Defaults to ``1``.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torch import nn
        >>> from torchrl.data import Bounded
        >>> from torchrl.modules import IndependentNormal, MLP, ProbabilisticActor, ValueOperator
        >>> policy = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(policy, ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     spec=Bounded(-1, 1, (2,)),
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = ValueOperator(MLP(5, 1, num_cells=[]), in_keys=["observation", "action"])
        >>> loss = MPOLoss(actor, critic, delay_actor=False, delay_qvalue=False)
        >>> stepper = MPOOptimizationStepper(
        ...     torch.optim.Adam(loss.qvalue_network_params.parameters(), lr=3e-4),
        ...     torch.optim.Adam(loss.actor_network_params.parameters(), lr=3e-4),
        ...     torch.optim.Adam(loss.dual_parameters(), lr=1e-2),
        ... )
        >>> end = torch.zeros(8, 1, dtype=torch.bool)
        >>> following = {"observation": torch.randn(8, 3), "reward": torch.randn(8, 1)}
        >>> following |= {"done": end, "terminated": end}
        >>> batch = {"observation": torch.randn(8, 3), "action": torch.randn(8, 2)}
        >>> metrics = stepper.update(loss, TensorDict({**batch, "next": following}, [8]))
        >>> metrics["kl_mean_rel"].shape
        torch.Size([])
    """

    updates_replay_priority = True

    def __init__(
        self,
        optimizer_critic: Optimizer,
        optimizer_actor: Optimizer,
        optimizer_dual: Optimizer,
        *,
        num_policy_steps: int = 1,
        dual_order: Literal["simultaneous", "dual_first"] = "simultaneous",
        lr_scaling: LRScaling | None = None,
        clip_critic: float | None = 40.0,
        clip_actor: float | None = 40.0,
        clip_dual: float | None = None,
        metrics_interval: int = 1,
    ) -> None:
        check_count("metrics_interval", metrics_interval)
        check_count("num_policy_steps", num_policy_steps)
        check_choice("dual_order", dual_order, ("simultaneous", "dual_first"))
        clips = {"clip_critic": clip_critic, "clip_actor": clip_actor, "clip_dual": clip_dual}
        for name, clip in clips.items():
            if clip is not None:
                check_positive(name, clip)
        super().__init__(
            {
                "optimizer_critic": optimizer_critic,
                "optimizer_actor": optimizer_actor,
                "optimizer_dual": optimizer_dual,
            }
        )
        self.optimizer_critic = optimizer_critic
        self.optimizer_actor = optimizer_actor
        self.optimizer_dual = optimizer_dual
        self.num_policy_steps = num_policy_steps
        self.dual_order = dual_order
        self.lr_scaling = lr_scaling
        self.lr_scale = scale_of_lr(lr_scaling, num_policy_steps)
        """Factor on the policy's learning rate that ``lr_scaling`` stands for."""
        self.clip_critic = clip_critic
        self.clip_actor = clip_actor
        self.clip_dual = clip_dual
        self.metrics_interval = metrics_interval
        self._first_metrics = TensorDict()  # what the first update of an interval returned

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDict:
        """One update inside a TorchRL ``Trainer``, with the priorities of its replay buffer.

        The trainer logs what the first update of a batch returned. If the batch has
        ``metrics_interval`` updates, then that is where the metrics of a later one are written to.
        """
        is_first = self._updates % self.metrics_interval == 0
        metrics = super().step(trainer, sub_batch)
        if is_first:
            self._first_metrics = metrics
        elif not metrics.is_empty():
            self._first_metrics.update(metrics)
            metrics = TensorDict()
        replay_buffer: Any = getattr(trainer, "replay_buffer", None)
        if hasattr(replay_buffer, "update_tensordict_priority"):
            key = trainer.loss_module.tensor_keys.priority
            priority = sub_batch.get(key)
            # What is not finite can't be learned from: the last to be drawn again.
            sub_batch.set(key, torch.where(priority.isfinite(), priority, 0.0))
            replay_buffer.update_tensordict_priority(sub_batch)
        return metrics

    def _update(self, learner: Learner, batch: TensorDictBase) -> TensorDict:
        loss: Any = learner.loss_module
        self._refuse_unreduced(loss)
        undo = Undo(loss.solved_parameters())
        with_metrics = self._has_metrics()
        if self.num_policy_steps == 1 and self.dual_order == "simultaneous":
            clips = {
                "optimizer_critic": self.clip_critic,
                "optimizer_actor": self.clip_actor,
                "optimizer_dual": self.clip_dual,
            }
            # In a compiled graph the metrics cost less than to compile another one.
            method = None if with_metrics or self._one_graph else "training_loss"
            losses, taken = self._evaluate(learner, batch, method, clips)
            for name in clips:
                self._step_if(taken, name)
            loss.project_duals_()
        else:
            losses, taken = self._update_in_parts(learner, batch, with_metrics)
        undo.unless(taken)
        self._count(taken)
        if not with_metrics:
            return TensorDict()
        # The duals as they are now.
        return TensorDict({**losses, **loss.dual_values()})

    def _lr_factor(self, name: str) -> float:
        return self.lr_scale if name == "optimizer_actor" else 1.0

    def _has_metrics(self) -> bool:
        """Whether the present update is the one of its interval that evaluates metrics.

        It is another one in each interval. Always the same would, with a target period of as many
        updates, see the policy always as far from its target: just after a copy not at all.
        """
        intervals, place = divmod(self._updates, self.metrics_interval)
        return place == int(self.metrics_interval * (intervals * _GOLDEN % 1))

    def _update_in_parts(
        self, learner: Learner, batch: TensorDictBase, with_metrics: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Duals, then critic and policy, then the other steps of the policy."""
        loss: Any = learner.loss_module
        dual_first = self.dual_order == "dual_first"
        undo = Undo((), self.optimizer_dual)
        data, metrics = loss.e_step(batch, with_metrics=with_metrics)
        first = loss.m_step(data)
        loss_dual, dual_losses = learner.compute_loss(first, "dual_loss")
        taken = self._backward(loss_dual, {"optimizer_dual": self.clip_dual})
        if dual_first:
            self._step_if(taken, "optimizer_dual")
            loss.project_duals_()
        if with_metrics:
            with torch.no_grad():
                metrics |= dict(loss(data).items())
        loss_networks, _ = learner.compute_loss(first, "networks_loss")
        clips = {"optimizer_critic": self.clip_critic, "optimizer_actor": self.clip_actor}
        taken = taken & self._backward(loss_networks, clips)
        self._step_if(taken, "optimizer_critic")
        self._step_if(taken, "optimizer_actor")
        for _ in range(1, self.num_policy_steps):
            loss_actor, metrics_actor = learner.compute_loss(data, "actor_loss")
            finite = self._backward(loss_actor, {"optimizer_actor": self.clip_actor})
            self._step_if(finite & taken, "optimizer_actor")
            metrics |= {"loss_actor": loss_actor.detach(), **metrics_actor}
        if dual_first:
            undo.unless(taken)
        else:
            self._step_if(taken, "optimizer_dual")
            loss.project_duals_()
        loss.set_priority(batch, first.get(loss.tensor_keys.priority))
        return {**metrics, **{name: x.detach() for name, x in dual_losses.items()}}, taken


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
            its sampler is a :class:`~minerva_torchrl.trainers.SequenceSampler`.
        target_net_updater (TargetNetUpdater): updates the target networks, for example from
            :func:`~minerva_torchrl.trainers.make_target_updater`.
        optim_steps_per_batch (int): optimisation steps per collected batch.
        warmup_frames (int): frames to collect before the first step. Defaults to ``0``.
        n_steps (int): steps that a stored transition spans. Defaults to ``1``. For a loss with
            ``policy_states="next"`` the first ``n_steps - 1`` steps of an episode are stored as
            single steps besides, so that the policy is trained at the states behind them, too.
        gamma (float): discount of their rewards, that of the loss's value estimator. Defaults to
            ``0.99``.
        sequence_length (int): length of the sequences of a sampler that returns them one after the
            other, such as :class:`~torchrl.data.SliceSampler`. Defaults to ``1``.
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
        >>> len(trainer.replay_buffer)  # the last 5 steps wait for their successors, 4 are twice
        199
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
            reward_keys=loss_module.reward_keys,
            every_next_state=loss_module.policy_states == "next",
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
            if self.finite_batches.first_lost is not None:
                self.memory.cut(self.finite_batches.first_lost)
            self.memory.extend(batch)

    def optim_steps(self, batch: TensorDictBase) -> None:
        """The optimisation steps after a collected batch; none during warm-up."""
        if self.collected_frames >= self.warmup_frames and len(self.replay_buffer):
            super().optim_steps(batch)


def stored_keys(loss: MPOLoss) -> list[NestedKey]:
    """Entries of the data that the loss and the samplers of sequences read."""
    extra: list[NestedKey] = [("next", "truncated"), ("collector", "traj_ids"), "steps_to_next_obs"]
    return [*loss.in_keys, *extra]
