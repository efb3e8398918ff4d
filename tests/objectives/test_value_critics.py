"""Critics of distributions and bins: their targets and losses, by themselves and in MPO."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch import distributions as D
from torchrl.modules import ValueOperator
from torchrl.objectives import ValueEstimators

from minerva_torchrl import MPOLoss, VMPOLoss
from minerva_torchrl.objectives import functional as F
from minerva_torchrl.objectives.critics import (
    CategoricalCritic,
    Critic,
    GaussianMixtureCritic,
    HLGaussCritic,
    QuantileCritic,
    ScalarCritic,
    TwoHotCritic,
)
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    Concatenate,
    assert_equal,
    compiles,
    gradients,
    make_actor,
    make_transitions,
    run,
    total_loss,
    with_updater,
)
from tests.objectives.discrete_problem import (
    NUM_ACTIONS,
    make_discrete_actor,
    make_discrete_data,
)
from tests.objectives.vmpo_problem import make_actor as make_policy_actor
from tests.objectives.vmpo_problem import make_rollout

GAMMA = 0.9
MAKE: dict[str, Any] = {
    "scalar": ScalarCritic,
    "categorical": lambda **kw: CategoricalCritic(-10.0, 10.0, 41, **kw),
    "two_hot": lambda **kw: TwoHotCritic(-10.0, 10.0, 41, **kw),
    "hl_gauss": lambda **kw: HLGaussCritic(-10.0, 10.0, 41, **kw),
    "quantile": lambda **kw: QuantileCritic(7, **kw),
    "mixture": lambda **kw: GaussianMixtureCritic(3, num_samples=6, **kw),
}
KINDS = list(MAKE)
DISTRIBUTIONAL = ["categorical", "quantile", "mixture"]
BINNED = ["two_hot", "hl_gauss"]


def outputs_of(critic: Critic, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, critic.width, generator=generator)


def shift(values: Tensor) -> Tensor:
    return 0.3 + 0.8 * values


def make_loss(kind: str, discrete: bool = False, num_critics: int = 1, **kwargs: Any) -> MPOLoss:
    torch.manual_seed(0)
    critic = MAKE[kind]()
    if discrete:
        width = NUM_ACTIONS * critic.width
        networks = [
            ValueOperator(nn.Linear(OBSERVATION_DIM, width), ["observation"], ["action_value"])
            for _ in range(num_critics)
        ]
        actor = make_discrete_actor("categorical", nn.Linear(OBSERVATION_DIM, NUM_ACTIONS))
    else:
        networks = [
            ValueOperator(
                Concatenate(nn.Sequential(nn.Linear(OBSERVATION_DIM + ACTION_DIM, critic.width))),
                ["observation", "action"],
            )
            for _ in range(num_critics)
        ]
        actor = make_actor()
    kwargs = {"num_action_samples": 4, "critic": critic} | kwargs
    return with_updater(MPOLoss(actor, networks, **kwargs).make_value_estimator(gamma=GAMMA))


def make_data(discrete: bool, *batch: int) -> TensorDict:
    if not discrete:
        return make_transitions(*batch)
    data = make_discrete_data("categorical", *batch)
    return data.apply(lambda x: x.float() if x.is_floating_point() else x)


# By themselves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_target_has_the_mean_of_the_backup(kind: str) -> None:
    """Of N candidates, shifted and scaled: the mean is that of a scalar critic's target."""
    critic = MAKE[kind]()
    if kind == "mixture":
        critic.num_samples = 20_000
    outputs = outputs_of(critic, 1, 5, 3)
    target = critic.target(critic.pool(critic.select(outputs, "min"), None), shift)
    expected = shift(critic.mean(outputs)[0].mean(0))
    tolerance = 0.05 if kind == "mixture" else 1e-4
    torch.testing.assert_close(critic.target_mean(target), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_target_of_all_actions_has_their_probabilities(kind: str) -> None:
    critic = MAKE[kind]()
    if kind == "mixture":
        critic.num_samples = 20_000
    outputs = outputs_of(critic, 1, 4, 3)
    log_prior = torch.randn(3, 4).masked_fill(torch.eye(3, 4).bool(), -math.inf).log_softmax(-1)
    outputs[0, 0, 0] = math.nan  # an action that is never taken
    target = critic.target(critic.pool(critic.select(outputs, "min"), log_prior), shift)
    means = critic.mean(outputs)[0].nan_to_num()
    expected = shift((log_prior.exp().T * means).sum(0))
    tolerance = 0.05 if kind == "mixture" else 1e-4
    torch.testing.assert_close(critic.target_mean(target), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_falls_to_the_target(kind: str) -> None:
    """Descent on the loss brings the mean to that of the target."""
    torch.manual_seed(0)  # a mixture draws its target
    critic = MAKE[kind](**({"kappa": 0.1} if kind == "quantile" else {}))
    next_value = critic.pool(critic.select(outputs_of(critic, 1, 1, 3, seed=1), "min"), None)
    teacher = critic.target(next_value, shift)
    outputs = (0.1 * outputs_of(critic, 1, 3)).requires_grad_()
    optimizer = torch.optim.Adam([outputs], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        critic.loss(outputs, teacher).sum().backward()
        optimizer.step()
    mean, expected = critic.mean(outputs)[0].detach(), critic.target_mean(teacher)
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.1)


def test_one_hot_targets_are_scalar_targets() -> None:
    """A categorical critic whose next distributions have one atom each has a scalar's target."""
    critic = CategoricalCritic(-4.0, 4.0, 9)
    atoms = torch.tensor([[1, 4, 7]])
    outputs = nn.functional.one_hot(atoms, 9).float().log().unsqueeze(0)  # [1, 1, 3, 9]
    target = critic.target(critic.pool(critic.select(outputs, "min"), None), shift)
    values = critic.support()[atoms[0]]
    torch.testing.assert_close(critic.target_mean(target), shift(values))
    torch.testing.assert_close(target, F.two_hot(shift(values), critic.support()))


def test_categorical_target_by_samples() -> None:
    critic = CategoricalCritic(-3.0, 3.0, 13)
    outputs = outputs_of(critic, 2, 4, 2)
    target = critic.target(critic.pool(outputs, None), shift)
    torch.manual_seed(0)
    drawn = D.Categorical(logits=outputs).sample((20_000,)).movedim((1, 2), (-2, -1)).flatten(-2)
    returns = shift(critic.support()[drawn]).movedim(0, 1).flatten(1)
    expected = F.two_hot(returns, critic.support()).mean(1)
    torch.testing.assert_close(target, expected, rtol=0, atol=0.01)


def test_quantile_loss_pools_all_candidates() -> None:
    critic = QuantileCritic(5, kappa=0.7)
    outputs = outputs_of(critic, 2, 3, 4)
    target = critic.target(critic.pool(outputs, None), shift)
    predicted = outputs_of(critic, 2, 4, seed=1)
    pooled = shift(outputs).permute(2, 0, 1, 3).flatten(1)
    expected = F.quantile_huber_loss(predicted, pooled.expand(2, -1, -1), 0.7)
    torch.testing.assert_close(critic.loss(predicted, target), expected)


def test_mixture_samples_its_distribution() -> None:
    torch.manual_seed(0)
    critic = GaussianMixtureCritic(3, num_samples=50_000, init_scale=0.3)
    outputs = outputs_of(critic, 1, 2, 2)
    samples = critic.pool(outputs, None)
    logits, loc, scale = critic._parameters_of(outputs[0])
    for state in range(2):
        mixtures = [
            D.MixtureSameFamily(
                D.Categorical(logits=logits[i, state]), D.Normal(loc[i, state], scale[i, state])
            )
            for i in range(2)
        ]
        for level in (-1.0, 0.0, 0.7):
            cdf = sum(m.cdf(torch.tensor(level)) for m in mixtures) / 2
            share = (samples[state] < level).float().mean()
            torch.testing.assert_close(share, cdf, rtol=0, atol=0.01)
    torch.testing.assert_close(
        critic.variance(outputs[0, 0]),
        torch.stack(
            [
                D.MixtureSameFamily(
                    D.Categorical(logits=logits[0, s]), D.Normal(loc[0, s], scale[0, s])
                ).variance
                for s in range(2)
            ]
        ),
    )


@pytest.mark.parametrize("kind", DISTRIBUTIONAL)
def test_ensembles(kind: str) -> None:
    """The member with the smallest mean for each candidate, or the mixture of all."""
    critic = MAKE[kind]()
    outputs = outputs_of(critic, 3, 4, 2)
    smallest = critic.select(outputs, "min")
    means = critic.mean(outputs)
    torch.testing.assert_close(critic.score(smallest), means.amin(0))
    for n in range(4):
        for b in range(2):
            assert torch.equal(smallest[0, n, b], outputs[means[:, n, b].argmin(), n, b])
    torch.testing.assert_close(critic.score(critic.select(outputs, "mean")), means.mean(0))


@pytest.mark.parametrize("kind", DISTRIBUTIONAL)
def test_pessimism_by_standard_deviations(kind: str) -> None:
    critic = MAKE[kind](pessimism=1.5)
    outputs = outputs_of(critic, 2, 4, 2)
    mixture = critic.mean(outputs).mean(0)
    second = (critic.variance(outputs) + critic.mean(outputs).square()).mean(0)
    expected = mixture - 1.5 * (second - mixture.square()).sqrt()
    torch.testing.assert_close(critic.score(outputs), expected)


@pytest.mark.parametrize("kind", ["categorical", "quantile"])
def test_pessimism_by_a_quantile(kind: str) -> None:
    critic = MAKE[kind](quantile=0.3)
    outputs = outputs_of(critic, 2, 4, 3)
    values, probs = (x.expand_as(outputs) for x in critic._atoms(outputs))
    score = critic.score(outputs)
    for n in range(4):
        for b in range(3):
            v, p = values[:, n, b].flatten(), probs[:, n, b].flatten() / 2
            below, upto = p[v < score[n, b]].sum(), p[v <= score[n, b]].sum()
            assert below < 0.3 + 1e-6
            assert upto > 0.3 - 1e-6


# What is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CategoricalCritic(support=[0.0, 2.0, 1.0]), "support must be .*increasing, got"),
        (lambda: TwoHotCritic(support=[0.0, 0.0]), "support must be .*increasing, got"),
        (lambda: HLGaussCritic(support=[1.0]), "support must have at least two atoms, got 1"),
        (lambda: CategoricalCritic(num_atoms=1), "num_atoms must be at least 2, got 1"),
        (lambda: CategoricalCritic(1.0, -1.0), "v_min must be less than v_max, .* got 1.0 and -1"),
        (lambda: QuantileCritic(0), "num_quantiles must be at least 1, got 0"),
        (lambda: GaussianMixtureCritic(0), "num_components must be at least 1, got 0"),
        (lambda: HLGaussCritic(sigma=0.0), "sigma must be positive and finite, got 0"),
        (lambda: QuantileCritic(kappa=-1.0), "kappa must be positive and finite, got -1"),
        (lambda: QuantileCritic(quantile=1.5), "quantile must be between 0 and 1, got 1.5"),
        (lambda: CategoricalCritic(pessimism=-1.0), "pessimism must be at least 0"),
        (lambda: QuantileCritic(pessimism=1.0, quantile=0.5), "of which one can be given"),
        (lambda: make_loss("scalar", critic=ScalarCritic("l3")), "loss_function must be one of"),
        (lambda: make_loss("quantile", loss_function="l1"), "loss_function='l1' does not apply"),
    ],
)
def test_rejects(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_rejects_other_objects_and_widths() -> None:
    with pytest.raises(TypeError, match=r"critic must be a Critic \(.*got str"):
        make_loss("scalar", critic="categorical")
    network = ValueOperator(nn.Sequential(nn.Linear(5, 40)), ["observation", "action"])
    with pytest.raises(ValueError, match=r"qvalue_network must write 41 outputs .* layer of 40"):
        MPOLoss(make_actor(), network, critic=MAKE["categorical"]())
    for critic, found in ((MAKE["categorical"](), 82), (None, 2)):  # whole numbers of values
        network = ValueOperator(nn.Sequential(nn.Linear(5, found)), ["observation", "action"])
        with pytest.raises(ValueError, match=f"qvalue_network must write .* layer of {found}"):
            MPOLoss(make_actor(), network, critic=critic)
    actor = make_discrete_actor("categorical", nn.Linear(OBSERVATION_DIM, NUM_ACTIONS))
    wide = nn.Linear(OBSERVATION_DIM, 41 * (NUM_ACTIONS + 1))
    network = ValueOperator(wide, ["observation"], ["action_value"])
    with pytest.raises(ValueError, match=rf"write {NUM_ACTIONS} actions x 41 outputs .* layer"):
        MPOLoss(actor, network, critic=MAKE["categorical"]())
    hidden = ValueOperator(Concatenate(nn.Linear(5, 40)), ["observation", "action"])
    loss = with_updater(MPOLoss(make_actor(), hidden, critic=MAKE["categorical"]()))
    with pytest.raises(ValueError, match=r"qvalue_network must write .* \(8, 41\)|20, 8, 41"):
        loss(make_transitions(8))


@pytest.mark.parametrize("estimator", [ValueEstimators.TDLambda, ValueEstimators.TD1, "retrace"])
@pytest.mark.parametrize("kind", KINDS)
def test_estimators(kind: str, estimator: Any) -> None:
    """Whole distributions have one-step and n-step targets only; the others take any."""
    loss = make_loss(kind)
    if kind in DISTRIBUTIONAL:
        with pytest.raises(ValueError, match="takes one-step and n-step targets"):
            loss.make_value_estimator(estimator, gamma=GAMMA)
        return
    output = run(loss.make_value_estimator(estimator, gamma=GAMMA), make_transitions(4, 3))
    assert output["loss_qvalue"].isfinite()


# In the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("discrete", "reduction"), [(False, "min"), (True, "mean")])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_by_hand(kind: str, discrete: bool, reduction: str) -> None:
    """Critic loss, priorities and scores from the parts, with the networks called by hand."""
    loss = make_loss(kind, discrete, num_critics=2, qvalue_reduction=reduction)
    data = make_data(discrete, 6)
    data["steps_to_next_obs"] = torch.randint(1, 4, (6, 1))
    torch.manual_seed(0)
    step, _ = loss.e_step(data)
    critic = loss.critics[0]
    torch.manual_seed(0)
    samples, values = loss._sample(data["next"].select("observation"), 4)
    pooled = critic.pool(values["value"], samples.get("log_prior", None))
    discount = GAMMA ** data["steps_to_next_obs"] * ~data["next", "terminated"]
    target = critic.target(pooled, lambda x: data["next", "reward"] + discount * x)
    torch.testing.assert_close(step["value_target"], target)
    outputs = loss._online_outputs(data)[..., 0, :]
    assert outputs.shape == (2, 6, critic.width)
    expected = critic.loss(outputs, target).sum(0).mean()
    output = run(loss, data)
    torch.testing.assert_close(output["loss_qvalue"], expected)
    error = (critic.mean(outputs) - critic.target_mean(target)).abs().amax(0)
    torch.testing.assert_close(data["td_error"], error)
    assert set(output.keys()) == set(loss.out_keys)


@pytest.mark.parametrize("kind", KINDS)
def test_mask_priorities_and_gradients(kind: str) -> None:
    """Padding may be anything, weights count, and no gradient leaves its own network."""
    loss = make_loss(kind, num_critics=2)
    data = make_transitions(6)
    data["priority_weight"] = torch.linspace(0.5, 1.5, 6)
    data["collector", "mask"] = torch.arange(6) < 4
    padded = data.clone()
    for entry in ("reward", "observation"):
        padded["next", entry][4:] = math.nan
    outputs = [run(loss, x) for x in (data, padded)]
    torch.testing.assert_close(outputs[1]["loss_qvalue"], outputs[0]["loss_qvalue"])
    slopes = gradients(loss, outputs[1]["loss_qvalue"])
    assert all(x.isfinite().all() for x in slopes.values())
    assert {key.split(".")[0] for key, x in slopes.items() if x.any()} == {"qvalue_network_params"}


@pytest.mark.parametrize("kind", KINDS)
def test_state_and_copies(kind: str) -> None:
    loss, data = make_loss(kind), make_transitions(6)
    other = make_loss(kind)
    other.load_state_dict(loss.state_dict())
    assert_equal(run(other, data), run(loss, data))
    assert_equal(run(copy.deepcopy(loss), data), run(loss, data))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
@compiles
def test_compiles_whole(kind: str) -> None:
    """One graph, with the same losses."""
    loss, data = make_loss(kind), make_transitions(6)
    expected = run(loss, data.clone())
    output = run(torch.compile(loss, fullgraph=True, backend="eager"), data.clone())
    torch.testing.assert_close(total_loss(output), total_loss(expected))


# State values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BINNED)
def test_vmpo_with_bins(kind: str) -> None:
    """Advantages come from the mean of the bins, and the loss is their cross-entropy."""
    torch.manual_seed(0)
    critic, linear = MAKE[kind](), nn.Linear(OBSERVATION_DIM, 41)
    network = ValueOperator(nn.Sequential(linear), in_keys=["observation"])
    loss = VMPOLoss(make_policy_actor("normal"), network, critic=critic)
    loss.make_value_estimator("gae", gamma=GAMMA, lmbda=0.8)
    data = make_rollout("normal", 3, 5)
    output = loss(data)
    outputs = linear(data["observation"])
    torch.testing.assert_close(data["state_value"].squeeze(-1), critic.mean(outputs))
    plain = VMPOLoss(
        make_policy_actor("normal"), ValueOperator(Mean(linear, critic), ["observation"])
    )
    plain.make_value_estimator("gae", gamma=GAMMA, lmbda=0.8)
    other = make_rollout("normal", 3, 5)
    plain.value_estimator(
        other, params=plain.critic_network_params, target_params=plain.critic_network_params
    )
    torch.testing.assert_close(data["advantage"], other["advantage"])
    expected = critic.loss(outputs, data["value_target"]).mean() * loss.critic_coeff
    torch.testing.assert_close(output["loss_critic"], expected)
    slopes = gradients(loss, output["loss_critic"])
    assert {key.split(".")[0] for key, x in slopes.items() if x.any()} == {"critic_network_params"}
    assert set(output.keys()) == set(loss.out_keys)
    assert "clipped_targets" in output.keys()


class Mean(nn.Module):
    """The value of a network of bins as a scalar network."""

    def __init__(self, network: nn.Module, critic: Critic) -> None:
        super().__init__()
        self.network, self.critic = network, critic

    def forward(self, observation: Tensor) -> Tensor:
        return self.critic.mean(self.network(observation)).unsqueeze(-1)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"critic": QuantileCritic(3)}, TypeError, "critic must be a ScalarCritic, TwoHotCritic"),
        ({"critic": TwoHotCritic(), "clip_value": 0.2}, ValueError, "clip_value=0.2 is for scalar"),
        (
            {"critic": TwoHotCritic(), "loss_critic_type": "l1"},
            ValueError,
            "loss_critic_type='l1' does not apply beside critic=",
        ),
        ({"critic": TwoHotCritic()}, ValueError, "critic_network must write 51 outputs for a Two"),
    ],
)
def test_vmpo_rejects(kwargs: Any, error: type[Exception], message: str) -> None:
    network = ValueOperator(nn.Linear(OBSERVATION_DIM, 50), in_keys=["observation"])
    with pytest.raises(error, match=message):
        VMPOLoss(make_policy_actor("normal"), network, **kwargs)
