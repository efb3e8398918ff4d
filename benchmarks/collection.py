"""Time the collection of frames: environment, policy, log-probabilities and a batch of tensors.

    python benchmarks/collection.py
    python benchmarks/collection.py --env walker-walk --json

Times are those of 1000 frames. The reference is a loop of one's own over one DM Control environment
with a policy in plain PyTorch. `minerva_torchrl[...]` is `make_env` in TorchRL's `Collector` as in
training runs, with several environments in one process or in several; `torchrl` is TorchRL's own
`DMControlEnv` with the usual transforms in the same collector.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import (
    CatTensors,
    Compose,
    DMControlEnv,
    DoubleToFloat,
    EnvBase,
    InitTracker,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import IndependentNormal, ProbabilisticActor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _harness import make_parser, measure, report, start
from mpo_floor import Policy

from minerva_torchrl import make_env
from minerva_torchrl.envs.batched import copy_seeds
from minerva_torchrl.modules import DirectModule, GaussianPolicy
from minerva_torchrl.trainers.collector import DirectCollector

LAYERS = (512, 256)
# What a training run gives its collector, for one of TorchRL's.
COLLECTOR: dict[str, Any] = {
    "total_frames": -1,
    "policy_device": "cpu",
    "env_device": "cpu",
    "storing_device": "cpu",
    "trust_policy": True,
}
FRAMES = 4_000  # in a call: a rollout of the on-policy algorithms


class RawLoop:
    """Steps one environment of the suite and writes what happens into tensors.

    Args:
        name: ``"domain-task"``.
        policy: mean and standard deviation from an observation.
        frames: frames in a batch.
        seed: seed of the task.
    """

    def __init__(
        self, name: str, policy: Callable[[Tensor], Any], frames: int, seed: int = 0
    ) -> None:
        self.env = load_task(name, seed)
        self.policy, self.frames = policy, frames
        spec = self.env.action_spec()
        self.low, self.high = spec.minimum, spec.maximum
        self.observation = torch.from_numpy(flatten(self.env.reset().observation))
        self.action_dim = spec.shape[0]

    @torch.no_grad()
    def collect(self) -> dict[str, Tensor]:
        obs_dim, frames = len(self.observation), self.frames
        sizes = {"observation": obs_dim, "next_observation": obs_dim}
        sizes |= dict.fromkeys(("action", "loc", "scale"), self.action_dim)
        data = {name: torch.empty(frames, size) for name, size in sizes.items()}
        data |= {name: torch.empty(frames) for name in ("log_prob", "reward")}
        data |= {name: torch.zeros(frames, dtype=bool) for name in ("terminated", "truncated")}
        rewards = data["reward"].numpy()
        for t in range(frames):
            loc, scale = self.policy(self.observation)
            noise = torch.randn_like(loc)
            action = loc + scale * noise
            data["observation"][t] = self.observation
            data["loc"][t], data["scale"][t], data["action"][t] = loc, scale, action
            data["log_prob"][t] = -(0.5 * noise.square() + scale.log() + 0.9189385).sum()
            step = self.env.step(np.clip(action.numpy(), self.low, self.high))
            rewards[t] = step.reward
            self.observation = torch.from_numpy(flatten(step.observation))
            data["next_observation"][t] = self.observation
            if step.last():
                data["terminated" if step.discount == 0 else "truncated"][t] = True
                self.observation = torch.from_numpy(flatten(self.env.reset().observation))
        return data


def load_task(name: str, seed: int) -> Any:
    from dm_control import suite  # not before minerva_torchrl, which silences its warnings

    domain, _, task = name.partition("-")
    return suite.load(domain, task, task_kwargs={"random": seed})


def flatten(observation: Any) -> np.ndarray:
    return np.concatenate([np.ravel(part) for part in observation.values()]).astype(np.float32)


def make_actor(
    env: EnvBase,
    layers: tuple[int, ...] = LAYERS,
    module_class: type[TensorDictModule] = DirectModule,
) -> ProbabilisticActor:
    """The policy of a training run of MPO."""
    spec = env.action_spec
    for _ in env.batch_size:
        spec = spec[0]
    policy = GaussianPolicy(env.observation_spec["observation"].shape[-1], spec.shape[-1], layers)
    return ProbabilisticActor(
        module_class(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def plain_policy(actor: ProbabilisticActor) -> Policy:
    """A policy of plain PyTorch with the actor's weights."""
    return Policy(actor.module[0].module.state_dict(), init_scale=0.5, min_scale=1e-4)


def make_collector(env: EnvBase, actor: ProbabilisticActor, frames: int) -> Collector:
    """The collector of a training run."""
    return DirectCollector(env, actor, frames_per_batch=frames)


def make_workers(
    name: str, actor: ProbabilisticActor, frames: int, *, workers: int, num_envs: int
) -> MultiSyncCollector:
    """A collector with some environments in each of several processes."""
    make = [partial(make_env, name, num_envs=num_envs, seed=100 * i) for i in range(workers)]
    return MultiSyncCollector(
        make,
        actor,
        frames_per_batch=frames,
        cat_results="stack",
        num_threads=torch.get_num_threads(),
        **COLLECTOR,
    )


def make_torchrl_env(name: str) -> EnvBase:
    domain, _, task = name.partition("-")
    env = DMControlEnv(domain, task)
    parts = [key for key in env.observation_spec.keys() if env.observation_spec[key].ndim == 1]
    transforms = Compose(
        CatTensors(in_keys=parts, out_key="observation"),
        DoubleToFloat(),
        InitTracker(),
        StepCounter(),
        RewardSum(),
    )
    return TransformedEnv(env, transforms)


def check_agreement(name: str, *, num_envs: int | None, steps: int, seed: int = 3) -> None:
    """The actions of a collected batch lead the suite's own tasks through the same episodes."""
    env = make_env(name, num_envs=num_envs, seed=seed)
    collector = make_collector(env, make_actor(env, (8,)), steps * (num_envs or 1))
    batch: TensorDictBase = next(iter(collector))
    batch = batch if num_envs else batch.unsqueeze(0)
    for row, task_seed in zip(batch, copy_seeds(seed, num_envs), strict=True):
        task = load_task(name, task_seed)
        low, high = task.action_spec().minimum, task.action_spec().maximum
        observation = flatten(task.reset().observation)
        for t in range(steps):
            frame = row[t]
            step = task.step(np.clip(frame["action"].numpy(), low, high))
            following = flatten(step.observation)
            assert np.array_equal(frame["observation"].numpy(), observation), f"step {t}"
            assert np.array_equal(frame["next", "observation"].numpy(), following), f"step {t}"
            assert frame["next", "reward"].item() == np.float32(step.reward), f"step {t}"
            assert frame["next", "done"].item() == step.last(), f"step {t}"
            observation = flatten(task.reset().observation) if step.last() else following
    collector.shutdown()


def make_cases(
    name: str, frames: int, stack: ExitStack, *, workers: int = 2
) -> dict[str, Callable[[], object]]:
    """A call for each way to collect so many frames; the stack closes them."""

    def from_collector(collector: Any) -> Callable[[], object]:
        stack.callback(collector.shutdown)
        batches: Iterator[TensorDictBase] = iter(collector)
        return lambda: next(batches)

    first = make_env(name, seed=0)
    actor = make_actor(first)
    cases: dict[str, Callable[[], object]] = {
        "floor": RawLoop(name, plain_policy(actor), frames).collect,
        "minerva_torchrl[1 env]": from_collector(make_collector(first, actor, frames)),
    }
    for count in (8, 16):
        env = make_env(name, num_envs=count, seed=0)
        collector = make_collector(env, actor, frames)
        cases[f"minerva_torchrl[{count} envs]"] = from_collector(collector)
    if workers > 1:
        collector = make_workers(name, actor, frames, workers=workers, num_envs=8)
        cases[f"minerva_torchrl[{workers} x 8 envs]"] = from_collector(collector)
    env = make_torchrl_env(name)
    actor = make_actor(env, module_class=TensorDictModule)
    collector = Collector(env, actor, frames_per_batch=frames, **COLLECTOR)
    cases["torchrl"] = from_collector(collector)
    return cases


def main() -> None:
    parser = make_parser(__doc__, rounds=7, threads=1)
    parser.add_argument("--env", default="cheetah-run", help="DM Control task (cheetah-run)")
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of the case with several (2)"
    )
    args = start(parser)
    check_agreement(args.env, num_envs=2, steps=1010)
    with ExitStack() as stack:
        # The processor time of other processes is not known here.
        workers = 0 if args.clock is time.process_time else args.workers
        cases = make_cases(args.env, FRAMES, stack, workers=workers)
        results = measure(cases, rounds=args.rounds, clock=args.clock, warmup=1, per=FRAMES / 1000)
        floors = dict.fromkeys(cases, "floor")
        config = f"collection {args.env}"
        # Before the end of the workers, which changes the number of threads.
        report(results, config=config, as_json=args.json, floors=floors, frames=1000)


if __name__ == "__main__":
    main()
