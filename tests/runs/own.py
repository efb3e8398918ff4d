"""Parts that a user could have written, registered nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, RewardScaling, Transform
from torchrl.modules import Delta, IndependentNormal, ProbabilisticActor, ValueOperator

from minerva_torchrl.runs import Callback, Run


class Task(gymnasium.Env):
    """A point that is pushed towards zero, against gravity, and shaken."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Box(-2.0, 2.0, (1,))

    def __init__(self, gravity: float = 1.0, render_mode: str | None = None) -> None:
        self.gravity, self.render_mode = gravity, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = self.np_random.normal(size=2)
        return self.state.astype(np.float32), {}

    def step(self, action: Any) -> Any:
        x, v = self.state
        v += 0.1 * (float(action[0]) - self.gravity + self.np_random.normal())
        self.state = np.array([x + 0.1 * v, v])
        return self.state.astype(np.float32), -abs(x), bool(abs(x) > 2.0), False, {}

    def render(self) -> Any:
        return np.zeros((16, 16, 3), np.uint8)


class TorchRLTask(EnvBase):
    """The same for TorchRL, with two entries to observe."""

    def __init__(self, gravity: float = 1.0, batch_size: tuple[int, ...] = ()) -> None:
        super().__init__(batch_size=batch_size)
        self.gravity = gravity
        number = Unbounded((*batch_size, 1))
        self.observation_spec = Composite(x=number, v=number.clone(), shape=batch_size)
        self.action_spec = Bounded(-2.0, 2.0, (*batch_size, 1))
        self.reward_spec = Unbounded((*batch_size, 1))
        self.generator = torch.Generator()

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed or 0)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        x, v = torch.randn(2, 1, generator=self.generator)
        return TensorDict({"x": x, "v": v, "done": torch.tensor([False])})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        shake = torch.randn(1, generator=self.generator)
        v = tensordict["v"] + 0.1 * (tensordict["action"] - self.gravity + shake)
        x = tensordict["x"] + 0.1 * v
        return TensorDict({"x": x, "v": v, "reward": -x.abs(), "done": x.abs() > 2.0})


def make_policy(env: EnvBase) -> ProbabilisticActor:
    size, spec = env.observation_spec["observation"].shape[-1], env.action_spec_unbatched
    network = nn.Sequential(nn.Linear(size, 2 * spec.shape[-1]), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def make_networks(env: EnvBase, config: Any) -> Any:
    """A linear policy and critic, the critic as the algorithm needs it."""
    size = env.observation_spec["observation"].shape[-1]
    if config.algo == "mpo":
        critics = [_StateAction(size + env.action_spec.shape[-1]) for _ in range(2)]
        return make_policy(env), [ValueOperator(c, ["observation", "action"]) for c in critics]
    return make_policy(env), ValueOperator(nn.Linear(size, 1))


class _StateAction(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([observation, action], -1))


class Double(gymnasium.ObservationWrapper):
    def observation(self, observation: Any) -> Any:
        return 2 * observation


class AddOne(gymnasium.ObservationWrapper):
    def observation(self, observation: Any) -> Any:
        return observation + 1


class Shift(Transform):
    """Adds one to observations."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"], out_keys=["observation"])

    def _apply_transform(self, observation: torch.Tensor) -> torch.Tensor:
        return observation + 1

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return self._call(tensordict_reset)


def half_reward() -> Transform:
    return RewardScaling(loc=0.0, scale=0.5)


class Batches(Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.count = 0

    def on_batch(self, run: Run, batch: TensorDictBase) -> None:
        self.count += 1

    def metrics(self) -> dict[str, float]:
        return {"batches": self.count}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.count = state_dict["count"]


# Wrong in one way each ---------------------------------------------------------------------------

NOT_CALLABLE = 3


def takes_nothing() -> None:
    return None


def returns_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def policy_without_spec(env: EnvBase, config: Any) -> Any:
    policy = make_policy(env)
    return type(policy)(
        policy[0], in_keys=["loc", "scale"], distribution_class=IndependentNormal
    ), make_networks(env, config)[1]


def policy_of_another_family(env: EnvBase, config: Any) -> Any:
    policy = ProbabilisticActor(
        TensorDictModule(nn.LazyLinear(1), ["observation"], ["param"]),
        in_keys=["param"],
        spec=env.action_spec_unbatched,
        distribution_class=Delta,
    )
    return policy, make_networks(env, config)[1]


class NeedsArguments(Callback):
    def __init__(self, wanted: float) -> None:
        self.wanted = wanted
