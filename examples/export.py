"""Write the policy of a run to a file that needs nothing of this package, and use the file.

    python examples/export.py runs/... policy.pt2
    python examples/export.py runs/... policy.onnx --checkpoint best

policy.onnx needs `pip install "minerva_torchrl[export]"`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minerva_torchrl.runs import CheckpointError, ConfigError, load_policy


def parts(action: Any) -> list[np.ndarray]:
    """An action as a list: one array, or one for each part."""
    if isinstance(action, dict | tuple):
        inner = action.values() if isinstance(action, dict) else action
        return [array for part in inner for array in parts(part)]
    return [np.asarray(action)]


def load_file(path: Path) -> Callable[[np.ndarray], list[np.ndarray]]:
    """What a robot or a server does with the file: observations [N, O] in, actions out."""
    if path.suffix == ".onnx":
        import onnxruntime

        session: Any = onnxruntime.InferenceSession(path)
        return lambda observations: session.run(None, {"observation": observations})
    module = torch.export.load(path).module()
    return lambda observations: parts(module(torch.from_numpy(observations)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of a run, or of one of its checkpoints")
    parser.add_argument("file", type=Path, help="where to, with the ending .pt2 or .onnx")
    parser.add_argument("--checkpoint", choices=("last", "best"), default="last")
    parser.add_argument("--trust", action="store_true", help="import the code that the run names")
    args = parser.parse_args()
    if args.file.suffix not in (".pt2", ".onnx"):
        parser.error(f"file must end in .pt2 or .onnx, got {args.file}")

    policy = load_policy(args.run, name=args.checkpoint, trust=args.trust)
    policy.export(args.file)
    print(f"{policy.config.algo} {policy.config.env.name} at {policy.frames:,} frames")
    print(f"written to {args.file}")

    # The file takes what the simulator gives, and gives what the simulator takes.
    act = load_file(args.file)
    observations = policy.make_env(episodes=3).base_env.reset()["observation"].numpy()
    actions = act(observations)
    for action, expected in zip(actions, parts(policy.predict(observations)), strict=True):
        np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-5)
    print(f"actions at the beginning of three episodes: {[x.tolist() for x in actions]}")


if __name__ == "__main__":
    try:
        main()
    except (CheckpointError, ConfigError, ImportError) as error:
        sys.exit(f"error: {error}")
