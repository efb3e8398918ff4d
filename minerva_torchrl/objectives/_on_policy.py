"""An on-policy loss with a policy and a state-value critic: advantages and the critic's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictParams,
    composite_lp_aggregate,
)
from torch import Tensor, distributed
from torch.compiler import is_compiling
from torchrl.data.tensor_specs import TensorSpec
from torchrl.objectives.utils import ValueEstimators, _cache_values

from minerva_torchrl.objectives._base import DualLossModule
from minerva_torchrl.objectives.checks import check_positive, check_value_scale
from minerva_torchrl.objectives.critics import Critic, check_width
from minerva_torchrl.objectives.critics.states import resolve_state_critic, value_network
from minerva_torchrl.objectives.log_probs import joint_log_prob_key
from minerva_torchrl.objectives.policies import policy_family
from minerva_torchrl.objectives.precision import full_precision, in_full_precision
from minerva_torchrl.objectives.reductions import explained_variance, masked_mean, masked_std
from minerva_torchrl.objectives.specs import action_place, reads, resolve_action_spec
from minerva_torchrl.objectives.swapping import using

if TYPE_CHECKING:
    from typing_extensions import Self

_ESTIMATOR_ALIASES = {"returns": ValueEstimators.TD1, "dae": ValueEstimators.TD0}


class OnPolicyLoss(DualLossModule):
    """Estimates advantages, evaluates the policy and regresses the critic on its target."""

    @dataclass
    class _AcceptedKeys:
        """Names of the entries that the loss reads."""

        action: NestedKey = "action"
        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        value: NestedKey = "state_value"
        sample_log_prob: NestedKey | None = None
        restarting_weight: NestedKey = "restarting_weight"
        importance_weight: NestedKey = "importance_weight"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"

        def __post_init__(self) -> None:
            if self.sample_log_prob is None:
                aggregate = composite_lp_aggregate(nowarn=True)
                self.sample_log_prob = "sample_log_prob" if aggregate else "action_log_prob"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    default_value_estimator = ValueEstimators.GAE
    SUPPORTED_VALUE_ESTIMATORS = (
        ValueEstimators.GAE,
        ValueEstimators.TD0,
        ValueEstimators.TD1,
        ValueEstimators.TDLambda,
    )

    critic_network: TensorDictModule
    critic_network_params: TensorDictParams
    target_critic_network_params: TensorDictParams
    critic_coeff: Tensor
    old_policy: str
    _checked_parameters = False

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule,
        *,
        delay_actor: bool,
        per_dim_constraining: bool | None,
        action_spec: TensorSpec | None,
        separate_losses: bool,
        critic_coeff: float,
        loss_critic_type: Literal["l2", "l1", "smooth_l1"],
        critic: Critic | None,
        clip_value: float | bool | None,
        device: torch.device | None,
        reduction: Literal["none", "mean", "sum"] | None,
        scalar_output_mode: Literal["exclude", "non_tensor"] | None,
    ) -> None:
        action_key = action_place(actor_network)
        spec = resolve_action_spec(action_spec, actor_network, action_key)
        policy = policy_family(actor_network, spec, per_dim=per_dim_constraining)
        if not isinstance(critic_network, TensorDictModuleBase):
            raise TypeError(
                "critic_network must be a TensorDictModule that writes 'state_value', "
                f"got {type(critic_network).__name__}."
            )
        if reads(critic_network.in_keys, action_key):
            raise ValueError(
                f"critic_network reads the action {action_key!r}, but {type(self).__name__} needs "
                "the value of the state alone. Use a critic of states, such as "
                "ValueOperator(network, in_keys=['observation']); MPOLoss takes critics of actions."
            )
        check_value_scale(critic_network, type(self))
        check_positive("critic_coeff", critic_coeff)
        if clip_value is not None and clip_value is not False:
            check_positive("clip_value", clip_value)
        value = resolve_state_critic(critic, loss_critic_type, clip_value)
        check_width([critic_network], "critic_network", value.width, f"a {type(value).__name__}")
        critic_network, outputs_key = value_network(critic_network, value)
        super().__init__(
            reduction=reduction,
            use_prioritized_weights=False,
            scalar_output_mode=scalar_output_mode,
        )
        self.policy = policy
        self.critic = value
        self._outputs_key = outputs_key
        self.delay_actor = delay_actor
        self.separate_losses = separate_losses
        self.loss_critic_type = loss_critic_type
        self.clip_value = None if clip_value is None or clip_value is False else float(clip_value)
        self.convert_to_functional(actor_network, "actor_network", create_target_params=delay_actor)
        shared = list(actor_network.parameters()) if separate_losses else None
        self.convert_to_functional(critic_network, "critic_network", compare_against=shared)
        device = self._default_device if device is None else device
        self.register_coeff_buffer("critic_coeff", critic_coeff, device=device)
        self.set_keys(action=action_key, sample_log_prob=joint_log_prob_key(actor_network))
        if self.tensor_keys.value not in critic_network.out_keys:
            self.set_keys(value=critic_network.out_keys[0])

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        if self._value_estimator is not None:
            keys = self.tensor_keys
            self._value_estimator.set_keys(
                advantage=keys.advantage,
                value_target=keys.value_target,
                value=keys.value,
                reward=keys.reward,
                done=keys.done,
                terminated=keys.terminated,
            )
        super()._forward_value_estimator_keys(**kwargs)

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> Self:
        """Choose how advantages and value targets are made.

        Args:
            value_type: ``ValueEstimators.GAE`` (default), ``TD0`` (also ``"td0"``, ``"dae"``),
                ``TD1`` (also ``"returns"``), ``TDLambda``, an estimator class or an estimator.
            **hyperparams: ``gamma``, ``lmbda`` and whatever else the estimator takes.

        Returns:
            The loss.
        """
        if isinstance(value_type, str):
            value_type = _ESTIMATOR_ALIASES.get(value_type.lower(), value_type)
        if value_type in (ValueEstimators.VTrace, "vtrace"):
            raise NotImplementedError(
                f"{type(self).__name__} takes no V-trace: its data is that of the policy itself, "
                "for which V-trace is TD(1), and TorchRL's estimator weighs an action drawn anew "
                "instead of the stored one. Use GAE, TD0, TD1 or TDLambda."
            )
        return self._make_value_estimator(value_type, self.critic_network, **hyperparams)

    # Advantages and critic -----------------------------------------------------------------------

    @in_full_precision
    def critic_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the critic, and its metrics.

        Args:
            tensordict (TensorDictBase): a rollout, or any batch that has its targets.
        """
        self._advantage(tensordict)  # makes the target if the data has none
        outputs = self._critic_outputs(tensordict)
        loss = self._critic_loss(tensordict, outputs)
        return loss, self._critic_metrics(tensordict, outputs.detach())

    def _critic_outputs(self, tensordict: TensorDictBase) -> Tensor:
        """What the critic says of each state, ``[*B, P]``: its value, or what describes it."""
        inputs = tensordict.select(*self.critic_network.in_keys)
        network, key = self.critic_network, self._outputs_key or self.tensor_keys.value
        with using(network, self.critic_network_params), self._precision_of_networks():
            outputs = full_precision(network(inputs).get(key))
        shape = (*tensordict.shape, self.critic.width)
        if outputs.shape != shape:
            raise ValueError(
                f"critic_network must write {self.tensor_keys.value!r} of shape {shape} for a "
                f"batch of shape {tuple(tensordict.shape)}, got {tuple(outputs.shape)}."
            )
        return outputs

    def _critic_loss(self, tensordict: TensorDictBase, outputs: Tensor) -> Tensor:
        """Loss of what the critic says of each state, ``[*B, P]``, reduced."""
        keys = self.tensor_keys
        target, old_value = tensordict.get(keys.value_target), None
        mask = self._valid_mask(tensordict)
        if mask is not None:  # left out before the loss: the gradient of a NaN is never zero
            present = self.critic.mean(outputs.detach()).unsqueeze(-1)
            target = torch.where(mask.unsqueeze(-1), target, present)
        target = self.critic.target(target, lambda x: x)
        if self.clip_value is not None:
            self._check_keys(tensordict, [keys.value])
            old_value = tensordict.get(keys.value)
        target, outputs, old_value = self._critic_loss_inputs(target, outputs, old_value)
        # eq: value-loss
        loss = self.critic.loss(outputs, target)
        if old_value is not None and self.clip_value is not None:
            clipped = old_value + (outputs - old_value).clamp(-self.clip_value, self.clip_value)
            loss = torch.maximum(loss, self.critic.loss(clipped, target))
        return self._reduce(self.critic_coeff * loss, mask)

    def _critic_loss_inputs(
        self, target_return: Tensor, state_value: Tensor, old_state_value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Target, value and stored value as the critic's error sees them, as in TorchRL's PPO.

        A subclass can take the error on another scale, for example a normalised one.
        """
        return target_return, state_value, old_state_value

    @torch.no_grad()
    def _critic_metrics(self, tensordict: TensorDictBase, outputs: Tensor) -> dict[str, Tensor]:
        value, mask = self.critic.mean(outputs), self._valid_mask(tensordict)
        target = tensordict.get(self.tensor_keys.value_target).squeeze(-1)
        return {
            "explained_variance": explained_variance(target, value, mask),
            "value_mean": masked_mean(value, mask),
            "value_std": masked_std(value, mask),
            "value_target_mean": masked_mean(target, mask),
            "value_target_std": masked_std(target, mask),
            **self.critic.metrics(),
        }

    def _advantage(self, tensordict: TensorDictBase) -> Tensor:
        """Advantage of each sample, ``[*B]``, estimated if the data has none."""
        keys = self.tensor_keys
        advantage = tensordict.get(keys.advantage, None)
        if advantage is None:
            self._check_keys(tensordict, self.in_keys)
            self.value_estimator(
                tensordict,
                params=self._detached_critic_params,
                target_params=self.target_critic_network_params,
            )
            advantage = tensordict.get(keys.advantage)
        self._check_keys(tensordict, [keys.value_target])
        for key in (keys.advantage, keys.value_target):
            shape = tensordict.get(key).shape
            if shape != (*tensordict.shape, 1):
                raise ValueError(
                    f"{key!r} must have shape {(*tensordict.shape, 1)} for a batch of shape "
                    f"{tuple(tensordict.shape)}, got {tuple(shape)}."
                )
        return advantage.detach().squeeze(-1)

    @property
    @_cache_values
    def _detached_critic_params(self) -> TensorDictParams:
        return self.critic_network_params.detach()

    # Samples, and the policy that drew them ------------------------------------------------------

    @property
    def _old_policy_keys(self) -> list[NestedKey]:
        """Where the data has the parameters of the policy that collected it."""
        return list(self.actor_network[-1].in_keys)

    def _old_policy(self, tensordict: TensorDictBase) -> TensorDict:
        """Parameters of the policy that the divergences are measured from."""
        keys = self._old_policy_keys
        if self.old_policy == "target":
            dist = self._dist(tensordict, self.target_actor_network_params)
        else:
            missing = [key for key in keys if tensordict.get(key, None) is None]
            if missing:
                raise ValueError(
                    f"{type(self).__name__} needs the parameters of the policy that collected the "
                    f"data, but the entries {missing} are missing. Let the actor write them "
                    f"(out_keys={keys} of its module), or use old_policy='target'."
                )
            dist = self.actor_network.build_dist_from_params(tensordict.select(*keys))
        old, valid = self.policy.describe(dist), self._valid_mask(tensordict)
        if valid is not None:  # padding may hold anything
            old = self.policy.where_valid(old, valid)
        on_meta = any(x.is_meta for x in old.values(True, True))  # no values to check
        if not (self._checked_parameters or is_compiling() or on_meta):
            self.policy.check_parameters(keys, old)
            self._checked_parameters = True
        return old

    def _weights_of_samples(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
        weight = tensordict.get(key, None)
        return None if weight is None else self._gather(weight.flatten())

    def _own(self, x: Tensor, tensordict: TensorDictBase) -> Tensor:
        """This process's part of what was gathered, in the shape of its batch."""
        if self.process_group is not None:
            rank, size = distributed.get_rank(self.process_group), tensordict.numel()
            x = x[rank * size : (rank + 1) * size]
        return x.reshape(tensordict.shape)

    def _mean(self, repeated: Tensor) -> Tensor:
        """What was repeated for every sample, once again."""
        return repeated if self.reduction == "none" else repeated.mean()
