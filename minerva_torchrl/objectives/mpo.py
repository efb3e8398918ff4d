"""Maximum a posteriori policy optimisation (MPO) as a TorchRL loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data.tensor_specs import TensorSpec

from minerva_torchrl.objectives._off_policy import of_objective
from minerva_torchrl.objectives._target_networks import TargetNetworksLoss
from minerva_torchrl.objectives.checks import check_choice, check_count, check_positive
from minerva_torchrl.objectives.critics import Critic, resolve_critic
from minerva_torchrl.objectives.e_steps import MPOEStep, weight_metrics
from minerva_torchrl.objectives.goals import (
    MAIN_OBJECTIVE,
    CostLimit,
    Objective,
    resolve_objectives,
)
from minerva_torchrl.objectives.policies import resolve_penalization
from minerva_torchrl.objectives.precision import in_full_precision
from minerva_torchrl.objectives.reductions import masked_mean, masked_means

__all__ = ["MPOLoss"]


class MPOLoss(TargetNetworksLoss):
    r"""Maximum a posteriori policy optimisation for continuous and discrete actions.

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
    clip it. For ``TanhNormal`` samples are scored before the tanh. Discrete actions are not sampled
    but enumerated: all of them are weighted, :math:`w_a \propto \pi'(a) \exp(Q'(s, a) / \eta)`,
    and one constraint bounds how far the policy moves.

    Gradients: every parameter gets the gradient of its own loss only, so that one backward pass of
    the sum of all losses is as good as one for each. Parameters that actor and critic share get
    both, or the actor's only with ``separate_losses=True``.

    Ends of episodes: truncated steps bootstrap, terminated ones do not, and terminal states take no
    part in the policy loss.

    Args:
        actor_network (ProbabilisticTensorDictSequential): policy with an ``IndependentNormal``,
            ``TanhNormal``, ``MultivariateNormal``, ``Categorical`` or ``OneHotCategorical``
            distribution (the last two also masked), or a ``CompositeDistribution`` of these.
            Its parameters stay shared with the loss.
        qvalue_network (TensorDictModule or list of TensorDictModule): critic, reading observation
            and action and writing ``state_action_value`` ``[*B, 1]``. For discrete actions it may
            read the observation alone and write the values of all actions, ``action_value``
            ``[*B, A]``. A list makes an ensemble. With ``objectives``, a mapping (or a list of
            mappings) may have a network for each, ``{"value": ..., "energy": ...}``, with the
            return's as ``"value"``.

    Keyword Args:
        num_qvalue_nets (int): size of the ensemble made from a single ``qvalue_network``: the first
            member keeps its weights, the others are initialised afresh. Defaults to ``1``.
        qvalue_reduction (str): ``"min"`` or ``"mean"`` over the ensemble's target values.
        num_action_samples (int): sampled actions per state, ``N``. Defaults to ``20``.
        num_value_samples (int, optional): if given, the expectation in the critic's target takes
            its own samples, this many. By default the E-step's samples are shared where the states
            coincide.
        control_variate (bool): take the known part of the sampling error, that of equally weighted
            samples, out of the policy's fit. Its expectation stays the same, with less noise;
            nothing changes where actions are enumerated. Defaults to ``False``.
        epsilon (float): bound of the E-step's KL divergence. Defaults to ``0.1``.
        epsilon_mean (float, optional): bound for the mean of a Gaussian policy, per dimension if
            ``per_dim_constraining``. Default ``2.5e-3``.
        epsilon_stddev (float, optional): bound for its standard deviation, likewise. Default
            ``1e-6``.
        epsilon_covariance (float, optional): bound for the covariance of a Gaussian that has one.
            Default ``1e-5``.
        epsilon_policy (float, optional): bound for a categorical policy. Default ``2.5e-3``.
        per_dim_constraining (bool, optional): one multiplier and bound per action dimension, or one
            for their sum. Default: per dimension, for policies that have dimensions.
        action_penalization (bool, optional): push samples back inside the bounds by a second
            objective with its own temperature. Default: on if the policy is not squashed and the
            action is bounded.
        epsilon_penalty (float): bound of the KL divergence for the penalty.
        init_temperature (float): initial temperature, in real units like every multiplier.
        init_alpha_mean (float, optional): initial multiplier for the mean. Default ``1``.
        init_alpha_stddev (float, optional): initial multiplier for the standard deviation. Default
            ``1000``.
        init_alpha_covariance (float, optional): initial multiplier for the covariance. Default
            ``1000``.
        init_alpha_policy (float, optional): initial multiplier for a categorical policy. Default
            ``1``.
        init_penalty_temperature (float): initial temperature of the action penalty.
        temperature_update (str): ``"gradient"`` (learned through ``loss_temperature``) or
            ``"solve"`` (set to the minimum of its dual on every batch).
        alpha_update (str): ``"gradient"`` (default: multipliers step along the gradient of their
            dual) or ``"relative"`` (in proportion to their value and to the violation of the
            bound, see :class:`~minerva_torchrl.objectives.duals.Constraint`).
        policy_states (str): states of the policy loss: ``"next"`` (default; shares the samples of
            the critic's target), ``"current"`` or ``"both"``.
        sequence_steps (str): of sequences ``[*B, T]``, train ``"all"`` steps or the ``"first"``.
        loss_function (str): of a scalar critic: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        critic (Critic, optional): what the outputs of the critic's network mean, one of
            :mod:`minerva_torchrl.objectives.critics`. Default: the value itself.
        critic_coeff (float): weight of the critic's loss. Defaults to ``1``.
        objectives (mapping, optional): by name, objectives beside the return: a bound, an
            ``Objective`` or a ``CostLimit``. The critic's network writes the outputs of all values
            side by side (unless each has a network of its own), and the reward is a vector
            ``[*B, K]``, each with the return first.
        action_spec (TensorSpec, optional): spec of the action. Defaults to the actor's own.
        clip_critic_actions (bool): let the critic see actions within their bounds, as the
            environment carries them out, and not as they were drawn. Defaults to ``True``.
        delay_actor (bool): keep a target policy. Defaults to ``True``.
        delay_qvalue (bool): keep a target critic. Defaults to ``True``.
        separate_losses (bool): keep the critic's gradient out of parameters shared with the actor.
            Defaults to ``False``.
        skip_done_states (bool): keep terminal observations away from the networks, for data where
            they may be NaN. Defaults to ``False``.
        reduction (str, optional): ``"mean"`` (default), ``"sum"`` or ``"none"``.
        deactivate_vmap (bool): loop over the ensemble instead of using ``vmap``.
        use_prioritized_weights (bool or "auto"): use the weights of prioritised replay.
        scalar_output_mode (str, optional): with ``reduction="none"`` the 0-d metrics are left out,
            or returned as non-tensor data if ``"non_tensor"``.

    The bounds are buffers and can be scheduled: ``loss.epsilon_mean = 1e-3``. The dual variables go
    by name as well: ``loss.temperature``, ``loss.alpha_mean``. They can be given an optimiser of
    their own with :meth:`dual_parameters`; call :meth:`project_duals_after` once on the optimiser
    that trains them.

    The update in parts: :meth:`e_step` evaluates the target networks and puts what they say into a
    TensorDict, on which :meth:`qvalue_loss`, :meth:`dual_loss`, :meth:`actor_loss` and
    :meth:`networks_loss` (critic and policy) can then be evaluated any number of times.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torchrl.data import Bounded
        >>> from torchrl.modules import IndependentNormal, MLP, ProbabilisticActor, ValueOperator
        >>> from torchrl.objectives import SoftUpdate
        >>> spec = Bounded(-1, 1, (2,))
        >>> network = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(network, ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     spec=spec,
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = ValueOperator(MLP(5, 1, num_cells=[32]), in_keys=["observation", "action"])
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
    """

    default_constraints: ClassVar = {
        "mean": (2.5e-3, 1.0),
        "stddev": (1e-6, 1000.0),
        "covariance": (1e-5, 1000.0),
        "policy": (2.5e-3, 1.0),
    }
    """Bound and initial multiplier by constraint."""

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule | Sequence[TensorDictModule],
        *,
        num_qvalue_nets: int = 1,
        qvalue_reduction: Literal["min", "mean"] = "min",
        num_action_samples: int = 20,
        num_value_samples: int | None = None,
        control_variate: bool = False,
        epsilon: float = 0.1,
        epsilon_mean: float | None = None,
        epsilon_stddev: float | None = None,
        epsilon_covariance: float | None = None,
        epsilon_policy: float | None = None,
        per_dim_constraining: bool | None = None,
        action_penalization: bool | None = None,
        epsilon_penalty: float = 1e-3,
        init_temperature: float = 1.0,
        init_alpha_mean: float | None = None,
        init_alpha_stddev: float | None = None,
        init_alpha_covariance: float | None = None,
        init_alpha_policy: float | None = None,
        init_penalty_temperature: float = 1.0,
        temperature_update: Literal["gradient", "solve"] = "gradient",
        alpha_update: Literal["gradient", "relative"] = "gradient",
        policy_states: Literal["next", "current", "both"] = "next",
        sequence_steps: Literal["all", "first"] = "all",
        loss_function: Literal["l2", "l1", "smooth_l1"] = "l2",
        critic: Critic | None = None,
        critic_coeff: float = 1.0,
        objectives: Mapping[str, float | Objective | CostLimit] | None = None,
        action_spec: TensorSpec | None = None,
        clip_critic_actions: bool = True,
        delay_actor: bool = True,
        delay_qvalue: bool = True,
        separate_losses: bool = False,
        skip_done_states: bool = False,
        reduction: Literal["none", "mean", "sum"] | None = None,
        deactivate_vmap: bool = False,
        use_prioritized_weights: Literal["auto"] | bool = "auto",
        scalar_output_mode: Literal["exclude", "non_tensor"] | None = None,
    ) -> None:
        check_count("num_action_samples", num_action_samples)
        check_count("num_value_samples", num_value_samples, optional=True)
        check_choice("temperature_update", temperature_update, ("gradient", "solve"))
        check_choice("policy_states", policy_states, ("next", "current", "both"))
        goals = resolve_objectives(objectives)
        check_positive("critic_coeff", critic_coeff)
        super().__init__(
            actor_network,
            qvalue_network,
            critic=resolve_critic(critic, loss_function),
            objectives=goals,
            num_qvalue_nets=num_qvalue_nets,
            qvalue_reduction=qvalue_reduction,
            action_spec=action_spec,
            clip_critic_actions=clip_critic_actions,
            per_dim_constraining=per_dim_constraining,
            sequence_steps=sequence_steps,
            delay_actor=delay_actor,
            delay_qvalue=delay_qvalue,
            separate_losses=separate_losses,
            skip_done_states=skip_done_states,
            deactivate_vmap=deactivate_vmap,
            reduction=reduction,
            use_prioritized_weights=use_prioritized_weights,
            scalar_output_mode=scalar_output_mode,
        )
        self.num_action_samples = num_action_samples
        self.num_value_samples = num_value_samples
        self.control_variate = control_variate
        self.temperature_update = temperature_update
        self.policy_states = policy_states
        self.loss_function = loss_function
        self.critic_coeff = critic_coeff
        solved = temperature_update == "solve"
        self._add_temperature(MAIN_OBJECTIVE, init_temperature, epsilon, solved=solved)
        self._add_objectives(goals, solved=solved)
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
        self.action_penalization = resolve_penalization(action_penalization, self.policy)
        if self.action_penalization:
            self._add_temperature(
                "penalty", init_penalty_temperature, epsilon_penalty, solved=solved
            )

    @property
    def _loss_keys(self) -> tuple[str, ...]:
        return ("loss_qvalue", "loss_actor", *self._dual_loss_keys)

    @property
    def _metric_keys(self) -> tuple[str, ...]:
        return (
            *("ess", "weight_entropy", "q_mean", "q_min", "q_max", "kl_q_rel"),
            *(f"kl_{name}_rel" for name in self.temperatures if name != MAIN_OBJECTIVE),
            *(f"expected_{name}" for name in self.cost_multipliers),
            "cross_entropy",
            *(key.format(name) for name in self.constraints for key in ("kl_{}", "kl_{}_rel")),
            *self.policy.metric_keys,
            *(
                of_objective(key, name)
                for name, critic in self._critics_by_objective()
                for key in ("pred_value", "target_value", *critic.metric_keys)
            ),
            *self.duals,
        )

    # The whole update in one call ----------------------------------------------------------------

    @dispatch
    @in_full_precision
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """All losses and metrics of a batch.

        Args:
            tensordict (TensorDictBase): transitions ``[B]`` or sequences ``[*B, T]``. The temporal
                difference error is written into it as the priority of prioritised replay, and
                nothing else: a second call samples and estimates anew.

        Returns:
            A TensorDict with ``loss_qvalue``, ``loss_actor``, ``loss_temperature``, one
            ``loss_alpha_*`` per constraint, with an action penalty ``loss_penalty_temperature``,
            and the detached 0-d metrics of ``out_keys``.
        """
        return self._forward(tensordict, with_metrics=True)

    def _forward(self, tensordict: TensorDictBase, *, with_metrics: bool) -> TensorDict:
        data, metrics = self._with_e_step(tensordict, with_metrics)
        loss_qvalue, td_error, metrics_qvalue = self._qvalue_loss(data, with_metrics)
        e_step, m_step = data.get("e_step"), self._m_step(data)
        of_constraints = self._constraint_losses(m_step[-1], e_step.mask)
        losses = {
            "loss_qvalue": loss_qvalue,
            "loss_actor": self._actor_loss(data, m_step[1], of_constraints),
            **self._dual_losses(data, of_constraints),
        }
        self.set_priority(tensordict, td_error)
        if with_metrics:
            metrics |= self._actor_metrics(e_step, *m_step, of_constraints)
            metrics |= {**metrics_qvalue, **self.dual_values()}
        return self._output(losses, metrics, tensordict, loss_qvalue.shape)

    # The update in parts -------------------------------------------------------------------------

    @torch.no_grad()
    @in_full_precision
    def e_step(
        self, tensordict: TensorDictBase, *, with_metrics: bool = True
    ) -> tuple[TensorDictBase, dict[str, Tensor]]:
        """Evaluate the target networks: the critic's target, and the weighted candidates.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`.

        Keyword Args:
            with_metrics (bool): evaluate the metrics, too. Defaults to ``True``.

        Returns:
            The steps that are trained on, with the entries ``value_target`` and ``e_step``
            (:class:`MPOEStep`) that all losses can be evaluated on, and 0-d metrics.
        """
        tensordict = self._checked(tensordict)
        next_values, samples, mask = self._sample_states(tensordict)
        scores, log_prior = samples.get("scores"), samples.get("log_prior", None)
        duals: dict[str, TensorDict] = {}
        metrics: dict[str, Tensor] = {}
        total_weights = torch.zeros_like(scores.get(MAIN_OBJECTIVE))
        for name, temperature in self.temperatures.items():
            score = scores.get(name)
            if temperature.solved:
                temperature.solve_(
                    self._gather(score),
                    temperature.epsilon,
                    sample_dim=-1,
                    log_prior=None if log_prior is None else self._gather(log_prior),
                    mask=self._gather(mask),
                )
            # eq: mpo-weights
            weights, dual, kl = temperature.weigh(score, log_prior)

            if with_metrics:
                if name == MAIN_OBJECTIVE:
                    metrics |= weight_metrics(weights, samples, mask)
                shown = "q" if name == MAIN_OBJECTIVE else name
                metrics[f"kl_{shown}_rel"] = masked_mean(kl, mask) / temperature.epsilon
            duals[name] = TensorDict({"dual": dual, "kl": kl}, batch_size=mask.shape)
            # eq: objective-weights
            total_weights = total_weights + weights
        for name in self.cost_multipliers:
            cost = samples.get(("costs", name))
            duals[name] = TensorDict({"cost": cost}, batch_size=mask.shape)
            if with_metrics:
                metrics[f"expected_{name}"] = masked_mean(cost, mask)
        e_step = MPOEStep(
            inputs=samples.get("inputs"),
            old_policy=samples.get("old_policy"),
            statistics=self._statistics(samples, total_weights),
            duals=TensorDict(duals, batch_size=mask.shape),
            mask=mask,
            batch_size=mask.shape,
        )
        return self._with_target(tensordict, next_values).set("e_step", e_step), metrics

    def _statistics(self, samples: TensorDictBase, weights: Tensor) -> TensorDict:
        basis = samples.get("basis")
        if self.control_variate and samples.get("log_prior", None) is None:
            return self.policy.steady_statistics(basis, weights, samples.get("old_policy"))
        return self.policy.statistics(basis, weights)

    @in_full_precision
    def qvalue_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the critic, and its metrics with the ``td_error`` of each step.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`, or what :meth:`e_step` returned.
        """
        data = tensordict
        if data.get("e_step", None) is None:  # the target is all that is needed of it
            data = self._checked(tensordict)
            data = self._with_target(data, self._sample_next_states(data)[-1])
        loss, td_error, metrics = self._qvalue_loss(data)
        self.set_priority(tensordict, td_error)
        return loss, {"td_error": td_error, **metrics}

    @in_full_precision
    def networks_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the losses of critic and policy, and each of them by name.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`, or what :meth:`e_step` returned.
        """
        data, _ = self._with_e_step(tensordict, with_metrics=False)
        loss_qvalue, td_error, _ = self._qvalue_loss(data, with_metrics=False)
        fit, divergences = self._fit_and_divergences(data)
        of_constraints = self._constraint_losses(divergences, data.get("e_step").mask)
        loss_actor = self._actor_loss(data, fit, of_constraints)
        self.set_priority(tensordict, td_error)
        return loss_qvalue + loss_actor, {"loss_qvalue": loss_qvalue, "loss_actor": loss_actor}

    # Parts ---------------------------------------------------------------------------------------

    def _m_step(self, data: TensorDictBase) -> tuple[D.Distribution, Tensor, dict[str, Tensor]]:
        """The online policy, its cross-entropy ``[*S]`` and its divergences ``[*S, D or 1]``."""
        e_step = data.get("e_step")
        dist = self._dist(e_step.inputs, self.actor_network_params)
        new = self.policy.describe(dist)
        # eq: decoupled-fit
        cross_entropy = self.policy.cross_entropy(new, e_step.old_policy, e_step.statistics)
        return dist, cross_entropy, self.policy.divergences(new, e_step.old_policy)

    def _actor_loss(
        self, data: TensorDictBase, fit: Tensor, of_constraints: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        # eq: mpo-policy-loss
        penalties = (penalty for penalty, _ in of_constraints.values())
        return self._reduce_states(sum(penalties, fit), data)

    def _dual_losses(
        self, data: TensorDictBase, of_constraints: dict[str, tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        of_states: dict[nn.Module, Tensor] = {}
        # eq: mpo-dual-losses
        for name, temperature in self.temperatures.items():
            dual = data.get(("e_step", "duals", name))
            of_states[temperature] = temperature.loss(dual.get("dual"), dual.get("kl"))
        for name, multiplier in self.cost_multipliers.items():
            of_states[multiplier] = multiplier.loss(data.get(("e_step", "duals", name, "cost")))
        for name, constraint in self.constraints.items():
            of_states[constraint] = of_constraints[name][1]
        return {
            f"loss_{name}": self._reduce_states(of_states[dual], data)
            for name, dual in self.duals.items()
        }

    def _reduce_states(self, loss: Tensor, data: TensorDictBase) -> Tensor:
        """Reduce a loss of the states of the policy loss, ``[*S]``."""
        mask, weights = data.get("e_step").mask, self._priority_weight(data)
        if self.policy_states == "both":
            # A transition's loss is the mean over its states; the current one always counts.
            current, following = loss.unbind(-1)
            mask, in_both = mask.unbind(-1)
            following = torch.where(in_both, following, 0.0)
            loss = (current + following) / (1 + in_both.to(loss.dtype))
        return self._reduce(loss, mask, weights)

    # Metrics -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _actor_metrics(
        self,
        e_step: MPOEStep,
        dist: D.Distribution,
        fit: Tensor,
        divergences: dict[str, Tensor],
        of_constraints: dict[str, tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        of_states = {f"kl_{name}": kl.mean(-1) for name, kl in divergences.items()}
        metrics = masked_means({"cross_entropy": fit, **of_states}, e_step.mask)
        for name, constraint in self.constraints.items():
            # eq: relative-divergence
            metrics[f"kl_{name}_rel"] = metrics[f"kl_{name}"] / constraint.epsilon
        return {**metrics, **self.policy.metrics(dist, e_step.mask)}
