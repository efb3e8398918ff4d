"""Critics of the whole distribution of returns.

Notation: ``E`` members of an ensemble, ``N`` candidates, ``*B`` state dimensions, ``P`` outputs
that describe a distribution.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.checks import check_count, check_positive
from minerva_torchrl.objectives.critics.supports import OnSupport, Support
from minerva_torchrl.objectives.critics.values import Backup, Critic, expectation

__all__ = ["CategoricalCritic", "GaussianMixtureCritic", "QuantileCritic"]


class _DistributionalCritic(Critic):
    """A distribution of returns, whose mean the E-step uses, or something smaller.

    Of an ensemble the target has the distribution of the member with the smallest mean (``min``),
    for each candidate, or the mixture of all (``mean``).
    """

    one_step_targets = True

    def __init__(self, pessimism: float) -> None:
        super().__init__()
        if not 0 <= pessimism < math.inf:
            raise ValueError(f"pessimism must be at least 0 and finite, got {pessimism}.")
        self.pessimism = float(pessimism)

    @abstractmethod
    def variance(self, outputs: Tensor) -> Tensor:
        """Variance of returns, ``[...]``, of outputs ``[..., P]``."""

    def select(self, outputs: Tensor, reduction: str) -> Tensor:
        """The members that the distribution is a mixture of, ``[E or 1, N, *B, P]``."""
        if len(outputs) == 1 or reduction == "mean":
            return outputs
        # eq: ensemble-distribution
        smallest = self.mean(outputs).argmin(0, keepdim=True).unsqueeze(-1)
        return outputs.gather(0, smallest.expand(1, *outputs.shape[1:]))

    def score(self, members: Tensor) -> Tensor:
        """The mean, less ``pessimism`` standard deviations."""
        means = self.mean(members)
        mean = means.mean(0)
        if not self.pessimism:
            return mean
        # eq: pessimistic-score
        variance = (self.variance(members) + means.square()).mean(0) - mean.square()
        return mean - self.pessimism * variance.clamp_min(0).sqrt()


class _AtomsCritic(_DistributionalCritic):
    """A distribution of atoms with probabilities."""

    def __init__(self, pessimism: float, quantile: float | None) -> None:
        super().__init__(pessimism)
        if quantile is not None and not 0 < quantile < 1:
            raise ValueError(f"quantile must be between 0 and 1, got {quantile}.")
        if quantile is not None and pessimism:
            raise ValueError(
                "pessimism and quantile are two ways to be careful, of which one can be given; "
                f"got {pessimism} and {quantile}."
            )
        self.quantile = quantile

    @abstractmethod
    def _atoms(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Where the mass is, and the mass, ``[..., P]`` each."""

    def mean(self, outputs: Tensor) -> Tensor:
        """The expected return."""
        # eq: atoms-mean
        values, probs = self._atoms(outputs)
        return (probs * values).sum(-1)

    def variance(self, outputs: Tensor) -> Tensor:
        """The variance of the atoms."""
        values, probs = self._atoms(outputs)
        # eq: atoms-variance
        mean = (probs * values).sum(-1, keepdim=True)
        return (probs * (values - mean).square()).sum(-1)

    def score(self, members: Tensor) -> Tensor:
        """The mean, less ``pessimism`` standard deviations; or a quantile."""
        if self.quantile is None:
            return super().score(members)
        values, probs = (
            x.expand_as(members).movedim(0, -2).flatten(-2) for x in self._atoms(members)
        )
        values, order = values.sort(-1)
        # eq: quantile-score
        mass = probs.gather(-1, order).cumsum(-1)
        reached = mass < self.quantile * mass[..., -1:]
        return values.gather(-1, reached.sum(-1, keepdim=True)).squeeze(-1)


class CategoricalCritic(OnSupport, _AtomsCritic):
    r"""Probabilities of fixed atoms, as in distributional MPO (DMPO).

    The target is the mixture of the distributions of the N candidates at the next state, shifted
    and scaled by rewards and discount and projected onto the atoms
    (https://arxiv.org/abs/1707.06887); the loss is the cross-entropy with it. The network writes
    logits, ``[*B, num_atoms]``.

    Args:
        v_min (float, optional): the smallest return. Default: ``-150``, or ``-1`` if ``adaptive``.
        v_max (float, optional): the largest return. Default: ``150``, or ``1`` if ``adaptive``.
        num_atoms (int): number of atoms. Defaults to ``51``.

    Keyword Args:
        support (sequence of float, optional): the atoms themselves, ``[K]``, increasing, instead.
        adaptive (bool): let the support grow from its ends while more than one per cent of the
            targets lie outside. Defaults to ``False``.
        pessimism (float): standard deviations to take off the mean for the E-step.
        quantile (float, optional): a level, whose quantile the E-step takes instead of the mean.

    Examples:
        >>> critic = CategoricalCritic(0.0, 2.0, 3)
        >>> critic.mean(torch.tensor([0.0, 0.0, -torch.inf]))
        tensor(0.5000)
    """

    def __init__(
        self,
        v_min: float | None = None,
        v_max: float | None = None,
        num_atoms: int = 51,
        *,
        support: Sequence[float] | Tensor | None = None,
        adaptive: bool = False,
        pessimism: float = 0.0,
        quantile: float | None = None,
    ) -> None:
        super().__init__(pessimism, quantile)
        self.support = Support(v_min, v_max, num_atoms, atoms=support, adaptive=adaptive)
        self.width = self.support.num_atoms

    def _atoms(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.support(), outputs.softmax(-1)

    def pool(self, members: Tensor, log_prior: Tensor | None) -> Tensor:
        """Probabilities of the atoms, ``[*B, K]``."""
        return expectation(members.softmax(-1).mean(0), log_prior)

    def target(self, next_value: Tensor, backup: Backup) -> Tensor:
        """Probabilities of the atoms, ``[*B, K]``."""
        # eq: categorical-target
        values = backup(self.support().expand_as(next_value))
        self.support.observe(values, next_value)
        return F.categorical_projection(values, next_value, self.support())

    def target_mean(self, target: Tensor) -> Tensor:
        """The mean of the atoms."""
        return (target * self.support()).sum(-1)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """The cross-entropy with the target."""
        # eq: categorical-loss
        return -(target * outputs.log_softmax(-1)).sum(-1)


class QuantileCritic(_AtomsCritic):
    r"""Quantiles of returns at the levels :math:`(2 i - 1) / 2 K` (https://arxiv.org/abs/1710.10044).

    The target has the quantiles of all N candidates at the next state; the loss is
    :func:`~minerva_torchrl.objectives.functional.quantile_huber_loss`. The network writes the
    quantiles, ``[*B, num_quantiles]``.

    Args:
        num_quantiles (int): number of quantiles. Defaults to ``32``.

    Keyword Args:
        kappa (float): where the Huber loss becomes linear. Defaults to ``1``.
        pessimism (float): standard deviations to take off the mean for the E-step.
        quantile (float, optional): a level, whose quantile the E-step takes instead of the mean.

    Examples:
        >>> QuantileCritic(2).mean(torch.tensor([1.0, 3.0]))
        tensor(2.)
    """

    def __init__(
        self,
        num_quantiles: int = 32,
        *,
        kappa: float = 1.0,
        pessimism: float = 0.0,
        quantile: float | None = None,
    ) -> None:
        super().__init__(pessimism, quantile)
        check_count("num_quantiles", num_quantiles)
        check_positive("kappa", kappa)
        self.width = num_quantiles
        self.kappa = kappa

    def _atoms(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, torch.full_like(outputs, 1 / self.width)

    def pool(self, members: Tensor, log_prior: Tensor | None) -> Tensor:
        """Quantiles of all candidates and their probabilities, side by side, ``[*B, 2 M]``."""
        num_members, num_candidates = members.shape[:2]
        weight = torch.full_like(members, 1 / (num_members * num_candidates * self.width))
        if log_prior is not None:
            weight = weight * num_candidates * log_prior.exp().movedim(-1, 0).unsqueeze(-1)
            members = torch.where(weight > 0, members, 0.0)  # what is never taken may be anything
        atoms = [x.movedim((0, 1), (-3, -2)).flatten(-3) for x in (members, weight)]
        return torch.cat(atoms, -1)

    def target(self, next_value: Tensor, backup: Backup) -> Tensor:
        """Their returns, and the probabilities as they are."""
        # eq: quantile-target
        values, weights = next_value.chunk(2, -1)
        return torch.cat([backup(values), weights], -1)

    def target_mean(self, target: Tensor) -> Tensor:
        """The expected return."""
        values, weights = target.chunk(2, -1)
        return (values * weights).sum(-1)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Quantile regression with Huber's loss."""
        values, weights = target.chunk(2, -1)
        # eq: quantile-huber
        return F.weighted_quantile_huber_loss(outputs, values, weights, self.kappa)


class GaussianMixtureCritic(_DistributionalCritic):
    r"""A mixture of Gaussians, fitted to samples of bootstrapped returns, as in Acme's MPO.

    The network writes logits, means and raw standard deviations side by side,
    ``[*B, 3 num_components]``, with
    :math:`\sigma = \sigma_0 \, \mathrm{softplus}(raw) / \log 2 + \sigma_{min}`. The loss is
    :func:`~minerva_torchrl.objectives.functional.gaussian_mixture_nll`.

    Args:
        num_components (int): number of Gaussians. Defaults to ``5``.

    Keyword Args:
        num_samples (int): sampled returns in a target. Defaults to ``20``.
        init_scale (float): standard deviation :math:`\sigma_0` at a raw output of zero.
        min_scale (float): the smallest one, :math:`\sigma_{min}`.
        pessimism (float): standard deviations to take off the mean for the E-step.

    Examples:
        >>> critic = GaussianMixtureCritic(2)
        >>> critic.mean(torch.tensor([0.0, 0.0, 1.0, 3.0, 0.0, 0.0]))
        tensor(2.)
    """

    def __init__(
        self,
        num_components: int = 5,
        *,
        num_samples: int = 20,
        init_scale: float = 1.0,
        min_scale: float = 1e-3,
        pessimism: float = 0.0,
    ) -> None:
        super().__init__(pessimism)
        check_count("num_components", num_components)
        check_count("num_samples", num_samples)
        check_positive("init_scale", init_scale)
        check_positive("min_scale", min_scale)
        self.width = 3 * num_components
        self.num_samples = num_samples
        self.init_scale = init_scale
        self.min_scale = min_scale

    def _parameters_of(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, means and standard deviations, ``[..., K]`` each."""
        # eq: mixture-scale
        logits, loc, raw = outputs.chunk(3, -1)
        scale = nn.functional.softplus(raw) * (self.init_scale / math.log(2)) + self.min_scale
        return logits, loc, scale

    def mean(self, outputs: Tensor) -> Tensor:
        """The expected return."""
        logits, loc, _ = self._parameters_of(outputs)
        return (logits.softmax(-1) * loc).sum(-1)

    def variance(self, outputs: Tensor) -> Tensor:
        """That of the components, and between them."""
        logits, loc, scale = self._parameters_of(outputs)
        probs = logits.softmax(-1)
        mean = (probs * loc).sum(-1, keepdim=True)
        return (probs * (scale.square() + (loc - mean).square())).sum(-1)

    def pool(self, members: Tensor, log_prior: Tensor | None) -> Tensor:
        """Samples of the mixture over members, candidates and components, ``[*B, M]``."""
        logits, loc, scale = self._parameters_of(members)
        probs = logits.softmax(-1)
        if log_prior is not None:
            prior = log_prior.exp().movedim(-1, 0).unsqueeze(-1)
            probs = torch.where(prior > 0, prior * probs, 0.0)
        probs, loc, scale = (x.movedim((0, 1), (-3, -2)).flatten(-3) for x in (probs, loc, scale))
        # eq: mixture-samples
        # By the inverse of the distribution function, which takes what is not finite as well.
        mass = probs.cumsum(-1)
        draw = torch.rand(*mass.shape[:-1], self.num_samples, dtype=mass.dtype, device=mass.device)
        index = torch.searchsorted(mass, draw * mass[..., -1:], right=True)
        index = index.clamp_max(mass.shape[-1] - 1)
        loc, scale = loc.gather(-1, index), scale.gather(-1, index)
        return loc + scale * torch.randn_like(loc)

    def target(self, next_value: Tensor, backup: Backup) -> Tensor:
        """Samples of the return, ``[*B, M]``."""
        return backup(next_value)

    def target_mean(self, target: Tensor) -> Tensor:
        """The mean of the samples."""
        return target.mean(-1)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """The negative log-likelihood of the samples."""
        # eq: mixture-nll
        return F.gaussian_mixture_nll(*self._parameters_of(outputs), target)
