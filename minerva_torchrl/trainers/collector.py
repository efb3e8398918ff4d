"""A collector for environments and policies of this package that costs little besides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal

from minerva_torchrl.envs.arrays import ArrayRollout
from minerva_torchrl.modules import PinkNoiseActor
from minerva_torchrl.modules.direct import plain_gaussian
from minerva_torchrl.objectives.specs import keys_without

__all__ = ["DirectCollector"]


class DirectCollector(Collector):
    """TorchRL's ``Collector``, with the same data from fewer TensorDicts.

    Environments that :class:`~minerva_torchrl.envs.arrays.ArrayRollout` knows are stepped in
    arrays, with any policy that reads the observation only. A Gaussian policy of this package is
    called without a TensorDict as well, and its log-probabilities are computed for all frames of a
    batch at once. Random numbers are drawn in the order of TorchRL. Other environments and policies
    are left to the class that this one inherits from: what they get is TorchRL's own collector.

    Args:
        env (EnvBase): the environment, with any batch size ``[*K]``.
        policy (nn.Module or callable): the policy.

    Keyword Args:
        frames_per_batch (int): frames in a batch, of all copies together.
        total_frames (int): when to stop; ``-1`` never does. Defaults to ``-1``.
        policy_device (torch.device): device of the policy. Data is stored on the CPU. Defaults to
            ``"cpu"``.

    Examples:
        >>> from torchrl.modules import ProbabilisticActor
        >>> from minerva_torchrl import make_env
        >>> from minerva_torchrl.modules import DirectModule, GaussianPolicy
        >>> env = make_env("cartpole-swingup", num_envs=2, seed=0)
        >>> actor = ProbabilisticActor(
        ...     DirectModule(GaussianPolicy(5, 1, (8,)), ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ...     return_log_prob=True,
        ... )
        >>> for batch in DirectCollector(env, actor, frames_per_batch=20, total_frames=40):
        ...     print(batch.shape, batch["action_log_prob"].shape)
        torch.Size([2, 10]) torch.Size([2, 10])
        torch.Size([2, 10]) torch.Size([2, 10])
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Callable[..., Any],
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        policy_device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            env,
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            policy_device=policy_device,
            env_device="cpu",
            storing_device="cpu",
            trust_policy=True,
        )

    _carrier: TensorDictBase

    @property
    def noise(self) -> Tensor | None:
        """State of the policy's exploration noise; ``None`` if it has none, or did not act yet."""
        policy = self._wrapped_policy
        return policy.processes if isinstance(policy, PinkNoiseActor) else None

    @noise.setter
    def noise(self, processes: Tensor | None) -> None:
        if isinstance(self._wrapped_policy, PinkNoiseActor):
            moved = None if processes is None else processes.to(self.policy_device)
            self._wrapped_policy.processes = moved

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """A batch ``[*K, T]``."""
        arrays, acting = ArrayRollout.of(self.env), _acting(self)
        if arrays is None or acting is None:
            return super().rollout()
        with set_exploration_type(self.exploration_type):
            batch, last = arrays.rollout(self._carrier, self.frames_per_batch, acting.act)
        batch.update(acting.outputs(batch.ndim - 1))
        ids, last_ids = self._trajectories(batch.get(("next", "done")).squeeze(-1))
        batch.set(("collector", "traj_ids"), ids)
        self._carrier = last.set(("collector", "traj_ids"), last_ids)
        return batch

    def _trajectories(self, done: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the trajectories of all frames, and of those that come next.

        A trajectory that ends is followed by one with the next free number; of those that end in
        the same step, the first copy's comes first.
        """
        now = self._carrier.get(("collector", "traj_ids"))
        if not done.any():
            return now.unsqueeze(-1).expand_as(done).clone(), now
        by_time = done.reshape(-1, done.shape[-1]).T  # [T, K]
        fresh = self._traj_pool.get_traj_and_increment(int(by_time.sum()), device="cpu")
        # Numbers only grow, so that the largest so far is the present one.
        started = torch.full(by_time.shape, -1).masked_scatter_(by_time, fresh)
        numbers = torch.cat([now.reshape(1, -1), started]).cummax(0).values
        numbers = numbers.T.reshape(*now.shape, -1)
        return numbers[..., :-1].contiguous(), numbers[..., -1].clone()


class _Gaussian:
    """A Gaussian policy, called without a TensorDict. Keeps what it returns in each step."""

    def __init__(
        self,
        network: nn.Module,
        log_prob_key: NestedKey | None,
        device: torch.device,
        draw: Callable[[Tensor], Tensor],
    ) -> None:
        self.network, self.log_prob_key, self.device = network, log_prob_key, device
        self.draw = draw
        self.steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def act(self, observation: Tensor) -> NDArray[Any]:
        loc, scale = self.network(observation.to(self.device))
        action = loc + self.draw(loc) * scale
        self.steps.append((loc, scale, action))
        array: NDArray[Any] = action.cpu().numpy()
        return array

    def outputs(self, time: int) -> dict[NestedKey, Tensor]:
        """All of it, along a dimension for time."""
        loc, scale, action = (torch.stack(entry, time) for entry in zip(*self.steps, strict=True))
        data: dict[NestedKey, Tensor] = {"loc": loc, "scale": scale, "action": action}
        if self.log_prob_key is not None:
            data[self.log_prob_key] = IndependentNormal(loc, scale).log_prob(action)
        return {key: tensor.cpu() for key, tensor in data.items()}


class _OfObservation:
    """Any other policy that reads the observation only. Keeps what it returns in each step."""

    def __init__(self, policy: TensorDictModuleBase, batch_dims: int, device: torch.device) -> None:
        self.policy, self.batch_dims, self.device = policy, batch_dims, device
        self.steps: list[TensorDictBase] = []

    def act(self, observation: Tensor) -> Any:
        data = TensorDict(
            {"observation": observation},
            batch_size=observation.shape[: self.batch_dims],
            device=self.device,
        )
        self.steps.append(self.policy(data).exclude("observation"))
        return self.steps[-1].get("action").cpu().numpy()  # a dictionary if it has parts

    def outputs(self, time: int) -> TensorDictBase:
        """All of it, along a dimension for time."""
        return torch.stack(self.steps, time).cpu()


def _acting(collector: DirectCollector) -> _Gaussian | _OfObservation | None:
    """How to call a collector's policy; ``None`` if TorchRL has to."""
    policy, device = collector._wrapped_policy, collector.policy_device
    if collector.exploration_type == ExplorationType.RANDOM:
        gaussian = plain_gaussian(policy)
        if gaussian is not None:
            draw = policy.draw if isinstance(policy, PinkNoiseActor) else torch.randn_like
            return _Gaussian(*gaussian, device, draw)
    if not isinstance(policy, TensorDictModuleBase):
        return None
    if keys_without(policy.in_keys, policy.out_keys) != ["observation"]:
        return None
    # What goes into the next step is more than an action: the state of a recurrent network.
    names = [key if isinstance(key, str) else key[0] for key in policy.out_keys]
    plain = "action" in names and "next" not in names
    return _OfObservation(policy, collector.env.batch_dims, device) if plain else None
