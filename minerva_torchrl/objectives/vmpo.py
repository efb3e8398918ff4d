"""On-policy maximum a posteriori policy optimisation (V-MPO) as a TorchRL loss."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn
from torch import distributions as D
from torch.compiler import is_compiling
from torchrl.data.tensor_specs import TensorSpec

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives._base import masked_extreme
from minerva_torchrl.objectives.checks import check_choice, check_fraction, check_positive
from minerva_torchrl.objectives._on_policy import AdvantageLoss, masked_std
from minerva_torchrl.objectives._policy import (
    action_bounds,
    is_discrete,
    multiplier_shape,
    policy_parameters,
    raw_to_action,
    resolve_action_spec,
)
from minerva_torchrl.objectives.duals import DualVariable
from minerva_torchrl.objectives.vmpo_steps import VMPOEStep, VMPOMStep

__all__ = ["VMPOLoss"]

_METRIC_KEYS = (
    "temperature",
    "kl_eta_rel",
    "ess",
    "selected_fraction",
    "restarting_fraction",
    "importance_mean",
    "advantage_mean",
    "advantage_std",
    "advantage_threshold",
    "advantage_std_over_temperature",
    "weighted_nll",
    "entropy",
    "explained_variance",
    "value_mean",
    "value_std",
    "value_target_mean",
    "value_target_std",
)

# Share of the way to its bound from which a deterministic action counts as saturated.
_SATURATED = 0.99

# Bounds and initial multipliers by the name of the constraint.
_GAUSSIAN_DEFAULTS = {"mean": (1e-2, 1.0), "stddev": (1e-5, 1.0)}
_DISCRETE_DEFAULTS = {"policy": (1e-2, 5.0)}


class VMPOLoss(AdvantageLoss):
    r"""On-policy maximum a posteriori policy optimisation, for continuous and discrete actions.

    Song et al. (2020), *V-MPO: on-policy maximum a posteriori policy optimization for discrete and
    continuous control*, https://arxiv.org/abs/1909.12238.

    **E-step**: of the whole batch, the samples with the best ``top_k_fraction`` of advantages are
    weighted, :math:`\psi_i \propto \exp(A_i / \eta)`, with the temperature :math:`\eta` such that
    the weights stay within ``epsilon_eta`` of uniform.

    **M-step**: the policy is fitted to them by weighted maximum likelihood under a KL constraint to
    the policy that collected the data,

    .. math::
        L_\pi = -\sum_i \psi_i \log \pi(a_i | s_i) + \sum_k \mathrm{sg}[\alpha_k]\, KL_k, \qquad
        L_{\alpha_k} = \alpha_k (\epsilon_k - \mathrm{sg}[KL_k])

    with one constraint for the mean and one for the standard deviation of a Gaussian policy, and
    one for a categorical policy. **Critic**: half the squared error to the value target.

    The old policy's parameters must be in the data, where TorchRL's collectors put them if the
    actor writes them (``out_keys=["loc", "scale"]`` or ``["logits"]``).

    Args:
        actor_network (ProbabilisticTensorDictSequential): policy with an ``IndependentNormal``,
            ``TanhNormal``, ``Categorical`` or ``OneHotCategorical`` distribution. A ``TanhNormal``
            scores the stored action by inverting the tanh, which is inexact near the bounds; an
            unsquashed Gaussian with clipping in the environment is not.
        critic_network (TensorDictModule): state value, written to ``state_value`` ``[*B, 1]``. If
            it ends in a :class:`~minerva_torchrl.objectives.popart.PopArtHead`, its error is taken
            on the normalised scale.

    Keyword Args:
        top_k_fraction (float): fraction of the batch that is kept, in ``(0, 1]``.
        epsilon_eta (float): bound of the E-step's KL divergence.
        epsilon_mean (float, optional): bound for the mean of a Gaussian policy. Default ``1e-2``.
        epsilon_stddev (float, optional): bound for its standard deviation. Default ``1e-5``.
        epsilon_policy (float, optional): bound for a categorical policy. Default ``1e-2``.
        per_dim_constraining (bool): bounds per action dimension, not for their sum.
        init_temperature (float): initial temperature, in real units like every multiplier.
        init_alpha_mean (float, optional): initial multiplier for the mean. Default ``1``.
        init_alpha_stddev (float, optional): initial multiplier for the deviation. Default ``1``.
        init_alpha_policy (float, optional): initial multiplier for a categorical policy. Default
            ``5``.
        temperature_update (str): ``"solve"`` (default: set to where the bound is met exactly on
            every batch) or ``"gradient"`` (learned through ``loss_temperature``).
        kl_samples (str): samples over which KL divergences are averaged: ``"all"`` (default) or the
            ``"selected"`` ones.
        old_policy (str): ``"stored"`` (default: the distribution parameters in the data) or
            ``"target"`` (a target actor, refreshed by a TorchRL target updater).
        normalize_advantage (bool): standardise advantages over the batch.
        critic_coeff (float): weight of the value loss. Defaults to ``0.5``.
        loss_critic_type (str): ``"l2"`` (default), ``"l1"`` or ``"smooth_l1"``.
        clip_value (float, optional): if given, the value may gain nothing from moving further than
            this from the stored ``state_value``.
        separate_losses (bool): keep the critic's gradient out of parameters shared with the actor.
        action_spec (TensorSpec, optional): spec of the action. Defaults to the actor's own.
        reduction (str, optional): ``"mean"`` (default), ``"sum"`` or ``"none"``. The terms of each
            sample are scaled such that their mean over the batch is the loss above; the temperature
            loss, one number for the batch, is repeated for ``"none"``.
        scalar_output_mode (str, optional): with ``reduction="none"`` the 0-d metrics are left out,
            or returned as non-tensor data if ``"non_tensor"``.

    Entries ``restarting_weight`` (zero for steps whose action the environment ignored) and
    ``importance_weight`` of the data are used if they are there.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(
        ...         torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor()),
        ...         in_keys=["observation"],
        ...         out_keys=["loc", "scale"],
        ...     ),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = ValueOperator(torch.nn.Linear(3, 1), in_keys=["observation"])
        >>> loss = VMPOLoss(actor, critic).make_value_estimator("gae", gamma=0.99, lmbda=0.95)
        >>> rollout = TensorDict(
        ...     {
        ...         "observation": torch.randn(2, 50, 3),
        ...         "next": {
        ...             "observation": torch.randn(2, 50, 3),
        ...             "reward": torch.randn(2, 50, 1),
        ...             "done": torch.zeros(2, 50, 1, dtype=torch.bool),
        ...             "terminated": torch.zeros(2, 50, 1, dtype=torch.bool),
        ...         },
        ...     },
        ...     [2, 50],
        ... )
        >>> with torch.no_grad():
        ...     rollout = actor(rollout)  # what a collector does
        >>> output = loss(rollout)
        >>> sum(v for k, v in output.items() if k.startswith("loss_")).backward()
    """

    _schedulable_buffers = frozenset(
        {"epsilon_eta", "epsilon_mean", "epsilon_stddev", "epsilon_policy", "critic_coeff"}
    )

    epsilon_eta: Tensor
    action_low: Tensor | None
    action_high: Tensor | None

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule,
        *,
        top_k_fraction: float = 0.5,
        epsilon_eta: float = 0.1,
        epsilon_mean: float | None = None,
        epsilon_stddev: float | None = None,
        epsilon_policy: float | None = None,
        per_dim_constraining: bool = False,
        init_temperature: float = 1.0,
        init_alpha_mean: float | None = None,
        init_alpha_stddev: float | None = None,
        init_alpha_policy: float | None = None,
        temperature_update: Literal["solve", "gradient"] = "solve",
        kl_samples: Literal["all", "selected"] = "all",
        old_policy: Literal["stored", "target"] = "stored",
        normalize_advantage: bool = True,
        critic_coeff: float = 0.5,
        loss_critic_type: Literal["l2", "l1", "smooth_l1"] = "l2",
        clip_value: float | None = None,
        separate_losses: bool = False,
        action_spec: TensorSpec | None = None,
        reduction: Literal["none", "mean", "sum"] | None = None,
        scalar_output_mode: Literal["exclude", "non_tensor"] | None = None,
    ) -> None:
        self.discrete = is_discrete(actor_network)
        check_fraction("top_k_fraction", top_k_fraction)
        check_choice("temperature_update", temperature_update, ("solve", "gradient"))
        check_choice("kl_samples", kl_samples, ("all", "selected"))
        check_choice("old_policy", old_policy, ("stored", "target"))
        check_positive("epsilon_eta", epsilon_eta)
        check_positive("init_temperature", init_temperature)
        if self.discrete and per_dim_constraining:
            raise ValueError(
                "per_dim_constraining=True is for Gaussian policies, not discrete ones."
            )
        super().__init__(
            actor_network,
            critic_network,
            delay_actor=old_policy == "target",
            separate_losses=separate_losses,
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            clip_value=clip_value,
            reduction=reduction,
            scalar_output_mode=scalar_output_mode,
        )
        self.top_k_fraction = top_k_fraction
        self.per_dim_constraining = per_dim_constraining
        self.temperature_update = temperature_update
        self.kl_samples = kl_samples
        self.old_policy = old_policy
        self.normalize_advantage = normalize_advantage
        spec = resolve_action_spec(action_spec, actor_network, self.tensor_keys.action)
        like = next(actor_network.parameters())
        device = like.device
        bounds = None if self.discrete else action_bounds(spec)
        low, high = (None, None) if bounds is None else (b.to(like) for b in bounds)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

        self.register_coeff_buffer("epsilon_eta", epsilon_eta, device=device)
        self.temperature = DualVariable(
            init_temperature, learnable=temperature_update == "gradient"
        ).to(device)
        given = {
            "mean": (epsilon_mean, init_alpha_mean),
            "stddev": (epsilon_stddev, init_alpha_stddev),
            "policy": (epsilon_policy, init_alpha_policy),
        }
        self._constraints = tuple(_DISCRETE_DEFAULTS if self.discrete else _GAUSSIAN_DEFAULTS)
        shape = multiplier_shape(spec) if per_dim_constraining else ()
        self._make_constraints(given, shape, device)
        self._checked_parameters = False
        self.make_value_estimator()

    # Wiring --------------------------------------------------------------------------------------

    def _make_constraints(
        self,
        given: dict[str, tuple[float | None, float | None]],
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        """Register the bound and the multiplier of every constraint of this kind of policy."""
        defaults = {**_GAUSSIAN_DEFAULTS, **_DISCRETE_DEFAULTS}
        for name, (epsilon, init_alpha) in given.items():
            if name not in self._constraints:
                for argument, value in (
                    (f"epsilon_{name}", epsilon),
                    (f"init_alpha_{name}", init_alpha),
                ):
                    if value is not None:
                        kind = "discrete" if self.discrete else "Gaussian"
                        raise ValueError(
                            f"{argument} does not apply to a {kind} policy, got {value}."
                        )
                continue
            epsilon = defaults[name][0] if epsilon is None else epsilon
            init_alpha = defaults[name][1] if init_alpha is None else init_alpha
            check_positive(f"epsilon_{name}", epsilon)
            check_positive(f"init_alpha_{name}", init_alpha)
            self.register_coeff_buffer(f"epsilon_{name}", epsilon, device=device)
            setattr(self, f"alpha_{name}", DualVariable(init_alpha, shape).to(device))

    @property
    def _loss_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        alphas = (f"loss_alpha_{name}" for name in self._constraints)
        return ("loss_actor", "loss_critic", "loss_temperature", *alphas)

    @property
    def _metric_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        per_constraint = (
            key.format(name)
            for name in self._constraints
            for key in ("alpha_{}", "kl_{}", "kl_{}_rel", "kl_{}_selected", "penalty_{}")
        )
        gaussian = () if self.discrete else ("stddev_min", "stddev_max", "mean_abs_action")
        saturation = () if self.action_low is None else ("saturation",)
        return (*_METRIC_KEYS, *per_constraint, *gaussian, *saturation)

    def _set_in_keys(self) -> None:
        keys = self.tensor_keys
        states = [*self.actor_network.in_keys, *self.critic_network.in_keys]
        in_keys = [*states, keys.action]
        if self.old_policy == "stored":
            in_keys += self._old_policy_keys
        in_keys += [("next", key) for key in (*states, keys.reward, keys.done, keys.terminated)]
        self._in_keys = list(dict.fromkeys(unravel_key(key) for key in in_keys))

    @property
    def _old_policy_keys(self) -> list[NestedKey]:
        """Where the data has the parameters of the policy that collected it."""
        return list(self.actor_network[-1].in_keys)

    # The whole update in one call ----------------------------------------------------------------

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """All losses and metrics of a batch.

        Args:
            tensordict (TensorDictBase): a rollout ``[*B, T]``, or any batch that has ``advantage``
                and ``value_target`` already. If it does not, they are estimated and written.

        Returns:
            A TensorDict with ``loss_actor``, ``loss_critic``, ``loss_temperature``, one
            ``loss_alpha_*`` per constraint, and the detached 0-d metrics of ``out_keys``.
        """
        e_step = self.e_step(tensordict)
        m_step = self.m_step(tensordict, e_step)
        loss_actor, metrics_actor = self.actor_loss(tensordict, e_step, m_step)
        loss_critic, metrics_critic = self.critic_loss(tensordict)
        temperature_loss = e_step.temperature_loss
        if self.reduction == "none":
            temperature_loss = temperature_loss.expand(tensordict.shape)
        losses = {
            "loss_actor": loss_actor,
            "loss_critic": loss_critic,
            "loss_temperature": temperature_loss,
            **self.alpha_losses(e_step, m_step),
        }
        metrics = {**e_step.metrics, **metrics_actor, **metrics_critic, **self.dual_values()}
        output = self._output(losses, metrics, tensordict.shape)
        self._clear_weakrefs(
            tensordict,
            output,
            "actor_network_params",
            "critic_network_params",
            "target_actor_network_params",
            "target_critic_network_params",
        )
        return output

    # Phases --------------------------------------------------------------------------------------

    def e_step(self, tensordict: TensorDictBase) -> VMPOEStep:
        """Select the best samples of the batch and weight them.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`.

        Returns:
            The tensors that the other phases need, for any number of M-steps.
        """
        keys = self.tensor_keys
        states = (*self.actor_network.in_keys, *self.critic_network.in_keys)
        self._check_keys(tensordict, dict.fromkeys((*states, keys.action)))
        raw_advantage = self._advantage(tensordict)
        valid = self._valid_mask(tensordict)
        mask = torch.ones_like(raw_advantage, dtype=torch.bool) if valid is None else valid
        restarting = self._optional_weight(tensordict, keys.restarting_weight)
        importance = self._optional_weight(tensordict, keys.importance_weight)
        usable = mask if restarting is None else mask & (restarting != 0)

        mean = F.masked_mean(raw_advantage, mask)
        std = masked_std(raw_advantage, mask)
        advantage = raw_advantage
        if self.normalize_advantage:
            advantage = (raw_advantage - mean) / (std + 1e-8)
        if self.temperature_update == "solve":
            self._solve_temperature(advantage, usable, importance, valid)
        temperature = self.temperature()
        weights, temperature_loss, selected = F.vmpo_weights_and_temperature_loss(
            advantage,
            temperature,
            self.epsilon_eta,
            top_k_fraction=self.top_k_fraction,
            restarting_weights=restarting,
            importance_weights=importance,
            mask=valid,
        )
        with torch.no_grad():
            kl_samples = mask if self.kl_samples == "all" else selected
            ones = torch.ones_like(weights)
            any_selected = selected.any()
            threshold = torch.where(selected, advantage, torch.inf).amin()
            ess = F.effective_sample_size(weights.flatten())
            metrics = {
                "advantage_mean": mean,
                "advantage_std": std,
                "advantage_threshold": torch.where(any_selected, threshold, 0.0),
                "advantage_std_over_temperature": masked_std(advantage, mask) / temperature,
                "kl_eta_rel": _divergence_from(weights, selected, importance) / self.epsilon_eta,
                "ess": torch.where(ess.isfinite(), ess, 0.0),
                "selected_fraction": F.masked_mean(selected.to(weights.dtype), mask),
                "restarting_fraction": 1 - F.masked_mean(usable.to(weights.dtype), mask),
                "importance_mean": F.masked_mean(ones if importance is None else importance, mask),
            }
        return VMPOEStep(
            weights=weights,
            selected=selected,
            mask=mask,
            num_valid=mask.sum().clamp_min(1),
            kl_weights=kl_samples.to(weights.dtype) / kl_samples.sum().clamp_min(1),
            old_policy=self._old_policy(tensordict, valid),
            temperature_loss=temperature_loss,
            metrics=metrics,
        )

    def m_step(self, tensordict: TensorDictBase, e_step: VMPOEStep) -> VMPOMStep:
        """Score the stored actions with the online policy and measure how far it has moved."""
        dist = self._dist(tensordict, self.actor_network_params)
        new_policy = policy_parameters(dist)
        action = tensordict.get(self.tensor_keys.action)
        if not self.discrete and action.shape != new_policy[0].shape:
            raise ValueError(
                f"{self.tensor_keys.action!r} must have the shape of the policy's mean, "
                f"{tuple(new_policy[0].shape)}, got {tuple(action.shape)}."
            )
        log_prob = dist.log_prob(action)
        if self.discrete:
            (logits,), (old_logits,) = new_policy, e_step.old_policy
            divergences = {"policy": F.categorical_kl(logits, old_logits).unsqueeze(-1)}
        else:
            kl_mean, kl_stddev = F.decoupled_gaussian_kl(*new_policy, *e_step.old_policy)
            divergences = {"mean": kl_mean, "stddev": kl_stddev}
            if not self.per_dim_constraining:
                divergences = {k: v.sum(-1, keepdim=True) for k, v in divergences.items()}
        return VMPOMStep(-log_prob, divergences, dist)

    def actor_loss(
        self,
        tensordict: TensorDictBase,
        e_step: VMPOEStep | None = None,
        m_step: VMPOMStep | None = None,
        *,
        with_metrics: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the policy with the present multipliers, and its metrics.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`.
            e_step (VMPOEStep, optional): the E-step of the same data, made afresh if not given.
            m_step (VMPOMStep, optional): the M-step of that E-step with the present policy.

        Keyword Args:
            with_metrics (bool): whether to compute metrics; without, there are none. Defaults to
                ``True``.
        """
        e_step = self.e_step(tensordict) if e_step is None else e_step
        m_step = self.m_step(tensordict, e_step) if m_step is None else m_step
        # A sample without weight may have a likelihood of zero.
        weighted = e_step.weights * torch.where(e_step.weights > 0, m_step.neg_log_prob, 0.0)
        loss = weighted
        for name, kl in m_step.divergences.items():
            alpha, epsilon = getattr(self, f"alpha_{name}"), getattr(self, f"epsilon_{name}")
            penalty, _ = F.lagrangian_losses(kl, alpha(), epsilon)
            loss = loss + e_step.kl_weights * torch.where(e_step.mask, penalty.sum(-1), 0.0)
        metrics = self._actor_metrics(e_step, m_step, weighted) if with_metrics else {}
        return self._reduce(loss * e_step.num_valid, e_step.mask, None), metrics

    def alpha_losses(self, e_step: VMPOEStep, m_step: VMPOMStep) -> dict[str, Tensor]:
        """Losses of the multipliers."""
        losses = {}
        scale = e_step.kl_weights * e_step.num_valid
        for name, kl in m_step.divergences.items():
            alpha, epsilon = getattr(self, f"alpha_{name}"), getattr(self, f"epsilon_{name}")
            _, loss = F.lagrangian_losses(kl, alpha(), epsilon)
            loss = scale * torch.where(e_step.mask, loss.sum(-1), 0.0)
            losses[f"loss_alpha_{name}"] = self._reduce(loss, e_step.mask, None)
        return losses

    def alpha_parameters(self) -> list[nn.Parameter]:
        """The parameters of the multipliers, for an optimiser."""
        return [getattr(self, f"alpha_{name}").raw for name in self._constraints]

    # Parts ---------------------------------------------------------------------------------------

    def _solve_temperature(
        self,
        advantage: Tensor,
        usable: Tensor,
        importance: Tensor | None,
        valid: Tensor | None,
    ) -> None:
        """Set the temperature to where the weights meet their bound on this batch."""
        counted = F.top_k_mask(advantage, self.top_k_fraction, usable, valid)
        prior = torch.ones_like(advantage)
        if importance is not None:
            counted = counted & (importance > 0)
            prior = importance
        any_counted = counted.any()
        log_prior = torch.where(counted, prior, 1.0).log()
        log_prior = torch.where(counted | ~any_counted, log_prior, -torch.inf)
        solved = F.solve_temperature(
            torch.where(counted, advantage, 0.0).flatten(),
            self.epsilon_eta,
            log_prior=log_prior.flatten(),
            floor=self.temperature.floor,
        )
        self.temperature.set_(torch.where(any_counted, solved, self.temperature()))

    @torch.no_grad()
    def _old_policy(self, tensordict: TensorDictBase, valid: Tensor | None) -> tuple[Tensor, ...]:
        """Parameters of the policy that the divergences are measured from."""
        if self.old_policy == "target":
            old = policy_parameters(self._dist(tensordict, self.target_actor_network_params))
        else:
            missing = [k for k in self._old_policy_keys if tensordict.get(k, None) is None]
            if missing:
                raise ValueError(
                    f"VMPOLoss needs the parameters of the policy that collected the data, but the "
                    f"entries {missing} are missing. Let the actor write them "
                    f"(out_keys={self._old_policy_keys} of its module), or use old_policy='target'."
                )
            stored = tensordict.select(*self._old_policy_keys)
            old = policy_parameters(self.actor_network.build_dist_from_params(stored))
        if valid is not None:  # padding may hold anything; ones are a policy of every kind
            old = tuple(torch.where(valid.unsqueeze(-1), x, 1.0) for x in old)
        self._check_parameters_once(old)
        return old

    def _check_parameters_once(self, parameters: tuple[Tensor, ...]) -> None:
        """Refuse a degenerate Gaussian, at the first call and outside compiled code."""
        if self.discrete or self._checked_parameters or is_compiling() or parameters[0].is_meta:
            return
        loc, scale = parameters
        if not (torch.isfinite(loc).all() and torch.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError(
                f"The old policy's {self._old_policy_keys} must be finite with positive standard "
                f"deviations, got standard deviations from {scale.min().item()} to "
                f"{scale.max().item()}. All zeros are what collectors write for frames drawn "
                "without the policy (init_random_frames)."
            )
        self._checked_parameters = True

    @torch.no_grad()
    def _actor_metrics(
        self, e_step: VMPOEStep, m_step: VMPOMStep, weighted: Tensor
    ) -> dict[str, Tensor]:
        metrics = {"weighted_nll": weighted.sum(), **self._policy_metrics(m_step.dist, e_step)}
        for name, kl in m_step.divergences.items():
            alpha, epsilon = getattr(self, f"alpha_{name}"), getattr(self, f"epsilon_{name}")
            per_sample = kl.mean(-1)
            kl_all = F.masked_mean(per_sample, e_step.mask)
            kl_selected = F.masked_mean(per_sample, e_step.selected)
            constrained = kl_all if self.kl_samples == "all" else kl_selected
            penalty = torch.where(e_step.mask, (alpha() * kl).sum(-1), 0.0)
            metrics |= {
                f"kl_{name}": kl_all,
                f"kl_{name}_selected": kl_selected,
                f"kl_{name}_rel": constrained / epsilon,
                f"penalty_{name}": (e_step.kl_weights * penalty).sum(),
            }
        return metrics

    def _policy_metrics(self, dist: D.Distribution, e_step: VMPOEStep) -> dict[str, Tensor]:
        samples = e_step.mask if self.kl_samples == "all" else e_step.selected
        if self.discrete:
            return {"entropy": F.masked_mean(dist.entropy(), samples)}
        loc, scale = policy_parameters(dist)
        action = raw_to_action(dist, loc)
        metrics = {
            "entropy": F.masked_mean(F.gaussian_entropy(scale), samples),
            "stddev_min": masked_extreme(scale.movedim(-1, 0), e_step.mask, "min"),
            "stddev_max": masked_extreme(scale.movedim(-1, 0), e_step.mask, "max"),
            "mean_abs_action": F.masked_mean(action.abs().mean(-1), e_step.mask),
        }
        if self.action_low is not None and self.action_high is not None:
            margin = (1 - _SATURATED) * (self.action_high - self.action_low) / 2
            margin = torch.where(margin.isinf(), 0.0, margin)
            at_bound = (action <= self.action_low + margin) | (action >= self.action_high - margin)
            metrics["saturation"] = F.masked_mean(at_bound.to(loc.dtype).mean(-1), e_step.mask)
        return metrics


def _divergence_from(weights: Tensor, selected: Tensor, importance: Tensor | None) -> Tensor:
    """KL divergence of the weights from the prior over the selected samples."""
    prior = selected.to(weights.dtype)
    prior = prior if importance is None else prior * importance
    prior = prior / prior.sum().clamp_min(torch.finfo(prior.dtype).tiny)
    ratio = torch.where(weights > 0, weights / prior, 1.0)
    return (weights * ratio.log()).sum()
