"""Train MPO with actions of two kinds: the force of a motor, and the gear that it is in.

    python examples/mpo_hybrid.py seed=1

The actions are Gymnasium's `Dict`, and so the policy has a Gaussian and a categorical part, each
with bounds of its own. `--help` lists all settings.
"""

import sys
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

from minerva_torchrl.runs import train_main


class GearedPendulum(gymnasium.ActionWrapper):
    """Gymnasium's pendulum, whose motor has two gears.

    Only the high gear is strong enough to swing the pendulum up, but its use costs a little: hold
    the pendulum in the low one.
    """

    GEARS = (0.5, 2.0)
    """The largest torque in each."""
    COST = 0.5
    """Of a step in the high one."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))
        self.action_space = spaces.Dict(
            {"force": spaces.Box(-1.0, 1.0, (1,), np.float32), "gear": spaces.Discrete(2)}
        )

    def action(self, action):
        """The torque."""
        return self.GEARS[int(action["gear"])] * action["force"]

    def step(self, action):
        """As Gymnasium's, with the cost of the gear."""
        observation, reward, *rest = super().step(action)
        return observation, reward - self.COST * int(action["gear"]), *rest


SETTINGS = [
    "env.factory=mpo_hybrid:GearedPendulum",
    "env.name=geared-pendulum",
    "total_frames=30_000",
    "eval.interval=2_500",
]

if __name__ == "__main__":
    if not any(argument.startswith("resume=") for argument in sys.argv):
        sys.argv[1:1] = SETTINGS  # what comes later on the command line counts
    train_main("mpo", config_dir=Path(__file__).parents[1] / "configs")
