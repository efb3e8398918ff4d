"""The target of Retrace: by hand, in its limits, and what its parts see of the data."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch import Tensor, nn
from torchrl.data import (
    Bounded,
    Composite,
    LazyTensorStorage,
    SliceSampler,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, OneHotCategorical, ProbabilisticActor
from torchrl.objectives.value import TD0Estimator, TD1Estimator

from minerva_torchrl.objectives import Retrace
from tests.objectives.value.retrace_problem import (
    ACTION,
    GAMMA,
    OBSERVATION,
    TRACES,
    UNIT,
    expected_target,
    make_actor,
    make_critic,
    make_data,
    make_retrace,
    next_value_of,
    seeded,
    with_values,
)

# The recursion ------------------------------------------------------------------------------------

# Discount 1/2, lambda 4/5. The temporal differences are 2, 1 and 1; the ratios of the second and
# third step are 1/2 and 2, their probabilities 1/4 and 1/2; those of the first must not matter.
BY_HAND = {
    "retrace": [2 + 0.5 * 0.4 * (1 + 0.5 * 0.8), 1 + 0.5 * 0.8, 1],
    "importance": [2 + 0.5 * 0.5 * (1 + 0.5 * 2), 1 + 0.5 * 2, 1],
    "tree_backup": [2 + 0.5 * 0.2 * (1 + 0.5 * 0.4), 1 + 0.5 * 0.4, 1],
    "q_lambda": [2 + 0.5 * 0.8 * (1 + 0.5 * 0.8), 1 + 0.5 * 0.8, 1],
}


@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("trace", TRACES)
def test_every_trace_by_hand(trace: str, vectorized: bool) -> None:
    probability = torch.tensor([0.9, 0.25, 0.5])
    actor = ProbabilisticActor(
        TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    retrace = make_retrace(
        gamma=0.5,
        lmbda=0.8,
        value_network=None,
        actor_network=None if trace == "q_lambda" else actor,
        trace=trace,
        vectorized=vectorized,
    )
    value = torch.tensor([[1.0], [2.0], [3.0]])
    data = TensorDict(
        {
            "observation": torch.stack([probability, 1 - probability], -1).log(),
            "action": torch.tensor([1, 0]).expand(3, 2),
            "action_log_prob": torch.tensor([0.1, 0.5, 0.25]).log(),
            "state_action_value": value,
            "next": {
                "state_action_value": torch.tensor([[4.0], [6.0], [8.0]]),
                "reward": torch.tensor([[1.0], [0.0], [0.0]]),
                "done": torch.zeros(3, 1, dtype=torch.bool),
            },
        },
        [3],
    )
    data = data.select(*retrace.in_keys, strict=False)  # what it says that it reads is enough
    assert ("action_log_prob" in data.keys()) == (trace in ("retrace", "importance"))
    retrace(data)
    expected = torch.tensor(BY_HAND[trace]).unsqueeze(-1)
    torch.testing.assert_close(data["advantage"], expected)
    torch.testing.assert_close(data["value_target"], value + expected)


@pytest.mark.parametrize("trace", ["retrace", "tree_backup", "q_lambda"])
def test_lambda_zero_is_td0(trace: str) -> None:
    retrace, data = make_retrace(lmbda=0.0, trace=trace), make_data()
    td0 = TD0Estimator(gamma=GAMMA, value_network=None)
    expected = td0.value_estimate(data, next_value=next_value_of(data))
    target = retrace.value_estimate(data, next_value=next_value_of(data))
    torch.testing.assert_close(target, expected)


@pytest.mark.parametrize("trace", ["retrace", "importance", "q_lambda"])
def test_on_policy_lambda_one_is_td1(trace: str) -> None:
    """With a critic that does not look at the action, so that its errors telescope."""
    state_value = nn.Linear(OBSERVATION, 1)
    critic = TensorDictModule(
        lambda observation, action: state_value(observation),
        in_keys=["observation", "action"],
        out_keys=["state_action_value"],
    )
    actor, data = make_actor(), make_data()
    within = ~data["next", "done"][:, :-1]
    data["next", "observation"][:, :-1] = torch.where(
        within, data["observation"][:, 1:], data["next", "observation"][:, :-1]
    )
    data["action_log_prob"] = actor.get_dist(data).log_prob(data["action"]).detach()
    retrace = make_retrace(value_network=critic, actor_network=actor, lmbda=1.0, trace=trace)
    td1 = TD1Estimator(
        gamma=GAMMA,
        value_network=TensorDictModule(state_value, ["observation"], ["state_value"]),
    )
    expected = td1(data.clone())
    retrace(data)
    torch.testing.assert_close(data["value_target"], expected["value_target"])
    torch.testing.assert_close(data["advantage"], expected["advantage"])


def test_concatenated_trajectories_equal_split_ones() -> None:
    retrace = make_retrace()
    pieces = [make_data(2, length, seed=length, ends=False) for length in (3, 1, 4)]
    for piece, terminated in zip(pieces, (True, False, False), strict=True):
        piece["next", "done"][:, -1] = True
        piece["next", "terminated"][:, -1] = terminated
    split = [retrace.value_estimate(piece, next_value=next_value_of(piece)) for piece in pieces]
    joined = torch.cat(pieces, 1)
    found = retrace.value_estimate(joined, next_value=next_value_of(joined))
    torch.testing.assert_close(found, torch.cat(split, 1))


def test_ends_of_sampled_slices_do_not_leak() -> None:
    stored = make_data(60, ends=False)
    stored["collector", "traj_ids"] = torch.arange(60) // 20
    stored["next", "done"][19::20] = stored["next", "terminated"][19::20] = True
    stored["next", "truncated"] = torch.zeros(60, 1, dtype=torch.bool)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60),
        sampler=SliceSampler(slice_len=5, traj_key=("collector", "traj_ids")),
        batch_size=40,
    )
    buffer.extend(stored)
    flat = buffer.sample()
    retrace = make_retrace()
    in_one_row = retrace.value_estimate(flat, next_value=next_value_of(flat))
    data = flat.reshape(-1, 5)
    target = retrace.value_estimate(data, next_value=next_value_of(data))
    torch.testing.assert_close(in_one_row.reshape(-1, 5, 1), target)
    last = data[:, -1]
    bootstrap = GAMMA * ~last["next", "terminated"] * next_value_of(last)
    torch.testing.assert_close(target[:, -1], last["next", "reward"] + bootstrap)


# Values of the next state -------------------------------------------------------------------------


@pytest.mark.parametrize("deactivate_vmap", [True, False])
def test_expectation_is_the_mean_over_sampled_actions(deactivate_vmap: bool) -> None:
    retrace = make_retrace(num_samples=5, action_spec=UNIT, deactivate_vmap=deactivate_vmap)
    data = make_data()
    with set_exploration_type(ExplorationType.DETERMINISTIC):  # samples all the same
        target = seeded(retrace.value_estimate, data)
    action = seeded(retrace.actor_network.get_dist(data["next"]).sample, (5,)).clamp(-1, 1)
    observation = data["next", "observation"].expand(5, 4, 7, OBSERVATION)
    next_value = retrace.value_network.module(observation, action).mean(0)
    torch.testing.assert_close(target, retrace.value_estimate(data, next_value=next_value))
    torch.testing.assert_close(target, expected_target(retrace, data, next_value, clip=True))


def test_many_samples_approach_the_expectation() -> None:
    critic = TensorDictModule(
        lambda x, a: (x.sum(-1) + a.sum(-1)).unsqueeze(-1),
        in_keys=["observation", "action"],
        out_keys=["state_action_value"],
    )
    retrace = make_retrace(value_network=critic, actor_network=make_actor(), num_samples=20_000)
    data = make_data(2, 3)
    mean_action = retrace.actor_network.get_dist(data["next"]).mean
    next_value = next_value_of(data) + mean_action.sum(-1, keepdim=True)
    expected = retrace.value_estimate(data, next_value=next_value)
    torch.testing.assert_close(retrace.value_estimate(data), expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("one_hot", [True, False])
def test_discrete_actions(one_hot: bool) -> None:
    """Values 0 and 1 of two actions: the expectation is the probability of the second."""
    actor = ProbabilisticActor(
        TensorDictModule(nn.Linear(OBSERVATION, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical if one_hot else torch.distributions.Categorical,
    )
    critic = TensorDictModule(
        lambda _, action: (action[..., 1:] if one_hot else action.unsqueeze(-1)).float(),
        in_keys=["observation", "action"],
        out_keys=["state_action_value"],
    )
    retrace = make_retrace(value_network=critic, actor_network=actor, num_samples=20_000)
    data = make_data(2, 3)
    data["action"] = actor.get_dist(data).sample()
    probability = actor.get_dist(data["next"]).probs[..., 1:]
    retrace(data)
    written = data["next", "state_action_value"]
    torch.testing.assert_close(written, probability, rtol=0, atol=0.02)
    expected = retrace.value_estimate(data, next_value=written)
    torch.testing.assert_close(data["value_target"], expected)


def test_composite_distribution_of_one_action() -> None:
    """It is that action's distribution; several actions are refused."""
    plain, critic = make_actor(), make_critic()

    def make_composite(*actions: str) -> Retrace:
        heads = [("params", action, name) for action in actions for name in ("loc", "scale")]
        network = TensorDictModule(
            lambda observation: plain[0].module(observation) * len(actions),
            in_keys=["observation"],
            out_keys=heads,
        )
        actor = ProbabilisticActor(
            network,
            in_keys=["params"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": dict.fromkeys(actions, IndependentNormal)},
        )
        return make_retrace(value_network=critic, actor_network=actor)

    expected = seeded(make_retrace(value_network=critic, actor_network=plain), make_data())
    found = seeded(make_composite("action"), make_data())
    torch.testing.assert_close(found["value_target"], expected["value_target"])
    with pytest.raises(NotImplementedError, match=r"one action, got \['action', 'gear'\]"):
        make_composite("action", "gear")(make_data())


def test_recurrent_networks_see_where_next_trajectories_begin() -> None:
    critic = TensorDictModule(
        lambda observation, action, is_init: is_init.float(),
        in_keys=["observation", "action", "is_init"],
        out_keys=["state_action_value"],
    )
    data = make_data(1, 5, ends=False)
    data["is_init"] = torch.tensor([True, False, False, True, False]).reshape(1, 5, 1)
    data["next", "is_init"] = torch.zeros(1, 5, 1, dtype=torch.bool)
    make_retrace(value_network=critic, actor_network=make_actor())(data)
    torch.testing.assert_close(data["next", "state_action_value"], data["is_init"].float())
    assert not data["next", "is_init"].any()  # as it was


# Actions ------------------------------------------------------------------------------------------


def test_scores_the_stored_raw_action() -> None:
    retrace, data = make_retrace(action_spec=UNIT), make_data(ends=False)
    log_pi = retrace.actor_network.get_dist(data).log_prob(data["action"]).detach()
    data["action_log_prob"] = log_pi + 0.5  # ratios below one are not clipped
    values = {"next_value": next_value_of(data)}

    def targets(action: float) -> tuple[Tensor, Tensor]:
        moved = data.clone()
        moved["action"][:, 3] = action
        return (
            retrace.value_estimate(moved, **values)[:, :3],
            retrace.value_estimate(moved, **values, log_pi=log_pi)[:, :3],
        )

    (far, far_at_fixed_ratio), (further, further_at_fixed_ratio) = targets(1.5), targets(2.5)
    (inside, inside_at_fixed_ratio) = targets(0.5)
    # The critic sees the clipped action, the ratio the raw one.
    torch.testing.assert_close(far_at_fixed_ratio, further_at_fixed_ratio, rtol=0, atol=0)
    assert not torch.isclose(far, further).any()
    assert not torch.isclose(inside_at_fixed_ratio, far_at_fixed_ratio).any()
    assert not torch.isclose(inside, far).any()


SPECS = {
    "tensor": UNIT,
    "composite": Composite(action=UNIT),
    "batch of environments": Bounded(-1.0, 1.0, (4, ACTION)),
    "double": Bounded(-1.0, 1.0, (ACTION,), dtype=torch.float64),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("source", ["argument", "actor"])
def test_clips_to_the_spec(spec, source: str) -> None:
    retrace = make_retrace(
        value_network=make_critic(),
        actor_network=make_actor(spec=spec if source == "actor" else None),
        action_spec=spec if source == "argument" else None,
    )
    data = make_data()
    target = retrace.value_estimate(data, next_value=next_value_of(data))
    expected = expected_target(retrace, data, next_value_of(data), clip=True)
    torch.testing.assert_close(target, expected)


@pytest.mark.parametrize("spec", [None, Unbounded((ACTION,)), Bounded(-100.0, 100.0, (ACTION,))])
def test_clips_to_nothing_else(spec) -> None:
    # A spec that is given wins over that of the actor.
    actor = make_actor(spec=None if spec is None else UNIT)
    retrace = make_retrace(value_network=make_critic(), actor_network=actor, action_spec=spec)
    data = make_data()
    target = retrace.value_estimate(data, next_value=next_value_of(data))
    torch.testing.assert_close(target, expected_target(retrace, data, next_value_of(data)))


# Advantages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", [(), (1,)])
def test_advantages_are_standardised_within_groups(feature: tuple[int, ...]) -> None:
    data = with_values(make_data())
    networks = {"value_network": None, "actor_network": make_actor()}
    plain = make_retrace(**networks)(data.clone())
    whole = make_retrace(**networks, average_adv=True)(data.clone())
    advantage = plain["advantage"]
    expected = (advantage - advantage.mean()) / advantage.std()
    torch.testing.assert_close(whole["advantage"], expected)
    torch.testing.assert_close(whole["value_target"], plain["value_target"])

    task = torch.tensor([0, 0, 5, 5]).unsqueeze(-1).repeat(1, 7)
    task[0, 0] = 3  # alone in its group
    data["task"] = task.reshape(4, 7, *feature)
    grouped = make_retrace(**networks, average_adv=True, group_key="task")
    assert "task" in grouped.in_keys
    grouped(data)
    for number, count in ((0, 13), (5, 14)):
        members = data["advantage"][task == number]
        assert len(members) == count
        assert members.mean().abs() < 1e-6
        assert math.isclose(members.std(), 1.0, rel_tol=1e-5)
    assert data["advantage"][0, 0] == 0
    torch.testing.assert_close(data["value_target"], plain["value_target"])
    with pytest.raises(KeyError, match="group_key 'task' is missing"):
        grouped(data.exclude("task"))
