"""Train V-MPO on a DM Control task, or with "gym:" before its name on a Gymnasium one.

    python examples/vmpo_dmc.py env.name=walker-walk seed=1 total_frames=100_000
    python examples/vmpo_dmc.py env.name=gym:HalfCheetah-v5 preset=minerva-seed
    python examples/vmpo_dmc.py --multirun seed=0,1,2
    python examples/vmpo_dmc.py resume=runs/...

`--help` lists all settings. `python -m minerva_torchrl train vmpo` does the same without configs/.
"""

from pathlib import Path

from minerva_torchrl.runs import train_main

if __name__ == "__main__":
    train_main("vmpo", config_dir=Path(__file__).parents[1] / "configs")
