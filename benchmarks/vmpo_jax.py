"""V-MPO in JAX with rlax and optax: an update, all of its steps, is one compiled function.

The same networks and the same equations as in `vmpo_floor`, with weights, settings and learning
rates taken from one. The E-step and the penalties are rlax's, except that rlax cannot solve for the
temperature. On the same rollout the results agree with the floor's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax
import torch
from jax import Array
from mpo_jax import Params, as_it_is, like_adam, to_array, to_params
from torch import Tensor
from vmpo_floor import HALF_LOG_TWO_PI, VMPOFloor


class State(NamedTuple):
    """What an update changes. Parameters have the names they have in the floor."""

    networks: dict[str, Params]
    alphas: Params
    temperature: Array
    optimizers: tuple[Any, Any, Any]


class RlaxVMPO:
    """Takes updates on one rollout.

    Args:
        floor: gives the weights, the settings and the learning rates.
        data: the rollout, as the floor takes it.
    """

    def __init__(self, floor: VMPOFloor, data: dict[str, Tensor]) -> None:
        self.s = floor.s
        adams = (floor.optimizer, floor.optimizer_alpha, floor.optimizer_temperature)
        clips = (self.s.clip, None, None)
        self.optimizers = [like_adam(*pair) for pair in zip(adams, clips, strict=True)]
        networks = {"policy": to_params(floor.policy), "critic": to_params(floor.critic)}
        raws = {name: to_array(raw) for name, raw in floor.raws.items()}
        temperature = raws.pop("temperature")
        trained = (networks, raws, temperature)
        steps = (opt.init(params) for opt, params in zip(self.optimizers, trained, strict=True))
        self.state = State(*trained, tuple(steps))
        self.data = {name: to_array(value) for name, value in data.items()}
        self._jitted = jax.jit(self._update, donate_argnums=0)

    def update(self) -> None:
        """What is timed: waits for its result."""
        self.state = jax.block_until_ready(self._jitted(self.state, self.data))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The parameters of ``"policy"``, ``"critic"`` or ``"duals"``, as the floor has them."""
        duals = self.state.alphas | {"temperature": self.state.temperature}
        params = (self.state.networks | {"duals": duals})[name]
        return {k: torch.tensor(np.asarray(v).T) for k, v in params.items()}

    def _update(self, state: State, data: Params) -> State:
        s = self.s
        rows, weights, temperature, temperature_step = self._e_step(state, data["advantage"])
        chosen = {name: data[name] for name in ("observation", "action", "loc", "scale")}
        if s.kl_of_selected:
            chosen = {name: values[rows] for name, values in chosen.items()}
        else:
            weights = jnp.zeros(len(data["action"])).at[rows].set(weights)

        def divergences(policy: Params) -> tuple[Array, dict[str, Array]]:
            """Means of the policy, and what its multipliers bound, by their names."""
            loc = tanh_network(policy, chosen["observation"], "loc_network.")
            log_ratio = jnp.log(chosen["scale"]) - policy["log_scale"]
            kl_mean = jnp.square((loc - chosen["loc"]) / chosen["scale"]).sum(-1) / 2
            kl_stddev = (jnp.expm1(2 * log_ratio) / 2 - log_ratio).sum(-1)
            return loc, {"alpha_mean": kl_mean, "alpha_stddev": kl_stddev}

        def bounded(raws: Params, kls: dict[str, Array]) -> tuple[Array, Array]:
            """Penalty of the policy, and loss of the multipliers."""
            bounds = {"alpha_mean": s.epsilon_mean, "alpha_stddev": s.epsilon_stddev}
            constraints = [
                (kls[name], rlax.LagrangePenalty(_positive(raws[name]), bound))
                for name, bound in bounds.items()
            ]
            losses = rlax.compute_parametric_kl_penalty_and_dual_loss(constraints, as_it_is)
            penalty, of_alphas = (loss.mean() for loss in losses)
            return penalty, of_alphas

        def loss(networks: dict[str, Params], alphas: Params) -> tuple[Array, dict[str, Array]]:
            policy = networks["policy"]
            loc, kls = divergences(policy)
            error = (chosen["action"] - loc) * jnp.exp(-policy["log_scale"])
            constant = (policy["log_scale"] + HALF_LOG_TWO_PI).sum()
            cross_entropy = weights @ (jnp.square(error).sum(-1) / 2 + constant)
            value = tanh_network(networks["critic"], data["observation"])
            of_critic = s.critic_coeff * jnp.square(value - data["value_target"]).mean()
            return cross_entropy + bounded(alphas, kls)[0] + of_critic, kls

        def step_alphas(alphas: Params, step: Any, kls: dict[str, Array]) -> tuple[Params, Any]:
            grads = jax.grad(lambda raws: bounded(raws, kls)[1])(alphas)
            changes, step = self.optimizers[1].update(grads, step)
            alphas = optax.apply_updates(alphas, changes)
            return {name: raw.clip(-18.0) for name, raw in alphas.items()}, step

        def policy_step(carry: Any, _: None) -> tuple[Any, None]:
            networks, alphas, step, alpha_step = carry
            if s.dual_first:
                kls = divergences(networks["policy"])[1]
                alphas, alpha_step = step_alphas(alphas, alpha_step, kls)
            grads, kls = jax.grad(loss, has_aux=True)(networks, alphas)
            changes, step = self.optimizers[0].update(grads, step)
            networks = optax.apply_updates(networks, changes)
            if not s.dual_first:
                alphas, alpha_step = step_alphas(alphas, alpha_step, kls)
            return (networks, alphas, step, alpha_step), None

        carry = (state.networks, state.alphas, *state.optimizers[:2])
        carry, _ = jax.lax.scan(policy_step, carry, length=s.num_policy_steps)
        networks, alphas, step, alpha_step = carry
        return State(networks, alphas, temperature, (step, alpha_step, temperature_step))

    def _e_step(self, state: State, advantage: Array) -> tuple[Array, Array, Array, Any]:
        """Numbers of the selected samples, their weights, the temperature and its optimiser."""
        s, raw, step = self.s, state.temperature, state.optimizers[2]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        values, rows = jax.lax.top_k(advantage, max(1, int(s.top_k_fraction * len(advantage))))
        if s.solve_temperature:
            eta = _solve(values, s.epsilon)
            return rows, jax.nn.softmax(values / eta), jnp.log(jnp.expm1(eta - 1e-8)), step
        ones = jnp.ones_like(values)

        def temperature_loss(raw: Array) -> tuple[Array, Array]:
            penalty = rlax.LagrangePenalty(_positive(raw), s.epsilon)
            loss, weights, _ = rlax.vmpo_compute_weights_and_temperature_loss(
                values, ones, ones, penalty, as_it_is, 1.0
            )
            return loss, weights

        grads, weights = jax.grad(temperature_loss, has_aux=True)(raw)
        changes, step = self.optimizers[2].update(grads, step)
        return rows, weights, optax.apply_updates(raw, changes), step


def tanh_network(params: Params, x: Array, prefix: str = "") -> Array:
    """Linear layers with tanh between them."""
    names = [name.removesuffix("weight") for name in params if name.endswith("weight")]
    layers = [name for name in names if name.startswith(prefix)]
    layers.sort(key=lambda name: int(name.split(".")[-2]))  # jax orders names as words
    for layer in layers:
        x = x @ params[f"{layer}weight"] + params[f"{layer}bias"]
        x = x if layer == layers[-1] else jnp.tanh(x)
    return x


def _positive(raw: Array) -> Array:
    return jax.nn.softplus(raw) + 1e-8


def _solve(values: Array, epsilon: float) -> Array:
    """The temperature at which the softmax is `epsilon` away from uniform, by Newton's method."""
    values = values - values.max()

    def newton(_: int, log_eta: Array) -> Array:
        scaled = values / jnp.exp(log_eta)
        weights = jax.nn.softmax(scaled)
        mean = (weights * scaled).sum()
        divergence = mean - jax.nn.logsumexp(scaled) + math.log(len(values))
        variance = (weights * jnp.square(scaled - mean)).sum()
        return log_eta + jnp.log(divergence / epsilon) * divergence / variance

    start = jnp.log(-values.min() / math.sqrt(8 * epsilon))
    return jnp.exp(jax.lax.fori_loop(0, 8, newton, start))
