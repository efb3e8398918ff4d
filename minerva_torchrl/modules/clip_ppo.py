"""TorchRL's clipped PPO loss, with a short way for ordinary minibatches."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, dispatch
from torch import Tensor
from torch import distributions as D
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torchrl._utils import is_compiling
from torchrl.modules.distributions.utils import has_analytic_entropy
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.utils import _clip_value_loss, distance_loss

from minerva_torchrl.objectives.swapping import using

__all__ = ["DirectClipPPOLoss"]

_MASKS = (("collector", "mask"), "shifted_valid")


class DirectClipPPOLoss(ClipPPOLoss):
    """A :class:`~torchrl.objectives.ClipPPOLoss` that is faster on small minibatches.

    With minibatches of 64 frames most of the loss's time goes into TensorDicts, exchanges of
    parameters and checks. An ordinary minibatch (it has its advantages, one action, no masks, and
    the loss no delayed actor) takes a shorter way to the same numbers; any other one, and one in
    ``torch.compile``, takes TorchRL's.

    Takes the arguments of :class:`~torchrl.objectives.ClipPPOLoss`.

    Examples:
        >>> from tensordict.nn import NormalParamExtractor
        >>> from torchrl.modules import IndependentNormal, ProbabilisticActor
        >>> from minerva_torchrl import make_ppo_loss
        >>> from minerva_torchrl.modules import DirectModule
        >>> policy = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     DirectModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ...     return_log_prob=True,
        ... )
        >>> value = torch.nn.Linear(3, 1)
        >>> critic = DirectModule(value, in_keys=["observation"], out_keys=["state_value"])
        >>> loss = make_ppo_loss(actor, critic, loss_class=DirectClipPPOLoss)
        >>> loss.clip_value
        0.2
    """

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """All losses and metrics of a minibatch."""
        output = self._directly(tensordict, with_metrics=True)
        return super().forward(tensordict) if output is None else TensorDict(output)

    def losses(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """The losses of a minibatch alone, for updates whose metrics nobody will see."""
        output = self._directly(tensordict, with_metrics=False)
        if output is None:
            output = dict(super().forward(tensordict).items())
        return {name: value for name, value in output.items() if name.startswith("loss_")}

    def _directly(
        self, tensordict: TensorDictBase, *, with_metrics: bool
    ) -> dict[str, Tensor] | None:
        """What :meth:`forward` returns, if the shorter way leads there."""
        if is_compiling() or not self._is_ordinary(tensordict):
            return None
        keys = self.tensor_keys
        advantage = tensordict.get(keys.advantage)
        advantage = self._maybe_normalize_advantage(advantage, tensordict, update_norm=False)
        dist = self._current_dist(tensordict)
        if isinstance(dist, CompositeDistribution):
            return None
        log_prob = dist.log_prob(tensordict.get(keys.action))
        old_log_prob = tensordict.get(keys.sample_log_prob)
        if log_prob.shape != old_log_prob.shape or advantage.shape != (*log_prob.shape, 1):
            return None  # TorchRL knows what to do, or what to say
        log_weight = log_prob - old_log_prob
        output = self._objective(log_weight, advantage.squeeze(-1), with_metrics)
        if self.entropy_bonus and (with_metrics or not self._entropy_is_ignored()):
            if has_analytic_entropy(dist):
                entropy = dist.entropy()
            else:
                entropy = self._get_entropy(dist, advantage.shape[:-1])
            output["entropy"] = entropy.detach().mean()
            output["loss_entropy"] = self._sum_or_mean(-self.entropy_coeff * entropy)
        if self._has_critic:
            output |= self._critic(tensordict, with_metrics)
        return output

    def _is_ordinary(self, tensordict: TensorDictBase) -> bool:
        keys = self.tensor_keys
        return (
            self.reduction in ("mean", "sum")
            and self.functional
            and not self.delay_actor
            and self.max_importance_ratio is None
            and self._entropy_coeff_map is None
            and self.loss_mask_key == "auto"
            and isinstance(keys.action, str)
            and isinstance(keys.sample_log_prob, str)
            and tensordict.get(keys.advantage, None) is not None
            and all(tensordict.get(mask, None) is None for mask in _MASKS)
        )

    def _entropy_is_ignored(self) -> bool:
        if get_proxy_mode() is not None:  # what is recorded now must hold for any coefficient
            return False
        coefficient = self.entropy_coeff
        return coefficient.device.type == "cpu" and not coefficient.any()  # nothing waits there

    def _current_dist(self, tensordict: TensorDictBase) -> D.Distribution:
        inputs = tensordict.select(*self.actor_network.in_keys)
        with using(self.actor_network, self.actor_network_params):
            return self.actor_network.get_dist(inputs)

    def _value(self, tensordict: TensorDictBase) -> Tensor:
        inputs = tensordict.select(*self.critic_network.in_keys)
        if self.separate_losses:
            inputs = inputs.detach()
        with using(self.critic_network, self.critic_network_params):
            return self.critic_network(inputs).get(self.tensor_keys.value)

    def _objective(
        self, log_weight: Tensor, advantage: Tensor, with_metrics: bool
    ) -> dict[str, Tensor]:
        clipped, ratio = log_weight.clamp(*self._clip_bounds), log_weight.exp()
        gain = torch.minimum(ratio * advantage, clipped.exp() * advantage)
        output = {"loss_objective": self._sum_or_mean(-gain)}
        if with_metrics:
            with torch.no_grad():
                total, num_samples = ratio.sum(0), len(ratio)
                output |= {
                    "clip_fraction": (clipped != log_weight).to(log_weight.dtype).mean(),
                    "kl_approx": -log_weight.detach().mean(),
                    "ESS": total.square() / ratio.square().sum(0) / num_samples,
                    "max_ratio": ratio.max(),
                    "mean_ratio": total.mean() / num_samples,
                }
        return output

    def _critic(self, tensordict: TensorDictBase, with_metrics: bool) -> dict[str, Tensor]:
        keys = self.tensor_keys
        target = tensordict.get(keys.value_target)
        old_value = tensordict.get(keys.value) if self.clip_value else None
        inputs: Any = self._critic_loss_inputs(target, self._value(tensordict), old_value)
        target, value, old_value = inputs
        loss = distance_loss(target, value, loss_function=self.loss_critic_type)
        output = {}
        if old_value is not None:
            loss, output["value_clip_fraction"] = _clip_value_loss(
                old_value, value, self.clip_value, target, loss, self.loss_critic_type
            )
        output["loss_critic"] = self._sum_or_mean(self.critic_coeff * loss)
        if with_metrics and self.log_explained_variance:
            with torch.no_grad():
                total = target.var(correction=0, dim=0) + torch.finfo(target.dtype).eps
                output["explained_variance"] = 1 - (target - value).var(correction=0, dim=0) / total
        return output

    def _sum_or_mean(self, loss: Tensor) -> Tensor:
        return loss.mean() if self.reduction == "mean" else loss.sum()
