"""A small MPO problem in double precision, and its losses in plain PyTorch."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch import distributions as D

from minerva_torchrl import MPOLoss
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    make_actor,
    make_critic,
    make_transitions,
    with_updater,
)

GAMMA = 0.9
NUM_SAMPLES = 7
DISTANCES = {
    "l1": lambda x: x.abs(),
    "l2": lambda x: x.square(),
    "smooth_l1": lambda x: torch.where(x.abs() < 1, 0.5 * x.square(), x.abs() - 0.5),
}


class Policy(nn.Module):
    """Linear mean and log standard deviation."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.loc = nn.Linear(OBSERVATION_DIM, ACTION_DIM, dtype=torch.float64)
        self.log_scale = nn.Linear(OBSERVATION_DIM, ACTION_DIM, dtype=torch.float64)
        nn.init.constant_(self.log_scale.bias, math.log(scale))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.loc(observation), self.log_scale(observation).exp()


class Critic(nn.Module):
    """Linear in the observation, quadratic in the action."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(OBSERVATION_DIM + ACTION_DIM, 1, dtype=torch.float64)
        self.curvature = nn.Parameter(torch.rand(ACTION_DIM, dtype=torch.float64))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        quadratic = (self.curvature * action.square()).sum(-1, keepdim=True)
        return self.linear(torch.cat([observation, action], -1)) - quadratic


class Problem:
    """A loss in double precision, its networks, and the same update in plain PyTorch."""

    def __init__(
        self, td_est: Any = None, *, num_critics: int = 1, lmbda: float | None = None, **kwargs: Any
    ) -> None:
        torch.manual_seed(0)
        self.policy = Policy()
        self.critics = [Critic() for _ in range(num_critics)]
        defaults = {"num_action_samples": NUM_SAMPLES, "epsilon": 0.1, "init_alpha_stddev": 10.0}
        kwargs = defaults | {"scalar_output_mode": "exclude"} | kwargs
        networks = [make_critic(critic) for critic in self.critics]
        self.loss = MPOLoss(make_actor(self.policy), networks, **kwargs).double()
        for dual in self.loss.dual_variables():
            dual.reset_parameters()
        hyperparameters = {"gamma": GAMMA} | ({} if lmbda is None else {"lmbda": lmbda})
        with_updater(self.loss.make_value_estimator(td_est, **hyperparameters).double())
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics)
        with torch.no_grad():
            for parameter in self.loss.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    def q_value(self, data: TensorDict, action: Tensor) -> Tensor:
        """Online critics, ``[K, B]``, as functions of the loss's own parameters."""
        params = dict(self.loss.qvalue_network_params.named_parameters())
        values = []
        for i, critic in enumerate(self.critics):
            member = params if len(self.critics) == 1 else {k: p[i] for k, p in params.items()}
            member = {k.removeprefix("module."): p for k, p in member.items()}
            arguments = (data["observation"], action.clamp(-1, 1))
            values.append(torch.func.functional_call(critic, member, arguments).squeeze(-1))
        return torch.stack(values)

    def target_q_value(self, observation: Tensor, action: Tensor) -> Tensor:
        observation = observation.expand(*action.shape[:-1], OBSERVATION_DIM)
        values = [critic(observation, action.clamp(-1, 1)) for critic in self.target_critics]
        values = torch.stack(values).squeeze(-1).detach()
        return values.amin(0) if self.loss.qvalue_reduction == "min" else values.mean(0)

    def at_states(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Values of the samples ``[N, B]``, and the losses of the policy and the duals ``[B]``."""
        loss = self.loss
        old_loc, old_scale = self.target_policy(observation)
        loc, scale = self.policy(observation)
        action = old_loc + old_scale * noise
        q_value = self.target_q_value(observation, action)

        def weigh(value: Tensor, temperature: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
            weights = (value / temperature).softmax(0).detach()
            mean_exp = (value / temperature).exp().mean(0)
            return weights, temperature * (epsilon + mean_exp.log())

        losses = {}
        weights, losses["loss_temperature"] = weigh(q_value, loss.temperature(), loss.epsilon)
        if loss.action_penalization:
            cost = -(action - action.clamp(-1, 1)).square().sum(-1).sqrt()
            penalty_weights, losses["loss_penalty_temperature"] = weigh(
                cost, loss.penalty_temperature(), loss.epsilon_penalty
            )
            weights = weights + penalty_weights
        old = D.Normal(old_loc, old_scale)
        moved = {"mean": D.Normal(loc, old_scale), "stddev": D.Normal(old_loc, scale)}
        losses["loss_actor"] = torch.zeros(())
        for name, new in moved.items():
            likelihood = new.log_prob(action).sum(-1)
            kl = D.kl_divergence(old, new)
            if not loss.per_dim_constraining:
                kl = kl.sum(-1, keepdim=True)
            alpha, epsilon = getattr(loss, f"alpha_{name}")(), getattr(loss, f"epsilon_{name}")
            penalty = (alpha.detach() * kl).sum(-1)
            losses["loss_actor"] = losses["loss_actor"] + penalty - (weights * likelihood).sum(0)
            losses[f"loss_alpha_{name}"] = (alpha * (epsilon - kl.detach())).sum(-1)
        return q_value, losses

    def reference(self, data: TensorDict, noise: Tensor) -> dict[str, Tensor]:
        """All losses of transitions ``[B]``, with the noise at next and at current states."""
        terminated = data["next", "terminated"].squeeze(-1)
        next_q_value, at_next = self.at_states(data["next", "observation"], noise[0])
        target = data["next", "reward"].squeeze(-1) + GAMMA * ~terminated * next_q_value.mean(0)
        distance = DISTANCES[self.loss.loss_function]
        error = self.q_value(data, data["action"]) - target
        losses = {"loss_qvalue": distance(error).sum(0).mean()}
        if self.loss.policy_states == "next":
            return losses | {key: value[~terminated].mean() for key, value in at_next.items()}
        _, at_current = self.at_states(data["observation"], noise[1])
        for key, value in at_current.items():
            if self.loss.policy_states == "both":
                value = torch.where(terminated, value, (value + at_next[key]) / 2)
            losses[key] = value.mean()
        return losses


def make_data(*batch: int, **kwargs: Any) -> TensorDict:
    return make_transitions(*batch, dtype=torch.float64, **kwargs)


def make_noise(*shape: int) -> Tensor:
    return torch.randn(
        *shape, ACTION_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
