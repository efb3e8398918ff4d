"""A Gymnasium environment whose actions have parts, with a known best one."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 10


class Hybrid(gymnasium.Env):
    """Reach for the first observation with the arm, and choose the tool by the sign of the other.

    The best return of an episode of ten steps is 20, that of a policy that does nothing about 10.
    """

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Dict(
        {"arm": spaces.Box(-2.0, 2.0, (1,), np.float32), "tool": spaces.Discrete(3)}
    )

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.steps = 0
        return self.draw(), {}

    def draw(self) -> Any:
        self.state = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.state

    def step(self, action):
        assert self.action_space.contains(action), action
        best = 2 if self.state[1] > 0 else 0
        reward = 1 - abs(action["arm"][0] - self.state[0]) + (action["tool"] == best)
        self.steps += 1
        return self.draw(), float(reward), False, self.steps >= LENGTH, {}


class Switches(gymnasium.Env):
    """Set three switches of two, three and four positions as the observation says."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.MultiDiscrete([2, 3, 4], start=[0, 1, 0])

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.steps = 0
        return self.draw(), {}

    def draw(self) -> Any:
        self.state = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self.state

    def step(self, action):
        assert self.action_space.contains(action), action
        right = (action > 0) == (self.state > 0)
        self.steps += 1
        return self.draw(), float(right.mean()), False, self.steps >= LENGTH, {}
