"""The M-step: likelihoods and divergences of policies, and the two sides of a constraint."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "GaussianMoments",
    "categorical_kl",
    "decoupled_gaussian_kl",
    "gaussian_entropy",
    "lagrangian_losses",
    "multivariate_gaussian_kl",
    "weighted_gaussian_cross_entropy",
    "weighted_moments",
    "weighted_multivariate_gaussian_cross_entropy",
    "weighted_multivariate_moments",
]

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def gaussian_entropy(scale: Tensor) -> Tensor:
    r""":math:`\sum_j \tfrac12 + \tfrac12 \log 2\pi + \log \sigma_j`, ``[*B]`` for ``[*B, D]``.

    Args:
        scale (Tensor): standard deviations, ``[*B, D]``.

    Returns:
        The entropy of each state, ``[*B]``.

    Examples:
        >>> gaussian_entropy(torch.ones(2))
        tensor(2.8379)
    """
    # eq: gaussian-entropy
    return (0.5 + _HALF_LOG_TWO_PI + scale.log()).sum(-1)


class GaussianMoments(NamedTuple):
    """Weighted moments of standard-normal draws, all that an M-step needs of its samples."""

    total: Tensor
    """Sum of the weights, ``[*B, 1]``."""
    first: Tensor
    """Weighted sum of the draws, ``[*B, D]``."""
    second: Tensor
    """Weighted sum of their squares, ``[*B, D]``."""


def weighted_moments(noise: Tensor, weights: Tensor) -> GaussianMoments:
    r"""Moments :math:`\sum_i w_i`, :math:`\sum_i w_i z_i` and :math:`\sum_i w_i z_i^2`.

    Args:
        noise (Tensor): the draws ``z`` behind the sampled actions
            :math:`a = \mu' + \sigma' z`, ``[N, *B, D]``.
        weights (Tensor): ``[N, *B]``.

    Returns:
        The moments over the first dimension.

    Examples:
        >>> noise, weights = torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 0.5])
        >>> weighted_moments(noise, weights)
        GaussianMoments(total=tensor([1.]), first=tensor([2.]), second=tensor([5.]))
    """
    # eq: weighted-moments
    weighted = weights.unsqueeze(-1) * noise
    return GaussianMoments(
        total=weights.sum(0).unsqueeze(-1),
        first=weighted.sum(0),
        second=(weighted * noise).sum(0),
    )


def weighted_gaussian_cross_entropy(
    loc: Tensor, scale: Tensor, old_loc: Tensor, old_scale: Tensor, moments: GaussianMoments
) -> Tensor:
    r"""Weighted negative log-likelihood of the sampled actions under a diagonal Gaussian.

    The M-step of MPO without its constraints, https://arxiv.org/abs/1806.06920.

    .. math::
        -\sum_i w_i \log \mathcal N(\mu' + \sigma' z_i; \mu, \sigma)
        = \sum_j \tfrac{r_j^2}{2} (m_{2j} - 2 d_j m_{1j} + m_0 d_j^2)
          + m_0 (\log \sigma_j + \tfrac12 \log 2\pi)

    with :math:`d = (\mu - \mu') / \sigma'`, :math:`r = \sigma' / \sigma` and the moments ``m`` of
    :func:`weighted_moments`: ``[*B, D]`` work instead of ``[N, *B, D]``.

    Args:
        loc (Tensor): means ``mu`` of the policy that is scored, ``[*B, D]``.
        scale (Tensor): its standard deviations, ``[*B, D]``.
        old_loc (Tensor): means of the policy that was sampled, ``[*B, D]``.
        old_scale (Tensor): its standard deviations, ``[*B, D]``.
        moments (GaussianMoments): of the draws.

    Returns:
        The cross-entropy of each state, ``[*B]``.

    Examples:
        >>> noise, weights = torch.randn(20, 4, 2), torch.rand(20, 4)
        >>> loc, scale = torch.zeros(4, 2), torch.ones(4, 2)
        >>> by_moments = weighted_gaussian_cross_entropy(
        ...     loc + 0.1, scale, loc, scale, weighted_moments(noise, weights)
        ... )
        >>> log_prob = torch.distributions.Normal(loc + 0.1, scale).log_prob(noise).sum(-1)
        >>> torch.testing.assert_close(by_moments, -(weights * log_prob).sum(0))
    """
    # eq: gaussian-cross-entropy
    shift = (loc - old_loc) / old_scale
    spread = moments.second - shift * (2 * moments.first - moments.total * shift)
    squared_error = (old_scale / scale).square() * spread
    return (0.5 * squared_error + moments.total * (scale.log() + _HALF_LOG_TWO_PI)).sum(-1)


def decoupled_gaussian_kl(
    loc: Tensor, scale: Tensor, old_loc: Tensor, old_scale: Tensor
) -> tuple[Tensor, Tensor]:
    r"""KL divergences from the old Gaussian when only its mean, or only its scale, has moved.

    The decoupled constraints of https://arxiv.org/abs/1812.02256.

    .. math::
        KL_\mu = \frac{(\mu - \mu')^2}{2 \sigma'^2}, \qquad
        KL_\sigma = \tfrac12 \Big(\frac{\sigma'^2}{\sigma^2} - 1\Big)
            - \log \frac{\sigma'}{\sigma}

    Both are :math:`KL(\text{old} \| \text{new})`, per dimension and without any reduction.

    Args:
        loc (Tensor): means of the new policy, ``[*B, D]``.
        scale (Tensor): its standard deviations, ``[*B, D]``.
        old_loc (Tensor): means of the old policy, ``[*B, D]``.
        old_scale (Tensor): its standard deviations, ``[*B, D]``.

    Returns:
        ``kl_mean`` and ``kl_stddev``, each ``[*B, D]``.

    Examples:
        >>> kl_mean, kl_stddev = decoupled_gaussian_kl(
        ...     torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])
        ... )
        >>> kl_mean, kl_stddev
        (tensor([2.]), tensor([0.]))
    """
    # eq: kl-mean
    kl_mean = 0.5 * ((loc - old_loc) / old_scale).square()
    # eq: kl-stddev
    # expm1 keeps bounds as tight as 1e-6 meaningful in single precision.
    log_ratio = (old_scale / scale).log()
    kl_stddev = 0.5 * torch.expm1(2 * log_ratio) - log_ratio
    return kl_mean, kl_stddev


def multivariate_gaussian_kl(
    loc: Tensor, scale_tril: Tensor, old_loc: Tensor, old_scale_tril: Tensor
) -> tuple[Tensor, Tensor]:
    r"""KL divergences from the old Gaussian when only its mean, or only its covariance, has moved.

    The decoupled constraints of https://arxiv.org/abs/1812.02256.

    With :math:`\Sigma = L L^\top`, :math:`d = L'^{-1} (\mu - \mu')` and :math:`M = L^{-1} L'`

    .. math::
        KL_\mu = \tfrac12 \|d\|^2, \qquad
        KL_\Sigma = \tfrac12 \big( \|M\|_F^2 - D \big) - \sum_i \log M_{ii}

    Both are :math:`KL(\text{old} \| \text{new})`: that of the mean with the old covariance, that of
    the covariance with the old mean.

    Args:
        loc (Tensor): mean of the new policy, ``[*B, D]``.
        scale_tril (Tensor): Cholesky factor ``L`` of its covariance, ``[*B, D, D]``, lower
            triangular with a positive diagonal.
        old_loc (Tensor): mean of the old policy, ``[*B, D]``.
        old_scale_tril (Tensor): Cholesky factor of its covariance, ``[*B, D, D]``.

    Returns:
        ``kl_mean`` and ``kl_covariance``, each ``[*B]``.

    Examples:
        >>> kl_mean, kl_covariance = multivariate_gaussian_kl(
        ...     torch.tensor([2.0, 0.0]), torch.eye(2), torch.zeros(2), torch.eye(2)
        ... )
        >>> kl_mean, kl_covariance
        (tensor(2.), tensor(0.))
    """
    # eq: full-kl-mean
    kl_mean = 0.5 * _whitened(loc - old_loc, old_scale_tril).square().sum(-1)
    # eq: full-kl-covariance
    ratio = torch.linalg.solve_triangular(scale_tril, old_scale_tril, upper=False)
    # expm1 keeps bounds as tight as 1e-6 meaningful in single precision.
    log_ratio = ratio.diagonal(dim1=-2, dim2=-1).log()
    kl_covariance = (0.5 * torch.expm1(2 * log_ratio) - log_ratio).sum(-1)
    return kl_mean, kl_covariance + 0.5 * ratio.tril(-1).square().sum((-2, -1))


def weighted_multivariate_moments(noise: Tensor, weights: Tensor) -> GaussianMoments:
    r"""Moments :math:`\sum_i w_i`, :math:`\sum_i w_i z_i` and :math:`\sum_i w_i z_i z_i^\top`.

    Args:
        noise (Tensor): the draws ``z`` behind the sampled actions :math:`a = \mu' + L' z`,
            ``[*B, N, D]``.
        weights (Tensor): ``[*B, N]``.

    Returns:
        ``total`` ``[*B, 1]``, ``first`` ``[*B, D]`` and ``second`` ``[*B, D, D]``.

    Examples:
        >>> noise, weights = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0.5, 0.5])
        >>> weighted_multivariate_moments(noise, weights).second
        tensor([[0.5000, 0.0000],
                [0.0000, 2.0000]])
    """
    # eq: full-weighted-moments
    weighted = weights.unsqueeze(-1) * noise
    return GaussianMoments(
        total=weights.sum(-1, keepdim=True),
        first=weighted.sum(-2),
        second=weighted.mT @ noise,
    )


def weighted_multivariate_gaussian_cross_entropy(
    loc: Tensor,
    scale_tril: Tensor,
    old_loc: Tensor,
    old_scale_tril: Tensor,
    moments: GaussianMoments,
) -> Tensor:
    r"""Weighted negative log-likelihood of the sampled actions under a Gaussian.

    The M-step of MPO without its constraints, https://arxiv.org/abs/1806.06920.

    .. math::
        -\sum_i w_i \log \mathcal N(\mu' + L' z_i; \mu, L L^\top)
        = \tfrac12 \mathrm{tr} \big( M S M^\top \big)
          + m_0 \big( \sum_j \log L_{jj} + \tfrac D2 \log 2\pi \big)

    with :math:`M = L^{-1} L'`, :math:`d = L'^{-1} (\mu - \mu')` and
    :math:`S = m_2 - d m_1^\top - m_1 d^\top + m_0 d d^\top`.

    Args:
        loc (Tensor): mean of the policy that is scored, ``[*B, D]``.
        scale_tril (Tensor): Cholesky factor of its covariance, ``[*B, D, D]``.
        old_loc (Tensor): mean of the policy that was sampled, ``[*B, D]``.
        old_scale_tril (Tensor): Cholesky factor of its covariance, ``[*B, D, D]``.
        moments (GaussianMoments): of :func:`weighted_multivariate_moments`.

    Returns:
        The cross-entropy of each state, ``[*B]``.

    Examples:
        >>> noise, weights = torch.randn(4, 20, 2), torch.rand(4, 20)
        >>> loc, factor = torch.zeros(4, 2), torch.eye(2).expand(4, 2, 2)
        >>> by_moments = weighted_multivariate_gaussian_cross_entropy(
        ...     loc + 0.1, factor, loc, factor, weighted_multivariate_moments(noise, weights)
        ... )
        >>> log_prob = torch.distributions.Normal(0.1, 1.0).log_prob(noise).sum(-1)
        >>> torch.testing.assert_close(by_moments, -(weights * log_prob).sum(-1))
    """
    # eq: full-cross-entropy
    shift = _whitened(loc - old_loc, old_scale_tril)
    cross = shift.unsqueeze(-1) * moments.first.unsqueeze(-2)
    outer = moments.total.unsqueeze(-1) * shift.unsqueeze(-1) * shift.unsqueeze(-2)
    spread = moments.second - cross - cross.mT + outer
    ratio = torch.linalg.solve_triangular(scale_tril, old_scale_tril, upper=False)
    squared_error = ((ratio @ spread) * ratio).sum((-2, -1))
    log_scale = scale_tril.diagonal(dim1=-2, dim2=-1).log() + _HALF_LOG_TWO_PI
    return 0.5 * squared_error + moments.total.squeeze(-1) * log_scale.sum(-1)


def _whitened(difference: Tensor, scale_tril: Tensor) -> Tensor:
    """A difference of means ``[*B, D]`` in units of the standard deviations."""
    column = difference.unsqueeze(-1)
    return torch.linalg.solve_triangular(scale_tril, column, upper=False).squeeze(-1)


def categorical_kl(logits: Tensor, old_logits: Tensor) -> Tensor:
    r""":math:`KL(\text{old} \| \text{new}) = \sum_a \pi'(a) (\log \pi'(a) - \log \pi(a))`.

    Args:
        logits (Tensor): of the new policy, ``[*B, A]``; they need not be normalised.
        old_logits (Tensor): of the old policy, ``[*B, A]``. ``-inf`` for an action that the old
            policy never takes, which then contributes nothing.

    Returns:
        The divergence of each state, ``[*B]``.

    Examples:
        >>> categorical_kl(torch.tensor([0.0, 0.0]), torch.tensor([0.0, float("-inf")]))
        tensor(0.6931)
    """
    # eq: categorical-kl
    log_prob, old_log_prob = logits.log_softmax(-1), old_logits.log_softmax(-1)
    taken = old_log_prob > -math.inf
    log_ratio = torch.where(taken, old_log_prob, 0.0) - torch.where(taken, log_prob, 0.0)
    return (old_log_prob.exp() * log_ratio).sum(-1)


def lagrangian_losses(
    kl: Tensor, multiplier: Tensor, epsilon: Tensor | float
) -> tuple[Tensor, Tensor]:
    r"""The two sides of a constraint :math:`KL \le \epsilon`, each with the other held fixed.

    How MPO enforces its bounds in the M-step, https://arxiv.org/abs/1806.06920.

    .. math::
        L_{KL} = \mathrm{sg}[\alpha] \, KL, \qquad L_\alpha = \alpha (\epsilon - \mathrm{sg}[KL])

    Args:
        kl (Tensor): divergences, ``[*B, D]`` or anything that broadcasts with ``multiplier``.
        multiplier (Tensor): positive ``alpha``, ``[D]`` or scalar.
        epsilon (Tensor or float): the bound, ``[D]`` or scalar.

    Returns:
        The penalty on the policy and the loss of the multiplier, elementwise.

    Examples:
        >>> kl, multiplier = torch.tensor([0.2]), torch.tensor([10.0])
        >>> lagrangian_losses(kl, multiplier, 0.1)
        (tensor([2.]), tensor([-1.]))
    """
    # eq: lagrangian-penalty, lagrangian-dual
    return multiplier.detach() * kl, multiplier * (epsilon - kl.detach())
