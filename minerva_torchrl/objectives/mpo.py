"""Maximum a posteriori policy optimisation (MPO) as a TorchRL loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor
from torchrl.data.tensor_specs import TensorSpec
from torchrl.objectives.utils import distance_loss

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives._actor_critic import SampledCriticLoss
from minerva_torchrl.objectives._base import masked_extreme, masked_means
from minerva_torchrl.objectives.checks import check_choice, check_count, check_positive
from minerva_torchrl.objectives._policy import (
    check_is_gaussian_actor,
    gaussian_parameters,
    multiplier_shape,
    resolve_action_spec,
)
from minerva_torchrl.objectives.duals import DualVariable
from minerva_torchrl.objectives.mpo_steps import MPOEStep, MPOMStep, Samples

__all__ = ["MPOLoss"]

_LOSS_KEYS = (
    "loss_qvalue",
    "loss_actor",
    "loss_temperature",
    "loss_alpha_mean",
    "loss_alpha_stddev",
)
_METRIC_KEYS = (
    "temperature",
    "kl_q_rel",
    "ess",
    "weight_entropy",
    "q_min",
    "q_max",
    "q_mean",
    "cross_entropy",
    "alpha_mean",
    "alpha_stddev",
    "kl_mean",
    "kl_stddev",
    "kl_mean_rel",
    "kl_stddev_rel",
    "stddev_min",
    "stddev_max",
    "pred_value",
    "target_value",
)
_PENALTY_METRIC_KEYS = ("penalty_temperature", "kl_penalty_rel", "out_of_bounds")


class MPOLoss(SampledCriticLoss):
    r"""Maximum a posteriori policy optimisation for continuous actions.

    Abdolmaleki et al. (2018), *Maximum a posteriori policy optimisation*,
    https://arxiv.org/abs/1806.06920, with the decoupled constraints of
    https://arxiv.org/abs/1812.02256 and the action penalty of https://arxiv.org/abs/2005.07513.

    **Critic**: regression of :math:`Q(s, a)` on the target of a value estimator, in which the value
    of the next state is the mean of the target critic over ``num_action_samples`` actions of the
    target policy.

    **E-step**: the same samples are weighted by their values,
    :math:`w_i = \mathrm{softmax}_i(Q'(s, a_i) / \eta)`, with the temperature :math:`\eta` learned
    so that the weights stay within ``epsilon`` of uniform.

    **M-step**: the policy is fitted to the weighted samples, its mean with the old standard
    deviations and its standard deviations with the old mean, under KL constraints of their own:

    .. math::
        L_\pi = -\sum_i w_i \big[ \log \mathcal N(a_i; \mu, \sigma')
            + \log \mathcal N(a_i; \mu', \sigma) \big]
            + \alpha_\mu KL_\mu + \alpha_\sigma KL_\sigma

    Actions: for an unsquashed Gaussian policy the data holds the *raw* sample. The critic sees it
    clipped to the bounds of ``action_spec``, likelihoods see it raw, and the environment should
    clip it (TorchRL's ``ClipTransform(in_keys_inv=["action"])``). For ``TanhNormal`` samples
    are scored before the tanh.

    Ends of episodes: truncated steps bootstrap, terminated ones do not, and terminal states take no
    part in the policy loss.

    Args:
        actor_network (ProbabilisticTensorDictSequential): policy with ``IndependentNormal`` or
            ``TanhNormal`` distribution. Its parameters stay shared with the loss.
        qvalue_network (TensorDictModule or list of TensorDictModule): critic, reading observation
            and action and writing ``state_action_value`` ``[*B, 1]``. A list makes an ensemble.

    Keyword Args:
        num_qvalue_nets (int): size of the ensemble made from a single ``qvalue_network``: the first
            member keeps its weights, the others are initialised afresh. Defaults to ``1``.
        qvalue_reduction (str): ``"min"`` or ``"mean"`` over the ensemble's target values.
        num_action_samples (int): sampled actions per state, ``N``. Defaults to ``20``.
        num_value_samples (int, optional): if given, the expectation in the critic's target takes
            its own samples, this many. By default the E-step's samples are shared where the states
            coincide.
        epsilon (float): bound of the E-step's KL divergence. Defaults to ``0.1``.
        epsilon_mean (float): bound for the mean, per dimension if ``per_dim_constraining``.
        epsilon_stddev (float): bound for the standard deviation, likewise.
        per_dim_constraining (bool): one multiplier and bound per action dimension (default) or one
            for their sum.
        action_penalization (bool, optional): push samples back inside the bounds by a second
            objective with its own temperature. Default: on if the policy is not squashed and the
            action is bounded.
        epsilon_penalty (float): bound of the KL divergence for the penalty.
        init_temperature (float): initial temperature, in real units like every multiplier.
        init_alpha_mean (float): initial multiplier for the mean.
        init_alpha_stddev (float): initial multiplier for the standard deviation.
        init_penalty_temperature (float): initial temperature of the action penalty.
        temperature_update (str): ``"gradient"`` (learned through ``loss_temperature``) or
            ``"solve"`` (set to the minimum of its dual on every batch).
        policy_states (str): states of the policy loss: ``"next"`` (default; shares the samples of
            the critic's target), ``"current"`` or ``"both"``.
        sequence_steps (str): of sequences ``[*B, T]``, train ``"all"`` steps or the ``"first"``.
        loss_function (str): of the critic: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        action_spec (TensorSpec, optional): spec of the action. Defaults to the actor's own.
        delay_actor (bool): keep a target policy. Defaults to ``True``.
        delay_qvalue (bool): keep a target critic. Defaults to ``True``.
        skip_done_states (bool): keep terminal observations away from the networks, for data where
            they may be NaN. Defaults to ``False``.
        reduction (str, optional): ``"mean"`` (default), ``"sum"`` or ``"none"``.
        deactivate_vmap (bool): loop over the ensemble instead of using ``vmap``.
        use_prioritized_weights (bool or "auto"): use the weights of prioritised replay.
        scalar_output_mode (str, optional): with ``reduction="none"`` the 0-d metrics are left out,
            or returned as non-tensor data if ``"non_tensor"``.

    The bounds are buffers and can be scheduled: ``loss.epsilon_mean = 1e-3``. The duals can be
    given an optimiser of their own with :meth:`dual_parameters`; call :meth:`project_duals_after`
    once on the optimiser that trains them.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torchrl.data import Bounded
        >>> from torchrl.modules import IndependentNormal, MLP, ProbabilisticActor, ValueOperator
        >>> from torchrl.objectives import SoftUpdate
        >>> spec = Bounded(-1, 1, (2,))
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(
        ...         torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor()),
        ...         in_keys=["observation"],
        ...         out_keys=["loc", "scale"],
        ...     ),
        ...     in_keys=["loc", "scale"],
        ...     spec=spec,
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = ValueOperator(
        ...     MLP(in_features=5, out_features=1, num_cells=[32]),
        ...     in_keys=["observation", "action"],
        ... )
        >>> loss = MPOLoss(actor, critic).make_value_estimator(gamma=0.99)
        >>> updater = SoftUpdate(loss, tau=0.005)
        >>> batch = TensorDict(
        ...     {
        ...         "observation": torch.randn(8, 3),
        ...         "action": torch.randn(8, 2),
        ...         "next": {
        ...             "observation": torch.randn(8, 3),
        ...             "reward": torch.randn(8, 1),
        ...             "done": torch.zeros(8, 1, dtype=torch.bool),
        ...             "terminated": torch.zeros(8, 1, dtype=torch.bool),
        ...         },
        ...     },
        ...     [8],
        ... )
        >>> output = loss(batch)
        >>> sum(v for k, v in output.items() if k.startswith("loss_")).backward()

    Without TensorDict the losses and metrics come as a tuple in the order of ``out_keys``:

        >>> names = ("observation", "reward", "done", "terminated")
        >>> _ = loss.select_out_keys("loss_actor", "loss_qvalue")
        >>> loss_actor, loss_qvalue = loss(
        ...     observation=batch["observation"],
        ...     action=batch["action"],
        ...     **{f"next_{name}": batch["next", name] for name in names},
        ... )
    """

    _schedulable_buffers = frozenset(
        {"epsilon", "epsilon_mean", "epsilon_stddev", "epsilon_penalty"}
    )

    epsilon: Tensor
    epsilon_mean: Tensor
    epsilon_stddev: Tensor
    epsilon_penalty: Tensor

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule | Sequence[TensorDictModule],
        *,
        num_qvalue_nets: int = 1,
        qvalue_reduction: Literal["min", "mean"] = "min",
        num_action_samples: int = 20,
        num_value_samples: int | None = None,
        epsilon: float = 0.1,
        epsilon_mean: float = 2.5e-3,
        epsilon_stddev: float = 1e-6,
        per_dim_constraining: bool = True,
        action_penalization: bool | None = None,
        epsilon_penalty: float = 1e-3,
        init_temperature: float = 1.0,
        init_alpha_mean: float = 1.0,
        init_alpha_stddev: float = 1000.0,
        init_penalty_temperature: float = 1.0,
        temperature_update: Literal["gradient", "solve"] = "gradient",
        policy_states: Literal["next", "current", "both"] = "next",
        sequence_steps: Literal["all", "first"] = "all",
        loss_function: Literal["l2", "l1", "smooth_l1"] = "l2",
        action_spec: TensorSpec | None = None,
        delay_actor: bool = True,
        delay_qvalue: bool = True,
        skip_done_states: bool = False,
        reduction: Literal["none", "mean", "sum"] | None = None,
        deactivate_vmap: bool = False,
        use_prioritized_weights: Literal["auto"] | bool = "auto",
        scalar_output_mode: Literal["exclude", "non_tensor"] | None = None,
    ) -> None:
        check_is_gaussian_actor(actor_network)
        check_count("num_action_samples", num_action_samples)
        check_count("num_value_samples", num_value_samples, optional=True)
        check_choice("temperature_update", temperature_update, ("gradient", "solve"))
        check_choice("policy_states", policy_states, ("next", "current", "both"))
        check_choice("loss_function", loss_function, ("l2", "l1", "smooth_l1"))
        super().__init__(
            actor_network,
            qvalue_network,
            num_qvalue_nets=num_qvalue_nets,
            qvalue_reduction=qvalue_reduction,
            action_spec=action_spec,
            action_penalization=action_penalization,
            sequence_steps=sequence_steps,
            delay_actor=delay_actor,
            delay_qvalue=delay_qvalue,
            skip_done_states=skip_done_states,
            deactivate_vmap=deactivate_vmap,
            reduction=reduction,
            use_prioritized_weights=use_prioritized_weights,
            scalar_output_mode=scalar_output_mode,
        )
        self.num_action_samples = num_action_samples
        self.num_value_samples = num_value_samples
        self.temperature_update = temperature_update
        self.policy_states = policy_states
        self.loss_function = loss_function
        self.per_dim_constraining = per_dim_constraining

        device = next(actor_network.parameters()).device
        for name, bound in (
            ("epsilon", epsilon),
            ("epsilon_mean", epsilon_mean),
            ("epsilon_stddev", epsilon_stddev),
            ("epsilon_penalty", epsilon_penalty),
        ):
            check_positive(name, bound)
            self.register_coeff_buffer(name, bound, device=device)
        for name, init in (
            ("init_temperature", init_temperature),
            ("init_alpha_mean", init_alpha_mean),
            ("init_alpha_stddev", init_alpha_stddev),
            ("init_penalty_temperature", init_penalty_temperature),
        ):
            check_positive(name, init)
        learnable = temperature_update == "gradient"
        spec = resolve_action_spec(action_spec, actor_network, self.tensor_keys.action)
        alpha_shape = multiplier_shape(spec) if per_dim_constraining else ()
        self.temperature = DualVariable(init_temperature, learnable=learnable).to(device)
        self.alpha_mean = DualVariable(init_alpha_mean, alpha_shape).to(device)
        self.alpha_stddev = DualVariable(init_alpha_stddev, alpha_shape).to(device)
        if self.action_penalization:
            self.penalty_temperature = DualVariable(
                init_penalty_temperature, learnable=learnable
            ).to(device)
        self.make_value_estimator()

    # Wiring --------------------------------------------------------------------------------------

    @property
    def _loss_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        penalty = ("loss_penalty_temperature",) if self.action_penalization else ()
        return (*_LOSS_KEYS, *penalty)

    @property
    def _metric_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*_METRIC_KEYS, *(_PENALTY_METRIC_KEYS if self.action_penalization else ()))

    # The whole update in one call ----------------------------------------------------------------

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """All losses and metrics of a batch.

        Args:
            tensordict (TensorDictBase): transitions ``[B]`` or sequences ``[*B, T]``. The temporal
                difference error is written into it as the priority of prioritised replay.

        Returns:
            A TensorDict with ``loss_qvalue``, ``loss_actor``, ``loss_temperature``,
            ``loss_alpha_mean``, ``loss_alpha_stddev``, with an action penalty
            ``loss_penalty_temperature``, and the detached 0-d metrics of ``out_keys``.
        """
        e_step = self.e_step(tensordict)
        m_step = self.m_step(e_step)
        loss_qvalue, metrics_qvalue = self.qvalue_loss(tensordict, e_step)
        loss_actor, metrics_actor = self.actor_loss(tensordict, e_step, m_step)
        losses = {
            "loss_qvalue": loss_qvalue,
            "loss_actor": loss_actor,
            **self.dual_losses(e_step, m_step),
        }
        metrics_qvalue.pop("td_error")
        metrics = {**e_step.metrics, **metrics_actor, **metrics_qvalue, **self.dual_values()}
        output = self._output(losses, metrics, loss_qvalue.shape)
        self._clear_weakrefs(
            tensordict,
            output,
            "actor_network_params",
            "qvalue_network_params",
            "target_actor_network_params",
            "target_qvalue_network_params",
        )
        return output

    # Phases --------------------------------------------------------------------------------------

    def e_step(self, tensordict: TensorDictBase) -> MPOEStep:
        """Sample the target policy, score the samples with the target critic and weight them.

        The result can be used for the critic's target and for any number of M-steps.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`.

        Returns:
            The tensors that the other phases need.
        """
        self._check_input(tensordict)
        next_value, samples, mask = self._target_samples(tensordict)
        temperature = self.temperature
        if self.temperature_update == "solve":
            temperature.solve_(samples.q_value, self.epsilon, mask=mask)
        weights, temperature_loss = F.mpo_weights_and_temperature_loss(
            samples.q_value, temperature(), self.epsilon
        )
        metrics = self._weight_metrics(weights, samples.q_value, mask)
        penalty_loss = None
        if samples.cost is not None:
            if self.temperature_update == "solve":
                self.penalty_temperature.solve_(samples.cost, self.epsilon_penalty, mask=mask)
            penalty_weights, penalty_loss = F.mpo_weights_and_temperature_loss(
                samples.cost, self.penalty_temperature(), self.epsilon_penalty
            )
            kl_penalty = F.masked_mean(F.sample_kl_to_uniform(penalty_weights), mask)
            metrics["kl_penalty_rel"] = kl_penalty / self.epsilon_penalty
            outside = samples.loc != self._clip(samples.loc)
            metrics["out_of_bounds"] = F.masked_mean(outside.to(weights.dtype).mean(-1), mask)
            weights = weights + penalty_weights
        priority_weight = self._priority_weight(tensordict)
        if priority_weight is not None:
            priority_weight = self._train_steps(priority_weight, tensordict).expand(
                samples.loc.shape[:-1]
            )
        return MPOEStep(
            next_value=next_value,
            inputs=samples.inputs,
            loc=samples.loc,
            scale=samples.scale,
            moments=F.weighted_moments(samples.noise, weights),
            mask=mask,
            priority_weight=priority_weight,
            temperature_loss=temperature_loss,
            penalty_temperature_loss=penalty_loss,
            metrics=metrics,
        )

    def m_step(self, e_step: MPOEStep) -> MPOMStep:
        """Score the E-step's samples with the online policy and measure how far it has moved."""
        old_loc, old_scale = e_step.loc, e_step.scale
        loc, scale = gaussian_parameters(self._dist(e_step.inputs, self.actor_network_params))
        cross_entropy = F.weighted_gaussian_cross_entropy(
            loc, old_scale, old_loc, old_scale, e_step.moments
        ) + F.weighted_gaussian_cross_entropy(old_loc, scale, old_loc, old_scale, e_step.moments)
        kl_mean, kl_stddev = F.decoupled_gaussian_kl(loc, scale, old_loc, old_scale)
        if not self.per_dim_constraining:
            kl_mean, kl_stddev = kl_mean.sum(-1, keepdim=True), kl_stddev.sum(-1, keepdim=True)
        return MPOMStep(cross_entropy, kl_mean, kl_stddev, scale.detach())

    def qvalue_loss(
        self, tensordict: TensorDictBase, e_step: MPOEStep | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the critic, and its metrics with the ``td_error`` of each step.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`.
            e_step (MPOEStep, optional): the E-step of the same data, whose samples are then used.
        """
        self._check_input(tensordict)
        if e_step is None:
            next_states, _ = self._next_states(tensordict)
            num_samples = self.num_value_samples or self.num_action_samples
            next_value = self._sample(next_states, num_samples).q_value.mean(0).unsqueeze(-1)
        else:
            next_value = e_step.next_value
        target = self._train_steps(self._value_target(tensordict, next_value), tensordict)
        data = self._train_steps(tensordict, tensordict)
        action = self._clip(data.get(self.tensor_keys.action))
        q_value = self._q_value(data, action, self.qvalue_network_params)
        target = target.squeeze(-1)
        mask, weights = self._valid_mask(data), self._priority_weight(data)
        if mask is not None:  # left out before the loss: the gradient of a NaN is never zero
            target = torch.where(mask, target, q_value.detach()[0])
        loss = distance_loss(q_value, target.expand_as(q_value), self.loss_function).sum(0)
        with torch.no_grad():
            td_error = (q_value - target).abs().amax(0)
            metrics = {
                "td_error": td_error,
                "pred_value": F.masked_mean(q_value.mean(0), mask),
                "target_value": F.masked_mean(target, mask),
            }
        tensordict.set(self.tensor_keys.priority, self._all_steps(td_error, tensordict))
        return self._reduce(loss, mask, weights), metrics

    def dual_losses(self, e_step: MPOEStep, m_step: MPOMStep) -> dict[str, Tensor]:
        """Losses of the temperatures and multipliers."""
        _, loss_mean = F.lagrangian_losses(m_step.kl_mean, self.alpha_mean(), self.epsilon_mean)
        _, loss_stddev = F.lagrangian_losses(
            m_step.kl_stddev, self.alpha_stddev(), self.epsilon_stddev
        )
        losses = {
            "loss_temperature": self._reduce_states(e_step.temperature_loss, e_step),
            "loss_alpha_mean": self._reduce_states(loss_mean.sum(-1), e_step),
            "loss_alpha_stddev": self._reduce_states(loss_stddev.sum(-1), e_step),
        }
        if e_step.penalty_temperature_loss is not None:
            penalty = self._reduce_states(e_step.penalty_temperature_loss, e_step)
            losses["loss_penalty_temperature"] = penalty
        return losses

    def actor_loss(
        self,
        tensordict: TensorDictBase,
        e_step: MPOEStep | None = None,
        m_step: MPOMStep | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the policy with the present multipliers, and its metrics.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`.
            e_step (MPOEStep, optional): the E-step of the same data, made afresh if not given.
            m_step (MPOMStep, optional): the M-step of that E-step with the present policy.
        """
        e_step = self.e_step(tensordict) if e_step is None else e_step
        m_step = self.m_step(e_step) if m_step is None else m_step
        penalty_mean, _ = F.lagrangian_losses(m_step.kl_mean, self.alpha_mean(), self.epsilon_mean)
        penalty_stddev, _ = F.lagrangian_losses(
            m_step.kl_stddev, self.alpha_stddev(), self.epsilon_stddev
        )
        loss = m_step.cross_entropy + penalty_mean.sum(-1) + penalty_stddev.sum(-1)
        return self._reduce_states(loss, e_step), self._policy_metrics(e_step, m_step)

    # Samples and targets -------------------------------------------------------------------------

    def _target_samples(self, tensordict: TensorDictBase) -> tuple[Tensor, Samples, Tensor | None]:
        """Value of the next states, and samples and mask at the states of the policy loss."""
        next_states, not_terminal = self._next_states(tensordict)
        at_next = self._sample(next_states, self.num_value_samples or self.num_action_samples)
        next_value = at_next.q_value.mean(0).unsqueeze(-1)

        valid = self._valid_mask(tensordict)
        current_mask = torch.ones_like(not_terminal) if valid is None else valid
        current_mask, next_mask = (
            self._train_steps(mask, tensordict)
            for mask in (current_mask, current_mask & not_terminal)
        )
        if self.policy_states != "current":
            first_step_dim = self._first_step_dim(tensordict)
            if self.num_value_samples is not None:
                states = self._train_steps(next_states, tensordict)
                at_next = self._sample(states, self.num_action_samples)
            elif first_step_dim is not None:
                at_next = at_next.first_step(first_step_dim)
            if self.policy_states == "next":
                return next_value, at_next, next_mask
        states = self._train_steps(tensordict.select(*self._state_keys), tensordict)
        at_current = self._sample(states, self.num_action_samples)
        if self.policy_states == "current":
            return next_value, at_current, None if valid is None else current_mask
        samples = Samples.stack(at_current, at_next)
        return next_value, samples, torch.stack([current_mask, next_mask])

    # Reduction and metrics -----------------------------------------------------------------------

    def _reduce_states(self, loss: Tensor, e_step: MPOEStep) -> Tensor:
        """Reduce a loss of the states of the policy loss, ``[*S]``."""
        mask, weights = e_step.mask, e_step.priority_weight
        if self.policy_states == "both":
            # A transition's loss is the mean over its states; the current one always counts.
            assert mask is not None
            in_both = mask[1].to(loss.dtype)
            loss = (loss[0] + in_both * torch.where(mask[1], loss[1], 0.0)) / (1 + in_both)
            mask, weights = mask[0], None if weights is None else weights[0]
        return self._reduce(loss, mask, weights)

    def _weight_metrics(
        self, weights: Tensor, q_value: Tensor, mask: Tensor | None
    ) -> dict[str, Tensor]:
        entropy = F.weight_entropy(weights)
        metrics = masked_means(
            {
                "kl_q_rel": (math.log(len(weights)) - entropy) / self.epsilon,
                "ess": F.effective_sample_size(weights),
                "weight_entropy": entropy,
                "q_mean": q_value.mean(0),
            },
            mask,
        )
        metrics["q_min"] = masked_extreme(q_value, mask, "min")
        metrics["q_max"] = masked_extreme(q_value, mask, "max")
        return metrics

    @torch.no_grad()
    def _policy_metrics(self, e_step: MPOEStep, m_step: MPOMStep) -> dict[str, Tensor]:
        means = masked_means(
            {
                "cross_entropy": m_step.cross_entropy,
                "kl_mean": m_step.kl_mean.mean(-1),
                "kl_stddev": m_step.kl_stddev.mean(-1),
            },
            e_step.mask,
        )
        scale = m_step.scale.movedim(-1, 0)
        return {
            **means,
            "kl_mean_rel": means["kl_mean"] / self.epsilon_mean,
            "kl_stddev_rel": means["kl_stddev"] / self.epsilon_stddev,
            "stddev_min": masked_extreme(scale, e_step.mask, "min"),
            "stddev_max": masked_extreme(scale, e_step.mask, "max"),
        }
