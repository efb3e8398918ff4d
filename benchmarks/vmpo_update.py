"""Time one update of V-MPO: the E-step and all its steps of policy, multipliers and critic.

    python benchmarks/vmpo_update.py --threads 2
    python benchmarks/vmpo_update.py --config small --json
    python benchmarks/vmpo_update.py --config runs --threads 1

`minerva_torchrl[...]` is `VMPOLoss` with `VMPOOptimizationStepper` on a rollout that has its
advantages; each is compared with a floor that does the same mathematics. Both presets take the same
number of policy steps here. `minerva-seed` measures divergences over the selected samples only and
steps the multipliers before the policy. `minerva_torchrl[default,compiled]` has compiled losses and
gradients; `--no-compile` leaves it out. The config `runs` has the sizes of a run, with minibatches.

`rlax[...]` are the floors' updates in JAX, if `jax`, `rlax` and `optax` are installed and there are
no minibatches. With `--threads 1` JAX works in one thread as well.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _harness import (
    add_compile,
    check_same_parameters,
    make_parser,
    measure,
    report,
    start,
    without_prefix,
)
from mpo_update import prepare_jax
from vmpo_floor import FloorSettings, TanhPolicy, VMPOFloor, tanh_network

from minerva_torchrl import VMPOLoss, VMPOOptimizationStepper
from minerva_torchrl.modules import DirectModule, StateIndependentScale, Tanh, orthogonal_init_
from minerva_torchrl.presets import vmpo_preset
from minerva_torchrl.trainers.compiled import CompiledGradients

if TYPE_CHECKING:
    from vmpo_jax import RlaxVMPO

RATES = (3e-4, 1e-2)  # networks, duals


@dataclass(frozen=True)
class Config:
    obs: int = 17
    action: int = 6
    batch: int = 4096
    layers: tuple[int, ...] = (512, 256)
    policy_steps: int = 16
    minibatch: int | None = None


CONFIGS = {
    "cheetah": Config(),
    "small": Config(layers=(64, 64)),
    "runs": Config(batch=2048, layers=(256, 256), policy_steps=320, minibatch=64),
}


def make_networks(
    obs: int,
    action: int,
    layers: tuple[int, ...],
    module_class: type[TensorDictModule] = DirectModule,
) -> tuple[ProbabilisticActor, TensorDictModule]:
    """Policy and critic as training runs of V-MPO and PPO make them."""

    def network(out_features: int, last_gain: float) -> nn.Module:
        mlp = MLP(obs, out_features, num_cells=list(layers), activation_class=Tanh)
        return orthogonal_init_(mlp, last_gain=last_gain)

    policy = StateIndependentScale(network(action, 0.01), action)
    actor = ProbabilisticActor(
        module_class(policy, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-1.0, 1.0, (action,)),
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    return actor, module_class(network(1, 1.0), ["observation"], ["state_value"])


def make_data(config: Config, actor: ProbabilisticActor) -> TensorDict:
    """A rollout of a policy that is close to the actor, with advantages and targets."""
    size = [config.batch, 1]
    data = TensorDict({"observation": torch.randn(config.batch, config.obs)}, [config.batch])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        actor(data)
    data["loc"] = data["loc"] + 0.1 * torch.randn_like(data["loc"])
    return data.update({"advantage": torch.randn(size), "value_target": torch.rand(size)})


def make_ours(config: Config, preset_name: str) -> tuple[VMPOLoss, VMPOOptimizationStepper]:
    preset = vmpo_preset(preset_name)
    loss = VMPOLoss(*make_networks(config.obs, config.action, config.layers), **preset.loss)
    adam = {"fused": True, **preset.adam}
    networks = [*loss.actor_network_params.parameters(), *loss.critic_network_params.parameters()]
    lr, lr_dual = RATES
    temperature = None
    if loss.temperature_update == "gradient":
        temperature = torch.optim.Adam([loss.temperature.raw], lr=lr_dual, **adam)
    stepper = VMPOOptimizationStepper(
        torch.optim.Adam(networks, lr=lr, **adam),
        torch.optim.Adam(loss.alpha_parameters(), lr=lr_dual, **adam),
        temperature,
        **preset.stepper
        | {"num_policy_steps": config.policy_steps, "minibatch_size": config.minibatch},
    )
    return loss, stepper


def make_floor(loss: VMPOLoss, stepper: VMPOOptimizationStepper, preset_name: str) -> VMPOFloor:
    settings = FloorSettings(
        num_policy_steps=stepper.num_policy_steps,
        top_k_fraction=loss.top_k_fraction,
        solve_temperature=loss.temperature_update == "solve",
        kl_of_selected=loss.kl_samples == "selected",
        epsilon=loss.epsilon.item(),
        epsilon_mean=loss.epsilon_mean.item(),
        epsilon_stddev=loss.epsilon_stddev.item(),
        dual_first=stepper.dual_order == "dual_first",
        clip=stepper.clip,
        minibatch=stepper.minibatch_size,
    )
    policy, critic = our_parameters(loss)
    return VMPOFloor(
        TanhPolicy(tanh_network(without_prefix(policy, "loc_network.")), policy["log_scale"]),
        tanh_network(critic),
        {name: getattr(loss, name).raw for name in ("temperature", "alpha_mean", "alpha_stddev")},
        settings,
        vmpo_preset(preset_name).adam,
        RATES,
    )


def our_parameters(loss: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters of the policy and of the critic by the names that the floors have for them."""
    state = loss.state_dict()
    policy = without_prefix(state, "actor_network_params.module.0.module.")
    return policy, without_prefix(state, "critic_network_params.module.")


def check_agreement(
    loss: VMPOLoss, stepper: VMPOOptimizationStepper, floor: VMPOFloor, data: TensorDict
) -> None:
    """Both take an update, which must lead to the same parameters."""
    torch.manual_seed(1)
    stepper.update(loss, data.clone())
    torch.manual_seed(1)
    floor.update(flat(data))
    for ours, theirs in zip(our_parameters(loss), (floor.policy, floor.critic), strict=True):
        check_same_parameters(ours, dict(theirs.named_parameters()), lr=RATES[0])
    for name, raw in floor.raws.items():
        ours = getattr(loss, name)()
        value = nn.functional.softplus(raw) + 1e-8
        assert torch.allclose(ours, value, rtol=1e-4), f"{name}: {ours} is not {value}"


def make_rlax(floor: VMPOFloor, plain: dict[str, torch.Tensor]) -> RlaxVMPO | None:
    """The floor's update in JAX, or nothing without the packages that it needs."""
    if not all(importlib.util.find_spec(name) for name in ("jax", "rlax", "optax")):
        return None
    from vmpo_jax import RlaxVMPO

    return RlaxVMPO(floor, plain)


def check_rlax(peer: RlaxVMPO, floor: VMPOFloor, plain: dict[str, torch.Tensor]) -> None:
    """Both take two updates, which must lead to the same parameters."""
    for _ in range(2):
        floor.update(plain)
        peer.update()
    for name, network in (("policy", floor.policy), ("critic", floor.critic)):
        check_same_parameters(peer.tensors(name), dict(network.named_parameters()), lr=RATES[0])
    for name, raw in peer.tensors("duals").items():
        theirs, ours = (nn.functional.softplus(x) + 1e-8 for x in (raw, floor.raws[name]))
        assert torch.allclose(theirs, ours, rtol=1e-4), f"{name}: {theirs} is not {ours}"


def flat(data: TensorDict) -> dict[str, torch.Tensor]:
    names = ("observation", "action", "loc", "scale", "value_target")
    return {name: data[name] for name in names} | {"advantage": data["advantage"].squeeze(-1)}


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--config", choices=tuple(CONFIGS), default="cheetah")
    add_compile(parser)
    args = start(parser)
    prepare_jax(args.threads)
    cases, floors = {}, {}
    presets = dict.fromkeys(("default", "default,recorded", "default,compiled"), "floor")
    if not args.compile:
        del presets["default,compiled"]
    if CONFIGS[args.config].minibatch is None:
        presets["minerva-seed"] = "floor[minerva-seed]"
    for title, floor_name in presets.items():
        preset, _, how = title.partition(",")
        loss, stepper = make_ours(CONFIGS[args.config], preset)
        if how:
            backend = "recorded" if how == "recorded" else "inductor"
            stepper.compiled = CompiledGradients(backend=backend)
        data = make_data(CONFIGS[args.config], loss.actor_network)
        floor = make_floor(loss, stepper, preset)
        check_agreement(loss, stepper, floor, data)
        plain = flat(data)
        name = f"minerva_torchrl[{title}]"
        cases[name] = lambda loss=loss, stepper=stepper, data=data: stepper.update(loss, data)
        cases[floor_name] = lambda floor=floor, plain=plain: floor.update(plain)
        floors |= {name: floor_name, floor_name: floor_name}
        reference = make_floor(loss, stepper, preset)
        whole = CONFIGS[args.config].minibatch is None  # JAX's has no minibatches
        peer = make_rlax(reference, plain) if title == preset and whole else None
        if peer is not None:
            check_rlax(peer, reference, plain)
            cases[f"rlax[{preset}]"] = peer.update
            floors[f"rlax[{preset}]"] = floor_name
    results = measure(cases, rounds=args.rounds, clock=args.clock, warmup=1)
    report(results, config=f"V-MPO {args.config}", as_json=args.json, floors=floors)


if __name__ == "__main__":
    main()
