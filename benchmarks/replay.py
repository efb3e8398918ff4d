"""Size of a stored frame, and the time to store and to draw, for growing replay buffers.

    python benchmarks/replay.py
    python benchmarks/replay.py --sizes 10000 100000 --json

The buffers are those of training runs of MPO, with everything that Retrace needs. The floor is a
ring of plain tensors: slices are written to store, and `index_select` draws. `first 256 x T` is the
first draw of sequences after something was stored. `SliceSampler` is TorchRL's, on the same frames;
it draws episodes equally often, not steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import SliceSampler, TensorDictReplayBuffer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _harness import Result, make_parser, measure, print_json, report, start

from minerva_torchrl.runs import parse_config
from minerva_torchrl.runs.assemble import Assembly, assemble

BATCH = 256  # transitions or sequences to draw
STORED = 50  # frames to store at a time
EPISODE = 1000
LENGTHS = (1, 5, 10)


class PlainReplay:
    """A ring of transitions in tensors by name."""

    def __init__(self, size: int, like: dict[str, Tensor]) -> None:
        self.size, self.stored, self.next = size, 0, 0
        self.tensors = {
            name: torch.zeros(size, *row.shape[1:], dtype=row.dtype) for name, row in like.items()
        }

    @property
    def bytes_per_frame(self) -> int:
        return sum(t.nbytes for t in self.tensors.values()) // self.size

    def extend(self, rows: dict[str, Tensor]) -> None:
        count = len(next(iter(rows.values())))
        first = min(count, self.size - self.next)
        for name, tensor in self.tensors.items():
            tensor[self.next : self.next + first] = rows[name][:first]
            tensor[: count - first] = rows[name][first:]
        self.next = (self.next + count) % self.size
        self.stored = min(self.size, self.stored + count)

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        return {name: tensor.index_select(0, index) for name, tensor in self.tensors.items()}

    def sample(self, count: int) -> dict[str, Tensor]:
        return self.gather(torch.randint(self.stored, (count,)))

    def sample_sequences(self, count: int, length: int) -> dict[str, Tensor]:
        """Sequences within episodes, one after the other."""
        episode = self.tensors["episode"]
        begin = torch.randint(self.stored, (count,))
        while True:
            end = (begin + length - 1) % self.size
            (crossing,) = (episode[begin] != episode[end]).nonzero(as_tuple=True)
            if not len(crossing):
                break
            begin[crossing] = torch.randint(self.stored, (len(crossing),))
        steps = begin.unsqueeze(-1) + torch.arange(length)
        return self.gather(steps.flatten() % self.size)


def make_assembly(env: str, size: int, length: int, batch: int = BATCH) -> Assembly:
    """A training run of MPO with Retrace on sequences, or on transitions for a length of one."""
    settings: dict[str, Any] = {
        "env": {"name": env},
        "collector": {"frames_per_batch": STORED},
        "replay_buffer": {"size": size, "batch_size": batch, "n_steps": 1},
        "network": {"actor_sizes": [8], "critic_sizes": [8]},
    }
    if length > 1:
        settings["replay_buffer"]["sequence_length"] = length
        settings["loss"] = {"value_estimator": "retrace"}
    return assemble(parse_config("mpo", settings))


def plain(frames: TensorDictBase) -> dict[str, Tensor]:
    """What a learner needs of the stored frames, by name."""
    return {
        "observation": frames["observation"],
        "action": frames["action"],
        "log_prob": frames["action_log_prob"],
        "next_observation": frames["next", "observation"],
        "reward": frames["next", "reward"],
        "terminated": frames["next", "terminated"],
        "truncated": frames["next", "truncated"],
        "episode": frames["collector", "traj_ids"].int(),
    }


def collect(assembly: Assembly) -> TensorDict:
    """A batch as a collector gives it."""
    return next(iter(assembly.collector))


def frames_from(batch: TensorDictBase, begin: int, count: int) -> TensorDictBase:
    """As many frames as asked for out of a batch, in episodes of a fixed length."""
    frames = batch.reshape(-1)[torch.randint(batch.numel(), (count,))]
    number = torch.arange(begin, begin + count)
    last = (number % EPISODE == EPISODE - 1).unsqueeze(-1)
    frames["next", "truncated"], frames["next", "done"] = last, last.clone()
    frames["next", "terminated"] = torch.zeros_like(last)
    frames["collector", "traj_ids"] = number // EPISODE
    return frames


class Filled:
    """A run's buffer and a plain one, full of the same frames.

    Args:
        env: name of the environment.
        size: frames in the buffers.
        length: length of sequences to draw, one for transitions.
        batch: how many to draw.
    """

    def __init__(self, env: str, size: int, length: int, batch: int = BATCH) -> None:
        self.length, self.count = length, batch
        self.assembly = make_assembly(env, size, length, batch)
        self.memory, self.buffer = self.assembly.trainer.memory, self.assembly.replay_buffer
        self.batch = collect(self.assembly)
        if "action_log_prob" not in self.memory.keys:  # what Retrace needs, for transitions too
            self.memory.keys.append("action_log_prob")
        self.written = 0
        first = plain(self.batch.reshape(-1))
        self.floor = PlainReplay(size, first)
        for begin in range(0, size, 50_000):
            self.store(min(50_000, size - begin))
        self.new = self._next_frames(STORED)

    def store(self, count: int) -> None:
        """Store new frames in both buffers."""
        frames = self._next_frames(count)
        self.memory.extend(frames)
        self.floor.extend(plain(frames.reshape(-1)))
        self.written += count

    def _next_frames(self, count: int) -> TensorDictBase:
        return frames_from(self.batch, self.written, count).unsqueeze(0)

    @property
    def entries(self) -> dict[str, int]:
        """Bytes of each entry of a stored frame."""
        tensors = self.buffer._storage._storage.items(True, True)
        size = self.floor.size
        return {k if isinstance(k, str) else ".".join(k): t.nbytes // size for k, t in tensors}

    def cases(self) -> dict[str, Callable[[], object]]:
        """What is timed, by name."""
        rows = plain(self.new.reshape(-1))
        ours, floor, length = self.memory, self.floor, self.length

        def store_ours() -> None:
            ours.extend(self.new)

        def first_of_ours() -> None:
            ours.extend(self.new)
            ours.sample()

        slices = TensorDictReplayBuffer(
            storage=self.buffer.storage,
            sampler=SliceSampler(
                slice_len=length, traj_key=("collector", "traj_ids"), cache_values=True
            ),
            batch_size=self.count * length,
        )

        def first_of_slices() -> None:
            ours.extend(self.new)
            slices.sampler.extend(None)  # as if it had been stored there
            slices.sample()

        def first_of_floor() -> None:
            floor.extend(rows)
            floor.sample_sequences(self.count, length)

        if length == 1:
            return {
                f"minerva_torchrl[store {STORED}]": store_ours,
                f"floor[store {STORED}]": lambda: floor.extend(rows),
                f"minerva_torchrl[{self.count}]": ours.sample,
                f"floor[{self.count}]": lambda: floor.sample(self.count),
            }
        shape = f"{self.count} x {length}"
        return {
            f"minerva_torchrl[{shape}]": ours.sample,
            f"SliceSampler[{shape}]": slices.sample,
            f"floor[{shape}]": lambda: floor.sample_sequences(self.count, length),
            f"minerva_torchrl[first {shape}]": first_of_ours,
            f"SliceSampler[first {shape}]": first_of_slices,
            f"floor[first {shape}]": first_of_floor,
        }


def check_agreement(filled: Filled) -> None:
    """What is drawn is what both have stored there; sequences go through one episode in order."""
    length, size = filled.length, filled.floor.size
    sample = filled.memory.sample()
    valid = sample.get(("collector", "mask"), torch.ones(sample.shape, dtype=torch.bool))
    valid, sample = valid.reshape(-1, length), sample.reshape(-1)
    index = sample["index"].flatten()
    expected = filled.floor.gather(index)
    for name, tensor in expected.items():
        assert torch.equal(tensor, plain(sample)[name]), f"{name} differs from the floor's"
    floor = filled.floor.sample_sequences(filled.count, length)
    for episode in (sample["collector", "traj_ids"], floor["episode"]):
        episode = episode.reshape(-1, length)
        assert (episode == episode[:, :1]).all(), "a sequence goes from one episode to the next"
    steps = index.reshape(-1, length)
    following = (steps[:, :1] + torch.arange(length)) % size
    assert torch.equal(steps[valid], following[valid]), "a sequence leaves out a step"


def report_bytes(filled: Filled, env: str, *, as_json: bool) -> None:
    ours, floor = sum(filled.entries.values()), filled.floor.bytes_per_frame
    config = f"bytes per frame {env}"
    if as_json:
        for name, size in (("minerva_torchrl", ours), ("floor", floor)):
            extra = {"bytes_per_frame": size}
            print_json(name, config, median_ms=None, ratio=size / floor, **extra)
        return
    print(f"\n{config}: {ours}, floor {floor}, ratio {ours / floor:.3f}")
    print(", ".join(f"{name} {size}" for name, size in filled.entries.items()))


def report_growth(by_size: dict[int, dict[str, Result]]) -> None:
    smallest, *_, largest = sorted(by_size)
    print(f"\ntime with {largest} frames, of that with {smallest}")
    for name, result in by_size[largest].items():
        print(f"{name:36}{result.median / by_size[smallest][name].median:10.2f}")


def main() -> None:
    parser = make_parser(__doc__, rounds=7, threads=1)
    parser.add_argument("--env", default="cheetah-run", help="task (cheetah-run)")
    sizes = (10_000, 100_000, 1_000_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="stored frames")
    args = start(parser)
    by_size: dict[int, dict[str, Result]] = {}
    for size in args.sizes:
        results: dict[str, Result] = {}
        for length in LENGTHS:
            filled = Filled(args.env, size, length)
            check_agreement(filled)
            if size == args.sizes[0] and length == LENGTHS[-1]:
                report_bytes(filled, args.env, as_json=args.json)
            cases = filled.cases()
            repeats = dict.fromkeys(cases, 5)
            results |= measure(cases, rounds=args.rounds, clock=args.clock, repeats=repeats)
            filled.assembly.collector.shutdown()
        floors = {name: f"floor{name[name.index('[') :]}" for name in results}
        config = f"replay {args.env}, {size} frames"
        report(results, config=config, as_json=args.json, floors=floors)
        by_size[size] = results
    if len(by_size) > 1 and not args.json:
        report_growth(by_size)


if __name__ == "__main__":
    main()
