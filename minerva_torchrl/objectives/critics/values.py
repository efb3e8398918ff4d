"""Critics of a value: the number itself, or probabilities of bins around it.

Notation: ``E`` members of an ensemble, ``N`` candidates, ``*B`` state dimensions, ``P`` outputs
that describe a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torchrl.objectives.utils import distance_loss

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.checks import check_choice, check_positive
from minerva_torchrl.objectives.critics.supports import OnSupport, Support, default_ends

__all__ = [
    "Backup",
    "Critic",
    "HLGaussCritic",
    "ScalarCritic",
    "TwoHotCritic",
    "expectation",
    "resolve_critic",
]

Backup = Callable[[Tensor], Tensor]
"""From returns after the next state ``[*B, M]`` to returns from this one, of the same shape."""


def expectation(x: Tensor, log_prior: Tensor | None) -> Tensor:
    """Mean over candidates ``[N, *B, ...]``, with the probabilities ``[*B, N]`` of all actions.

    Args:
        x (Tensor): something of every candidate, ``[N, *B, ...]``.
        log_prior (Tensor, optional): log-probabilities of the candidates, ``[*B, N]``, if they are
            all actions there are. Without it they are samples, which count alike.

    Returns:
        The mean of each state, ``[*B, ...]``.

    Examples:
        >>> expectation(torch.tensor([1.0, 3.0]), None)
        tensor(2.)
        >>> expectation(torch.tensor([1.0, 3.0]), torch.tensor([0.75, 0.25]).log())
        tensor(1.5000)
    """
    # eq: expected-value
    if log_prior is None:
        return x.mean(0)
    prior = log_prior.exp().movedim(-1, 0)
    prior = prior.reshape(*prior.shape, *[1] * (x.ndim - prior.ndim))
    return torch.where(prior > 0, prior * x, 0.0).sum(0)


class Critic(nn.Module, ABC):
    """What the outputs of a network say of a value."""

    width: int
    """Outputs ``P`` for one value."""
    one_step_targets: bool = False
    """Whether targets are whole distributions, of one or n steps."""
    metric_keys: tuple[str, ...] = ()
    """Names that :meth:`metrics` returns."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """The mean value, ``[...]``, of outputs ``[..., P]``."""

    @abstractmethod
    def select(self, outputs: Tensor, reduction: str) -> Tensor:
        """What an ensemble says of candidates: from outputs ``[E, N, *B, P]``."""

    @abstractmethod
    def score(self, members: Tensor) -> Tensor:
        """Scores of the candidates for the E-step, ``[N, *B]``, from :meth:`select`."""

    @abstractmethod
    def pool(self, members: Tensor, log_prior: Tensor | None) -> Tensor:
        """The value of a state over all candidates, ``[*B, M]``, from :meth:`select`."""

    @abstractmethod
    def target(self, next_value: Tensor, backup: Backup) -> Tensor:
        """Target ``[*B, T]`` for :meth:`loss`, from that of the next state of :meth:`pool`."""

    @abstractmethod
    def target_mean(self, target: Tensor) -> Tensor:
        """Mean of a target, ``[*B]``."""

    @abstractmethod
    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Loss of outputs ``[E, *B, P]``, ``[E, *B]``."""

    def metrics(self) -> dict[str, Tensor]:
        """Diagnostics of the targets made last, 0-d."""
        return {}


class ScalarCritic(Critic):
    """The value itself, regressed on its target.

    Args:
        loss_function (str): ``"l2"``, ``"l1"`` or ``"smooth_l1"``.

    Examples:
        >>> critic = ScalarCritic()
        >>> critic.loss(torch.tensor([[3.0]]), torch.tensor([1.0]))
        tensor([4.])
    """

    width = 1

    def __init__(self, loss_function: Literal["l2", "l1", "smooth_l1"] = "l2") -> None:
        super().__init__()
        check_choice("loss_function", loss_function, ("l2", "l1", "smooth_l1"))
        self.loss_function = loss_function

    def mean(self, outputs: Tensor) -> Tensor:
        """The output."""
        return outputs.squeeze(-1)

    def select(self, outputs: Tensor, reduction: str) -> Tensor:
        """The smallest or the mean value of the members, ``[N, *B]``."""
        # eq: ensemble-value
        values = self.mean(outputs)
        return values.amin(0) if reduction == "min" else values.mean(0)

    def score(self, members: Tensor) -> Tensor:
        """The values."""
        return members

    def pool(self, members: Tensor, log_prior: Tensor | None) -> Tensor:
        """The expected value, ``[*B, 1]``."""
        return expectation(members, log_prior).unsqueeze(-1)

    def target(self, next_value: Tensor, backup: Backup) -> Tensor:
        """That of the value estimator, ``[*B, 1]``."""
        return backup(next_value)

    def target_mean(self, target: Tensor) -> Tensor:
        """The target."""
        return target.squeeze(-1)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """The distance to the target."""
        # eq: scalar-loss
        value, target = torch.broadcast_tensors(self.mean(outputs), target.squeeze(-1))
        return distance_loss(value, target, self.loss_function)


class _BinnedCritic(OnSupport, ScalarCritic):
    """Probabilities of bins, with the mean as the value, fitted to a scalar target."""

    def __init__(
        self,
        v_min: float | None = None,
        v_max: float | None = None,
        num_atoms: int = 51,
        *,
        support: Sequence[float] | Tensor | None = None,
        symlog: bool = False,
        adaptive: bool = False,
    ) -> None:
        super().__init__()
        if symlog:
            ends = default_ends(v_min, v_max, adaptive=adaptive)
            v_min, v_max = F.symlog(torch.tensor(ends, dtype=torch.float64)).tolist()
            if support is not None:
                support = F.symlog(torch.as_tensor(support, dtype=torch.float64))
        self.support = Support(v_min, v_max, num_atoms, atoms=support, adaptive=adaptive)
        self.symlog = symlog
        self.width = self.support.num_atoms

    @abstractmethod
    def _values(self) -> Tensor:
        """Values of the bins, ``[K]``."""

    @abstractmethod
    def _encode(self, target: Tensor) -> Tensor:
        """Probabilities ``[*B, K]`` of a target ``[*B]``."""

    def mean(self, outputs: Tensor) -> Tensor:
        """The expected value of the bins."""
        # eq: binned-mean
        return (outputs.softmax(-1) * self._values()).sum(-1)

    def target(self, next_value: Tensor, backup: Backup) -> Tensor:
        """That of the value estimator, ``[*B, 1]``."""
        target = backup(next_value)
        self.support.observe(F.symlog(target) if self.symlog else target, torch.ones_like(target))
        return target

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """The cross-entropy with the target's probabilities."""
        # eq: binned-loss
        return -(self._encode(target.squeeze(-1)) * outputs.log_softmax(-1)).sum(-1)


class TwoHotCritic(_BinnedCritic):
    r"""Probabilities of bins, fitted to the two around the target (https://arxiv.org/abs/2301.04104).

    The probabilities of a target have the target as their mean, so that the critic learns the mean
    of its targets as a scalar critic does.

    Args:
        v_min (float, optional): the smallest value. Default: ``-150``, or ``-1`` if ``adaptive``.
        v_max (float, optional): the largest value. Default: ``150``, or ``1`` if ``adaptive``.
        num_atoms (int): number of bins. Defaults to ``51``.

    Keyword Args:
        support (sequence of float, optional): the bins themselves, ``[K]``, increasing, instead.
        symlog (bool): bins that are evenly spaced in :math:`\mathrm{sign}(x) \log(1 + |x|)`:
            narrow around zero, wide far from it. Defaults to ``False``.
        adaptive (bool): let the support grow from its ends while more than one per cent of the
            targets lie outside. Defaults to ``False``.

    Examples:
        >>> critic = TwoHotCritic(0.0, 4.0, 5)
        >>> critic._encode(torch.tensor([1.25]))
        tensor([[0.0000, 0.7500, 0.2500, 0.0000, 0.0000]])
    """

    def _values(self) -> Tensor:
        return F.symexp(self.support()) if self.symlog else self.support()

    def _encode(self, target: Tensor) -> Tensor:
        return F.two_hot(target, self._values())


class HLGaussCritic(_BinnedCritic):
    r"""Probabilities of bins, fitted to a Gaussian around the target (https://arxiv.org/abs/2403.03950).

    Args:
        v_min (float, optional): centre of the first bin. Default: ``-150``, or ``-1`` if
            ``adaptive``.
        v_max (float, optional): centre of the last bin. Default: ``150``, or ``1`` if ``adaptive``.
        num_atoms (int): number of bins. Defaults to ``51``.

    Keyword Args:
        sigma (float): standard deviation, in widths of a bin. Defaults to ``0.75``.
        support (sequence of float, optional): centres of the bins, ``[K]``, increasing, instead.
        symlog (bool): bins that are evenly spaced in :math:`\mathrm{sign}(x) \log(1 + |x|)`, and
            the Gaussian there. Defaults to ``False``.
        adaptive (bool): let the support grow from its ends while more than one per cent of the
            targets lie outside. Defaults to ``False``.

    Examples:
        >>> critic = HLGaussCritic(0.0, 4.0, 5)
        >>> critic.mean(critic._encode(torch.tensor([2.0])).log())
        tensor([2.])
    """

    def __init__(
        self,
        v_min: float | None = None,
        v_max: float | None = None,
        num_atoms: int = 51,
        *,
        sigma: float = 0.75,
        support: Sequence[float] | Tensor | None = None,
        symlog: bool = False,
        adaptive: bool = False,
    ) -> None:
        check_positive("sigma", sigma)
        super().__init__(v_min, v_max, num_atoms, support=support, symlog=symlog, adaptive=adaptive)
        self.sigma = sigma

    def _bin_width(self) -> Tensor:
        return (self.support.high - self.support.low) / (self.width - 1)

    def _values(self) -> Tensor:
        support = self.support()
        if not self.symlog:
            return support
        # eq: hl-gauss-symlog-bins
        # The mean of an exponential over Gaussian and bin is too large by half their variance.
        spread = (self.sigma**2 + 1 / 12) * self._bin_width().square() / 2
        return support.sign() * torch.expm1(support.abs() - spread)

    def _encode(self, target: Tensor) -> Tensor:
        support = self.support()
        target = F.symlog(target) if self.symlog else target
        target = target.clamp(support[0], support[-1])
        return F.hl_gauss(target, support, self.sigma * self._bin_width())


def resolve_critic(
    critic: Critic | None,
    loss_function: str,
    *,
    argument: str = "loss_function",
    scalar_targets: bool = False,
) -> Critic:
    """The given critic, or a scalar one with a loss function.

    Args:
        critic (Critic, optional): as the user gave it.
        loss_function (str): of a scalar critic.

    Keyword Args:
        argument (str): what the user calls that. Defaults to ``"loss_function"``.
        scalar_targets (bool): whether it has to learn from scalar targets, as of states. Defaults
            to ``False``.

    Returns:
        A critic.

    Examples:
        >>> resolve_critic(None, "l1").loss_function
        'l1'
    """
    check_choice(argument, loss_function, ("l2", "l1", "smooth_l1"))
    if critic is None:
        return ScalarCritic(loss_function)  # type: ignore[arg-type]
    wanted = "Critic (ScalarCritic, CategoricalCritic, TwoHotCritic, HLGaussCritic, QuantileCritic "
    wanted += "or GaussianMixtureCritic)"
    if scalar_targets:
        wanted = "ScalarCritic, TwoHotCritic or HLGaussCritic, which learn from scalar targets"
    if not isinstance(critic, ScalarCritic if scalar_targets else Critic):
        raise TypeError(f"critic must be a {wanted}, got {type(critic).__name__}.")
    if loss_function != "l2":
        raise ValueError(
            f"{argument}={loss_function!r} does not apply beside critic=: a "
            f"{type(critic).__name__} has its own loss. Use critic=ScalarCritic({loss_function!r})."
        )
    return critic
