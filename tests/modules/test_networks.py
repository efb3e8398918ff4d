from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import SoftUpdate

from minerva_torchrl import MPOLoss
from minerva_torchrl.modules import ControlTorso, GaussianPolicy, StateActionCritic


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
        seen = []

        def repeated(x: Tensor) -> Tensor:
            seen.append(tuple(x.shape))
            return x

        monkeypatch.setattr("minerva_torchrl.modules.networks._without_repeats", repeated)
        output = loss(data)
        assert (20, 16, 3) in seen
        for key in expected.keys():
            torch.testing.assert_close(output[key], expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ControlTorso(3, ()), "sizes must have at least one layer"),
        (lambda: ControlTorso(0, (8,)), "must be at least 1, got 0"),
        (lambda: GaussianPolicy(3, 0, (8,)), "action_dim must be at least 1, got 0"),
        (lambda: GaussianPolicy(3, 1, (8,), init_scale=0.0), "init_scale must be positive"),
        (lambda: GaussianPolicy(3, 1, (8,), min_scale=-1.0), "min_scale must be positive"),
        (lambda: StateActionCritic(0, 1, (8,)), "obs_dim must be at least 1"),
    ],
)
def test_rejects(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
