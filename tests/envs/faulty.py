"""An environment that goes wrong when it is told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

FAULTS = ("nan", "inf", "huge", "nan_reward", "inf_reward", "huge_reward", "none")
"""What costs a step."""
ENDINGS = ("raise", "exit", "shape", "kill")
"""What ends a run."""


class Faulty(gymnasium.Env):
    """Counts its steps. Observations are the number of the episode, its steps, and all steps.

    Args:
        fault: what goes wrong: one of ``FAULTS`` or ``ENDINGS``.
        at: numbers of the steps at which that happens, of all steps of a copy.
        always: whether it happens at every step from the first of these on.
        on_reset: whether it happens when an episode begins, too.
        length: steps of an episode, which then is terminated.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,))
    action_space = spaces.Box(-1.0, 1.0, (1,))

    def __init__(
        self,
        fault: str = "nan",
        at: Sequence[int] = (),
        always: bool = False,
        on_reset: bool = False,
        length: int = 6,
        discrete: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.fault, self.at, self.always, self.on_reset = fault, tuple(at), always, on_reset
        self.length, self.render_mode = length, render_mode
        self.steps, self.episode, self.total = 0, 0, 0
        if discrete:
            self.action_space = spaces.Discrete(2)

    def _is_faulty(self) -> bool:
        return self.total in self.at or (self.always and self.total >= min(self.at))

    def _observe(self, faulty: bool) -> Any:
        observation = np.array([self.episode, self.steps, self.total], np.float64)
        if faulty:
            observation[1] = {"nan": np.nan, "inf": -np.inf, "huge": 1e300}.get(
                self.fault, observation[1]
            )
        return observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        faulty = self.on_reset and self._is_faulty()
        if faulty:
            self.total += 1
        return self._observe(faulty), {}

    def step(self, action: Any) -> Any:
        self.steps, self.total = self.steps + 1, self.total + 1
        faulty = self._is_faulty()
        if faulty:
            self._end()
        reward = {"nan_reward": np.nan, "inf_reward": np.inf, "huge_reward": 1e300}
        value = reward.get(self.fault, 1.0) if faulty else 1.0
        observation: Any = self._observe(faulty)
        if faulty and self.fault in ("none", "shape"):
            observation = None if self.fault == "none" else observation[:2]
        return observation, value, self.steps >= self.length, False, {}

    def _end(self) -> None:
        if self.fault == "raise":
            raise ZeroDivisionError("a joint\nis broken")
        if self.fault == "exit":
            raise SystemExit(0)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
