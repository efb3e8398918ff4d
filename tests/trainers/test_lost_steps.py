"""Steps that an environment lost: dropped, and the step before each is the end of its episode."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.objectives.value import GAE

from minerva_torchrl.trainers.hooks import FiniteBatches, ReplayMemory

GAMMA = 0.9


def make_batch(steps: int = 5, *, lost: tuple[tuple[int, int], ...], start: int = 0) -> TensorDict:
    """Steps of two copies. Observations are the numbers of the steps, rewards their squares."""
    number = torch.arange(start, start + steps).float()
    observation = (number + torch.tensor([[0.0], [100.0]])).unsqueeze(-1)
    flag = torch.zeros(2, steps, 1, dtype=torch.bool)
    after = {"observation": observation + 1, "reward": observation.square() + 1}
    ids = torch.tensor([[7], [8]]).expand(2, steps).clone()
    batch = TensorDict(
        {
            "observation": observation,
            "next": {**after, "done": flag, "terminated": flag.clone(), "truncated": flag.clone()},
            "collector": {"traj_ids": ids},
        },
        [2, steps],
        names=[None, "time"],
    )
    for copy, t in lost:
        batch["next", "observation"][copy, t] = observation[copy, t]
        batch["next", "reward"][copy, t] = torch.nan
        for name in ("done", "truncated"):
            batch["next", name][copy, t] = True
        ids[copy, t + 1 :] += 10
    return batch


def test_the_place_of_a_lost_step() -> None:
    batch = make_batch(lost=((1, 2),))
    before = batch.clone()
    hook = FiniteBatches()
    mended = hook.inspect(batch)
    assert not hook.rejected
    assert hook.skipped_frames == 1
    assert hook.skipped_batches == 0
    assert hook.first_lost.tolist() == [False, False]
    assert mended.names == before.names
    assert all(t.isfinite().all() for t in mended.values(True, True))
    # Everything else is as it was, in the batch that was given, too.
    for key, tensor in before.items(True, True):
        assert torch.equal(mended.get(key)[0], tensor[0])
        assert torch.equal(mended.get(key)[1, [0, 3, 4]], tensor[1, [0, 3, 4]])
        torch.testing.assert_close(batch.get(key), tensor, equal_nan=True, rtol=0, atol=0)
    last, place = mended[1, 1], mended[1, 2]
    for step in (last, place):
        assert step["observation"] == 101
        assert step["next", "observation"] == 102
        assert step["next", "reward"] == 101**2 + 1
        assert step["next", "done"]
        assert step["next", "truncated"]
        assert not step["next", "terminated"]
    assert mended["collector", "traj_ids"][1].tolist() == [8, 8, -1, 18, 18]
    assert hook.inspect(make_batch(lost=((1, 2),)))["collector", "traj_ids"][1, 2] == -2


def test_no_step_before() -> None:
    """At the beginning of all, the step after is copied; if all are lost, the batch is left out."""
    hook = FiniteBatches()
    mended = hook.inspect(make_batch(lost=((0, 0), (1, 0))))
    assert hook.first_lost.tolist() == [True, True]
    assert mended["observation"].squeeze(-1).tolist() == [[1, 1, 2, 3, 4], [4, 101, 102, 103, 104]]
    assert mended["next", "truncated"].squeeze(-1)[:, :2].tolist() == [[True, False]] * 2
    hook.inspect(make_batch(2, lost=((0, 0), (0, 1), (1, 0), (1, 1))))
    assert hook.rejected
    assert hook.skipped_frames == 6


def test_a_terminal_step_stays_terminal() -> None:
    batch = make_batch(lost=((0, 3),))
    for name in ("done", "terminated"):
        batch["next", name][0, 2] = True
    mended = FiniteBatches().inspect(batch)
    assert mended["next", "terminated"][0, 2:4].all()
    assert not mended["next", "truncated"][0, 2:4].any()


def test_advantages_bootstrap_from_the_last_good_observation() -> None:
    mended = FiniteBatches().inspect(make_batch(lost=((1, 2),)))
    value = TensorDictModule(nn.Linear(1, 1), ["observation"], ["state_value"])
    with torch.no_grad():
        value.module.weight.fill_(3.0)
        value.module.bias.fill_(0.0)
    data = GAE(gamma=GAMMA, lmbda=0.8, value_network=value)(mended)
    last = 101**2 + 1 + GAMMA * 3 * 102 - 3 * 101
    first = 100**2 + 1 + GAMMA * 3 * 101 - 3 * 100
    wanted = torch.tensor([first + GAMMA * 0.8 * last, last, last])
    torch.testing.assert_close(data["advantage"][1, :3, 0], wanted)


@pytest.mark.parametrize("at", [2, 0])
def test_n_step_transitions_end_before_it(at: int) -> None:
    """Also if the step before it is in an earlier batch."""
    memory = ReplayMemory(
        TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4),
        n_steps=3,
        gamma=GAMMA,
    )
    hook = FiniteBatches()
    for start, lost in ((0, ()), (5, ((1, at),)), (10, ())):
        batch = hook.inspect(make_batch(lost=lost, start=start))
        if hook.first_lost is not None:
            memory.cut(hook.first_lost)
        memory.extend(batch)
    stored = memory.replay_buffer[:]
    assert stored["next", "reward"].isfinite().all()
    last = 105 + at - 1  # the last step before the one that was lost
    for number in (last - 1, last):
        steps = last - number + 1
        (one, *copies) = stored[stored["observation"].squeeze(-1) == number]
        assert one["next", "observation"] == last + 1
        assert one["next", "truncated"]
        assert not one["next", "terminated"]
        assert one["steps_to_next_obs"] == steps
        wanted = sum(GAMMA**k * ((number + k) ** 2 + 1) for k in range(steps))
        assert one["next", "reward"].item() == pytest.approx(wanted)
        assert all(copy["steps_to_next_obs"] == 1 for copy in copies)
    # The other copy's transitions span three steps each.
    is_copy = stored["collector", "traj_ids"] < 0
    other = stored[(stored["observation"].squeeze(-1) < 100) & ~is_copy]
    assert (other["steps_to_next_obs"] == 3).all()
    assert (other["next", "observation"] - other["observation"] == 3).all()
