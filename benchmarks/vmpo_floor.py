"""V-MPO in plain PyTorch: the least that the mathematics costs.

The same networks and the same equations as `VMPOLoss` with `VMPOOptimizationStepper`, for a
Gaussian policy whose standard deviation does not depend on the state. Rows that count in no term
of the policy's loss are not evaluated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class FloorSettings:
    num_policy_steps: int
    top_k_fraction: float
    solve_temperature: bool
    kl_of_selected: bool  # divergences over the selected samples, not over all
    epsilon: float
    epsilon_mean: float
    epsilon_stddev: float
    dual_first: bool  # the policy's loss has the new multipliers
    clip: float
    minibatch: int | None = None  # samples of a policy step, for divergences over all samples
    critic_coeff: float = 0.5


def tanh_network(state: dict[str, Tensor]) -> nn.Sequential:
    """Linear layers with tanh between them, from the parameters of `torchrl.modules.MLP`."""
    weights = [state[name] for name in state if name.endswith("weight")]
    layers: list[nn.Module] = []
    for weight in weights:
        layers += [nn.Linear(weight.shape[1], weight.shape[0]), nn.Tanh()]
    network = nn.Sequential(*layers[:-1])
    network.load_state_dict(state)
    return network


class TanhPolicy(nn.Module):
    """Mean from a network; one free log-standard-deviation per dimension."""

    def __init__(self, network: nn.Sequential, log_scale: Tensor) -> None:
        super().__init__()
        self.loc_network = network
        self.log_scale = nn.Parameter(log_scale.detach().clone())


class VMPOFloor:
    def __init__(
        self,
        policy: TanhPolicy,
        critic: nn.Sequential,
        raws: dict[str, Tensor],
        settings: FloorSettings,
        adam: dict[str, float],
        rates: tuple[float, float],
    ) -> None:
        self.policy, self.critic, self.s = policy, critic, settings
        self.raws = {name: nn.Parameter(raw.detach().clone()) for name, raw in raws.items()}
        lr, lr_dual = rates
        self.networks = [*policy.parameters(), *critic.parameters()]
        alphas = [self.raws["alpha_mean"], self.raws["alpha_stddev"]]
        self.optimizer = torch.optim.Adam(self.networks, lr=lr, fused=True, **adam)
        self.optimizer_alpha = torch.optim.Adam(alphas, lr=lr_dual, fused=True, **adam)
        self.optimizer_temperature = torch.optim.Adam(
            [self.raws["temperature"]], lr=lr_dual, fused=True, **adam
        )

    def update(self, data: dict[str, Tensor]) -> None:
        s = self.s
        rows, weights = self._e_step(data["advantage"])
        obs, target, action = data["observation"], data["value_target"], data["action"]
        old_loc, old_scale = data["loc"], data["scale"]
        if s.kl_of_selected:  # nothing else needs the policy at the other states
            policy_obs, action = obs[rows], action[rows]
            old_loc, old_scale = old_loc[rows], old_scale[rows]
        else:
            policy_obs = obs
            weights = torch.zeros(len(obs)).index_copy_(0, rows, weights)
        samples = (policy_obs, action, old_loc, old_scale, weights * len(weights), obs, target)
        for minibatch in itertools.islice(self._minibatches(samples), s.num_policy_steps):
            policy_obs, action, old_loc, old_scale, weights, obs, target = minibatch
            old_log_scale = old_scale.log()
            loc = self.policy.loc_network(policy_obs)
            log_scale = self.policy.log_scale
            kl_mean = 0.5 * ((loc - old_loc) / old_scale).square().sum(-1).mean()
            log_ratio = old_log_scale - log_scale
            kl_stddev = (0.5 * torch.expm1(2 * log_ratio) - log_ratio).sum(-1).mean()
            if s.dual_first:
                self._step_alphas(kl_mean, kl_stddev)
            alpha_mean, alpha_stddev = self._alphas()
            error = (action - loc) * (-log_scale).exp()
            constant = (log_scale + HALF_LOG_TWO_PI).sum()
            neg_log_prob = 0.5 * error.square().sum(-1) + constant
            loss = (weights * neg_log_prob).mean() + alpha_mean * kl_mean + alpha_stddev * kl_stddev
            loss = loss + s.critic_coeff * F.mse_loss(self.critic(obs), target)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.networks, s.clip)
            self.optimizer.step()
            if not s.dual_first:
                self._step_alphas(kl_mean, kl_stddev)

    def _minibatches(self, samples: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        while True:
            if self.s.minibatch is None:
                yield samples
            else:
                order = torch.randperm(len(samples[0]))
                parts = [tensor[order].split(self.s.minibatch) for tensor in samples]
                yield from zip(*parts, strict=True)

    def _e_step(self, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the selected samples, and their weights."""
        s, raw = self.s, self.raws["temperature"]
        advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
        best = advantage.topk(max(1, int(s.top_k_fraction * len(advantage))))
        if s.solve_temperature:
            eta = torch.tensor(_solve(best.values, s.epsilon))
            with torch.no_grad():
                raw.copy_((eta - 1e-8).expm1().log())
            return best.indices, (best.values / eta).softmax(0)
        eta = F.softplus(raw) + 1e-8
        scaled = best.values / eta
        loss = eta * (s.epsilon + scaled.logsumexp(0) - math.log(len(scaled)))
        self.optimizer_temperature.zero_grad()
        loss.backward()
        self.optimizer_temperature.step()
        return best.indices, scaled.detach().softmax(0)

    def _step_alphas(self, *divergences: Tensor) -> None:
        """One step on `alpha (epsilon - KL)`."""
        raws = [self.raws["alpha_mean"], self.raws["alpha_stddev"]]
        with torch.no_grad():
            bounds = (self.s.epsilon_mean, self.s.epsilon_stddev)
            for raw, kl, bound in zip(raws, divergences, bounds, strict=True):
                raw.grad = raw.sigmoid() * (bound - kl)
            self.optimizer_alpha.step()
            for raw in raws:
                raw.clamp_(min=-18.0)

    @torch.no_grad()
    def _alphas(self) -> list[Tensor]:
        return [F.softplus(self.raws[name]) + 1e-8 for name in ("alpha_mean", "alpha_stddev")]


def _solve(values: Tensor, epsilon: float) -> float:
    """The temperature at which the softmax is `epsilon` away from uniform, by Newton's method."""
    values = (values - values.max()).double()
    log_eta = math.log(-values.min().item() / math.sqrt(8 * epsilon))
    for _ in range(50):
        scaled = values / math.exp(log_eta)
        weights = scaled.softmax(0)
        mean = (weights * scaled).sum()
        divergence = (mean - scaled.logsumexp(0)).item() + math.log(len(values))
        variance = (weights * (scaled - mean).square()).sum().item()
        step = math.log(divergence / epsilon) * divergence / variance
        log_eta += step
        if abs(step) < 1e-9:
            break
    return math.exp(log_eta)
