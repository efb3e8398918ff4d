"""Train MPO with a critic of the distribution of returns (DMPO) on a DM Control task.

    python examples/mpo_distributional.py env.name=walker-walk network.critic=quantile

`network.critic` may be categorical, quantile, gaussian_mixture, two_hot, hl_gauss or scalar, with
its arguments in `network.critic_kwargs`. `--help` lists all settings.
"""

import sys
from pathlib import Path

from minerva_torchrl.runs import train_main

SETTINGS = ["env.name=cheetah-run", "network.critic=categorical"]

if __name__ == "__main__":
    if not any(argument.startswith("resume=") for argument in sys.argv):
        sys.argv[1:1] = SETTINGS  # what comes later on the command line counts
    train_main("mpo", config_dir=Path(__file__).parents[1] / "configs")
