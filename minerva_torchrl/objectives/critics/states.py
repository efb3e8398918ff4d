"""Critics of states: outputs that describe a value, for estimators that want the value itself."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from minerva_torchrl.objectives.critics.values import Critic, ScalarCritic, resolve_critic

__all__ = ["DescribedValue", "resolve_state_critic", "value_network"]


class DescribedValue(TensorDictModuleBase):
    """A network that writes what describes a value, beside the value itself.

    Args:
        network (TensorDictModule): writes outputs ``[*B, P]`` in the place of the value.
        critic (Critic): knows what they mean.
    """

    def __init__(self, network: TensorDictModule, critic: Critic) -> None:
        super().__init__()
        self.network = network
        self._critic = [critic]  # its support is no parameter of the network
        self.value_key: NestedKey = network.out_keys[0]
        self.in_keys = list(network.in_keys)
        self.out_keys = [self.value_key, "value_outputs"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The network, and the mean of what it says."""
        tensordict = self.network(tensordict)
        outputs = tensordict.get(self.value_key)
        value = self._critic[0].mean(outputs).unsqueeze(-1)
        return tensordict.set("value_outputs", outputs).set(self.value_key, value)


def value_network(network: Any, critic: Critic) -> tuple[Any, NestedKey | None]:
    """A network that writes the value, and where the outputs are that describe it, if elsewhere."""
    if type(critic) is ScalarCritic:
        return network, None
    return DescribedValue(network, critic), "value_outputs"


def resolve_state_critic(
    critic: Critic | None, loss_critic_type: str, clip_value: float | bool | None
) -> ScalarCritic:
    """The given critic, or a scalar one.

    Args:
        critic (Critic, optional): as the user gave it.
        loss_critic_type (str): loss of a scalar one.
        clip_value (float, optional): for a scalar one as well.
    """
    critic = resolve_critic(
        critic, loss_critic_type, argument="loss_critic_type", scalar_targets=True
    )
    assert isinstance(critic, ScalarCritic)
    if clip_value and type(critic) is not ScalarCritic:
        raise ValueError(
            f"clip_value={clip_value} is for scalar critics, not a {type(critic).__name__}."
        )
    return critic
