"""The hooks of the trainers: replay with n-step transitions and slices, minibatches, targets."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import HardUpdate, SoftUpdate

from minerva_torchrl.trainers import make_target_updater
from minerva_torchrl.trainers.hooks import FiniteBatches, ReplayMemory, to_device
from tests.envs.scripted import save_and_load
from tests.trainers.problem import (
    Problem,
    assert_identical,
    make_buffer,
    make_collector,
    numbered_steps,
)

GAMMA = 0.5
ENDED = [(5, "terminated"), (3, "truncated"), (1, "terminated"), (7, "open")]
OTHER = [(2, "truncated"), (9, "terminated"), (5, "open")]


def store(memory: ReplayMemory, steps: TensorDict, *widths: int) -> TensorDict:
    """Store steps ``[K, T]`` in batches of given widths; returns the content of the buffer."""
    for batch in steps.split(list(widths), -1):
        memory.extend(batch)
    return memory.replay_buffer[:]


def expected_transitions(steps: TensorDict, n: int) -> dict[tuple[float, float], dict[str, Any]]:
    """All n-step transitions of ``[K, T]`` steps but the last n, one by one."""
    num_envs, length = steps.shape
    transitions = {}
    for k in range(num_envs):
        for start in range(length - n):
            reward, end = 0.0, start
            for end in range(start, start + n):
                reward += GAMMA ** (end - start) * steps["next", "reward"][k, end].item()
                if steps["next", "done"][k, end]:
                    break
            last = steps["next"][k, end]
            transitions[tuple(steps["observation"][k, start].tolist())] = {
                "reward": reward,
                "steps": end - start + 1,
                "next": last["observation"].tolist(),
                **{flag: last[flag].item() for flag in ("done", "terminated", "truncated")},
                "action": steps["action"][k, start].tolist(),
            }
    return transitions


def stored_transitions(content: TensorDict) -> dict[tuple[float, float], dict[str, Any]]:
    assert len({tuple(row.tolist()) for row in content["observation"]}) == len(content)
    return {
        tuple(row["observation"].tolist()): {
            "reward": row["next", "reward"].item(),
            "steps": row["steps_to_next_obs"].item(),
            "next": row["next", "observation"].tolist(),
            **{flag: row["next", flag].item() for flag in ("done", "terminated", "truncated")},
            "action": row["action"].tolist(),
        }
        for row in content.unbind(0)
    }


# Replay: n-step transitions ----------------------------------------------------------------------


class TestMultiStep:
    def test_terminal_state_before_n_steps_is_marked_terminated(self) -> None:
        """TorchRL's default leaves such a transition unmarked, and its target would go on."""
        steps = numbered_steps([(4, "terminated"), (6, "open")])
        content = store(ReplayMemory(make_buffer(), n_steps=3, gamma=GAMMA), steps, 10)
        # Rewards 1, 2, 4, 8 and then 16, 32, ... of the next episode.
        assert content["next", "reward"][:4, 0].tolist() == [3.0, 6.0, 8.0, 8.0]
        assert content["next", "terminated"][:4, 0].tolist() == [False, True, True, True]
        assert content["next", "done"][:4, 0].tolist() == [False, True, True, True]
        assert content["steps_to_next_obs"][:4].tolist() == [3, 3, 2, 1]
        assert content["next", "observation"][:4, 1].tolist() == [3.0, 3.5, 3.5, 3.5]

    def test_truncated_episode_goes_on_from_its_last_state(self) -> None:
        steps = numbered_steps([(4, "truncated"), (6, "open")])
        content = store(ReplayMemory(make_buffer(), n_steps=3, gamma=GAMMA), steps, 10)
        assert content["next", "truncated"][:4, 0].tolist() == [False, True, True, True]
        assert not content["next", "terminated"].any()
        assert content["steps_to_next_obs"][:4].tolist() == [3, 3, 2, 1]
        assert content["next", "observation"][:4, 1].tolist() == [3.0, 3.5, 3.5, 3.5]

    @pytest.mark.parametrize("widths", [(16,), (8, 8), (5, 1, 1, 6, 3), (1,) * 16])
    @pytest.mark.parametrize("n_steps", [2, 3, 5])
    @pytest.mark.parametrize("episodes", [(ENDED,), (ENDED, OTHER)], ids=["1 env", "2 envs"])
    def test_every_transition_once_and_right(
        self, episodes: Any, n_steps: int, widths: tuple[int, ...]
    ) -> None:
        """Whatever the batch boundaries; none spans two episodes or environments."""
        steps = numbered_steps(*episodes)
        memory = ReplayMemory(make_buffer(), n_steps=n_steps, gamma=GAMMA)
        content = store(memory, steps, *widths)
        assert stored_transitions(content) == expected_transitions(steps, n_steps)
        for helper in ("gamma", "nonterminal", ("next", "original_reward")):
            assert helper not in content.keys(True)

    def test_does_not_write_into_the_batch(self) -> None:
        steps = numbered_steps(ENDED, OTHER)
        before = steps.clone()
        store(ReplayMemory(make_buffer(), n_steps=3), steps, 8, 8)
        assert_identical(steps, before)

    def test_waiting_steps_are_no_views_of_the_batch(self) -> None:
        """Collectors may reuse the memory of what they gave out (``return_same_td``)."""
        steps = numbered_steps(ENDED, OTHER)
        memory = ReplayMemory(make_buffer(), n_steps=3, gamma=GAMMA)
        for batch in steps.clone().split([8, 8], -1):
            memory.extend(batch)
            batch.zero_()
        content = memory.replay_buffer[:]
        assert stored_transitions(content) == expected_transitions(steps, 3)

    @pytest.mark.parametrize("widths", [(7, 9), (2, 14), (10, 1, 5)])
    def test_state_in_mid_stream(self, widths: tuple[int, ...]) -> None:
        steps = numbered_steps(ENDED, OTHER)
        unbroken = store(ReplayMemory(make_buffer(), n_steps=3, gamma=GAMMA), steps, *widths)

        first, *rest = steps.split(list(widths), -1)
        memory = ReplayMemory(make_buffer(), n_steps=3, gamma=GAMMA)
        memory.extend(first)
        state = save_and_load(memory.state_dict())
        buffer = make_buffer()
        if len(memory.replay_buffer):
            buffer.extend(memory.replay_buffer[:].exclude("index"))
        resumed = ReplayMemory(buffer, n_steps=3, gamma=GAMMA)
        resumed.load_state_dict(state)
        for batch in rest:
            resumed.extend(batch)
        assert_identical(buffer[:], unbroken)

    def test_state_before_the_first_batch(self) -> None:
        """Loading it forgets what was waiting."""
        fresh = ReplayMemory(make_buffer(), n_steps=3, gamma=GAMMA).state_dict()
        steps = numbered_steps(ENDED)
        memory = ReplayMemory(make_buffer(), n_steps=3, gamma=GAMMA)
        memory.extend(steps[:, :2])
        memory.load_state_dict(save_and_load(fresh))
        assert stored_transitions(store(memory, steps, 16)) == expected_transitions(steps, 3)

    @pytest.mark.parametrize("widths", [(16,), (1, 2, 6, 7), (1,) * 16])
    @pytest.mark.parametrize("episodes", [(ENDED,), (ENDED, OTHER)], ids=["1 env", "2 envs"])
    def test_every_next_state(self, episodes: Any, widths: tuple[int, ...]) -> None:
        """All states but the first of an episode are the next state of a transition."""
        steps = numbered_steps(*episodes)
        counts = [[t for n, _ in env for t in range(n)] for env in episodes]
        steps["step_count"] = torch.tensor(counts).unsqueeze(-1)
        keys = ["observation", "action", "next"]
        memory = ReplayMemory(
            make_buffer(), keys=keys, n_steps=3, gamma=GAMMA, every_next_state=True
        )
        content = store(memory, steps, *widths)
        early = steps.reshape(-1)[steps["step_count"].flatten() < 2]
        is_single = torch.zeros(len(content), dtype=torch.bool)
        for step in early.unbind(0):  # stored as it was collected
            same = (content["observation"] == step["observation"]).all(-1)
            same &= (content["next", "observation"] == step["next", "observation"]).all(-1)
            same &= content["steps_to_next_obs"] == 1
            (place,) = (same & ~is_single).nonzero()[:1]
            assert_identical(content[place.item()]["next"], step["next"])
            is_single[place] = True
        # The others are the usual ones.
        usual = stored_transitions(content[~is_single])
        assert usual == expected_transitions(steps, 3)
        reached = {tuple(row.tolist()) for row in content["next", "observation"]}
        for k, env in enumerate(episodes):
            begins = {sum(n for n, _ in env[:i]) for i in range(len(env) + 1)}
            missing = {t for t in range(14) if (float(k), float(t)) not in reached}
            assert missing == {t for t in begins if t < 14}

    def test_single_steps_have_no_state(self) -> None:
        memory = ReplayMemory(make_buffer())
        memory.extend(numbered_steps(ENDED))
        assert memory.state_dict() == {"gaps": 0}
        memory.load_state_dict({"gaps": 0})


# Replay: single steps and slices -----------------------------------------------------------------


class TestReplay:
    def test_flat_writes_environment_after_environment(self) -> None:
        steps = numbered_steps(ENDED, OTHER)
        content = store(ReplayMemory(make_buffer()), steps, 6, 10)
        expected = torch.cat([steps[:, :6].reshape(-1), steps[:, 6:].reshape(-1)])
        assert_identical(content.exclude("index"), expected)

    def test_stores_only_the_keys_that_the_data_has(self) -> None:
        keys = ["observation", ("next", "reward"), "absent"]
        content = store(ReplayMemory(make_buffer(), keys=keys), numbered_steps(ENDED), 16)
        stored = set(content.exclude("index").keys(True, True))
        assert stored == {"observation", ("next", "reward")}

    def test_sample_shapes_and_device(self) -> None:
        memory = ReplayMemory(make_buffer(), device="meta")
        memory.extend(numbered_steps(ENDED))
        assert memory.sample().shape == (8,)
        assert memory.sample()["observation"].is_meta
        memory = ReplayMemory(make_buffer(batch_size=12, slice_len=3), sequence_length=3)
        memory.extend(numbered_steps(ENDED))
        assert memory.sample().shape == (4, 3)

    def test_from_the_host_to_a_gpu_through_pinned_memory(self) -> None:
        """Without a GPU: which calls it takes."""
        host, elsewhere = MagicMock(), MagicMock()
        host.values.return_value = [torch.ones(1), torch.ones(1)]
        elsewhere.values.return_value = [torch.ones(1), torch.ones(1, device="meta")]
        assert to_device(host, "cuda") is host.pin_memory().to.return_value
        host.pin_memory().to.assert_called_once_with("cuda", non_blocking=True)
        assert to_device(elsewhere, "cuda") is elsewhere.to.return_value
        assert to_device(host, "cpu") is host.to.return_value
        elsewhere.pin_memory.assert_not_called()

    @pytest.mark.parametrize(
        ("name", "value", "error"),
        [
            ("n_steps", 0, ValueError),
            ("n_steps", 1.0, TypeError),
            ("sequence_length", 0, ValueError),
            ("sequence_length", True, TypeError),
        ],
    )
    def test_rejects(self, name: str, value: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"^{name} must be "):
            ReplayMemory(make_buffer(), **{name: value})

    def test_rejects_sequences_of_n_steps(self) -> None:
        with pytest.raises(ValueError, match=r"can't both be above 1.* Got 3 and 5\."):
            ReplayMemory(make_buffer(), n_steps=3, sequence_length=5)


def assert_slices_of_one_trajectory(slices: TensorDict, stored: TensorDict) -> None:
    """Slices ``[B, T]`` follow a trajectory step by step; only their last step is truncated."""
    originals = {tuple(row["observation"].tolist()): row for row in stored.unbind(0)}
    assert len(originals) == len(stored)
    for row in slices.unbind(0):
        assert len(row["collector", "traj_ids"].unique()) == 1
        assert_identical(row["next", "observation"][:-1], row["observation"][1:])
        for i, step in enumerate(row.unbind(0)):
            original = originals[tuple(step["observation"].tolist())]["next"]
            last = i == len(row) - 1
            assert step["next", "terminated"] == original["terminated"]
            assert step["next", "truncated"] == (original["truncated"] | last)
            assert step["next", "done"] == (original["done"] | last)


class TestSlices:
    """Sequences for Retrace."""

    def collect(self, buffer: Any, num_batches: int) -> ReplayMemory:
        memory = ReplayMemory(buffer, sequence_length=4)
        collector = make_collector(5, 7, frames_per_batch=22)
        for _, batch in zip(range(num_batches), collector, strict=False):
            memory.extend(batch)
        collector.shutdown()
        return memory

    def test_never_cross_episodes_or_environments(self) -> None:
        torch.manual_seed(0)
        memory = self.collect(make_buffer(batch_size=400, slice_len=4), 4)
        slices, stored = memory.sample(), memory.replay_buffer[:]
        assert slices.shape == (100, 4)
        assert_slices_of_one_trajectory(slices, stored)
        assert len(slices["collector", "traj_ids"].unique()) > 8
        assert slices["next", "terminated"].any()
        assert not slices["next", "terminated"][:, -1].all()

    def test_never_cross_the_end_of_a_full_buffer(self) -> None:
        torch.manual_seed(0)
        memory = self.collect(make_buffer(50, batch_size=400, slice_len=4), 6)
        assert len(memory.replay_buffer) == 50
        assert_slices_of_one_trajectory(memory.sample(), memory.replay_buffer[:])

    def test_marks_are_not_written_into_the_buffer(self) -> None:
        memory = self.collect(make_buffer(batch_size=400, slice_len=4), 2)
        before = memory.replay_buffer[:].clone()
        memory.sample()
        assert_identical(memory.replay_buffer[:], before)


# Targets -----------------------------------------------------------------------------------------


class TestTargetUpdater:
    def run(self, calls: int, **kwargs: Any) -> tuple[list[float], list[float]]:
        """Networks are filled with ``i`` at call ``i``; returns their targets after each call."""
        loss = Problem("mpo").loss
        updater = make_target_updater(loss, **kwargs)
        pairs = [
            (loss.qvalue_network_params, loss.target_qvalue_network_params),
            (loss.actor_network_params, loss.target_actor_network_params),
        ]
        targets: tuple[list[float], list[float]] = ([], [])
        for _, target in pairs:
            target.data.zero_()
        for i in range(1, calls + 1):
            for source, _ in pairs:
                source.data.apply_(lambda v, i=i: v.fill_(float(i)))
            updater.step()
            for (_, target), history in zip(pairs, targets, strict=True):
                (value,) = torch.cat([v.flatten() for v in target.values(True, True)]).unique()
                history.append(value.item())
        return targets

    @pytest.mark.parametrize("period", [1, 2, 3, 5])
    def test_period_copies_at_its_multiples(self, period: int) -> None:
        """TorchRL's HardUpdate(n) would copy at calls n + 1, 2 (n + 1), ..."""
        expected = [float(i - i % period) for i in range(1, 13)]
        assert self.run(12, period=period) == (expected, expected)

    def test_tau_is_polyak_averaging(self) -> None:
        expected, target = [], 0.0
        for i in range(1, 6):
            target = 0.75 * target + 0.25 * i
            expected.append(target)
        for targets in self.run(5, tau=0.25):
            assert targets == pytest.approx(expected, rel=1e-6)

    def test_classes(self) -> None:
        loss = Problem("mpo").loss
        assert type(make_target_updater(loss, period=3)) is HardUpdate
        assert type(make_target_updater(loss, tau=0.1)) is SoftUpdate

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({}, ValueError, "exactly one of period and tau must be given, got None and None"),
            ({"period": 2, "tau": 0.1}, ValueError, "exactly one .* got 2 and 0.1"),
            ({"period": 0}, ValueError, "period must be at least 1, got 0"),
            ({"period": 2.0}, TypeError, "period must be an integer"),
            ({"tau": 0.0}, ValueError, r"tau must be in \(0, 1\], got 0.0"),
            ({"tau": 1.5}, ValueError, r"tau must be in \(0, 1\], got 1.5"),
            ({"tau": "1"}, TypeError, "tau must be a number"),
        ],
    )
    def test_rejects(self, kwargs: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            make_target_updater(Problem("mpo").loss, **kwargs)


def test_finite_batches_rejects_its_limit() -> None:
    with pytest.raises(ValueError, match=r"^limit must be at least 1, got 0"):
        FiniteBatches(0)
