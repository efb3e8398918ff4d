"""Actions of an unbounded policy in an environment with bounds."""

from __future__ import annotations

from tensordict import NestedKey
from torch import Tensor
from torchrl.data import TensorSpec
from torchrl.envs import Transform

from minerva_torchrl.objectives.specs import action_bounds

__all__ = ["ClipAction"]


class ClipAction(Transform):
    """Clips the action for the environment, and leaves the stored one as the policy drew it.

    Gaussian policies need this: the likelihood of a sample is that of the sample as it was drawn.
    TorchRL's ``ClipTransform`` does the same, but takes the same bounds for all dimensions only.
    Environments of :func:`~minerva_torchrl.make_env` clip by themselves.

    Args:
        action_spec (TensorSpec): spec of the action, with bounds ``[*B, D]``.
        action_key (NestedKey): where the action is. Defaults to ``"action"``.

    Examples:
        >>> import torch
        >>> from torchrl.envs import GymEnv, TransformedEnv
        >>> env = GymEnv("Pendulum-v1")
        >>> env = TransformedEnv(env, ClipAction(env.action_spec))
        >>> state = env.reset().set("action", torch.tensor([9.0]))  # the bounds are -2 and 2
        >>> env.step(state)["action"]
        tensor([9.])
    """

    low: Tensor
    high: Tensor

    def __init__(self, action_spec: TensorSpec, action_key: NestedKey = "action") -> None:
        super().__init__(in_keys_inv=[action_key], out_keys_inv=[action_key])
        bounds = action_bounds(action_spec)
        if bounds is None:
            raise ValueError("ClipAction needs actions with bounds.")
        self.register_buffer("low", bounds[0])
        self.register_buffer("high", bounds[1])

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return state.clamp(self.low.to(state), self.high.to(state))
