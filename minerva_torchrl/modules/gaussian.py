"""Gaussian policies whose scale does not depend on the state."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["StateIndependentScale"]


class StateIndependentScale(nn.Module):
    r"""Mean from a network, scale from a free parameter: :math:`\sigma = \exp(\log\sigma_\theta)`.

    The logarithm of the standard deviation is one learned vector, the same in every state, as is
    usual in PPO.

    Args:
        loc_network (nn.Module): maps an observation ``[*B, O]`` to the mean ``[*B, D]``.
        action_dim (int): number of action dimensions ``D``.

    Keyword Args:
        init_scale (float): initial standard deviation. Defaults to 1.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import IndependentNormal, ProbabilisticActor
        >>> head = StateIndependentScale(nn.Linear(3, 2), action_dim=2)
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(head, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ...     return_log_prob=True,
        ... )
        >>> data = actor(TensorDict({"observation": torch.zeros(4, 3)}, batch_size=[4]))
        >>> data["action"].shape, data["action_log_prob"].shape
        (torch.Size([4, 2]), torch.Size([4]))
        >>> data["scale"][0]
        tensor([1., 1.], grad_fn=<SelectBackward0>)
    """

    def __init__(self, loc_network: nn.Module, action_dim: int, *, init_scale: float = 1.0) -> None:
        super().__init__()
        if action_dim < 1:
            raise ValueError(f"action_dim must be at least 1, got {action_dim}.")
        if not (math.isfinite(init_scale) and init_scale > 0.0):
            raise ValueError(f"init_scale must be positive and finite, got {init_scale}.")
        self.loc_network = loc_network
        self.log_scale = nn.Parameter(torch.full((action_dim,), math.log(init_scale)))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation.

        Args:
            *inputs (Tensor): what ``loc_network`` takes.

        Returns:
            ``loc`` and ``scale``, ``[*B, D]`` each.
        """
        loc = self.loc_network(*inputs)
        if loc.shape[-1] != self.log_scale.shape[0]:
            raise ValueError(
                f"loc_network must return {self.log_scale.shape[0]} action dimensions, the "
                f"action_dim of this module; got {loc.shape[-1]}."
            )
        return loc, self.log_scale.exp().expand_as(loc)
