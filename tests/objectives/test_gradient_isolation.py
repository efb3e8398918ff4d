"""One backward pass of the sum of all losses gives every parameter the gradient of its own loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives.common import LossModule

from minerva_torchrl import MPOLoss, VMPOLoss, make_ppo_loss
from minerva_torchrl.objectives import estimate_advantage
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    Concatenate,
    InjectedNoise,
    make_mlp,
    make_transitions,
    total_loss,
    with_updater,
)
from tests.objectives.discrete_problem import DiscreteProblem, make_discrete_data
from tests.objectives.mpo_problem import NUM_SAMPLES, Problem, make_data, make_noise
from tests.objectives.vmpo_problem import KINDS as VMPO_KINDS
from tests.objectives.vmpo_problem import Problem as VMPOProblem

ALGORITHMS = ["mpo", "vmpo", "ppo"]
HIDDEN = 6


def backward(loss_module: LossModule, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters by one backward pass; those that it does not reach are absent."""
    loss_module.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    named = loss_module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_isolated(
    loss_module: LossModule, output: TensorDict, own: dict[str, str], shared: tuple[str, ...] = ()
) -> dict[str, dict[str, Tensor]]:
    """Each unshared parameter gets from the sum, bit for bit, what its own loss gives it.

    ``own`` has the beginning of the names of a loss's parameters. Returns gradients by loss.
    """
    by_loss = {key: backward(loss_module, output[key]) for key in own if output[key].requires_grad}
    by_sum = backward(loss_module, total_loss(output))
    learnable = {name for name, p in loss_module.named_parameters() if p.requires_grad}
    assert set(by_sum) == learnable
    for name in learnable - set(shared):
        (key,) = [key for key in by_loss if name in by_loss[key]]
        assert name.startswith(own[key]), f"{key} gives gradient to {name}"
        assert by_sum[name].any(), name
        assert torch.equal(by_sum[name], by_loss[key][name]), name
    return by_loss | {"sum": by_sum}


# Networks of their own ---------------------------------------------------------------------------


@pytest.mark.parametrize("td_est", [None, "retrace"])
@pytest.mark.parametrize("num_critics", [1, 2])
@pytest.mark.parametrize("kwargs", [{}, {"policy_states": "both", "per_dim_constraining": False}])
def test_mpo(kwargs: dict[str, Any], num_critics: int, td_est: Any) -> None:
    loss, data = Problem(td_est, num_critics=num_critics, **kwargs).loss, make_data(4, 3)
    own = {f"loss_{name}": f"duals.{name}." for name in loss.duals}
    own |= {"loss_actor": "actor_network_params.", "loss_qvalue": "qvalue_network_params."}
    assert_isolated(loss, loss(data), own)


@pytest.mark.parametrize("critic", ["all actions", "single action"])
def test_mpo_discrete(critic: str) -> None:
    loss = DiscreteProblem("one-hot", critic, num_critics=2).loss
    own = {f"loss_{name}": f"duals.{name}." for name in loss.duals}
    own |= {"loss_actor": "actor_network_params.", "loss_qvalue": "qvalue_network_params."}
    assert_isolated(loss, loss(make_discrete_data("one-hot", 9)), own)


def test_mpo_phases() -> None:
    """What the phases give one by one, the whole gives at once."""
    loss, data, noise = Problem(num_critics=2).loss, make_data(9), make_noise(NUM_SAMPLES, 9)
    loss.policy._draw_noise = InjectedNoise(noise, noise)
    together = backward(loss, total_loss(loss(data)))
    with_e_step, _ = loss.e_step(data)
    in_turn = {}
    for phase in (loss.qvalue_loss, loss.dual_loss, loss.actor_loss):
        reached = backward(loss, phase(with_e_step)[0])
        assert reached
        assert not set(reached) & set(in_turn)
        in_turn |= reached
    assert set(in_turn) == set(together)
    for name, gradient in together.items():
        assert torch.equal(gradient, in_turn[name]), name


@pytest.mark.parametrize("temperature_update", ["solve", "gradient"])
@pytest.mark.parametrize("kind", VMPO_KINDS)
def test_vmpo(kind: str, temperature_update: Any) -> None:
    problem = VMPOProblem(kind, temperature_update=temperature_update)
    loss, data = problem.loss, problem.data()
    own = {f"loss_{name}": f"duals.{name}." for name in loss.duals}
    own |= {"loss_actor": "actor_network_params.", "loss_critic": "critic_network_params."}
    assert_isolated(loss, loss(data), own)
    # The same on a part of the samples, and by phases.
    part = loss.e_step(data)[0].reshape(-1)[[0, 3, 5, 8]]
    together = backward(loss, total_loss(loss.training_loss(part)))
    in_turn: dict[str, Tensor] = {}
    for phase in (loss.networks_loss, loss.dual_loss):
        in_turn |= backward(loss, phase(part)[0])
    assert set(in_turn) == set(together)
    for name, gradient in together.items():
        assert torch.equal(gradient, in_turn[name]), name
    apart = {
        **backward(loss, loss.actor_loss(part)[0]),
        **backward(loss, loss.critic_loss(part)[0]),
    }
    assert all(torch.equal(gradient, in_turn[name]) for name, gradient in apart.items())


# A shared trunk ----------------------------------------------------------------------------------


def make_shared(
    algorithm: str, separate_losses: bool, num_critics: int = 1
) -> tuple[LossModule, TensorDict]:
    """A loss whose actor and critic begin with the same layer, and its data."""
    torch.manual_seed(0)
    trunk = TensorDictModule(nn.Linear(OBSERVATION_DIM, HIDDEN), ["observation"], ["hidden"])
    head = nn.Sequential(make_mlp(HIDDEN, 2 * ACTION_DIM), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictSequential(trunk, TensorDictModule(head, ["hidden"], ["loc", "scale"])),
        in_keys=["loc", "scale"],
        spec=Bounded(-1, 1, (ACTION_DIM,)),
        distribution_class=IndependentNormal,
        return_log_prob=True,
    ).double()
    data = make_transitions(4, 3, dtype=torch.float64)
    if algorithm == "mpo":
        heads = [Concatenate(make_mlp(HIDDEN + ACTION_DIM, 1)) for _ in range(num_critics)]
        values = [ValueOperator(value, in_keys=["hidden", "action"]) for value in heads]
        critics = [TensorDictSequential(trunk, value).double() for value in values]
        loss = with_updater(MPOLoss(actor, critics, separate_losses=separate_losses)).double()
    else:
        value = ValueOperator(make_mlp(HIDDEN, 1), in_keys=["hidden"])
        critic = TensorDictSequential(trunk, value).double()
        with torch.no_grad():
            data = actor(data.exclude("action", "action_log_prob")).exclude("hidden")
        if algorithm == "vmpo":
            loss = VMPOLoss(
                actor, critic, separate_losses=separate_losses, temperature_update="gradient"
            ).double()
        else:
            settings = {"entropy_coeff": 0.01, "separate_losses": separate_losses}
            loss = make_ppo_loss(actor, critic, **settings)
            data = estimate_advantage(loss, data).reshape(-1)
    with torch.no_grad():  # away from the policy that the divergences are measured from
        for parameter in loss.actor_network_params.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return loss, data


def losses_by_side(algorithm: str, output: TensorDict) -> tuple[Tensor, Tensor]:
    """Losses of the policy and of the critic."""
    if algorithm == "ppo":
        return output["loss_objective"] + output["loss_entropy"], output["loss_critic"]
    critic = "loss_qvalue" if algorithm == "mpo" else "loss_critic"
    return output["loss_actor"], output[critic]


@pytest.mark.parametrize("separate_losses", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shared_trunk(algorithm: str, separate_losses: bool) -> None:
    """Shared parameters get both gradients, or with ``separate_losses`` the policy's only."""
    loss, data = make_shared(algorithm, separate_losses)
    output = loss(data)
    by_policy, by_critic = (backward(loss, x) for x in losses_by_side(algorithm, output))
    by_sum = backward(loss, total_loss(output))
    names = [name for name, _ in loss.named_parameters()]
    weight = (HIDDEN, OBSERVATION_DIM)
    trunk = {n for n, p in loss.named_parameters() if p.shape == weight}
    trunk |= {name.replace("weight", "bias") for name in trunk}
    assert len(trunk) == 2, names
    for name in trunk:
        assert by_policy[name].any()
        if separate_losses:
            assert name not in by_critic
            assert torch.equal(by_sum[name], by_policy[name])
        else:
            assert by_critic[name].any()
            expected = by_policy[name] + by_critic[name]
            torch.testing.assert_close(by_sum[name], expected, rtol=1e-12, atol=1e-12)
    duals = {name for name in names if name.startswith("duals.")}
    heads = set(names) - trunk - duals
    assert heads == (set(by_policy) | set(by_critic)) - trunk
    assert not (set(by_policy) & set(by_critic)) - trunk
    for name in heads:
        own = by_policy if name in by_policy else by_critic
        assert torch.equal(by_sum[name], own[name]), name


@pytest.mark.parametrize("separate_losses", [False, True])
def test_trunk_of_an_ensemble(separate_losses: bool) -> None:
    """The same where every critic of an ensemble begins with the actor's layer."""
    loss, data = make_shared("mpo", separate_losses, num_critics=2)
    output = loss(data)
    by_actor, by_critic = (backward(loss, output[k]) for k in ("loss_actor", "loss_qvalue"))
    by_sum = backward(loss, total_loss(output))
    assert all(name.startswith("actor_network_params") for name in by_actor)
    for name, gradient in by_critic.items():
        if name.startswith("qvalue_network_params"):
            assert torch.equal(by_sum[name], gradient), name
    shared = set(by_actor) & set(by_critic)
    assert len(shared) == (0 if separate_losses else 2)
    for name, gradient in by_actor.items():
        expected = gradient + by_critic[name] if name in shared else gradient
        torch.testing.assert_close(by_sum[name], expected, rtol=1e-12, atol=1e-12)
    # The critics follow the shared layer, whoever trains it.
    before = output["pred_value"]
    with torch.no_grad():
        loss.actor_network_params["module", "0", "module", "0", "module", "bias"].add_(1.0)
    assert not torch.isclose(loss(data)["pred_value"], before)


# PPO ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_value", [True, False])
def test_ppo(clip_value: bool) -> None:
    """The objective and the entropy train the policy, the value loss the critic."""
    torch.manual_seed(0)
    network = nn.Sequential(make_mlp(OBSERVATION_DIM, 2 * ACTION_DIM), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    ).double()
    critic = ValueOperator(make_mlp(OBSERVATION_DIM, 1), in_keys=["observation"]).double()
    loss = make_ppo_loss(actor, critic, entropy_coeff=0.01, clip_value=clip_value)
    data = make_transitions(4, 3, dtype=torch.float64).exclude("action", "action_log_prob")
    with torch.no_grad():
        data = estimate_advantage(loss, actor(data)).reshape(-1)
        for parameter in actor.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    output = loss(data)
    assert {key for key in output.keys() if key.startswith("loss_")} == {
        "loss_objective", "loss_critic", "loss_entropy"
    }  # fmt: skip
    by_policy = backward(loss, output["loss_objective"] + output["loss_entropy"])
    by_critic = backward(loss, output["loss_critic"])
    by_sum = backward(loss, total_loss(output))
    assert all(name.startswith("actor_network_params") for name in by_policy)
    assert all(name.startswith("critic_network_params") for name in by_critic)
    assert set(by_sum) == set(by_policy) | set(by_critic)
    for name, gradient in by_sum.items():
        assert gradient.any()
        own = by_policy if name in by_policy else by_critic
        assert torch.equal(gradient, own[name]), name
