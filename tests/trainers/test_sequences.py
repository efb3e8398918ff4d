"""SequenceSampler: which steps it draws, how often, and what it keeps."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer

from minerva_torchrl.trainers import SequenceSampler
from minerva_torchrl.trainers.hooks import ReplayMemory
from tests.trainers.problem import assert_identical, make_collector

MASK = ("collector", "mask")
LENGTHS = [1, 2, 3, 4, 5, 9, 30]  # of episodes


def make_buffer(
    length: int = 4, *, capacity: int = 1000, batch_size: int = 4000, **kwargs: Any
) -> TensorDictReplayBuffer:
    sampler = SequenceSampler(length, **kwargs)
    storage = LazyTensorStorage(capacity)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)


def steps(*episodes: tuple[int, int, int] | tuple[int, int, int, bool]) -> TensorDict:
    """Steps one after the other: of each trajectory from one time to before another.

    The last step is done unless said otherwise.
    """
    ids, times, done = [], [], []
    for number, begin, end, *ends in episodes:
        ids += [number] * (end - begin)
        times += range(begin, end)
        done += [False] * (end - begin - 1) + [ends == [] or ends[0]]
    data = {
        "collector": {"traj_ids": torch.tensor(ids)},
        "time": torch.tensor(times),
        "next": {"done": torch.tensor(done).unsqueeze(-1)},
    }
    return TensorDict(data, [len(ids)])


def names(sample: TensorDict) -> dict[tuple[tuple[int, int], ...], int]:
    """Trajectory and time of the valid steps of each sequence, and how often it was drawn."""
    number, time = sample["collector", "traj_ids"], sample["time"]
    code = torch.where(sample[MASK], 10_000 * (number % 1000) + time, -1)
    distinct, times = code.unique(dim=0, return_counts=True)
    return {
        tuple(divmod(step, 10_000) for step in sequence if step >= 0): count
        for sequence, count in zip(distinct.tolist(), times.tolist(), strict=True)
    }


def counts(places: Tensor, total: int) -> Tensor:
    return torch.bincount(places.flatten(), minlength=total)


def p_uniform(observed: Tensor) -> float:
    """Of a chi-squared test that all are equally likely."""
    return float(stats.chisquare(observed.numpy()).pvalue)


def p_of_steps(buffer: TensorDictReplayBuffer, batches: int = 30) -> float:
    """Of a test that every stored step is regressed equally often.

    The steps of a sequence are not independent of each other, so that the statistic of "all" is
    not chi-squared. Only one step of each sequence is counted therefore: that at a place that is
    drawn for each sequence, if it is valid there. It is as likely as the others of its sequence.
    """
    observed = torch.zeros(len(buffer), dtype=torch.int64)
    for _ in range(batches):
        sample = buffer.sample()
        place = torch.randint(sample.shape[1], (len(sample), 1))
        if buffer.sampler.sequence_steps == "first":
            place.zero_()
        chosen = sample["index"].gather(1, place)[sample[MASK].gather(1, place)]
        observed += counts(chosen, len(buffer))
    return p_uniform(observed)


def unequal_episodes() -> TensorDict:
    return steps(*((i, 0, n) for i, n in enumerate(LENGTHS)))


STEPS = pytest.mark.parametrize("sequence_steps", ["all", "first"])
MODES = pytest.mark.parametrize(
    ("sequence_steps", "length"), [("all", 4), ("all", 40), ("first", 4), ("first", 40)]
)


# How often -------------------------------------------------------------------------------------


class TestEveryStepEquallyOften:
    @MODES
    def test_whatever_the_lengths_of_episodes(self, sequence_steps: Any, length: int) -> None:
        torch.manual_seed(0)
        buffer = make_buffer(length, sequence_steps=sequence_steps)
        buffer.extend(unequal_episodes())
        assert p_of_steps(buffer) > 0.01

    def test_the_test_notices_sequences_that_begin_at_every_step_only(self) -> None:
        """With "all", those would train the first steps of an episode too rarely."""
        torch.manual_seed(0)
        buffer = make_buffer(4, sequence_steps="first")
        buffer.extend(unequal_episodes())
        buffer.sampler.sequence_steps = "all"
        buffer.sampler._draw = lambda total, count: (  # type: ignore[method-assign]
            torch.randint(total, (count,)),
            torch.full((count,), 4),
        )
        assert p_of_steps(buffer, batches=5) < 1e-9

    def test_expected_number(self) -> None:
        """Of each step B T / (N + M (T - 1)), as the docstring says."""
        torch.manual_seed(0)
        buffer = make_buffer(4)
        buffer.extend(unequal_episodes())
        total, pieces, batches = sum(LENGTHS), len(LENGTHS), 50
        observed = sum(
            counts((sample := buffer.sample())["index"][sample[MASK]], total)
            for _ in range(batches)
        )
        expected = batches * 4000 * 4 / (total + pieces * 3)
        torch.testing.assert_close(observed / expected, torch.ones(total), rtol=0, atol=0.03)

    def test_all_sequences_are_equally_likely(self) -> None:
        """N that begin at a step and T - 1 shorter ones for the beginning of each episode."""
        torch.manual_seed(0)
        buffer = make_buffer(3)
        buffer.extend(steps((0, 0, 5), (1, 0, 1), (2, 0, 2, False)))
        found: dict[tuple[tuple[int, int], ...], int] = {}
        for _ in range(10):
            for sequence, count in names(buffer.sample()).items():
                found[sequence] = found.get(sequence, 0) + count
        # A short sequence may come about in several ways: that is how often it is drawn.
        ways = {
            **{tuple((0, t) for t in range(a, min(a + 3, 5))): 1 for a in range(5)},
            ((0, 0),): 1,
            ((0, 0), (0, 1)): 1,
            ((1, 0),): 3,
            ((2, 0), (2, 1)): 2,
            ((2, 0),): 1,
            ((2, 1),): 1,
        }
        assert set(found) == set(ways)
        assert sum(ways.values()) == 8 + 3 * 2
        weights = torch.tensor([ways[sequence] for sequence in found], dtype=torch.float64)
        observed = torch.tensor(list(found.values()), dtype=torch.float64)
        expected = observed.sum() * weights / weights.sum()
        assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 0.01

    @STEPS
    def test_after_the_buffer_went_round(self, sequence_steps: Any) -> None:
        torch.manual_seed(0)
        buffer = make_buffer(4, capacity=50, sequence_steps=sequence_steps)
        for begin in range(0, 140, 7):  # two environments in turns, episodes of 13 and 35 steps
            for env, period in ((0, 13), (1, 35)):
                times = torch.arange(begin, begin + 7)
                data = {
                    "collector": {"traj_ids": 100 * env + times // period},
                    "time": times,
                    "next": {"done": (times % period == period - 1).unsqueeze(-1)},
                }
                buffer.extend(TensorDict(data, [7]))
            if begin % 3 == 0:
                buffer.sample()
        assert len(buffer) == 50
        assert p_of_steps(buffer) > 0.01

    @STEPS
    def test_with_environments_side_by_side(self, sequence_steps: Any) -> None:
        torch.manual_seed(0)
        buffer = make_buffer(6, sequence_steps=sequence_steps)
        memory = ReplayMemory(buffer)
        collector = make_collector(5, 7, frames_per_batch=22)
        for i, batch in zip(range(6), collector, strict=False):
            if i == 3:
                memory.leave_gap()
            else:
                memory.extend(batch)
        collector.shutdown()
        assert p_of_steps(buffer) > 0.01

    @STEPS
    def test_after_it_was_loaded(self, sequence_steps: Any) -> None:
        torch.manual_seed(0)
        buffer, loaded = (
            make_buffer(4, capacity=20, sequence_steps=sequence_steps) for _ in range(2)
        )
        buffer.extend(steps((0, 0, 12), (1, 0, 3), (2, 0, 9, False)))
        loaded.extend(steps((7, 0, 1)))
        loaded.load_state_dict(buffer.state_dict())
        loaded.extend(steps((2, 9, 13)))
        assert p_of_steps(loaded) > 0.01


# Which ------------------------------------------------------------------------------------------


def check_sequences(buffer: TensorDictReplayBuffer, stored: list[tuple[int, int]]) -> None:
    """Each goes on step by step, and ends where nothing comes next; all that are possible occur."""
    length, first_only = buffer.sampler.sequence_length, buffer.sampler.sequence_steps == "first"
    expected = set()
    for number, time in stored:
        piece = []
        while (number, time) in stored and len(piece) < length:
            piece.append((number, time))
            time += 1
        expected.add(tuple(piece))
        if not first_only and (number, piece[0][1] - 1) not in stored:
            expected |= {tuple(piece[:n]) for n in range(1, len(piece) + 1)}
    sample = buffer.sample()
    assert sample.shape == (buffer.batch_size, length)
    assert set(names(sample)) == expected
    valid = sample[MASK]
    assert valid[:, 0].all()
    assert (valid[:, 1:] <= valid[:, :-1]).all()


class TestSequences:
    @MODES
    def test_steps_of_one_trajectory(self, sequence_steps: Any, length: int) -> None:
        torch.manual_seed(0)
        buffer = make_buffer(length, sequence_steps=sequence_steps)
        buffer.extend(unequal_episodes())
        check_sequences(buffer, [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)])

    @STEPS
    def test_trajectories_that_are_stored_in_turns(self, sequence_steps: Any) -> None:
        """From one batch to the next, and step by step within one."""
        torch.manual_seed(0)
        buffer = make_buffer(5, sequence_steps=sequence_steps)
        batches: list[list[tuple[Any, ...]]] = [
            [(0, 0, 3, False), (1, 0, 2, False)],
            [(1, 2, 4), (0, 3, 4, False)],
            [(2, 0, 1, False)],
            [(0, 4, 7, False), (3, 0, 2), (2, 1, 6)],
            [(4, t // 2, t // 2 + 1, False) if t % 2 else (0, 7 + t // 2, 8 + t // 2, False)
             for t in range(8)],
        ]  # fmt: skip
        stored: list[tuple[int, int]] = []
        for batch in batches:
            data = steps(*batch)
            buffer.extend(data)
            stored += zip(
                data["collector", "traj_ids"].tolist(), data["time"].tolist(), strict=True
            )
            check_sequences(buffer, stored)

    @STEPS
    @pytest.mark.parametrize("drawn_between", [True, False])
    @pytest.mark.parametrize("capacity", [7, 16, 40])
    def test_a_buffer_that_goes_round(
        self, capacity: int, drawn_between: bool, sequence_steps: Any
    ) -> None:
        """Batches of five steps of two environments; also where a batch fills the whole buffer."""
        torch.manual_seed(0)
        buffer = make_buffer(4, capacity=capacity, sequence_steps=sequence_steps)
        stored: list[tuple[int, int]] = []
        for begin in range(0, 60, 3):
            batch = [(10 * env + begin // period, begin, begin + 3, (begin + 3) % period == 0)
                     for env, period in ((0, 6), (1, 15))]  # fmt: skip
            buffer.extend(steps(*batch))
            stored += [(number, t) for number, a, b, _ in batch for t in range(a, b)]
            if drawn_between:
                check_sequences(buffer, stored[-capacity:])
        check_sequences(buffer, stored[-capacity:])

    def test_a_batch_that_is_larger_than_the_buffer(self) -> None:
        torch.manual_seed(0)
        buffer = make_buffer(4, capacity=10)
        buffer.extend(steps((0, 0, 3)))
        buffer.sample()
        for begin in (0, 8):
            buffer.extend(steps((1, begin, begin + 8, False)))
        check_sequences(buffer, [(1, t) for t in range(6, 16)])

    def test_one_step_after_the_other(self) -> None:
        torch.manual_seed(0)
        buffer = make_buffer(3, capacity=4)
        for t in range(6):
            buffer.add(steps((0, t, t + 1, False))[0])
            check_sequences(buffer, [(0, u) for u in range(max(0, t - 3), t + 1)])

    def test_nothing_goes_across_a_gap(self) -> None:
        torch.manual_seed(0)
        buffer = make_buffer(8, batch_size=2000)
        memory = ReplayMemory(buffer)
        for begin in (0, 3):
            memory.extend(steps((0, begin, begin + 3, False)).unsqueeze(0))
        memory.leave_gap()
        memory.extend(steps((0, 9, 12, False)).unsqueeze(0))
        times = [[t for _, t in sequence] for sequence in names(memory.sample())]
        assert max(map(len, times)) == 6
        assert all(b - a == 1 for s in times for a, b in pairwise(s))

    def test_links_are_those_that_all_that_is_stored_has(self) -> None:
        """What is kept up to date is what would be made of the storage from nothing."""
        torch.manual_seed(1)
        buffer = make_buffer(5, capacity=97)
        begin = dict.fromkeys(range(5), 0)
        ends = dict.fromkeys(range(5), 0)
        for _ in range(60):
            batch = []
            for env in torch.randperm(5)[: int(torch.randint(1, 6, ()))].tolist():
                count, done = int(torch.randint(1, 9, ())), bool(torch.rand(()) < 0.3)
                number = 100 * env + ends[env]
                batch.append((number, begin[env], begin[env] + count, done))
                begin[env], ends[env] = (0, ends[env] + 1) if done else (batch[-1][2], ends[env])
            buffer.extend(steps(*batch))
            if torch.rand(()) < 0.5:
                buffer.sample()
                fresh = SequenceSampler(5)
                fresh._follow(buffer.storage)
                ours = buffer.sampler
                count = len(buffer)
                assert torch.equal(ours._successor[:count], fresh._successor[:count])
                assert torch.equal(ours._is_first[:count], fresh._is_first[:count])
                assert torch.equal(ours._open, fresh._open)

    def test_the_table_of_open_trajectories_stays_small(self) -> None:
        buffer = make_buffer(4, capacity=50, batch_size=2)
        for number in range(200):
            buffer.extend(steps((number, 0, 3, number % 10 != 0)))
            buffer.sample()
        assert buffer.sampler._open.shape[1] <= 2  # of those in the buffer that have no end

    def test_padding_repeats_nothing_into_the_buffer(self) -> None:
        buffer = make_buffer(6)
        buffer.extend(unequal_episodes())
        before = buffer[:].clone()
        buffer.sample()
        assert_identical(buffer[:], before)


# State ------------------------------------------------------------------------------------------


def stored_round(**kwargs: Any) -> TensorDictReplayBuffer:
    buffer = make_buffer(4, capacity=20, batch_size=64, **kwargs)
    buffer.extend(steps((0, 0, 12), (1, 0, 3), (2, 0, 9, False)))
    return buffer


def draws(buffer: TensorDictReplayBuffer) -> list[TensorDict]:
    """Some before and some after further steps."""
    torch.manual_seed(3)
    before = buffer.sample()
    buffer.extend(steps((2, 9, 11), (3, 0, 4)))
    return [before, buffer.sample()]


class TestState:
    @STEPS
    @pytest.mark.parametrize("kind", ["state dict", "file", "pickle", "copy"])
    def test_goes_on_as_it_would_have(self, kind: str, sequence_steps: Any, tmp_path: Path) -> None:
        buffer = stored_round(sequence_steps=sequence_steps)
        buffer.sample()
        if kind == "pickle":
            other = pickle.loads(pickle.dumps(buffer))
        elif kind == "copy":
            other = stored_round(sequence_steps=sequence_steps)
            other._sampler = copy.deepcopy(buffer.sampler)
        else:
            other = make_buffer(4, capacity=20, batch_size=64, sequence_steps=sequence_steps)
            if kind == "file":
                buffer.dumps(tmp_path)
                other.loads(tmp_path)
            else:
                other.load_state_dict(copy.deepcopy(buffer.state_dict()))
        for drawn, expected in zip(draws(other), draws(buffer), strict=True):
            assert_identical(drawn, expected)

    def test_empty(self) -> None:
        buffer = stored_round()
        buffer.sample()
        buffer.empty()
        buffer.extend(steps((5, 0, 2)))
        torch.manual_seed(0)
        check_sequences(make_buffer_like(buffer), [(5, 0), (5, 1)])

    def test_its_own_generator(self) -> None:
        buffer = stored_round()
        buffer.set_rng(torch.Generator().manual_seed(0))
        first = buffer.sample()
        torch.manual_seed(5)
        buffer.set_rng(torch.Generator().manual_seed(0))
        assert_identical(buffer.sample(), first)


def make_buffer_like(buffer: TensorDictReplayBuffer) -> TensorDictReplayBuffer:
    buffer._batch_size = 500
    return buffer


# Refused ----------------------------------------------------------------------------------------


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
            (
                {"sequence_length": 2, "sequence_steps": "last"},
                "sequence_steps must be one of 'all', 'first', got 'last'",
            ),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SequenceSampler(**arguments)

    @pytest.mark.parametrize("key", [("collector", "traj_ids"), ("next", "done")])
    def test_data_without_an_entry(self, key: Any) -> None:
        buffer = make_buffer()
        buffer.extend(unequal_episodes().exclude(key))
        with pytest.raises(ValueError, match=r"SequenceSampler needs the entry .*does not have"):
            buffer.sample()

    @pytest.mark.parametrize("storage", [ListStorage(100), LazyTensorStorage(100, ndim=2)])
    def test_storages(self, storage: Any) -> None:
        buffer = TensorDictReplayBuffer(storage=storage, sampler=SequenceSampler(2), batch_size=2)
        data = unequal_episodes()
        buffer.extend(data.unsqueeze(0) if storage.ndim == 2 else data)
        with pytest.raises(TypeError, match="needs a TensorStorage with one dimension"):
            buffer.sample()

    def test_transitions_of_several_steps(self) -> None:
        with pytest.raises(ValueError, match=r"can't both be above 1.* Got 3 and 4\."):
            ReplayMemory(make_buffer(4), n_steps=3)
