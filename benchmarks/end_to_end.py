"""Time whole training: collect, store, draw and update, after the warm-up.

    python benchmarks/end_to_end.py
    python benchmarks/end_to_end.py --env cheetah-run --json

Times are those of 1000 frames. `minerva_torchrl` is a training run of MPO with its default
settings, without evaluation and records. The floor is a loop of one's own: DM Control, a ring of
plain tensors and the update of `mpo_floor.py`, with as many updates per frame. `[no updates]` is
collecting and storing alone. Runs with recorded and compiled updates are timed as well;
`--no-compile` leaves the latter out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _harness import add_compile, make_parser, measure, report, start
from collection import RawLoop
from mpo_update import check_agreement as check_update
from mpo_update import flat, make_floor
from replay import PlainReplay

from minerva_torchrl.runs import MPOConfig, parse_config
from minerva_torchrl.runs.assemble import Assembly, assemble

BATCHES = 2  # in a call


class OurLoop:
    """A training run's trainer, one collected batch at a time."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly, self.trainer = assembly, assembly.trainer
        self.batches = iter(assembly.collector)

    def step(self, *, updates: bool = True) -> TensorDictBase:
        """What `Trainer.train` does per batch."""
        trainer = self.trainer
        batch = trainer._process_batch_hook(next(self.batches))
        trainer.collected_frames += batch.numel()
        trainer._pre_steps_log_hook(batch)
        if updates:
            trainer.optim_steps(batch)
            trainer._post_steps_hook()
        trainer._post_steps_log_hook(batch)
        return batch


class FloorLoop:
    """The same in plain PyTorch, with the weights of an assembled run.

    Args:
        config: settings of the run.
        assembly: its parts.
    """

    def __init__(self, config: MPOConfig, assembly: Assembly) -> None:
        self.config = config
        adam = {"eps": config.optim.adam_eps}
        self.mpo = make_floor(assembly.loss, assembly.trainer.optimization_stepper, adam)
        frames = config.collector.frames_per_batch
        self.raw = RawLoop(config.env.name, self.mpo.policy, frames, config.seed)
        self.waiting: dict[str, Tensor] = {}
        self.every_next_state = assembly.trainer.memory.every_next_state
        self.age = 0  # steps of the episode so far
        self.replay: PlainReplay | None = None
        self.updates = 0

    def step(self, *, updates: bool = True) -> None:
        rows = self.n_steps(self.raw.collect())
        if self.replay is None:
            self.replay = PlainReplay(self.config.replay_buffer.size, rows)
        self.replay.extend(rows)
        for _ in range(self.config.updates_per_batch if updates else 0):
            self.mpo.update(self.replay.sample(self.config.replay_buffer.batch_size))
            self.updates += 1
            if self.updates % (self.config.optim.target_period or 1) == 0:
                self.mpo.target_policy.load_state_dict(self.mpo.policy.state_dict())
                self.mpo.target_critic.load_state_dict(self.mpo.critic.state_dict())

    def n_steps(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        """Transitions over several steps that end with their episode; the last frames wait.

        If the run wants them, those of one step at the beginning of episodes come before them.
        """
        n, gamma = self.config.replay_buffer.n_steps, self.config.loss.gamma
        early = self.first_steps(new, n - 1)
        if self.waiting:
            new = {name: torch.cat([self.waiting[name], new[name]]) for name in new}
        count = len(new["reward"]) - n  # TorchRL lets one more of them wait than it needs
        self.waiting = {name: tensor[count:] for name, tensor in new.items()}
        done = new["terminated"] | new["truncated"]
        begin = torch.arange(count)
        last, going = begin, torch.ones(count, dtype=torch.bool)
        reward = torch.zeros(count)
        for k in range(n):
            last = torch.where(going, begin + k, last)
            reward += gamma**k * going * new["reward"][k : k + count]
            going = going & ~done[k : k + count]
        rows = {
            "observation": new["observation"][:count],
            "action": new["action"][:count],
            "reward": reward,
            "next_observation": new["next_observation"][last],
            "terminated": new["terminated"][last],
            "discount": gamma ** (last - begin + 1).float(),
        }
        return {name: torch.cat([early[name], tensor]) for name, tensor in rows.items()}

    def first_steps(self, new: dict[str, Tensor], count: int) -> dict[str, Tensor]:
        """The first so many steps of every episode, as transitions of one step."""
        done, number = new["terminated"] | new["truncated"], torch.arange(len(new["reward"]))
        begin = torch.where(done.roll(1), number, -self.age)
        begin[0] = -self.age
        age = number - begin.cummax(0).values
        self.age = 0 if done[-1] else int(age[-1]) + 1
        rows = age < (count if self.every_next_state else 0)
        names = ("observation", "action", "reward", "next_observation", "terminated")
        discount = torch.full((int(rows.sum()),), self.config.loss.gamma)
        return {name: new[name][rows] for name in names} | {"discount": discount}


Loop = TypeVar("Loop", OurLoop, FloorLoop)


def make_config(name: str, **changes: dict[str, Any]) -> MPOConfig:
    """Default settings of MPO with the floor's multipliers, which follow their gradient.

    Updates begin early and are not compiled.
    """
    settings: dict[str, Any] = {
        "env": {"name": name},
        "replay_buffer": {"warmup_frames": 200},
        "loss": {"alpha_update": "gradient"},
        "optim": {"lr_dual": 1e-2, "lr_temperature": None},
        "compile": {"enabled": False},
    }
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    return parse_config("mpo", settings)


def plain(transitions: TensorDictBase, gamma: float) -> dict[str, Tensor]:
    """Stored transitions as the floor stores them."""
    data = flat(transitions)
    return data | {"discount": gamma ** transitions["steps_to_next_obs"].float()}


def check_agreement(config: MPOConfig) -> None:
    """The floor makes the same transitions of what was collected, and takes the same update."""
    assembly = assemble(config)
    ours, floor = OurLoop(assembly), FloorLoop(config, assembly)
    made = []
    for _ in range(4):
        following = (batch := ours.step(updates=False).reshape(-1))["next"]
        frames = {name: batch[name] for name in ("observation", "action")}
        frames["next_observation"] = following["observation"]
        for name in ("reward", "terminated", "truncated"):
            frames[name] = following[name].squeeze(-1)
        made.append(floor.n_steps(frames))
    stored = plain(assembly.replay_buffer[:], config.loss.gamma)
    for name, tensor in stored.items():
        expected = torch.cat([transitions[name] for transitions in made])
        assert torch.allclose(tensor, expected), f"{name} differs from the floor's"
    sample = assembly.trainer.memory.sample()
    tensors = plain(sample, config.loss.gamma)
    check_update(assembly.loss, ours.trainer.optimization_stepper, floor.mpo, sample, tensors)
    assembly.collector.shutdown()


def warm(loop: Loop, config: MPOConfig) -> Loop:
    """Collect what there has to be before the first update."""
    for _ in range(config.replay_buffer.warmup_frames // config.collector.frames_per_batch):
        loop.step(updates=False)
    return loop


def main() -> None:
    parser = make_parser(__doc__, rounds=5, threads=1)
    parser.add_argument("--env", default="cartpole-swingup", help="task (cartpole-swingup)")
    add_compile(parser)
    args = start(parser)
    config = make_config(args.env)
    # An episode in the middle of which the steps of a transition end.
    check_agreement(make_config(args.env, env={"max_episode_steps": 33}))

    def repeated(step: Callable[..., object], **kwargs: Any) -> Callable[[], None]:
        def call() -> None:
            for _ in range(BATCHES):
                step(**kwargs)

        return call

    assemblies = [assemble(config) for _ in range(2)]
    loops = [(OurLoop(assembly), FloorLoop(config, assembly)) for assembly in assemblies]
    for loop in loops[0]:
        warm(loop, config)
    cases, floors = {}, {}
    for (ours, floor), suffix in zip(loops, ("", "[no updates]"), strict=True):
        kwargs = {"updates": not suffix}
        cases[f"minerva_torchrl{suffix}"] = repeated(ours.step, **kwargs)
        cases[f"floor{suffix}"] = repeated(floor.step, **kwargs)
        floors |= dict.fromkeys(list(cases)[-2:], f"floor{suffix}")
    others: dict[str, bool | str] = {"recorded": "recorded"}
    if args.compile:
        others["compiled"] = True
    for name, enabled in others.items():
        assemblies.append(assemble(make_config(args.env, compile={"enabled": enabled})))
        title = f"minerva_torchrl[{name}]"
        cases[title] = repeated(warm(OurLoop(assemblies[-1]), config).step)
        floors[title] = "floor"
    frames = BATCHES * config.collector.frames_per_batch
    results = measure(cases, rounds=args.rounds, clock=args.clock, warmup=1, per=frames / 1000)
    title = f"MPO {args.env}, {config.optim.updates_per_frame:g} updates per frame"
    report(results, config=title, as_json=args.json, floors=floors, frames=1000)
    for assembly in assemblies:
        assembly.collector.shutdown()


if __name__ == "__main__":
    main()
