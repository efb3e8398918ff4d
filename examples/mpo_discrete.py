"""Train MPO with discrete actions, which it enumerates, on a Gymnasium task.

    python examples/mpo_discrete.py env.name=gym:Acrobot-v1 seed=1

An action that is only explored can end these tasks within three steps, which says little about the
policy: so transitions span one step, and the critic's target is copied more often, for values to
spread as fast. `--help` lists all settings.
"""

import sys
from pathlib import Path

from minerva_torchrl.runs import train_main

SETTINGS = [
    "env.name=gym:CartPole-v1",
    "total_frames=30_000",
    "eval.interval=2_500",
    "replay_buffer.n_steps=1",
    "replay_buffer.batch_size=128",
    "optim.target_period=25",
    "optim.target_period_actor=100",
]

if __name__ == "__main__":
    if not any(argument.startswith("resume=") for argument in sys.argv):
        sys.argv[1:1] = SETTINGS  # what comes later on the command line counts
    train_main("mpo", config_dir=Path(__file__).parents[1] / "configs")
