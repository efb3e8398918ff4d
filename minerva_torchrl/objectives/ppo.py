"""PPO assembled from TorchRL's own parts, with one consistent choice of coefficients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor
from torchrl.objectives import ClipPPOLoss, LossModule, ValueEstimators

from minerva_torchrl.objectives.checks import check_value_scale
from minerva_torchrl.objectives.critics import Critic, ScalarCritic, check_width
from minerva_torchrl.objectives.critics.states import resolve_state_critic, value_network

__all__ = [
    "estimate_advantage",
    "kl_k3",
    "make_ppo_loss",
    "ppo_kl_k3",
]


def _check_settings(
    clip_epsilon: float,
    clip_value: bool | float,
    value_coeff: float,
    entropy_coeff: float | Mapping[NestedKey, float],
    gamma: float,
    lmbda: float,
) -> None:
    if not 0.0 < clip_epsilon < 1.0:
        raise ValueError(f"clip_epsilon must lie strictly between 0 and 1, got {clip_epsilon}.")
    if not isinstance(clip_value, bool) and not clip_value > 0.0:
        raise ValueError(f"clip_value must be True, False or a positive radius, got {clip_value}.")
    if not value_coeff >= 0.0:
        raise ValueError(f"value_coeff must not be negative, got {value_coeff}.")
    coefficients = entropy_coeff.values() if isinstance(entropy_coeff, Mapping) else [entropy_coeff]
    if not all(coefficient >= 0.0 for coefficient in coefficients):
        raise ValueError(f"entropy_coeff must not be negative, got {entropy_coeff}.")
    for name, value in (("gamma", gamma), ("lmbda", lmbda)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}.")


def make_ppo_loss(
    actor_network: ProbabilisticTensorDictSequential,
    critic_network: TensorDictModuleBase,
    *,
    clip_epsilon: float = 0.2,
    clip_value: bool | float = True,
    value_coeff: float = 0.5,
    entropy_coeff: float | Mapping[NestedKey, float] = 0.0,
    normalize_advantage: bool = True,
    gamma: float = 0.99,
    lmbda: float = 0.95,
    truncation_is_terminal: bool = False,
    separate_losses: bool = False,
    reduction: str | None = None,
    critic: Critic | None = None,
    loss_class: type[ClipPPOLoss] = ClipPPOLoss,
) -> ClipPPOLoss:
    r"""TorchRL's clipped PPO loss with its advantage estimator, ready for minibatches.

    PPO is from https://arxiv.org/abs/1707.06347.

    With the ratio :math:`r = \pi(a|s) / \pi_{old}(a|s)`, the advantage :math:`\hat A`, the return
    :math:`R`, and the value :math:`V_{old}` that the rollout stored, the three ``loss_*`` entries
    add up to

    .. math::
        L &= \mathrm{mean} \max(-\hat A r, -\hat A\, \mathrm{clip}(r, 1 - \epsilon, 1 + \epsilon))
            - c_H\, \mathrm{mean}\, H(\pi(\cdot|s)) \\
          &+ c_V \tfrac{1}{2}\, \mathrm{mean} \max((V - R)^2, (V_{clip} - R)^2), \qquad
        V_{clip} = V_{old} + \mathrm{clip}(V - V_{old}, -\epsilon, \epsilon)

    where :math:`\hat A` is the generalised advantage, standardised over the batch that the loss is
    given, that is over each minibatch. A state at which an episode was truncated is not terminal:
    the return goes on with its value.

    The loss expects ``advantage``, ``value_target`` and ``state_value`` in its input. Write them
    once per rollout with :func:`estimate_advantage`, before the minibatches are drawn: left to
    itself, the loss would estimate advantages across the shuffled transitions of a minibatch.

    Args:
        actor_network (ProbabilisticTensorDictSequential): the policy. The rollout must contain its
            log-probabilities (``return_log_prob=True``).
        critic_network (TensorDictModuleBase): writes ``state_value``, ``[*B, 1]``.

    Keyword Args:
        clip_epsilon (float): half-width ``epsilon`` of the ratio's interval. Defaults to 0.2.
        clip_value (bool or float): whether to clip the change of the value; a number is the radius
            to use instead of ``clip_epsilon``. Defaults to ``True``.
        value_coeff (float): ``c_V``; the half of the squared error is not part of it. 0 leaves out
            the value loss. Defaults to 0.5.
        entropy_coeff (float or mapping): ``c_H``, one for all action heads or one per head.
            Defaults to 0, which still reports the entropy.
        normalize_advantage (bool): whether to standardise the advantages. Defaults to ``True``.
        gamma (float): discount. Defaults to 0.99.
        lmbda (float): trace parameter of the generalised advantage. Defaults to 0.95.
        truncation_is_terminal (bool): end the return where the episode was truncated, as the
            reference agent (Minerva) does. Defaults to ``False``.
        separate_losses (bool): keep the value loss away from parameters that actor and critic
            share. Defaults to ``False``.
        reduction (str, optional): ``"mean"``, ``"sum"`` or ``"none"``. Defaults to ``"mean"``.
        critic (Critic, optional): what the outputs of ``critic_network`` mean: a ``TwoHotCritic``
            or ``HLGaussCritic``, with ``clip_value=False`` and the loss class for it,
            ``BinnedClipPPOLoss`` of :mod:`minerva_torchrl.modules`. Default: the value itself.
        loss_class (type): :class:`~torchrl.objectives.ClipPPOLoss` (default) or a subclass:
            ``DirectClipPPOLoss`` of :mod:`minerva_torchrl.modules` returns the same numbers faster,
            and a critic with a PopArt head needs its ``PopArtClipPPOLoss``.

    Returns:
        The loss. Its output has ``loss_objective``, ``loss_critic``, ``loss_entropy`` and metrics;
        :func:`ppo_kl_k3` reads a KL estimate from it.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> from torchrl.modules import IndependentNormal, NormalParamExtractor, ProbabilisticActor
        >>> network = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ...     return_log_prob=True,
        ... )
        >>> critic = TensorDictModule(
        ...     nn.Linear(3, 1), in_keys=["observation"], out_keys=["state_value"]
        ... )
        >>> loss = make_ppo_loss(actor, critic)
        >>> end = torch.zeros(2, 8, 1, dtype=torch.bool)
        >>> rollout = TensorDict(
        ...     {
        ...         "observation": torch.randn(2, 8, 3),
        ...         "next": {
        ...             "observation": torch.randn(2, 8, 3),
        ...             "reward": torch.randn(2, 8, 1),
        ...             "done": end,
        ...             "terminated": end,
        ...         },
        ...     },
        ...     batch_size=[2, 8],
        ... )
        >>> with torch.no_grad():
        ...     rollout = actor(rollout)
        >>> minibatch = estimate_advantage(loss, rollout).reshape(-1)[:4]
        >>> losses = loss(minibatch)
        >>> total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        >>> total.backward()
    """
    _check_settings(clip_epsilon, clip_value, value_coeff, entropy_coeff, gamma, lmbda)
    if not hasattr(actor_network, "get_dist"):
        raise TypeError(
            "actor_network must be a probabilistic actor, for example a ProbabilisticActor, "
            f"got {type(actor_network).__name__}."
        )
    if not isinstance(critic_network, TensorDictModuleBase):
        raise TypeError(
            "critic_network must be a TensorDictModule that writes 'state_value', "
            f"got {type(critic_network).__name__}."
        )
    if not issubclass(loss_class, ClipPPOLoss):
        raise TypeError(f"loss_class must be ClipPPOLoss or a subclass, got {loss_class!r}.")
    check_value_scale(critic_network, loss_class)
    meaning = resolve_state_critic(critic, "l2", clip_value)
    check_width([critic_network], "critic_network", meaning.width, f"a {type(meaning).__name__}")
    if meaning.loss_function != "l2":
        raise ValueError(
            "make_ppo_loss has the squared error of a scalar critic, got a ScalarCritic with "
            f"loss_function={meaning.loss_function!r}."
        )
    binned = type(meaning) is not ScalarCritic
    if binned != getattr(loss_class, "takes_bins", False):
        raise ValueError(
            f"a {type(meaning).__name__} does not go with {loss_class.__name__}: critics of "
            "bins need BinnedClipPPOLoss of minerva_torchrl.modules, and it needs one of them."
        )
    arguments: dict[str, Any] = {"critic": meaning} if binned else {}
    critic_network, _ = value_network(critic_network, meaning)
    # eq: ppo-surrogate, ppo-value-loss
    loss = loss_class(
        actor_network,
        critic_network,
        clip_epsilon=clip_epsilon,
        clip_value=clip_value,
        critic_coeff=value_coeff if binned else 0.5 * value_coeff,
        loss_critic_type="l2",
        entropy_coeff=entropy_coeff,
        normalize_advantage=normalize_advantage,
        separate_losses=separate_losses,
        reduction=reduction,
        **arguments,
    )
    if loss.clip_value is not None:
        # TorchRL branches on this buffer, which makes every call wait for the device and breaks the
        # graph of a compiled loss. As a number it does neither.
        radius = clip_epsilon if clip_value is True else float(clip_value)
        del loss.clip_value
        loss.clip_value = radius
    if truncation_is_terminal:
        loss.set_keys(terminated=loss.tensor_keys.done)
    # As tensors of the critic's precision: TorchRL would round the numbers to single precision.
    dtypes = (parameter.dtype for parameter in critic_network.parameters())
    precision = next(dtypes, torch.get_default_dtype())
    # eq: generalised-advantage
    loss.make_value_estimator(
        ValueEstimators.GAE,
        gamma=torch.tensor(gamma, dtype=precision),
        lmbda=torch.tensor(lmbda, dtype=precision),
        differentiable=False,
        # The vectorised form drops terms below 1e-7; the loop is exact and runs once per rollout.
        vectorized=False,
    )
    return loss


@torch.no_grad()
def estimate_advantage(loss: LossModule, rollout: TensorDictBase) -> TensorDictBase:
    """Write ``advantage``, ``value_target`` and ``state_value`` with the loss's own critic.

    Generalised advantages are from https://arxiv.org/abs/1506.02438.

    Call it once per rollout, before the first optimisation step: every epoch then regresses to the
    same targets, and ``state_value`` is the value at collection time that value clipping needs.

    Args:
        loss (LossModule): a loss with ``critic_network`` and a value estimator, for example from
            :func:`make_ppo_loss`.
        rollout (TensorDictBase): ``[*B, T]``, time last, in the order of collection.

    Returns:
        ``rollout`` with the three entries, ``[*B, T, 1]`` each.

    Examples:
        See :func:`make_ppo_loss`.
    """
    return loss.value_estimator(
        rollout,
        params=loss.critic_network_params,
        target_params=loss.target_critic_network_params,
    )


def kl_k3(log_ratio: Tensor) -> Tensor:
    r"""Low-variance estimate of :math:`KL(\pi_{old} \| \pi)` from samples of the old policy.

    .. math::
        k_3 = \mathrm{mean}(r - 1 - \log r), \qquad r = \pi(a|s) / \pi_{old}(a|s)

    Every term is non-negative, unlike those of the plain estimate :math:`\mathrm{mean}(-\log r)`;
    both have the same expectation.

    Args:
        log_ratio (Tensor): ``log pi(a|s) - log pi_old(a|s)``, any shape.

    Returns:
        A scalar.

    Examples:
        >>> kl_k3(torch.tensor([0.0, 0.1, -0.1]))
        tensor(0.0033)
    """
    # eq: kl-k3
    return (log_ratio.expm1() - log_ratio).mean()


def ppo_kl_k3(losses: TensorDictBase) -> Tensor:
    r"""The estimate of :func:`kl_k3` from what ``ClipPPOLoss`` reports.

    The loss reports ``mean_ratio`` :math:`= \mathrm{mean}(r)` and ``kl_approx``
    :math:`= \mathrm{mean}(-\log r)`, hence :math:`k_3 =` ``mean_ratio - 1 + kl_approx``. Both are
    means over the whole minibatch, masked transitions included.

    Args:
        losses (TensorDictBase): output of a ``ClipPPOLoss`` built without ``delay_actor``, whose
            two metrics would describe different ratios.

    Returns:
        A scalar, detached.

    Examples:
        >>> from tensordict import TensorDict
        >>> losses = TensorDict({"mean_ratio": torch.tensor(1.02), "kl_approx": torch.tensor(0.01)})
        >>> ppo_kl_k3(losses)
        tensor(0.0300)
    """
    missing = [key for key in ("mean_ratio", "kl_approx") if key not in losses]
    if missing:
        raise ValueError(
            f"losses must be the output of a ClipPPOLoss; the entries {missing} are missing from "
            f"{sorted(losses.keys())}."
        )
    # eq: kl-k3
    return (losses["mean_ratio"] - 1.0 + losses["kl_approx"]).detach()
