"""What an E-step finds, as data that travels with the batch to the losses."""

from __future__ import annotations

from tensordict import TensorClass, TensorDict, TensorDictBase
from torch import Tensor

from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.goals import MAIN_OBJECTIVE
from minerva_torchrl.objectives.reductions import masked_extreme, masked_means

__all__ = ["MPOEStep", "VMPOEStep"]


class MPOEStep(TensorClass):
    """What the target networks say of the states of the policy loss, ``[*S]``.

    ``*S`` is ``[*B]``, or ``[*B, 2]`` if the policy is trained at current and next states.
    """

    inputs: TensorDict
    """Inputs of the actor."""
    old_policy: TensorDict
    """Parameters of the target policy."""
    statistics: TensorDict
    """What the policy is fitted to: statistics of the weighted candidates."""
    duals: TensorDict
    """By objective, the ``dual`` of its temperature and the divergence ``kl`` of its weights."""
    mask: Tensor
    """States that count, ``[*S]``."""


class VMPOEStep(TensorClass):
    """The weighted samples of a batch, ``[*B]``; fixed while policy and critic take their steps."""

    policy_weight: Tensor
    """Weights of the samples times their number, so that the mean over them is the loss."""
    kl_weight: Tensor
    """The same for the divergences."""
    selected: Tensor
    """Which samples are among the best."""
    mask: Tensor
    """Which samples are valid."""
    old_policy: TensorDict
    """Parameters of the policy that the divergences are measured from."""
    dual: Tensor
    """Dual of the temperature. It is that of the whole batch, repeated for every sample."""
    kl: Tensor
    """The divergence that belongs to it, repeated as well."""


def weight_metrics(weights: Tensor, samples: TensorDictBase, mask: Tensor) -> dict[str, Tensor]:
    """Diagnostics of the values of candidates and of their weights ``[*S, N]``."""
    q_value = samples.get(("scores", MAIN_OBJECTIVE))
    of_states = {
        "ess": F.effective_sample_size(weights, sample_dim=-1),
        "weight_entropy": F.weight_entropy(weights, sample_dim=-1),
        "q_mean": samples.get("expected_value"),
    }
    return {
        **masked_means(of_states, mask),
        "q_min": masked_extreme(q_value, mask, "min"),
        "q_max": masked_extreme(q_value, mask, "max"),
    }
