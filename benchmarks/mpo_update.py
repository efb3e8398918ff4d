"""Time one update of MPO: critic, duals and policy.

    python benchmarks/mpo_update.py --config c20 --threads 2
    python benchmarks/mpo_update.py --config h64 --json

`minerva_torchrl[default]` and `minerva_torchrl[minerva-seed]` are `MPOLoss` with
`MPOOptimizationStepper`; each is compared with a floor that does the same mathematics. The
mathematics of the two presets differs: one draw of samples per update against two.

`minerva_torchrl[default,recorded]` calls the operations that were recorded of an update, without a
compiler. `minerva_torchrl[default,compiled]` has compiled them; `--no-compile` leaves it out.
`r10` has the sizes of a run.

`rlax[default]` and `rlax[minerva-seed]` are the floors' updates in JAX, if `jax`, `rlax` and
`optax` are installed. With `--threads 1` JAX works in one thread as well; with more it takes as
many as it wants, which is one for every core.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, ProbabilisticActor

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
from mpo_floor import Critic, Dual, FloorSettings, MPOFloor, Policy

from minerva_torchrl import MPOLoss, MPOOptimizationStepper
from minerva_torchrl.modules import (
    DirectModule,
    GaussianPolicy,
    StateActionCritic,
    keep_freed_memory,
)
from minerva_torchrl.presets import mpo_preset
from minerva_torchrl.trainers import make_target_updater
from minerva_torchrl.trainers.compiled import CompiledGradients

if TYPE_CHECKING:
    from mpo_jax import RlaxMPO

Config = tuple[int, int, int, tuple[int, ...], int]  # observation, action, batch, layers, samples
CONFIGS: dict[str, Config] = {
    "r10": (17, 6, 128, (256, 256), 10),  # runs, with batches of twice their default
    "c20": (17, 6, 256, (512, 256), 20),
    "c64": (17, 6, 256, (512, 256), 64),
    "h64": (67, 21, 512, (512, 512, 256), 64),
}
FLOORS = {"default": "floor", "minerva-seed": "floor[minerva-seed]"}  # by preset
CALLS = {"r10": 10, "c20": 3}  # of a case within a round; one where nothing is said
RATES = (3e-4, 3e-4, 1e-2)  # critic, actor, duals


def make_data(config: Config) -> TensorDict:
    obs, action, batch, _, _ = config
    end = torch.zeros(batch, 1, dtype=torch.bool)
    following = {"observation": torch.randn(batch, obs), "reward": torch.rand(batch, 1)}
    following |= {"done": end, "terminated": end}
    data = {"observation": torch.randn(batch, obs), "action": torch.rand(batch, action) * 2 - 1}
    return TensorDict({**data, "next": following}, [batch])


def make_ours(config: Config, preset_name: str) -> tuple[MPOLoss, MPOOptimizationStepper]:
    obs, action, _, layers, samples = config
    preset = mpo_preset(preset_name)
    actor = ProbabilisticActor(
        DirectModule(GaussianPolicy(obs, action, layers), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-1.0, 1.0, (action,)),
        distribution_class=IndependentNormal,
    )
    critic = DirectModule(
        StateActionCritic(obs, action, layers),
        in_keys=["observation", "action"],
        out_keys=["state_action_value"],
    )
    keep_freed_memory()  # as runs do
    loss = MPOLoss(actor, critic, **{**preset.loss, "num_action_samples": samples})
    loss.make_value_estimator(gamma=0.99)
    adam = {"fused": True, **preset.adam}
    lr_critic, lr_actor, lr_dual = RATES
    stepper = MPOOptimizationStepper(
        torch.optim.Adam(loss.qvalue_network_params.parameters(), lr=lr_critic, **adam),
        torch.optim.Adam(loss.actor_network_params.parameters(), lr=lr_actor, **adam),
        torch.optim.Adam(loss.dual_parameters(), lr=lr_dual, **adam),
        metrics_interval=25,  # as runs do: once for every batch of frames
        **preset.stepper,
    )
    return loss, stepper


def make_floor(loss: MPOLoss, stepper: MPOOptimizationStepper, adam: dict[str, float]) -> MPOFloor:
    """A floor with the weights and the settings of a loss and a stepper."""
    networks, policy = {}, loss.actor_network.module[0].module
    for name in ("actor_network", "target_actor_network"):
        state = _module_state(loss, name, "module.0.module.")
        networks[name] = Policy(state, policy.init_scale, policy.min_scale, policy.scale_gain)
    for name in ("qvalue_network", "target_qvalue_network"):
        state = _module_state(loss, name, "module.")
        networks[name] = Critic(state, loss.qvalue_network.module.obs_dim)
    names = ["temperature", "alpha_mean", "alpha_stddev"]
    names += ["penalty_temperature"] if loss.action_penalization else []
    settings = FloorSettings(
        num_samples=loss.num_action_samples,
        shared_draw=loss.policy_states == "next",
        penalty=loss.action_penalization,
        epsilon=loss.epsilon.item(),
        epsilon_mean=loss.epsilon_mean.item(),
        epsilon_stddev=loss.epsilon_stddev.item(),
        epsilon_penalty=loss.epsilon_penalty.item() if loss.action_penalization else 0.0,
        dual_first=stepper.dual_order == "dual_first",
        clip_networks=stepper.clip_critic,
        clip_duals=stepper.clip_dual,
    )
    return MPOFloor(
        networks["actor_network"],
        networks["target_actor_network"],
        networks["qvalue_network"],
        networks["target_qvalue_network"],
        {name: getattr(loss, name).raw for name in names},
        settings,
        adam,
        _rates(stepper),
    )


def _rates(stepper: MPOOptimizationStepper) -> tuple[float, float, float]:
    """Learning rates of critic, actor and duals."""
    optimizers = (stepper.optimizer_critic, stepper.optimizer_actor, stepper.optimizer_dual)
    critic, actor, dual = (optimizer.param_groups[0]["lr"] for optimizer in optimizers)
    return critic, actor, dual


def _module_state(loss: MPOLoss, name: str, inner: str) -> dict[str, torch.Tensor]:
    return without_prefix(loss.state_dict(), f"{name}_params.{inner}")


def _our_name(name: str) -> str:
    """The package's name for a parameter of the floor's networks."""
    name = name.replace("norm", "rest.0")
    return re.sub(r"layers\.(\d+)", lambda found: f"rest.{2 * int(found[1]) + 2}", name)


def check_agreement(
    loss: MPOLoss,
    stepper: MPOOptimizationStepper,
    floor: MPOFloor,
    data: TensorDict,
    plain: dict[str, torch.Tensor],
) -> None:
    """Both take updates with the same random numbers, which must lead to the same parameters."""
    for seed in range(3):  # of its first gradient, Adam uses the sign only
        torch.manual_seed(seed)
        stepper.update(loss, data.clone())
        torch.manual_seed(seed)
        floor.update(plain)
    pairs = (
        (_module_state(loss, "actor_network", "module.0.module."), floor.policy),
        (_module_state(loss, "qvalue_network", "module."), floor.critic),
    )
    for ours, network in pairs:
        theirs = {_our_name(name): value for name, value in network.state_dict().items()}
        check_same_parameters(ours, theirs, lr=_rates(stepper)[0])
    for name, dual in floor.duals.items():
        ours = getattr(loss, name)()
        assert torch.allclose(ours, dual(), rtol=1e-4), f"{name}: {ours} is not {dual()}"


def prepare_jax(threads: int) -> None:
    """Set what jax reads once, when it is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if threads == 1:
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        os.environ["NPROC"] = "1"  # the flags alone leave a thread for every core


def make_rlax(floor: MPOFloor, plain: dict[str, torch.Tensor]) -> RlaxMPO | None:
    """The floor's update in JAX, or nothing without the packages that it needs."""
    if not all(importlib.util.find_spec(name) for name in ("jax", "rlax", "optax")):
        return None
    from mpo_jax import RlaxMPO

    return RlaxMPO(floor, plain)


def check_rlax(peer: RlaxMPO, floor: MPOFloor, plain: dict[str, torch.Tensor]) -> None:
    """Both take updates with the same noise, which must lead to the same parameters."""
    draws, *shape = peer.noise_shape
    for seed in range(3):
        torch.manual_seed(seed)
        floor.update(plain)
        torch.manual_seed(seed)
        peer.update_with(torch.stack([torch.randn(shape) for _ in range(draws)]))
    for name, network in (("policy", floor.policy), ("critic", floor.critic)):
        check_same_parameters(peer.tensors(name), dict(network.named_parameters()), lr=RATES[0])
    for name, raw in peer.tensors("duals").items():
        theirs, dual = Dual(raw)(), floor.duals[name]()
        assert torch.allclose(theirs, dual, rtol=1e-4), f"{name}: {theirs} is not {dual}"


def flat(data: TensorDict) -> dict[str, torch.Tensor]:
    return {
        "observation": data["observation"],
        "next_observation": data["next", "observation"],
        "action": data["action"],
        "reward": data["next", "reward"].squeeze(-1),
        "terminated": data["next", "terminated"].squeeze(-1),
    }


def make_cases(
    config: Config, *, compiled: bool = False, presets: Iterable[str] = FLOORS
) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """What is timed, by name, and the name of the floor of each. All have been checked."""
    data = make_data(config)
    plain = flat(data)
    cases: dict[str, Callable[[], None]] = {}
    floors: dict[str, str] = {}
    for preset in presets:
        floor_name = FLOORS[preset]
        loss, stepper = make_ours(config, preset)
        updater = make_target_updater(loss, period=100)
        adam = mpo_preset(preset).adam
        floor = make_floor(loss, stepper, adam)
        check_agreement(loss, stepper, floor, data, plain)

        def ours(loss=loss, stepper=stepper, updater=updater) -> None:
            stepper.update(loss, data)
            updater.step()

        new = {f"minerva_torchrl[{preset}]": ours}
        if stepper.dual_order == "simultaneous":
            for name, backend in {"recorded": "recorded", "compiled": "inductor"}.items():
                if compiled or name != "compiled":
                    title = f"minerva_torchrl[{preset},{name}]"
                    new[title] = make_compiled(config, preset, data, backend)
        new[floor_name] = lambda floor=floor: floor.update(plain)
        reference = make_floor(loss, stepper, adam)  # its target networks are not the trained ones
        peer = make_rlax(reference, plain)
        if peer is not None:
            check_rlax(peer, reference, plain)
            new[f"rlax[{preset}]"] = peer.update
        cases |= new
        floors |= dict.fromkeys(new, floor_name)
    return cases, floors


def make_compiled(
    config: Config, preset: str, data: TensorDict, backend: str
) -> Callable[[], None]:
    """The same update with compiled or recorded losses and gradients."""
    loss, stepper = make_ours(config, preset)
    stepper.compiled = CompiledGradients(backend=backend)
    updater = make_target_updater(loss, period=100)
    floor = make_floor(loss, stepper, mpo_preset(preset).adam)
    check_agreement(loss, stepper, floor, data, flat(data))

    def update() -> None:
        stepper.update(loss, data)
        updater.step()

    return update


def main() -> None:
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--config", choices=tuple(CONFIGS), default="c20")
    add_compile(parser)
    parser.add_argument("--presets", nargs="+", choices=tuple(FLOORS), default=list(FLOORS))
    args = start(parser)
    prepare_jax(args.threads)
    cases, floors = make_cases(CONFIGS[args.config], compiled=args.compile, presets=args.presets)
    repeats = dict.fromkeys(cases, CALLS.get(args.config, 1))
    results = measure(cases, rounds=args.rounds, clock=args.clock, repeats=repeats)
    report(results, config=args.config, as_json=args.json, floors=floors)


if __name__ == "__main__":
    main()
