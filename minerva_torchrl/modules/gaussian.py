"""Gaussian policies whose scale does not depend on the state."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minerva_torchrl.objectives.checks import check_positive

__all__ = ["StateIndependentScale", "log_scale_range"]


def log_scale_range(
    init_scale: float, min_scale: float, max_scale: float | None
) -> tuple[float, float]:
    r"""The range of :math:`\log \sigma / \sigma_0` between the smallest and the largest scale."""
    for name, scale in (("init_scale", init_scale), ("min_scale", min_scale)):
        check_positive(name, scale)
    if max_scale is not None:
        check_positive("max_scale", max_scale)
    largest = math.inf if max_scale is None else max_scale
    if not min_scale <= init_scale <= largest:
        raise ValueError(
            "init_scale must lie between min_scale and max_scale, got "
            f"{init_scale}, {min_scale} and {max_scale}."
        )
    return math.log(min_scale / init_scale), math.log(largest / init_scale)


class StateIndependentScale(nn.Module):
    r"""Mean from a network, scale from a free parameter: :math:`\sigma = \exp(g \theta_\sigma)`.

    The logarithm of the standard deviation is one learned vector, the same in every state, as is
    usual in PPO.

    Args:
        loc_network (nn.Module): maps an observation ``[*B, O]`` to the mean ``[*B, D]``.
        action_dim (int): number of action dimensions ``D``.

    Keyword Args:
        init_scale (float): initial standard deviation. Defaults to 1.
        min_scale (float): smallest standard deviation. Defaults to ``1e-8``.
        max_scale (float, optional): largest one. Defaults to ``None``.
        scale_gain (float): the gain ``g``. With a small one a step of the optimiser changes the
            standard deviation less. Defaults to ``1.0``.

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

    def __init__(
        self,
        loc_network: nn.Module,
        action_dim: int,
        *,
        init_scale: float = 1.0,
        min_scale: float = 1e-8,
        max_scale: float | None = None,
        scale_gain: float = 1.0,
    ) -> None:
        super().__init__()
        if action_dim < 1:
            raise ValueError(f"action_dim must be at least 1, got {action_dim}.")
        low, high = log_scale_range(init_scale, min_scale, max_scale)
        self._log_range = low + math.log(init_scale), high + math.log(init_scale)
        self.loc_network = loc_network
        check_positive("scale_gain", scale_gain)
        self.scale_gain = scale_gain
        self.log_scale = nn.Parameter(torch.full((action_dim,), math.log(init_scale) / scale_gain))

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
        log_scale = (self.scale_gain * self.log_scale).clamp(*self._log_range)
        return loc, log_scale.exp().expand_as(loc)
