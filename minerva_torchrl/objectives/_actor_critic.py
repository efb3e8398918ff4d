"""A loss with a Gaussian policy, an ensemble of action-value critics, and targets of both."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictParams,
    composite_lp_aggregate,
)
from torch import Tensor
from torch import distributions as D
from torch.compiler import is_compiling
from torchrl.data.tensor_specs import TensorSpec
from torchrl.objectives.utils import ValueEstimators, _vmap_func
from torchrl.objectives.value import TD0Estimator
from typing_extensions import Self

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives._base import DualLossModule
from minerva_torchrl.objectives._calls import get_dist, is_plain, using
from minerva_torchrl.objectives.checks import check_choice, check_count
from minerva_torchrl.objectives._policy import (
    action_bounds,
    blank_terminal_states,
    gaussian_parameters,
    is_squashed,
    raw_to_action,
    resolve_action_spec,
    resolve_penalization,
)
from minerva_torchrl.objectives.mpo_steps import Samples
from minerva_torchrl.objectives.value.retrace import Retrace

_Steps = TypeVar("_Steps", Tensor, TensorDictBase)
_ROWS_PER_CHUNK = 2048


class SampledCriticLoss(DualLossModule):
    """Evaluates the networks: actions sampled from a policy, scored by critics, step by step."""

    @dataclass
    class _AcceptedKeys:
        """Names of the entries that the loss reads and writes.

        ``value`` is where value estimators look for the value of a state; ``log_prob`` is only
        read by the ``"retrace"`` estimator.
        """

        action: NestedKey = "action"
        value: NestedKey = "state_value"
        state_action_value: NestedKey = "state_action_value"
        log_prob: NestedKey | None = None
        priority: NestedKey = "td_error"
        priority_weight: NestedKey = "priority_weight"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"

        def __post_init__(self) -> None:
            if self.log_prob is None:
                aggregate = composite_lp_aggregate(nowarn=True)
                self.log_prob = "sample_log_prob" if aggregate else "action_log_prob"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    default_value_estimator = ValueEstimators.TD0
    SUPPORTED_VALUE_ESTIMATORS = (
        ValueEstimators.TD0,
        ValueEstimators.TD1,
        ValueEstimators.TDLambda,
        "retrace",
    )

    actor_network: ProbabilisticTensorDictSequential
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams
    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams
    action_low: Tensor | None
    action_high: Tensor | None

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule | Sequence[TensorDictModule],
        *,
        num_qvalue_nets: int,
        qvalue_reduction: Literal["min", "mean"],
        action_spec: TensorSpec | None,
        action_penalization: bool | None,
        sequence_steps: Literal["all", "first"],
        delay_actor: bool,
        delay_qvalue: bool,
        skip_done_states: bool,
        deactivate_vmap: bool,
        reduction: Literal["none", "mean", "sum"] | None,
        use_prioritized_weights: Literal["auto"] | bool,
        scalar_output_mode: Literal["exclude", "non_tensor"] | None,
    ) -> None:
        super().__init__(
            reduction=reduction,
            use_prioritized_weights=use_prioritized_weights,
            scalar_output_mode=scalar_output_mode,
        )
        check_choice("qvalue_reduction", qvalue_reduction, ("min", "mean"))
        check_choice("sequence_steps", sequence_steps, ("all", "first"))
        self.qvalue_reduction = qvalue_reduction
        self.sequence_steps = sequence_steps
        self.skip_done_states = skip_done_states
        self.deactivate_vmap = deactivate_vmap
        self._warned_of_single_steps = False

        self.convert_to_functional(actor_network, "actor_network", create_target_params=delay_actor)
        critics = _ensemble(qvalue_network, num_qvalue_nets)
        self.num_qvalue_nets = len(critics)
        # expand_dim on a single module would redraw its weights, a list leaves them as they are.
        single = self.num_qvalue_nets == 1
        self.convert_to_functional(
            critics[0] if single else critics,
            "qvalue_network",
            expand_dim=None if single else self.num_qvalue_nets,
            create_target_params=delay_qvalue,
        )
        self._make_vmap()
        self.set_keys(
            action=actor_network.dist_sample_keys[0], log_prob=actor_network.log_prob_keys[0]
        )
        if self.tensor_keys.state_action_value not in self.qvalue_network.out_keys:
            self.set_keys(state_action_value=self.qvalue_network.out_keys[0])

        spec = resolve_action_spec(action_spec, actor_network, self.tensor_keys.action)
        self._action_dim = None if spec is None or not spec.shape else spec.shape[-1]
        bounds = action_bounds(spec)
        squashed = is_squashed(actor_network)
        self.action_penalization = resolve_penalization(
            action_penalization, bounded=bounds is not None, squashed=squashed
        )
        # In the policy's precision: environments often give their bounds in double.
        like = next(actor_network.parameters())
        low, high = (None, None) if bounds is None or squashed else (b.to(like) for b in bounds)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

    def _make_vmap(self) -> None:
        self._vmap_qvalue_network = _vmap_func(
            self.qvalue_network,
            (None, 0),
            randomness=self.vmap_randomness,
            pseudo_vmap=self.deactivate_vmap,
        )

    def _set_in_keys(self) -> None:
        keys = self.tensor_keys
        inputs = self._state_keys
        in_keys = [*inputs, keys.action]
        in_keys += [("next", key) for key in (*inputs, keys.reward, keys.done, keys.terminated)]
        if isinstance(self._value_estimator, Retrace):
            in_keys.append(keys.log_prob)
        self._in_keys = [unravel_key(key) for key in in_keys]

    def reset_parameters_recursive(self) -> None:
        """Reset the networks, their targets and the dual variables."""
        super().reset_parameters_recursive()
        if self.num_qvalue_nets == 1:
            return
        # The stacked weights of an ensemble would be drawn with the fan-in of the stack.
        for name in ("qvalue_network_params", "target_qvalue_network_params"):
            params = self._modules.get(name)
            for member in () if params is None else params.data.unbind(0):
                with member.to_module(self.qvalue_network, preserve_module_state=False):
                    self.qvalue_network.reset_parameters_recursive()

    @property
    def _state_keys(self) -> list[NestedKey]:
        """Entries of a state that the networks read."""
        keys = [*self.actor_network.in_keys, *self.qvalue_network.in_keys]
        return [key for key in dict.fromkeys(keys) if key != self.tensor_keys.action]

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        if self._value_estimator is not None:
            self._value_estimator.set_keys(**self._estimator_keys())
        self._in_keys = None

    def _estimator_keys(self) -> dict[str, NestedKey]:
        keys = self.tensor_keys
        names = {"reward": keys.reward, "done": keys.done, "terminated": keys.terminated}
        if isinstance(self._value_estimator, Retrace):
            names["sample_log_prob"] = keys.log_prob
            names["action"] = keys.action
            names["value"] = keys.state_action_value
        else:
            names["value"] = keys.value
        return names

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> Self:
        """Choose how the critic's target is made.

        Args:
            value_type: ``ValueEstimators.TD0`` (default; with data of
                ``MultiStepTransform(..., done_keys=[])`` it makes n-step targets), ``TD1``,
                ``TDLambda``, ``"retrace"``, an estimator class or an estimator.
            **hyperparams: ``gamma``, ``lmbda`` and whatever else the estimator takes.

        Returns:
            The loss.
        """
        # The loss samples the value of the next state itself.
        return self._make_value_estimator(value_type, None, **hyperparams)

    def _check_input(self, tensordict: TensorDictBase) -> None:
        self._check_keys(tensordict, self.in_keys)
        if tensordict.ndim < 1:
            raise ValueError("The data must have at least one batch dimension, got none.")
        for name in ("reward", "done", "terminated"):
            key = getattr(self.tensor_keys, name)
            shape = tensordict.get(("next", key)).shape
            if shape != (*tensordict.shape, 1):
                raise ValueError(
                    f"{('next', key)} must have shape {(*tensordict.shape, 1)} for a batch of "
                    f"shape {tuple(tensordict.shape)}, got {tuple(shape)}."
                )
        action = tensordict.get(self.tensor_keys.action)
        if action.ndim != tensordict.ndim + 1 or not action.is_floating_point():
            raise ValueError(
                f"{self.tensor_keys.action!r} must be a floating-point tensor of shape "
                f"{(*tensordict.shape, 'D')}, got {action.dtype} {tuple(action.shape)}."
            )
        if self._action_dim is not None and action.shape[-1] != self._action_dim:
            raise ValueError(
                f"{self.tensor_keys.action!r} must have {self._action_dim} dimensions as in "
                f"action_spec, got {action.shape[-1]}."
            )

    # Networks ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _sample(self, states: TensorDictBase, num_samples: int) -> Samples:
        """Sample the target policy at states ``[*B]`` and score the actions."""
        dist = self._dist(states, self.target_actor_network_params)
        loc, scale = gaussian_parameters(dist)
        noise = self._draw_noise(num_samples, loc)
        raw_action = loc + scale * noise
        action = self._clip(raw_to_action(dist, raw_action))
        q_value = self._target_q_value(states, action)
        cost = None
        if self.action_penalization:
            assert self.action_low is not None
            assert self.action_high is not None
            cost = F.out_of_bounds_cost(raw_action, self.action_low, self.action_high)
        inputs = states.select(*self.actor_network.in_keys)
        return Samples(inputs, loc, scale, noise, q_value, cost)

    def _draw_noise(self, num_samples: int, like: Tensor) -> Tensor:
        """Standard-normal draws, ``[N, *B, D]``."""
        return torch.randn(num_samples, *like.shape, dtype=like.dtype, device=like.device)

    def _clip(self, action: Tensor) -> Tensor:
        """Clip to the action's bounds, as the environment does."""
        if self.action_low is None:
            return action
        return action.clamp(self.action_low, self.action_high)

    def _dist(self, states: TensorDictBase, params: TensorDictParams) -> D.Distribution:
        with using(self.actor_network, params):
            return get_dist(self.actor_network, states.select(*self.actor_network.in_keys))

    def _q_value(self, states: TensorDictBase, action: Tensor, params: TensorDictParams) -> Tensor:
        """Values of the ensemble for one action at each state, ``[K, *B]``."""
        (q_value,) = self._q_values(states, [action], params)
        return q_value

    def _target_q_value(self, states: TensorDictBase, action: Tensor) -> Tensor:
        """Target values over the ensemble, ``[..., *B]``, of actions ``[..., *B, D]``."""
        chunks = [action]
        if action.ndim > states.ndim + 1:
            chunks = list(action.split(_samples_per_chunk(action)))
        values = self._q_values(states, chunks, self.target_qvalue_network_params)
        if self.qvalue_reduction == "min":
            values = [value.amin(0) for value in values]
        else:
            values = [value.mean(0) for value in values]
        return torch.cat(values) if len(values) > 1 else values[0]

    def _q_values(
        self, states: TensorDictBase, actions: Sequence[Tensor], params: TensorDictParams
    ) -> list[Tensor]:
        """Values of the ensemble, ``[K, ..., *B]``, for each of several ``[..., *B, D]``."""
        network = self.qvalue_network
        if self.num_qvalue_nets > 1:
            values = [
                self._vmap_qvalue_network(self._with_action(states, action), params)
                for action in actions
            ]
            q_values = [value.get(self.tensor_keys.state_action_value) for value in values]
        else:
            # Once for all actions: exchanging parameters takes as long as a small network.
            with using(network, params):
                if is_plain(network) and len(network.out_keys) == 1:
                    q_values = [self._plain_q_value(states, action) for action in actions]
                else:
                    values = [network(self._with_action(states, action)) for action in actions]
                    q_values = [value.get(self.tensor_keys.state_action_value) for value in values]
            q_values = [q_value.unsqueeze(0) for q_value in q_values]
        pairs = zip(q_values, actions, strict=True)
        return [self._checked(q_value, action.shape[:-1]).squeeze(-1) for q_value, action in pairs]

    def _plain_q_value(self, states: TensorDictBase, action: Tensor) -> Tensor:
        """Value by the network itself, without TensorDicts in between."""
        extra = action.shape[: action.ndim - 1 - states.ndim]
        inputs = [
            action if key == self.tensor_keys.action else _repeated(states.get(key), extra)
            for key in self.qvalue_network.in_keys
        ]
        return self.qvalue_network.module(*inputs)

    def _with_action(self, states: TensorDictBase, action: Tensor) -> TensorDictBase:
        keys = [key for key in self.qvalue_network.in_keys if key != self.tensor_keys.action]
        inputs = states.select(*keys)
        extra = action.shape[: action.ndim - 1 - inputs.ndim]
        data = inputs.expand(*extra, *inputs.shape) if extra else inputs
        return data.set(self.tensor_keys.action, action)

    def _checked(self, q_value: Tensor, shape: torch.Size) -> Tensor:
        expected = (self.num_qvalue_nets, *shape, 1)
        if q_value.shape != expected:
            raise ValueError(
                f"qvalue_network must write {self.tensor_keys.state_action_value!r} of shape "
                f"{expected[1:]} for a batch of shape {tuple(shape)}, "
                f"got {tuple(q_value.shape[1:])}."
            )
        return q_value

    @torch.no_grad()
    def _value_target(self, tensordict: TensorDictBase, next_value: Tensor) -> Tensor:
        """Target of the critic for every step, ``[*B, 1]``."""
        estimator = self.value_estimator
        tensordict = self._cut_at_padding(tensordict)
        single_steps = not isinstance(estimator, TD0Estimator) and (
            self._time_dim(tensordict) is None
        )
        if single_steps:
            self._warn_of_single_steps()
            tensordict, next_value = tensordict.unsqueeze(-1), next_value.unsqueeze(-2)
        given = {}
        if isinstance(estimator, Retrace) and estimator.value_network is None:
            action = tensordict.get(self.tensor_keys.action)
            dist = self._dist(tensordict, self.target_actor_network_params)
            q_value = self._target_q_value(tensordict, self._clip(action))
            given = {"log_pi": dist.log_prob(action), "state_action_value": q_value.unsqueeze(-1)}
        target = estimator.value_estimate(tensordict, next_value=next_value, **given)
        return target.squeeze(-2) if single_steps else target

    def _cut_at_padding(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Let no trace run from a valid step into the padding behind it."""
        valid, time_dim = self._valid_mask(tensordict), self._time_dim(tensordict)
        if valid is None or time_dim is None:
            return tensordict
        next_valid = valid.roll(-1, time_dim).unsqueeze(-1)
        key = unravel_key(("next", self.tensor_keys.done))
        return tensordict.copy().set(key, tensordict.get(key) | ~next_valid)

    def _warn_of_single_steps(self) -> None:
        if self._warned_of_single_steps or is_compiling():
            return
        self._warned_of_single_steps = True
        warnings.warn(
            f"The estimator {type(self.value_estimator).__name__} was given transitions without a "
            "time dimension and makes one-step targets of them. Reshape the flat sample of a "
            "SliceSampler to [-1, T], or use ValueEstimators.TD0.",
            stacklevel=2,
        )

    # Steps ---------------------------------------------------------------------------------------

    def _next_states(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, Tensor]:
        """Next states, and where they are not terminal, ``[*B]``."""
        terminated = tensordict.get(("next", self.tensor_keys.terminated)).squeeze(-1)
        states = tensordict.get("next").select(*self._state_keys)
        if self.skip_done_states:
            states = blank_terminal_states(states, terminated)
        return states, ~terminated

    @staticmethod
    def _time_dim(tensordict: TensorDictBase) -> int | None:
        """Batch dimension of time; ``None`` for transitions, which have none."""
        if tensordict._has_names() and "time" in tensordict.names:
            return tensordict.names.index("time")
        return tensordict.ndim - 1 if tensordict.ndim > 1 else None

    def _first_step_dim(self, tensordict: TensorDictBase) -> int | None:
        """Time dimension of sequences of which only the first step is trained on."""
        return self._time_dim(tensordict) if self.sequence_steps == "first" else None

    def _train_steps(self, x: _Steps, tensordict: TensorDictBase) -> _Steps:
        """The steps of ``x`` ``[*B, T, ...]`` that are trained on."""
        dim = self._first_step_dim(tensordict)
        return x if dim is None else x[(slice(None),) * dim + (0,)]

    def _all_steps(self, x: Tensor, tensordict: TensorDictBase) -> Tensor:
        """Undo :meth:`_train_steps` by repeating what was computed for the first step."""
        dim = self._first_step_dim(tensordict)
        return x if dim is None else x.unsqueeze(dim).expand(tensordict.shape).clone()


def _repeated(x: Tensor, extra: torch.Size) -> Tensor:
    """``x`` once for each of the extra dimensions, as a view."""
    return x.expand(*extra, *x.shape) if extra else x


def _samples_per_chunk(action: Tensor) -> int:
    """How many of the sampled actions ``[N, *B, D]`` to score in one call of the critic.

    On the CPU the activations of all samples at once would be larger than its caches and than what
    the allocator reuses.
    """
    if is_compiling() or action.device.type != "cpu":
        return len(action)
    return max(1, _ROWS_PER_CHUNK // max(1, action[0].numel() // action.shape[-1]))


def _ensemble(
    qvalue_network: TensorDictModule | Sequence[TensorDictModule], num_qvalue_nets: int
) -> list[TensorDictModule]:
    """The members of a critic ensemble, with the weights of the given modules untouched."""
    check_count("num_qvalue_nets", num_qvalue_nets)
    if isinstance(qvalue_network, Sequence):
        critics = list(qvalue_network)
        if num_qvalue_nets not in (1, len(critics)):
            raise ValueError(
                f"num_qvalue_nets={num_qvalue_nets} contradicts a list of {len(critics)} critics. "
                "Leave it out when a list is given."
            )
    else:
        critics = [qvalue_network]
        critics += [_fresh_copy(qvalue_network) for _ in range(num_qvalue_nets - 1)]
    for critic in critics:
        if not isinstance(critic, TensorDictModule):
            raise TypeError(
                "qvalue_network must be a TensorDictModule or a list of them, "
                f"got {type(critic).__name__}."
            )
    if not critics:
        raise ValueError("qvalue_network must not be an empty list.")
    return critics


def _fresh_copy(critic: TensorDictModule) -> TensorDictModule:
    """A copy with weights of its own, drawn as the layers draw them when they are made."""
    copy = deepcopy(critic)
    for name, module in copy.named_modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"num_qvalue_nets > 1 needs to initialise copies of the critic, but its module "
                f"{name!r} ({type(module).__name__}) has no reset_parameters(). Pass a list of "
                "critics instead."
            )
    return copy
