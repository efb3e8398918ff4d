"""PPO in plain PyTorch: the least that an iteration on a rollout costs.

The same networks and the same equations as `make_ppo_loss` with `make_ppo_trainer`: generalised
advantages as a recursion, then epochs of shuffled minibatches with one joint step each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from vmpo_floor import HALF_LOG_TWO_PI, TanhPolicy


@dataclass(frozen=True)
class FloorSettings:
    num_epochs: int
    minibatch: int
    gamma: float = 0.99
    lmbda: float = 0.95
    clip_epsilon: float = 0.2
    value_coeff: float = 0.5
    clip: float = 0.5


class PPOFloor:
    def __init__(
        self,
        policy: TanhPolicy,
        critic: nn.Sequential,
        settings: FloorSettings,
        adam: dict[str, float],
    ) -> None:
        self.policy, self.critic, self.s = policy, critic, settings
        self.parameters = [*policy.parameters(), *critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, fused=True, **adam)

    def iterate(self, rollout: dict[str, Tensor]) -> None:
        """All epochs on a rollout of tensors ``[K, T, ...]``."""
        s = self.s
        with torch.no_grad():
            value = self.critic(rollout["observation"]).squeeze(-1)
            next_value = self.critic(rollout["next_observation"]).squeeze(-1)
        advantage = advantages(rollout, value, next_value, s.gamma, s.lmbda)
        data = {name: rollout[name].flatten(0, 1) for name in ("observation", "action", "log_prob")}
        data |= {"value": value.flatten(), "advantage": advantage.flatten()}
        data["target"] = data["value"] + data["advantage"]
        for _ in range(s.num_epochs):
            order = torch.randperm(advantage.numel())
            shuffled = [tensor[order].split(s.minibatch) for tensor in data.values()]
            for minibatch in zip(*shuffled, strict=True):
                self._step(*minibatch)

    def _step(
        self,
        obs: Tensor,
        action: Tensor,
        old_log_prob: Tensor,
        old_value: Tensor,
        advantage: Tensor,
        target: Tensor,
    ) -> None:
        s, log_scale = self.s, self.policy.log_scale
        error = (action - self.policy.loc_network(obs)) * (-log_scale).exp()
        log_prob = -0.5 * error.square().sum(-1) - (log_scale + HALF_LOG_TWO_PI).sum()
        ratio = (log_prob - old_log_prob).exp()
        advantage = (advantage - advantage.mean()) / advantage.std().clamp_min(1e-6)
        clipped_ratio = ratio.clamp(1 - s.clip_epsilon, 1 + s.clip_epsilon)
        gain = torch.minimum(advantage * ratio, advantage * clipped_ratio).mean()

        value = self.critic(obs).squeeze(-1)
        clipped = old_value + (value - old_value).clamp(-s.clip_epsilon, s.clip_epsilon)
        squared = torch.maximum((value - target).square(), (clipped - target).square())
        loss = 0.5 * s.value_coeff * squared.mean() - gain
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, s.clip)
        self.optimizer.step()


def advantages(
    rollout: dict[str, Tensor], value: Tensor, next_value: Tensor, gamma: float, lmbda: float
) -> Tensor:
    """Generalised advantages ``[K, T]``; a truncated episode goes on with the value of its end."""
    reward, terminated, done = (rollout[k].numpy() for k in ("reward", "terminated", "done"))
    error = reward + gamma * np.where(terminated, 0, next_value.numpy()) - value.numpy()
    decay = np.where(done, 0, gamma * lmbda)
    advantage = np.empty_like(error)
    running = np.zeros(len(error), error.dtype)
    for t in reversed(range(error.shape[1])):
        running = error[:, t] + decay[:, t] * running
        advantage[:, t] = running
    return torch.from_numpy(advantage)
