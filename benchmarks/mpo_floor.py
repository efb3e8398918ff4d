"""MPO in plain PyTorch: the least that the mathematics costs, without TensorDicts and checks.

The same networks and the same equations as `MPOLoss` with `MPOOptimizationStepper`, written for one
set-up each: one critic, transitions, action penalty or none. Weights are taken from a loss, and
with the same random numbers the results agree with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 2048  # larger activations do not stay in the cache


@dataclass(frozen=True)
class FloorSettings:
    num_samples: int
    shared_draw: bool  # policy trained at the next states, on the critic's samples
    penalty: bool
    epsilon: float
    epsilon_mean: float
    epsilon_stddev: float
    epsilon_penalty: float
    dual_first: bool
    clip_networks: float
    clip_duals: float | None
    gamma: float = 0.99


class Torso(nn.Module):
    """The parameters of a LayerNorm-tanh, ELU torso."""

    def __init__(self, state: dict[str, Tensor], prefix: str) -> None:
        super().__init__()
        self.first = nn.Linear(*reversed(state[f"{prefix}first.weight"].shape))
        numbers = sorted({int(k.split(".")[-2]) for k in state if k.startswith(f"{prefix}rest.")})
        self.norm = nn.LayerNorm(self.first.out_features)
        self.layers = nn.ModuleList(
            nn.Linear(*reversed(state[f"{prefix}rest.{n}.weight"].shape)) for n in numbers[1:]
        )
        with torch.no_grad():
            names = [f"{prefix}first", *(f"{prefix}rest.{n}" for n in numbers)]
            for module, name in zip([self.first, self.norm, *self.layers], names, strict=True):
                module.weight.copy_(state[f"{name}.weight"])
                module.bias.copy_(state[f"{name}.bias"])

    def after_first(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x.tanh() if torch.is_grad_enabled() else x.mul_(2).sigmoid_().mul_(2).sub_(1)
        for layer in self.layers:
            x = layer(x)
            if torch.is_grad_enabled():
                x = F.elu(x, inplace=True)
            else:
                x = torch.maximum(x, x.clamp_max(0).exp_().sub_(1), out=x)
        return x


class Interval(nn.Module):
    def __init__(self, center: Tensor, radius: Tensor) -> None:
        super().__init__()
        self.register_buffer("center", center.clone())
        self.register_buffer("radius", radius.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.center + self.radius * x.tanh()


class Policy(nn.Module):
    def __init__(
        self, state: dict[str, Tensor], init_scale: float, min_scale: float, gain: float = 1.0
    ) -> None:
        super().__init__()
        self.gain = gain
        self.torso = Torso(state, "torso.")
        self.loc, self.scale = _linear(state, "loc"), _linear(state, "scale")
        self.factor, self.min_scale = init_scale / math.log(2), min_scale
        self.loc_activation = nn.Identity()
        if "loc_activation.center" in state:
            ends = (state[f"loc_activation.{name}"] for name in ("center", "radius"))
            self.loc_activation = Interval(*ends)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        h = self.torso.after_first(self.torso.first(obs))
        x = self.scale(h) if self.gain == 1.0 else self.gain * self.scale(h)
        loc = self.loc_activation(self.loc(h))
        return loc, F.softplus(x) * self.factor + self.min_scale


class Critic(nn.Module):
    def __init__(self, state: dict[str, Tensor], obs_dim: int) -> None:
        super().__init__()
        self.torso, self.head = Torso(state, "torso."), _linear(state, "head")
        self.obs_dim = obs_dim

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        weight = self.torso.first.weight
        h = F.linear(obs, weight[:, : self.obs_dim], self.torso.first.bias)
        h = h + F.linear(action, weight[:, self.obs_dim :])
        return self.head(self.torso.after_first(h)).squeeze(-1)

    def of_samples(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values ``[N, B]`` of actions ``[N, B, D]``, a chunk at a time."""
        weight = self.torso.first.weight
        of_state = F.linear(obs, weight[:, : self.obs_dim], self.torso.first.bias)
        of_action = weight[:, self.obs_dim :]
        chunks = actions.split(max(1, ROWS // len(obs)))
        firsts = (F.linear(chunk, of_action) + of_state for chunk in chunks)
        return torch.cat([self.head(self.torso.after_first(x)) for x in firsts]).squeeze(-1)


def _linear(state: dict[str, Tensor], name: str) -> nn.Linear:
    weight = state[f"{name}.weight"]
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(state[f"{name}.bias"])
    return layer


class Dual:
    """A positive variable: softplus of a parameter, projected after its step."""

    def __init__(self, raw: Tensor) -> None:
        self.raw = nn.Parameter(raw.detach().clone())

    def __call__(self) -> Tensor:
        return F.softplus(self.raw) + 1e-8


class MPOFloor:
    def __init__(
        self,
        policy: Policy,
        target_policy: Policy,
        critic: Critic,
        target_critic: Critic,
        duals: dict[str, Tensor],
        settings: FloorSettings,
        adam: dict[str, float],
        rates: tuple[float, float, float],
    ) -> None:
        self.policy, self.target_policy = policy, target_policy
        self.critic, self.target_critic = critic, target_critic
        self.duals = {name: Dual(raw) for name, raw in duals.items()}
        self.s = settings
        lr_critic, lr_actor, lr_dual = rates
        raws = [dual.raw for dual in self.duals.values()]
        self.optimizers = [
            torch.optim.Adam(critic.parameters(), lr=lr_critic, fused=True, **adam),
            torch.optim.Adam(policy.parameters(), lr=lr_actor, fused=True, **adam),
            torch.optim.Adam(raws, lr=lr_dual, fused=True, **adam),
        ]

    def update(self, data: dict[str, Tensor]) -> None:
        s = self.s
        with torch.no_grad():
            obs, next_obs = data["observation"], data["next_observation"]
            value_samples = self._sample(next_obs)
            discount = data.get("discount", s.gamma) * ~data["terminated"]
            target = data["reward"] + discount * value_samples[-1].mean(0)
            states = next_obs if s.shared_draw else obs
            samples = value_samples if s.shared_draw else self._sample(obs)
            old_loc, old_scale, noise, raw_action, q_value = samples
            counted = ~data["terminated"] if s.shared_draw else None

        weights, loss_eta = _weights(q_value, self.duals["temperature"](), s.epsilon, counted)
        dual_loss = loss_eta
        if s.penalty:
            cost = -(raw_action - raw_action.clamp(-1, 1)).norm(dim=-1)
            eta = self.duals["penalty_temperature"]()
            penalty_weights, loss_penalty = _weights(cost, eta, s.epsilon_penalty, counted)
            weights, dual_loss = weights + penalty_weights, dual_loss + loss_penalty
        with torch.no_grad():
            w = weights.unsqueeze(-1)
            zeroth, weighted = w.sum(0), w * noise
            moments = zeroth, weighted.sum(0), (weighted * noise).sum(0)

        q = self.critic(obs, data["action"].clamp(-1, 1))
        self._step(0, (q - target).square().mean(), s.clip_networks)

        loc, scale = self.policy(states)
        cross_entropy = _cross_entropy(loc, old_scale, old_loc, old_scale, moments)
        cross_entropy = cross_entropy + _cross_entropy(old_loc, scale, old_loc, old_scale, moments)
        kl_mean = (loc - old_loc).square() / (2 * old_scale.square())
        log_ratio = scale.log() - old_scale.log()
        kl_stddev = (torch.expm1(-2 * log_ratio) + 2 * log_ratio) / 2
        kls = (kl_mean, "alpha_mean", s.epsilon_mean), (kl_stddev, "alpha_stddev", s.epsilon_stddev)
        for kl, name, bound in kls:
            slack = bound - kl.detach()
            dual_loss = dual_loss + _mean((self.duals[name]() * slack).sum(-1), counted)
        if s.dual_first:
            self._step(2, dual_loss, s.clip_duals)
        loss = cross_entropy
        for kl, name, _ in kls:
            loss = loss + (self.duals[name]().detach() * kl).sum(-1)
        self._step(1, _mean(loss, counted), s.clip_networks)
        if not s.dual_first:
            self._step(2, dual_loss, s.clip_duals)

    def _sample(self, obs: Tensor) -> tuple[Tensor, ...]:
        loc, scale = self.target_policy(obs)
        noise = torch.randn(self.s.num_samples, *loc.shape)
        raw_action = loc + scale * noise
        q_value = self.target_critic.of_samples(obs, raw_action.clamp(-1, 1))
        return loc, scale, noise, raw_action, q_value

    def _step(self, index: int, loss: Tensor, clip: float | None) -> None:
        optimizer = self.optimizers[index]
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        optimizer.step()
        if index == 2:
            with torch.no_grad():
                for dual in self.duals.values():
                    dual.raw.clamp_(min=-18.42)


def _weights(
    values: Tensor, eta: Tensor, epsilon: float, counted: Tensor | None
) -> tuple[Tensor, Tensor]:
    scaled = values / eta
    log_mean = scaled.logsumexp(0) - math.log(len(values))
    return scaled.detach().softmax(0), _mean(eta * (epsilon + log_mean), counted)


def _cross_entropy(
    loc: Tensor, scale: Tensor, old_loc: Tensor, old_scale: Tensor, moments: tuple[Tensor, ...]
) -> Tensor:
    zeroth, first, second = moments
    shift = old_loc - loc
    square = zeroth * shift.square() + 2 * shift * old_scale * first + old_scale.square() * second
    constant = zeroth * (scale.log() + 0.5 * math.log(2 * math.pi))
    return (0.5 * square / scale.square() + constant).sum(-1)


def _mean(x: Tensor, counted: Tensor | None) -> Tensor:
    return x.mean() if counted is None else torch.where(counted, x, 0.0).sum() / counted.sum()
