"""The collector of training runs: it has the data of TorchRL's, and leaves the rest to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, ExplorationType, SignTransform, StepCounter, TransformedEnv
from torchrl.modules import (
    IndependentNormal,
    LSTMModule,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

from minerva_torchrl.algorithms.common import single_specs
from minerva_torchrl.algorithms.family import make_policy
from minerva_torchrl.algorithms.mpo import MPONetworkConfig
from minerva_torchrl.envs import ReturnStdScaling, make_env
from minerva_torchrl.envs.arrays import ArrayRollout
from minerva_torchrl.modules import DirectModule, GaussianPolicy, PinkNoiseActor
from minerva_torchrl.modules.direct import plain_gaussian
from minerva_torchrl.trainers.collector import DirectCollector, _acting
from tests.envs.hybrid import Hybrid

TORCHRL = {
    "total_frames": -1,
    "policy_device": "cpu",
    "env_device": "cpu",
    "storing_device": "cpu",
    "trust_policy": True,
}
NORMALISED = {"observation_norm": True, "max_episode_steps": 7, "staggered": True}


def make_actor(env: EnvBase, **kwargs: Any) -> ProbabilisticActor:
    obs_dim, action_dim = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    network = GaussianPolicy(obs_dim, action_dim, (8, 8), init_scale=1.0)
    settings = {"distribution_class": IndependentNormal, "return_log_prob": True, **kwargs}
    module = DirectModule(network, ["observation"], ["loc", "scale"])
    return ProbabilisticActor(module, in_keys=["loc", "scale"], **settings)


def make_logits_actor(env: EnvBase) -> ProbabilisticActor:
    size = env.observation_spec["observation"].shape[-1]
    network = DirectModule(nn.Linear(size, env.action_spec.shape[-1]), ["observation"], ["logits"])
    return ProbabilisticActor(
        network,
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def make_mean(env: EnvBase) -> TensorDictModule:
    size = env.observation_spec["observation"].shape[-1]
    return TensorDictModule(nn.Linear(size, env.action_spec.shape[-1]), ["observation"], ["action"])


def make_two_parts(env: EnvBase) -> ProbabilisticActor:
    size = env.observation_spec["observation"].shape[-1]
    features = TensorDictModule(nn.Linear(size, 4), ["observation"], ["features"])
    head = TensorDictModule(GaussianPolicy(4, 1, (8,)), ["features"], ["loc", "scale"])
    return ProbabilisticActor(
        TensorDictSequential(features, head),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def collect(
    make: Callable[..., Any],
    make_policy: Callable[[EnvBase], Any],
    name: Any = "gym:Pendulum-v1",
    *,
    steps: int = 20,
    batches: int = 2,
    num_envs: int | None = 3,
    scaled: Literal["done", "termination"] | None = None,
    **kwargs: Any,
) -> tuple[Collector, list[TensorDictBase]]:
    """Some batches of a collector, with the random numbers of a seed."""
    torch.manual_seed(0)
    env = make_env(name, num_envs=num_envs, seed=0, **kwargs)
    if scaled:
        env.append_transform(ReturnStdScaling(0.99, reset=scaled))
    collector = make(env, make_policy(env), frames_per_batch=steps * (num_envs or 1))
    torch.manual_seed(1)
    return collector, [batch for _, batch in zip(range(batches), collector, strict=False)]


def entries(data: TensorDictBase) -> dict[Any, Tensor]:
    return dict(data.items(True, True))


def assert_same(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    assert (ours.batch_size, ours.names, ours.device) == (
        theirs.batch_size,
        theirs.names,
        theirs.device,
    )
    assert entries(ours).keys() == entries(theirs).keys()
    for key, tensor in entries(theirs).items():
        assert entries(ours)[key].is_contiguous()
        # Bit for bit where the alignment of memory is the same, on which products may depend.
        torch.testing.assert_close(entries(ours)[key], tensor, rtol=1e-5, atol=1e-5, msg=str(key))


def assert_as_torchrl(make_policy: Callable[[EnvBase], Any], **kwargs: Any) -> None:
    ours, our_batches = collect(DirectCollector, make_policy, **kwargs)
    our_random = torch.get_rng_state()
    theirs, their_batches = collect(partial(Collector, **TORCHRL), make_policy, **kwargs)
    assert torch.equal(our_random, torch.get_rng_state())
    for batch, expected in zip(our_batches, their_batches, strict=True):
        assert_same(batch, expected)
    assert ours._traj_pool.state_dict() == theirs._traj_pool.state_dict()
    kept = entries(ours._carrier)
    assert kept.keys() <= entries(theirs._carrier).keys()
    for key, tensor in kept.items():
        torch.testing.assert_close(tensor, theirs._carrier.get(key), rtol=1e-5, atol=1e-5)
    our_statistics, their_statistics = (c.env.transform.state_dict() for c in (ours, theirs))
    torch.testing.assert_close(our_statistics, their_statistics, rtol=1e-6, atol=1e-6)


# The same data as TorchRL's ----------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [None, 1, 3])
def test_gaussian_policy(num_envs: int | None) -> None:
    assert_as_torchrl(make_actor, num_envs=num_envs, max_episode_steps=9)


@pytest.mark.parametrize("num_envs", [None, 3])
def test_pink_noise(num_envs: int | None) -> None:
    def explorer(env: EnvBase) -> PinkNoiseActor:
        return PinkNoiseActor(make_actor(env))

    assert_as_torchrl(explorer, num_envs=num_envs, max_episode_steps=9)


@pytest.mark.parametrize("num_envs", [None, 3])
def test_statistics_staggering_and_limits(num_envs: int | None) -> None:
    assert_as_torchrl(make_actor, num_envs=num_envs, scaled="done", **NORMALISED)


@pytest.mark.parametrize("scaled", [None, "termination"])
def test_episodes_that_terminate(scaled: str | None) -> None:
    """The hopper falls, so that both kinds of ends occur, several at once among them."""
    limits = {"max_episode_steps": 11, "observation_norm": True}
    kwargs = {"name": "gym:Hopper-v5", "steps": 60, "num_envs": 3, "scaled": scaled, **limits}
    assert_as_torchrl(make_actor, **kwargs)
    following = collect(DirectCollector, make_actor, **kwargs)[1][0]["next"]
    assert following["terminated"].any()
    assert following["truncated"].any()
    assert torch.equal(following["done"], following["terminated"] | following["truncated"])


@pytest.mark.parametrize("make_policy", [make_mean, make_two_parts])
def test_policies_of_others(make_policy: Callable[[EnvBase], Any]) -> None:
    assert_as_torchrl(make_policy, max_episode_steps=9)


def test_squashed_policy() -> None:
    assert_as_torchrl(partial(make_actor, distribution_class=TanhNormal))


@pytest.mark.parametrize("num_envs", [None, 3])
def test_actions_of_several_parts(num_envs: int | None) -> None:
    def make_parted(env: EnvBase) -> Any:
        return make_policy(*single_specs(env), MPONetworkConfig(actor_sizes=(8,)))

    assert_as_torchrl(make_parted, name=Hybrid, num_envs=num_envs)
    collector, batches = collect(DirectCollector, make_parted, name=Hybrid, num_envs=num_envs)
    assert _acting(collector) is not None
    assert batches[0]["action", "tool"].shape[-1] == 3


def test_discrete_policy() -> None:
    assert_as_torchrl(make_logits_actor, name="gym:CartPole-v1", steps=50)


def test_frame_skip() -> None:
    assert_as_torchrl(make_actor, name="cartpole-swingup", frame_skip=3, max_episode_steps=5)


def test_mode_of_the_policy() -> None:
    """A collector that explores less is obeyed."""
    batches = []
    for make in (DirectCollector, partial(Collector, **TORCHRL)):
        env = make_env("gym:Pendulum-v1", num_envs=2, seed=0)
        torch.manual_seed(0)
        collector = make(env, make_actor(env), frames_per_batch=10)
        collector.exploration_type = ExplorationType.DETERMINISTIC
        batches.append(next(iter(collector)))
    assert_same(*batches)
    assert torch.equal(batches[0]["action"], batches[0]["loc"])


# What is in the data -----------------------------------------------------------------------------


def test_raw_actions_are_stored_and_scored() -> None:
    _, (batch, _) = collect(DirectCollector, make_actor)
    action, low, high = batch["action"], -2.0, 2.0
    assert ((action < low) | (action > high)).any()  # clipped on their way to the simulator only
    expected = IndependentNormal(batch["loc"], batch["scale"]).log_prob(action)
    torch.testing.assert_close(batch["action_log_prob"], expected)


def test_no_log_probabilities_unless_asked_for() -> None:
    _, (batch, _) = collect(DirectCollector, partial(make_actor, return_log_prob=False))
    assert "action_log_prob" not in batch.keys()


def test_trajectories_have_numbers_in_the_order_of_their_beginnings() -> None:
    """Limits of 4 and, for the second copy, a first episode of 2."""
    kwargs = {"num_envs": 2, "steps": 6, "max_episode_steps": 4, "staggered": True}
    collector, (first, second) = collect(DirectCollector, make_actor, **kwargs)
    ids = torch.cat([batch["collector", "traj_ids"] for batch in (first, second)], 1)
    assert ids.tolist() == [
        [0, 0, 0, 0, 3, 3, 3, 3, 5, 5, 5, 5],
        [1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6],
    ]
    starts = torch.cat([batch["is_init"] for batch in (first, second)], 1).squeeze(-1)
    assert starts[:, 1:].equal(ids[:, 1:] != ids[:, :-1])
    assert collector._carrier["collector", "traj_ids"].tolist() == [7, 6]


def test_batches_have_memory_of_their_own() -> None:
    collector, (first, _) = collect(DirectCollector, make_actor)
    before = first.clone()
    next(iter(collector))
    assert all(torch.equal(first.get(key), tensor) for key, tensor in entries(before).items())


# Its interface -----------------------------------------------------------------------------------


def test_weights_are_those_of_now() -> None:
    collector, _ = collect(DirectCollector, make_actor)
    network = collector.policy.module[0].module
    with torch.no_grad():
        network.loc.bias.fill_(5.0)
    assert next(iter(collector))["loc"].min() > 4.0
    weights = {name: torch.zeros_like(p) for name, p in collector.policy.state_dict().items()}
    collector.update_policy_weights_(TensorDict(weights).unflatten_keys("."))
    assert not next(iter(collector))["loc"].any()


def test_state_goes_to_another_collector() -> None:
    collector, _ = collect(DirectCollector, make_actor)
    other, _ = collect(DirectCollector, make_actor, batches=0)
    for parameter in other.policy.parameters():
        parameter.detach().zero_()
    other.load_state_dict(collector.state_dict())
    assert other._frames == collector._frames == 120
    for mine, its in zip(collector.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(mine, its)
    ids = next(iter(other))["collector", "traj_ids"]
    assert ids.min() >= 3  # new trajectories, as TorchRL has it


def test_stops_after_the_frames_asked_for() -> None:
    env = make_env("gym:Pendulum-v1", num_envs=2, seed=0)
    collector = DirectCollector(env, make_actor(env), frames_per_batch=20, total_frames=60)
    assert [batch.numel() for batch in collector] == [20, 20, 20]


def test_reset_begins_new_trajectories() -> None:
    collector, _ = collect(DirectCollector, make_actor)
    collector.reset()
    batch = next(iter(collector))
    assert batch["is_init"][:, 0].all()
    assert batch["step_count"][:, 0].eq(0).all()
    assert batch["collector", "traj_ids"].min() >= 3


def test_seeds_and_shutdown() -> None:
    batches = []
    for _ in range(2):
        collector, _ = collect(DirectCollector, make_actor, batches=1)
        collector.set_seed(7)
        collector.reset()
        torch.manual_seed(3)
        batches.append(next(iter(collector)))
        collector.shutdown()
        assert collector.closed
    assert torch.equal(batches[0]["observation"], batches[1]["observation"])


# What it leaves to TorchRL -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda env: env.append_transform(SignTransform(in_keys=["reward"])),
        lambda env: env.append_transform(StepCounter(step_count_key="more")),
        lambda env: env.append_transform(ReturnStdScaling(0.9, raw_key="other")),
    ],
)
def test_other_environments_are_stepped_by_torchrl(
    change: Callable[[TransformedEnv], EnvBase],
) -> None:
    known = make_env("gym:Pendulum-v1", num_envs=2, seed=0)
    assert ArrayRollout.of(known) is not None
    assert ArrayRollout.of(known.base_env) is None
    assert ArrayRollout.of(TransformedEnv(known.base_env, StepCounter())) is None
    env = change(known)
    assert ArrayRollout.of(env) is None
    batch = next(iter(DirectCollector(env, make_actor(env), frames_per_batch=10)))
    assert batch.shape == (2, 5)


def test_recurrent_policies_are_called_by_torchrl() -> None:
    env = make_env("gym:Pendulum-v1", num_envs=2, seed=0)
    lstm = LSTMModule(3, 4, in_key="observation", out_key="features")
    env.append_transform(lstm.make_tensordict_primer())
    policy = TensorDictSequential(lstm, TensorDictModule(nn.Linear(4, 1), ["features"], ["action"]))
    batch = next(iter(DirectCollector(env, policy, frames_per_batch=10)))
    assert torch.equal(
        batch["recurrent_state_h"][:, 1:], batch["next", "recurrent_state_h"][:, :-1]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"distribution_class": TanhNormal},
        {"distribution_kwargs": {"tanh_loc": True}},
        {"num_samples": 2},
        {"generator": 3},
        {"out_keys": ["other"]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_only_plain_gaussians_are_called_without_a_tensordict(change: dict[str, Any]) -> None:
    env = make_env("gym:Pendulum-v1", num_envs=2, seed=0)
    assert plain_gaussian(make_actor(env)) is not None
    assert plain_gaussian(make_actor(env, **change)) is None


def test_hooks_of_a_policy_are_called() -> None:
    calls = []
    collector, _ = collect(DirectCollector, make_actor, batches=0)
    collector.policy.register_forward_hook(lambda *args: calls.append(1))
    next(iter(collector))
    assert len(calls) == 20
