"""On-policy maximum a posteriori policy optimisation (V-MPO) as a TorchRL loss."""

from __future__ import annotations

import warnings
from typing import ClassVar, Literal

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor
from torch import distributions as D
from torchrl.data.tensor_specs import TensorSpec

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives._on_policy import OnPolicyLoss
from minerva_torchrl.objectives.checks import check_choice, check_fraction
from minerva_torchrl.objectives.critics import Critic
from minerva_torchrl.objectives.e_steps import VMPOEStep
from minerva_torchrl.objectives.goals import MAIN_OBJECTIVE
from minerva_torchrl.objectives.precision import in_full_precision
from minerva_torchrl.objectives.reductions import masked_mean, masked_std, weighted, weights_kl

__all__ = ["VMPOLoss"]


class VMPOLoss(OnPolicyLoss):
    r"""On-policy maximum a posteriori policy optimisation, for continuous and discrete actions.

    Song et al. (2020), *V-MPO: on-policy maximum a posteriori policy optimization for discrete and
    continuous control*, https://arxiv.org/abs/1909.12238.

    **E-step**: of the whole batch, the samples with the best ``top_k_fraction`` of advantages are
    weighted, :math:`\psi_i \propto \exp(A_i / \eta)`, with the temperature :math:`\eta` such that
    the weights stay within ``epsilon`` of uniform.

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
            ``TanhNormal``, ``MultivariateNormal``, ``Categorical`` or ``OneHotCategorical``
            distribution (the last two also masked), or a ``CompositeDistribution`` of these.
            A ``TanhNormal`` scores the stored action by inverting the tanh, which is inexact near
            the bounds; an unsquashed Gaussian with clipping in the environment is not.
        critic_network (TensorDictModule): state value, written to ``state_value`` ``[*B, 1]``. For
            one that ends in a PopArt head use
            :class:`~minerva_torchrl.modules.popart.PopArtVMPOLoss`.

    Keyword Args:
        top_k_fraction (float): fraction of the batch that is kept, in ``(0, 1]``.
        epsilon (float): bound of the E-step's KL divergence. Defaults to ``0.1``.
        epsilon_mean (float, optional): bound for the mean of a Gaussian policy. Default ``1e-2``.
        epsilon_stddev (float, optional): bound for its standard deviation. Default ``1e-5``.
        epsilon_covariance (float, optional): bound for the covariance of a Gaussian that has one.
            Default ``1e-4``.
        epsilon_policy (float, optional): bound for a categorical policy. Default ``1e-2``.
        per_dim_constraining (bool, optional): bounds per action dimension, not for their sum.
            ``None`` is ``True`` for policies that have dimensions.
        init_temperature (float): initial temperature, in real units like every multiplier.
        init_alpha_mean (float, optional): initial multiplier for the mean. Default ``1``.
        init_alpha_stddev (float, optional): initial multiplier for the deviation. Default ``1``.
        init_alpha_covariance (float, optional): initial multiplier for the covariance. Default
            ``1``.
        init_alpha_policy (float, optional): initial multiplier for a categorical policy. Default
            ``5``.
        temperature_update (str): ``"solve"`` (default: set to where the bound is met exactly on
            every batch) or ``"gradient"`` (learned through ``loss_temperature``).
        alpha_update (str): ``"gradient"`` (default: multipliers step along the gradient of their
            dual) or ``"relative"`` (in proportion to their value and to the violation of the
            bound, see :class:`~minerva_torchrl.objectives.duals.Constraint`).
        kl_samples (str): samples over which KL divergences are averaged: ``"all"`` (default) or the
            ``"selected"`` ones.
        old_policy (str): ``"stored"`` (default: the distribution parameters in the data) or
            ``"target"`` (a target actor, refreshed by a TorchRL target updater).
        normalize_advantage (bool): standardise advantages over the batch.
        critic_coeff (float): weight of the value loss. Defaults to ``0.5``.
        loss_critic_type (str): ``"l2"`` (default), ``"l1"`` or ``"smooth_l1"``.
        critic (Critic, optional): what ``state_value`` of the critic's network means: a
            ``TwoHotCritic`` or ``HLGaussCritic``. Default: the value itself.
        clip_value (float, optional): if given, the value may gain nothing from moving further than
            this from the stored ``state_value``. ``False`` is the same as ``None``.
        separate_losses (bool): keep the critic's gradient out of parameters shared with the actor.
        action_spec (TensorSpec, optional): spec of the action. Defaults to the actor's own.
        device (torch.device, optional): device of the buffers. Defaults to that of the networks.
        reduction (str, optional): ``"mean"`` (default), ``"sum"`` or ``"none"``. The terms of each
            sample are scaled such that their mean over the batch is the loss above; the temperature
            loss, one number for the batch, is repeated for ``"none"``.
        scalar_output_mode (str, optional): with ``reduction="none"`` the 0-d metrics are left out,
            or returned as non-tensor data if ``"non_tensor"``.
        epsilon_eta (float, optional): former name of ``epsilon``.

    Gradients: every parameter gets the gradient of its own loss only, so that one backward pass of
    the sum of all losses is as good as one for each. Parameters that actor and critic share get
    both, or the actor's only with ``separate_losses=True``.

    The update in parts: :meth:`e_step` weighs a whole rollout and puts the weights into its
    TensorDict. Any part of the samples then has the losses of :meth:`forward`, whose expectation
    over random parts is the loss of the whole.

    Entries ``restarting_weight`` (zero for steps whose action the environment ignored) and
    ``importance_weight`` of the data are used if they are there.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
        >>> network = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(network, ["observation"], ["loc", "scale"]),
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

    default_constraints: ClassVar = {
        "mean": (1e-2, 1.0),
        "stddev": (1e-5, 1.0),
        "covariance": (1e-4, 1.0),
        "policy": (1e-2, 5.0),
    }
    """Bound and initial multiplier by constraint."""
    _schedulable_buffers = frozenset({"critic_coeff"})

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule,
        *,
        top_k_fraction: float = 0.5,
        epsilon: float = 0.1,
        epsilon_mean: float | None = None,
        epsilon_stddev: float | None = None,
        epsilon_covariance: float | None = None,
        epsilon_policy: float | None = None,
        per_dim_constraining: bool | None = False,
        init_temperature: float = 1.0,
        init_alpha_mean: float | None = None,
        init_alpha_stddev: float | None = None,
        init_alpha_covariance: float | None = None,
        init_alpha_policy: float | None = None,
        temperature_update: Literal["solve", "gradient"] = "solve",
        alpha_update: Literal["gradient", "relative"] = "gradient",
        kl_samples: Literal["all", "selected"] = "all",
        old_policy: Literal["stored", "target"] = "stored",
        normalize_advantage: bool = True,
        critic_coeff: float = 0.5,
        loss_critic_type: Literal["l2", "l1", "smooth_l1"] = "l2",
        critic: Critic | None = None,
        clip_value: float | bool | None = None,
        separate_losses: bool = False,
        action_spec: TensorSpec | None = None,
        device: torch.device | None = None,
        reduction: Literal["none", "mean", "sum"] | None = None,
        scalar_output_mode: Literal["exclude", "non_tensor"] | None = None,
        epsilon_eta: float | None = None,
    ) -> None:
        check_fraction("top_k_fraction", top_k_fraction)
        check_choice("temperature_update", temperature_update, ("solve", "gradient"))
        check_choice("kl_samples", kl_samples, ("all", "selected"))
        check_choice("old_policy", old_policy, ("stored", "target"))
        if epsilon_eta is not None:
            warnings.warn(
                "epsilon_eta is now called epsilon, as in MPOLoss.",
                DeprecationWarning,
                stacklevel=2,
            )
            epsilon = epsilon_eta
        super().__init__(
            actor_network,
            critic_network,
            delay_actor=old_policy == "target",
            per_dim_constraining=per_dim_constraining,
            action_spec=action_spec,
            separate_losses=separate_losses,
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            critic=critic,
            clip_value=clip_value,
            device=device,
            reduction=reduction,
            scalar_output_mode=scalar_output_mode,
        )
        self.top_k_fraction = top_k_fraction
        self.per_dim_constraining = any(
            shape for _, shape in self.policy.constraint_kinds().values()
        )
        self.temperature_update = temperature_update
        self.kl_samples = kl_samples
        self.old_policy = old_policy
        self.normalize_advantage = normalize_advantage
        solved = temperature_update == "solve"
        self._add_temperature(MAIN_OBJECTIVE, init_temperature, epsilon, solved=solved)
        self._bounds["epsilon_eta"] = self._bounds["epsilon"]  # its former name
        self._add_constraints(
            self.policy.constraint_kinds(),
            given={
                "mean": (epsilon_mean, init_alpha_mean),
                "stddev": (epsilon_stddev, init_alpha_stddev),
                "covariance": (epsilon_covariance, init_alpha_covariance),
                "policy": (epsilon_policy, init_alpha_policy),
            },
            defaults=self.default_constraints,
            alpha_update=alpha_update,
        )

    # Wiring --------------------------------------------------------------------------------------

    @property
    def _loss_keys(self) -> tuple[str, ...]:
        return ("loss_actor", "loss_critic", *self._dual_loss_keys)

    @property
    def _metric_keys(self) -> tuple[str, ...]:
        names = ("kl_{}", "kl_{}_rel", "kl_{}_selected", "penalty_{}")
        return (
            *("advantage_mean", "advantage_std", "advantage_threshold"),
            *("advantage_std_over_temperature", "kl_q_rel", "epsilon", "ess", "selected_fraction"),
            *("restarting_fraction", "importance_mean", "cross_entropy"),
            *self.policy.metric_keys,
            *(key.format(name) for name in self.constraints for key in names),
            *("explained_variance", "value_mean", "value_std"),
            *("value_target_mean", "value_target_std"),
            *self.critic.metric_keys,
            *self.duals,
        )

    def _set_in_keys(self) -> None:
        keys = self.tensor_keys
        states = [*self._actor_in_keys, *self.critic_network.in_keys]
        in_keys = [*states, keys.action]
        if self.old_policy == "stored":
            in_keys += self._old_policy_keys
        in_keys += [("next", key) for key in (*states, keys.reward, keys.done, keys.terminated)]
        self._in_keys = list(dict.fromkeys(unravel_key(key) for key in in_keys))

    # The whole update in one call ----------------------------------------------------------------

    @dispatch
    @in_full_precision
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """All losses and metrics of a batch.

        Args:
            tensordict (TensorDictBase): a rollout ``[*B, T]``, or any batch that has ``advantage``
                and ``value_target`` already. If it does not, they are estimated and written, and
                a second call on the same data uses them as they are, whatever the critic has
                learned since; to have them estimated anew, take ``advantage`` out of the data. Or
                samples of what :meth:`e_step` returned.

        Returns:
            A TensorDict with ``loss_actor``, ``loss_critic``, ``loss_temperature``, one
            ``loss_alpha_*`` per constraint, and the detached 0-d metrics of ``out_keys``.
        """
        return self._forward(tensordict, with_metrics=True)

    def _forward(self, tensordict: TensorDictBase, *, with_metrics: bool) -> TensorDict:
        data, metrics = self._with_e_step(tensordict, with_metrics)
        e_step = data.get("e_step")
        m_step, value = self._m_step(data), self._critic_outputs(data)
        of_constraints = self._constraint_losses(m_step[-1], e_step.mask)
        losses = {
            "loss_actor": self._actor_loss(data, m_step[1], of_constraints),
            "loss_critic": self._critic_loss(data, value),
            **self._dual_losses(data, of_constraints),
        }
        if with_metrics:
            metrics |= self._actor_metrics(e_step, *m_step, of_constraints)
            metrics |= {**self._critic_metrics(data, value), **self.dual_values()}
        return self._output(losses, metrics, tensordict, tensordict.shape)

    # The update in parts -------------------------------------------------------------------------

    @torch.no_grad()
    @in_full_precision
    def e_step(
        self, tensordict: TensorDictBase, *, with_metrics: bool = True
    ) -> tuple[TensorDictBase, dict[str, Tensor]]:
        """Select the best samples of the batch and weigh them.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`.

        Keyword Args:
            with_metrics (bool): evaluate the metrics, too. Defaults to ``True``.

        Returns:
            The batch without its next states, with the entry ``e_step`` (:class:`VMPOEStep`), and
            0-d metrics.
        """
        keys = self.tensor_keys
        states = (*self._actor_in_keys, *self.critic_network.in_keys)
        self._check_keys(tensordict, dict.fromkeys((*states, keys.action)))
        self.policy.check_action(keys.action, tensordict.get(keys.action), tensordict.shape)
        # One batch over all processes, of which each keeps its own samples.
        advantage = self._gather(self._advantage(tensordict).flatten())
        valid = self._valid_mask(tensordict)
        valid = None if valid is None else self._gather(valid.flatten())
        restarting = self._weights_of_samples(tensordict, keys.restarting_weight)
        importance = self._weights_of_samples(tensordict, keys.importance_weight)
        mask = torch.ones_like(advantage, dtype=torch.bool) if valid is None else valid
        usable = mask if restarting is None else mask & (restarting != 0)

        # eq: vmpo-advantage
        mean, std = masked_mean(advantage, mask), masked_std(advantage, mask)
        metrics = {"advantage_mean": mean, "advantage_std": std}
        if self.normalize_advantage:
            advantage = (advantage - mean) / (std + 1e-8)
        # eq: temperature-solved
        temperature = self.temperatures[MAIN_OBJECTIVE]
        if temperature.solved:
            self._solve_temperature(advantage, usable, importance, valid)
        # eq: vmpo-weights, vmpo-temperature-loss
        weights, dual, selected = F.vmpo_weights_and_temperature_loss(
            advantage,
            temperature(),
            temperature.epsilon,
            top_k_fraction=self.top_k_fraction,
            restarting_weights=restarting,
            importance_weights=importance,
            mask=valid,
        )
        # Of advantages that are not finite none is selected; that must not pass for an empty batch.
        dual = dual + 0.0 * std
        prior = selected.to(weights.dtype)
        prior = prior if importance is None else prior * importance
        kl = weights_kl(weights, prior / selected.sum().clamp_min(1))
        kl = torch.where((weights > 0).any(), kl, temperature.epsilon)  # else nothing to learn from
        num_valid = mask.sum().clamp_min(1)
        kl_samples = mask if self.kl_samples == "all" else selected
        kl_weight = kl_samples.to(weights.dtype) / kl_samples.sum().clamp_min(1)

        e_step = VMPOEStep(
            policy_weight=self._own(weights * num_valid, tensordict),
            kl_weight=self._own(kl_weight * num_valid, tensordict),
            selected=self._own(selected, tensordict),
            mask=self._own(mask, tensordict),
            old_policy=self._old_policy(tensordict),
            dual=dual.expand(tensordict.shape),
            kl=kl.expand(tensordict.shape),
            batch_size=tensordict.shape,
        )
        data = tensordict.exclude("next").set("e_step", e_step)
        if not with_metrics:
            return data, {}
        threshold = torch.where(selected, advantage, torch.inf).amin()
        ess = F.effective_sample_size(weights)
        total = prior.sum().clamp_min(torch.finfo(prior.dtype).tiny)
        ones = torch.ones_like(weights)
        metrics |= {
            "advantage_threshold": torch.where(selected.any(), threshold, 0.0),
            "advantage_std_over_temperature": masked_std(advantage, mask) / temperature(),
            "kl_q_rel": weights_kl(weights, prior / total) / temperature.epsilon,
            "epsilon": temperature.epsilon.clone(),  # it may follow a schedule
            "ess": torch.where(ess.isfinite(), ess, 0.0),
            "selected_fraction": masked_mean(selected.to(weights.dtype), mask),
            "restarting_fraction": 1 - masked_mean(usable.to(weights.dtype), mask),
            "importance_mean": masked_mean(ones if importance is None else importance, mask),
        }
        return data, metrics

    @in_full_precision
    def networks_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the losses of policy and critic, and each of them by name.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`.
        """
        data, _ = self._with_e_step(tensordict, with_metrics=False)
        fit, divergences = self._fit_and_divergences(data)
        of_constraints = self._constraint_losses(divergences, data.get("e_step").mask)
        losses = {
            "loss_actor": self._actor_loss(data, fit, of_constraints),
            "loss_critic": self._critic_loss(data, self._critic_outputs(data)),
        }
        return torch.stack(list(losses.values())).sum(0), losses

    # Parts ---------------------------------------------------------------------------------------

    def _m_step(self, data: TensorDictBase) -> tuple[D.Distribution, Tensor, dict[str, Tensor]]:
        """The online policy, its negative log-likelihoods ``[*B]`` and its divergences."""
        dist = self._dist(data, self.actor_network_params)
        # eq: vmpo-likelihood
        log_prob = self.policy.log_prob(dist, data.get(self.tensor_keys.action))
        old_policy = data.get("e_step").old_policy
        return dist, -log_prob, self.policy.divergences(self.policy.describe(dist), old_policy)

    def _actor_loss(
        self, data: TensorDictBase, fit: Tensor, of_constraints: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        e_step = data.get("e_step")
        # eq: vmpo-policy-loss
        loss = weighted(e_step.policy_weight, fit)
        for penalty, _ in of_constraints.values():
            loss = loss + weighted(e_step.kl_weight, penalty)
        return self._reduce(loss, e_step.mask)

    def _dual_losses(
        self, data: TensorDictBase, of_constraints: dict[str, tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        e_step, temperature = data.get("e_step"), self.temperatures[MAIN_OBJECTIVE]
        losses = {"loss_temperature": self._mean(temperature.loss(e_step.dual, e_step.kl))}
        # eq: vmpo-dual-losses
        for name, (_, of_samples) in of_constraints.items():
            loss = weighted(e_step.kl_weight, of_samples)
            losses[f"loss_alpha_{name}"] = self._reduce(loss, e_step.mask)
        return losses

    def _solve_temperature(
        self,
        advantage: Tensor,
        usable: Tensor,
        importance: Tensor | None,
        valid: Tensor | None,
    ) -> None:
        """Set the temperature to where the weights meet their bound on this batch."""
        temperature = self.temperatures[MAIN_OBJECTIVE]
        counted = F.top_k_mask(advantage, self.top_k_fraction, usable, valid)
        prior = torch.ones_like(advantage)
        if importance is not None:
            counted = counted & (importance > 0)
            prior = importance
        any_counted = counted.any()
        log_prior = torch.where(counted, prior, 1.0).log()
        log_prior = torch.where(counted | ~any_counted, log_prior, -torch.inf)
        # eq: temperature-solved
        solved = F.solve_temperature(
            torch.where(counted, advantage, 0.0),
            temperature.epsilon,
            log_prior=log_prior,
            floor=temperature.floor,
        )
        temperature.set_(torch.where(any_counted, solved, temperature()))

    @torch.no_grad()
    def _actor_metrics(
        self,
        e_step: VMPOEStep,
        dist: D.Distribution,
        fit: Tensor,
        divergences: dict[str, Tensor],
        of_constraints: dict[str, tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        mask, selected = e_step.mask, e_step.selected
        cross_entropy = weighted(e_step.policy_weight, fit)
        metrics = {"cross_entropy": masked_mean(cross_entropy, mask)}
        for name, constraint in self.constraints.items():
            kl = divergences[name].mean(-1)
            of_all, of_selected = masked_mean(kl, mask), masked_mean(kl, selected)
            constrained = of_all if self.kl_samples == "all" else of_selected
            penalty, _ = of_constraints[name]
            metrics |= {
                f"kl_{name}": of_all,
                f"kl_{name}_selected": of_selected,
                f"kl_{name}_rel": constrained / constraint.epsilon,
                f"penalty_{name}": masked_mean(weighted(e_step.kl_weight, penalty), mask),
            }
        metrics |= self.policy.metrics(dist, mask)
        if self.kl_samples == "selected":  # the policy is held back there, so its entropy counts
            metrics["entropy"] = self.policy.metrics(dist, selected)["entropy"]
        return metrics
