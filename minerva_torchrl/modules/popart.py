"""PopArt: a value head that normalises its targets without changing its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from minerva_torchrl.modules.clip_ppo import DirectClipPPOLoss
from minerva_torchrl.objectives.vmpo import VMPOLoss

__all__ = [
    "PopArtClipPPOLoss",
    "PopArtHead",
    "PopArtVMPOLoss",
    "popart_heads",
    "popart_normalize",
    "popart_scale",
    "popart_update_",
]


class PopArtHead(nn.Linear):
    r"""Linear value head that learns on a normalised scale and answers in real units.

    .. math::
        n = W x + b, \qquad V = \sigma n + \mu

    :math:`\mu` and :math:`\sigma` follow the targets. :meth:`update` moves them towards the mean
    and the variance of a batch of targets with step size :math:`\beta`, and changes :math:`W` and
    :math:`b` such that every :math:`V` stays what it was:

    .. math::
        \mu' &= \mu + \beta (m - \mu), \qquad
        \sigma'^2 = (1 - \beta)\, \sigma^2 + \beta\, v + \beta (1 - \beta) (m - \mu)^2 \\
        W' &= \tfrac{\sigma}{\sigma'} W, \qquad b' = \tfrac{\sigma b + \mu - \mu'}{\sigma'}

    where :math:`m` and :math:`v` are the mean and the population variance of the batch. This is the
    moving average of the first two moments, :math:`\nu' = \nu + \beta (\overline{R^2} - \nu)` and
    :math:`\sigma^2 = \nu - \mu^2`, without the subtraction that loses precision when the mean is
    large. With ``debias`` the step size is :math:`\beta_t = \beta / (1 - (1 - \beta)^t)` at update
    ``t``, which takes the initial values out of the average: the first update adopts the statistics
    of its batch.

    A critic that ends in this head writes ``state_value`` in real units, so that GAE and other
    estimators work unchanged. The regression belongs on the normalised scale, where its gradient
    does not grow with the returns: compare :meth:`normalize` of the value with :meth:`normalize` of
    the target, which for a squared error is the error in real units divided by :math:`\sigma^2`.
    :class:`PopArtClipPPOLoss` does so for PPO and :class:`PopArtVMPOLoss` for V-MPO; other losses
    take the error in real units. In a loss of one's own with a ``critic_network`` use
    :func:`popart_normalize`; for a loss that cannot be changed, :func:`popart_scale`. Update once
    per rollout, after the targets were computed and before the first step on them, with
    :func:`popart_update_`.

    References: van Hasselt et al. 2016, https://arxiv.org/abs/1602.07714; Hessel et al. 2018,
    https://arxiv.org/abs/1809.04474. The bounds are those of V-MPO,
    https://arxiv.org/abs/1909.12238.

    Args:
        in_features (int): size of the input.
        out_features (int): number of values, each with its own statistics. Defaults to 1.

    Keyword Args:
        step_size (float): :math:`\beta`, in (0, 1]. Defaults to 1e-4.
        min_scale (float): smallest :math:`\sigma`. Defaults to 1e-2.
        max_scale (float): largest :math:`\sigma`. Defaults to 1e6.
        debias (bool): whether to correct the step size for the start. Defaults to ``True``.
        device (torch.device, optional): device of the parameters.
        dtype (torch.dtype, optional): type of the parameters.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> head = PopArtHead(4)
        >>> features = torch.randn(8, 4)
        >>> before = head(features)
        >>> targets = 100.0 + 20.0 * torch.randn(8, 1)
        >>> head.update(targets)
        >>> torch.allclose(before, head(features), atol=1e-4)
        True
        >>> round(float(head.normalize(targets).std(correction=0)), 3)
        1.0
    """

    normalizes_targets = True  # for losses, which must do so as well
    mean: Tensor
    variance: Tensor
    debias_weight: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int = 1,
        *,
        step_size: float = 1e-4,
        min_scale: float = 1e-2,
        max_scale: float = 1e6,
        debias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0.0 < step_size <= 1.0:
            raise ValueError(f"step_size must be in (0, 1], got {step_size}.")
        if not 0.0 < min_scale <= max_scale:
            raise ValueError(
                "min_scale must be positive and not above max_scale, "
                f"got min_scale={min_scale} and max_scale={max_scale}."
            )
        super().__init__(in_features, out_features, device=device, dtype=dtype)
        self.step_size = step_size
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.debias = debias
        like: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.register_buffer("mean", torch.zeros(out_features, **like))
        self.register_buffer("variance", torch.ones(out_features, **like))
        # 1 - (1 - step_size)^t: the share of the average that comes from targets.
        self.register_buffer("debias_weight", torch.zeros((), **like))

    @property
    def scale(self) -> Tensor:
        """Standard deviation of the targets within its bounds, ``[out_features]``."""
        return self.variance.sqrt().clamp(self.min_scale, self.max_scale)

    def forward(self, input: Tensor) -> Tensor:
        """Values in real units.

        Args:
            input (Tensor): features, ``[*B, in_features]``.

        Returns:
            Values, ``[*B, out_features]``.
        """
        return super().forward(input) * self.scale + self.mean

    def normalize(self, value: Tensor) -> Tensor:
        r""":math:`(x - \mu) / \sigma` for values or targets ``[*B, out_features]``."""
        return (value - self.mean) / self.scale

    @torch.no_grad()
    def update(self, targets: Tensor, mask: Tensor | None = None) -> None:
        """Move the statistics towards the targets and keep the outputs.

        There is no host synchronisation. A batch without any valid target changes nothing; a target
        that is not finite is not valid, nor is a batch whose variance is too large for a number.

        Args:
            targets (Tensor): value targets in real units, ``[*B, out_features]``.
            mask (Tensor, optional): true where a target counts, ``[*B]`` or ``[*B, 1]``.
        """
        batch_mean, batch_variance, any_valid = _batch_moments(targets, mask, self.out_features)
        step_size = self.step_size * any_valid.to(targets.dtype)
        if self.debias:
            self.debias_weight.lerp_(torch.ones_like(self.debias_weight), step_size)
            # The denominator is zero only if no target was ever valid, and then so is the step.
            step_size = step_size / self.debias_weight.clamp_min(self.step_size)
        old_mean, old_scale = self.mean.clone(), self.scale
        deviation = batch_mean - self.mean
        self.mean.add_(step_size * deviation)
        self.variance.mul_(1.0 - step_size).add_(
            step_size * (batch_variance + (1.0 - step_size) * deviation.square())
        )
        new_scale = self.scale
        self.weight.mul_((old_scale / new_scale).unsqueeze(-1))
        self.bias.copy_((old_scale * self.bias + old_mean - self.mean) / new_scale)

    def extra_repr(self) -> str:
        """Settings shown by ``print``."""
        return (
            f"{super().extra_repr()}, step_size={self.step_size}, min_scale={self.min_scale}, "
            f"max_scale={self.max_scale}, debias={self.debias}"
        )


def _batch_moments(
    targets: Tensor, mask: Tensor | None, out_features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and population variance per output, and whether any target is valid."""
    if targets.shape[-1:] != (out_features,):
        raise ValueError(
            f"targets must have the {out_features} outputs of the head as last dimension, "
            f"got shape {tuple(targets.shape)}."
        )
    batch_shape = targets.shape[:-1]
    if mask is None:
        mask = torch.ones(batch_shape, dtype=torch.bool, device=targets.device)
    if mask.shape == (*batch_shape, 1):
        mask = mask.squeeze(-1)
    if mask.shape != batch_shape:
        raise ValueError(
            f"mask must have the batch shape {tuple(batch_shape)} of targets, with or without a "
            f"last dimension of 1; got {tuple(mask.shape)}."
        )
    rows = targets.detach().reshape(-1, out_features)
    valid = mask.bool().reshape(-1, 1) & rows.isfinite().all(-1, keepdim=True)
    count = valid.sum().clamp_min(1)
    # Selected, not multiplied: what a masked target contains does not matter.
    mean = torch.where(valid, rows, 0.0).sum(0) / count
    variance = torch.where(valid, (rows - mean).square(), 0.0).sum(0) / count
    fits = variance.isfinite().all()
    return torch.where(fits, mean, 0.0), torch.where(fits, variance, 0.0), valid.any() & fits


def popart_heads(critic_network: nn.Module) -> dict[str, PopArtHead]:
    """The PopArt heads of a critic by the names of the modules."""
    return {
        name: module
        for name, module in critic_network.named_modules()
        if isinstance(module, PopArtHead)
    }


@contextmanager
def _popart_head(loss: LossModule) -> Iterator[PopArtHead]:
    """The head inside the loss's critic, with the parameters that the loss trains."""
    critic = getattr(loss, "critic_network", None)
    heads = [] if critic is None else list(popart_heads(critic).items())
    if len(heads) != 1:
        raise ValueError(
            "loss must have a critic_network with exactly one PopArtHead, "
            f"got {type(loss).__name__} with {len(heads)}."
        )
    name, head = heads[0]
    if loss.critic_network_params is None:  # built with functional=False
        yield head
        return
    with loss.critic_network_params.get(tuple(name.split("."))).to_module(head):
        yield head


def popart_update_(loss: LossModule, targets: Tensor, mask: Tensor | None = None) -> None:
    """Update the PopArt head of a loss's critic, in place, and keep the outputs.

    A loss takes the parameters out of its networks (they live in ``loss.critic_network_params``),
    so that the head cannot be updated directly through ``loss.critic_network``. This function
    updates the parameters that the loss trains, which are also those of the module that the loss
    was built from. Call it once per rollout, between the value estimator and the first epoch::

        rollout = estimate_advantage(loss, rollout)
        popart_update_(loss, rollout["value_target"])

    Args:
        loss (LossModule): a loss with a ``critic_network`` that contains one :class:`PopArtHead`.
        targets (Tensor): value targets in real units, ``[*B, out_features]``.
        mask (Tensor, optional): true where a target counts, ``[*B]`` or ``[*B, 1]``.

    Examples:
        See :class:`PopArtClipPPOLoss`.
    """
    with _popart_head(loss) as head:
        head.update(targets, mask)


def popart_scale(loss: LossModule) -> Tensor:
    r"""The scale :math:`\sigma` of the critic's PopArt head, ``[out_features]``.

    A loss that knows nothing of PopArt and whose critic term is a squared error in real units has
    the right gradient once that term is divided by :math:`\sigma^2`::

        total = losses["loss_actor"] + losses["loss_critic"] / popart_scale(loss).square()

    Args:
        loss (LossModule): a loss with a ``critic_network`` that contains one :class:`PopArtHead`.

    Returns:
        A new tensor: later updates do not change it.
    """
    with _popart_head(loss) as head:
        return head.scale


def popart_normalize(loss: LossModule, *values: Tensor) -> tuple[Tensor, ...]:
    r"""Values or targets on the scale of the critic's PopArt head, :math:`(x - \mu) / \sigma`.

    For the critic term of a loss: the distance between the normalised value and the normalised
    target is what the head should descend.

    Args:
        loss (LossModule): a loss with a ``critic_network`` that contains one :class:`PopArtHead`.
        *values (Tensor): values or targets in real units, ``[*B, out_features]`` each. Gradients
            flow through.

    Returns:
        The normalised tensors, in the same order.

    Examples:
        See :class:`PopArtClipPPOLoss`.
    """
    with _popart_head(loss) as head:
        return tuple(head.normalize(value) for value in values)


class _NormalizedCritic:
    """The part of a loss that takes the error of its critic on the scale of a PopArt head."""

    normalizes_targets = True

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        popart_scale(self)  # refuses a critic without a head now rather than in the first step

    def _critic_loss_inputs(
        self: Any, target_return: Tensor, state_value: Tensor, old_state_value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        target_return, state_value = popart_normalize(self, target_return, state_value)
        if old_state_value is not None:
            (old_state_value,) = popart_normalize(self, old_state_value)
        return target_return, state_value, old_state_value


class PopArtClipPPOLoss(_NormalizedCritic, DirectClipPPOLoss):
    r"""Clipped PPO loss whose value error is taken on the scale of a :class:`PopArtHead`.

    Value, target and stored value are all turned into :math:`(x - \mu) / \sigma` before the value
    loss, so the clipping radius of the value is in units of :math:`\sigma` as well. Everything that
    the loss reads and writes stays in real units.

    Takes the arguments of :class:`~torchrl.objectives.ClipPPOLoss`; the critic must contain exactly
    one :class:`PopArtHead`.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import IndependentNormal, NormalParamExtractor, ProbabilisticActor
        >>> from minerva_torchrl.objectives.ppo import estimate_advantage, make_ppo_loss
        >>> policy = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ...     return_log_prob=True,
        ... )
        >>> critic = TensorDictModule(
        ...     nn.Sequential(nn.Linear(3, 8), nn.Tanh(), PopArtHead(8, step_size=0.1)),
        ...     in_keys=["observation"],
        ...     out_keys=["state_value"],
        ... )
        >>> loss = make_ppo_loss(actor, critic, loss_class=PopArtClipPPOLoss)
        >>> end = torch.zeros(2, 8, 1, dtype=torch.bool)
        >>> rollout = TensorDict(
        ...     {
        ...         "observation": torch.randn(2, 8, 3),
        ...         "next": {
        ...             "observation": torch.randn(2, 8, 3),
        ...             "reward": 1000.0 * torch.randn(2, 8, 1),
        ...             "done": end,
        ...             "terminated": end,
        ...         },
        ...     },
        ...     batch_size=[2, 8],
        ... )
        >>> with torch.no_grad():
        ...     rollout = actor(rollout)
        >>> rollout = estimate_advantage(loss, rollout)
        >>> popart_update_(loss, rollout["value_target"])
        >>> (target,) = popart_normalize(loss, rollout["value_target"])
        >>> round(float(target.std(correction=0)), 3)
        1.0
        >>> losses = loss(rollout.reshape(-1))
        >>> bool(losses["loss_critic"] < 10.0)
        True
    """


class PopArtVMPOLoss(_NormalizedCritic, VMPOLoss):
    r"""V-MPO loss whose value error is taken on the scale of a :class:`PopArtHead`.

    As with :class:`PopArtClipPPOLoss`, ``clip_value`` is in units of :math:`\sigma`.

    Takes the arguments of :class:`~minerva_torchrl.objectives.VMPOLoss`; the critic must contain
    exactly one :class:`PopArtHead`.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import IndependentNormal, NormalParamExtractor, ProbabilisticActor
        >>> policy = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ... )
        >>> critic = TensorDictModule(
        ...     PopArtHead(3, step_size=0.1), in_keys=["observation"], out_keys=["state_value"]
        ... )
        >>> loss = PopArtVMPOLoss(actor, critic)
        >>> popart_update_(loss, 1000.0 * torch.randn(64, 1))
        >>> bool(popart_scale(loss) > 500.0)
        True
    """
