"""A small animation of a trained agent, from the folder of its run.

    MUJOCO_GL=osmesa python docs/pictures/agent.py runs/... docs/pictures/walker-walk.gif

Needs OpenGL, as videos do. Prints the return of the episode, which is of the deterministic policy.
The runs in the README, which are drawn with `--rate 100`, have returns of 845 and 496:

    python examples/mpo_dmc.py env.name=cartpole-swingup total_frames=50_000 seed=100
    python examples/mpo_dmc.py env.name=walker-walk total_frames=50_000 seed=100
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from minerva_torchrl.runs import load_policy
from minerva_torchrl.runs.evaluation import evaluate

HEIGHT, WIDTH = 150, 200
FPS = 15
COLOURS = 48


def record(run: Path, seconds: float, skip: float, rate: float) -> tuple[list[np.ndarray], float]:
    """Pictures in real time of a part of an episode, and the return of the whole."""
    policy = load_policy(run)
    env = policy.make_env(episodes=1, video=True)
    task = env.base_env
    every = max(1, round(rate / FPS))
    pictures: list[np.ndarray] = []
    steps = 0

    def draw() -> None:
        nonlocal steps
        if steps % every == 0 and skip <= steps / rate < skip + seconds:
            pictures.append(task.render(height=2 * HEIGHT, width=2 * WIDTH))
        steps += 1

    result = evaluate(env, policy.actor, seed=policy.evaluation_seed, on_step=draw)
    return pictures, float(result.returns[0])


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("file", type=Path, help="where to write it, *.gif")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--skip", type=float, default=2.0, help="seconds of the episode before")
    parser.add_argument("--rate", type=float, default=40.0, help="actions in a second of the task")
    args = parser.parse_args()
    pictures, total = record(args.run, args.seconds, args.skip, args.rate)
    small = [
        Image.fromarray(picture).resize((WIDTH, HEIGHT), Image.LANCZOS) for picture in pictures
    ]
    palette = small[0].quantize(COLOURS)
    frames = [image.quantize(COLOURS, palette=palette, dither=Image.Dither.NONE) for image in small]
    frames[0].save(
        args.file,
        save_all=True,
        append_images=frames[1:],
        duration=1000 // FPS,
        loop=0,
        optimize=True,
    )
    size = args.file.stat().st_size // 1000
    print(f"{args.file}: {len(frames)} pictures, {size} kB, return of the episode {total:.0f}")


if __name__ == "__main__":
    main()
