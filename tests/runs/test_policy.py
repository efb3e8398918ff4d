from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, OneHotCategorical, ProbabilisticActor, TanhNormal

from minerva_torchrl import make_env
from minerva_torchrl.envs import RunningObservationNorm
from minerva_torchrl.modules import StateIndependentScale
from minerva_torchrl.runs import TrainedPolicy, load_policy
from minerva_torchrl.runs.policy import DeployedPolicy
from tests.runs.policies import (
    BareTask,
    MakeEnv,
    evaluated_returns,
    flatten,
    gaussian,
    make_actor,
    make_tasks,
    play_bare,
    random_rows,
    stack,
)
from tests.runs.tiny import train

# The bare simulator repeats the evaluation -------------------------------------------------------


@pytest.fixture(scope="module", params=["mpo", "vmpo-discrete", "ppo", "suite"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_policy(train(tmp_path_factory.mktemp("runs") / "run", request.param).run_dir)


def test_predict_repeats_the_evaluation(policy: TrainedPolicy) -> None:
    returns = play_bare(policy, lambda observations: policy.predict(stack(observations)))
    assert returns == evaluated_returns(policy)


def test_predict_one_by_one_repeats_the_evaluation(policy: TrainedPolicy) -> None:
    returns = play_bare(policy, lambda observations: [policy.predict(o) for o in observations])
    assert returns == pytest.approx(evaluated_returns(policy), rel=1e-6)


def test_actions_are_those_that_the_environment_takes(policy: TrainedPolicy) -> None:
    [task] = make_tasks(policy.config, seeds=[0])
    for deterministic in (True, False):
        action = policy.predict(task.observation, deterministic=deterministic)
        if task.is_gym:
            assert task.env.action_space.contains(action)
        else:
            spec = task.env.action_spec()
            spec.validate(action)
            assert action.dtype == spec.dtype


def test_batches(policy: TrainedPolicy) -> None:
    rows = np.random.default_rng(0).normal(size=(2, 3, policy.deployed.observation_size))
    actions = policy.predict(rows)
    assert actions.shape[:2] == (2, 3)
    one_by_one = [[policy.predict(row) for row in batch] for batch in rows]
    np.testing.assert_allclose(actions, np.array(one_by_one), rtol=1e-5, atol=1e-7)
    assert policy.predict(rows[:0]).shape == (0, 3, *actions.shape[2:])
    assert len(np.unique(actions)) > 1


# What it computes --------------------------------------------------------------------------------


def test_a_mean_out_of_bounds_is_clipped(recorder: MakeEnv) -> None:
    low, high = np.float32([-0.1, -np.inf]), np.float32([0.05, 0.1])
    env = recorder(actions=spaces.Box(low, high))
    actor, mean = gaussian(env)
    rows = random_rows(50, 2)
    with torch.no_grad():
        means = mean(torch.from_numpy(rows)).numpy()
    actions = DeployedPolicy(actor, env).predict(rows)
    np.testing.assert_array_equal(actions, np.clip(means, low, high))
    for column, bound in ((0, low[0]), (0, high[0]), (1, high[1])):
        assert 0 < (actions[:, column] == bound).sum() < 50


def test_a_mean_is_scaled_to_the_bounds(recorder: MakeEnv) -> None:
    """And one outside of [-1, 1] is clipped."""
    low, high = np.float32([-0.4, 1.0]), np.float32([0.4, 3.0])
    env = recorder(actions=spaces.Box(low, high))
    actor, mean = gaussian(env)
    rows = random_rows(50, 2)
    with torch.no_grad():
        mean[-1].weight.mul_(8)
        means = mean(torch.from_numpy(rows)).numpy()
    expected = np.float32([0.0, 2.0]) + np.float32([0.4, 1.0]) * np.clip(means, -1, 1)
    actions = DeployedPolicy(actor, env).predict(rows)
    np.testing.assert_allclose(actions, expected, rtol=1e-6, atol=1e-7)
    assert 0 < ((actions == low) | (actions == high)).sum() < actions.size


@pytest.mark.parametrize("canonical", [True, False])
def test_a_squashed_mean_is_scaled(canonical: bool, recorder: MakeEnv) -> None:
    low, high = np.float32([-3.0, 0.0]), np.float32([1.0, 10.0])
    env = recorder(actions=spaces.Box(low, high), canonical_actions=canonical)
    bounds = {} if canonical else {"low": torch.from_numpy(low), "high": torch.from_numpy(high)}
    actor, mean = gaussian(env, TanhNormal, distribution_kwargs=bounds)
    rows = random_rows(20, 2)
    with torch.no_grad():
        squashed = np.tanh(mean(torch.from_numpy(rows)).numpy())
    expected = low + (high - low) * (squashed + 1) / 2
    policy = DeployedPolicy(actor, env)
    np.testing.assert_allclose(policy.predict(rows), expected, rtol=1e-5, atol=1e-6)
    samples = policy.predict(rows, deterministic=False)
    assert ((low <= samples) & (samples <= high)).all()
    assert np.abs(samples - expected).max() > 0.5


def test_the_most_probable_action_in_the_numbers_of_the_environment(
    recorder: MakeEnv,
) -> None:
    env = recorder(actions=spaces.Discrete(3, start=10))
    network = nn.Linear(2, 3)
    policy = DeployedPolicy(make_actor(network, OneHotCategorical), env)
    rows = random_rows(20, 2, scale=3.0)
    with torch.no_grad():
        expected = 10 + network(torch.from_numpy(rows)).argmax(-1).numpy()
    np.testing.assert_array_equal(policy.predict(rows), expected)
    assert set(expected) == {10, 11, 12}
    single = policy.predict(rows[0])
    assert {single: "hashable, as a key of a table must be"}[expected[0]]


def test_observations_are_normalised(recorder: MakeEnv) -> None:
    env = recorder(observation_norm=RunningObservationNorm(clip=1.5), num_envs=4)
    env.rollout(50)
    norm = next(t for t in env.transform if isinstance(t, RunningObservationNorm))
    loc, scale = norm.loc["observation"].numpy(), norm.scale["observation"].numpy()
    actor, mean = gaussian(env)
    policy = DeployedPolicy(actor, env)
    rows = random_rows(20, 2)
    normalised = np.clip((rows - loc) / scale, -1.5, 1.5)
    assert 0 < (np.abs(normalised) == 1.5).sum() < normalised.size
    with torch.no_grad():
        expected = mean(torch.from_numpy(normalised).float()).clamp(-1, 1).numpy()
    before = policy.predict(rows)
    np.testing.assert_allclose(before, expected, rtol=1e-5, atol=1e-6)
    # Training goes on, and changes nothing here.
    env.rollout(5)
    assert not np.array_equal(norm.loc["observation"].numpy(), loc)
    with torch.no_grad():
        mean[0].weight.zero_()
    np.testing.assert_array_equal(policy.predict(rows), before)


def test_observations_are_normalised_without_clipping(
    recorder: MakeEnv,
) -> None:
    env = recorder(observation_norm=RunningObservationNorm(clip=None), num_envs=4)
    env.rollout(50)
    norm = next(t for t in env.transform if isinstance(t, RunningObservationNorm))
    actor, mean = gaussian(env)
    rows = random_rows(5, 2, scale=100.0)
    statistics = norm.loc["observation"], norm.scale["observation"]
    with torch.no_grad():
        normalised = (torch.from_numpy(rows).double() - statistics[0]) / statistics[1]
        expected = mean(normalised.float()).clamp(-1, 1).numpy()
    np.testing.assert_allclose(
        DeployedPolicy(actor, env).predict(rows), expected, rtol=1e-5, atol=1e-6
    )


def test_samples_of_a_gaussian(recorder: MakeEnv) -> None:
    env = recorder(actions=spaces.Box(-np.inf, np.inf, (2,)))
    actor, _ = gaussian(env, scale=0.25)
    policy = DeployedPolicy(actor, env)
    row = np.ones(2)
    rows = np.broadcast_to(row, (20_000, 2))
    torch.manual_seed(1)
    samples = policy.predict(rows, deterministic=False)
    np.testing.assert_allclose(samples.mean(0), policy.predict(row), atol=0.01)
    np.testing.assert_allclose(samples.std(0), 0.25, rtol=0.03)
    torch.manual_seed(1)
    np.testing.assert_array_equal(policy.predict(rows, deterministic=False), samples)


def test_samples_of_discrete_actions(recorder: MakeEnv) -> None:
    env = recorder(actions=spaces.Discrete(3))
    network = nn.Linear(2, 3)
    policy = DeployedPolicy(make_actor(network, OneHotCategorical), env)
    torch.manual_seed(1)
    samples = policy.predict(np.ones((20_000, 2)), deterministic=False)
    with torch.no_grad():
        probabilities = network(torch.ones(2)).softmax(-1).numpy()
    np.testing.assert_allclose(np.bincount(samples) / 20_000, probabilities, atol=0.015)


# Observations of many forms ----------------------------------------------------------------------

NESTED = spaces.Dict(
    {
        "b": spaces.Box(0, 9, (2, 3), np.int64),
        "a": spaces.Dict({"y": spaces.Box(-1.0, 1.0, ()), "x": spaces.Box(-2.0, 2.0, (2,))}),
    }
)


def test_dicts_are_read_by_name(recorder: MakeEnv) -> None:
    env = recorder(NESTED)
    policy = DeployedPolicy(gaussian(env)[0], env)
    observation = NESTED.sample()
    flat = [*observation["a"]["x"], observation["a"]["y"], *observation["b"].flatten()]
    expected = policy.predict(np.array(flat))
    inner = {"x": observation["a"]["x"], "y": observation["a"]["y"]}
    for reordered in (observation, {"b": observation["b"], "a": inner}):
        np.testing.assert_array_equal(policy.predict(reordered), expected)
    batch = {
        "b": np.stack([observation["b"]] * 5),
        "a": {key: np.stack([value] * 5) for key, value in inner.items()},
    }
    np.testing.assert_allclose(policy.predict(batch), [expected] * 5, rtol=1e-5, atol=1e-6)


def test_dicts_of_a_task_with_a_number_among_its_observations() -> None:
    env = make_env("walker-walk")
    policy = DeployedPolicy(gaussian(env)[0], env)
    assert policy.observation_layout[("height",)] == ()
    task = BareTask("walker-walk", seed=0)
    flat = flatten(task.observation)
    reordered = dict(reversed(list(task.observation.items())))
    for observation in (task.observation, reordered):
        np.testing.assert_array_equal(policy.predict(observation), policy.predict(flat))


@pytest.mark.parametrize(
    ("shape", "given", "batch"),
    [
        ((2, 3), (2, 3), ()),
        ((2, 3), (6,), ()),
        ((2, 3), (5, 2, 3), (5,)),
        ((2, 3), (5, 6), (5,)),
        ((1, 6), (1, 6), ()),  # as the environment gives it, and no batch
        ((1, 6), (6,), ()),
        ((), (), ()),
        ((), (1,), ()),
        ((), (4, 1), (4,)),
    ],
)
def test_shapes(recorder: MakeEnv, shape: tuple, given: tuple, batch: tuple) -> None:
    env = recorder(spaces.Box(-1.0, 1.0, shape))
    policy = DeployedPolicy(gaussian(env)[0], env)
    assert policy.predict(np.zeros(given)).shape == (*batch, 2)


def test_numbers_of_any_kind(recorder: MakeEnv) -> None:
    env = recorder()
    policy = DeployedPolicy(gaussian(env)[0], env)
    expected = policy.predict(np.float32([0, 1]))
    for same in ([0.0, 1.0], (0, 1), np.array([False, True]), torch.tensor([0, 1])):
        np.testing.assert_array_equal(policy.predict(same), expected)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(10), r"observation must have the shape \[\*B, 9\], got \[10\]"),
        (0.0, r"observation must have the shape \[\*B, 9\], got \[\]"),
        (
            {"a": {"x": np.zeros(2)}, "c": np.zeros(6)},
            r"must have observation\['a'\]\['x'\], observation\['a'\]\['y'\], observation\['b'\] "
            r"or be an array \[\*B, 9\]; it has observation\['a'\]\['x'\], observation\['c'\]\.",
        ),
        ({}, "it has nothing"),
        (
            {"a": {"x": np.zeros(2), "y": 0.0}, "b": np.zeros((3, 2))},
            r"observation\['b'\] must have the shape \[\*B, 2, 3\], got \[3, 2\]",
        ),
        (
            {"a": {"x": np.zeros((4, 2)), "y": np.zeros(4)}, "b": np.zeros((5, 2, 3))},
            r"batches of the same shape, got \[4\] and \[5\]",
        ),
        (
            {"a": {"x": np.full(2, np.nan), "y": 0.0}, "b": np.zeros((2, 3))},
            r"observation\['a'\]\['x'\] has a value that is not a number",
        ),
    ],
)
def test_wrong_observations(recorder: MakeEnv, observation: Any, message: str) -> None:
    env = recorder(NESTED)
    with pytest.raises(ValueError, match=message):
        DeployedPolicy(gaussian(env)[0], env).predict(observation)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.array(["1", "2"]), "observation must be an array of numbers, got ndarray of <U1"),
        (None, "observation must be an array of numbers, got NoneType"),
        ((np.zeros(2), {}), "observation must be an array of numbers, got tuple"),  # of reset()
        ([[0.0], [0.0, 1.0]], "observation must be an array of numbers, got list"),
    ],
)
def test_what_is_no_observation(recorder: MakeEnv, observation: Any, message: str) -> None:
    env = recorder()
    with pytest.raises(TypeError, match=message):
        DeployedPolicy(gaussian(env)[0], env).predict(observation)


# Policies that can't be deployed -----------------------------------------------------------------


def test_a_policy_with_other_inputs(recorder: MakeEnv) -> None:
    network = StateIndependentScale(nn.Linear(2, 2), 2)
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["pixels"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
    )
    with pytest.raises(ValueError, match=r"actor must read 'observation' only, .*'pixels'"):
        DeployedPolicy(actor, recorder())


def test_a_distribution_without_a_deterministic_sample(
    recorder: MakeEnv,
) -> None:
    env = recorder()
    actor, _ = gaussian(env, torch.distributions.Normal)
    with pytest.raises(TypeError, match=r"distribution of actor must have .* got Normal"):
        DeployedPolicy(actor, env)


def test_numbers_as_actions(recorder: MakeEnv) -> None:
    env = recorder(actions=spaces.Discrete(3), categorical_actions=True)
    actor = make_actor(nn.Linear(2, 3), OneHotCategorical)
    with pytest.raises(TypeError, match="actions must be continuous or one-hot, got Categorical"):
        DeployedPolicy(actor, env)
