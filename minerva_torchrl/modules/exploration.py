"""Exploration noise that is correlated over time."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    dispatch,
)
from torch import Tensor
from torch import distributions as D
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import IndependentNormal, TanhNormal
from torchrl.modules.tensordict_module import SafeProbabilisticTensorDictSequential

__all__ = ["PinkNoiseActor"]

_GAUSSIANS = (IndependentNormal, TanhNormal, D.MultivariateNormal)


class PinkNoiseActor(SafeProbabilisticTensorDictSequential):
    r"""A Gaussian policy whose samples in successive steps have correlated noise.

    Independent noise cancels out over a few steps, and explores little where actions have to work
    together for some time. Pink noise has as much power in every octave of frequencies, from single
    steps to about a thousand. Every single action has the distribution of the policy, so that
    log-probabilities are the usual ones; only the actions of different steps depend on each other.

    The noise is the sum of :math:`K` autoregressive processes, the time constants of which double,

    .. math::

        x_k' = \rho_k x_k + \sqrt{1 - \rho_k^2}\, u_k, \quad \rho_k = e^{-2^{-k}}, \quad
        z = \frac{1}{\sqrt{K}} \sum_{k=0}^{K-1} x_k, \quad u_k \sim \mathcal{N}(0, I),

    each in its stationary distribution from the first step on. An episode need not be known to
    begin: the noise goes on, as independent of where the episode starts as a new one.

    The policy's modules are shared, not copied, and have the same names, so that its weights can be
    loaded. With another exploration type than ``RANDOM`` this is the policy itself. Environments
    that run side by side (the batch of a TensorDict) have noise of their own.

    Args:
        actor (ProbabilisticTensorDictSequential): a policy that ends with ``IndependentNormal``,
            ``TanhNormal`` or a ``MultivariateNormal``.

    Keyword Args:
        octaves (int): how many processes. Defaults to ``9``, time constants of 1 to 256 steps.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.envs.utils import set_exploration_type
        >>> from torchrl.modules import ProbabilisticActor
        >>> from minerva_torchrl.modules import GaussianPolicy
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(GaussianPolicy(3, 1, (8,)), ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ... )
        >>> explorer = PinkNoiseActor(actor)  # give it to a collector, and the actor to the loss
        >>> with set_exploration_type(ExplorationType.RANDOM):
        ...     data = explorer(TensorDict(observation=torch.randn(4, 3), batch_size=[4]))
        >>> data["action"].shape, explorer.processes.shape
        (torch.Size([4, 1]), torch.Size([9, 4, 1]))
    """

    processes: Tensor | None
    """State of the noise ``[octaves, *K, A]``; ``None`` before the first action. Not a buffer: it
    belongs to where the policy acts, and is not to be copied with its weights."""

    def __init__(self, actor: ProbabilisticTensorDictSequential, *, octaves: int = 9) -> None:
        problem = self.problem_with(actor)
        if problem is not None:
            raise ValueError(f"actor {problem}")
        if octaves < 1:
            raise ValueError(f"octaves must be at least 1, got {octaves}.")
        super().__init__(*cast("Any", actor).module)
        self._decay = torch.exp(-1.0 / 2.0 ** torch.arange(octaves))
        self.processes = None

    @staticmethod
    def problem_with(actor: Any) -> str | None:
        """Why a policy can't have pink noise; ``None`` if it can."""
        modules = list(getattr(actor, "module", []))
        head = modules[-1] if modules else None
        if not isinstance(head, ProbabilisticTensorDictModule):
            return f"must be a ProbabilisticTensorDictSequential, got {type(actor).__name__}."
        if not issubclass(head.distribution_class, _GAUSSIANS):
            return (
                "must have IndependentNormal, TanhNormal or MultivariateNormal as its distribution "
                f"for pink noise, got {head.distribution_class.__name__}."
            )
        if getattr(head, "safe", False):
            return "must have safe=False for pink noise, got True."
        if head._generator is not None or head._generator_key is not None:
            return "must have no generator of its own for pink noise."
        if head.num_samples is not None:
            return f"must draw one sample for pink noise, got num_samples={head.num_samples}."
        return None

    def draw(self, like: Tensor) -> Tensor:
        """The noise of the next step, standard normal.

        Args:
            like (Tensor): has the shape ``[*K, A]``, type and device that are wanted. Processes
                of another shape, type or device start anew.
        """
        # eq: pink-noise
        self._decay = self._decay.to(like)  # copied to another device once, not in every step
        decay = self._decay.reshape(-1, *[1] * like.ndim)
        fresh = torch.randn(len(decay), *like.shape, dtype=like.dtype, device=like.device)
        old = self.processes
        if old is None or (old.shape, old.dtype, old.device) != _form(fresh):
            self.processes = fresh
        else:
            self.processes = decay * old + (1 - decay.square()).sqrt() * fresh
        return self.processes.sum(0) / math.sqrt(len(decay))

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        """Act, with the policy's keys."""
        *networks, head = cast("Any", self.module)
        if (exploration_type() or head.default_interaction_type) != ExplorationType.RANDOM:
            return super().forward(tensordict, *args, **kwargs)
        for network in networks:
            tensordict = network(tensordict)
        distribution = head.get_dist(tensordict)
        action = _sample(distribution, self.draw)
        tensordict.set(head.dist_sample_keys[0], action)
        if head.return_log_prob:
            tensordict.set(head.log_prob_key, distribution.log_prob(action))
        return tensordict


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _sample(distribution: Any, draw: Any) -> Tensor:
    """The action of a Gaussian, with a tanh or without, for noise that is drawn like its mean."""
    if isinstance(distribution, D.MultivariateNormal):
        noise = draw(distribution.loc).unsqueeze(-1)
        return distribution.loc + (distribution.scale_tril @ noise).squeeze(-1)
    if not isinstance(distribution, TanhNormal):
        mean = distribution.mean
        action: Tensor = mean + distribution.stddev * draw(mean)
        return action
    mean = distribution.base_dist.mean
    action = mean + distribution.base_dist.stddev * draw(mean)
    for transform in distribution.transforms:
        action = transform(action)
    return action
