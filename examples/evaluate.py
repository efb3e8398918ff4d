"""Evaluate the policy of a run, and make a video of it.

    python examples/evaluate.py runs/... --episodes 10
    python examples/evaluate.py runs/... --checkpoint best --video policy.mp4

Videos need OpenGL: without a display, set MUJOCO_GL=egl (or osmesa).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from minerva_torchrl.runs import CheckpointError, ConfigError, evaluate, load_policy
from minerva_torchrl.runs.video import require_video_support, write_video


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of a run, or of one of its checkpoints")
    parser.add_argument("--episodes", type=int, default=10, help="number of episodes (10)")
    parser.add_argument("--checkpoint", choices=("last", "best"), default="last")
    parser.add_argument("--seed", type=int, help="seed (default: that of the run's evaluations)")
    parser.add_argument("--video", metavar="FILE", help="write the first episode to an mp4 file")
    args = parser.parse_args()
    if args.episodes < 1:
        parser.error(f"--episodes must be at least 1, got {args.episodes}")
    if args.seed is not None and not 0 <= args.seed < 2**32:
        parser.error(f"--seed must be between 0 and 2**32 - 1, got {args.seed}")
    if args.video and not args.video.endswith(".mp4"):
        parser.error(f"--video must end in .mp4, got {args.video}")
    return args


def main() -> None:
    args = parse_args()
    if args.video:
        require_video_support()
    policy = load_policy(args.run, name=args.checkpoint)
    env = policy.make_env(episodes=args.episodes, seed=args.seed, video=bool(args.video))
    pictures: list[Any] = []
    render = (lambda: pictures.append(env.base_env.render())) if args.video else None
    seed = policy.evaluation_seed if args.seed is None else args.seed
    result = evaluate(env, policy.actor, seed=seed, on_step=render)

    print(f"{policy.config.algo} {policy.config.env.name} at {policy.checkpoint.frames:,} frames")
    for i, (score, length) in enumerate(zip(result.returns, result.lengths, strict=True), 1):
        print(f"  episode {i:<3} return {score:9.2f}   length {length}")
    row = result.row()
    print(
        f"return {row['return_mean']:.2f} ± {row['return_std']:.2f}   "
        f"min {row['return_min']:.2f}   max {row['return_max']:.2f}"
    )
    if args.video:
        write_video(args.video, pictures, fps=30)
        print(f"video: {args.video}")


if __name__ == "__main__":
    try:
        main()
    except (CheckpointError, ConfigError, ImportError) as error:
        sys.exit(f"error: {error}")
