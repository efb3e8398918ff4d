"""What a loss asks of its critic, whatever the network reads and writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ValueOperator

from minerva_torchrl import MPOLoss
from minerva_torchrl.objectives.critics import (
    ActionValueCritic,
    AllActionsCritic,
    SingleActionCritic,
    make_ensemble,
)
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    assert_equal,
    make_actor,
    make_critic,
    make_transitions,
    run,
    with_updater,
)
from tests.objectives.discrete_problem import (
    CRITICS,
    KINDS,
    NUM_ACTIONS,
    ActionTable,
    DiscreteProblem,
    make_discrete_actor,
    make_discrete_critic,
    make_discrete_data,
)

BATCH, MEMBERS = (3, 2), 2


@pytest.fixture
def tables() -> list[ActionTable]:
    torch.manual_seed(0)
    return [ActionTable(OBSERVATION_DIM, NUM_ACTIONS) for _ in range(MEMBERS)]


def evaluate(tables: list[ActionTable], inputs: TensorDictBase) -> Tensor:
    """What an ensemble writes: the value of the action that it is given, or of all."""
    action = inputs.get("action", None)
    return torch.stack([table(inputs["observation"], action) for table in tables])


def make_part(kind: str) -> ActionValueCritic:
    if kind == "all actions":
        return AllActionsCritic("action_value")
    return SingleActionCritic("state_action_value", "action")


def make_states() -> TensorDict:
    return TensorDict({"observation": torch.randn(*BATCH, OBSERVATION_DIM)}, BATCH)


# The parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("kind", CRITICS)
def test_values(kind: str, one_hot: bool, tables: list[ActionTable]) -> None:
    """One action per state, and all candidates, by every member of the ensemble."""
    critic, states = make_part(kind), make_states()
    values = torch.stack([table(states["observation"]) for table in tables])  # [K, *B, A]
    index = torch.randint(NUM_ACTIONS, BATCH)
    action = nn.functional.one_hot(index, NUM_ACTIONS) if one_hot else index
    of_action = critic.of_action(partial(evaluate, tables), states, action)
    looked_up = values.gather(-1, index.expand(MEMBERS, *BATCH).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(of_action, looked_up)
    index = torch.arange(NUM_ACTIONS).view(-1, 1, 1).expand(NUM_ACTIONS, *BATCH)
    action = nn.functional.one_hot(index, NUM_ACTIONS) if one_hot else index
    of_candidates = critic.of_candidates(partial(evaluate, tables), states, action)
    torch.testing.assert_close(of_candidates, values.movedim(-1, 1))
    assert set(states.keys()) == {"observation"}, "the states are left as they are"


@pytest.mark.parametrize("of", ["of_action", "of_candidates"])
def test_networks_are_called_once(of: str, tables: list[ActionTable]) -> None:
    """The states of candidates are views of the states, without copies."""
    states, seen = make_states(), []

    def watched(inputs: TensorDictBase) -> Tensor:
        seen.append(inputs["observation"])
        return evaluate(tables, inputs)

    action = torch.zeros(BATCH, dtype=torch.long)
    if of == "of_candidates":
        action = action.expand(NUM_ACTIONS, *BATCH)
    for kind in CRITICS:
        getattr(make_part(kind), of)(watched, states, action)
    assert len(seen) == 2
    assert all(x.data_ptr() == states["observation"].data_ptr() for x in seen)


@pytest.mark.parametrize(
    ("kind", "of", "shape", "message"),
    [
        (
            "single action",
            "of_action",
            (3, 2),
            r"'state_action_value' .* \(3, 2, 1\), got \(3, 2\)",
        ),
        ("single action", "of_action", (3, 2, 4), r"of shape \(3, 2, 1\), got \(3, 2, 4\)"),
        ("single action", "of_candidates", (4, 3, 2), r"\(4, 3, 2, 1\), got \(4, 3, 2\)"),
        (
            "all actions",
            "of_candidates",
            (3, 2, 1),
            r"'action_value' .* \(3, 2, 4\), got \(3, 2, 1",
        ),
        ("all actions", "of_candidates", (3, 2, 5), r"of shape \(3, 2, 4\), got \(3, 2, 5\)"),
    ],
)
def test_rejects_shapes(kind: str, of: str, shape: tuple[int, ...], message: str) -> None:
    critic, action = make_part(kind), torch.zeros(BATCH, dtype=torch.long)
    if of == "of_candidates":
        action = action.expand(NUM_ACTIONS, *BATCH)
    with pytest.raises(ValueError, match=f"qvalue_network must write .*{message}"):
        getattr(critic, of)(lambda _: torch.zeros(MEMBERS, *shape), make_states(), action)


# In a loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value_key", ["q", ("agent", "q")])
@pytest.mark.parametrize("critic", CRITICS)
def test_other_value_keys(critic: str, value_key: Any, kind: str) -> None:
    """Whatever the entry is called: a critic that reads no action has the values of all."""
    data = make_discrete_data(kind, 9)
    torch.manual_seed(0)
    policy = nn.Linear(OBSERVATION_DIM, NUM_ACTIONS).double()
    network = ActionTable(OBSERVATION_DIM, NUM_ACTIONS).double()
    outputs = []
    for key in (None, value_key):
        loss = MPOLoss(
            make_discrete_actor(kind, policy), make_discrete_critic(critic, network, key)
        )
        outputs.append(with_updater(loss)(data.clone()))
    assert_equal(*outputs)
    keys = loss.tensor_keys
    assert value_key == (keys.action_value if critic == "all actions" else keys.state_action_value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [1, NUM_ACTIONS + 1])
def test_rejects_all_actions_of_other_number(outputs: int, kind: str) -> None:
    actor = make_discrete_actor(kind, nn.Linear(OBSERVATION_DIM, NUM_ACTIONS).double())
    network = nn.Linear(OBSERVATION_DIM, outputs).double()
    with pytest.raises(ValueError, match=rf"write 4 actions x 1 outputs .* layer of {outputs}"):
        MPOLoss(actor, make_discrete_critic("all actions", network))
    hidden = ActionTable(OBSERVATION_DIM, outputs).double()  # a layer with a forward of its own
    loss = with_updater(MPOLoss(actor, make_discrete_critic("all actions", hidden)))
    message = rf"qvalue_network must write 'action_value' of shape \(9, 4\), got \(9, {outputs}\)"
    with pytest.raises(ValueError, match=message):
        loss(make_discrete_data(kind, 9))


def test_rejects_continuous_critic_without_action() -> None:
    """It would have the same value for every sample."""
    network, message = (
        nn.Linear(OBSERVATION_DIM, 1),
        r"critic of states.* in_keys=\[..., 'action'\]",
    )
    for name in ("state_value", "state_action_value", "action_value"):
        critic = ValueOperator(network, in_keys=["observation"], out_keys=[name])
        with pytest.raises(ValueError, match=message):
            MPOLoss(make_actor(), critic)


def test_rejects_discrete_critic_of_states() -> None:
    actor = make_discrete_actor("categorical", nn.Linear(OBSERVATION_DIM, NUM_ACTIONS))
    for name in ("state_value", "state_action_value"):
        network = nn.Linear(OBSERVATION_DIM, 1)
        critic = ValueOperator(network, in_keys=["observation"], out_keys=[name])
        with pytest.raises(ValueError, match=r"one that writes .* all actions as 'action_value'"):
            MPOLoss(actor, critic)


@pytest.mark.parametrize("critic", CRITICS)
def test_ensemble_reduction(critic: str) -> None:
    """The target is the smallest or the mean value of the members at every action."""
    data = make_discrete_data("categorical", 9)
    for reduction, reduce in (("min", torch.amin), ("mean", torch.mean)):
        problem = DiscreteProblem("categorical", critic, num_critics=3, qvalue_reduction=reduction)
        observation = data["next", "observation"]
        values = torch.stack([table(observation) for table in problem.target_tables])
        samples, _ = problem.loss._sample(data["next"].select("observation"), 1)
        torch.testing.assert_close(samples["scores", "value"], reduce(values, 0).detach())


def test_list_of_one_is_a_single_critic() -> None:
    outputs = []
    for as_list in (False, True):
        torch.manual_seed(0)
        actor, critic = make_actor(), make_critic()
        loss = with_updater(MPOLoss(actor, [critic] if as_list else critic))
        assert loss.num_qvalue_nets == 1
        outputs.append(run(loss, make_transitions(8)))
    assert_equal(*outputs, 0, 0)


def test_make_ensemble() -> None:
    critic = make_critic()
    first, second = make_ensemble(critic, 2)
    assert first is critic
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert p.shape == q.shape
        assert not torch.equal(p, q)
    members = [make_critic(), make_critic()]
    assert make_ensemble(members, 1) == make_ensemble(tuple(members), 2) == members
    with pytest.raises(ValueError, match=r"must not share parameters .*'module.network.0.weight'"):
        make_ensemble([critic, critic], 1)
    assert len(make_ensemble([critic, critic], 1, critic.parameters())) == 2
    with pytest.raises(ValueError, match=r"num_qvalue_nets=3 contradicts a list of 2 critics"):
        make_ensemble(members, 3)
    with pytest.raises(TypeError, match=r"must be a TensorDictModule .*got Linear"):
        make_ensemble([nn.Linear(OBSERVATION_DIM + ACTION_DIM, 1)], 1)


def test_critic_of_several_outputs() -> None:
    """The one with a known name is taken."""

    class Twice(ActionTable):
        def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
            values = super().forward(observation)
            return values.amax(-1, keepdim=True), values

    torch.manual_seed(0)
    network = Twice(OBSERVATION_DIM, NUM_ACTIONS).double()
    names = ["state_value", "action_value"]
    critic = TensorDictModule(network, ["observation"], names)
    actor = make_discrete_actor("categorical", nn.Linear(OBSERVATION_DIM, NUM_ACTIONS).double())
    data = make_discrete_data("categorical", 9)
    output = with_updater(MPOLoss(actor, critic))(data)
    plain = ActionTable(OBSERVATION_DIM, NUM_ACTIONS).double()
    plain.load_state_dict(network.state_dict())
    other = with_updater(MPOLoss(actor, make_discrete_critic("all actions", plain)))
    assert_equal(output, other(data))
