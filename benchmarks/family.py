"""Time one update of MPO for every policy and critic, over a scalar critic and a Gaussian policy.

python benchmarks/family.py --cpu --threads 1
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, OneHot, TensorSpec

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _harness import make_parser, measure, report, start

from minerva_torchrl import MPOOptimizationStepper
from minerva_torchrl.algorithms.family import make_action_critic, make_critic, make_policy
from minerva_torchrl.algorithms.mpo import MPO, MPOConfig, MPOLossConfig, MPONetworkConfig
from minerva_torchrl.trainers import make_target_updater

OBSERVATION, ACTION, BATCH = 17, 6, 128
CASES: dict[str, dict[str, Any]] = {
    "scalar, gaussian": {},
    "tanh_gaussian": {"policy": "tanh_gaussian"},
    "full_covariance": {"policy": "full_covariance"},
    "one-hot": {"actions": "discrete"},
    "hybrid": {"actions": "hybrid"},
    "two_hot": {"critic": "two_hot"},
    "hl_gauss": {"critic": "hl_gauss"},
    "categorical": {"critic": "categorical"},
    "quantile": {"critic": "quantile"},
    "gaussian_mixture": {"critic": "gaussian_mixture"},
    "two objectives": {"objectives": {"energy": 0.1}},
}
SPECS: dict[str, TensorSpec] = {
    "continuous": Bounded(-1.0, 1.0, (ACTION,)),
    "discrete": OneHot(ACTION),
    "hybrid": Composite(arm=Bounded(-1.0, 1.0, (ACTION,)), tool=OneHot(ACTION)),
}


def make_update(
    actions: str = "continuous", objectives: dict[str, float] | None = None, **network: Any
) -> Callable[[], None]:
    torch.manual_seed(0)
    objectives = objectives or {}
    settings = MPONetworkConfig(**network)
    config = MPOConfig(network=settings, loss=MPOLossConfig(objectives=objectives))
    spec = SPECS[actions]
    width = make_critic(settings.critic, {}).width * (1 + len(objectives))
    actor = make_policy(OBSERVATION, spec, settings)
    critic = make_action_critic(OBSERVATION, spec, settings, width)
    loss = MPO(config).make_loss(actor, critic)
    optimizers = [
        torch.optim.Adam(list(parameters), lr=1e-3, fused=True)
        for parameters in (
            loss.qvalue_network_params.parameters(),
            loss.actor_network_params.parameters(),
            loss.dual_parameters(),
        )
    ]
    stepper = MPOOptimizationStepper(*optimizers, metrics_interval=25)
    updater = make_target_updater(loss, period=100)
    end = torch.zeros(BATCH, 1, dtype=torch.bool)
    data = TensorDict(
        {
            "observation": torch.randn(BATCH, OBSERVATION),
            "action": spec.rand((BATCH,)),
            "next": {
                "observation": torch.randn(BATCH, OBSERVATION),
                "reward": torch.rand(BATCH, 1 + len(objectives)),
                "done": end,
                "terminated": end,
            },
        },
        [BATCH],
    )

    def update() -> None:
        stepper.update(loss, data)
        updater.step()

    return update


def main() -> None:
    args = start(make_parser(__doc__, rounds=15, threads=1))
    cases = {name: make_update(**case) for name, case in CASES.items()}
    results = measure(cases, rounds=args.rounds, clock=args.clock)
    floors = dict.fromkeys(CASES, next(iter(CASES)))
    report(results, config="r10", as_json=args.json, floors=floors)


if __name__ == "__main__":
    main()
