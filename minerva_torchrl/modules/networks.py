"""Networks for continuous control: torso, Gaussian policy and action-value critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minerva_torchrl.modules.activations import ELU, Tanh
from minerva_torchrl.modules.gaussian import log_scale_range
from minerva_torchrl.modules.init import Initializer, initialize_
from minerva_torchrl.objectives.checks import check_choice, check_count, check_positive

__all__ = [
    "Activation",
    "CholeskyPolicy",
    "ControlTorso",
    "GaussianPolicy",
    "PartedPolicy",
    "StateActionCritic",
    "TanhInterval",
]

Activation = Literal["elu", "relu", "tanh"]
"""Names of activations."""
# In place, because what they overwrite is the fresh output of a layer.
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": partial(ELU, inplace=True),
    "relu": partial(nn.ReLU, inplace=True),
    "tanh": partial(Tanh, inplace=True),
}
_ROWS_PER_CHUNK = 2048


def torso_layers(
    in_features: int,
    sizes: Sequence[int],
    *,
    activation: Activation,
    layer_norm: bool,
    norm_every_layer: bool = False,
) -> list[nn.Module]:
    """The layers of :class:`ControlTorso`, with PyTorch's initialisation."""
    if not sizes:
        raise ValueError("sizes must have at least one layer, got none.")
    for size in (in_features, *sizes):
        check_count("in_features and sizes", size)
    check_choice("activation", activation, _ACTIVATIONS)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((in_features, *sizes)):
        bounded = layer_norm and not layers
        layers.append(nn.Linear(inputs, outputs))
        layers += [nn.LayerNorm(outputs)] if bounded or norm_every_layer else []
        layers.append(_ACTIVATIONS["tanh" if bounded else activation]())
    return layers


class ControlTorso(nn.Module):
    r"""Linear, LayerNorm and tanh, then linear layers with ELU: the torso of DeepMind's agents.

    The bounded first layer keeps inputs of any scale from saturating the rest.

    Args:
        in_features (int): size of the input.
        sizes (sequence of int): sizes of the layers, at least one.

    Keyword Args:
        activation (str): ``"elu"`` (default), ``"relu"`` or ``"tanh"``.
        layer_norm (bool): whether the first layer has LayerNorm and tanh. Without them it has the
            activation. Defaults to ``True``.
        norm_every_layer (bool): whether all layers have LayerNorm, before their activation.
            Defaults to ``False``.
        initializer (str): see :func:`~minerva_torchrl.modules.initialize_`. Defaults to
            ``"small_heads"``, which leaves a torso as PyTorch makes it.

    Examples:
        >>> torso = ControlTorso(3, (64, 32))
        >>> torso(torch.randn(5, 3)).shape
        torch.Size([5, 32])
    """

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        *,
        activation: Activation = "elu",
        layer_norm: bool = True,
        norm_every_layer: bool = False,
        initializer: Initializer = "small_heads",
    ) -> None:
        super().__init__()
        layers = torso_layers(
            in_features,
            sizes,
            activation=activation,
            layer_norm=layer_norm,
            norm_every_layer=norm_every_layer,
        )
        self.first: nn.Linear = layers[0]  # type: ignore[assignment]
        self.rest = nn.Sequential(*layers[1:])
        self.out_features = sizes[-1]
        initialize_(self, "hidden", initializer)

    def forward(self, x: Tensor) -> Tensor:
        """Features, ``[*B, sizes[-1]]``, of an input ``[*B, in_features]``."""
        return self.rest(self.first(x))


class TanhInterval(nn.Module):
    r"""Into an interval by a tanh: :math:`(l + h) / 2 + (h - l) / 2 \tanh x`.

    Args:
        low (Tensor): the lower bounds ``l``, ``[D]``.
        high (Tensor): the upper bounds ``h``, ``[D]``.

    Examples:
        >>> bound = TanhInterval(torch.tensor([-1.0]), torch.tensor([3.0]))
        >>> bound(torch.tensor([0.0, 100.0]))
        tensor([1., 3.])
    """

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        if not (low.isfinite().all() and high.isfinite().all() and (low < high).all()):
            raise ValueError(
                f"low and high must be finite, with low below high; got {low.tolist()} and "
                f"{high.tolist()}."
            )
        self.center: Tensor
        self.radius: Tensor
        # They follow from the action's bounds, so no checkpoint needs them.
        self.register_buffer("center", (low + high) / 2, persistent=False)
        self.register_buffer("radius", (high - low) / 2, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Between the bounds, ``[*B, D]``."""
        return self.center + self.radius * x.tanh()


class GaussianPolicy(nn.Module):
    r"""Mean and standard deviation of a diagonal Gaussian over raw actions.

    .. math::
        \mu = f(W_\mu h + b_\mu), \qquad
        \sigma = \sigma_0 \, \mathrm{softplus}(g \, (W_\sigma h + b_\sigma)) / \log 2 + \sigma_{min}

    The heads start small, so that at first :math:`\mu \approx 0` and
    :math:`\sigma \approx \sigma_0` in every state.

    Args:
        obs_dim (int): size of the observation.
        action_dim (int): number of action dimensions ``D``.
        sizes (sequence of int): sizes of the torso's layers.

    Keyword Args:
        init_scale (float): :math:`\sigma_0`. Defaults to ``0.5``.
        min_scale (float): :math:`\sigma_{min}`. Defaults to ``1e-4``.
        max_scale (float, optional): cut larger standard deviations off. Defaults to ``None``.
        scale_function (str): ``"softplus"`` (default), or ``"exp"`` for
            :math:`\sigma = \sigma_0 \exp(g \, (W_\sigma h + b_\sigma))`, cut off at ``min_scale``
            and ``max_scale``.
        scale_gain (float): the gain ``g``. With a small one a step of the optimiser changes the
            standard deviation less. Defaults to ``1.0``.
        loc_activation (nn.Module, optional): ``f``, for example a :class:`TanhInterval`. By default
            the mean is linear.
        activation (str): see :class:`ControlTorso`, as the next three.
        layer_norm (bool): of the torso.
        norm_every_layer (bool): of the torso.
        initializer (str): of torso and heads.
        torso (nn.Module, optional): hidden layers of ``obs_dim`` inputs and ``sizes[-1]`` outputs
            in the place of a :class:`ControlTorso`.

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
        max_scale: float | None = None,
        scale_function: Literal["softplus", "exp"] = "softplus",
        scale_gain: float = 1.0,
        loc_activation: nn.Module | None = None,
        activation: Activation = "elu",
        layer_norm: bool = True,
        norm_every_layer: bool = False,
        initializer: Initializer = "small_heads",
        torso: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_count("action_dim", action_dim)
        check_choice("scale_function", scale_function, ("softplus", "exp"))
        check_positive("scale_gain", scale_gain)
        if torso is None:
            torso = ControlTorso(
                obs_dim,
                sizes,
                activation=activation,
                layer_norm=layer_norm,
                norm_every_layer=norm_every_layer,
                initializer=initializer,
            )
        self.torso = torso
        self.loc = nn.Linear(sizes[-1], action_dim)
        self.scale = nn.Linear(sizes[-1], action_dim)
        initialize_(self.loc, "loc", initializer)
        initialize_(self.scale, "scale", initializer)
        self.loc_activation = nn.Identity() if loc_activation is None else loc_activation
        self.scale_function = scale_function
        self.scale_gain = scale_gain
        self.init_scale = init_scale
        self.min_scale = min_scale
        self.max_scale = max_scale
        self._log_range = log_scale_range(init_scale, min_scale, max_scale)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """``loc`` and ``scale``, ``[*B, D]`` each, for observations ``[*B, obs_dim]``."""
        features = self.torso(observation)
        return self.loc_activation(self.loc(features)), self._positive(self.scale(features))

    def _positive(self, x: Tensor) -> Tensor:
        x = x if self.scale_gain == 1.0 else self.scale_gain * x
        if self.scale_function == "exp":
            # Cut off before the exponential, whose gradient may not be finite behind it.
            return self.init_scale * x.clamp(*self._log_range).exp()
        scale = nn.functional.softplus(x) * (self.init_scale / math.log(2)) + self.min_scale
        return scale if self.max_scale is None else scale.clamp_max(self.max_scale)


class CholeskyPolicy(GaussianPolicy):
    r"""Mean and Cholesky factor of the covariance of a Gaussian over raw actions.

    The diagonal of the factor is :math:`\sigma` of :class:`GaussianPolicy`; what is below is
    :math:`\sigma_i W_L h`, and near zero at first.

    Args:
        obs_dim (int): size of the observation.
        action_dim (int): number of action dimensions ``D``.
        sizes (sequence of int): sizes of the torso's layers.

    Keyword Args:
        initializer (str): of torso and heads, see :class:`GaussianPolicy`.
        **settings: as in :class:`GaussianPolicy`.

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
        initializer: Initializer = "small_heads",
        **settings: Any,
    ) -> None:
        super().__init__(obs_dim, action_dim, sizes, initializer=initializer, **settings)
        below = nn.Linear(sizes[-1], action_dim * action_dim)
        self.below = initialize_(below, "loc", initializer)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """``loc`` ``[*B, D]`` and ``scale_tril`` ``[*B, D, D]``."""
        features = self.torso(observation)
        scale = self._positive(self.scale(features)).unsqueeze(-1)
        below = self.below(features).unflatten(-1, (scale.shape[-2], -1)).tril(-1)
        identity = torch.eye(scale.shape[-2], dtype=scale.dtype, device=scale.device)
        return self.loc_activation(self.loc(features)), scale * (below + identity)


class PartedPolicy(nn.Module):
    """Parameters of several distributions, from hidden layers that they share.

    Args:
        torso (nn.Module): hidden layers, for an observation ``[*B, O]``.
        heads (mapping): by the name of a part, layers that make one tensor or several of what the
            torso returns.

    Examples:
        >>> heads = {"arm": nn.Linear(64, 2), "tool": nn.Linear(64, 3)}
        >>> policy = PartedPolicy(ControlTorso(3, (64,)), heads)
        >>> [parameters.shape for parameters in policy(torch.randn(5, 3))]
        [torch.Size([5, 2]), torch.Size([5, 3])]
    """

    def __init__(self, torso: nn.Module, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.torso = torso
        self.heads = nn.ModuleList(heads.values())  # a ModuleDict does not take every name

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        """What the heads return, in their order."""
        features = self.torso(observation)
        outputs = (head(features) for head in self.heads)
        return tuple(x for out in outputs for x in (out if isinstance(out, tuple) else (out,)))


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
        activation (str): see :class:`ControlTorso`, as the next three.
        layer_norm (bool): of the torso.
        norm_every_layer (bool): of the torso.
        initializer (str): of torso and head.

    Examples:
        >>> critic = StateActionCritic(3, 2, (64, 64))
        >>> observation, action = torch.randn(5, 3), torch.randn(20, 5, 2)
        >>> critic(observation.expand(20, 5, 3), action).shape
        torch.Size([20, 5, 1])
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        sizes: Sequence[int],
        *,
        out_features: int = 1,
        activation: Activation = "elu",
        layer_norm: bool = True,
        norm_every_layer: bool = False,
        initializer: Initializer = "small_heads",
    ) -> None:
        super().__init__()
        check_count("obs_dim", obs_dim)
        check_count("action_dim", action_dim)
        check_count("out_features", out_features)
        self.out_features = out_features
        self.obs_dim = obs_dim
        self.torso = ControlTorso(
            obs_dim + action_dim,
            sizes,
            activation=activation,
            layer_norm=layer_norm,
            norm_every_layer=norm_every_layer,
            initializer=initializer,
        )
        head = nn.Linear(self.torso.out_features, out_features)
        self.head = initialize_(head, "value", initializer)

    def forward(self, observation: Tensor, *parts: Tensor) -> Tensor:
        """Outputs for observations and actions.

        Args:
            observation (Tensor): ``[*B, obs_dim]``.
            *parts (Tensor): the action ``[*B, D]``, or several parts of it, discrete ones one-hot.

        Returns:
            ``[*B, out_features]``.
        """
        parts = tuple(part.to(observation.dtype) for part in parts)
        action = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
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
