"""MPOLoss without host synchronisation, compiled, and in use on a problem with a known optimum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.objectives import HardUpdate

from minerva_torchrl import MPOLoss, MPOOptimizationStepper
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    assert_equal,
    compiles,
    gradients,
    make_actor,
    make_critic,
    make_transitions,
    total_loss,
    with_updater,
)
from tests.objectives.discrete_problem import (
    NUM_ACTIONS,
    ActionTable,
    make_discrete_actor,
    make_discrete_critic,
    make_discrete_data,
)

POLICY_STATES = ["next", "current", "both"]


# Meta device -------------------------------------------------------------------------------------


# The other estimators of TorchRL read their inputs on the host.
@pytest.mark.parametrize("td_est", [None, "retrace"])
@pytest.mark.parametrize("policy_states", POLICY_STATES)
# TorchRL's updaters read the targets on the host.
@pytest.mark.filterwarnings("ignore:No target network updater has been associated:UserWarning")
def test_mpo_meta(policy_states: Any, td_est: Any) -> None:
    """Tensors on the meta device have no values: whatever reads one on the host fails."""
    actor, critics = make_actor().to("meta"), [make_critic().to("meta") for _ in range(2)]
    loss = MPOLoss(actor, critics, policy_states=policy_states)
    loss.make_value_estimator(td_est)
    data = make_transitions(4, 3).to("meta")
    output = loss(data)
    assert all(value.is_meta and value.shape == () for value in output.values())
    total_loss(output).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in loss.parameters())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"temperature_update": "solve"},
        {"skip_done_states": True},
        {"sequence_steps": "first"},
        {"reduction": "none", "scalar_output_mode": "exclude"},
        {"per_dim_constraining": False},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:No target network updater has been associated:UserWarning")
def test_mpo_meta_options(kwargs: dict[str, Any]) -> None:
    spec = Bounded(-1.0, 1.0, (ACTION_DIM,))
    actor, critic = make_actor(spec=None).to("meta"), make_critic().to("meta")
    loss = MPOLoss(actor, critic, action_spec=spec, policy_states="both", **kwargs)
    data = make_transitions(4, 3)
    data["collector", "mask"] = torch.ones(4, 3, dtype=torch.bool)
    data["priority_weight"] = torch.ones(4, 3)
    total_loss(loss(data.to("meta"))).backward()


@pytest.mark.parametrize("critic", ["all actions", "single action"])
@pytest.mark.parametrize("td_est", [None, "retrace"])
@pytest.mark.filterwarnings("ignore:No target network updater has been associated:UserWarning")
def test_mpo_meta_discrete(td_est: Any, critic: str) -> None:
    network = nn.Linear(OBSERVATION_DIM, NUM_ACTIONS, dtype=torch.float64, device="meta")
    table = ActionTable(OBSERVATION_DIM, NUM_ACTIONS, dtype=torch.float64, device="meta")
    actor = make_discrete_actor("one-hot", network)
    loss = MPOLoss(actor, make_discrete_critic(critic, table), policy_states="both")
    loss.make_value_estimator(td_est)
    output = loss(make_discrete_data("one-hot", 4, 3).to("meta"))
    assert all(value.is_meta and value.shape == () for value in output.values())
    total_loss(output).backward()


# Compilation -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "td_est", "kwargs"),
    [
        pytest.param("inductor", None, {}, marks=pytest.mark.slow),
        # Code generation takes most of the time; this checks the graph that it starts from.
        pytest.param(
            "aot_eager",
            "retrace",
            {"num_qvalue_nets": 2, "policy_states": "both"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["default", "retrace"],
)
@compiles
def test_mpo_compile(backend: str, td_est: Any, kwargs: dict[str, Any]) -> None:
    """The compiled loss has no graph break and gives the values and gradients of the plain one."""
    torch.manual_seed(0)
    loss = MPOLoss(make_actor(), make_critic(), num_action_samples=5, **kwargs)
    with_updater(loss.make_value_estimator(td_est))
    with torch.no_grad():
        for parameter in loss.actor_network_params.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    data = make_transitions(4, 3)
    noise = torch.randn(5, 4, 3, ACTION_DIM)
    loss.policy._draw_noise = lambda num_samples, like: noise
    plain = loss(data.clone())
    expected = gradients(loss, total_loss(plain))
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for _ in range(2):
        inputs = data.clone()
        output = compiled(inputs)
        assert_equal(output, plain, rtol=1e-4, atol=1e-5)
        assert_equal(gradients(loss, total_loss(output)), expected, rtol=1e-4, atol=1e-5)
        assert inputs["td_error"].shape == inputs.shape


# Known optimum -----------------------------------------------------------------------------------


class Distance(nn.Module):
    """Q(s, a) = -|a - a*(s)|^2 with a*(s) = s / 2; its parameter has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        error = (action - observation / 2).square().sum(-1, keepdim=True)
        return -error + 0 * self.unused


class LinearPolicy(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.loc = nn.Linear(dim, dim)
        self.scale = AddStateIndependentNormalScale(dim)
        nn.init.zeros_(self.loc.weight)
        nn.init.constant_(self.loc.bias, -0.5)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale(self.loc(observation))


@pytest.mark.slow
def test_mpo_bandit() -> None:
    """With a known critic the policy finds the best actions and keeps to its constraints."""
    torch.manual_seed(0)
    dim, period, steps = 2, 10, 600
    policy = LinearPolicy(dim)
    loss = MPOLoss(
        make_actor(policy, spec=Bounded(-1.0, 1.0, (dim,))),
        make_critic(Distance()),
        policy_states="current",
        epsilon=0.1,
        epsilon_mean=1e-4,
        epsilon_stddev=1e-4,
        init_alpha_mean=1.0,
        init_alpha_stddev=10.0,
    )
    updater = HardUpdate(loss, value_network_update_interval=period - 1)
    stepper = MPOOptimizationStepper(
        torch.optim.SGD(loss.qvalue_network_params.parameters(), lr=0.0),
        torch.optim.Adam(policy.parameters(), lr=5e-3),
        torch.optim.Adam(loss.dual_parameters(), lr=5e-2),
    )
    never = torch.zeros(32, 1, dtype=torch.bool)
    history = []
    for _ in range(steps):
        observation = 2 * torch.rand(32, dim) - 1
        following = {"observation": observation, "reward": torch.zeros(32, 1)}
        following |= {"done": never, "terminated": never}
        data = {"observation": observation, "action": torch.zeros(32, dim), "next": following}
        history.append(stepper.update(loss, TensorDict(data, [32])))
        updater.step()
    observation = 2 * torch.rand(256, dim) - 1
    error = (policy(observation)[0] - observation / 2).abs()
    assert error.max() < 0.2
    # The first multipliers are too small for such tight bounds, so that they have to adapt.
    metrics = torch.stack(history)
    for name in ("kl_mean_rel", "kl_stddev_rel"):
        assert metrics[name].max() > 3
        assert 0.5 < metrics[name][steps // 2 :].mean() < 1.5
    assert 0.8 < metrics["kl_q_rel"][steps // 2 :].mean() < 1.2
    # The standard deviations shrink, but slowly.
    assert 0.2 < metrics["stddev_max"][-1] < metrics["stddev_max"][0]
