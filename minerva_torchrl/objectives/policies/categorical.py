"""Policies of discrete actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch import distributions as D

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.policies.family import (
    Candidates,
    PolicyFamily,
    leaf_distribution,
)
from minerva_torchrl.objectives.reductions import masked_mean

__all__ = ["Categorical"]


class Categorical(PolicyFamily):
    r"""Discrete actions, as an index or one-hot. All of them are candidates.

    With all actions enumerated the weights are
    :math:`w_a \propto \pi'(a) \exp(Q(s, a) / \eta)`, and the policy is fitted to them exactly.

    Keyword Args:
        one_hot (bool): whether actions are one-hot vectors. Defaults to ``False``.

    Examples:
        >>> family = Categorical()
        >>> candidates = family.candidates(D.Categorical(logits=torch.zeros(2)), num_samples=20)
        >>> candidates.action, candidates.log_prior.exp()
        (tensor([0, 1]), tensor([0.5000, 0.5000]))
    """

    constraints = ("policy",)
    metric_keys = ("entropy",)
    enumerates = True

    def __init__(self, *, one_hot: bool = False) -> None:
        super().__init__()
        self.one_hot = one_hot

    def describe(self, dist: D.Distribution) -> TensorDict:
        """The logits, ``[*B, A]``, even where a mask leaves no action (terminal states)."""
        leaf = leaf_distribution(dist)
        logits, mask = leaf.logits, getattr(leaf, "_mask", None)
        if mask is not None and mask.dtype is torch.bool:
            logits = torch.where(mask.any(-1, keepdim=True), logits, 0.0)
        return TensorDict({"logits": logits}, batch_size=logits.shape[:-1])

    def candidates(self, dist: D.Distribution, num_samples: int) -> Candidates:
        """All actions; ``num_samples`` does not matter."""
        logits = self.describe(dist).get("logits")
        num_actions, batch_size = logits.shape[-1], logits.shape[:-1]
        # eq: categorical-candidates
        if self.one_hot:
            action = torch.eye(num_actions, dtype=logits.dtype, device=logits.device)
        else:
            action = torch.arange(num_actions, device=logits.device)
        action = action.reshape(num_actions, *[1] * len(batch_size), *action.shape[1:])
        action = action.expand(num_actions, *batch_size, *action.shape[1 + len(batch_size) :])
        return Candidates(action, {}, logits.log_softmax(-1))

    def samples(self, dist: D.Distribution, num_samples: int) -> Candidates:
        """Actions drawn from the policy, with which of all they are."""
        logits = self.describe(dist).get("logits")
        index = D.Categorical(logits=logits, validate_args=False).sample((num_samples,))
        # PyTorch's one_hot looks at the values, which a compiled update can't.
        actions = torch.arange(logits.shape[-1], device=logits.device)
        one_hot = (index.unsqueeze(-1) == actions).to(logits.dtype)
        return Candidates(one_hot if self.one_hot else index, {"one_hot": one_hot.movedim(0, -2)})

    def statistics(self, basis: Mapping[str, Any], weights: Tensor) -> TensorDict:
        """The weights of all actions; for samples the sums of their weights."""
        one_hot = basis.get("one_hot", None)
        if one_hot is not None:
            weights = (weights.unsqueeze(-1) * one_hot).sum(-2)
        return TensorDict({"weights": weights}, batch_size=weights.shape[:-1])

    def expected_statistics(self, old: TensorDictBase) -> TensorDict:
        """The probabilities of all actions."""
        return TensorDict({"weights": old.get("logits").softmax(-1)}, batch_size=old.batch_size)

    def cross_entropy(
        self, new: TensorDictBase, old: TensorDictBase, statistics: TensorDictBase
    ) -> Tensor:
        r""":math:`-\sum_a w_a \log \pi(a)`; an action without weight may have probability zero."""
        # eq: categorical-cross-entropy
        weights, log_prob = statistics.get("weights"), new.get("logits").log_softmax(-1)
        return -(weights * torch.where(weights != 0, log_prob, 0.0)).sum(-1)

    def divergences(self, new: TensorDictBase, old: TensorDictBase) -> dict[str, Tensor]:
        """That of the whole policy."""
        kl = F.categorical_kl(new.get("logits"), old.get("logits"))
        return {"policy": kl.unsqueeze(-1)}

    def metrics(self, dist: D.Distribution, mask: Tensor | None) -> dict[str, Tensor]:
        """The entropy."""
        log_prob = self.describe(dist).get("logits").log_softmax(-1)
        entropy = -torch.where(log_prob > -torch.inf, log_prob.exp() * log_prob, 0.0).sum(-1)
        return {"entropy": masked_mean(entropy, mask)}

    def check_action(self, name: NestedKey, action: Tensor, batch_size: torch.Size) -> None:
        """``[*B]``, or ``[*B, A]`` if one-hot."""
        ndim = len(batch_size) + self.one_hot
        if action.ndim != ndim or action.shape[: len(batch_size)] != batch_size:
            wanted = (*batch_size, "A") if self.one_hot else tuple(batch_size)
            kind = "one-hot" if self.one_hot else "an index"
            raise ValueError(
                f"{name!r} is {kind} and must have shape {wanted}, got {tuple(action.shape)}."
            )
