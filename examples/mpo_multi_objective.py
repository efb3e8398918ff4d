"""Train MPO to run with little energy: the return against the energy of the actions.

    python examples/mpo_multi_objective.py loss.objectives.energy.epsilon=0.3
    python examples/mpo_multi_objective.py --multirun loss.objectives.energy.epsilon=0.01,0.1,1

The larger its bound against `loss.epsilon`, the more the energy counts: the runs of several bounds
are points of a Pareto front, which `examples/pareto_front.py` draws. `--help` lists all settings.
"""

import sys
from pathlib import Path

from minerva_torchrl.runs import train_main

SETTINGS = [
    "env.name=cheetah-run",
    "env.wrappers=[minerva_torchrl.envs.energy:EnergyCost]",
    "loss.objectives.energy.epsilon=0.1",
    "loss.objectives.energy.reward=energy",
]

if __name__ == "__main__":
    if not any(argument.startswith("resume=") for argument in sys.argv):
        sys.argv[1:1] = SETTINGS  # what comes later on the command line counts
    train_main("mpo", config_dir=Path(__file__).parents[1] / "configs")
