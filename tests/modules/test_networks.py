from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import SoftUpdate

from minerva_torchrl import MPOLoss
from minerva_torchrl.modules import (
    ControlTorso,
    DirectModule,
    GaussianPolicy,
    StateActionCritic,
    StateIndependentScale,
    TanhInterval,
    networks,
)


def plain_torso(torso: ControlTorso, x: Tensor) -> Tensor:
    """The torso layer by layer from its weights."""
    x = x @ torso.first.weight.T + torso.first.bias
    norm = torso.rest[0]
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
    x = torch.tanh(x * norm.weight + norm.bias)
    for layer in torso.rest:
        if isinstance(layer, nn.Linear):
            x = nn.functional.elu(x @ layer.weight.T + layer.bias)
    return x


@pytest.mark.parametrize("sizes", [(8,), (8, 6), (8, 6, 4)])
def test_torso_with_and_without_gradients(sizes: tuple[int, ...]) -> None:
    torso = ControlTorso(3, sizes).double()
    x = 5 * torch.randn(7, 3, dtype=torch.float64)
    expected = plain_torso(torso, x)
    assert expected.shape == (7, sizes[-1])
    torch.testing.assert_close(torso(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(torso(x), expected)


def test_torso_in_single_precision_is_as_good_without_gradients() -> None:
    torso = ControlTorso(3, (64, 64))
    x = torch.randn(1000, 3)
    with_gradients = torso(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(torso(x), with_gradients, rtol=1e-4, atol=2e-6)


def test_policy_starts_at_zero_mean_and_the_given_scale() -> None:
    policy = GaussianPolicy(3, 2, (64, 64), init_scale=0.7, min_scale=1e-3)
    loc, scale = policy(100 * torch.randn(50, 3))
    assert loc.abs().max() < 0.1
    assert (scale - 0.701).abs().max() < 0.05


def test_policy_scale_has_a_floor() -> None:
    policy = GaussianPolicy(3, 2, (8,), min_scale=0.01)
    nn.init.constant_(policy.scale.bias, -1e4)
    _, scale = policy(torch.randn(5, 3))
    torch.testing.assert_close(scale, torch.full((5, 2), 0.01))


class TestCritic:
    def test_equals_the_concatenated_form(self) -> None:
        critic = StateActionCritic(3, 2, (8, 6)).double()
        observation, action = torch.randn(5, 3).double(), torch.randn(5, 2).double()
        joint = torch.cat([observation, action], -1)
        expected = critic.head(plain_torso(critic.torso, joint))
        torch.testing.assert_close(critic(observation, action), expected)

    @pytest.mark.parametrize("batch", [(5,), (5, 4)])
    def test_expanded_observation_is_computed_once(
        self, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        critic = StateActionCritic(3, 2, (8, 6)).double()
        observation = torch.randn(*batch, 3).double()
        action = torch.randn(20, *batch, 2).double()
        expanded = observation.expand(20, *batch, 3)
        expected = critic(expanded.contiguous(), action)
        shapes = []
        linear = nn.functional.linear

        def recorded(x: Tensor, *args: Tensor) -> Tensor:
            shapes.append(tuple(x.shape))
            return linear(x, *args)

        monkeypatch.setattr(nn.functional, "linear", recorded)
        torch.testing.assert_close(critic(expanded, action), expected)
        assert shapes[0] == (*batch, 3)

    @pytest.mark.parametrize("num_qvalue_nets", [1, 2])
    def test_inside_a_loss(self, num_qvalue_nets: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shared and repeated observations give the same losses."""
        actor = ProbabilisticActor(
            TensorDictModule(GaussianPolicy(3, 2, (8,)), ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            spec=Bounded(-1, 1, (2,)),
            distribution_class=IndependentNormal,
        )
        critic = ValueOperator(StateActionCritic(3, 2, (8, 6)), in_keys=["observation", "action"])
        loss = MPOLoss(actor, critic, num_qvalue_nets=num_qvalue_nets)
        SoftUpdate(loss, tau=0.1)
        noise = torch.randn(20, 16, 2)
        loss.policy._draw_noise = lambda num_samples, like: noise
        end = torch.zeros(16, 1, dtype=torch.bool)
        following = {"observation": torch.randn(16, 3), "reward": torch.randn(16, 1)}
        data = {"observation": torch.randn(16, 3), "action": torch.randn(16, 2)}
        data = TensorDict({**data, "next": {**following, "done": end, "terminated": end}}, [16])
        expected = loss(data)
        for rows in (1, 16 * 3, 16 * 20, None):
            if rows is None:
                monkeypatch.setattr(networks, "_without_repeats", lambda x: x)
            else:
                monkeypatch.setattr(networks, "_ROWS_PER_CHUNK", rows)
            output = loss(data)
            for key in expected.keys():
                torch.testing.assert_close(output[key], expected[key], rtol=1e-4, atol=1e-5)


class TestChunks:
    """Many actions at each state are scored a few at a time."""

    @pytest.fixture
    def sizes(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Grows by the number of actions per state with every pass through the torso."""
        sizes: list[int] = []
        rest = nn.Sequential.forward

        def recorded(self: nn.Sequential, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return rest(self, x)

        monkeypatch.setattr(nn.Sequential, "forward", recorded)
        monkeypatch.setattr(networks, "_ROWS_PER_CHUNK", 12)
        return sizes

    def make(self, n: int, *batch: int) -> tuple[StateActionCritic, Tensor, Tensor, Tensor]:
        """A critic, expanded observations, actions, and their values one by one."""
        critic = StateActionCritic(3, 2, (8, 6)).double()
        observation = torch.randn(*batch, 3).double().expand(n, *batch, 3)
        action = torch.randn(n, *batch, 2).double()
        expected = critic(observation.contiguous(), action).detach()
        return critic, observation, action, expected

    @pytest.mark.parametrize(
        ("n", "batch", "chunks"),
        [
            (6, (4,), [3, 3]),
            (7, (4,), [3, 3, 1]),  # the last one is smaller
            (3, (4,), [3]),
            (2, (4,), [2]),
            (5, (2, 3), [2, 2, 1]),
            (2, (20,), [1, 1]),  # never less than one action
            (5, (), [5]),
            (1, (4,), [1]),
            (4, (0,), [4]),
        ],
    )
    def test_values_and_sizes(
        self, n: int, batch: tuple[int, ...], chunks: list[int], sizes: list[int]
    ) -> None:
        critic, observation, action, expected = self.make(n, *batch)
        sizes.clear()
        with torch.no_grad():
            actual = critic(observation, action)
        torch.testing.assert_close(actual, expected)
        assert sizes == chunks

    def test_not_with_gradients(self, sizes: list[int]) -> None:
        critic, observation, action, expected = self.make(7, 4)
        sizes.clear()
        action.requires_grad_()
        value = critic(observation, action)
        assert sizes == [7]
        torch.testing.assert_close(value, expected)
        actual = torch.autograd.grad(value.square().sum(), [action, *critic.parameters()])
        plain = critic(observation.contiguous(), action)
        gradients = torch.autograd.grad(plain.square().sum(), [action, *critic.parameters()])
        for left, right in zip(actual, gradients, strict=True):
            torch.testing.assert_close(left, right)

    def test_not_for_one_action_at_each_state(self, sizes: list[int]) -> None:
        critic, observation, action, expected = self.make(7, 4)
        sizes.clear()
        with torch.no_grad():
            torch.testing.assert_close(critic(observation.contiguous(), action), expected)
        assert sizes == [7]

    def test_not_in_compiled_code(self, sizes: list[int]) -> None:
        critic, observation, action, expected = self.make(7, 4)
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        with torch.no_grad():
            actual = torch.compile(critic, backend=backend, fullgraph=True)(observation, action)
        torch.testing.assert_close(actual, expected)
        assert not any("cat" in str(node.target) for node in graphs[0].graph.nodes)

    def test_ensemble(self, sizes: list[int]) -> None:
        """Parameters stacked, under ``torch.vmap``."""
        critics = [self.make(7, 4)[0] for _ in range(3)]
        _, observation, action, _ = self.make(7, 4)
        expected = torch.stack([critic(observation.contiguous(), action) for critic in critics])
        stacked = torch.func.stack_module_state(critics)

        def call(*state: Any) -> Tensor:
            return torch.func.functional_call(critics[0], state, (observation, action))

        sizes.clear()
        with torch.no_grad():
            torch.testing.assert_close(torch.vmap(call)(*stacked), expected)
        assert sizes == [3, 3, 1]

    def test_through_a_tensordict_module(self, sizes: list[int]) -> None:
        """Expanded with its TensorDict, an observation is still computed once."""
        critic, observation, action, expected = self.make(7, 4)
        keys = {"in_keys": ["observation", "action"], "out_keys": ["state_action_value"]}
        states = TensorDict({"observation": observation[0]}, [4])
        sizes.clear()
        for module in (DirectModule(critic, **keys), ValueOperator(critic, **keys)):
            with torch.no_grad():
                data = module(states.expand(7, 4).set("action", action))
            torch.testing.assert_close(data["state_action_value"], expected)
        assert sizes == [3, 3, 1] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ControlTorso(3, ()), "sizes must have at least one layer"),
        (lambda: ControlTorso(0, (8,)), "must be at least 1, got 0"),
        (lambda: GaussianPolicy(3, 0, (8,)), "action_dim must be at least 1, got 0"),
        (lambda: GaussianPolicy(3, 1, (8,), init_scale=0.0), "init_scale must be positive"),
        (lambda: GaussianPolicy(3, 1, (8,), min_scale=-1.0), "min_scale must be positive"),
        (lambda: GaussianPolicy(3, 1, (8,), scale_gain=0.0), "scale_gain must be positive"),
        (lambda: StateActionCritic(0, 1, (8,)), "obs_dim must be at least 1"),
    ],
)
def test_rejects(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class TestVariants:
    @pytest.mark.parametrize("activation", ["elu", "relu", "tanh"])
    @pytest.mark.parametrize("layer_norm", [False, True])
    @pytest.mark.parametrize("every", [False, True])
    def test_torso(self, activation: Any, layer_norm: bool, every: bool) -> None:
        settings: Any = {"activation": activation, "layer_norm": layer_norm}
        torso = ControlTorso(3, (8, 6), norm_every_layer=every, **settings).double()
        x = torch.randn(7, 3, dtype=torch.float64)
        function = {"elu": nn.functional.elu, "relu": torch.relu, "tanh": torch.tanh}[activation]
        hidden = torso.first(x)
        if layer_norm or every:
            hidden = nn.functional.layer_norm(hidden, (8,))
        hidden = torch.tanh(hidden) if layer_norm else function(hidden)
        (last,) = (layer for layer in torso.rest if isinstance(layer, nn.Linear))
        expected = last(hidden)
        expected = function(nn.functional.layer_norm(expected, (6,)) if every else expected)
        torch.testing.assert_close(torso(x), expected)
        with torch.no_grad():
            torch.testing.assert_close(torso(x), expected)

    def test_critic_without_layer_norm(self) -> None:
        critic = StateActionCritic(3, 2, (8, 6), activation="relu", layer_norm=False).double()
        observation, action = torch.randn(5, 3).double(), torch.randn(20, 5, 2).double()
        expanded = observation.expand(20, 5, 3)
        expected = critic.head(critic.torso(torch.cat([expanded, action], -1)))
        torch.testing.assert_close(critic(expanded, action), expected)
        with torch.no_grad():
            torch.testing.assert_close(critic(expanded, action), expected)

    def test_exponential_scale_between_bounds(self) -> None:
        policy = GaussianPolicy(
            3, 3, (8,), scale_function="exp", init_scale=0.5, min_scale=0.1, max_scale=2.0
        )
        nn.init.zeros_(policy.scale.weight)
        policy.scale.bias.data = torch.tensor([0.3, -1e4, 1e4])
        _, scale = policy(torch.randn(5, 3))
        expected = torch.tensor([0.5 * math.exp(0.3), 0.1, 2.0])
        torch.testing.assert_close(scale, expected.expand(5, 3))
        scale.sum().backward()
        assert policy.scale.bias.grad.tolist() == pytest.approx([5 * expected[0].item(), 0.0, 0.0])

    @pytest.mark.parametrize("function", ["softplus", "exp"])
    def test_gain_of_the_scale(self, function: Any) -> None:
        """It starts as without one, and a change of the layer's output counts ``gain`` times."""
        policy = GaussianPolicy(
            3, 2, (8,), init_scale=0.5, scale_function=function, scale_gain=0.3, min_scale=1e-9
        ).double()
        nn.init.zeros_(policy.scale.weight)
        observation = torch.randn(5, 3, dtype=torch.float64)
        torch.testing.assert_close(policy(observation)[1], torch.full((5, 2), 0.5).double())
        nn.init.constant_(policy.scale.bias, 2.0)
        expected = {"exp": 0.5 * math.exp(0.6), "softplus": 0.5 * math.log2(1 + math.exp(0.6))}
        torch.testing.assert_close(
            policy(observation)[1], torch.full((5, 2), expected[function]).double()
        )

    def test_softplus_scale_has_a_ceiling(self) -> None:
        policy = GaussianPolicy(3, 2, (8,), max_scale=1.0)
        nn.init.constant_(policy.scale.bias, 50.0)
        assert policy(torch.randn(5, 3))[1].eq(1).all()

    def test_gain_of_a_free_scale(self) -> None:
        head = StateIndependentScale(nn.Linear(3, 2), 2, init_scale=0.4, scale_gain=0.3)
        torch.testing.assert_close(head(torch.randn(5, 3))[1], torch.full((5, 2), 0.4))
        head.log_scale.data += 2.0
        expected = torch.full((5, 2), 0.4 * math.exp(0.6))
        torch.testing.assert_close(head(torch.randn(5, 3))[1], expected)

    def test_free_scale_between_bounds(self) -> None:
        head = StateIndependentScale(nn.Linear(3, 3), 3, min_scale=0.1, max_scale=2.0)
        head.log_scale.data = torch.tensor([0.3, -50.0, 50.0])
        _, scale = head(torch.randn(5, 3))
        torch.testing.assert_close(scale[0], torch.tensor([math.exp(0.3), 0.1, 2.0]))

    @pytest.mark.parametrize("arguments", [{"min_scale": 0.9}, {"max_scale": 0.2}])
    def test_initial_scale_outside_the_bounds(self, arguments: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=r"init_scale must lie between .*, got 0.5, "):
            GaussianPolicy(3, 2, (8,), init_scale=0.5, **arguments)

    def test_bounded_mean(self) -> None:
        low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0])
        policy = GaussianPolicy(3, 2, (8,), loc_activation=TanhInterval(low, high))
        observation = torch.randn(5, 3)
        loc, _ = policy(observation)
        raw = policy.loc(policy.torso(observation))
        torch.testing.assert_close(loc, low + (high - low) * (raw.tanh() + 1) / 2)
        assert not [name for name in policy.state_dict() if "loc_activation" in name]

    def test_interval_without_end(self) -> None:
        with pytest.raises(ValueError, match="low and high must be finite"):
            TanhInterval(torch.zeros(1), torch.tensor([math.inf]))
