from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import Compose, StepCounter, TransformedEnv, VecNormV2, check_env_specs

from minerva_torchrl.envs import RunningObservationNorm
from tests.envs.scripted import ScriptedEnv, collect, make_batched, save_and_load


class TestRunningObservationNorm:
    def test_statistics_are_the_plain_mean_and_standard_deviation(self) -> None:
        base = ScriptedEnv(length=4)
        env = TransformedEnv(base, RunningObservationNorm())
        base.observations.clear()
        collect(env, 50)
        seen = torch.stack(base.observations).double()
        assert len(seen) == 63  # 50 steps, a reset at the start and 12 at the ends of episodes
        torch.testing.assert_close(env.transform.loc["observation"], seen.mean(0))
        torch.testing.assert_close(env.transform.scale["observation"], seen.std(0, correction=0))
        assert env.transform._count["observation"] == 63

    def test_equals_gymnasium_up_to_its_initial_count(self) -> None:
        torch.manual_seed(0)
        observations = 3.0 + 2.0 * torch.randn(200, 4, dtype=torch.float64)
        transform = RunningObservationNorm(clip=None)
        statistics = RunningMeanStd(shape=(4,))
        for step, observation in enumerate(observations):
            data = TensorDict({"observation": observation}, batch_size=[])
            normalized = transform._step(data, data)["observation"]
            statistics.update(observation.numpy()[None])
            expected = (observation.numpy() - statistics.mean) / np.sqrt(statistics.var + 1e-8)
            if step > 20:
                np.testing.assert_allclose(normalized.numpy(), expected, rtol=1e-3, atol=1e-4)

    def test_normalises_with_the_statistics_after_the_observation(self) -> None:
        transform = RunningObservationNorm(clip=None)
        values = torch.tensor([1.0, 3.0, 8.0], dtype=torch.float64)
        for count in range(1, 4):
            data = TensorDict({"observation": values[count - 1 : count].clone()}, batch_size=[])
            normalized = transform._step(data, data)["observation"]
            seen = values[:count]
            scale = seen.std(correction=0).clamp_min(1e-4)
            torch.testing.assert_close(normalized[0], (values[count - 1] - seen.mean()) / scale)

    @pytest.mark.parametrize("lengths", [(4, 4), (3, 5), (2, 3, 7)])
    def test_batched_environments_are_pooled_and_partial_resets_counted_once(
        self, lengths: tuple[int, ...]
    ) -> None:
        env = TransformedEnv(make_batched(*lengths), RunningObservationNorm())
        batch = collect(env, 20)
        assert batch["observation"].shape == (len(lengths), 20, 2)
        seen = torch.stack(
            [observation for sub in env.base_env._envs for observation in sub.observations]
        ).double()
        assert env.transform._count["observation"] == len(seen)
        torch.testing.assert_close(env.transform.loc["observation"], seen.mean(0))
        torch.testing.assert_close(env.transform.scale["observation"], seen.std(0, correction=0))
        env.close()

    def test_partial_reset_leaves_the_other_rows_alone(self) -> None:
        env = TransformedEnv(make_batched(3, 5), RunningObservationNorm(out_keys=["normalized"]))
        batch = collect(env, 40)
        # Where an episode goes on, the next step starts from the observation that was reached.
        going_on = ~batch["next", "done"][:, :-1].squeeze(-1)
        for key in ("observation", "normalized"):
            reached, start = batch["next", key][:, :-1], batch[key][:, 1:]
            assert torch.equal(reached[going_on], start[going_on])
        env.close()

    @pytest.mark.parametrize(("loc", "scale"), [(0.0, 1.0), (100.0, 0.1), (1e3, 1.0), (1e4, 1e-3)])
    def test_precision_with_a_large_mean(self, loc: float, scale: float) -> None:
        torch.manual_seed(0)
        transform = RunningObservationNorm()
        observations = (loc + scale * torch.randn(500, 4, 1, dtype=torch.float64)).float()
        for observation in observations:
            data = TensorDict({"observation": observation.clone()}, batch_size=[4])
            normalized = transform._step(data, data)["observation"]
            assert normalized.isfinite().all()
            assert normalized.dtype == torch.float32
        expected = observations.double().std(correction=0)
        torch.testing.assert_close(transform.scale["observation"][0], expected)

    @pytest.mark.parametrize("value", [0.0, 1.3, 1e5])
    def test_constant_observation_becomes_zero(self, value: float) -> None:
        transform = RunningObservationNorm()
        for _ in range(100):
            data = TensorDict({"observation": torch.full((4, 1), value)}, batch_size=[4])
            assert (transform._step(data, data)["observation"] == 0.0).all()

    @pytest.mark.parametrize("clip", [10.0, 1.5, None])
    def test_clip(self, clip: float | None) -> None:
        transform = RunningObservationNorm(clip=clip)
        for _ in range(1000):
            data = TensorDict({"observation": torch.zeros(4, 1)}, batch_size=[4])
            transform._step(data, data)
        data = TensorDict({"observation": torch.tensor([[1.0], [-1.0]])}, batch_size=[2])
        normalized = transform._step(data, data)["observation"].squeeze()
        assert normalized[0] == -normalized[1]
        # Two outliers of size one in 4002 give a standard deviation of sqrt(2 / 4002).
        expected = (4002 / 2) ** 0.5 if clip is None else clip
        assert normalized[0].item() == pytest.approx(expected, rel=1e-5)

    def test_out_keys_several_keys_and_integers(self) -> None:
        transform = RunningObservationNorm(["a", ("b", "c")], ["x", ("b", "y")], clip=None)
        torch.manual_seed(0)
        for _ in range(10):
            a, c = torch.randn(3, 2), torch.randint(10, (3, 1))
            data = TensorDict({"a": a.clone(), "b": {"c": c}}, batch_size=[3])
            data = transform._step(data, data)
        assert torch.equal(data["a"], a)
        assert data["b", "y"].dtype == torch.float32
        expected = (c - transform.loc["b", "c"]) / transform.scale["b", "c"]
        torch.testing.assert_close(data["b", "y"].double(), expected, rtol=1e-6, atol=1e-6)
        restored = transform.denorm(data)
        torch.testing.assert_close(restored["a"].float(), a)

    def test_specs_and_compose(self) -> None:
        for base in (ScriptedEnv(), make_batched(3, 4)):
            norm = RunningObservationNorm(out_keys=["normalized"])
            env = TransformedEnv(base, Compose(StepCounter(), norm))
            check_env_specs(env)
            env.close()

    def test_freeze_copy_and_view(self) -> None:
        env = TransformedEnv(ScriptedEnv(), RunningObservationNorm())
        collect(env, 20)
        before = env.transform.loc["observation"].clone()
        copied, view = env.transform.frozen_copy(), env.transform.frozen_view()
        for transform in (copied, view):
            collect(TransformedEnv(ScriptedEnv(seed=5, loc=3.0), transform), 20)
            assert torch.equal(env.transform.loc["observation"], before)
        env.transform.freeze()
        collect(env, 20)
        assert torch.equal(env.transform.loc["observation"], before)
        env.transform.unfreeze()
        collect(env, 20)
        after = env.transform.loc["observation"]
        assert not torch.equal(after, before)
        assert torch.equal(copied.loc["observation"], before)  # the statistics of its moment
        assert torch.equal(view.loc["observation"], after)  # those of now

    def test_frozen_transform_normalises_alike(self) -> None:
        env = TransformedEnv(ScriptedEnv(loc=5.0), RunningObservationNorm())
        collect(env, 50)
        frozen = env.transform.frozen_copy()
        data = TensorDict({"observation": torch.full((2,), 5.5)}, batch_size=[])
        normalized = frozen._step(data, data.clone())["observation"].double()
        expected = (5.5 - frozen.loc["observation"]) / frozen.scale["observation"]
        torch.testing.assert_close(normalized, expected, rtol=1e-6, atol=1e-6)

    def test_checkpoint_round_trip(self) -> None:
        env = TransformedEnv(ScriptedEnv(loc=3.0), Compose(RunningObservationNorm()))
        collect(env, 50)
        state = save_and_load(env.state_dict())
        other = TransformedEnv(ScriptedEnv(), Compose(RunningObservationNorm()))
        view = other.transform[0].frozen_view()
        other.load_state_dict(state)
        for transform in (other.transform[0], view):  # in place: views and workers see it
            for name in ("loc", "scale"):
                expected = getattr(env.transform[0], name)["observation"]
                assert torch.equal(getattr(transform, name)["observation"], expected)
        collect(other, 10)
        assert other.transform[0]._count["observation"] > env.transform[0]._count["observation"]

    def test_checkpoint_into_a_transform_without_environment(self) -> None:
        env = TransformedEnv(ScriptedEnv(loc=3.0), RunningObservationNorm())
        collect(env, 50)
        transform = RunningObservationNorm()
        transform.load_state_dict(save_and_load(env.transform.state_dict()))
        assert torch.equal(transform.loc["observation"], env.transform.loc["observation"])
        eval_env = TransformedEnv(ScriptedEnv(seed=3), transform.freeze())
        collect(eval_env, 10)
        assert torch.equal(transform.loc["observation"], env.transform.loc["observation"])

    def test_collector_checkpoint_contains_the_statistics(self) -> None:
        env = TransformedEnv(ScriptedEnv(loc=3.0), RunningObservationNorm())
        collector = Collector(env, None, frames_per_batch=20, total_frames=40)
        next(iter(collector))
        state = save_and_load(collector.state_dict()["env_state_dict"])
        fresh = TransformedEnv(ScriptedEnv(), RunningObservationNorm())
        fresh.load_state_dict(state)
        assert torch.equal(fresh.transform.loc["observation"], env.transform.loc["observation"])
        collector.shutdown()

    def test_remains_a_vecnorm_for_torchrl(self) -> None:
        transform = RunningObservationNorm()
        assert isinstance(transform, VecNormV2)  # what an Evaluator looks for to freeze it
        env = TransformedEnv(ScriptedEnv(loc=3.0), transform)
        collect(env, 50)
        fixed = transform.to_observation_norm()
        observation = torch.full((2,), 3.3, dtype=torch.float64)
        data = TensorDict({"observation": observation}, batch_size=[])
        expected = transform.freeze()._step(data, data.clone())["observation"]
        torch.testing.assert_close(fixed(data)["observation"], expected)

    def test_pickle_and_deepcopy(self) -> None:
        env = TransformedEnv(ScriptedEnv(loc=3.0), RunningObservationNorm())
        collect(env, 10)
        transform = env.transform.clone()
        for other in (copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
            assert torch.equal(other.loc["observation"], transform.loc["observation"])
            data = TensorDict({"observation": torch.zeros(2)}, batch_size=[])
            other._step(data, data)
            assert not torch.equal(other.loc["observation"], transform.loc["observation"])

    def test_rejects(self) -> None:
        for in_keys in ([], "observation"):
            with pytest.raises(ValueError, match="in_keys must be a sequence of at least one key"):
                RunningObservationNorm(in_keys)
        with pytest.raises(ValueError, match=r"out_keys must have as many keys.*\['x', 'y'\]"):
            RunningObservationNorm(["a"], ["x", "y"])
        with pytest.raises(ValueError, match=r"clip must be positive or None, got 0.0"):
            RunningObservationNorm(clip=0.0)
        with pytest.raises(ValueError, match=r"eps must be positive, got 0.0"):
            RunningObservationNorm(eps=0.0)
        with pytest.raises(RuntimeError, match="attach the transform to its environment"):
            RunningObservationNorm().frozen_view()
