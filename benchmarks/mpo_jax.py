"""MPO in JAX with rlax and optax: an update is one compiled function, its state given away to it.

The same networks and the same equations as in `mpo_floor`, with weights, settings and learning
rates taken from one. The losses are rlax's: it has no action penalty, which is a second E-step with
a temperature of its own. With the same noise the results agree with the floor's.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax
import torch
from jax import Array
from jax.scipy.stats import norm
from mpo_floor import ROWS, MPOFloor
from torch import Tensor, nn

Params = dict[str, Array]


class State(NamedTuple):
    """What an update changes. Parameters have the names they have in the floor."""

    critic: Params
    policy: Params
    duals: Params
    optimizers: tuple[Any, Any, Any]


class Samples(NamedTuple):
    """Actions ``[N, B, D]`` of the target policy at some states, and their values ``[N, B]``."""

    loc: Array
    scale: Array
    action: Array
    q_value: Array


class RlaxMPO:
    """Takes updates on one batch.

    Args:
        floor: gives the weights, the settings and the learning rates.
        data: the batch, as the floor takes it.
    """

    def __init__(self, floor: MPOFloor, data: dict[str, Tensor]) -> None:
        self.s = floor.s
        self.factor, self.min_scale = floor.policy.factor, floor.policy.min_scale
        self.gain = floor.policy.gain
        clips = (self.s.clip_networks, self.s.clip_networks, self.s.clip_duals)
        self.optimizers = [like_adam(*pair) for pair in zip(floor.optimizers, clips, strict=True)]
        duals = {name: to_array(dual.raw) for name, dual in floor.duals.items()}
        trained = (to_params(floor.critic), to_params(floor.policy), duals)
        steps = (opt.init(params) for opt, params in zip(self.optimizers, trained, strict=True))
        self.state = State(*trained, tuple(steps))
        self.targets = (to_params(floor.target_critic), to_params(floor.target_policy))
        self.data = {name: to_array(value) for name, value in data.items()}
        draws = 1 if self.s.shared_draw else 2
        self.noise_shape = (draws, self.s.num_samples, *data["action"].shape)
        self.key = jax.random.key(0)
        self._with_noise = jax.jit(self._update, donate_argnums=0)
        self._with_key = jax.jit(self._draw_and_update, donate_argnums=0)

    def update(self) -> None:
        """What is timed: draws its noise and waits for its result."""
        done = self._with_key((self.state, self.key), self.targets, self.data)
        self.state, self.key = jax.block_until_ready(done)

    def update_with(self, noise: Tensor) -> None:
        """An update with the given noise ``[draws, N, B, D]``: at the next states comes first."""
        self.state = self._with_noise(self.state, self.targets, self.data, noise.numpy())

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The parameters of one part of the state, as the floor has them."""
        params = getattr(self.state, name)
        return {k: torch.tensor(np.asarray(v).T) for k, v in params.items()}

    def _draw_and_update(
        self, state_and_key: tuple[State, Array], targets: tuple[Params, Params], data: Params
    ) -> tuple[State, Array]:
        state, key = state_and_key
        key, used = jax.random.split(key)
        noise = jax.random.normal(used, self.noise_shape)
        return self._update(state, targets, data, noise), key

    def _update(
        self, state: State, targets: tuple[Params, Params], data: Params, noise: Array
    ) -> State:
        s, (critic, policy, duals, steps) = self.s, state
        obs, next_obs = data["observation"], data["next_observation"]
        value_samples = self._sample(targets, next_obs, noise[0])
        discount = s.gamma * ~data["terminated"]
        target = data["reward"] + discount * value_samples.q_value.mean(0)
        states = next_obs if s.shared_draw else obs
        samples = value_samples if s.shared_draw else self._sample(targets, obs, noise[1])
        counted = ~data["terminated"] if s.shared_draw else None

        def critic_loss(params: Params) -> Array:
            q_value = evaluate(params, obs, data["action"].clip(-1, 1))
            return jnp.square(q_value - target).mean()

        def improvement_loss(policy: Params, duals: Params) -> Array:
            new = self._policy(policy, states)
            return self._improvement(new, duals, samples).mean(where=counted)

        critic_grads = jax.grad(critic_loss)(critic)
        critic, critic_step = self._step(0, critic_grads, steps[0], critic)
        if s.dual_first:  # new multipliers, but the samples' weights are from before the step
            dual_grads = jax.grad(improvement_loss, argnums=1)(policy, duals)
            temperatures = {name: raw for name, raw in duals.items() if "temperature" in name}
            duals, dual_step = self._step(2, dual_grads, steps[2], duals)
            policy_grads = jax.grad(improvement_loss)(policy, duals | temperatures)
        else:
            grads = jax.grad(improvement_loss, argnums=(0, 1))
            policy_grads, dual_grads = grads(policy, duals)
            duals, dual_step = self._step(2, dual_grads, steps[2], duals)
        policy, policy_step = self._step(1, policy_grads, steps[1], policy)
        return State(critic, policy, duals, (critic_step, policy_step, dual_step))

    def _policy(self, params: Params, obs: Array) -> tuple[Array, Array]:
        h = _after_first(params, _linear(params, "torso.first", obs))
        scale = (
            jax.nn.softplus(self.gain * _linear(params, "scale", h)) * self.factor + self.min_scale
        )
        return _linear(params, "loc", h), scale

    def _sample(self, targets: tuple[Params, Params], obs: Array, noise: Array) -> Samples:
        critic, policy = targets
        loc, scale = self._policy(policy, obs)
        action = loc + scale * noise
        return Samples(loc, scale, action, evaluate(critic, obs, action.clip(-1, 1)))

    def _improvement(self, new: tuple[Array, Array], duals: Params, samples: Samples) -> Array:
        """Losses ``[B]`` of policy and duals. A term has a gradient for one of the two."""
        s, (loc, scale), (old_loc, old_scale, action, q_value) = self.s, new, samples
        positive = {name: jax.nn.softplus(raw) + 1e-8 for name, raw in duals.items()}
        log_prob = norm.logpdf(action, loc, old_scale) + norm.logpdf(action, old_loc, scale)
        log_prob = log_prob.sum(-1)
        kl_mean = jnp.square((loc - old_loc) / old_scale) / 2
        log_ratio = jnp.log(scale) - jnp.log(old_scale)
        kl_stddev = (jnp.expm1(-2 * log_ratio) + 2 * log_ratio) / 2
        bound = partial(rlax.LagrangePenalty, per_dimension=True)
        loss, _ = rlax.mpo_loss(
            log_prob,
            q_value,
            rlax.LagrangePenalty(positive["temperature"], s.epsilon),
            [
                (kl_mean, bound(positive["alpha_mean"], s.epsilon_mean)),
                (kl_stddev, bound(positive["alpha_stddev"], s.epsilon_stddev)),
            ],
            projection_operator=as_it_is,
        )
        if s.penalty:
            cost = -jnp.linalg.norm(action - action.clip(-1, 1), axis=-1)
            penalty = rlax.LagrangePenalty(positive["penalty_temperature"], s.epsilon_penalty)
            loss_penalty, weights, _ = rlax.mpo_compute_weights_and_temperature_loss(
                cost, penalty, as_it_is
            )
            loss += loss_penalty - (jax.lax.stop_gradient(weights) * log_prob).sum(0)
        return loss

    def _step(self, index: int, grads: Params, step: Any, params: Params) -> tuple[Params, Any]:
        changes, step = self.optimizers[index].update(grads, step)
        params = optax.apply_updates(params, changes)
        if index == 2:
            params = {name: raw.clip(-18.42) for name, raw in params.items()}
        return params, step


def evaluate(params: Params, obs: Array, action: Array) -> Array:
    """Values ``[B]`` of actions ``[B, D]``, or ``[N, B]`` of ``[N, B, D]``, a chunk at a time."""
    weight = params["torso.first.weight"]
    of_state = obs @ weight[: obs.shape[-1]] + params["torso.first.bias"]

    def of_action(action: Array) -> Array:
        h = _after_first(params, of_state + action @ weight[obs.shape[-1] :])
        return _linear(params, "head", h).squeeze(-1)

    if action.ndim == 2:
        return of_action(action)
    return jax.lax.map(of_action, action, batch_size=max(1, ROWS // len(obs)))


def _after_first(params: Params, x: Array) -> Array:
    x = jax.nn.standardize(x, epsilon=1e-5)
    x = jnp.tanh(x * params["torso.norm.weight"] + params["torso.norm.bias"])
    depth = sum(name.startswith("torso.layers.") for name in params) // 2
    for n in range(depth):
        x = jax.nn.elu(_linear(params, f"torso.layers.{n}", x))
    return x


def as_it_is(dual: Array) -> Array:
    """Takes the place of rlax's projection: softplus has made the variable positive."""
    return dual


def _linear(params: Params, name: str, x: Array) -> Array:
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


def like_adam(adam: torch.optim.Adam, clip: float | None) -> optax.GradientTransformation:
    group = adam.param_groups[0]
    b1, b2 = group["betas"]
    ours = optax.adam(group["lr"], b1=b1, b2=b2, eps=group["eps"])
    return ours if clip is None else optax.chain(optax.clip_by_global_norm(clip), ours)


def to_array(tensor: Tensor) -> Array:
    return jnp.array(tensor.detach().numpy())  # a copy: the floor changes its parameters in place


def to_params(network: nn.Module) -> Params:
    """Parameters by name. A matrix maps from its first axis to its second, as JAX has it."""
    return {
        name: to_array(value.T if value.ndim == 2 else value)
        for name, value in network.named_parameters()
    }
