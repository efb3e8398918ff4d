"""The order of the updates inside one optimisation step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.optim import Optimizer

from minerva_torchrl.objectives._checks import check_choice, check_count, check_positive
from minerva_torchrl.objectives.mpo import MPOLoss
from minerva_torchrl.objectives.vmpo import VMPOLoss
from minerva_torchrl.objectives.vmpo_steps import VMPOEStep
from minerva_torchrl.trainers._phases import PhasedStepper, Undo, backward, dual_tensors, step_if

__all__ = ["MPOOptimizationStepper", "VMPOOptimizationStepper"]


class MPOOptimizationStepper(PhasedStepper):
    r"""Critic step, dual step and policy steps of MPO, each with its own optimiser and clipping.

    The target networks are evaluated once. Everything that follows uses those tensors:

    1. one step of the critic;
    2. one step of the temperatures and multipliers, after which they are projected;
    3. ``num_policy_steps`` steps of the policy on the weights of the E-step.

    With ``dual_order="simultaneous"`` the policy's loss uses the multipliers from before the dual
    step, as if all were stepped at once; with ``"dual_first"`` it uses the new ones. The weights
    are those of the old temperature either way.

    It plugs into TorchRL's ``Trainer`` as ``optimization_stepper=``, and works in a loop of one's
    own through :meth:`update`.

    Args:
        optimizer_critic (Optimizer): over ``loss.qvalue_network_params``.
        optimizer_actor (Optimizer): over ``loss.actor_network_params``.
        optimizer_dual (Optimizer): over ``loss.dual_parameters()``.

    Keyword Args:
        num_policy_steps (int): policy steps on one E-step. Defaults to ``1``.
        dual_order (str): ``"simultaneous"`` (default) or ``"dual_first"``.
        clip_critic (float, optional): largest gradient norm of the critic. Defaults to ``40``.
        clip_actor (float, optional): largest gradient norm of the policy. Defaults to ``40``.
        clip_dual (float, optional): largest joint gradient norm of the duals. A joint norm lets a
            large temperature gradient shrink the multipliers' steps, so the default is ``None``.

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
    _optimizer_names = ("optimizer_critic", "optimizer_actor", "optimizer_dual")

    def __init__(
        self,
        optimizer_critic: Optimizer,
        optimizer_actor: Optimizer,
        optimizer_dual: Optimizer,
        *,
        num_policy_steps: int = 1,
        dual_order: Literal["simultaneous", "dual_first"] = "simultaneous",
        clip_critic: float | None = 40.0,
        clip_actor: float | None = 40.0,
        clip_dual: float | None = None,
    ) -> None:
        check_count("num_policy_steps", num_policy_steps)
        check_choice("dual_order", dual_order, ("simultaneous", "dual_first"))
        for name, clip in (
            ("clip_critic", clip_critic),
            ("clip_actor", clip_actor),
            ("clip_dual", clip_dual),
        ):
            if clip is not None:
                check_positive(name, clip)
        self.optimizer_critic = optimizer_critic
        self.optimizer_actor = optimizer_actor
        self.optimizer_dual = optimizer_dual
        self.num_policy_steps = num_policy_steps
        self.dual_order = dual_order
        self.clip_critic = clip_critic
        self.clip_actor = clip_actor
        self.clip_dual = clip_dual

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDict:
        """One update inside a TorchRL ``Trainer``, with the priorities of its replay buffer."""
        self._refuse_distributed(trainer)
        metrics = self.update(trainer.loss_module, sub_batch)
        replay_buffer: Any = getattr(trainer, "replay_buffer", None)
        if hasattr(replay_buffer, "update_tensordict_priority"):
            key = trainer.loss_module.tensor_keys.priority
            priority = sub_batch.get(key)
            # What is not finite can't be learned from: the last to be drawn again.
            sub_batch.set(key, torch.where(priority.isfinite(), priority, 0.0))
            replay_buffer.update_tensordict_priority(sub_batch)
        return metrics

    def update(self, loss: MPOLoss, tensordict: TensorDictBase) -> TensorDict:
        """One update of the critic, the duals and the policy.

        Args:
            loss (MPOLoss): the loss whose parameters the optimisers hold.
            tensordict (TensorDictBase): the batch.

        Returns:
            The detached losses and metrics, 0-d: those of the last policy step, with the duals as
            they are after the update.
        """
        self._refuse_unreduced(loss)
        solved = dual_tensors(loss) if loss.temperature_update == "solve" else ()
        undo = Undo(
            self.optimizer_dual if self.dual_order == "dual_first" else None, parameters=solved
        )
        e_step = loss.e_step(tensordict)
        loss_qvalue, metrics_qvalue = loss.qvalue_loss(tensordict, e_step)
        m_step = loss.m_step(e_step)
        dual_losses = loss.dual_losses(e_step, m_step)
        dual_loss = torch.stack(list(dual_losses.values())).sum()

        taken = backward(loss_qvalue, self.optimizer_critic, self.clip_critic)
        taken &= backward(dual_loss, self.optimizer_dual, self.clip_dual)
        if self.dual_order == "dual_first":
            self._step_duals(loss, taken)
        loss_actor, metrics_actor = loss.actor_loss(tensordict, e_step, m_step)
        taken &= backward(loss_actor, self.optimizer_actor, self.clip_actor)
        step_if(taken, self.optimizer_critic)
        step_if(taken, self.optimizer_actor)
        for _ in range(1, self.num_policy_steps):
            m_step = loss.m_step(e_step)
            loss_actor, metrics_actor = loss.actor_loss(tensordict, e_step, m_step)
            finite = backward(loss_actor, self.optimizer_actor, self.clip_actor)
            step_if(finite & taken, self.optimizer_actor)
        if self.dual_order == "simultaneous":
            self._step_duals(loss, taken)
        undo.unless(taken)
        self._count(taken)

        metrics_qvalue.pop("td_error")
        losses = {"loss_qvalue": loss_qvalue, "loss_actor": loss_actor, **dual_losses}
        metrics = {**e_step.metrics, **metrics_actor, **metrics_qvalue, **loss.dual_values()}
        detached = {name: value.detach() for name, value in losses.items()}
        return TensorDict({**detached, **metrics}, batch_size=[])

    def _step_duals(self, loss: MPOLoss, taken: Tensor) -> None:
        step_if(taken, self.optimizer_dual)
        loss.project_duals_()


class VMPOOptimizationStepper(PhasedStepper):
    r"""Temperature step, then multiplier and policy steps of V-MPO on one E-step.

    1. one step of the temperature (if it is learned; a solved one is set by the E-step itself);
    2. ``num_policy_steps`` times: one step of the multipliers, after which they are projected, and
       one joint step of policy and critic with the new multipliers, on the weights of the E-step.

    Each of these steps sees the whole batch, or a minibatch of it. Many small steps let policy and
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
        >>> round(metrics["kl_eta_rel"].item(), 3)
        1.0
    """

    _optimizer_names = ("optimizer", "optimizer_alpha", "optimizer_temperature")

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_alpha: Optimizer,
        optimizer_temperature: Optimizer | None = None,
        *,
        num_policy_steps: int = 1,
        minibatch_size: int | None = None,
        lr_scaling: Literal["1/sqrt(M)", "1/M"] | None = None,
        clip: float | None = 1.0,
    ) -> None:
        check_count("num_policy_steps", num_policy_steps)
        check_count("minibatch_size", minibatch_size, optional=True)
        check_choice("lr_scaling", lr_scaling, (None, "1/sqrt(M)", "1/M"))
        if clip is not None:
            check_positive("clip", clip)
        self.optimizer = optimizer
        self.optimizer_alpha = optimizer_alpha
        self.optimizer_temperature = optimizer_temperature
        self.num_policy_steps = num_policy_steps
        self.minibatch_size = minibatch_size
        self.lr_scaling = lr_scaling
        self.clip = clip

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rates that ``lr_scaling`` stands for."""
        exponents = {None: 0.0, "1/sqrt(M)": -0.5, "1/M": -1.0}
        return float(self.num_policy_steps ** exponents[self.lr_scaling])

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDict:
        """One update inside a TorchRL ``Trainer``."""
        self._refuse_distributed(trainer)
        return self.update(trainer.loss_module, sub_batch)

    def update(self, loss: VMPOLoss, tensordict: TensorDictBase) -> TensorDict:
        """One E-step, and the steps of temperature, multipliers, policy and critic on it.

        Args:
            loss (VMPOLoss): the loss whose parameters the optimisers hold.
            tensordict (TensorDictBase): the batch, a whole rollout as a rule.

        Returns:
            The detached losses and metrics, 0-d, with the duals as they are after the update.
            Those of policy and critic belong to the last policy step, or with minibatches to the
            whole batch after it.
        """
        self._refuse_unreduced(loss)
        learned = loss.temperature_update == "gradient"
        if learned != (self.optimizer_temperature is not None):
            raise ValueError(
                "optimizer_temperature must be given exactly if the loss has "
                f"temperature_update='gradient'; it has {loss.temperature_update!r}."
            )
        undo = Undo(self.optimizer_temperature, parameters=dual_tensors(loss))
        e_step = loss.e_step(tensordict)
        taken = e_step.temperature_loss.detach().isfinite()
        if self.optimizer_temperature is not None:
            taken = backward(e_step.temperature_loss, self.optimizer_temperature)
            step_if(taken, self.optimizer_temperature)
        minibatches = self._minibatches(tensordict, e_step)
        for i in range(self.num_policy_steps):
            # Nobody sees the metrics of the other steps.
            with_metrics = self.minibatch_size is None and i == self.num_policy_steps - 1
            undo_alpha = Undo(self.optimizer_alpha)
            losses = _VMPOLosses(loss, *next(minibatches))
            taken = taken & backward(losses.alpha(), self.optimizer_alpha)
            step_if(taken, self.optimizer_alpha, lr_scale=self.lr_scale)
            loss.project_duals_()
            taken &= backward(losses.networks(with_metrics), self.optimizer, self.clip)
            step_if(taken, self.optimizer, lr_scale=self.lr_scale)
            undo_alpha.unless(taken)
            if i == 0:
                undo.unless(taken)
        self._count(taken)
        if self.minibatch_size is not None:
            with torch.no_grad():
                losses = _VMPOLosses(loss, tensordict, e_step)
                losses.alpha()
                losses.networks(with_metrics=True)
        values = {**losses.values, "loss_temperature": e_step.temperature_loss}
        metrics = {**e_step.metrics, **losses.metrics, **loss.dual_values()}
        detached = {name: value.detach() for name, value in values.items()}
        return TensorDict({**detached, **metrics}, batch_size=[])

    def _minibatches(
        self, tensordict: TensorDictBase, e_step: VMPOEStep
    ) -> Iterator[tuple[TensorDictBase, VMPOEStep]]:
        """The data of one policy step after the other, without end."""
        size = self.minibatch_size
        if size is None:
            while True:
                yield tensordict, e_step
        samples, device = tensordict.exclude("next").reshape(-1), e_step.weights.device
        count = samples.numel()
        while True:
            order = torch.randperm(count, device=device)
            shuffled, shuffled_e_step = samples[order], e_step.take(order)
            for start in range(0, count, size):
                rows = slice(start, start + size)
                yield shuffled[rows], shuffled_e_step.take(rows)


class _VMPOLosses:
    """The losses of one policy step, computed one after the other."""

    def __init__(self, loss: VMPOLoss, tensordict: TensorDictBase, e_step: VMPOEStep) -> None:
        self.loss, self.tensordict, self.e_step = loss, tensordict, e_step
        self.m_step = loss.m_step(tensordict, e_step)
        self.values: dict[str, Tensor] = {}
        self.metrics: dict[str, Tensor] = {}

    def alpha(self) -> Tensor:
        """That of the multipliers."""
        losses = self.loss.alpha_losses(self.e_step, self.m_step)
        self.values |= losses
        return torch.stack(list(losses.values())).sum()

    def networks(self, with_metrics: bool) -> Tensor:
        """That of policy and critic, with the multipliers of this moment."""
        actor, actor_metrics = self.loss.actor_loss(
            self.tensordict, self.e_step, self.m_step, with_metrics=with_metrics
        )
        critic, critic_metrics = self.loss.critic_loss(self.tensordict, with_metrics=with_metrics)
        self.values |= {"loss_actor": actor, "loss_critic": critic}
        self.metrics |= {**actor_metrics, **critic_metrics}
        return actor + critic
