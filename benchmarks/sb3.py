"""Time whole training beside stable-baselines3: PPO against its PPO, MPO against its SAC.

    python benchmarks/sb3.py
    python benchmarks/sb3.py --updates both --json

Times are those of 1000 frames of gym:HalfCheetah-v5, without evaluation, records and checkpoints.
All networks have two layers of 256 units. PPO: 8 environments, rollouts of 2048 frames, 10 epochs
of minibatches of 64, tanh, observations and rewards normalised. MPO and SAC: one environment,
batches of 128 and an update every second frame; everything else is each package's default, for us
that of a run of a million frames (`compile.enabled=auto`). `--updates eager` does not compile.

Without stable-baselines3 (`pip install -e ".[bench]"`) there is nothing to compare with, and our
times stand alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _harness import make_parser, measure, report, start
from end_to_end import OurLoop

from minerva_torchrl.runs import parse_config
from minerva_torchrl.runs.assemble import assemble

# compile.enabled of our runs, by what is added to their names; None is the default of runs.
UPDATES: dict[str, dict[str, bool | None]] = {
    "auto": {"": None},
    "eager": {",eager": False},
    "both": {"": None, ",eager": False},
}
OURS, THEIRS = "minerva_torchrl", "stable-baselines3"


@dataclass(frozen=True)
class Config:
    """Sizes of a comparison. Frames are those of a call."""

    name: str = "HalfCheetah-v5"
    layers: tuple[int, ...] = (256, 256)
    envs: int = 8
    rollout: int = 2048
    epochs: int = 10
    minibatch: int = 64
    batch: int = 128
    frames: int = 500  # of MPO and SAC
    warmup: int = 200  # of both, before the first update


def our_settings(config: Config, algo: str) -> dict[str, Any]:
    """Settings of a run."""
    layers = list(config.layers)
    settings: dict[str, Any] = {
        "env": {"name": f"gym:{config.name}"},
        "network": {"actor_sizes": layers, "critic_sizes": layers},
        "total_frames": 1_000_000,  # what compile.enabled=auto goes by
    }
    if algo == "ppo":
        settings["env"] |= {
            "num_envs": config.envs,
            "observation_norm": True,
            "reward_scaling": True,
        }
        settings["collector"] = {"frames_per_batch": config.rollout}
        epochs = {"num_epochs": config.epochs, "minibatch_size": config.minibatch}
        settings["optim"] = epochs
    else:
        buffer = {"batch_size": config.batch, "warmup_frames": config.warmup}
        settings["replay_buffer"] = buffer
        settings["optim"] = {"updates_per_frame": 0.5}
    return settings


class Ours:
    """A training run of ours, some frames at a time."""

    def __init__(self, config: Config, algo: str, *, compiled: bool | None = None) -> None:
        settings = our_settings(config, algo)
        if compiled is not None:
            settings["compile"] = {"enabled": compiled}
        self.settings = parse_config(algo, settings)
        self.loop = OurLoop(assemble(self.settings))
        batch = self.settings.collector.frames_per_batch
        self.batches = max(1, (config.rollout if algo == "ppo" else config.frames) // batch)

    def train(self) -> None:
        for _ in range(self.batches):
            self.loop.step()

    @property
    def frames(self) -> int:
        """Frames so far."""
        return int(self.loop.trainer.collected_frames)

    @property
    def updates(self) -> int:
        """Steps of the networks' optimiser so far."""
        optimizer = self.loop.trainer.optimization_stepper
        optimizer = getattr(optimizer, "optimizer_actor", None) or optimizer.optimizer
        steps = [int(state["step"]) for state in optimizer.state.values()]
        return max(steps, default=0)


class Theirs:
    """A model of stable-baselines3, as many frames at a time."""

    def __init__(self, config: Config, algo: str) -> None:
        import stable_baselines3
        from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

        on_policy = algo == "ppo"
        envs = [lambda: gymnasium.make(config.name)] * (config.envs if on_policy else 1)
        env: Any = DummyVecEnv(envs)
        network = {"net_arch": list(config.layers)}
        if on_policy:
            self.model: Any = stable_baselines3.PPO(
                "MlpPolicy",
                VecNormalize(env),
                n_steps=config.rollout // config.envs,
                batch_size=config.minibatch,
                n_epochs=config.epochs,
                policy_kwargs={**network, "activation_fn": nn.Tanh},
                device="cpu",
            )
        else:
            self.model = stable_baselines3.SAC(
                "MlpPolicy",
                env,
                batch_size=config.batch,
                train_freq=2,
                gradient_steps=1,
                learning_starts=config.warmup,
                policy_kwargs=network,
                device="cpu",
            )
        self.per_call = config.rollout if on_policy else config.frames

    def train(self) -> None:
        self.model.learn(self.per_call, reset_num_timesteps=False)

    @property
    def frames(self) -> int:
        """Frames so far."""
        return int(self.model.num_timesteps)

    @property
    def updates(self) -> int:
        """Steps of the policy's optimiser so far."""
        policy = self.model.policy
        optimizer = getattr(policy, "optimizer", None) or policy.actor.optimizer
        return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def check_same_work(ours: Ours, theirs: Theirs) -> None:
    """In a call both see as many frames and take as many updates, once they have warmed up."""
    counts = []
    for side in (ours, theirs):
        side.train()
        frames, updates = side.frames, side.updates
        side.train()
        counts.append((side.frames - frames, side.updates - updates))
    assert counts[0] == counts[1], f"frames and updates are {counts[0]} and {counts[1]}"
    assert counts[0][1] > 0, "there were no updates"


def make_cases(
    config: Config, algo: str, compiled: Mapping[str, bool | None]
) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """What is timed, by name, and what each is compared with. The work has been checked.

    Args:
        config: sizes.
        algo: ``"ppo"`` or ``"mpo"``.
        compiled: one of ``UPDATES``.
    """
    peer = f"{THEIRS}[{'SAC' if algo == 'mpo' else 'PPO'}]"
    ours = {
        f"{OURS}[{algo.upper()}{suffix}]": Ours(config, algo, compiled=enabled)
        for suffix, enabled in compiled.items()
    }
    cases: dict[str, Callable[[], None]] = {key: run.train for key, run in ours.items()}
    if importlib.util.find_spec("stable_baselines3") is None:
        return cases, {}
    theirs = Theirs(config, algo)
    for run in ours.values():
        check_same_work(run, theirs)
    cases[peer] = theirs.train
    return cases, dict.fromkeys(cases, peer)


def main() -> None:
    parser = make_parser(__doc__, rounds=5, threads=1)
    parser.add_argument("--algo", choices=("ppo", "mpo"), help="only one of the two")
    parser.add_argument(
        "--updates", choices=tuple(UPDATES), default="auto", help="ours compiled or not (auto)"
    )
    args = start(parser)
    config = Config()
    for algo in ("ppo", "mpo") if args.algo is None else (args.algo,):
        cases, peers = make_cases(config, algo, UPDATES[args.updates])
        frames = config.rollout if algo == "ppo" else config.frames
        results = measure(cases, rounds=args.rounds, clock=args.clock, warmup=1, per=frames / 1000)
        title = f"{algo.upper()} training, {config.name}"
        report(results, config=title, as_json=args.json, floors=peers, frames=1000)


if __name__ == "__main__":
    main()
