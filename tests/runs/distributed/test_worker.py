"""What a collector stores and reports, in this process: no cluster is needed for that."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs.utils import ExplorationType, set_exploration_type

from minerva_torchrl.runs.assemble import assemble
from minerva_torchrl.runs.distributed.worker import Task, WorkerCollector, Workplace
from minerva_torchrl.trainers import NonFiniteError
from minerva_torchrl.trainers.mpo import stored_keys
from tests.runs.distributed.cluster import assert_transitions_fit
from tests.runs.tiny import tiny_config

FAULTY = {"env__factory": "tests.envs.faulty:Faulty", "env__name": "faulty"}


class Setup:
    """A run's loss and replay buffer, and collectors that write there."""

    def __init__(self, kind: str, copies: int = 1, **changes: Any) -> None:
        self.config = tiny_config(
            kind, ray__collectors=2, ray__envs_per_collector=copies, **changes
        )
        self.assembly = assemble(self.config)
        self.buffer: Any = self.assembly.replay_buffer
        self.memory = None
        if self.buffer is not None:
            memory: Any = self.assembly.trainer.memory  # type: ignore[attr-defined]
            loss: Any = self.assembly.loss
            self.memory = {
                "keys": stored_keys(loss),
                "n_steps": memory.n_steps,
                "gamma": self.config.loss.gamma,
                "reward_keys": loss.reward_keys,
                "every_next_state": memory.every_next_state,
            }

    def collector(self, index: int = 0, number: int = 0) -> WorkerCollector:
        task = Task(self.config, None, self.memory)
        collector = WorkerCollector(
            task.make_env,
            self.assembly.actor,
            task=task,
            workplace=Workplace(index, number),
            frames_per_batch=self.config.collector.frames_per_batch // 2,
            replay_buffer=self.buffer,
        )
        collector.load(self.weights(), 0, None)
        return collector

    def weights(self, scale: float = 1.0) -> TensorDict:
        weights: TensorDict = TensorDict.from_module(self.assembly.actor).data.clone()
        return weights.apply(lambda tensor: scale * tensor)

    def stored(self) -> dict[str, Any]:
        data: dict[str, Any] = self.buffer[:].to_dict()
        return data


def test_is_true_though_it_never_ends() -> None:
    """Ray asks when it reports an error of an actor."""
    collector = Setup("mpo").collector()
    with pytest.raises(TypeError):
        len(collector)
    assert collector


def test_numbers_are_never_given_twice() -> None:
    """Not to two collectors, and not to those of a run that goes on."""
    workplaces = [Workplace(0, number) for number in range(Workplace.first_number(2))]
    starts = [workplace.first_trajectory for workplace in workplaces]
    assert starts == sorted(starts)
    assert min(after - before for before, after in pairwise(starts)) == 2**28
    gaps = Workplace.gaps_until(workplaces[-1].number)
    assert gaps * 2**40 >= starts[-1] + 2**28
    assert Workplace(0, Workplace.first_number(gaps)).first_trajectory > starts[-1]


@pytest.mark.parametrize("copies", [1, 5])
def test_transitions_of_two_collectors_in_turn(copies: int) -> None:
    setup = Setup("mpo", copies, replay_buffer__size=1000)
    collectors = [setup.collector(index, number=index) for index in (0, 1)]
    reports = [collector.collect() for _ in range(10) for collector in collectors]
    assert sum(report.frames for report in reports) == 200
    assert sum(report.stored for report in reports) == len(setup.buffer)
    assert_transitions_fit(setup.stored(), n_steps=3)


@pytest.mark.parametrize("steps", ["all", "first"])
def test_sequences_of_two_collectors_in_turn(steps: str) -> None:
    """Each sequence goes through one trajectory of one collector, step by step."""
    setup = Setup("mpo-retrace", loss__sequence_steps=steps)
    collectors = [setup.collector(index, number=index) for index in (0, 1)]
    for _ in range(6):
        for collector in collectors:
            collector.collect()
    assert isinstance(setup.buffer, TensorDictReplayBuffer)
    for _ in range(5):
        sample = setup.buffer.sample()
        valid = sample["collector", "mask"][:, 1:]
        torch.testing.assert_close(
            sample["next", "observation"][:, :-1][valid], sample["observation"][:, 1:][valid]
        )
        assert valid.any()


def test_log_probabilities_are_those_of_the_weights_that_acted() -> None:
    setup = Setup("mpo-retrace")
    collector = setup.collector()
    scales = (1.0, 2.0, 0.5)
    for version, scale in enumerate(scales):
        collector.load(setup.weights(scale), version, None)
        assert collector.collect().version == version
    data = setup.buffer[:]
    for version, scale in enumerate(scales):
        part = data[10 * version : 10 * (version + 1)]
        setup.weights(scale).to_module(setup.assembly.actor)
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            dist = setup.assembly.actor.get_dist(part.select("observation"))
        torch.testing.assert_close(dist.log_prob(part["action"]), part["action_log_prob"])


def test_reports_ends_of_episodes() -> None:
    setup = Setup("mpo", env__max_episode_steps=4, replay_buffer__n_steps=2)
    report = setup.collector().collect()
    assert report.ends["next", "step_count"].flatten().tolist() == [4, 4]
    assert report.ends["next", "done"].all()
    assert report.batch is None


def test_returns_what_is_not_stored() -> None:
    setup = Setup("vmpo")
    collector = setup.collector(index=1, number=3)
    report = collector.collect()
    assert report.batch is not None
    assert report.batch.shape == (1, 25)
    assert report.batch["collector", "traj_ids"].min() >= Workplace(1, 3).first_trajectory
    # Means and variances that were not known before: of every step, and of all resets.
    observations, rewards = report.added
    episodes = len(report.batch["collector", "traj_ids"].unique())
    assert (float(observations.count), float(rewards.count)) == (25 + episodes, 25)


def test_lost_steps_are_left_out_and_counted() -> None:
    setup = Setup("mpo", **FAULTY, env__kwargs={"fault": "nan", "at": [7]})
    reports = [setup.collector().collect() for _ in range(1)]
    assert reports[0].skipped == (1, 0)
    assert all(value.isfinite().all() for value in setup.buffer[:].values(True, True))


def spoil_rollouts(collector: WorkerCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = collector.rollout

    def spoiled() -> Any:
        batch = rollout()
        batch["action_log_prob"][..., 3] = torch.inf
        return batch

    monkeypatch.setattr(collector, "rollout", spoiled)


def test_a_batch_that_is_not_finite_separates_what_is_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is neither stored, nor do transitions or trajectories reach across it."""
    setup = Setup("mpo-retrace", env__max_episode_steps=None)
    collector = setup.collector()
    collector.collect()
    with monkeypatch.context() as context:
        spoil_rollouts(collector, context)
        report = collector.collect()
    assert (report.skipped[1], report.stored) == (1, 0)
    collector.collect()
    ids = setup.buffer[:]["collector", "traj_ids"]
    assert len(setup.buffer) == 20
    assert not set(ids[:10].tolist()) & set(ids[10:].tolist())


def test_too_much_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Setup("mpo-retrace", max_skipped=2).collector()
    spoil_rollouts(collector, monkeypatch)
    collector.collect()
    with pytest.raises(NonFiniteError, match="2 collected batches in a row"):
        collector.collect()


def test_copies_are_spread_over_an_episode() -> None:
    """Those of all collectors together, so that no two are in the same phase."""
    setup = Setup("vmpo", env__staggered=True, env__max_episode_steps=12, env__num_envs=2)
    first = []
    for index in (0, 1):
        report = setup.collector(index, number=index).collect()
        assert report.batch is not None
        ends = report.batch["next", "truncated"].squeeze(-1)
        first.append(int(ends.flatten().nonzero()[0]) + 1)
    assert first == [12, 6]
