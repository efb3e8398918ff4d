from __future__ import annotations

import copy
import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from tensordict import TensorDict
from torch import Tensor
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    EnvCreator,
    GymEnv,
    GymWrapper,
    ParallelEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

from minerva_torchrl.envs import ReturnStdScaling, RunningObservationNorm
from tests.envs.scripted import ScriptedEnv, collect, make_batched, save_and_load

# Rewards -----------------------------------------------------------------------------------------


class ScriptedGymEnv(gymnasium.Env):
    """Random rewards; episodes of random length end by termination or truncation."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        return np.zeros(1), {}

    def step(self, action: np.ndarray):
        end = self.random.random() < 0.15
        terminated = end and self.random.random() < 0.5
        reward = float(self.random.normal(0.5, 2.0))
        return np.zeros(1), reward, bool(terminated), bool(end and not terminated), {}


def reference_scaling(
    reward: Tensor, done: Tensor, terminated: Tensor, gamma: float, reset: str
) -> np.ndarray:
    """``[B, T]`` in and out, with Gymnasium's statistics, pooled over environments."""
    statistics = RunningMeanStd(shape=())
    accumulated = np.zeros(len(reward))
    scaled = []
    for r, d, t in zip(
        reward.T.double().numpy(), done.T.numpy(), terminated.T.numpy(), strict=True
    ):
        accumulated = accumulated * gamma * (1 - t if reset == "termination" else 1) + r
        statistics.update(accumulated)
        scaled.append(r / np.sqrt(statistics.var + 1e-8))
        if reset == "done":
            accumulated = accumulated * (1 - d)
    return np.stack(scaled, axis=1)


class TestReturnStdScaling:
    @pytest.mark.parametrize("gamma", [0.99, 0.9])
    def test_equals_gymnasium(self, gamma: float) -> None:
        gym_env = gymnasium.wrappers.NormalizeReward(ScriptedGymEnv(), gamma=gamma)
        gym_env.reset()
        expected, ends = [], []
        for _ in range(200):
            _, reward, terminated, truncated, _ = gym_env.step(np.zeros(1))
            expected.append(reward)
            ends.append((terminated, truncated))
            if terminated or truncated:
                gym_env.reset()
        assert {(True, False), (False, True), (False, False)} == set(ends)

        scaling = ReturnStdScaling(gamma, reset="termination", clip=None)
        env = TransformedEnv(GymWrapper(ScriptedGymEnv()), scaling)
        batch = collect(env, 200)
        flags = [batch["next", name].flatten().tolist() for name in ("terminated", "truncated")]
        assert list(zip(*flags, strict=True)) == ends
        scaled = batch["next", "reward"].flatten().numpy()
        # Rewards of the environment are float32, which is all the difference there is.
        np.testing.assert_allclose(scaled, np.array(expected).flatten(), rtol=1e-5, atol=1e-6)

    def test_pools_environments_as_gymnasium_does(self) -> None:
        torch.manual_seed(0)
        rewards = torch.randn(30, 3)

        class VectorEnv(gymnasium.vector.VectorEnv):
            num_envs = 3
            step_count = 0

            def reset(self, *, seed=None, options=None):
                return np.zeros((3, 1)), {}

            def step(self, actions):
                reward = rewards[self.step_count].numpy()
                self.step_count += 1
                never = np.zeros(3, dtype=bool)
                return np.zeros((3, 1)), reward, never, never, {}

        gym_env = gymnasium.wrappers.vector.NormalizeReward(VectorEnv(), gamma=0.9)
        gym_env.reset()
        transform = ReturnStdScaling(0.9, clip=None, raw_key=None)
        for reward in rewards:
            expected = gym_env.step(np.zeros((3, 1)))[1]
            never = torch.zeros(3, 1, dtype=torch.bool)
            data = TensorDict(
                {"reward": reward[:, None], "done": never, "terminated": never}, batch_size=[3]
            )
            scaled = transform._step(data, data)["reward"].squeeze(-1).numpy()
            np.testing.assert_allclose(scaled, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("reset", ["done", "termination"])
    @pytest.mark.parametrize("lengths", [(4,), (4, 4), (3, 5, 2)])
    def test_batched_environments_and_partial_resets(
        self, reset: str, lengths: tuple[int, ...]
    ) -> None:
        scaling = ReturnStdScaling(0.9, reset=reset, clip=None)
        env = TransformedEnv(make_batched(*lengths), scaling)
        frames = 20 * len(lengths)
        collector = Collector(env, None, frames_per_batch=frames, total_frames=frames)
        following = next(iter(collector))["next"].clone()
        collector.shutdown()
        raw, done, terminated, scaled = (
            following[key].squeeze(-1) for key in ("raw_reward", "done", "terminated", "reward")
        )
        assert done.any()
        assert (done != terminated).any()
        expected = reference_scaling(raw, done, terminated, 0.9, reset)
        np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-5, atol=1e-6)
        other = reference_scaling(
            raw, done, terminated, 0.9, "done" if reset == "termination" else "termination"
        )
        assert not np.allclose(scaled.numpy(), other, rtol=1e-3)

    def test_reset_in_the_middle_of_an_episode_starts_a_new_return(self) -> None:
        env = TransformedEnv(ScriptedEnv(length=100), ReturnStdScaling(0.9))
        env.rollout(5)
        data = env.rollout(1)
        torch.testing.assert_close(
            env.transform._discounted_return, data["next", "raw_reward"][0].double()
        )

    def test_end_of_an_episode_that_a_later_transform_decides(self) -> None:
        env = TransformedEnv(
            ScriptedEnv(length=100), Compose(ReturnStdScaling(0.9, clip=None), StepCounter(3))
        )
        following = collect(env, 20)["next"]
        raw, done = following["raw_reward"].T, following["done"].T
        assert done.sum() == 6
        expected = reference_scaling(raw, done, torch.zeros_like(done), 0.9, "done")
        scaled = following["reward"].T.numpy()
        np.testing.assert_allclose(scaled, expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("clip", [10.0, 0.5, None])
    def test_clip(self, clip: float | None) -> None:
        transform = ReturnStdScaling(0.0, clip=clip, raw_key=None)
        for reward in [0.0] * 1000 + [1.0]:
            data = TensorDict(
                {"reward": torch.tensor([reward]), "done": torch.tensor([False])}, batch_size=[]
            )
            scaled = transform._step(data, data)["reward"].item()
        expected = (transform.variance.item() + 1e-8) ** -0.5
        assert expected > 20
        assert scaled == pytest.approx(expected if clip is None else clip, rel=1e-5)

    def test_raw_reward_and_reward_sum(self) -> None:
        env = TransformedEnv(make_batched(4, 4), Compose(RewardSum(), ReturnStdScaling()))
        rollout = env.rollout(4)
        raw = rollout["next", "raw_reward"]
        assert not torch.allclose(raw, rollout["next", "reward"])
        torch.testing.assert_close(raw.cumsum(1), rollout["next", "episode_reward"])
        assert not rollout["raw_reward"][:, 0].any()  # zero after the reset
        torch.testing.assert_close(rollout["raw_reward"][:, 1:], raw[:, :-1])
        env.close()

    def test_raw_reward_can_be_dropped(self) -> None:
        env = TransformedEnv(ScriptedEnv(), ReturnStdScaling(raw_key=None))
        check_env_specs(env)
        assert "raw_reward" not in env.rollout(2)["next"]

    def test_specs(self) -> None:
        for base in (ScriptedEnv(), ScriptedEnv(dtype=torch.float64), make_batched(3, 4)):
            env = TransformedEnv(base, ReturnStdScaling())
            check_env_specs(env)
            assert env.reward_keys == ["reward"]
            assert isinstance(env.reward_spec, Unbounded)
            env.close()

    def test_freeze_and_frozen_copy(self) -> None:
        env = TransformedEnv(ScriptedEnv(), ReturnStdScaling(clip=None))
        collect(env, 50)
        before = env.transform.variance
        frozen = env.transform.frozen_copy()
        following = collect(TransformedEnv(ScriptedEnv(seed=9), frozen), 20)["next"]
        assert torch.equal(frozen.variance, before)
        expected = following["raw_reward"] / (before + 1e-8).sqrt()
        torch.testing.assert_close(following["reward"], expected.float())
        env.transform.freeze()
        collect(env, 20)
        assert torch.equal(env.transform.variance, before)
        env.transform.unfreeze()
        collect(env, 20)
        assert not torch.equal(env.transform.variance, before)
        assert torch.equal(frozen.variance, before)

    def test_checkpoint_round_trip(self) -> None:
        env = TransformedEnv(make_batched(3, 4), Compose(ReturnStdScaling()))
        collect(env, 50)
        state = save_and_load(env.state_dict())
        other = TransformedEnv(make_batched(3, 4), Compose(ReturnStdScaling()))
        other.reset()
        shared = other.transform[0].get_extra_state()["moments"]
        other.load_state_dict(state)
        for name in ("mean", "variance", "count"):
            expected = getattr(env.transform[0], name)
            assert torch.equal(getattr(other.transform[0], name), expected)
        # In place, so that processes which use the same memory see it.
        assert torch.equal(shared, env.transform[0].get_extra_state()["moments"])
        for env_ in (env, other):
            env_.close()

    def test_pickle_deepcopy_and_clone(self) -> None:
        env = TransformedEnv(ScriptedEnv(), ReturnStdScaling())
        collect(env, 20)
        transform = env.transform.clone()
        others = (copy.deepcopy(transform), pickle.loads(pickle.dumps(transform)))
        for other in (transform, *others):
            assert torch.equal(other.variance, env.transform.variance)
            collect(TransformedEnv(ScriptedEnv(seed=4), other), 10)
            assert not torch.equal(other.variance, env.transform.variance)

    def test_needs_an_environment(self) -> None:
        with pytest.raises(RuntimeError, match="must be part of a TransformedEnv"):
            ReturnStdScaling()(TensorDict({"reward": torch.zeros(3, 1)}, batch_size=[3]))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"gamma": 1.5}, "gamma must lie between 0 and 1, got 1.5"),
            ({"reset": "truncation"}, "reset must be 'done' or 'termination', got 'truncation'"),
            ({"clip": -1.0}, "clip must be positive or None, got -1.0"),
            ({"eps": 0.0}, "eps must be positive, got 0.0"),
            ({"raw_key": "reward"}, "raw_key must differ from reward_key"),
        ],
    )
    def test_rejects(self, settings: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ReturnStdScaling(**settings)


# Several processes -------------------------------------------------------------------------------


def make_shared_env() -> EnvCreator:
    return EnvCreator(
        lambda: TransformedEnv(
            GymEnv("Pendulum-v1"), Compose(RunningObservationNorm(), ReturnStdScaling())
        )
    )


def counts(env: TransformedEnv) -> tuple[int, int]:
    norm, scaling = env.transform
    return int(norm._count["observation"]), round(float(scaling.count))


def test_environments_of_one_creator_share_statistics() -> None:
    make_env = make_shared_env()
    first, second = make_env(), make_env()
    start = counts(first)
    collect(first, 10)
    collect(second, 5)
    assert counts(first) == counts(second) == (start[0] + 17, start[1] + 15)  # two resets


@pytest.mark.slow
def test_workers_of_a_collector_share_statistics() -> None:
    make_env = make_shared_env()
    local_env = make_env()
    start = counts(local_env)
    collector = MultiSyncCollector([make_env] * 2, None, frames_per_batch=20, total_frames=60)
    try:
        iterator = iter(collector)
        for batch_number in (1, 2):
            batch = next(iterator)
            frames = 20 * batch_number
            assert counts(local_env) == (start[0] + 2 + frames, start[1] + frames)
        # A checkpoint that is loaded here reaches the workers: with a standard deviation of 2 that
        # further steps hardly change, rewards are halved.
        state = save_and_load(local_env.state_dict())
        moments = torch.tensor([0.0, 4.0, 1e12], dtype=torch.float64)
        state["transforms.1._extra_state"]["moments"] = moments
        local_env.load_state_dict(state)
        batch = next(iterator)
        expected = (batch["next", "raw_reward"] / 2.0).clamp(-10.0, 10.0)
        torch.testing.assert_close(batch["next", "reward"], expected)
    finally:
        collector.shutdown()


@pytest.mark.slow
def test_workers_of_a_parallel_environment_share_statistics() -> None:
    make_env = make_shared_env()
    local_env = make_env()
    start = counts(local_env)
    env = ParallelEnv(2, make_env)
    try:
        env.rollout(10)
        assert counts(local_env) == (start[0] + 22, start[1] + 20)
    finally:
        env.close()
