"""A Gymnasium environment with any spaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium
from gymnasium import spaces


class Recorder(gymnasium.Env):
    """Has the spaces it is given, keeps the actions and draws its observations."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.actions: list = []

    def draw(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        return self.draw(), {}

    def step(self, action):
        self.actions.append(action)
        return self.draw(), 1.0, False, False, {}


@contextmanager
def registered_recorder() -> Iterator[None]:
    """Let Gymnasium know it as ``Recorder-v0``."""
    gymnasium.register("Recorder-v0", Recorder)
    try:
        yield
    finally:
        del gymnasium.registry["Recorder-v0"]
