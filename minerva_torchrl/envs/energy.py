"""The energy of actions as an objective beside the reward."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec, Unbounded
from torchrl.envs import Transform

from minerva_torchrl.objectives.specs import action_bounds

__all__ = ["EnergyCost"]


class EnergyCost(Transform):
    r"""Writes how much energy an action takes, as a reward: :math:`-\frac1D \sum_j \bar a_j^2`.

    :math:`\bar a` is the action as the environment carries it out, from -1 to 1 between its bounds.

    Args:
        action_key (NestedKey): where the action is. Defaults to ``"action"``.
        out_key (NestedKey): where the energy goes, ``[*B, 1]``. Defaults to ``"energy"``.

    Examples:
        >>> from minerva_torchrl import make_env
        >>> env = make_env("gym:Pendulum-v1", seed=0, wrappers=[EnergyCost])
        >>> data = env.rollout(3)
        >>> energy = data["next", "energy"]
        >>> energy.shape, bool((energy <= 0).all() and (energy >= -1).all())
        (torch.Size([3, 1]), True)
    """

    def __init__(self, action_key: NestedKey = "action", out_key: NestedKey = "energy") -> None:
        super().__init__(in_keys=[], out_keys=[out_key])
        self.action_key = action_key
        self.out_key = out_key

    def _energy(self, action: Tensor) -> Tensor:
        assert self.parent is not None
        bounds = action_bounds(self.parent.full_action_spec[self.action_key])
        if bounds is None:
            raise ValueError("EnergyCost needs actions with bounds.")
        low, high = (bound.to(action) for bound in bounds)
        relative = (action.clamp(low, high) - (high + low) / 2) / ((high - low) / 2)
        return -relative.square().mean(-1, keepdim=True)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set(self.out_key, self._energy(tensordict.get(self.action_key)))

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        device = tensordict_reset.device
        return tensordict_reset.set(
            self.out_key, torch.zeros(*tensordict_reset.shape, 1, device=device)
        )

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """With the energy beside the observations."""
        observation_spec[self.out_key] = Unbounded(
            shape=(*observation_spec.shape, 1), device=observation_spec.device
        )
        return observation_spec
