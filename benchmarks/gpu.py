"""Time updates on a GPU: eager, compiled, and compiled with CUDA graphs.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --rounds 2

One row for MPO at the sizes of a run and at larger ones, with `compile.mode` `default` and
`reduce-overhead`. Nobody has run it on a GPU yet. `--device cpu` shows that it works.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _harness import measure, report
from mpo_update import CONFIGS, RATES, make_data, make_ours

from minerva_torchrl.presets import mpo_preset
from minerva_torchrl.trainers import MPOOptimizationStepper, make_target_updater
from minerva_torchrl.trainers.compiled import CompiledGradients

MODES = (None, "default", "reduce-overhead")


def make_case(config: str, device: str, mode: str | None) -> Callable[[], None]:
    """Ten updates, and one wait for the device at their end."""
    loss, _ = make_ours(CONFIGS[config], "default")
    loss = loss.to(device)
    adam = {"fused": True, **mpo_preset("default").adam}
    networks = (loss.qvalue_network_params, loss.actor_network_params)
    groups = [*(list(params.parameters()) for params in networks), loss.dual_parameters()]
    optimizers = [
        torch.optim.Adam(group, lr=lr, **adam) for group, lr in zip(groups, RATES, strict=True)
    ]
    stepper = MPOOptimizationStepper(*optimizers, metrics_interval=25)
    if mode is not None:
        stepper.compiled = CompiledGradients(mode)
    updater = make_target_updater(loss, period=100)
    data: TensorDict = make_data(CONFIGS[config]).to(device)

    def updates() -> None:
        for _ in range(10):
            stepper.update(loss, data)
            updater.step()
        if device != "cpu":
            torch.cuda.synchronize()

    return updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--configs", nargs="+", choices=tuple(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here. --device cpu shows that the script works.")
    torch.manual_seed(0)
    for config in args.configs:
        cases = {
            f"minerva_torchrl[{mode or 'eager'}]": make_case(config, args.device, mode)
            for mode in MODES
            if args.device != "cpu" or mode != "reduce-overhead"  # CUDA graphs
        }
        results = measure(cases, rounds=args.rounds, per=10, clock=time.perf_counter)
        floors = dict.fromkeys(cases, "minerva_torchrl[eager]")
        report(results, config=f"{config} {args.device}", as_json=args.json, floors=floors)


if __name__ == "__main__":
    main()
