"""Environments that give what is not finite, raise, or die."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import TransformedEnv

from minerva_torchrl import make_env
from minerva_torchrl.envs import (
    EnvironmentFailure,
    PolicyFailure,
    ReturnStdScaling,
    RunningObservationNorm,
)
from tests.envs.faulty import FAULTS, Faulty
from tests.envs.scripted import collect, save_and_load


def make_faulty(*at: Sequence[int], norm: bool = False, **kwargs: Any) -> TransformedEnv:
    """Copies that go wrong at given steps each."""
    copies = iter([Faulty(at=steps, **kwargs) for steps in at])
    return make_env(
        lambda: next(copies), num_envs=len(at), seed=0, max_skipped=3, observation_norm=norm
    )


# Steps that are lost -----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_finite_ends_its_episode_only(fault: str) -> None:
    """The other copy's data is what it would have been."""
    data = collect(make_faulty((), (4,), fault=fault), 8)
    healthy = collect(make_faulty((), ()), 8)
    keys = [key for key in data.keys(True, True) if key != "action"]
    for key in keys:
        assert torch.equal(data[0][key], healthy[0][key]), key
        assert torch.equal(data[1, :3][key], healthy[1, :3][key]), key
    assert data["observation"].isfinite().all()
    lost, before = data[1, 3], data[1, 2]
    assert lost["next", "reward"].isnan()
    assert lost["next", "episode_reward"].isnan()
    assert lost["next", "truncated"]
    assert lost["next", "done"]
    assert not lost["next", "terminated"]
    assert torch.equal(lost["next", "observation"], before["next", "observation"])
    # The copy is reset at once.
    assert data[1, 4]["observation"].tolist() == [2.0, 0.0, 4.0]
    assert data["next", "reward"].isnan().sum() == 1
    assert data[1]["next", "step_count"].flatten().tolist() == [1, 2, 3, 4, 1, 2, 3, 4]


def test_too_many_in_a_row() -> None:
    message = (
        r"environment tests\.envs\.test_faults:.*, copy 1 of 2, gave numbers that are not finite "
        r"3 times in a row \(the limit, max_skipped, is 3\), now an observation with nan as its "
        r"entry 1, at step 1 of an episode\."
    )
    env = make_faulty((), (2, 3, 4))
    with pytest.raises(EnvironmentFailure, match=message):
        collect(env, 8)
    collect(make_faulty((), (2, 3, 5, 6)), 8)  # two in a row are not three


def test_a_reset_that_is_not_finite_is_tried_again() -> None:
    data = collect(make_faulty((6,), on_reset=True), 10)
    assert data["observation"].isfinite().all()
    assert data["next", "reward"].isnan().sum() == 1  # the 6th step; then a reset
    with pytest.raises(EnvironmentFailure, match=r"3 times in a row .* at reset"):
        collect(make_faulty((0,), on_reset=True, always=True), 10)


def test_in_a_row_is_part_of_the_state() -> None:
    env, other = make_faulty((3, 4, 5)), make_faulty((0, 1))
    collect(env, 4)
    assert env.base_env._lost.tolist() == [2]
    other.reset()
    other.base_env.load_state_dict(save_and_load(env.base_env.state_dict()))
    assert other.base_env._lost.tolist() == [2]
    assert other.base_env._steps.tolist() == [1]


# Statistics --------------------------------------------------------------------------------------


def test_statistics_see_nothing_of_it() -> None:
    env = make_faulty((), (4,), norm=True)
    scaling = ReturnStdScaling(0.9)
    env.append_transform(scaling)
    data = collect(env, 8)
    (norm,) = [t for t in env.transform if isinstance(t, RunningObservationNorm)]
    assert norm.loc["observation"].isfinite().all()
    assert norm.scale["observation"].isfinite().all()
    assert scaling.count.round() == 15 + 1  # the accumulator of the lost step stands still
    assert scaling.variance.isfinite()
    assert data["next", "reward"].isnan().sum() == 1
    healthy = make_faulty((), ())
    reference = ReturnStdScaling(0.9)
    healthy.append_transform(reference)
    collect(healthy, 8)
    assert torch.equal(scaling._discounted_return[0], reference._discounted_return[0])


@pytest.mark.parametrize("rule", ["done", "termination"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_reward_scaling_by_itself(bad: float, rule: Any) -> None:
    scaling = ReturnStdScaling(0.5, reset=rule, raw_key=None)
    flags = torch.zeros(2, 1, dtype=torch.bool)
    for rewards in ([1.0, 2.0], [3.0, bad], [-1.0, 1.0]):
        step = TensorDict({"reward": torch.tensor(rewards)[:, None], "terminated": flags}, [2])
        scaling._step(step, step)
    assert scaling._discounted_return.flatten().tolist() == [0.5 * 3.5 - 1, 2.0]
    assert scaling._moments.isfinite().all()


def test_observation_norm_by_itself() -> None:
    norm = RunningObservationNorm()
    rows = torch.tensor([[1.0, 2.0], [torch.nan, 4.0], [3.0, 6.0], [5.0, torch.inf]])
    norm._step(TensorDict(), TensorDict({"observation": rows}, [4]))
    assert norm.loc["observation"].tolist() == [2.0, 4.0]
    norm._step(TensorDict(), TensorDict({"observation": rows[1:2]}, [1]))
    assert norm.loc["observation"].tolist() == [2.0, 4.0]


# Failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "raised ZeroDivisionError: a joint is broken"),
        ("exit", "raised SystemExit: 0"),
        ("shape", "raised ValueError"),
    ],
)
def test_an_environment_that_raises(fault: str, message: str) -> None:
    env = make_faulty((), (2,), fault=fault)
    with pytest.raises(EnvironmentFailure) as failure:
        collect(env, 8)
    text = str(failure.value)
    assert "\n" not in text
    assert text.startswith("environment tests.envs.test_faults:")
    assert f", copy 1 of 2, {message}" in text
    assert text.endswith(", at step 2 of an episode.")


def test_a_policy_is_told_apart() -> None:
    env = make_env("gym:Pendulum-v1", num_envs=2)
    data = env.reset()
    data["action"] = torch.full((2, 1), torch.nan)
    with pytest.raises(PolicyFailure, match=r"an action is not a finite number \(nan\)"):
        env.step(data)


# Processes ---------------------------------------------------------------------------------------


@pytest.fixture
def workers() -> Iterator[Any]:
    made = []

    def make(**kwargs: Any) -> TransformedEnv:
        env = make_env(partial(Faulty, **kwargs), num_envs=2, num_workers=2, seed=0)
        made.append(env)
        env.reset()
        return env

    yield make
    for env in made:
        env.close(raise_if_closed=False)
    assert multiprocessing.active_children() == []


def test_a_failure_in_a_process(workers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    env = workers(fault="raise", at=(9,))
    data = env.reset()
    data["action"] = torch.full((2, 1), torch.nan)
    with pytest.raises(PolicyFailure):
        env.step(data)
    for process in env.base_env._processes:
        os.kill(process.pid, signal.SIGINT)  # as Ctrl-C does
    env.rollout(3)
    with pytest.raises(EnvironmentFailure, match=r"raised ZeroDivisionError: a joint is broken, "):
        env.rollout(10, break_when_any_done=False)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_process_that_is_killed(workers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    env = workers()
    os.kill(env.base_env._processes[1].pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFailure, match=r"worker process 1 of 2 .* ended by SIGKILL\."):
        env.rollout(10)
    assert capfd.readouterr().err == ""
