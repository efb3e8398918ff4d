"""Networks for continuous control: torso, Gaussian policy and action-value critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from minerva_torchrl.modules.activations import ELU, Tanh
from minerva_torchrl.objectives.checks import check_count, check_positive

__all__ = ["CholeskyPolicy", "ControlTorso", "GaussianPolicy", "StateActionCritic"]

_ROWS_PER_CHUNK = 2048


class ControlTorso(nn.Module):
    r"""Linear, LayerNorm and tanh, then linear layers with ELU: the torso of DeepMind's agents.

    The bounded first layer keeps inputs of any scale from saturating the rest.

    Args:
        in_features (int): size of the input.
        sizes (sequence of int): sizes of the layers, at least one.

    Examples:
        >>> torso = ControlTorso(3, (64, 32))
        >>> torso(torch.randn(5, 3)).shape
        torch.Size([5, 32])
    """

    def __init__(self, in_features: int, sizes: Sequence[int]) -> None:
        super().__init__()
        if not sizes:
            raise ValueError("sizes must have at least one layer, got none.")
        for size in (in_features, *sizes):
            check_count("in_features and sizes", size)
        self.first = nn.Linear(in_features, sizes[0])
        # In place, because what they overwrite is the fresh output of a layer.
        self.rest = nn.Sequential(nn.LayerNorm(sizes[0]), Tanh(inplace=True))
        for inputs, outputs in pairwise(sizes):
            self.rest.extend([nn.Linear(inputs, outputs), ELU(inplace=True)])
        self.out_features = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Features, ``[*B, sizes[-1]]``, of an input ``[*B, in_features]``."""
        return self.rest(self.first(x))


class GaussianPolicy(nn.Module):
    r"""Mean and standard deviation of a diagonal Gaussian over raw actions.

    .. math::
        \mu = W_\mu h + b_\mu, \qquad
        \sigma = \sigma_0 \, \mathrm{softplus}(W_\sigma h + b_\sigma) / \log 2 + \sigma_{min}

    The heads start small, so that at first :math:`\mu \approx 0` and
    :math:`\sigma \approx \sigma_0` in every state.

    Args:
        obs_dim (int): size of the observation.
        action_dim (int): number of action dimensions ``D``.
        sizes (sequence of int): sizes of the torso's layers.

    Keyword Args:
        init_scale (float): :math:`\sigma_0`. Defaults to ``0.5``.
        min_scale (float): :math:`\sigma_{min}`. Defaults to ``1e-4``.

    Examples:
        >>> policy = GaussianPolicy(3, 2, (64, 64), init_scale=0.5)
        >>> loc, scale = policy(torch.randn(5, 3))
        >>> loc.abs().max().item() < 0.1, (scale - 0.5).abs().max().item() < 0.1
        (True, True)
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        sizes: Sequence[int],
        *,
        init_scale: float = 0.5,
        min_scale: float = 1e-4,
    ) -> None:
        super().__init__()
        check_count("action_dim", action_dim)
        check_positive("init_scale", init_scale)
        check_positive("min_scale", min_scale)
        self.torso = ControlTorso(obs_dim, sizes)
        self.loc = nn.Linear(self.torso.out_features, action_dim)
        self.scale = nn.Linear(self.torso.out_features, action_dim)
        for head in (self.loc, self.scale):
            nn.init.normal_(head.weight, std=1e-2 / math.sqrt(self.torso.out_features))
            nn.init.zeros_(head.bias)
        self.init_scale = init_scale
        self.min_scale = min_scale

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """``loc`` and ``scale``, ``[*B, D]`` each, for observations ``[*B, obs_dim]``."""
        features = self.torso(observation)
        scale = nn.functional.softplus(self.scale(features)) * (self.init_scale / math.log(2))
        return self.loc(features), scale + self.min_scale


class CholeskyPolicy(GaussianPolicy):
    r"""Mean and Cholesky factor of the covariance of a Gaussian over raw actions.

    The diagonal of the factor is :math:`\sigma` of :class:`GaussianPolicy`; what is below is
    :math:`\sigma_i W_L h`, and near zero at first.

    Args:
        obs_dim (int): size of the observation.
        action_dim (int): number of action dimensions ``D``.
        sizes (sequence of int): sizes of the torso's layers.

    Keyword Args:
        init_scale (float): initial standard deviation. Defaults to ``0.5``.
        min_scale (float): the smallest one of the diagonal. Defaults to ``1e-4``.

    Examples:
        >>> policy = CholeskyPolicy(3, 2, (64, 64))
        >>> loc, scale_tril = policy(torch.randn(5, 3))
        >>> loc.shape, scale_tril.shape, scale_tril[0, 0, 1].item()
        (torch.Size([5, 2]), torch.Size([5, 2, 2]), 0.0)
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        sizes: Sequence[int],
        *,
        init_scale: float = 0.5,
        min_scale: float = 1e-4,
    ) -> None:
        super().__init__(obs_dim, action_dim, sizes, init_scale=init_scale, min_scale=min_scale)
        self.below = nn.Linear(self.torso.out_features, action_dim * action_dim)
        nn.init.normal_(self.below.weight, std=1e-2 / math.sqrt(self.torso.out_features))
        nn.init.zeros_(self.below.bias)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """``loc`` ``[*B, D]`` and ``scale_tril`` ``[*B, D, D]``."""
        features = self.torso(observation)
        scale = nn.functional.softplus(self.scale(features)) * (self.init_scale / math.log(2))
        scale = (scale + self.min_scale).unsqueeze(-1)
        below = self.below(features).unflatten(-1, (scale.shape[-2], -1)).tril(-1)
        identity = torch.eye(scale.shape[-2], dtype=scale.dtype, device=scale.device)
        return self.loc(features), scale * (below + identity)


class StateActionCritic(nn.Module):
    r"""Action value :math:`Q(s, a)` that works once per state and not once per sampled action.

    The first layer is linear in observation and action, :math:`W_s s + W_a a + b`. When many
    actions are scored at the same states, the losses pass the observation as an expanded view; the
    term of the state is then computed once and added to that of every action. On the CPU, without
    gradients, the actions are scored in chunks, whose activations stay in the caches.

    Args:
        obs_dim (int): size of the observation.
        action_dim (int): number of action dimensions ``D``.
        sizes (sequence of int): sizes of the torso's layers.

    Keyword Args:
        out_features (int): outputs for an action. Defaults to ``1``, the value.

    Examples:
        >>> critic = StateActionCritic(3, 2, (64, 64))
        >>> observation, action = torch.randn(5, 3), torch.randn(20, 5, 2)
        >>> critic(observation.expand(20, 5, 3), action).shape
        torch.Size([20, 5, 1])
    """

    def __init__(
        self, obs_dim: int, action_dim: int, sizes: Sequence[int], *, out_features: int = 1
    ) -> None:
        super().__init__()
        check_count("obs_dim", obs_dim)
        check_count("action_dim", action_dim)
        check_count("out_features", out_features)
        self.out_features = out_features
        self.obs_dim = obs_dim
        self.torso = ControlTorso(obs_dim + action_dim, sizes)
        self.head = nn.Linear(self.torso.out_features, out_features)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Outputs ``[*B, out_features]`` for observations ``[*B, obs_dim]`` and actions."""
        first = self.torso.first
        state_weight, action_weight = first.weight.split(
            [self.obs_dim, first.in_features - self.obs_dim], dim=1
        )
        of_state = nn.functional.linear(_without_repeats(observation), state_weight, first.bias)

        def score(actions: Tensor) -> Tensor:
            hidden = nn.functional.linear(actions, action_weight)
            # Into the same memory where no gradient needs it: this is most of the memory there is.
            hidden = hidden + of_state if torch.is_grad_enabled() else hidden.add_(of_state)
            return self.head(self.torso.rest(hidden))

        if of_state.ndim == action.ndim:  # one action at each state
            return score(action)
        chunks = action.split(_actions_per_chunk(action))
        return score(action) if len(chunks) == 1 else torch.cat([score(chunk) for chunk in chunks])


def _without_repeats(x: Tensor) -> Tensor:
    """Drop leading dimensions along which a tensor is an expanded view of one slice."""
    while x.ndim > 1 and x.stride(0) == 0:
        x = x[0]
    return x


def _actions_per_chunk(action: Tensor) -> int:
    """How many of the actions of each state, ``[N, *B, D]``, to score at once."""
    plain = torch.is_grad_enabled() or action.device.type != "cpu" or torch.compiler.is_compiling()
    rows = action[0].numel() // action.shape[-1]
    return len(action) if plain else max(1, _ROWS_PER_CHUNK // max(1, rows))
