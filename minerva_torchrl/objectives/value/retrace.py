"""Retrace as a TorchRL value estimator."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    dispatch,
    skip_existing,
)
from torch import Tensor
from torch.compiler import is_compiling
from torchrl.data.tensor_specs import TensorSpec
from torchrl.objectives.utils import register_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from minerva_torchrl.objectives.checks import check_count
from minerva_torchrl.objectives._data import blank_terminal_states
from minerva_torchrl.objectives.specs import action_bounds, resolve_action_spec
from minerva_torchrl.objectives.value.functional import (
    retrace_return_estimate,
    vec_retrace_return_estimate,
)

__all__ = ["Retrace"]

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
        gamma (float or Tensor): discount factor.
        lmbda (float or Tensor): trace parameter in ``[0, 1]``. Defaults to ``0.95``.
        value_network (TensorDictModule, optional): the critic, reading observation and action and
            writing ``state_action_value``. May be ``None`` when the values are always given to
            :meth:`value_estimate`, as by :class:`~minerva_torchrl.MPOLoss`.
        actor_network (ProbabilisticTensorDictSequential, optional): the target policy. May be
            ``None`` under the same condition.
        num_samples (int): actions sampled at each next observation. Defaults to ``20``.
        action_spec (TensorSpec, optional): bounds to which actions are clipped before the critic
            sees them. Defaults to the actor's spec if it has one; without any, nothing is clipped.
        vectorized (bool): whether to use the form without a loop over time. Defaults to ``True``.
        time_dim (int, optional): batch dimension of time. Defaults to the dimension named
            ``"time"``, else the last batch dimension.
        differentiable (bool): whether gradients flow from the target to the data. Defaults to
            ``False``. None ever flows to the networks.
        skip_existing (bool, optional): if ``True``, values that are in the data already are used
            instead of calling the networks. Defaults to the state of
            :class:`tensordict.nn.set_skip_existing`.
        shifted (bool): must be ``False``: the single-call evaluation that shifts values by one step
            is not defined for action values under another policy.
        device (torch.device, optional): device of the buffers.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor
        >>> from torchrl.modules import IndependentNormal, MLP, ProbabilisticActor, ValueOperator
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(
        ...         torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor()),
        ...         in_keys=["observation"],
        ...         out_keys=["loc", "scale"],
        ...     ),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = ValueOperator(
        ...     MLP(in_features=5, out_features=1, num_cells=[]), in_keys=["observation", "action"]
        ... )
        >>> retrace = Retrace(gamma=0.99, value_network=critic, actor_network=actor)
        >>> B, T = 4, 7
        >>> data = TensorDict(
        ...     {
        ...         "observation": torch.randn(B, T, 3),
        ...         "action": torch.randn(B, T, 2),
        ...         "action_log_prob": torch.randn(B, T),
        ...         "next": {
        ...             "observation": torch.randn(B, T, 3),
        ...             "reward": torch.randn(B, T, 1),
        ...             "done": torch.zeros(B, T, 1, dtype=torch.bool),
        ...             "terminated": torch.zeros(B, T, 1, dtype=torch.bool),
        ...         },
        ...     },
        ...     [B, T],
        ... )
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
    gamma: Tensor
    lmbda: Tensor
    action_low: Tensor | None
    action_high: Tensor | None

    @classmethod
    def for_loss(cls, loss_module: Any, **hyperparams: Any) -> Retrace:
        """An estimator whose values and log-probabilities are given by the loss."""
        hyperparams.setdefault("value_network", None)
        hyperparams.setdefault("actor_network", None)
        return cls(**hyperparams)

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor = 0.95,
        value_network: TensorDictModule | None,
        actor_network: ProbabilisticTensorDictSequential | None,
        num_samples: int = 20,
        action_spec: TensorSpec | None = None,
        vectorized: bool = True,
        time_dim: int | None = None,
        differentiable: bool = False,
        skip_existing: bool | None = None,
        shifted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        if shifted:
            raise NotImplementedError(
                "Retrace does not support shifted=True: it needs the value of the stored next "
                "observation under the target policy. Use shifted=False."
            )
        check_count("num_samples", num_samples)
        for name, value in (("gamma", gamma), ("lmbda", lmbda)):
            if not 0 <= float(value) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {float(value)}.")
        super().__init__(
            value_network=value_network,
            differentiable=differentiable,
            skip_existing=skip_existing,
            device=device,
        )
        self.__dict__["actor_network"] = actor_network
        self.num_samples = num_samples
        self.vectorized = vectorized
        self.time_dim = time_dim
        self.register_buffer("gamma", torch.as_tensor(gamma, device=self._device))
        self.register_buffer("lmbda", torch.as_tensor(lmbda, device=self._device))
        self._action_spec = action_spec
        self._log_probs_checked = False
        self._set_bounds()

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
    def needs_action_values(self) -> bool:
        """Whether values and log-probabilities must be handed to :meth:`value_estimate`."""
        return self.value_network is None

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries read from the data."""
        keys, states = self.tensor_keys, self._state_keys
        following = (*states, keys.reward, keys.done, keys.terminated)
        return [
            *states,
            keys.action,
            keys.sample_log_prob,
            *[unravel_key(("next", key)) for key in following],
        ]

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
        """Write ``advantage`` (target minus value) and ``value_target`` into the data.

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
        critic_params = params if target_params is None else target_params
        with torch.set_grad_enabled(self.differentiable):
            value = self._state_action_value(tensordict, critic_params)
            target = self.value_estimate(
                tensordict,
                target_params=critic_params,
                actor_params=actor_params,
                state_action_value=value,
                time_dim=time_dim,
            )
        tensordict.set(self.tensor_keys.advantage, target - value)
        tensordict.set(self.tensor_keys.value_target, target)
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
        **kwargs: Any,
    ) -> Tensor:
        r"""The Retrace target of every step.

        Args:
            tensordict (TensorDictBase): sequences ``[*B, T]``.
            target_params (TensorDictBase, optional): parameters of the critic.
            next_value (Tensor, optional): :math:`E_\pi Q(s_{t+1}, \cdot)`, ``[*B, T, 1]``. Sampled
                with the actor and the critic if not given.
            time_dim (int, optional): batch dimension of time.

        Keyword Args:
            actor_params (TensorDictBase, optional): parameters of the target policy.
            state_action_value (Tensor, optional): :math:`Q(s_t, a_t)`, ``[*B, T, 1]``.
            log_pi (Tensor, optional): log-probability of the stored action under the target policy,
                ``[*B, T]``.
            **kwargs: refused.

        Returns:
            The target, ``[*B, T, 1]``.
        """
        keys = self.tensor_keys
        if kwargs:
            raise TypeError(f"value_estimate got unexpected arguments {sorted(kwargs)}.")
        if tensordict.get(keys.steps_to_next_obs, None) is not None:
            raise ValueError(
                f"Retrace needs one-step data, but the entry {keys.steps_to_next_obs!r} says that "
                "a multi-step transform has rewritten the rewards. Sample sequences without it."
            )
        reward = tensordict.get(("next", keys.reward))
        done = tensordict.get(("next", keys.done))
        terminated = tensordict.get(("next", keys.terminated), default=done)
        if state_action_value is None:
            state_action_value = self._state_action_value(tensordict, target_params)
        if next_value is None:
            next_value = self._next_state_value(tensordict, target_params, actor_params)
        if log_pi is None:
            log_pi = self._log_prob(tensordict, actor_params)
        log_mu = self._behaviour_log_prob(tensordict)
        estimate = vec_retrace_return_estimate if self.vectorized else retrace_return_estimate
        return estimate(
            self.gamma.to(reward),
            self.lmbda.to(reward),
            log_pi.reshape(reward.shape),
            log_mu.reshape(reward.shape),
            state_action_value,
            next_value,
            reward,
            done,
            terminated,
            time_dim=self._get_time_dim(time_dim, tensordict),
        )

    # Inputs of the recursion ---------------------------------------------------------------------

    def _behaviour_log_prob(self, tensordict: TensorDictBase) -> Tensor:
        key = self.tensor_keys.sample_log_prob
        log_mu = tensordict.get(key, None)
        if log_mu is None:
            raise ValueError(
                f"Retrace needs the log-probability of the action at collection time, but the "
                f"entry {key!r} is missing. Build the policy with return_log_prob=True, or name "
                "the entry with set_keys(sample_log_prob=...)."
            )
        if not (self._log_probs_checked or log_mu.is_meta or is_compiling()):
            self._check_log_probs(log_mu, tensordict.get(("collector", "mask"), None))
            self._log_probs_checked = True
        return log_mu

    def _check_log_probs(self, log_mu: Tensor, mask: Tensor | None) -> None:
        zero = (log_mu == 0).reshape(-1)
        if mask is not None:
            zero = zero[mask.reshape(-1)]
        fraction = zero.float().mean().item()
        if fraction > _MAX_FRACTION_OF_ZERO_LOG_PROBS:
            raise ValueError(
                f"{fraction:.0%} of the behaviour log-probabilities in "
                f"{self.tensor_keys.sample_log_prob!r} are exactly zero. Collectors write zeros "
                "for frames drawn without the policy (init_random_frames), and Retrace would treat "
                "them as densities of one. Warm up with the initial policy instead."
            )

    def _state_action_value(
        self, tensordict: TensorDictBase, params: TensorDictBase | None
    ) -> Tensor:
        existing = self._existing(tensordict, self.tensor_keys.value)
        if existing is not None:
            return existing
        action = tensordict.get(self.tensor_keys.action)
        return self._q_value(tensordict, action, params)

    def _next_state_value(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        actor_params: TensorDictBase | None,
    ) -> Tensor:
        existing = self._existing(tensordict, ("next", self.tensor_keys.value))
        if existing is not None:
            return existing
        actor = self._require("actor_network")
        following = tensordict.get("next")
        done = following.get(self.tensor_keys.done)
        terminated = following.get(self.tensor_keys.terminated, default=done)
        following = following.select(*self._state_keys)
        following = blank_terminal_states(following, terminated.squeeze(-1))
        with _held_out(actor, actor_params):
            dist = actor.get_dist(following.select(*actor.in_keys))
        action = dist.sample((self.num_samples,))
        following = following.expand(self.num_samples, *following.shape)
        return self._q_value(following, action, params).mean(0)

    def _log_prob(self, tensordict: TensorDictBase, params: TensorDictBase | None) -> Tensor:
        actor = self._require("actor_network")
        with _held_out(actor, params):
            dist = actor.get_dist(tensordict.select(*actor.in_keys))
        return dist.log_prob(tensordict.get(self.tensor_keys.action))

    def _q_value(
        self, tensordict: TensorDictBase, action: Tensor, params: TensorDictBase | None
    ) -> Tensor:
        critic = self._require("value_network")
        inputs = tensordict.select(*(k for k in critic.in_keys if k != self.tensor_keys.action))
        if self.action_low is not None and self.action_high is not None:
            action = action.clamp(self.action_low.to(action), self.action_high.to(action))
        inputs.set(self.tensor_keys.action, action)
        with _held_out(critic, params):
            return critic(inputs).get(self.tensor_keys.value)

    def _existing(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
        skip = skip_existing() if self.skip_existing is None else self.skip_existing
        return tensordict.get(key, None) if skip else None

    def _require(self, name: str) -> Any:
        network = getattr(self, name)
        if network is None:
            raise ValueError(
                f"Retrace was built without {name}: pass it to the constructor, or give "
                "next_value, state_action_value and log_pi to value_estimate."
            )
        return network


def _held_out(
    network: TensorDictModule, params: TensorDictBase | None
) -> AbstractContextManager[Any]:
    """Run a network, with the given parameters if there are any, without gradients to it."""
    params = TensorDict.from_module(network) if params is None else params
    return params.detach().to_module(network, preserve_module_state=False)
