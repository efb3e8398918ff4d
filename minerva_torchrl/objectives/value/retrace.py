"""Retrace as a TorchRL value estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    dispatch,
    skip_existing,
)
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributions import Distribution
from torchrl.data.tensor_specs import TensorSpec
from torchrl.objectives.utils import register_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from minerva_torchrl.objectives.checks import check_choice, check_count
from minerva_torchrl.objectives.specs import action_bounds, resolve_action_spec
from minerva_torchrl.objectives.value import functional as V

__all__ = ["Retrace"]

_TRACES_OF_THE_RATIO = ("retrace", "importance")
_TRACES = (*_TRACES_OF_THE_RATIO, "tree_backup", "q_lambda")

# A density is exactly zero in log space with probability of about 1e-7 in single precision, while
# collectors write zeros for every frame that was drawn without the policy.
_MAX_FRACTION_OF_ZERO_LOG_PROBS = 0.01


@register_value_estimator(
    "retrace", default_kwargs={"gamma": 0.99, "lmbda": 0.95, "differentiable": True}
)
class Retrace(ValueEstimatorBase):
    r"""Retrace(:math:`\lambda`) estimate of action values from off-policy sequences.

    Munos et al. (2016), *Safe and efficient off-policy reinforcement learning*,
    https://arxiv.org/abs/1606.02647.

    .. math::
        \Delta_t = \delta_t + \gamma (1 - done_t) \,
            \lambda \min\!\Big(1, \frac{\pi(a_{t+1}|s_{t+1})}{\mu(a_{t+1}|s_{t+1})}\Big)
            \Delta_{t+1}, \qquad
        \delta_t = r_t + \gamma (1 - terminated_t) \, E_\pi Q(s_{t+1}, \cdot) - Q(s_t, a_t)

    The target is :math:`Q(s_t, a_t) + \Delta_t` for every step. The ratio scores the **stored**
    action, so the data must hold the raw action (before any clipping) and the log-probability it
    had when it was taken. :math:`E_\pi Q` is a mean over ``num_samples`` actions at the stored next
    observation. A truncation bootstraps and cuts the trace.

    Keyword Args:
        gamma (float or Tensor): discount factor, a scalar.
        lmbda (float or Tensor): trace parameter in ``[0, 1]``, a scalar. Defaults to ``0.95``.
            ``trace="importance"`` has none.
        value_network (TensorDictModule, optional): the critic, reading observation and action and
            writing ``state_action_value``. If ``None``, :math:`Q(s_t, a_t)` is read from the entry
            ``state_action_value`` and :math:`E_\pi Q(s_{t+1}, \cdot)` from
            ``("next", "state_action_value")``, unless both are given to :meth:`value_estimate`.
        actor_network (ProbabilisticTensorDictSequential, optional): the target policy. May be
            ``None`` where nothing is sampled and no log-probability is needed, or both results are
            given to :meth:`value_estimate`.
        trace (str): coefficient of the trace: ``"retrace"``, as above (default), ``"importance"``
            (:math:`\pi/\mu`), ``"tree_backup"`` (:math:`\lambda \pi`) or ``"q_lambda"``
            (:math:`\lambda`). The last two read no stored log-probability.
        num_samples (int): actions sampled at each next observation. Defaults to ``20``.
        action_spec (TensorSpec, optional): bounds to which actions are clipped before the critic
            sees them. Defaults to the actor's spec if it has one; without any, nothing is clipped.
        average_adv (bool): whether to standardise the advantage (the target stays as it is), within
            the groups of ``group_key`` if that is set. Defaults to ``False``.
        vectorized (bool): whether to use the form without a loop over time. Defaults to ``True``.
        time_dim (int, optional): batch dimension of time. Defaults to the dimension named
            ``"time"``, else the last batch dimension.
        shifted (bool): must be ``False``: the single-call evaluation that shifts values by one step
            is not defined for action values under another policy.
        **kwargs: the other arguments of :class:`~torchrl.objectives.value.ValueEstimatorBase`.
            ``differentiable`` (``False``): whether gradients flow from the target to the data; none
            ever flows to the networks. ``skip_existing`` (``None``): whether values that are in the
            data are used instead of calling the networks. ``value_chunk_size``, ``num_chunks`` (or
            ``num_chunk``) and ``value_chunk_dim``: calls of the critic in parts of the data.
            ``deactivate_vmap`` (``False``): whether the critic sees one sampled action after the
            other, with data ``[*B, T]``, instead of all, ``[num_samples, *B, T]``. ``group_key``:
            entry with an integer per step, such as a task. ``device``: device of the buffers.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor
        >>> from torchrl.modules import IndependentNormal, MLP, ProbabilisticActor, ValueOperator
        >>> network = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = ValueOperator(
        ...     MLP(in_features=5, out_features=1, num_cells=[]), in_keys=["observation", "action"]
        ... )
        >>> retrace = Retrace(gamma=0.99, value_network=critic, actor_network=actor)
        >>> B, T = 4, 7
        >>> following = {
        ...     "observation": torch.randn(B, T, 3),
        ...     "reward": torch.randn(B, T, 1),
        ...     "done": torch.zeros(B, T, 1, dtype=torch.bool),
        ... }
        >>> current = {
        ...     "observation": torch.randn(B, T, 3),
        ...     "action": torch.randn(B, T, 2),
        ...     "action_log_prob": torch.randn(B, T),
        ... }
        >>> data = TensorDict(current | {"next": following}, [B, T])
        >>> retrace(data)["value_target"].shape
        torch.Size([4, 7, 1])
    """

    @dataclass
    class _AcceptedKeys(ValueEstimatorBase._AcceptedKeys):
        """The entries of every estimator, with ``value`` the value of the stored action."""

        # The base class looks names up in this very class, so that all are declared here again.
        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        value: NestedKey = "state_action_value"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        sample_log_prob: NestedKey | None = None
        action: NestedKey = "action"

    default_keys = _AcceptedKeys

    @classmethod
    def for_loss(cls, loss_module: Any, **hyperparams: Any) -> Retrace:
        """An estimator whose values and log-probabilities are given by the loss."""
        return cls(**({"value_network": None, "actor_network": None} | hyperparams))

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor = 0.95,
        value_network: TensorDictModule | None,
        actor_network: ProbabilisticTensorDictSequential | None,
        trace: Literal["retrace", "importance", "tree_backup", "q_lambda"] = "retrace",
        num_samples: int = 20,
        action_spec: TensorSpec | None = None,
        average_adv: bool = False,
        vectorized: bool = True,
        time_dim: int | None = None,
        shifted: bool = False,
        **kwargs: Any,
    ) -> None:
        if shifted:
            raise NotImplementedError(
                "Retrace does not support shifted=True: it needs the value of the stored next "
                "observation under the target policy. Use shifted=False."
            )
        check_choice("trace", trace, _TRACES)
        check_count("num_samples", num_samples)
        super().__init__(value_network=value_network, **kwargs)
        for name, value in (("gamma", gamma), ("lmbda", lmbda)):
            scalar = torch.as_tensor(value, device=self._device)
            if scalar.numel() != 1:
                raise ValueError(f"{name} must be a scalar, got shape {tuple(scalar.shape)}.")
            if not 0 <= float(value) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {float(value)}.")
            self.register_buffer(name, scalar)
        self.__dict__["actor_network"] = actor_network
        self.trace = trace
        self.num_samples = num_samples
        self.average_adv = average_adv
        self.vectorized = vectorized
        self.time_dim = time_dim
        self._action_spec = action_spec
        self._log_probs_checked = False
        self._set_bounds()

    @property
    def needs_action_values(self) -> bool:
        """Whether there is no critic, so that a loss gives values to :meth:`value_estimate`.

        These are ``next_value``, ``state_action_value`` and ``log_pi``.
        """
        return self.value_network is None

    def _set_bounds(self) -> None:
        """Find the bounds of the action under its present name."""
        spec = resolve_action_spec(self._action_spec, self.actor_network, self.tensor_keys.action)
        bounds = action_bounds(spec)
        low, high = (None, None) if bounds is None else (b.to(self.gamma.device) for b in bounds)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

    def set_keys(self, **kwargs: Any) -> None:
        """Set the names of the entries, see ``default_keys``."""
        super().set_keys(**kwargs)
        if "action" in kwargs:
            self._set_bounds()

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries read from the data."""
        keys, states = self.tensor_keys, self._state_keys
        read = [*states, keys.action]
        following = [*states, keys.reward, keys.done, keys.terminated]
        if self.value_network is None:
            read, following = [*read, keys.value], [keys.value, *following[len(states) :]]
        if self.trace in _TRACES_OF_THE_RATIO:
            read.append(keys.sample_log_prob)
        if self.group_key is not None:
            read.append(self.group_key)
        return read + [unravel_key(("next", key)) for key in following]

    @property
    def _state_keys(self) -> list[NestedKey]:
        """Entries of a state that the networks read."""
        networks = [net for net in (self.actor_network, self.value_network) if net is not None]
        keys = dict.fromkeys(key for net in networks for key in net.in_keys)
        return [key for key in keys if key != self.tensor_keys.action]

    @dispatch
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        actor_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        r"""Write ``advantage`` (target minus value) and ``value_target`` into the data.

        The values are written too: :math:`Q(s_t, a_t)` as ``state_action_value`` and
        :math:`E_\pi Q(s_{t+1}, \cdot)` as ``("next", "state_action_value")``.

        Args:
            tensordict (TensorDictBase): sequences ``[*B, T]``.

        Keyword Args:
            params (TensorDictBase, optional): parameters of the critic.
            target_params (TensorDictBase, optional): parameters of the target critic; they take
                precedence over ``params``.
            actor_params (TensorDictBase, optional): parameters of the target policy.
            time_dim (int, optional): batch dimension of time.

        Returns:
            The same TensorDict.
        """
        keys = self.tensor_keys
        critic_params = params if target_params is None else target_params
        with torch.set_grad_enabled(self.differentiable):
            value = self._state_action_value(tensordict, critic_params)
            next_value = self._next_state_value(tensordict, critic_params, actor_params)
            target = self.value_estimate(
                tensordict,
                next_value=next_value,
                actor_params=actor_params,
                state_action_value=value,
                time_dim=time_dim,
            )
            advantage = target - value
            if self.average_adv:
                advantage = V.standardize(advantage, self._group_ids(tensordict))
        tensordict.set(keys.value, value)
        tensordict.set(("next", keys.value), next_value)
        tensordict.set(keys.advantage, advantage)
        tensordict.set(keys.value_target, target)
        return tensordict

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        time_dim: int | None = None,
        *,
        actor_params: TensorDictBase | None = None,
        state_action_value: Tensor | None = None,
        log_pi: Tensor | None = None,
    ) -> Tensor:
        r"""The target of every step.

        Args:
            tensordict (TensorDictBase): sequences ``[*B, T]``.
            target_params (TensorDictBase, optional): parameters of the critic.
            next_value (Tensor, optional): :math:`E_\pi Q(s_{t+1}, \cdot)`, ``[*B, T, 1]``. If not
                given, sampled with the actor and the critic, or read from the data.
            time_dim (int, optional): batch dimension of time.

        Keyword Args:
            actor_params (TensorDictBase, optional): parameters of the target policy.
            state_action_value (Tensor, optional): :math:`Q(s_t, a_t)`, ``[*B, T, 1]``.
            log_pi (Tensor, optional): log-probability of the stored action under the target policy,
                ``[*B, T]``.

        Returns:
            The target, ``[*B, T, 1]``.
        """
        keys = self.tensor_keys
        if tensordict.get(keys.steps_to_next_obs, None) is not None:
            raise ValueError(
                f"Retrace needs one-step data, but the entry {keys.steps_to_next_obs!r} says that "
                "a multi-step transform has rewritten the rewards. Sample sequences without it."
            )
        time_dim, shape = self._get_time_dim(time_dim, tensordict), tuple(tensordict.shape)
        if not 0 <= time_dim < len(shape):
            raise ValueError(f"time_dim must be a dimension of the data {shape}, got {time_dim}.")
        reward = tensordict.get(("next", keys.reward))
        done = tensordict.get(("next", keys.done))
        terminated = tensordict.get(("next", keys.terminated), default=done)
        if state_action_value is None:
            state_action_value = self._state_action_value(tensordict, target_params)
        if next_value is None:
            next_value = self._next_state_value(tensordict, target_params, actor_params)
        if log_pi is None and self.trace != "q_lambda":
            log_pi = self._dist(tensordict, actor_params).log_prob(tensordict.get(keys.action))
        gamma, coefficient = self.gamma.to(reward), self._coefficient(tensordict, log_pi, reward)
        form = V.vec_off_policy_return_estimate if self.vectorized else V.off_policy_return_estimate
        values = (state_action_value, next_value)
        # eq: trace-recursion
        return form(gamma, coefficient, *values, reward, done, terminated, time_dim=time_dim)

    # Inputs of the recursion ---------------------------------------------------------------------

    def _coefficient(self, data: TensorDictBase, log_pi: Tensor | None, like: Tensor) -> Tensor:
        lmbda = self.lmbda.to(like)
        if log_pi is None or self.trace == "q_lambda":
            # eq: q-lambda-coefficient
            return V.q_lambda_coefficient(like, lmbda)
        log_pi = log_pi.reshape(like.shape)
        if self.trace == "tree_backup":
            # eq: tree-backup-coefficient
            return V.tree_backup_coefficient(log_pi, lmbda)
        log_mu = self._behaviour_log_prob(data).reshape(like.shape)
        if self.trace == "importance":
            # eq: importance-coefficient
            return V.importance_coefficient(log_pi, log_mu)
        # eq: retrace-coefficient
        return V.retrace_coefficient(log_pi, log_mu, lmbda)

    def _behaviour_log_prob(self, tensordict: TensorDictBase) -> Tensor:
        key = self.tensor_keys.sample_log_prob
        log_mu = tensordict.get(key, None)
        if log_mu is None:
            raise ValueError(missing_log_prob(key, f"trace={self.trace!r}"))
        if self._log_probs_checked or log_mu.is_meta or is_compiling():
            return log_mu
        zero, mask = log_mu.reshape(-1) == 0, tensordict.get(("collector", "mask"), None)
        fraction = (zero if mask is None else zero[mask.reshape(-1)]).float().mean().item()
        if fraction > _MAX_FRACTION_OF_ZERO_LOG_PROBS:
            raise ValueError(
                f"{fraction:.0%} of the behaviour log-probabilities in {key!r} are exactly zero. "
                "Collectors write zeros for frames drawn without the policy (init_random_frames), "
                "which would count as densities of one. Warm up with the initial policy instead."
            )
        self._log_probs_checked = True
        return log_mu

    def _state_action_value(self, data: TensorDictBase, params: TensorDictBase | None) -> Tensor:
        stored = self._stored(data, self.tensor_keys.value)
        if stored is not None:
            return stored
        return self._mean_q_value(data, data.get(self.tensor_keys.action).unsqueeze(0), params)

    def _next_state_value(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        actor_params: TensorDictBase | None,
    ) -> Tensor:
        stored = self._stored(tensordict, unravel_key(("next", self.tensor_keys.value)))
        if stored is not None:
            return stored
        following = self._sanitize_next_obs_nan(tensordict, self._state_keys).get("next")
        following = following.select(*self._state_keys, strict=False)
        if "is_init" in following.keys():
            # Behind an end the next states are those of another trajectory, for recurrent networks.
            following.set("is_init", following.get("is_init") | tensordict.get("is_init"))
        # eq: next-state-value
        action = self._dist(following, actor_params).sample((self.num_samples,))
        return self._mean_q_value(following, action, params)

    def _stored(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
        """A value in the data that is to be used instead of a call of the critic."""
        skip = skip_existing() if self.skip_existing is None else self.skip_existing
        if not (skip or self.value_network is None):
            return None
        stored = tensordict.get(key, None)
        if stored is None and self.value_network is None:
            raise ValueError(
                f"Retrace was built without value_network, and the entry {key!r} is missing: pass "
                "the network, or give next_value and state_action_value to value_estimate."
            )
        return stored

    def _mean_q_value(
        self, states: TensorDictBase, actions: Tensor, params: TensorDictBase | None
    ) -> Tensor:
        """Values of actions ``[N, *B, T, ...]`` at states ``[*B, T]``, averaged over the N."""
        critic, keys = self.value_network, self.tensor_keys
        if self.action_low is not None:
            actions = actions.clamp(self.action_low.to(actions), self.action_high.to(actions))
        inputs = states.select(*(key for key in critic.in_keys if key != keys.action))
        # The samples come behind the batch, so that a chunk has all samples of its states.
        inputs.set(keys.action, actions.movedim(0, inputs.ndim))

        def q_value(data: TensorDictBase, action: Tensor) -> Tensor:
            return critic(data.copy().set(keys.action, action))[keys.value]

        values = []
        with _held_out(critic, params):
            for chunk in self._split_value_net_input(inputs):
                samples = chunk.get(keys.action).movedim(chunk.ndim, 0)
                if self.deactivate_vmap or len(samples) == 1:
                    value = torch.stack([q_value(chunk, action) for action in samples])
                else:
                    value = q_value(chunk.expand(len(samples), *chunk.shape), samples)
                values.append(value.mean(0))
        return torch.cat(values, self._resolve_value_chunk_dim(inputs.ndim))

    def _dist(self, states: TensorDictBase, params: TensorDictBase | None) -> Distribution:
        actor = self.actor_network
        if actor is None:
            raise ValueError(
                "Retrace was built without actor_network: pass it to the constructor, or give "
                "next_value, state_action_value and log_pi to value_estimate."
            )
        with _held_out(actor, params):
            dist = actor.get_dist(states.select(*actor.in_keys, strict=False))
        if isinstance(dist, CompositeDistribution):
            names = list(dist.dists)
            if len(names) > 1:
                raise NotImplementedError(f"actor_network must have one action, got {names}.")
            dist = dist.dists[names[0]]
        return dist


def missing_log_prob(key: NestedKey | None, what: str = "Retrace") -> str:
    """What to say of data without the log-probabilities of its actions."""
    return (
        f"{what} needs the log-probability of the action at collection time, but the entry {key!r} "
        "is missing. Build the policy with return_log_prob=True, or name the entry with "
        "set_keys(...)."
    )


def _held_out(network: TensorDictModule, params: TensorDictBase | None) -> Any:
    """Run a network, with the given parameters if there are any, without gradients to it."""
    # TorchRL's hold_out_net would make frozen layers trainable.
    params = TensorDict.from_module(network) if params is None else params
    return params.detach().to_module(network, preserve_module_state=False)
