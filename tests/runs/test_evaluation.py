from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import ExplorationType, TransformedEnv, exploration_type, set_exploration_type

from minerva_torchrl import make_env
from minerva_torchrl.envs import RunningObservationNorm
from minerva_torchrl.runs import Evaluation, evaluate, open_checkpoint
from minerva_torchrl.runs.assemble import assemble, evaluation_seed, make_evaluation_env
from minerva_torchrl.runs.parts import find_parts
from tests.runs.tiny import (
    assert_same_parameters,
    assert_same_value,
    column,
    make_run,
    read_csv,
    tiny_config,
    train,
)


def push(env: TransformedEnv, strength: float = 0.5) -> TensorDictModule:
    """A policy that always does the same."""
    shape = env.action_spec.shape[-1:]

    def act(observation: torch.Tensor) -> torch.Tensor:
        return torch.full((*observation.shape[:-1], *shape), strength)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def statistics(env: TransformedEnv) -> dict:
    return {name: value for name, value in env.state_dict().items() if value is not None}


# The numbers -------------------------------------------------------------------------------------


def test_row() -> None:
    row = Evaluation(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([10, 20, 30])).row()
    assert row == {
        "return_mean": 3.0,
        "return_std": pytest.approx((14 / 3) ** 0.5),
        "return_min": 1.0,
        "return_max": 6.0,
        "length_mean": 20.0,
    }


def test_row_of_one_episode() -> None:
    row = Evaluation(torch.tensor([4.0]), torch.tensor([7])).row()
    assert row["return_std"] == 0.0
    assert row["return_mean"] == row["return_min"] == row["return_max"] == 4.0


def test_returns_are_those_of_the_episodes() -> None:
    env = make_env("gym:Pendulum-v1", num_envs=3, max_episode_steps=12)
    result = evaluate(env, push(env), seed=5)
    reference = make_env("gym:Pendulum-v1", num_envs=3, max_episode_steps=12, seed=5)
    rewards = reference.rollout(12, push(env))["next", "reward"].squeeze(-1)
    torch.testing.assert_close(result.returns, rewards.sum(-1))
    assert result.lengths.tolist() == [12, 12, 12]
    assert result.returns.std() > 0  # they begin differently


def test_episodes_of_different_lengths_count_once() -> None:
    env = make_env("gym:CartPole-v1", num_envs=4, max_episode_steps=200)
    left = TensorDictModule(
        lambda observation: torch.tensor([1, 0]).expand(*observation.shape[:-1], 2),
        in_keys=["observation"],
        out_keys=["action"],
    )
    result = evaluate(env, left, seed=0)
    assert len(set(result.lengths.tolist())) > 1
    assert torch.equal(result.returns, result.lengths.float())  # a reward of one per step


def test_a_seed_makes_it_repeatable() -> None:
    env = make_env("gym:Pendulum-v1", num_envs=2, max_episode_steps=5)
    first, again, other = (evaluate(env, push(env), seed=seed).returns for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(evaluate(env, push(env)).returns, other)


def test_every_state_of_the_first_copy_but_the_last_is_shown() -> None:
    env = make_env("gym:Pendulum-v1", num_envs=2, max_episode_steps=6)
    calls: list[int] = []
    evaluate(env, push(env), seed=0, on_step=lambda: calls.append(1))
    assert len(calls) == 6


# Nothing else changes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts() -> tuple:
    """A tiny PPO run that has collected a batch, and its environment for evaluation."""
    config = tiny_config("ppo")
    assembly = assemble(config)
    next(iter(assembly.collector))
    return config, assembly, make_evaluation_env(config, assembly.env, find_parts(config))


def test_generators_and_exploration_stay_as_they_are(parts: tuple) -> None:
    _, assembly, env = parts
    generator = torch.get_rng_state()
    with set_exploration_type(ExplorationType.RANDOM):
        first = evaluate(env, assembly.actor, seed=0)
        assert exploration_type() == ExplorationType.RANDOM
    assert torch.equal(torch.get_rng_state(), generator)
    torch.rand(3)
    assert torch.equal(evaluate(env, assembly.actor, seed=0).returns, first.returns)


def test_no_gradients_are_kept(parts: tuple) -> None:
    _, assembly, env = parts
    assert not evaluate(env, assembly.actor, seed=0).returns.requires_grad
    assert all(parameter.grad is None for parameter in assembly.loss.parameters())


def test_statistics_of_observations_are_used_and_left_alone(parts: tuple) -> None:
    config, assembly, env = parts
    before = {name: _copy(value) for name, value in statistics(assembly.env).items()}
    assert before
    env.set_seed(evaluation_seed(config))
    seen = env.reset()["observation"]
    raw = make_env(config.env.name, num_envs=2, seed=evaluation_seed(config)).reset()
    (norm,) = (t for t in assembly.env.transform if isinstance(t, RunningObservationNorm))
    expected = (raw["observation"] - norm.loc["observation"]) / norm.scale["observation"]
    torch.testing.assert_close(seen, expected.float().clamp(-10, 10))
    evaluate(env, assembly.actor, seed=0)
    assert_same_value({k: _copy(v) for k, v in statistics(assembly.env).items()}, before)


def test_rewards_are_those_of_the_task(parts: tuple) -> None:
    config, assembly, env = parts
    actor = assembly.actor
    result = evaluate(env, actor, seed=7)
    env.set_seed(7)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        actions = env.rollout(15, actor)["action"]
    raw = make_env(config.env.name, num_envs=2, seed=7, max_episode_steps=15)
    data, total = raw.reset(), torch.zeros(2)
    for step in range(15):
        data = raw.step(data.set("action", actions[:, step]))["next"]
        total += data["reward"].squeeze(-1)
    torch.testing.assert_close(result.returns, total)


def _copy(value: object) -> object:
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    return value.clone() if isinstance(value, (torch.Tensor, TensorDict)) else value


# In a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mpo", "ppo"])
def test_how_often_makes_no_difference_to_training(kind: str, tmp_path: Path) -> None:
    changes = {"checkpoint.best": False, "eval.episodes": 3, "total_frames": 100}
    often = train(tmp_path / "often", kind, eval__interval=1, **changes)
    seldom = train(tmp_path / "seldom", kind, eval__interval=1000, **changes)
    batch = often.config.collector.frames_per_batch
    assert column(often.run_dir / "eval.csv", "frames") == list(range(0, 101, batch))
    assert column(seldom.run_dir / "eval.csv", "frames") == [0, 100]
    assert read_csv(often.run_dir / "eval.csv")[-1] == read_csv(seldom.run_dir / "eval.csv")[-1]
    assert_same_parameters(often.run_dir, seldom.run_dir)
    training = [open_checkpoint(run.run_dir).load("training") for run in (often, seldom)]
    assert_same_value(*training)


def test_seeds() -> None:
    assert evaluation_seed(tiny_config("mpo", seed=0)) != 0
    assert evaluation_seed(tiny_config("mpo", seed=0)) != evaluation_seed(
        tiny_config("mpo", seed=1)
    )
    assert evaluation_seed(tiny_config("mpo", seed=0, eval__seed=9)) == 9
    assert 0 <= evaluation_seed(tiny_config("mpo", seed=2**32 - 1)) < 2**32


def test_a_seed_of_its_own(tmp_path: Path) -> None:
    first, second = (
        make_run(tiny_config("mpo", seed=seed, eval__seed=7), tmp_path / str(seed))
        for seed in (0, 1)
    )
    observations = []
    for run in (first, second):
        run.eval_env.set_seed(evaluation_seed(run.config))
        observations.append(run.eval_env.reset()["observation"])
    assert torch.equal(*observations)
