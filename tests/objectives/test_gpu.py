"""The losses on a CUDA device: everything moves, and nothing waits for the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import SoftUpdate

from minerva_torchrl import MPOLoss, VMPOLoss
from minerva_torchrl.modules import ControlTorso, GaussianPolicy, StateActionCritic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def no_host_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_actor() -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(GaussianPolicy(3, 2, (32, 32)), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-1, 1, (2,)),
        distribution_class=IndependentNormal,
        return_log_prob=True,
    ).cuda()


def make_data(actor: ProbabilisticActor) -> TensorDict:
    end = torch.zeros(4, 5, 1, dtype=torch.bool)
    data = TensorDict(
        {
            "observation": torch.randn(4, 5, 3),
            "next": {
                "observation": torch.randn(4, 5, 3),
                "reward": torch.randn(4, 5, 1),
                "done": end,
                "terminated": end,
            },
        },
        [4, 5],
    ).cuda()
    with torch.no_grad():
        return actor(data)


@pytest.mark.parametrize("estimator", ["td0", "retrace"])
def test_mpo_never_waits(estimator: str, request: pytest.FixtureRequest) -> None:
    actor = make_actor()
    critic = ValueOperator(StateActionCritic(3, 2, (32, 32)), in_keys=["observation", "action"])
    loss = MPOLoss(actor, critic.cuda()).make_value_estimator(estimator)
    SoftUpdate(loss, tau=0.01)
    data = make_data(actor)
    loss(data.clone())  # checks of the data are made once
    request.getfixturevalue("no_host_sync")
    output = loss(data)
    sum(value for key, value in output.items() if key.startswith("loss_")).backward()


def test_vmpo_never_waits(request: pytest.FixtureRequest) -> None:
    actor = make_actor()
    value = torch.nn.Sequential(ControlTorso(3, (32, 32)), torch.nn.Linear(32, 1))
    loss = VMPOLoss(actor, ValueOperator(value, in_keys=["observation"]).cuda())
    data = make_data(actor)
    loss(data)
    request.getfixturevalue("no_host_sync")
    output = loss(data)
    sum(value for key, value in output.items() if key.startswith("loss_")).backward()
