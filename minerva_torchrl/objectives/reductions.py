"""Means and extremes over the positions of a batch that count, with static shapes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "explained_variance",
    "masked_extreme",
    "masked_mean",
    "masked_means",
    "masked_std",
    "weighted",
    "weights_kl",
]


def masked_mean(x: Tensor, mask: Tensor | None, weights: Tensor | None = None) -> Tensor:
    r"""Weighted mean over the positions where ``mask`` holds; zero when it holds nowhere.

    :math:`\sum_b m_b w_b x_b / \sum_b m_b w_b`. Masked positions may hold anything, NaN included.

    Args:
        x (Tensor): ``[*B]``.
        mask (Tensor, optional): boolean ``[*B]``; ``None`` keeps everything.
        weights (Tensor, optional): non-negative ``[*B]``; ``None`` means ones.

    Returns:
        A 0-d tensor.

    Examples:
        >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    # eq: masked-mean
    if weights is None:
        if mask is None:
            return x.mean()
        return torch.where(mask, x, 0.0).sum() / mask.sum().clamp_min(1)
    weights = weights.to(x.dtype)
    if mask is not None:
        x = torch.where(mask, x, 0.0)
        weights = torch.where(mask, weights, 0.0)
    total = weights.sum()
    return (weights * x).sum() / torch.where(total > 0, total, 1.0)


def masked_means(values: dict[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """Means of several ``[*B]`` where ``mask`` ``[*B]`` holds, 0-d, in one go."""
    stacked = torch.stack(list(values.values()))
    if mask is None:
        means = stacked.flatten(1).mean(1)
    else:
        means = torch.where(mask, stacked, 0.0).flatten(1).sum(1) / mask.sum().clamp_min(1)
    return dict(zip(values, means.unbind(), strict=True))


def masked_std(x: Tensor, mask: Tensor | None) -> Tensor:
    """Population standard deviation over the positions where ``mask`` holds."""
    # eq: masked-std
    mean = masked_mean(x, mask)
    return masked_mean((x - mean).square(), mask).sqrt()


def explained_variance(target: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    r""":math:`1 - \mathrm{Var}[R - V] / (\mathrm{Var}[R] + 10^{-8})` where ``mask`` holds, 0-d."""
    # eq: explained-variance
    residual, total = masked_std(target - value, mask), masked_std(target, mask)
    return 1 - residual.square() / (total.square() + 1e-8)


def masked_extreme(x: Tensor, mask: Tensor | None, which: Literal["min", "max"]) -> Tensor:
    """Smallest or largest entry of ``x`` ``[*B, N]`` where ``mask`` ``[*B]`` holds, else zero."""
    if mask is None:
        return x.amin() if which == "min" else x.amax()
    x = torch.where(mask.unsqueeze(-1), x, torch.inf if which == "min" else -torch.inf)
    return torch.where(mask.any(), x.amin() if which == "min" else x.amax(), 0.0)


def weighted(weight: Tensor, x: Tensor) -> Tensor:
    """Their product; what has no weight may be anything, such as a likelihood of zero."""
    return weight * torch.where(weight > 0, x, 0.0)


def weights_kl(weights: Tensor, prior: Tensor) -> Tensor:
    """Sum of ``w log(w / p)``, 0-d, with ``p`` positive wherever ``w`` is."""
    ratio = torch.where(weights > 0, weights / prior, 1.0)
    return (weights * ratio.log()).sum()
