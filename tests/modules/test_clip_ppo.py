"""DirectClipPPOLoss is ClipPPOLoss by a shorter way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import OneHotCategorical, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

from minerva_torchrl.modules import DirectClipPPOLoss
from minerva_torchrl.objectives.ppo import estimate_advantage, make_ppo_loss
from tests.objectives.ppo_problem import make_actor, make_critic, make_networks, make_rollout


def make_losses(**kwargs: Any) -> tuple[ClipPPOLoss, DirectClipPPOLoss, TensorDict]:
    """Both losses on the same networks, and a minibatch of an older policy."""
    torch.manual_seed(0)
    policy, critic = make_networks()
    actor, value = make_actor(policy), make_critic(critic)
    theirs = make_ppo_loss(actor, value, **kwargs)
    assert type(theirs) is ClipPPOLoss
    ours = make_ppo_loss(actor, value, loss_class=DirectClipPPOLoss, **kwargs)
    minibatch = estimate_advantage(theirs, make_rollout(actor, seed=1)).reshape(-1)
    with torch.no_grad():
        for parameter in (*policy.parameters(), *critic.parameters()):
            parameter.add_(0.05 * torch.randn_like(parameter))
    return theirs, ours, minibatch


def gradients(loss: ClipPPOLoss, output: TensorDict) -> list[torch.Tensor]:
    loss.zero_grad()
    total = sum(value for name, value in output.items() if name.startswith("loss_"))
    total.sum().backward()
    grads = [(parameter, parameter.grad) for parameter in loss.parameters()]
    return [torch.zeros_like(p) if grad is None else grad.clone() for p, grad in grads]


def assert_same(theirs: ClipPPOLoss, ours: DirectClipPPOLoss, data: TensorDict) -> None:
    expected, actual = theirs(data.copy()), ours(data.copy())
    assert set(actual.keys()) == set(expected.keys())
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-7, msg=name)
    alone, losses = ours.losses(data.copy()), {k for k in actual.keys() if k.startswith("loss_")}
    assert losses - alone.keys() <= (set() if ours.entropy_coeff.any() else {"loss_entropy"})
    torch.testing.assert_close(alone, {name: actual[name] for name in alone}, rtol=0, atol=0)
    for a, b in zip(gradients(ours, actual), gradients(theirs, expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.fixture
def torchrls_way(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows by one entry with every minibatch that takes TorchRL's way."""
    taken: list[bool] = []
    inherited = ClipPPOLoss.forward

    def forward(self: ClipPPOLoss, tensordict: TensorDict) -> TensorDict:
        if isinstance(self, DirectClipPPOLoss):
            taken.append(True)
        return inherited(self, tensordict)

    monkeypatch.setattr(ClipPPOLoss, "forward", forward)
    return taken


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"clip_value": False},
        {"clip_value": 0.05},
        {"entropy_coeff": 0.02},
        {"value_coeff": 0.0},
        {"normalize_advantage": False},
        {"reduction": "sum"},
        {"separate_losses": True},
        {"clip_epsilon": 0.01},
    ],
    ids=str,
)
def test_same_numbers_and_gradients(kwargs: dict[str, Any], torchrls_way: list[bool]) -> None:
    assert_same(*make_losses(**kwargs))
    assert not torchrls_way


@pytest.mark.parametrize("special", ["mask", "none", "keys", "no advantage"])
def test_special_minibatches_take_torchrls_way(special: str, torchrls_way: list[bool]) -> None:
    theirs, ours, data = make_losses(**{"reduction": "none"} if special == "none" else {})
    if special == "mask":
        data["collector", "mask"] = torch.rand(data.shape) < 0.7
    elif special == "keys":
        data["nested", "log_prob"] = data["action_log_prob"]
        for loss in (theirs, ours):
            loss.set_keys(sample_log_prob=("nested", "log_prob"))
    elif special == "no advantage":
        del data["advantage"]
    assert_same(theirs, ours, data)
    assert torchrls_way


def test_discrete_actions(torchrls_way: list[bool]) -> None:
    torch.manual_seed(0)
    network = nn.Linear(3, 4)
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    theirs = make_ppo_loss(actor, critic)
    ours = make_ppo_loss(actor, critic, loss_class=DirectClipPPOLoss)
    with torch.no_grad():
        data = actor(TensorDict({"observation": torch.randn(32, 3)}, [32]))
        network.weight.add_(0.3)
    for key in ("advantage", "value_target", "state_value"):
        data[key] = torch.randn(32, 1)
    assert_same(theirs, ours, data)
    assert not torchrls_way


@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")  # TorchRL samples it, and says so
def test_policy_without_a_formula_for_its_entropy_runs_once(torchrls_way: list[bool]) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    loss = make_ppo_loss(actor, critic, loss_class=DirectClipPPOLoss)
    with torch.no_grad():
        data = actor(TensorDict({"observation": torch.randn(32, 3)}, [32]))
    for key in ("advantage", "value_target", "state_value"):
        data[key] = torch.randn(32, 1)
    calls: list[int] = []
    network.register_forward_hook(lambda *_: calls.append(1))
    output = loss(data)
    assert len(calls) == 1
    assert not torchrls_way
    assert output["entropy"].isfinite()


def test_parameters_of_the_loss_and_not_of_the_module() -> None:
    """The networks in a loss may hold other parameters than the loss trains."""
    theirs, ours, data = make_losses()
    for network in (ours.actor_network, ours.critic_network):
        for module in network.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.zeros_like(parameter)))
    assert_same(theirs, ours, data)


def test_input_is_unchanged() -> None:
    _, ours, data = make_losses()
    before = data.clone()
    ours(data)
    assert set(data.keys(True, True)) == set(before.keys(True, True))
    assert (data == before).all()
