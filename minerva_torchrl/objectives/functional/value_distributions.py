"""Distributions of returns: projections of targets, and losses of critics that predict them.

Notation: ``*B`` any number of dimensions, ``K`` atoms, quantiles or components of a prediction,
``M`` atoms or samples of a target.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "categorical_projection",
    "gaussian_mixture_nll",
    "hl_gauss",
    "quantile_huber_loss",
    "symexp",
    "symlog",
    "two_hot",
    "weighted_quantile_huber_loss",
]

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def symlog(x: Tensor) -> Tensor:
    r""":math:`\mathrm{sign}(x) \log(1 + |x|)`: a logarithm for values of any sign and size.

    From DreamerV3, https://arxiv.org/abs/2301.04104.

    Args:
        x (Tensor): any shape.

    Returns:
        A tensor of the same shape.

    Examples:
        >>> symlog(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.6931,  0.0000,  0.6931])
    """
    # eq: symlog
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    r""":math:`\mathrm{sign}(x) (\exp |x| - 1)`, the inverse of :func:`symlog`.

    From DreamerV3, https://arxiv.org/abs/2301.04104.

    Args:
        x (Tensor): any shape.

    Returns:
        A tensor of the same shape.

    Examples:
        >>> symexp(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-1.7183,  0.0000,  1.7183])
    """
    # eq: symexp
    return x.sign() * x.abs().expm1()


def categorical_projection(values: Tensor, probs: Tensor, support: Tensor) -> Tensor:
    r"""Project mass at any values onto the atoms of a support (Cramér or l2 projection).

    From C51, https://arxiv.org/abs/1707.06887.

    The mass of a value between two atoms is split between them such that the mean is kept,

    .. math::
        p_k = \sum_j q_j \max\Big(0, \min\Big(
            \frac{v_j - z_{k-1}}{z_k - z_{k-1}}, \frac{z_{k+1} - v_j}{z_{k+1} - z_k} \Big)\Big)

    and that of a value outside of the support goes to the nearest atom.

    Args:
        values (Tensor): where the mass is, ``[*B, M]``.
        probs (Tensor): the mass, ``[*B, M]``, differentiable.
        support (Tensor): the atoms, ``[K]``, at least two, increasing; they need not be evenly
            spaced.

    Returns:
        The mass at the atoms, ``[*B, K]``, of the same sum.

    Examples:
        >>> support = torch.tensor([0.0, 1.0, 2.0])
        >>> categorical_projection(torch.tensor([0.25, 5.0]), torch.tensor([0.4, 0.6]), support)
        tensor([0.3000, 0.1000, 0.6000])
    """
    values, probs = torch.broadcast_tensors(values, probs)
    # eq: categorical-projection
    values = values.clamp(support[0], support[-1])
    below = torch.searchsorted(support, values.detach().contiguous(), right=True) - 1
    below = below.clamp(0, support.shape[0] - 2)
    low, high = support[below], support[below + 1]
    share = (values - low) / (high - low)
    lower, upper = probs * (1 - share), probs * share
    projected = torch.zeros(
        *values.shape[:-1], support.shape[0], dtype=upper.dtype, device=upper.device
    )
    return projected.scatter_add(-1, below, lower).scatter_add(-1, below + 1, upper)


def two_hot(value: Tensor, support: Tensor) -> Tensor:
    """Probabilities of the two atoms around a value, whose mean is the value.

    As in DreamerV3, https://arxiv.org/abs/2301.04104.

    Args:
        value (Tensor): ``[*B]``. One outside of the support counts as its nearest atom.
        support (Tensor): the atoms, ``[K]``, at least two, increasing.

    Returns:
        The probabilities, ``[*B, K]``.

    Examples:
        >>> two_hot(torch.tensor([0.25, 2.0]), torch.tensor([0.0, 1.0, 2.0]))
        tensor([[0.7500, 0.2500, 0.0000],
                [0.0000, 0.0000, 1.0000]])
    """
    # eq: two-hot
    return categorical_projection(value.unsqueeze(-1), torch.ones_like(value)[..., None], support)


def hl_gauss(value: Tensor, support: Tensor, sigma: Tensor | float) -> Tensor:
    r"""Mass of a Gaussian around a value in the bins of a support (https://arxiv.org/abs/2403.03950).

    .. math::
        p_k \propto \Phi\Big(\frac{e_{k+1} - v}{\sigma}\Big) - \Phi\Big(\frac{e_k - v}{\sigma}\Big)

    The edges :math:`e` are halfway between the centres of the bins; the outer ones are as far from
    their centre as the inner edge of the same bin.

    Args:
        value (Tensor): ``[*B]``.
        support (Tensor): centres of the bins, ``[K]``, at least two, increasing.
        sigma (Tensor or float): standard deviation, in the units of the value, scalar.

    Returns:
        The probabilities, ``[*B, K]``, which sum to one for a value outside of the bins, too.

    Examples:
        >>> hl_gauss(torch.tensor(1.0), torch.tensor([0.0, 1.0, 2.0]), sigma=0.5)
        tensor([0.1577, 0.6845, 0.1577])
    """
    # eq: hl-gauss
    inner = (support[1:] + support[:-1]) / 2
    first, last = 2 * support[:1] - inner[:1], 2 * support[-1:] - inner[-1:]
    edges = (torch.cat([first, inner, last]) - value.unsqueeze(-1)) / sigma
    low, high = edges[..., :-1], edges[..., 1:]
    # In the left tail, where a difference of probabilities is exact.
    low, high = torch.where(low > 0, -high, low), torch.where(low > 0, -low, high)
    log_high = torch.special.log_ndtr(high)
    log_mass = log_high + (-torch.expm1(torch.special.log_ndtr(low) - log_high)).log()
    return log_mass.softmax(-1)


def quantile_huber_loss(quantiles: Tensor, target: Tensor, kappa: float = 1.0) -> Tensor:
    r"""Quantile regression of a sampled distribution (https://arxiv.org/abs/1710.10044).

    .. math::
        L = \sum_{i=1}^K \frac1M \sum_{j=1}^M
            \big| \tau_i - 1[u_{ij} < 0] \big| \frac{H_\kappa(u_{ij})}{\kappa}, \qquad
        u_{ij} = y_j - \theta_i, \quad \tau_i = \frac{2i - 1}{2K}

    Args:
        quantiles (Tensor): predictions :math:`\theta`, ``[*B, K]``, differentiable.
        target (Tensor): atoms or samples :math:`y`, which count alike, ``[*B, M]``.
        kappa (float): where Huber's loss :math:`H` becomes linear; 0 is the absolute error.

    Returns:
        The loss, ``[*B]``.

    Examples:
        >>> quantile_huber_loss(torch.tensor([0.0, 4.0]), torch.tensor([2.0]))
        tensor(0.7500)
    """
    # eq: quantile-huber
    weights = torch.full_like(target, 1 / target.shape[-1])
    return weighted_quantile_huber_loss(quantiles, target, weights, kappa)


def weighted_quantile_huber_loss(
    quantiles: Tensor, target: Tensor, weights: Tensor, kappa: float = 1.0
) -> Tensor:
    """:func:`quantile_huber_loss` for targets of different weights.

    From QR-DQN, https://arxiv.org/abs/1710.10044.

    Args:
        quantiles (Tensor): predictions, ``[*B, K]``, differentiable.
        target (Tensor): atoms, ``[*B, M]``.
        weights (Tensor): their probabilities, ``[*B, M]``.
        kappa (float): where Huber's loss becomes linear; 0 is the absolute error.

    Returns:
        The loss, ``[*B]``.

    Examples:
        >>> target, weights = torch.tensor([2.0, 9.0]), torch.tensor([1.0, 0.0])
        >>> weighted_quantile_huber_loss(torch.tensor([0.0, 4.0]), target, weights)
        tensor(0.7500)
    """
    # eq: quantile-huber
    num_quantiles = quantiles.shape[-1]
    steps = torch.arange(num_quantiles, dtype=quantiles.dtype, device=quantiles.device)
    fractions = ((2 * steps + 1) / (2 * num_quantiles)).unsqueeze(-1)
    error = target.unsqueeze(-2) - quantiles.unsqueeze(-1)  # [*B, K, M]
    if kappa > 0:
        near = error.clamp(-kappa, kappa)
        distance = near * (error - 0.5 * near) / kappa
    else:
        distance = error.abs()
    slope = torch.where(error < 0, 1 - fractions, fractions)
    return ((slope * distance).sum(-2) * weights).sum(-1)


def gaussian_mixture_nll(logits: Tensor, loc: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    r"""Negative log-likelihood of samples under a mixture of Gaussians.

    D4PG tried such a critic, https://arxiv.org/abs/1804.08617.

    .. math::
        L = -\frac1M \sum_{j=1}^M \log \sum_{k=1}^K
            \mathrm{softmax}_k(l)\, \mathcal N(y_j; \mu_k, \sigma_k)

    Args:
        logits (Tensor): of the components, ``[*B, K]``; they need not be normalised.
        loc (Tensor): means, ``[*B, K]``.
        scale (Tensor): standard deviations, ``[*B, K]``, positive.
        target (Tensor): samples, ``[*B, M]``.

    Returns:
        The loss, ``[*B]``, differentiable by all arguments.

    Examples:
        >>> one, zero = torch.ones(1), torch.zeros(1)
        >>> gaussian_mixture_nll(zero, zero, one, torch.tensor([0.0, 0.0]))
        tensor(0.9189)
    """
    # eq: mixture-nll
    error = (target.unsqueeze(-2) - loc.unsqueeze(-1)) / scale.unsqueeze(-1)  # [*B, K, M]
    log_weight = logits.log_softmax(-1) - scale.log() - _HALF_LOG_TWO_PI
    return -(log_weight.unsqueeze(-1) - 0.5 * error.square()).logsumexp(-2).mean(-1)
