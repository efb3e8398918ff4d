"""Dual variables with the bounds that they enforce: temperatures and Lagrange multipliers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.checks import check_positive

__all__ = ["Constraint", "DualVariable", "Temperature"]

# Keeps the value strictly positive whatever an optimiser does to the raw parameter.
_OFFSET = 1e-8


def _raw_from_value(value: float) -> float:
    """Inverse of ``value = softplus(raw) + _OFFSET``."""
    value = value - _OFFSET
    return value + math.log(-math.expm1(-value))


class DualVariable(nn.Module):
    r"""A positive variable learned by gradient descent.

    .. math:: x = \mathrm{softplus}(raw) + 10^{-8}

    Values go in and come out in real units: ``DualVariable(1000.0)`` is a multiplier of 1000. After
    each optimiser step :meth:`project_` puts the stored parameter back above a floor. Clamping it
    in the forward pass instead would leave a variable that has crossed the floor without gradient.

    Args:
        init (float): initial value, positive and finite.
        shape (tuple of int): shape of the variable: ``()`` for a temperature, ``(D,)`` for a
            multiplier per dimension. Defaults to ``()``.

    Keyword Args:
        floor (float): smallest value that :meth:`project_` keeps. Defaults to ``2.5e-8``, which is
            a raw parameter of -18.
        learnable (bool): whether the parameter takes gradients. Switch it off for a variable that
            is set by :meth:`solve_`. Defaults to ``True``.

    Examples:
        >>> alpha = DualVariable(10.0, (3,))
        >>> alpha()
        tensor([10., 10., 10.], grad_fn=<AddBackward0>)
        >>> optimizer = torch.optim.Adam(alpha.parameters(), lr=1e-2)
        >>> alpha().sum().backward()
        >>> optimizer.step()
        >>> alpha.project_()
    """

    def __init__(
        self,
        init: float,
        shape: tuple[int, ...] = (),
        *,
        floor: float = 2.5e-8,
        learnable: bool = True,
    ) -> None:
        super().__init__()
        if not floor > _OFFSET:
            raise ValueError(f"floor must be greater than {_OFFSET}, got {floor}.")
        if not (math.isfinite(init) and init >= floor):
            raise ValueError(f"init must be finite and at least the floor ({floor}), got {init}.")
        self.init = float(init)
        self.floor = float(floor)
        self.raw = nn.Parameter(torch.empty(shape), requires_grad=learnable)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the variable back to its initial value."""
        with torch.no_grad():
            self.raw.fill_(_raw_from_value(self.init))

    @property
    def raw_floor(self) -> float:
        """What the floor is for the stored parameter."""
        return _raw_from_value(self.floor)

    def forward(self) -> Tensor:
        """The value in real units, differentiable."""
        return nn.functional.softplus(self.raw) + _OFFSET

    @torch.no_grad()
    def project_(self) -> None:
        """Put the parameter back above the floor. Call it after each optimiser step."""
        self.raw.clamp_(min=self.raw_floor)

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Set the value, in real units: at least the floor, and left as it is if not finite."""
        x = value.clamp_min(self.floor) - _OFFSET
        raw = x + (-torch.expm1(-x)).log()
        self.raw.copy_(torch.where(raw.isfinite(), raw, self.raw))

    def solve_(
        self,
        value: Tensor,
        epsilon: Tensor | float,
        *,
        sample_dim: int = 0,
        log_prior: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Set a scalar temperature to the minimum of its dual on the given values.

        The arguments are those of
        :func:`~minerva_torchrl.objectives.functional.solve_temperature`.

        Returns:
            The new value, 0-d.
        """
        if self.raw.ndim:
            raise ValueError(
                f"solve_ needs a scalar variable, but this one has shape {tuple(self.raw.shape)}."
            )
        solved = F.solve_temperature(
            value,
            epsilon,
            sample_dim=sample_dim,
            log_prior=log_prior,
            mask=mask,
            floor=self.floor,
        )
        if mask is not None:  # without any state there is nothing to solve for
            solved = torch.where(mask.any(), solved, self())
        self.set_(solved)
        return self().detach()

    def extra_repr(self) -> str:
        """Initial value, shape and floor."""
        return f"init={self.init:g}, shape={tuple(self.raw.shape)}, floor={self.floor:g}"


class Temperature(DualVariable):
    r"""The temperature :math:`\eta` of one objective of the E-step, with its bound.

    The dual of the E-step,
    :math:`L_\eta = \eta (\epsilon + \log \sum_i p_i \exp(v_i / \eta))`, has the gradient
    :math:`\epsilon - KL(w \| p)`. So a state's loss is all there is to know once its dual and its
    divergence are computed: no scores need to be kept for the backward pass.

    Args:
        init (float): initial temperature, positive and finite.
        epsilon (float): bound :math:`\epsilon` of the divergence of the weights from the prior.

    Keyword Args:
        solved (bool): set the temperature to the minimum of its dual on every batch instead of
            learning it by gradient descent. Defaults to ``False``.

    Examples:
        >>> temperature = Temperature(1.0, epsilon=0.1)
        >>> scores = torch.tensor([[0.0, 0.0], [0.0, 1.0]])  # two states, two candidates
        >>> weights, dual, kl = temperature.weigh(scores)
        >>> weights
        tensor([[0.5000, 0.5000],
                [0.2689, 0.7311]])
        >>> temperature.loss(dual, kl).mean().backward()
        >>> temperature.raw.grad.sign()  # on average the weights are still within the bound
        tensor(1.)
    """

    epsilon: Tensor

    def __init__(self, init: float, epsilon: float, *, solved: bool = False) -> None:
        super().__init__(init, learnable=not solved)
        check_positive("epsilon", epsilon)
        self.solved = solved
        self.register_buffer("epsilon", torch.tensor(float(epsilon)))

    @torch.no_grad()
    def weigh(self, scores: Tensor, log_prior: Tensor | None = None) -> tuple[Tensor, ...]:
        """Weights of the candidates at the present temperature.

        Args:
            scores (Tensor): what the objective says of the candidates, ``[*B, N]``.
            log_prior (Tensor, optional): their log-probabilities, ``[*B, N]``, if they are all
                actions there are. Without it they are samples, which count alike.

        Returns:
            The weights ``[*B, N]``, and for each state the dual and the divergence of the weights
            from the prior, ``[*B]``.
        """
        weights, dual = F.mpo_weights_and_temperature_loss(
            scores, self(), self.epsilon, log_prior=log_prior, sample_dim=-1
        )
        return weights, dual, F.sample_kl(weights, log_prior, sample_dim=-1)

    def loss(self, dual: Tensor, kl: Tensor) -> Tensor:
        """The dual as a loss: its value, with the gradient ``epsilon - kl`` at the temperature.

        Args:
            dual (Tensor): from :meth:`weigh`, or of a whole batch; any shape.
            kl (Tensor): the divergence that belongs to it, of the same shape.
        """
        temperature = self()
        return dual + (temperature - temperature.detach()) * (self.epsilon - kl)


class Constraint(DualVariable):
    r"""A constraint :math:`KL \le \epsilon` on the policy, with its multiplier :math:`\alpha`.

    Args:
        init (float): initial multiplier, positive and finite.
        epsilon (float): the bound.
        shape (tuple of int): ``(D,)`` for a multiplier and bound per action dimension, ``()``
            (default) for one.

    Examples:
        >>> constraint = Constraint(10.0, epsilon=0.01)
        >>> penalty, loss = constraint.losses(torch.tensor([[0.02], [0.01]]))
        >>> penalty, loss.detach()
        (tensor([0.2000, 0.1000]), tensor([-0.1000,  0.0000]))
    """

    epsilon: Tensor

    def __init__(self, init: float, epsilon: float, shape: tuple[int, ...] = ()) -> None:
        super().__init__(init, shape)
        check_positive("epsilon", epsilon)
        self.register_buffer("epsilon", torch.tensor(float(epsilon)))

    def losses(self, kl: Tensor) -> tuple[Tensor, Tensor]:
        """Penalty on the policy and loss of the multiplier, each with the other held fixed.

        Args:
            kl (Tensor): divergences, ``[*B, D]`` or ``[*B, 1]``.

        Returns:
            Both summed over the last dimension, ``[*B]``.
        """
        penalty, loss = F.lagrangian_losses(kl, self(), self.epsilon)
        return penalty.sum(-1), loss.sum(-1)
