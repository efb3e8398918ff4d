"""Dual variables with the bounds that they enforce: temperatures and Lagrange multipliers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.checks import check_choice, check_positive

__all__ = ["Constraint", "CostMultiplier", "DualVariable", "Temperature"]

# Keeps the value strictly positive whatever an optimiser does to the raw parameter.
_OFFSET = 1e-8
# A multiplier this small leaves a policy within one per cent of where it would go without it.
_RELATIVE_FLOOR = 1e-2
# In units of 1 / sqrt(bound): this holds a Gaussian against a fit 2.8 standard deviations away.
_RELATIVE_CEILING = 2.0
# How strongly a relative multiplier answers at once to how far the bound is violated.
_RESPONSE = 2.0


def _softplus(raw: Tensor) -> Tensor:
    # eq: dual-softplus
    return nn.functional.softplus(raw) + _OFFSET


def _inverse_softplus(value: Tensor) -> Tensor:
    value = value - _OFFSET
    return value + (-torch.expm1(-value)).log()


# By the name of the raw parameter in a state dict: its value, and back.
_SCALES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "raw": (_softplus, _inverse_softplus),
    "log": (torch.exp, torch.log),
}


class DualVariable(nn.Module):
    r"""A positive variable learned by gradient descent.

    .. math:: x = \mathrm{softplus}(raw) + 10^{-8}

    Values go in and come out in real units: ``DualVariable(1000.0)`` is a multiplier of 1000. After
    each optimiser step :meth:`project_` puts the stored parameter back above a floor. Clamping it
    in the forward pass instead would leave a variable that has crossed the floor without gradient.

    A state dict says on which scale the parameter is: ``raw`` or ``log``. It can be loaded into a
    variable on the other scale, which takes over the value.

    Args:
        init (float): initial value, positive and finite.
        shape (tuple of int): shape of the variable: ``()`` for a temperature, ``(D,)`` for a
            multiplier per dimension. Defaults to ``()``.

    Keyword Args:
        floor (float): smallest value that :meth:`project_` keeps. Defaults to ``2.5e-8``, which is
            a raw parameter of -18.
        learnable (bool): whether the parameter takes gradients. Switch it off for a variable that
            is set by :meth:`solve_`. Defaults to ``True``.
        scale (str): ``"raw"`` (default), the softplus above, or ``"log"``, where
            :math:`x = e^{raw}`.

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
        scale: Literal["raw", "log"] = "raw",
    ) -> None:
        super().__init__()
        check_choice("scale", scale, tuple(_SCALES))
        if not floor > _OFFSET:
            raise ValueError(f"floor must be greater than {_OFFSET}, got {floor}.")
        if not (math.isfinite(init) and init >= floor):
            raise ValueError(f"init must be finite and at least the floor ({floor}), got {init}.")
        self.init = float(init)
        self.floor = float(floor)
        self.scale = scale
        self.raw_floor = self._raw_from(self.floor)
        """What the floor is for the stored parameter."""
        self.raw = nn.Parameter(torch.empty(shape), requires_grad=learnable)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the variable back to its initial value."""
        with torch.no_grad():
            self.raw.fill_(self._raw_from(self.init))

    def forward(self) -> Tensor:
        """The value in real units, differentiable."""
        return _SCALES[self.scale][0](self.raw)

    def _raw_from(self, value: float) -> float:
        return _SCALES[self.scale][1](torch.tensor(value, dtype=torch.float64)).item()

    @torch.no_grad()
    def project_(self) -> None:
        """Put the parameter back above the floor. Call it after each optimiser step."""
        # eq: dual-projection
        self.raw.clamp_(min=self.raw_floor)

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Set the value, in real units: at least the floor, and left as it is if not finite."""
        raw = _SCALES[self.scale][1](value.clamp_min(self.floor))
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

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scale != "raw":
            destination[prefix + self.scale] = destination.pop(prefix + "raw")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for scale, (value_of, _) in _SCALES.items():
            saved = state_dict.pop(prefix + scale, None)
            if saved is not None:
                if scale != self.scale:
                    saved = _SCALES[self.scale][1](value_of(saved).clamp_min(self.floor))
                state_dict[prefix + "raw"] = saved
                break
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Initial value, shape, floor and scale."""
        shape = tuple(self.raw.shape)
        return f"init={self.init:g}, shape={shape}, floor={self.floor:g}, scale={self.scale}"


class Temperature(DualVariable):
    r"""The temperature :math:`\eta` of one objective of the E-step, with its bound.

    The temperature of MPO's E-step, https://arxiv.org/abs/1806.06920.

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
        # eq: temperature-gradient
        temperature = self()
        return dual + (temperature - temperature.detach()) * (self.epsilon - kl)


class Constraint(DualVariable):
    r"""A constraint :math:`KL \le \epsilon` on the policy, with its multiplier :math:`\alpha`.

    The constraint of MPO's M-step, https://arxiv.org/abs/1806.06920.

    The multiplier is learned on its dual, :math:`L_\alpha = \alpha (\epsilon - KL)`. Multipliers
    differ by orders of magnitude between constraints and in the course of training, and so do
    bounds. A ``relative`` multiplier therefore steps in proportion: its parameter is
    :math:`\log \alpha`, with the gradient
    :math:`(\epsilon - KL) / \max(\epsilon, \overline{KL})`, where :math:`\overline{KL}` is the mean
    divergence of the batch. It lies between -1 and 1, so that a large violation at the beginning
    does not make an adaptive optimiser deaf for what follows. Such steps are late by nature, and
    multipliers that are late swing. So the penalty answers to the present violation as well: it is
    :math:`\alpha\, e^{2 v} KL` with :math:`v = \overline{KL} / \epsilon - 1`, cut off at -1 and 1.
    Where the bound is met, that is :math:`\alpha\, KL`. And it ends at
    :math:`2 / \sqrt{\epsilon}`: where a bound is broken by the size of single optimiser steps, no
    multiplier can hold it, and one that grows on and on leaves the fit without a say.

    Args:
        init (float): initial multiplier, positive and finite. A relative one that begins above its
            ceiling is put there by the first :meth:`project_`.
        epsilon (float): the bound.
        shape (tuple of int): ``(D,)`` for a multiplier and bound per action dimension, ``()``
            (default) for one.

    Keyword Args:
        relative (bool): steps in proportion to the multiplier and to the bound. Defaults to
            ``False``.

    Examples:
        >>> constraint = Constraint(10.0, epsilon=0.01)
        >>> penalty, loss = constraint.losses(torch.tensor([[0.02], [0.01]]))
        >>> penalty, loss.detach()
        (tensor([0.2000, 0.1000]), tensor([-0.1000,  0.0000]))
    """

    epsilon: Tensor

    def __init__(
        self, init: float, epsilon: float, shape: tuple[int, ...] = (), *, relative: bool = False
    ) -> None:
        if relative:
            super().__init__(init, shape, scale="log", floor=_RELATIVE_FLOOR)
        else:
            super().__init__(init, shape)
        check_positive("epsilon", epsilon)
        self.relative = relative
        self.register_buffer("epsilon", torch.tensor(float(epsilon)))

    def losses(self, kl: Tensor, mean_kl: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Penalty on the policy and loss of the multiplier, each with the other held fixed.

        Args:
            kl (Tensor): divergences, ``[*B, D]`` or ``[*B, 1]``.
            mean_kl (Tensor, optional): their mean over the batch, ``[D]`` or ``[1]``, for a
                relative multiplier. Defaults to that over all states.

        Returns:
            Both summed over the last dimension, ``[*B]``.
        """
        # eq: lagrangian-penalty, lagrangian-dual
        penalty, loss = F.lagrangian_losses(kl, self(), self.epsilon)
        if self.relative:
            kl = kl.detach()
            mean_kl = kl.flatten(0, -2).mean(0) if mean_kl is None else mean_kl
            # eq: relative-multiplier
            slope = (self.epsilon - kl) / mean_kl.clamp_min(self.epsilon)
            loss = loss.detach() + (self.raw - self.raw.detach()) * slope
            # eq: multiplier-response
            violation = (mean_kl / self.epsilon - 1).clamp(-1, 1)
            penalty = penalty * (_RESPONSE * violation).exp()
        return penalty.sum(-1), loss.sum(-1)

    def project_(self) -> None:
        """Put the parameter back above the floor, and a relative one below its ceiling."""
        super().project_()
        self.cap_()

    @torch.no_grad()
    def cap_(self) -> None:
        """Put the parameter of a relative multiplier below its ceiling."""
        if self.relative:
            # eq: multiplier-ceiling
            self.raw.clamp_(max=(_RELATIVE_CEILING / self.epsilon.sqrt()).log())


class CostMultiplier(DualVariable):
    r"""The multiplier :math:`\lambda` of a constraint :math:`E[Q_c] \le d` on an expected cost.

    Args:
        init (float): initial multiplier, positive and finite.
        threshold (float): the largest cost :math:`d`, of any sign.

    Examples:
        >>> multiplier = CostMultiplier(2.0, threshold=1.0)
        >>> multiplier.loss(torch.tensor([1.0, 4.0])).detach()  # falls and rises with it
        tensor([ 0., -6.])
    """

    epsilon: Tensor

    def __init__(self, init: float, threshold: float) -> None:
        super().__init__(init)
        self.register_buffer("epsilon", torch.tensor(float(threshold)))

    def loss(self, cost: Tensor) -> Tensor:
        r""":math:`\lambda (d - cost)`, with the cost held fixed; any shape."""
        # eq: cost-multiplier
        return self() * (self.epsilon - cost.detach())
