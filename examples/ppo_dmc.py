"""Train PPO on a DM Control task, or with "gym:" before its name on a Gymnasium one.

    python examples/ppo_dmc.py env.name=walker-walk seed=1 total_frames=100_000
    python examples/ppo_dmc.py env.name=gym:HalfCheetah-v5 preset=minerva-seed
    python examples/ppo_dmc.py --multirun seed=0,1,2
    python examples/ppo_dmc.py resume=runs/...

`--help` lists all settings.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from minerva_torchrl.runs import check_overrides, register_configs, train


@hydra.main(version_base="1.3", config_path="../configs", config_name="ppo")
def main(config: DictConfig) -> None:
    train(config)


if __name__ == "__main__":
    check_overrides("ppo")
    register_configs("ppo")
    main()
