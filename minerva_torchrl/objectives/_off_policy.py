"""An off-policy loss with an ensemble of action-value critics: its networks, keys and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictParams,
    composite_lp_aggregate,
)
from torch import Tensor, nn
from torchrl.data.tensor_specs import TensorSpec
from torchrl.objectives.utils import ValueEstimators, _vmap_func
from torchrl.objectives.value import TD0Estimator

from minerva_torchrl.objectives._base import DualLossModule
from minerva_torchrl.objectives._data import blank, time_dim
from minerva_torchrl.objectives.checks import check_choice
from minerva_torchrl.objectives.critics import (
    ActionValueCritic,
    AllActionsCritic,
    Critic,
    SingleActionCritic,
    check_width,
    make_ensemble,
    side_by_side,
)
from minerva_torchrl.objectives.goals import MAIN_OBJECTIVE, CostLimit, Objective
from minerva_torchrl.objectives.log_probs import joint_log_prob_key, log_prob_keys
from minerva_torchrl.objectives.policies import policy_family
from minerva_torchrl.objectives.precision import full_precision
from minerva_torchrl.objectives.reductions import masked_mean
from minerva_torchrl.objectives.specs import (
    action_place,
    is_inside,
    number_of_actions,
    reads,
    resolve_action_spec,
)
from minerva_torchrl.objectives.swapping import using
from minerva_torchrl.objectives.value.retrace import missing_log_prob

if TYPE_CHECKING:
    from typing_extensions import Self

_Steps = TypeVar("_Steps", Tensor, TensorDictBase)


class OffPolicyLoss(DualLossModule):
    """Evaluates the networks: the policy, the critics and their targets, step by step."""

    @dataclass
    class _AcceptedKeys:
        """Names of the entries that the loss reads and writes.

        ``value`` is where value estimators look for the value of a state; ``log_prob`` is only
        read by estimators that correct for the behaviour policy, such as ``"retrace"``.
        """

        action: NestedKey = "action"
        value: NestedKey = "state_value"
        state_action_value: NestedKey = "state_action_value"
        action_value: NestedKey = "action_value"
        value_target: NestedKey = "value_target"
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

    _value_estimator: Any
    _critic_state_keys: list[NestedKey]
    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams
    critic_coeff: float

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule | Sequence[TensorDictModule],
        *,
        critic: Critic,
        objectives: Mapping[str, Objective | CostLimit],
        num_qvalue_nets: int,
        qvalue_reduction: Literal["min", "mean"],
        action_spec: TensorSpec | None,
        clip_critic_actions: bool,
        per_dim_constraining: bool | None,
        sequence_steps: Literal["all", "first"],
        delay_actor: bool,
        delay_qvalue: bool,
        separate_losses: bool,
        skip_done_states: bool,
        deactivate_vmap: bool,
        reduction: Literal["none", "mean", "sum"] | None,
        use_prioritized_weights: Literal["auto"] | bool,
        scalar_output_mode: Literal["exclude", "non_tensor"] | None,
    ) -> None:
        check_choice("qvalue_reduction", qvalue_reduction, ("min", "mean"))
        check_choice("sequence_steps", sequence_steps, ("all", "first"))
        action_key = action_place(actor_network)
        spec = resolve_action_spec(action_spec, actor_network, action_key)
        policy = policy_family(actor_network, spec, per_dim=per_dim_constraining)
        super().__init__(
            reduction=reduction,
            use_prioritized_weights=use_prioritized_weights,
            scalar_output_mode=scalar_output_mode,
        )
        self.policy = policy
        self.per_dim_constraining = any(shape for _, shape in policy.constraint_kinds().values())
        self.qvalue_reduction = qvalue_reduction
        self.sequence_steps = sequence_steps
        self.clip_critic_actions = clip_critic_actions
        self.delay_actor = delay_actor
        self.delay_qvalue = delay_qvalue
        self.separate_losses = separate_losses
        self.skip_done_states = skip_done_states
        self.deactivate_vmap = deactivate_vmap

        self.convert_to_functional(actor_network, "actor_network", create_target_params=delay_actor)
        self.objectives: dict[str, Objective | CostLimit | None] = {
            MAIN_OBJECTIVE: None,
            **objectives,
        }
        # A copy for each, because supports that adapt are their own.
        copies: list[Critic] = [critic, *(deepcopy(critic) for _ in objectives)]
        self.critics = nn.ModuleList(copies).to(self._default_device)
        of_actor = list(actor_network.parameters())
        qvalue_network = side_by_side(qvalue_network, list(self.objectives), critic.width)
        critics = make_ensemble(qvalue_network, num_qvalue_nets, of_actor)
        self.num_qvalue_nets = len(critics)
        # expand_dim on a single module would redraw its weights, a list leaves them as they are.
        single = self.num_qvalue_nets == 1
        self.convert_to_functional(
            critics[0] if single else critics,
            "qvalue_network",
            expand_dim=None if single else self.num_qvalue_nets,
            create_target_params=delay_qvalue,
            compare_against=of_actor if separate_losses else None,
        )
        if separate_losses:
            self._detach_shared_layers()
        self._make_vmap()
        self.set_keys(action=action_key, log_prob=joint_log_prob_key(actor_network))
        written = self.qvalue_network.out_keys
        reads_action = reads(self.qvalue_network.in_keys, action_key)
        self._check_critic(reads_action, written)
        if self.tensor_keys.state_action_value in written:
            self._values_all_actions = False
        elif self.tensor_keys.action_value in written:
            self._values_all_actions = True
        else:  # one that reads no action has the values of all
            self._values_all_actions = not reads_action
            name = "state_action_value" if reads_action else "action_value"
            self.set_keys(**{name: written[0]})
        what = f"{len(copies)} x {critic.width} of a {type(critic).__name__}"
        values = number_of_actions(spec) if self._values_all_actions else 1
        check_width(critics, "qvalue_network", len(copies) * critic.width, what, values=values)

    def _add_objectives(
        self, objectives: Mapping[str, Objective | CostLimit], *, solved: bool
    ) -> None:
        """Give every objective beside the return its temperature, or its multiplier."""
        for name, goal in objectives.items():
            if isinstance(goal, CostLimit):
                self._add_cost_multiplier(name, goal.init_multiplier, goal.threshold)
            else:
                self._add_temperature(name, goal.init_temperature, goal.epsilon, solved=solved)

    def _check_critic(self, reads_action: bool, written: list[NestedKey]) -> None:
        """Raise if a critic can't tell actions apart."""
        keys, discrete = self.tensor_keys, self.policy.enumerates
        of_states = {keys.value, keys.state_action_value} & {*written}
        of_actions = keys.action_value in written or not of_states
        if reads_action or (discrete and of_actions):
            return
        of_all = f", or one that writes the values of all actions as {keys.action_value!r}"
        raise ValueError(
            f"qvalue_network reads {list(self.qvalue_network.in_keys)} and writes {written}: it "
            f"is a critic of states, and {type(self).__name__} has to compare actions. Use one "
            f"that reads the action too, such as ValueOperator(network, in_keys=[..., "
            f"{keys.action!r}]){of_all if discrete else ''}."
        )

    def _detach_shared_layers(self) -> None:
        """Keep the critics' gradient out of layers that an ensemble shares with the actor.

        TorchRL does so for a single critic. The layers that all members share are views in it.
        """
        with self.qvalue_network_params.unlock_() as params:
            for key, value in list(params.items(True, True)):
                if value.requires_grad and not isinstance(value, nn.Parameter):
                    params.set(key, value.data)

    def __getstate__(self) -> dict[str, Any]:
        """All but the mapped critic, a function that can't be pickled."""
        return {**self.__dict__, "_vmap_qvalue_network": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_vmap()

    def _make_vmap(self) -> None:
        self._vmap_qvalue_network = _vmap_func(
            self.qvalue_network,
            (None, 0),
            randomness=self.vmap_randomness,
            pseudo_vmap=self.deactivate_vmap,
        )

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

    # Keys ----------------------------------------------------------------------------------------

    def _set_in_keys(self) -> None:
        keys = self.tensor_keys
        states = self._state_keys
        in_keys = [*states, keys.action]
        in_keys += [("next", key) for key in (*states, keys.reward, keys.done, keys.terminated)]
        in_keys += [("next", key) for key in self.reward_keys[1:]]
        # Those of parts are beside the parts, and come with the action.
        in_keys += [key for key in self._log_prob_keys if not is_inside(key, keys.action)]
        self._in_keys = [unravel_key(key) for key in in_keys]

    @property
    def _log_prob_keys(self) -> list[NestedKey]:
        """Entries whose sum is the log-probability of the stored action, if it is needed."""
        key: Any = self.tensor_keys.log_prob
        needed = self._corrects_off_policy and key in self.value_estimator.in_keys
        return log_prob_keys(self.actor_network, key) if needed else []

    @property
    def _state_keys(self) -> list[NestedKey]:
        """Entries of a state that the networks read."""
        return list(dict.fromkeys([*self._actor_in_keys, *self._critic_state_keys]))

    @property
    def _corrects_off_policy(self) -> bool:
        """Whether the estimator wants the values and likelihoods of the stored actions."""
        return getattr(self._value_estimator, "needs_action_values", False)

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        estimator, keys = self._value_estimator, self.tensor_keys
        if estimator is not None:
            of_action = self._corrects_off_policy
            names = {
                "reward": keys.reward,
                "done": keys.done,
                "terminated": keys.terminated,
                "action": keys.action,
                "sample_log_prob": keys.log_prob,
                "value": keys.state_action_value if of_action else keys.value,
            }
            accepted = estimator._AcceptedKeys.__dataclass_fields__
            estimator.set_keys(**{name: key for name, key in names.items() if name in accepted})
        # All that the critic reads but the action, its parts, or an entry that has it inside.
        inputs = self.qvalue_network.in_keys
        self._critic_state_keys = [key for key in inputs if not reads([key], keys.action)]
        super()._forward_value_estimator_keys(**kwargs)

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
        self._make_value_estimator(value_type, None, **hyperparams)
        estimator, (_, critic) = self._value_estimator, self._critics_by_objective()[0]
        if critic.one_step_targets and not isinstance(estimator, TD0Estimator):
            self._value_estimator = None
            raise ValueError(
                f"a {type(critic).__name__} takes one-step and n-step targets (ValueEstimators.TD0)"
                f", not {type(estimator).__name__}: use a ScalarCritic, TwoHotCritic or "
                "HLGaussCritic with that."
            )
        return self

    def _checked(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The data, if it is what the loss needs, with zeros where it is padded."""
        self._check_input(tensordict)
        valid = self._valid_mask(tensordict)
        if valid is None:
            return tensordict
        data = tensordict.copy()
        for key in self.in_keys:  # a network that is given a NaN has no gradient
            data.set(key, blank(tensordict.get(key), ~valid))
        return data

    def _check_input(self, tensordict: TensorDictBase) -> None:
        for log_prob in self._log_prob_keys:
            if tensordict.get(log_prob, None) is None:
                raise ValueError(missing_log_prob(log_prob))
        self._check_keys(tensordict, self.in_keys)
        if tensordict.ndim < 1:
            raise ValueError("The data must have at least one batch dimension, got none.")
        for name in ("reward", "done", "terminated"):
            key = getattr(self.tensor_keys, name)
            shape = tensordict.get(("next", key)).shape
            wanted = (*tensordict.shape, self._reward_width if name == "reward" else 1)
            if shape != wanted:
                raise ValueError(
                    f"{('next', key)} must have shape {wanted} for a batch of "
                    f"shape {tuple(tensordict.shape)}, got {tuple(shape)}."
                )
        action = tensordict.get(self.tensor_keys.action)
        self.policy.check_action(self.tensor_keys.action, action, tensordict.shape)

    @property
    def reward_keys(self) -> list[NestedKey]:
        """Entries that have rewards, that of the return first."""
        goals = [goal for goal in self.objectives.values() if goal is not None]
        own = [goal.reward for goal in goals if goal.reward is not None]
        return [self.tensor_keys.reward, *own]

    @property
    def _reward_width(self) -> int:
        """Rewards in the entry of the reward: all of them unless they have entries of their own."""
        return len(self.objectives) if len(self.reward_keys) == 1 else 1

    # Values --------------------------------------------------------------------------------------

    @property
    def _critic(self) -> ActionValueCritic:
        keys, critics = self.tensor_keys, self._critics_by_objective()
        features = (len(critics), critics[0][1].width)
        if self._values_all_actions:
            return AllActionsCritic(keys.action_value, features)
        return SingleActionCritic(keys.state_action_value, keys.action, features)

    def _evaluate(self, inputs: TensorDictBase, *, params: TensorDictParams) -> Tensor:
        """What the critics write, ``[K, *B, ...]``."""
        key, network = self._critic.value_key, self.qvalue_network
        with self._precision_of_networks():
            if self.num_qvalue_nets > 1:
                values = self._vmap_qvalue_network(inputs, params).get(key)
            else:
                with using(network, params):
                    values = network(inputs).get(key).unsqueeze(0)
        return full_precision(values)

    def _seen(self, action: Any) -> Any:
        """Actions as the critic sees them."""
        return self.policy.clip(action) if self.clip_critic_actions else action

    def _critic_inputs(self, states: TensorDictBase) -> TensorDictBase:
        return states.select(*self._critic_state_keys)

    def _critics_by_objective(self) -> list[tuple[str, Critic]]:
        return list(zip(self.objectives, self.critics, strict=True))  # type: ignore[arg-type]

    def _online_outputs(self, states: TensorDictBase) -> Tensor:
        """What all critics write for the stored actions, ``[K, *B, objectives, P]``."""
        evaluate = partial(self._evaluate, params=self.qvalue_network_params)
        action = self._seen(states.get(self.tensor_keys.action))
        return self._critic.of_action(evaluate, self._critic_inputs(states), action)

    def _qvalue_loss(
        self, data: TensorDictBase, with_metrics: bool = True
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss of the critics, temporal difference error of each step, and metrics."""
        outputs = self._online_outputs(data)
        mask, weights = self._valid_mask(data), self._priority_weight(data)
        targets = data.get(self.tensor_keys.value_target)
        if mask is not None:  # left out before the loss: the gradient of a NaN is never zero
            targets = torch.where(mask.unsqueeze(-1), targets, 0.0)
        targets = targets.unflatten(-1, (len(self.critics), -1))
        losses, errors = [], []
        metrics: dict[str, Tensor] = {}
        for i, (name, critic) in enumerate(self._critics_by_objective()):
            output, target = outputs[..., i, :], targets[..., i, :]
            # eq: mpo-critic-loss
            losses.append(critic.loss(output, target).sum(0))
            with torch.no_grad():
                value, mean = critic.mean(output), critic.target_mean(target)
                errors.append((value - mean).abs().amax(0))
                if with_metrics:
                    of_critic = {
                        "pred_value": masked_mean(value.mean(0), mask),
                        "target_value": masked_mean(mean, mask),
                        **critic.metrics(),
                    }
                    metrics |= {of_objective(key, name): x for key, x in of_critic.items()}
        loss, error = torch.stack(losses).sum(0), torch.stack(errors).amax(0)
        error = error if mask is None else torch.where(mask, error, 0.0)
        return self._reduce(self.critic_coeff * loss, mask, weights), error, metrics

    # Steps ---------------------------------------------------------------------------------------

    def _train_steps(self, x: _Steps, tensordict: TensorDictBase) -> _Steps:
        """The steps of ``x`` ``[*B, T, ...]`` that are trained on."""
        dim = time_dim(tensordict) if self.sequence_steps == "first" else None
        return x if dim is None else x[(slice(None),) * dim + (0,)]

    def set_priority(self, tensordict: TensorDictBase, td_error: Tensor) -> None:
        """Write the priorities of a batch for prioritised replay.

        Args:
            tensordict (TensorDictBase): the batch, transitions ``[B]`` or sequences ``[*B, T]``.
            td_error (Tensor): error of each step that was trained on. With
                ``sequence_steps="first"`` all steps of a sequence get that of the first.
        """
        if td_error.shape != tensordict.shape:
            dim = time_dim(tensordict)
            assert dim is not None
            td_error = td_error.unsqueeze(dim).expand(tensordict.shape).clone()
        tensordict.set(self.tensor_keys.priority, td_error)


def of_objective(key: str, name: str) -> str:
    """Name of a metric of an objective's critic."""
    return key if name == MAIN_OBJECTIVE else f"{key}_{name}"
