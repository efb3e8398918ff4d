"""Time one iteration of PPO on a rollout: advantages, then all epochs of minibatches.

    python benchmarks/ppo_iteration.py
    python benchmarks/ppo_iteration.py --config small --json

`minerva_torchrl` is what a trainer of `make_ppo_trainer` does with a collected batch, and
`minerva_torchrl[compiled]` the same with compiled minibatches; `--no-compile` leaves it out.
`torchrl` is the loop of TorchRL's own PPO script: `GAE` before every epoch, minibatches from a
replay buffer, no clipping of gradients. `stable-baselines3` is its `PPO.train` after the rollout is
written to its buffer, if the package is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.objectives import ClipPPOLoss, group_optimizers
from torchrl.objectives.value.advantages import GAE
from torchrl.trainers import Trainer

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
from ppo_floor import FloorSettings, PPOFloor
from vmpo_floor import TanhPolicy, tanh_network
from vmpo_update import make_networks, our_parameters

from minerva_torchrl import make_ppo_loss
from minerva_torchrl.modules import DirectClipPPOLoss
from minerva_torchrl.trainers import PPOOptimizationStepper, make_ppo_trainer
from minerva_torchrl.trainers.compiled import CompiledGradients

ADAM = {"lr": 3e-4, "eps": 1e-5}


@dataclass(frozen=True)
class Config:
    obs: int = 17
    action: int = 6
    envs: int = 8
    steps: int = 256
    layers: tuple[int, ...] = (512, 256)
    epochs: int = 10
    minibatch: int = 64

    @property
    def frames(self) -> int:
        return self.envs * self.steps


CONFIGS = {
    "cheetah": Config(),
    "small": Config(layers=(64, 64)),
    "runs": Config(layers=(256, 256)),
}


def make_rollout(config: Config, actor: nn.Module) -> TensorDict:
    """A rollout ``[K, T]`` in which some episodes are terminated and some truncated."""
    size = [config.envs, config.steps]
    terminated, truncated = torch.rand(2, *size, 1) < 0.01
    following = {"observation": torch.randn(*size, config.obs), "reward": torch.rand(*size, 1)}
    following |= {"terminated": terminated, "done": terminated | truncated}
    rollout = TensorDict(
        {"observation": torch.randn(*size, config.obs), "next": following},
        size,
        names=[None, "time"],
    )
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        return actor(rollout)


def make_ours(config: Config) -> Trainer:
    networks = make_networks(config.obs, config.action, config.layers)
    loss = make_ppo_loss(*networks, loss_class=DirectClipPPOLoss)
    stepper = PPOOptimizationStepper(
        torch.optim.Adam(loss.parameters(), fused=True, **ADAM),
        num_epochs=config.epochs,
        minibatch_size=config.minibatch,
    )
    return make_ppo_trainer(
        collector=SimpleNamespace(),  # the rollout is given
        total_frames=config.frames,
        frames_per_batch=config.frames,
        loss_module=loss,
        optimization_stepper=stepper,
        progress_bar=False,
        auto_log_optim_steps=False,
    )


def iterate_ours(trainer: Trainer, rollout: TensorDict) -> None:
    """What `Trainer.train` does between collecting a batch and giving weights to the collector."""
    trainer.optim_steps(trainer._process_batch_hook(rollout.copy()))


def make_floor(config: Config, trainer: Trainer) -> PPOFloor:
    policy, critic = our_parameters(trainer.loss_module)
    return PPOFloor(
        TanhPolicy(tanh_network(without_prefix(policy, "loc_network.")), policy["log_scale"]),
        tanh_network(critic),
        FloorSettings(num_epochs=config.epochs, minibatch=config.minibatch),
        ADAM,
    )


def plain(rollout: TensorDict) -> dict[str, Tensor]:
    following = rollout["next"]
    return {
        "observation": rollout["observation"],
        "action": rollout["action"],
        "log_prob": rollout["action_log_prob"],
        "next_observation": following["observation"],
        "reward": following["reward"].squeeze(-1),
        "terminated": following["terminated"].squeeze(-1),
        "done": following["done"].squeeze(-1),
    }


def check_agreement(trainer: Trainer, floor: PPOFloor, rollout: TensorDict) -> None:
    """Both iterate with the same shuffles, which must lead to the same parameters."""
    torch.manual_seed(1)
    iterate_ours(trainer, rollout)
    torch.manual_seed(1)
    floor.iterate(plain(rollout))
    networks = (floor.policy, floor.critic)
    for ours, theirs in zip(our_parameters(trainer.loss_module), networks, strict=True):
        check_same_parameters(ours, dict(theirs.named_parameters()), lr=ADAM["lr"])


def make_torchrl(config: Config, rollout: TensorDict) -> Callable[[], None]:
    actor, critic = make_networks(config.obs, config.action, config.layers, TensorDictModule)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        loss_critic_type="l2",
        entropy_coeff=0.0,
        critic_coeff=0.25,
        normalize_advantage=True,
    )
    optimizer = group_optimizers(
        *(torch.optim.Adam(m.parameters(), torch.tensor(3e-4), eps=1e-5) for m in (actor, critic))
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(config.frames),
        sampler=SamplerWithoutReplacement(),
        batch_size=config.minibatch,
    )

    def iterate() -> None:
        data = rollout.copy()
        for _ in range(config.epochs):
            with torch.no_grad():
                data = gae(data)
            buffer.extend(data.reshape(-1))
            for minibatch in buffer:
                optimizer.zero_grad(set_to_none=True)
                losses = loss(minibatch)
                total = losses["loss_critic"] + losses["loss_objective"] + losses["loss_entropy"]
                total.backward()
                optimizer.step()

    return iterate


def make_stable_baselines3(config: Config, rollout: TensorDict) -> Callable[[], None]:
    import gymnasium
    import numpy as np
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Sizes(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (config.obs,))
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (config.action,))

    model = PPO(
        "MlpPolicy",
        DummyVecEnv([Sizes] * config.envs),
        n_steps=config.steps,
        batch_size=config.minibatch,
        n_epochs=config.epochs,
        clip_range_vf=0.2,
        policy_kwargs={"net_arch": list(config.layers), "activation_fn": nn.Tanh},
        device="cpu",
    )
    model.set_logger(configure(None, []))
    data = plain(rollout)
    obs, action, reward, done = (
        data[name].transpose(0, 1).numpy() for name in ("observation", "action", "reward", "done")
    )
    starts = np.concatenate([np.ones_like(done[:1]), done[:-1]]).astype(np.float32)
    log_prob = data["log_prob"].T

    def iterate() -> None:
        with torch.no_grad():
            values = model.policy.predict_values(torch.from_numpy(obs).flatten(0, 1))
        values = values.reshape(config.steps, config.envs)
        model.rollout_buffer.reset()
        for t in range(config.steps):
            step = (obs[t], action[t], reward[t], starts[t], values[t], log_prob[t])
            model.rollout_buffer.add(*step)
        model.rollout_buffer.compute_returns_and_advantage(values[-1], done[-1])
        model.train()

    return iterate


def main() -> None:
    parser = make_parser(__doc__, rounds=5, threads=1)
    parser.add_argument("--config", choices=tuple(CONFIGS), default="cheetah")
    add_compile(parser)
    args = start(parser)
    config = CONFIGS[args.config]
    trainer = make_ours(config)
    rollout = make_rollout(config, trainer.loss_module.actor_network)
    floor = make_floor(config, trainer)
    check_agreement(trainer, floor, rollout)
    tensors = plain(rollout)
    cases = {
        "minerva_torchrl": lambda: iterate_ours(trainer, rollout),
        "floor": lambda: floor.iterate(tensors),
        "torchrl": make_torchrl(config, rollout),
    }
    for name, backend in {"recorded": "recorded", "compiled": "inductor"}.items():
        if args.compile or name != "compiled":
            other = make_ours(config)
            other.optimization_stepper.compiled = CompiledGradients(backend=backend)
            check_agreement(other, make_floor(config, other), rollout)
            cases[f"minerva_torchrl[{name}]"] = lambda other=other: iterate_ours(other, rollout)
    if importlib.util.find_spec("stable_baselines3"):
        cases["stable-baselines3"] = make_stable_baselines3(config, rollout)
    results = measure(cases, rounds=args.rounds, clock=args.clock, warmup=1)
    floors = dict.fromkeys(cases, "floor")
    report(results, config=f"PPO {args.config}", as_json=args.json, floors=floors)


if __name__ == "__main__":
    main()
