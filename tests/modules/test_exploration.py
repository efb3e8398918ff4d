"""PinkNoiseActor: correlated over time, one by one as the policy says, and part of a run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, OneHotCategorical, ProbabilisticActor, TanhNormal

from minerva_torchrl.algorithms.parted import FullNormal
from minerva_torchrl.modules import CholeskyPolicy, GaussianPolicy, PinkNoiseActor


def make_actor(distribution: type = IndependentNormal, **kwargs: Any) -> ProbabilisticActor:
    torch.manual_seed(0)
    keys, network = ["loc", "scale"], GaussianPolicy(3, 2, (8,))
    if distribution is FullNormal:
        keys, network = ["loc", "scale_tril"], CholeskyPolicy(3, 2, (8,))
    elif distribution is OneHotCategorical:
        keys, network = ["logits"], nn.Linear(3, 2)
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        return_log_prob=True,
        **kwargs,
    )


def observations(*shape: int) -> TensorDict:
    return TensorDict(observation=torch.zeros(*shape, 3), batch_size=shape)


@set_exploration_type(ExplorationType.RANDOM)
@torch.no_grad()
def act(actor: Any, data: TensorDict) -> TensorDict:
    return actor(data)


def noise(steps: int, copies: int, **kwargs: Any) -> Tensor:
    """``[T, K]``."""
    torch.manual_seed(1)
    actor = PinkNoiseActor(make_actor(), **kwargs)
    return torch.stack([actor.draw(torch.zeros(copies)) for _ in range(steps)])


def test_every_step_is_standard_normal() -> None:
    drawn = noise(300, 20_000)
    for step in (0, 1, 17, 299):  # from the first one on
        torch.testing.assert_close(drawn[step].mean().item(), 0.0, atol=0.03, rtol=0)
        torch.testing.assert_close(drawn[step].std().item(), 1.0, atol=0.03, rtol=0)
        torch.testing.assert_close((drawn[step] ** 4).mean().item(), 3.0, atol=0.2, rtol=0)


def test_octaves_have_the_same_power() -> None:
    drawn = noise(4096, 200)
    power = torch.fft.rfft(drawn, dim=0).abs().square().mean(1)
    octaves = torch.stack([power[n : 2 * n].sum() for n in (8, 16, 32, 64, 128, 256)])
    assert octaves.max() < 1.35 * octaves.min()
    white = torch.fft.rfft(torch.randn(4096, 200), dim=0).abs().square().mean(1)
    assert white[256:512].sum() > 20 * white[8:16].sum()  # what the test would see otherwise


def test_correlations_are_those_of_the_equation() -> None:
    drawn = noise(200, 40_000, octaves=4)
    decay = torch.exp(-1 / torch.tensor([1.0, 2.0, 4.0, 8.0]))
    for lag in (1, 3, 10):
        expected = (decay**lag).mean()
        measured = (drawn[100] * drawn[100 + lag]).mean()
        torch.testing.assert_close(measured, expected, atol=0.02, rtol=0)


def test_copies_and_dimensions_are_independent() -> None:
    actor = PinkNoiseActor(make_actor())
    drawn = torch.stack([actor.draw(torch.zeros(2, 2)) for _ in range(40_000)]).flatten(1)
    shared = torch.corrcoef(drawn.T) - torch.eye(4)
    assert shared.abs().max() < 0.15  # correlated over time: fewer samples than they seem


@pytest.mark.parametrize("distribution", [IndependentNormal, TanhNormal, FullNormal])
def test_actions_have_the_distribution_of_the_policy(distribution: type) -> None:
    actor = make_actor(distribution)
    explorer = PinkNoiseActor(actor)
    assert (explorer.in_keys, explorer.out_keys) == (actor.in_keys, actor.out_keys)
    for _ in range(3):
        data = act(explorer, observations(20_000))
    expected = act(actor, observations(20_000))
    assert data.keys() == expected.keys()
    for measure in (Tensor.mean, Tensor.std):
        mine, theirs = measure(data["action"], 0), measure(expected["action"], 0)
        torch.testing.assert_close(mine, theirs, atol=0.02, rtol=0)
    covariance = [torch.cov(entry["action"].T) for entry in (data, expected)]
    torch.testing.assert_close(*covariance, atol=0.02, rtol=0)
    with torch.no_grad():
        log_prob = actor.get_dist(data).log_prob(data["action"])
    torch.testing.assert_close(data["action_log_prob"], log_prob)


def test_full_covariance_turns_the_noise() -> None:
    actor = make_actor(FullNormal)
    with torch.no_grad():
        dict(actor.named_parameters())["module.0.module.below.bias"] += 1.0
    data = act(PinkNoiseActor(actor), observations(20_000))
    expected = data["scale_tril"][0] @ data["scale_tril"][0].T
    assert expected[0, 1].abs() > 0.1
    torch.testing.assert_close(torch.cov(data["action"].T), expected, atol=0.05, rtol=0.05)


def test_the_mode_has_no_noise() -> None:
    actor = make_actor()
    explorer = PinkNoiseActor(actor)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        data = explorer(observations(4))
    assert torch.equal(data["action"], data["loc"])
    assert explorer.processes is None


def test_weights_are_shared_and_have_the_same_names() -> None:
    actor = make_actor()
    explorer = PinkNoiseActor(actor)
    act(explorer, observations(4))
    ours, theirs = TensorDict.from_module(explorer), TensorDict.from_module(actor)
    assert list(ours.keys(True, True)) == list(theirs.keys(True, True))
    for key, tensor in theirs.items(True, True):
        assert ours[key] is tensor
    assert explorer.state_dict().keys() == actor.state_dict().keys()  # the noise is not among them


def test_other_copies_start_anew_and_states_can_be_carried_over() -> None:
    explorer = PinkNoiseActor(make_actor())
    for _ in range(3):
        act(explorer, observations(4))
    other = copy.deepcopy(explorer)
    other.processes = explorer.processes
    torch.manual_seed(3)
    expected = act(explorer, observations(4))
    torch.manual_seed(3)
    assert torch.equal(act(other, observations(4))["action"], expected["action"])
    act(explorer, observations(5))
    assert explorer.processes is not None
    assert explorer.processes.shape == (9, 5, 2)


def test_tensors_instead_of_a_tensordict() -> None:
    explorer = PinkNoiseActor(make_actor())
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        loc, _, action, log_prob = explorer(observation=torch.zeros(4, 3))
    assert not torch.equal(action, loc)
    assert log_prob.shape == (4,)


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        (nn.Linear(3, 2), "actor must be a ProbabilisticTensorDictSequential, got Linear"),
        (make_actor(OneHotCategorical), "for pink noise, got OneHotCategorical"),
        (make_actor(safe=True, spec=Bounded(-1.0, 1.0, (2,))), "safe=False for pink noise"),
        (make_actor(generator=torch.Generator()), "no generator of its own for pink noise"),
        (make_actor(num_samples=2), "one sample for pink noise, got num_samples="),
    ],
)
def test_policies_that_it_is_not_for(actor: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PinkNoiseActor(actor)


def test_at_least_one_octave() -> None:
    with pytest.raises(ValueError, match="octaves must be at least 1, got 0"):
        PinkNoiseActor(make_actor(), octaves=0)
