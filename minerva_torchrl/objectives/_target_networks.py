"""What the target networks say: candidate actions, their scores, and the critic's targets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from torch import Tensor
from torch.compiler import is_compiling
from torchrl.objectives.value import TD0Estimator

from minerva_torchrl.objectives._data import blank, time_dim
from minerva_torchrl.objectives._off_policy import OffPolicyLoss
from minerva_torchrl.objectives.critics import expectation
from minerva_torchrl.objectives.goals import MAIN_OBJECTIVE
from minerva_torchrl.objectives.log_probs import joint_log_prob


class TargetNetworksLoss(OffPolicyLoss):
    """Samples the target policy, scores its actions with the target critics, backs values up."""

    num_action_samples: int
    num_value_samples: int | None
    action_penalization: bool
    policy_states: str
    _warned_of_single_steps = False

    # Candidates ----------------------------------------------------------------------------------

    def _sample_states(
        self, tensordict: TensorDictBase
    ) -> tuple[dict[str, Tensor], TensorDictBase, Tensor]:
        """Values of the next states, and samples and mask at the states of the policy loss."""
        next_states, not_terminal, at_next, next_values = self._sample_next_states(tensordict)
        valid = self._valid_mask(tensordict)
        current_mask = torch.ones_like(not_terminal) if valid is None else valid
        current_mask, next_mask = (
            self._train_steps(mask, tensordict)
            for mask in (current_mask, current_mask & not_terminal)
        )
        if self.policy_states != "current":
            at_next = self._train_steps(at_next, tensordict)
            if self.num_value_samples is not None:
                states = self._train_steps(next_states, tensordict)
                at_next, _ = self._sample(states, self.num_action_samples)
            if self.policy_states == "next":
                return next_values, at_next, next_mask
        states = self._train_steps(tensordict.select(*self._state_keys), tensordict)
        at_current, _ = self._sample(states, self.num_action_samples)
        if self.policy_states == "current":
            return next_values, at_current, current_mask
        both = torch.stack([at_current, at_next], at_current.ndim)
        return next_values, both, torch.stack([current_mask, next_mask], -1)

    def _sample_next_states(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, Tensor, TensorDict, dict[str, Tensor]]:
        """Next states, where they are not terminal, samples at them, and their values."""
        next_states, not_terminal = self._next_states(tensordict)
        num_samples = self.num_value_samples or self.num_action_samples
        at_next, values = self._sample(next_states, num_samples)
        log_prior = at_next.get("log_prior", None)
        pooled = {
            name: critic.pool(values[name], log_prior)
            for name, critic in self._critics_by_objective()
        }
        return next_states, not_terminal, at_next, pooled

    @torch.no_grad()
    def _sample(
        self, states: TensorDictBase, num_samples: int
    ) -> tuple[TensorDict, dict[str, Tensor]]:
        """Candidates of the target policy at states ``[*B]``, and what each objective says."""
        # eq: next-state-value
        dist = self._dist(states, self.target_actor_network_params)
        candidates = self.policy.candidates(dist, num_samples)
        values = self._target_values(states, candidates.action, candidates=True)
        scores = {n: critic.score(values[n]) for n, critic in self._critics_by_objective()}
        expected_value = expectation(scores[MAIN_OBJECTIVE], candidates.log_prior)
        costs = {}
        for name, multiplier in self.cost_multipliers.items():
            # eq: cost-limited-score
            cost = scores.pop(name)
            costs[name] = expectation(cost, candidates.log_prior)
            scores[MAIN_OBJECTIVE] = scores[MAIN_OBJECTIVE] - multiplier() * cost
        if self.action_penalization:
            # eq: out-of-bounds-cost
            scores["penalty"] = self.policy.bounds_cost(candidates.action)
        shape = (*states.shape, len(scores[MAIN_OBJECTIVE]))
        samples = TensorDict(
            {
                "inputs": states.select(*self._actor_in_keys),
                "old_policy": self.policy.describe(dist),
                "basis": TensorDict(candidates.basis, batch_size=shape),
                "scores": {name: score.movedim(0, -1) for name, score in scores.items()},
                "costs": costs,
                "expected_value": expected_value,
            },
            batch_size=states.shape,
        )
        if candidates.log_prior is not None:
            samples.set("log_prior", candidates.log_prior)
        return samples, values

    def _target_values(
        self, states: TensorDictBase, action: Any, *, candidates: bool = False
    ) -> dict[str, Tensor]:
        """What the target critics say of candidates ``[N, *B]``, or of one action, as ``N = 1``.

        By objective, as its critic selects it from the ensemble.
        """
        evaluate = partial(self._evaluate, params=self.target_qvalue_network_params)
        score = self._critic.of_candidates if candidates else self._critic.of_action
        outputs = score(evaluate, self._critic_inputs(states), self._seen(action))
        outputs = outputs if candidates else outputs.unsqueeze(1)
        return {
            name: critic.select(outputs[..., i, :], self.qvalue_reduction)
            for i, (name, critic) in enumerate(self._critics_by_objective())
        }

    def _next_states(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, Tensor]:
        """Next states, and where they are not terminal, ``[*B]``."""
        terminated = tensordict.get(("next", self.tensor_keys.terminated)).squeeze(-1)
        states = tensordict.get("next").select(*self._state_keys)
        if self.skip_done_states:
            states = blank(states, terminated)
        return states, ~terminated

    # Targets -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _value_target(
        self, tensordict: TensorDictBase, next_values: Mapping[str, Tensor]
    ) -> Tensor:
        """Targets of the critics for every step, those of all objectives side by side."""
        tensordict = self._cut_at_padding(tensordict)
        given: dict[str, dict[str, Tensor]] = {name: {} for name in self.objectives}
        if self._corrects_off_policy:
            action = tensordict.get(self.tensor_keys.action)
            dist = self._dist(tensordict, self.target_actor_network_params)
            # eq: off-policy-inputs
            log_pi = self.policy.log_prob(dist, action)
            if len(self._log_prob_keys) > 1:
                log_mu = joint_log_prob(tensordict, self._log_prob_keys)
                tensordict = tensordict.copy().set(self.tensor_keys.log_prob, log_mu)
            for name, value in self._target_values(tensordict, action).items():
                given[name] = {"log_pi": log_pi, "state_action_value": value[0].unsqueeze(-1)}
        targets = [
            critic.target(
                next_values[name],
                partial(self._backup, self._with_reward(tensordict, name), given[name]),
            )
            for name, critic in self._critics_by_objective()
        ]
        return targets[0] if len(targets) == 1 else torch.cat(targets, -1)

    def _with_reward(self, tensordict: TensorDictBase, objective: str) -> TensorDictBase:
        """The data with the reward of an objective, ``[*B, 1]``, in the place of the return's."""
        if len(self.objectives) == 1:
            return tensordict
        place = unravel_key(("next", self.tensor_keys.reward))
        goal = self.objectives[objective]
        if goal is not None and goal.reward is not None:
            return tensordict.copy().set(place, tensordict.get(("next", goal.reward)))
        rewards, index = tensordict.get(place), list(self.objectives).index(objective)
        return tensordict.copy().set(place, rewards[..., index : index + 1])

    def _backup(
        self, tensordict: TensorDictBase, given: Mapping[str, Tensor], next_value: Tensor
    ) -> Tensor:
        """Returns ``[*B, M]`` from those after the next state, by the value estimator."""
        estimator = self.value_estimator
        if next_value.shape[-1] > 1:  # a line in each return: take its offset and its slope
            # eq: affine-backup
            zero = torch.zeros_like(next_value[..., :1])
            place = unravel_key(("next", self.tensor_keys.reward))
            without_reward = tensordict.copy().set(place, zero)
            offset = estimator.value_estimate(tensordict, next_value=zero)
            slope = estimator.value_estimate(without_reward, next_value=zero + 1)
            return self._nan_where_padded(offset + slope * next_value, tensordict)
        single_steps = not isinstance(estimator, TD0Estimator) and time_dim(tensordict) is None
        if single_steps:
            self._warn_of_single_steps()
            tensordict, next_value = tensordict.unsqueeze(-1), next_value.unsqueeze(-2)
            given = {
                name: x.unsqueeze(x.ndim - (x.ndim > tensordict.ndim - 1))
                for name, x in given.items()
            }
        # eq: critic-target
        target = estimator.value_estimate(tensordict, next_value=next_value, **given)
        target = self._nan_where_padded(target, tensordict)
        return target.squeeze(-2) if single_steps else target

    def _nan_where_padded(self, target: Tensor, tensordict: TensorDictBase) -> Tensor:
        """Padding has no return: the support of a critic must not take it for one."""
        valid = self._valid_mask(tensordict)
        return target if valid is None else torch.where(valid.unsqueeze(-1), target, torch.nan)

    def _with_target(
        self, tensordict: TensorDictBase, next_values: Mapping[str, Tensor]
    ) -> TensorDictBase:
        """The steps that are trained on, with the critic's target as ``value_target``."""
        target = self._train_steps(self._value_target(tensordict, next_values), tensordict)
        data = self._train_steps(tensordict, tensordict).copy()
        return data.set(self.tensor_keys.value_target, target)

    def _cut_at_padding(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Let no trace run from a valid step into the padding behind it."""
        valid, dim = self._valid_mask(tensordict), time_dim(tensordict)
        if valid is None or dim is None:
            return tensordict
        next_valid = valid.roll(-1, dim).unsqueeze(-1)
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
