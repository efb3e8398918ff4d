r"""Off-policy corrected returns for action values.

All of them are one recursion, backwards in time, over the temporal differences
:math:`\delta_t = r_t + \gamma (1 - terminated_t) v_{t+1} - q_t`:

.. math::
    \Delta_t = \delta_t + \gamma (1 - done_t) \, c_{t+1} \, \Delta_{t+1}, \qquad
    target_t = q_t + \Delta_t

and differ only in the trace coefficient ``c``, the ``trace`` of
:class:`~minerva_torchrl.Retrace`:

================================  =====================================  =========================
:func:`retrace_coefficient`       :math:`\lambda \min(1, \pi / \mu)`     safe for any behaviour
:func:`importance_coefficient`    :math:`\pi / \mu`                      unbiased, unbounded
:func:`tree_backup_coefficient`   :math:`\lambda \pi`                    needs no behaviour policy
:func:`q_lambda_coefficient`      :math:`\lambda`                        for behaviour close to pi
================================  =====================================  =========================

The coefficient is that of the *next* step, :math:`c_{t+1}`, and :math:`\delta` carries no ratio:
this is not V-trace. ``done`` cuts the trace, ``terminated`` alone removes the bootstrap, so that a
time limit bootstraps from the value of the last observation and leaks nothing from the next
trajectory.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "importance_coefficient",
    "off_policy_return_estimate",
    "q_lambda_coefficient",
    "retrace_coefficient",
    "retrace_return_estimate",
    "standardize",
    "tree_backup_coefficient",
    "vec_off_policy_return_estimate",
    "vec_retrace_return_estimate",
]

# Trace coefficients ------------------------------------------------------------------------------


def retrace_coefficient(log_pi: Tensor, log_mu: Tensor, lmbda: Tensor | float) -> Tensor:
    r""":math:`\lambda \min(1, \pi/\mu)`, clipped in log space so that nothing overflows.

    From Retrace, https://arxiv.org/abs/1606.02647.

    Args:
        log_pi (Tensor): log-probability of the stored action under the target policy, any shape.
        log_mu (Tensor): its log-probability under the behaviour policy when it was taken, the same
            shape.
        lmbda (Tensor or float): trace parameter, in ``[0, 1]``.

    Returns:
        The coefficient of every step, of the same shape.

    Examples:
        >>> log_pi = torch.tensor([0.25, 2.0]).log()
        >>> retrace_coefficient(log_pi, torch.zeros(2), 1.0)
        tensor([0.2500, 1.0000])
    """
    # eq: retrace-coefficient
    return lmbda * (log_pi - log_mu).clamp_max(0.0).exp()


def importance_coefficient(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    r""":math:`\pi / \mu`.

    Compared with the others in https://arxiv.org/abs/1606.02647.

    Args:
        log_pi (Tensor): log-probability of the stored action under the target policy, any shape.
        log_mu (Tensor): its log-probability under the behaviour policy when it was taken, the same
            shape.

    Returns:
        The coefficient of every step, of the same shape.

    Examples:
        >>> importance_coefficient(torch.tensor([0.25, 2.0]).log(), torch.zeros(2))
        tensor([0.2500, 2.0000])
    """
    # eq: importance-coefficient
    return (log_pi - log_mu).exp()


def tree_backup_coefficient(log_pi: Tensor, lmbda: Tensor | float) -> Tensor:
    r""":math:`\lambda \pi(a|s)`. A density above one, possible for continuous actions, expands.

    Tree-Backup (Precup et al., 2000); see https://arxiv.org/abs/1606.02647.

    Args:
        log_pi (Tensor): log-probability of the stored action under the target policy, any shape.
        lmbda (Tensor or float): trace parameter, in ``[0, 1]``.

    Returns:
        The coefficient of every step, of the same shape.

    Examples:
        >>> tree_backup_coefficient(torch.tensor([0.5]).log(), 0.5)
        tensor([0.2500])
    """
    # eq: tree-backup-coefficient
    return lmbda * log_pi.exp()


def q_lambda_coefficient(like: Tensor, lmbda: Tensor | float) -> Tensor:
    r""":math:`\lambda` everywhere (Harutyunyan et al., 2016), of the shape of ``like``.

    See https://arxiv.org/abs/1602.04951.

    Args:
        like (Tensor): of the shape that is wanted.
        lmbda (Tensor or float): trace parameter, in ``[0, 1]``.

    Returns:
        The coefficient of every step, of the same shape.

    Examples:
        >>> q_lambda_coefficient(torch.zeros(2), 0.9)
        tensor([0.9000, 0.9000])
    """
    # eq: q-lambda-coefficient
    return lmbda * torch.ones_like(like)


# The recursion -----------------------------------------------------------------------------------


def off_policy_return_estimate(
    gamma: Tensor | float,
    coefficient: Tensor,
    state_action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """Return estimate for any trace coefficient, as a loop over time: the reference form.

    The recursion is that of https://arxiv.org/abs/1606.02647.

    Args:
        gamma (Tensor or float): discount factor, scalar or of the shape of ``reward``.
        coefficient (Tensor): ``[*B, T, 1]``, ``c_t`` of its own action. The first is not used.
        state_action_value (Tensor): ``[*B, T, 1]``, ``q_t``, the value of the stored action.
        next_state_value (Tensor): ``v_{t+1}``, the value of the stored next observation under the
            target policy, ``[*B, T, 1]``.
        reward (Tensor): ``r_t``, ``[*B, T, 1]``.
        done (Tensor): end of a trajectory after step ``t``, boolean ``[*B, T, 1]``.
        terminated (Tensor, optional): true termination after step ``t``, boolean ``[*B, T, 1]``.
            Defaults to ``done``.

    Keyword Args:
        time_dim (int): dimension of time. Defaults to ``-2``, for tensors ``[*B, T, 1]``.

    All tensors have one shape. With another ``time_dim`` it is any that has ``T`` there.

    Returns:
        The target of every step, of the same shape.

    Examples:
        >>> reward = torch.ones(3, 1)
        >>> done = torch.tensor([[False], [False], [True]])
        >>> zero, one = torch.zeros(3, 1), torch.ones(3, 1)
        >>> off_policy_return_estimate(0.5, one, zero, zero, reward, done).flatten()
        tensor([1.7500, 1.5000, 1.0000])
    """
    delta, decay = _temporal_difference_and_decay(
        gamma, coefficient, state_action_value, next_state_value, reward, done, terminated, time_dim
    )
    # eq: trace-recursion
    correction = torch.zeros_like(delta[..., 0])
    corrections = []
    for t in range(delta.shape[-1] - 1, -1, -1):
        correction = delta[..., t] + _decayed(decay[..., t], correction)
        corrections.append(correction)
    corrections.reverse()
    return state_action_value + torch.stack(corrections, -1).movedim(-1, time_dim)


def vec_off_policy_return_estimate(
    gamma: Tensor | float,
    coefficient: Tensor,
    state_action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """:func:`off_policy_return_estimate` without a loop over time.

    The recursion is that of https://arxiv.org/abs/1606.02647.

    The recursion is doubled: after ``k`` rounds every step has gathered ``2**k`` of its successors,
    so that ``ceil(log2(T))`` rounds of static shape do. Exact up to rounding.

    Args:
        gamma (Tensor or float): discount factor, scalar or of the shape of ``reward``.
        coefficient (Tensor): ``[*B, T, 1]``, ``c_t`` of its own action. The first is not used.
        state_action_value (Tensor): ``[*B, T, 1]``, ``q_t``, the value of the stored action.
        next_state_value (Tensor): ``v_{t+1}``, the value of the stored next observation under the
            target policy, ``[*B, T, 1]``.
        reward (Tensor): ``r_t``, ``[*B, T, 1]``.
        done (Tensor): end of a trajectory after step ``t``, boolean ``[*B, T, 1]``.
        terminated (Tensor, optional): true termination after step ``t``, boolean ``[*B, T, 1]``.
            Defaults to ``done``.
        time_dim (int): dimension of time. Defaults to ``-2``, for tensors ``[*B, T, 1]``.

    Returns:
        The target of every step, of the same shape.

    Examples:
        >>> coefficient, q, v, reward = torch.rand(4, 2, 7, 1)
        >>> data = (coefficient, q, v, reward, torch.zeros(2, 7, 1, dtype=torch.bool))
        >>> torch.testing.assert_close(
        ...     vec_off_policy_return_estimate(0.9, *data), off_policy_return_estimate(0.9, *data)
        ... )
    """
    delta, decay = _temporal_difference_and_decay(
        gamma, coefficient, state_action_value, next_state_value, reward, done, terminated, time_dim
    )
    # eq: trace-doubling
    length = delta.shape[-1]
    reach = 1
    while reach < length:
        pad = (0, reach)
        later_delta = torch.nn.functional.pad(delta[..., reach:], pad)
        later_decay = torch.nn.functional.pad(decay[..., reach:], pad)
        delta = delta + _decayed(decay, later_delta)
        decay = _decayed(decay, later_decay)
        reach *= 2
    return state_action_value + delta.movedim(-1, time_dim)


def retrace_return_estimate(
    gamma: Tensor | float,
    lmbda: Tensor | float,
    log_pi: Tensor,
    log_mu: Tensor,
    state_action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    r"""Retrace(:math:`\lambda`) return estimate, as a loop over time.

    Munos et al. (2016), *Safe and efficient off-policy reinforcement learning*,
    https://arxiv.org/abs/1606.02647.

    .. math::
        G_t = r_t + \gamma \big[ v_{t+1}
            + \lambda \min\!\big(1, \tfrac{\pi(a_{t+1})}{\mu(a_{t+1})}\big)
            (G_{t+1} - q_{t+1}) \big]

    Args:
        gamma (Tensor or float): discount factor, scalar or of the shape of ``reward``.
        lmbda (Tensor or float): trace parameter, in ``[0, 1]``.
        log_pi (Tensor): ``[*B, T, 1]``, log-probability of the stored action, target policy.
        log_mu (Tensor): ``[*B, T, 1]``, that of the behaviour policy when the action was taken.
        state_action_value (Tensor): ``[*B, T, 1]``, ``q_t``, the value of the stored action.
        next_state_value (Tensor): ``v_{t+1}``, the value of the stored next observation under the
            target policy, ``[*B, T, 1]``.
        reward (Tensor): ``r_t``, ``[*B, T, 1]``.
        done (Tensor): end of a trajectory after step ``t``, boolean ``[*B, T, 1]``.
        terminated (Tensor, optional): true termination after step ``t``, boolean ``[*B, T, 1]``.
            Defaults to ``done``.

    Keyword Args:
        time_dim (int): dimension of time. Defaults to ``-2``, for tensors ``[*B, T, 1]``.

    All tensors have one shape. With another ``time_dim`` it is any that has ``T`` there.

    Returns:
        The target of every step, of the same shape.

    Examples:
        >>> B, T = 2, 5
        >>> log_pi, log_mu, q, v, reward = torch.randn(5, B, T, 1)
        >>> done = torch.zeros(B, T, 1, dtype=torch.bool)
        >>> target = retrace_return_estimate(0.99, 0.95, log_pi, log_mu, q, v, reward, done)
        >>> target.shape
        torch.Size([2, 5, 1])
    """
    # eq: retrace-return
    coefficient = retrace_coefficient(log_pi, log_mu, lmbda)
    return off_policy_return_estimate(
        gamma,
        coefficient,
        state_action_value,
        next_state_value,
        reward,
        done,
        terminated,
        time_dim=time_dim,
    )


def vec_retrace_return_estimate(
    gamma: Tensor | float,
    lmbda: Tensor | float,
    log_pi: Tensor,
    log_mu: Tensor,
    state_action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """:func:`retrace_return_estimate` without a loop over time.

    Retrace is from https://arxiv.org/abs/1606.02647.

    Args:
        gamma (Tensor or float): discount factor, scalar or of the shape of ``reward``.
        lmbda (Tensor or float): trace parameter, in ``[0, 1]``.
        log_pi (Tensor): ``[*B, T, 1]``, log-probability of the stored action, target policy.
        log_mu (Tensor): ``[*B, T, 1]``, that of the behaviour policy when the action was taken.
        state_action_value (Tensor): ``[*B, T, 1]``, ``q_t``, the value of the stored action.
        next_state_value (Tensor): ``v_{t+1}``, the value of the stored next observation under the
            target policy, ``[*B, T, 1]``.
        reward (Tensor): ``r_t``, ``[*B, T, 1]``.
        done (Tensor): end of a trajectory after step ``t``, boolean ``[*B, T, 1]``.
        terminated (Tensor, optional): true termination after step ``t``, boolean ``[*B, T, 1]``.
            Defaults to ``done``.
        time_dim (int): dimension of time. Defaults to ``-2``, for tensors ``[*B, T, 1]``.

    Returns:
        The target of every step, of the same shape.

    Examples:
        >>> log_pi, log_mu, q, v, reward = torch.randn(5, 2, 7, 1)
        >>> data = (log_pi, log_mu, q, v, reward, torch.zeros(2, 7, 1, dtype=torch.bool))
        >>> torch.testing.assert_close(
        ...     vec_retrace_return_estimate(0.9, 0.95, *data),
        ...     retrace_return_estimate(0.9, 0.95, *data),
        ... )
    """
    # eq: retrace-return
    coefficient = retrace_coefficient(log_pi, log_mu, lmbda)
    return vec_off_policy_return_estimate(
        gamma,
        coefficient,
        state_action_value,
        next_state_value,
        reward,
        done,
        terminated,
        time_dim=time_dim,
    )


# Advantages --------------------------------------------------------------------------------------


def standardize(advantage: Tensor, groups: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Shift and scale to mean zero and standard deviation one, within each group if there are any.

    Args:
        advantage (Tensor): advantages ``[*B, T, 1]``.
        groups (Tensor, optional): the group of every step, integers ``[*B, T]`` or ``[*B, T, 1]``.
        eps (float): the least standard deviation to divide by.

    Returns:
        Advantages of the same shape. One that is alone in its group is zero.

    Examples:
        >>> standardize(torch.tensor([[1.0], [3.0]])).flatten()
        tensor([-0.7071,  0.7071])
    """
    if groups is None:
        groups = torch.zeros_like(advantage, dtype=torch.long)
    groups = groups.reshape(advantage.shape)
    result = torch.zeros_like(advantage)
    for group in groups.unique():
        # eq: standardised-advantage
        members = advantage[groups == group]
        scale = members.std(correction=min(1, len(members) - 1)).clamp_min(eps)
        result = result.masked_scatter(groups == group, (members - members.mean()) / scale)
    return result


# Inside the recursion ----------------------------------------------------------------------------


def _decayed(decay: Tensor, later: Tensor) -> Tensor:
    """``decay * later``, where a decay of zero also stops what is not finite."""
    return decay * torch.where(decay == 0, 0.0, later)


def _temporal_difference_and_decay(
    gamma: Tensor | float,
    coefficient: Tensor,
    state_action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None,
    time_dim: int,
) -> tuple[Tensor, Tensor]:
    r""":math:`\delta_t` and :math:`\gamma (1 - done_t) c_{t+1}`, with time moved to the end."""
    terminated = done if terminated is None else terminated
    shapes = {
        "coefficient": coefficient.shape,
        "state_action_value": state_action_value.shape,
        "next_state_value": next_state_value.shape,
        "reward": reward.shape,
        "done": done.shape,
        "terminated": terminated.shape,
    }
    if len(set(shapes.values())) != 1:
        listed = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(f"All inputs must have the same shape, got {listed}.")
    if not -reward.ndim <= time_dim < reward.ndim:
        raise ValueError(
            f"time_dim must be a dimension of the inputs of shape {tuple(reward.shape)}, "
            f"got {time_dim}."
        )
    # eq: temporal-difference
    # A value that must not count is left out, not multiplied by zero: it may be NaN or infinite.
    bootstrap = torch.where(terminated.bool(), 0.0, next_state_value)
    delta = reward + gamma * bootstrap - state_action_value
    # eq: trace-decay
    # The last step of the data has no successor, so its trace ends there.
    next_coefficient = torch.nn.functional.pad(
        coefficient.movedim(time_dim, -1)[..., 1:], (0, 1)
    ).movedim(-1, time_dim)
    decay = torch.where(done.bool(), 0.0, gamma * next_coefficient)
    return delta.movedim(time_dim, -1), decay.movedim(time_dim, -1)
