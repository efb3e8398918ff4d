"""The E-step: weights of actions or samples, their temperature, and what the weights look like."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minerva_torchrl.objectives.reductions import masked_mean

__all__ = [
    "categorical_mpo_weights_and_temperature_loss",
    "effective_sample_size",
    "mpo_weights_and_temperature_loss",
    "out_of_bounds_cost",
    "sample_kl",
    "sample_kl_to_uniform",
    "solve_temperature",
    "top_k_mask",
    "vmpo_weights_and_temperature_loss",
    "weight_entropy",
]


def mpo_weights_and_temperature_loss(
    q_value: Tensor,
    temperature: Tensor,
    epsilon: Tensor | float,
    *,
    log_prior: Tensor | None = None,
    sample_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    r"""Weights of the sampled actions and the dual loss of the temperature.

    The E-step of MPO, https://arxiv.org/abs/1806.06920.

    .. math::
        w_i = \mathrm{softmax}_i(Q_i / \eta), \qquad
        L_\eta = \eta \Big( \epsilon + \log \tfrac{1}{N} \sum_i \exp(Q_i / \eta) \Big)

    The gradient is :math:`\partial L_\eta / \partial \eta = \epsilon - KL(w \| u)` with ``u`` the
    uniform distribution over the samples: the temperature rises while the weights are further from
    uniform than the bound allows. Adding a constant to the values of a state changes neither.

    Where the candidates are not samples but all actions there are, their probabilities
    :math:`\pi'(a_i)` take the place of :math:`1 / N`:

    .. math::
        w_i \propto \pi'(a_i) \exp(Q_i / \eta), \qquad
        L_\eta = \eta \Big( \epsilon + \log \sum_i \pi'(a_i) \exp(Q_i / \eta) \Big)

    Args:
        q_value (Tensor): values of the sampled actions, ``[N, *B]`` (``N`` at ``sample_dim``).
            No gradient flows into them.
        temperature (Tensor): positive scalar ``eta``.
        epsilon (Tensor or float): bound of the KL divergence, scalar.
        log_prior (Tensor, optional): log-probabilities of the candidates, of the shape of
            ``q_value``; ``-inf`` for one that can't be taken.
        sample_dim (int): where the samples are. Defaults to 0.

    Returns:
        The weights, detached, of the shape of ``q_value``, and the loss of each state, ``[*B]``.

    Examples:
        >>> q_value = torch.tensor([[0.0, 1.0], [0.0, 3.0]])  # two samples, two states
        >>> weights, loss = mpo_weights_and_temperature_loss(q_value, torch.tensor(2.0), 0.1)
        >>> weights
        tensor([[0.5000, 0.2689],
                [0.5000, 0.7311]])
    """
    q_value = q_value.detach()
    # eq: mpo-temperature-loss
    # Centring keeps the gradient exact in single precision when values are large against eta.
    if log_prior is None:
        best = q_value.amax(sample_dim, keepdim=True)
        logits = (q_value - best) / temperature
        log_mean_exp = logits.logsumexp(sample_dim) - math.log(q_value.shape[sample_dim])
    else:  # what is never taken may have any value
        never = log_prior == -math.inf
        best = q_value.masked_fill(never, -math.inf).amax(sample_dim, keepdim=True)
        logits = (q_value - best).masked_fill(never, 0.0) / temperature + log_prior.detach()
        log_mean_exp = logits.logsumexp(sample_dim)
    # eq: mpo-weights
    weights = logits.detach().softmax(sample_dim)
    # eq: mpo-temperature-loss
    loss = temperature * (epsilon + log_mean_exp) + best.squeeze(sample_dim)
    return weights, loss


def categorical_mpo_weights_and_temperature_loss(
    q_value: Tensor,
    log_prior: Tensor,
    temperature: Tensor,
    epsilon: Tensor | float,
    *,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Weights of all discrete actions and the dual loss of the temperature.

    The E-step of MPO, https://arxiv.org/abs/1806.06920, for discrete actions.

    .. math::
        w_a \propto \pi'(a) \exp(Q_a / \eta), \qquad
        L_\eta = \eta \Big( \epsilon + \log \sum_a \pi'(a) \exp(Q_a / \eta) \Big)

    The gradient is :math:`\partial L_\eta / \partial \eta = \epsilon - KL(w \| \pi')`. With a mask
    :math:`\pi'` is the prior given that the action is legal.

    Args:
        q_value (Tensor): values of all actions, ``[*B, A]``. No gradient flows into them.
        log_prior (Tensor): log-probabilities of all actions under the old policy, ``[*B, A]``.
            No gradient flows into them.
        temperature (Tensor): positive scalar ``eta``.
        epsilon (Tensor or float): bound of the KL divergence, scalar.
        mask (Tensor, optional): boolean ``[*B, A]``, ``True`` for legal actions. Illegal ones get
            no weight and may have any value.

    Returns:
        The weights, detached, ``[*B, A]``, which sum to one (all zero where no action is legal),
        and the loss of each state, ``[*B]`` (zero where no action is legal).

    Examples:
        >>> q_value, log_prior = torch.tensor([0.0, 1.0, 9.0]), torch.zeros(3).log_softmax(-1)
        >>> weights, loss = categorical_mpo_weights_and_temperature_loss(
        ...     q_value, log_prior, torch.tensor(1.0), 0.1, mask=torch.tensor([True, True, False])
        ... )
        >>> weights
        tensor([0.2689, 0.7311, 0.0000])
    """
    if mask is None:
        # eq: categorical-weights, categorical-temperature-loss
        return mpo_weights_and_temperature_loss(
            q_value, temperature, epsilon, log_prior=log_prior, sample_dim=-1
        )
    # eq: legal-actions
    any_legal = mask.any(-1, keepdim=True)
    counted = mask | ~any_legal  # a state without any stays finite until it is left out
    q_value = torch.where(mask, q_value, 0.0)
    log_prior = torch.where(any_legal, log_prior, 0.0).masked_fill(~counted, -math.inf)
    # eq: categorical-weights, categorical-temperature-loss
    weights, loss = mpo_weights_and_temperature_loss(
        q_value, temperature, epsilon, log_prior=log_prior.log_softmax(-1), sample_dim=-1
    )
    return weights * any_legal, torch.where(any_legal.squeeze(-1), loss, 0.0 * loss)


def vmpo_weights_and_temperature_loss(
    advantage: Tensor,
    temperature: Tensor,
    epsilon: Tensor | float,
    *,
    top_k_fraction: float = 0.5,
    restarting_weights: Tensor | None = None,
    importance_weights: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Weights of the best samples of a batch and the dual loss of the temperature.

    The E-step of V-MPO, https://arxiv.org/abs/1909.12238.

    With :math:`\tilde D` the samples whose advantage is among the best ``top_k_fraction``,

    .. math::
        \psi_i = \frac{\rho_i \exp(A_i / \eta)}{\sum_{j \in \tilde D} \rho_j \exp(A_j / \eta)}
        \quad (i \in \tilde D), \qquad
        L_\eta = \eta \Big( \epsilon
            + \log \tfrac{1}{|\tilde D|} \sum_{j \in \tilde D} \rho_j \exp(A_j / \eta) \Big)

    Args:
        advantage (Tensor): advantages, ``[*B]``. The whole tensor is one batch; no gradient flows
            into it.
        temperature (Tensor): positive scalar ``eta``.
        epsilon (Tensor or float): bound of the KL divergence, scalar.
        top_k_fraction (float): fraction of the batch that is kept, in ``(0, 1]``. At least one
            sample is kept; samples tied with the last one kept are kept too.
        restarting_weights (Tensor, optional): ``[*B]``, zero for samples to leave out (actions
            that the environment ignored), anything else for samples to use. They count in the size
            that ``top_k_fraction`` refers to.
        importance_weights (Tensor, optional): ``[*B]``, the non-negative ratios ``rho``.
        mask (Tensor, optional): boolean ``[*B]``, ``False`` for padding, which is not part of the
            batch at all.

    Returns:
        The weights, detached, ``[*B]``, which sum to one (all zero when no sample is usable), the
        scalar loss (zero when no sample is usable), and the boolean mask of the selected samples.

    Examples:
        >>> advantage = torch.tensor([0.0, 1.0, 2.0, 3.0])
        >>> weights, loss, selected = vmpo_weights_and_temperature_loss(
        ...     advantage, torch.tensor(1.0), 0.1
        ... )
        >>> weights
        tensor([0.0000, 0.0000, 0.2689, 0.7311])
    """
    advantage = advantage.detach()
    usable = None if restarting_weights is None else restarting_weights != 0
    # eq: top-k
    selected = top_k_mask(advantage, top_k_fraction, usable, mask)
    counted = selected
    if importance_weights is not None:
        importance_weights = importance_weights.detach()
        counted = selected & (importance_weights > 0)
    any_counted = counted.any()

    # eq: vmpo-weights
    # The best advantage is taken out for accuracy; it is -inf when nothing is counted.
    best = advantage.masked_fill(~counted, -math.inf).amax()
    best = torch.where(any_counted, best, 0.0)
    logits = torch.where(counted, advantage - best, 0.0) / temperature
    if importance_weights is not None:
        logits = logits + torch.where(counted, importance_weights, 1.0).log()
    logits = torch.where(counted | ~any_counted, logits, -math.inf)
    log_sum_exp = logits.flatten().logsumexp(0)
    weights = (logits - log_sum_exp).detach().exp() * counted
    # eq: vmpo-temperature-loss
    log_mean_exp = log_sum_exp - selected.sum().clamp_min(1).log()
    loss = temperature * (epsilon + log_mean_exp) + best
    return weights, torch.where(any_counted, loss, 0.0 * loss), selected


def top_k_mask(
    advantage: Tensor, fraction: float, usable: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Which samples are among the best of a batch.

    V-MPO learns from these only, https://arxiv.org/abs/1909.12238.

    Args:
        advantage (Tensor): ``[*B]``; the whole tensor is one batch.
        fraction (float): fraction of the batch that is kept, in ``(0, 1]``. At least one sample is
            kept; samples tied with the last one kept are kept too.
        usable (Tensor, optional): boolean ``[*B]``, ``False`` for samples that are never kept. They
            may hold anything and count in the size that ``fraction`` refers to.
        mask (Tensor, optional): boolean ``[*B]``, ``False`` for samples that are not part of the
            batch. They may hold anything and do not count.

    Returns:
        A boolean mask ``[*B]``.

    Examples:
        >>> top_k_mask(torch.tensor([3.0, 1.0, 2.0, 0.0]), 0.5)
        tensor([ True, False,  True, False])
    """
    usable = torch.ones_like(advantage, dtype=torch.bool) if usable is None else usable
    usable = usable if mask is None else usable & mask
    advantage = advantage.masked_fill(~usable, -math.inf)
    # eq: top-k
    if mask is None:
        num_kept = max(1, int(fraction * advantage.numel()))
        threshold = advantage.flatten().topk(num_kept).values[-1]
    else:  # the size is known to the device only
        last_kept = (fraction * mask.sum().double()).long().clamp_min(1) - 1
        ranked = advantage.flatten().sort(descending=True).values
        threshold = ranked.gather(0, last_kept.unsqueeze(0))
    return usable & (advantage >= threshold)


def solve_temperature(
    value: Tensor,
    epsilon: Tensor | float,
    *,
    sample_dim: int = 0,
    log_prior: Tensor | None = None,
    mask: Tensor | None = None,
    floor: float = 1e-8,
    num_iterations: int = 24,
) -> Tensor:
    r"""Minimise the convex dual of the temperature exactly.

    The dual is that of MPO, https://arxiv.org/abs/1806.06920.

    Finds the ``eta`` at which the mean over states of :math:`KL(w \| p)` equals ``epsilon``, where
    :math:`w_i \propto p_i \exp(v_i / \eta)` and ``p`` is the prior over samples (uniform unless
    ``log_prior`` is given). Newton's method on :math:`\log KL` against :math:`\log \eta`, kept
    inside a bracket by bisection; a fixed number of tensor operations.

    Args:
        value (Tensor): ``[N, *B]`` with the ``N`` samples at ``sample_dim``.
        epsilon (Tensor or float): bound of the KL divergence, scalar, positive.
        sample_dim (int): where the samples are. Defaults to 0.
        log_prior (Tensor, optional): log-weights of the samples, of the shape of ``value``; they
            need not be normalised. ``-inf`` leaves a sample out.
        mask (Tensor, optional): ``[*B]``, ``False`` for states to leave out.
        floor (float): the smallest temperature returned. It is returned when no positive
            temperature reaches the bound, as for values that are all equal.
        num_iterations (int): iterations. Ordinary values need about five for full precision, a
            bound that falls between states of very different scales up to twenty.

    Returns:
        The temperature, a 0-d tensor.

    Examples:
        >>> q_value = torch.randn(20, 256)
        >>> eta = solve_temperature(q_value, 0.1)
        >>> weights, _ = mpo_weights_and_temperature_loss(q_value, eta, 0.1)
        >>> round(sample_kl_to_uniform(weights).mean().item(), 4)
        0.1
    """
    value = value.detach()
    if log_prior is None:
        log_prior = torch.zeros_like(value)
    log_prior = log_prior.log_softmax(sample_dim)
    if mask is not None:
        # A state left out contributes neither to the divergence nor to the bracket.
        keep = mask.unsqueeze(sample_dim)
        value = torch.where(keep, value, 0.0)
        log_prior = torch.where(keep, log_prior, -math.log(value.shape[sample_dim]))
    in_prior = log_prior > -math.inf
    best = value.masked_fill(~in_prior, -math.inf).amax(sample_dim, keepdim=True)
    value = torch.where(in_prior, value - best, 0.0)
    spread = -value.amin()

    def divergence_and_slope(log_eta: Tensor) -> tuple[Tensor, Tensor]:
        """Mean KL(w || p) and minus its derivative by log eta, Var_w(v / eta)."""
        # eq: temperature-slope
        scaled = value / log_eta.exp()
        log_weights = (scaled + log_prior).log_softmax(sample_dim)
        weights = log_weights.exp()
        mean = (weights * scaled).sum(sample_dim, keepdim=True)
        ratio = torch.where(in_prior, log_weights - log_prior, 0.0)
        variance = (weights * (scaled - mean).square()).sum(sample_dim)
        return (
            masked_mean((weights * ratio).sum(sample_dim), mask),
            masked_mean(variance, mask),
        )

    log_floor = math.log(floor)
    epsilon = torch.as_tensor(epsilon, dtype=value.dtype, device=value.device)
    # eq: temperature-bracket
    # Hoeffding's lemma: KL <= (spread / eta)^2 / 8, so the bound holds at the upper end.
    upper = (spread / (8 * epsilon).sqrt()).log().clamp_min(log_floor)
    lower = torch.full_like(upper, log_floor)
    tolerance = torch.finfo(value.dtype).eps ** 0.5
    log_eta = upper
    for _ in range(num_iterations):
        # eq: temperature-newton
        divergence, slope = divergence_and_slope(log_eta)
        too_cold = divergence > epsilon
        lower = torch.where(too_cold, log_eta, lower)
        upper = torch.where(too_cold, upper, log_eta)
        newton = log_eta + (divergence / epsilon).log() * divergence / slope
        # Rounding may carry a converged iterate just over the edge of its bracket.
        inside = (newton > lower - tolerance) & (newton < upper + tolerance)
        newton = torch.minimum(torch.maximum(newton, lower), upper)
        log_eta = torch.where(inside, newton, (lower + upper) / 2)
    return log_eta.exp()


def out_of_bounds_cost(action: Tensor, low: Tensor, high: Tensor) -> Tensor:
    r"""How far actions lie outside their bounds, as a (negative) value to be maximised.

    The action penalty of MPO with several objectives, https://arxiv.org/abs/2005.07513.

    .. math::
        c(a) = -\big\| (a - \mathrm{clip}(a, low, high)) / h \big\|_2, \qquad h = (high - low) / 2

    with :math:`h = 1` for a dimension that is bounded on one side only.

    Args:
        action (Tensor): ``[..., D]``.
        low (Tensor): lower bounds, ``[D]``.
        high (Tensor): upper bounds, ``[D]``.

    Returns:
        The cost, ``[...]``, zero for actions inside the bounds.

    Examples:
        >>> bound = torch.ones(2)
        >>> out_of_bounds_cost(torch.tensor([[0.5, -1.0], [4.0, 5.0]]), -bound, bound)
        tensor([-0., -5.])
    """
    # eq: out-of-bounds-cost
    half_range = (high - low) / 2
    half_range = torch.where(half_range.isinf(), 1.0, half_range)
    excess = (action - action.clamp(low, high)) / half_range
    return -torch.linalg.vector_norm(excess, dim=-1)


# Diagnostics of the weights ----------------------------------------------------------------------


def sample_kl_to_uniform(weights: Tensor, *, sample_dim: int = 0) -> Tensor:
    r""":math:`KL(w \| u) = \sum_i w_i \log(N w_i)`, ``[*B]``: 0 (uniform) to ``log N`` (one).

    Args:
        weights (Tensor): ``[N, *B]``, summing to one over ``sample_dim``.
        sample_dim (int): where the samples are. Defaults to 0.

    Returns:
        The divergence of each state, ``[*B]``.

    Examples:
        >>> sample_kl_to_uniform(torch.tensor([1.0, 0.0]))
        tensor(0.6931)
    """
    # eq: kl-to-uniform
    return math.log(weights.shape[sample_dim]) - weight_entropy(weights, sample_dim=sample_dim)


def sample_kl(weights: Tensor, log_prior: Tensor | None = None, *, sample_dim: int = 0) -> Tensor:
    r""":math:`KL(w \| p) = \sum_i w_i (\log w_i - \log p_i)`, for samples with :math:`p_i = 1/N`.

    Args:
        weights (Tensor): ``[N, *B]``, summing to one over ``sample_dim``.
        log_prior (Tensor, optional): log-probabilities of the candidates, of the same shape.
        sample_dim (int): where the samples are. Defaults to 0.

    Returns:
        The divergence of each state, ``[*B]``.

    Examples:
        >>> weights = torch.tensor([1.0, 0.0])
        >>> sample_kl(weights, torch.tensor([0.25, 0.75]).log())
        tensor(1.3863)
    """
    if log_prior is None:
        return sample_kl_to_uniform(weights, sample_dim=sample_dim)
    # eq: kl-to-prior
    cross = torch.where(weights > 0, weights * log_prior, 0.0).sum(sample_dim)
    return -weight_entropy(weights, sample_dim=sample_dim) - cross


def weight_entropy(weights: Tensor, *, sample_dim: int = 0) -> Tensor:
    r""":math:`H(w) = -\sum_i w_i \log w_i`, ``[*B]``; zero weights contribute nothing.

    Args:
        weights (Tensor): ``[N, *B]``, summing to one over ``sample_dim``.
        sample_dim (int): where the samples are. Defaults to 0.

    Returns:
        The entropy of each state, ``[*B]``.

    Examples:
        >>> weight_entropy(torch.tensor([0.5, 0.5]))
        tensor(0.6931)
    """
    # eq: weight-entropy
    return -torch.special.xlogy(weights, weights).sum(sample_dim)


def effective_sample_size(weights: Tensor, *, sample_dim: int = 0) -> Tensor:
    r""":math:`1 / \sum_i w_i^2`, ``[*B]``: from 1 (one sample) to ``N`` (uniform weights).

    Args:
        weights (Tensor): ``[N, *B]``, summing to one over ``sample_dim``.
        sample_dim (int): where the samples are. Defaults to 0.

    Returns:
        The number for each state, ``[*B]``.

    Examples:
        >>> effective_sample_size(torch.tensor([0.5, 0.5, 0.0]))
        tensor(2.)
    """
    # eq: effective-sample-size
    return 1 / weights.square().sum(sample_dim)
