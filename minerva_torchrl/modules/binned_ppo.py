"""The clipped PPO loss with a critic that predicts probabilities of bins."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from minerva_torchrl.modules.clip_ppo import DirectClipPPOLoss
from minerva_torchrl.objectives.critics import ScalarCritic
from minerva_torchrl.objectives.reductions import explained_variance
from minerva_torchrl.objectives.swapping import using

__all__ = ["BinnedClipPPOLoss"]


class BinnedClipPPOLoss(DirectClipPPOLoss):
    r"""PPO whose critic is fitted by cross-entropy: two-hot or HL-Gauss bins around the return.

    .. math::
        L_V = -c_V\, \mathrm{mean} \sum_k p_k(R) \log \hat p_k(s)

    with the probabilities :math:`p(R)` of the return :math:`R`. Advantages take the expected value
    of the bins. Make it with :func:`~minerva_torchrl.make_ppo_loss`, ``critic=`` and
    ``clip_value=False``: a bound on how far a value may move does not apply to probabilities.

    Args:
        *args: of :class:`~torchrl.objectives.ClipPPOLoss`.

    Keyword Args:
        critic (ScalarCritic): what the outputs of the critic's network mean.
        **kwargs: of :class:`~torchrl.objectives.ClipPPOLoss`.

    Examples:
        >>> import torch
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torchrl.modules import IndependentNormal, ProbabilisticActor
        >>> from minerva_torchrl import make_ppo_loss
        >>> from minerva_torchrl.objectives.critics import TwoHotCritic
        >>> network = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ...     return_log_prob=True,
        ... )
        >>> bins = torch.nn.Linear(3, 11)
        >>> value = TensorDictModule(bins, in_keys=["observation"], out_keys=["state_value"])
        >>> critic = TwoHotCritic(-5.0, 5.0, 11)
        >>> loss = make_ppo_loss(
        ...     actor, value, critic=critic, clip_value=False, loss_class=BinnedClipPPOLoss
        ... )
        >>> loss.critic_network.out_keys
        ['state_value', 'value_outputs']
    """

    takes_bins = True

    def __init__(self, *args: Any, critic: ScalarCritic, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic = critic.to(next(self.parameters()).device)

    def _critic(self, tensordict: TensorDictBase, with_metrics: bool) -> dict[str, Tensor]:
        loss, value = self._critic_loss(tensordict)
        output = {"loss_critic": self._sum_or_mean(self.critic_coeff * loss)}
        if with_metrics:
            output |= self.critic.metrics()
            if self.log_explained_variance:
                target = tensordict.get(self.tensor_keys.value_target).squeeze(-1)
                output["explained_variance"] = explained_variance(target, value, None)
        return output

    def loss_critic(self, tensordict: TensorDictBase) -> tuple[Tensor, None, Tensor | None]:
        """The loss of each state ``[*B, 1]``, no share of clipped values, explained variance."""
        loss, value = self._critic_loss(tensordict)
        explained = None
        if self.log_explained_variance:
            target = tensordict.get(self.tensor_keys.value_target).squeeze(-1)
            explained = explained_variance(target, value, None)
        return (self.critic_coeff * loss).unsqueeze(-1), None, explained

    def _critic_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the return, and the value, ``[*B]`` each."""
        network = self.critic_network
        inputs = tensordict.select(*network.in_keys)
        if self.separate_losses:
            inputs = inputs.detach()
        with using(network, self.critic_network_params):
            written = network(inputs)
        target = self.critic.target(tensordict.get(self.tensor_keys.value_target), lambda x: x)
        loss = self.critic.loss(written.get("value_outputs"), target)
        return loss, written.get(self.tensor_keys.value).detach().squeeze(-1)
