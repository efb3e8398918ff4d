"""Policy families against torch.distributions."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Bounded, TensorSpec, Unbounded
from torchrl.modules import (
    Delta,
    IndependentNormal,
    MaskedOneHotCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    TruncatedNormal,
)

from minerva_torchrl.objectives.policies import (
    Categorical,
    DiagonalGaussian,
    PolicyFamily,
    TanhGaussian,
    leaf_distribution,
    policy_family,
)

BATCH, DIM, ACTIONS, SAMPLES = (3, 2), 2, 4, 7
SPEC = Bounded(-1.0, 1.0, (DIM,))
KINDS = ["normal", "tanh", "categorical", "one-hot"]
LOW, HIGH = -2.0, 3.0


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_family(kind: str, spec: TensorSpec | None = SPEC, *, per_dim: bool = False) -> Any:
    if kind in ("categorical", "one-hot"):
        return Categorical(one_hot=kind == "one-hot")
    family = TanhGaussian if kind == "tanh" else DiagonalGaussian
    return family(spec, per_dim=per_dim)


def parameters(kind: str, seed: int = 0) -> dict[str, Tensor]:
    if kind in ("categorical", "one-hot"):
        return {"logits": _randn(seed, *BATCH, ACTIONS).requires_grad_()}
    loc, raw = _randn(seed, 2, *BATCH, DIM).unbind(0)
    return {"loc": loc.clone().requires_grad_(), "scale": (0.5 * raw).exp().requires_grad_()}


def distribution(kind: str, **values: Tensor) -> D.Distribution:
    if kind == "normal":
        return IndependentNormal(**values)
    if kind == "tanh":
        return TanhNormal(**values, low=LOW, high=HIGH)
    return D.Categorical(**values) if kind == "categorical" else OneHotCategorical(**values)


def plain(kind: str, **values: Tensor) -> D.Distribution:
    """The same by torch.distributions; for ``"tanh"`` the Gaussian before it."""
    if kind in ("normal", "tanh"):
        return D.Normal(**values)
    return D.Categorical(**values)


def mixtures(kind: str, new: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, dict]:
    """By constraint, the old policy with the part that the constraint is about replaced."""
    if kind in ("categorical", "one-hot"):
        return {"policy": new}
    return {
        "mean": {"loc": new["loc"], "scale": old["scale"]},
        "stddev": {"loc": old["loc"], "scale": new["scale"]},
    }


# What a family computes --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_describe(kind: str) -> None:
    """The parameters come back with their gradients, from a composite of one part too."""
    values = parameters(kind)
    policy = make_family(kind).describe(distribution(kind, **values))
    assert policy.batch_size == BATCH
    for name, value in values.items():
        expected = value.log_softmax(-1) if name == "logits" else value
        torch.testing.assert_close(policy[name], expected)
        (gradient,) = torch.autograd.grad(policy[name].square().sum(), value)
        assert gradient.any()
    composite = CompositeDistribution(
        TensorDict({"a": TensorDict(values, BATCH)}, BATCH),
        distribution_map={"a": functools.partial(distribution, kind)},
    )
    inside = make_family(kind).describe(composite)
    for name in values:
        torch.testing.assert_close(inside[name], policy[name])
    assert type(leaf_distribution(composite)) is type(distribution(kind, **values))


@pytest.mark.parametrize("kind", ["normal", "tanh"])
def test_gaussian_candidates(kind: str) -> None:
    """Samples of the policy, with the standard-normal draws behind them."""
    family, values = make_family(kind), parameters(kind)
    dist = distribution(kind, **values)
    torch.manual_seed(0)
    candidates = family.candidates(dist, 4000)
    action, noise = candidates.action.detach(), candidates.basis["noise"]
    assert action.shape == (4000, *BATCH, DIM)
    assert noise.shape == (*BATCH, 4000, DIM)
    assert candidates.log_prior is None
    raw = values["loc"] + values["scale"] * noise.movedim(-2, 0)
    squashed = LOW + (HIGH - LOW) * (raw.tanh() + 1) / 2
    torch.testing.assert_close(action, (raw if kind == "normal" else squashed).detach())
    # Five standard errors.
    assert noise.mean(-2).abs().max() < 5 / math.sqrt(4000)
    assert (noise.var(-2) - 1).abs().max() < 5 * math.sqrt(2 / 4000)


@pytest.mark.parametrize("kind", ["categorical", "one-hot"])
def test_categorical_candidates(kind: str) -> None:
    """All actions in their order, with their probabilities."""
    values = parameters(kind)
    dist = distribution(kind, **values)
    candidates = make_family(kind).candidates(dist, 3)
    index = torch.arange(ACTIONS).view(-1, 1, 1).expand(ACTIONS, *BATCH)
    expected = index if kind == "categorical" else nn.functional.one_hot(index, ACTIONS).double()
    assert torch.equal(candidates.action, expected)
    log_prob = torch.stack([dist.log_prob(action) for action in expected], -1)
    torch.testing.assert_close(candidates.log_prior, log_prob)
    torch.testing.assert_close(candidates.log_prior.exp().sum(-1), torch.ones(BATCH).double())


@pytest.mark.parametrize("kind", KINDS)
def test_cross_entropy(kind: str) -> None:
    """By statistics it is that by the weighted log-likelihoods of the candidates."""
    family = make_family(kind)
    old_values = {name: value.detach() for name, value in parameters(kind, 1).items()}
    new_values, old_dist = parameters(kind, 2), distribution(kind, **old_values)
    candidates = family.candidates(old_dist, SAMPLES)
    count = candidates.action.shape[0]
    weights = _randn(3, *BATCH, count).exp()  # their sum need not be one
    statistics = family.statistics(candidates.basis, weights)
    assert statistics.batch_size == BATCH
    new, old = (family.describe(distribution(kind, **v)) for v in (new_values, old_values))
    actual = family.cross_entropy(new, old, statistics)
    assert actual.shape == BATCH
    expected = torch.zeros(BATCH).double()
    for values in mixtures(kind, new_values, old_values).values():
        log_prob = distribution(kind, **values).log_prob(candidates.action)
        expected = expected - (weights.movedim(-1, 0) * log_prob).sum(0)
    if kind == "tanh":  # without the Jacobian of the tanh, which the policy does not change
        jacobian = distribution(kind, **old_values).log_prob(candidates.action)
        jacobian = jacobian - plain(kind, **old_values).log_prob(
            old_values["loc"] + old_values["scale"] * candidates.basis["noise"].movedim(-2, 0)
        ).sum(-1)
        expected = expected + 2 * (weights.movedim(-1, 0) * jacobian).sum(0)
    torch.testing.assert_close(actual, expected)
    slopes = (torch.autograd.grad(x.sum(), list(new_values.values())) for x in (actual, expected))
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_dim", [False, True])
def test_divergences(per_dim: bool, kind: str) -> None:
    """From the old policy to the old one with one part of it replaced, per dimension or summed."""
    family = make_family(kind, per_dim=per_dim)
    new_values, old_values = parameters(kind, 1), parameters(kind, 2)
    new, old = (family.describe(distribution(kind, **v)) for v in (new_values, old_values))
    actual = family.divergences(new, old)
    mixed = mixtures(kind, new_values, old_values)
    assert tuple(actual) == family.constraints == tuple(mixed)
    for name, values in mixed.items():
        expected = D.kl_divergence(plain(kind, **old_values), plain(kind, **values))
        if name == "policy":
            expected = expected.unsqueeze(-1)
        elif not per_dim:
            expected = expected.sum(-1, keepdim=True)
        torch.testing.assert_close(actual[name], expected)
        assert (actual[name] > 0).all()
    discrete = kind in ("categorical", "one-hot")
    assert family.constraint_shape == ((DIM,) if per_dim and not discrete else ())


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob(kind: str) -> None:
    family, values = make_family(kind), parameters(kind)
    dist = distribution(kind, **values)
    action = dist.sample()
    log_prob = family.log_prob(dist, action)
    assert log_prob.shape == BATCH
    if kind == "tanh":
        base = D.TransformedDistribution(plain(kind, **values), D.TanhTransform())
        scaled = (action - LOW) / (HIGH - LOW) * 2 - 1
        expected = base.log_prob(scaled).sum(-1) - DIM * math.log((HIGH - LOW) / 2)
        torch.testing.assert_close(log_prob, expected, rtol=1e-5, atol=1e-5)
        return
    index = action.argmax(-1) if kind == "one-hot" else action
    expected = plain(kind, **values).log_prob(index)
    torch.testing.assert_close(log_prob, expected.sum(-1) if kind == "normal" else expected)


# Metrics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_metrics(kind: str, masked: bool) -> None:
    """Over the states that count, whatever the others hold."""
    spec = Bounded(LOW, HIGH, (DIM,)) if kind == "tanh" else SPEC
    family, values = make_family(kind, spec), {k: v.detach() for k, v in parameters(kind).items()}
    mask = torch.tensor([[True, False], [True, True], [False, True]]) if masked else None
    kept = slice(None) if mask is None else mask
    entropy = plain(kind, **values).entropy()[kept]
    if kind in ("categorical", "one-hot"):
        expected = {"entropy": entropy.mean()}
    else:
        loc, scale = values["loc"][kept], values["scale"][kept]
        action = LOW + (HIGH - LOW) * (loc.tanh() + 1) / 2 if kind == "tanh" else loc
        low, high = (LOW, HIGH) if kind == "tanh" else (-1.0, 1.0)
        margin = 0.01 * (high - low) / 2
        at_bound = (action <= low + margin) | (action >= high - margin)
        expected = {
            "entropy": entropy.sum(-1).mean(),
            "stddev_min": scale.min(),
            "stddev_max": scale.max(),
            "mean_abs_action": action.abs().mean(),
            "saturation": at_bound.double().mean(),
        }
        if kind == "normal":
            expected["out_of_bounds"] = (loc.abs() > 1).double().mean()
            assert expected["out_of_bounds"] > 0
    if mask is not None:
        for value in values.values():
            value[~mask] = 1e3  # far from everything
    metrics = family.metrics(distribution(kind, **values), mask)
    assert set(metrics) == set(family.metric_keys) == set(expected)
    for name, value in expected.items():
        assert metrics[name].shape == ()
        torch.testing.assert_close(metrics[name], value, msg=lambda m, name=name: f"{name}: {m}")


def test_metrics_without_bounds() -> None:
    for spec in (None, Unbounded((DIM,))):
        family = DiagonalGaussian(spec)
        metrics = family.metrics(distribution("normal", **parameters("normal")), None)
        assert set(metrics) == set(family.metric_keys)
        assert not {"out_of_bounds", "saturation"} & set(metrics)


def test_entropy_with_impossible_actions() -> None:
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    metrics = Categorical().metrics(D.Categorical(logits=logits), None)
    assert metrics["entropy"].item() == pytest.approx(math.log(2))


# Bounds ------------------------------------------------------------------------------------------


def test_bounds() -> None:
    """An unsquashed Gaussian can leave its bounds: the critic sees the clipped action."""
    spec = Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0]))
    family, action = DiagonalGaussian(spec), torch.tensor([[0.5, 5.0], [-4.0, 2.0]])
    assert family.leaves_bounds
    assert family.clip(action).tolist() == [[0.5, 4.0], [-1.0, 2.0]]
    # In units of half the range, which is 1 and 2.
    torch.testing.assert_close(family.bounds_cost(action), torch.tensor([-0.5, -3.0]))
    for other in (DiagonalGaussian(), TanhGaussian(spec), Categorical()):
        assert not other.leaves_bounds
        assert other.clip(action) is action
    with pytest.raises(NotImplementedError, match="actions of a Categorical have no bounds"):
        Categorical().bounds_cost(action)


# From an actor to its family ---------------------------------------------------------------------


def make_actor(distribution_class: Any, *names: str, **kwargs: Any) -> ProbabilisticActor:
    class Network(nn.Module):
        def forward(self, observation: Tensor) -> Any:
            return tuple(observation.exp() for _ in names) if len(names) > 1 else observation

    module = TensorDictModule(Network(), ["observation"], list(names))
    return ProbabilisticActor(module, list(names), distribution_class=distribution_class, **kwargs)


def independent(loc: Tensor, scale: Tensor) -> D.Distribution:
    return D.Independent(D.Normal(loc, scale), 1)


@pytest.mark.parametrize(
    ("distribution_class", "names", "family"),
    [
        (IndependentNormal, ("loc", "scale"), DiagonalGaussian),
        (independent, ("loc", "scale"), DiagonalGaussian),
        (functools.partial(IndependentNormal), ("loc", "scale"), DiagonalGaussian),
        (TanhNormal, ("loc", "scale"), TanhGaussian),
        (functools.partial(TanhNormal, low=-1.0, high=1.0), ("loc", "scale"), TanhGaussian),
        (D.Categorical, ("logits",), Categorical),
        (functools.partial(D.Categorical), ("logits",), Categorical),
        (D.OneHotCategorical, ("logits",), Categorical),
        (OneHotCategorical, ("logits",), Categorical),
        (MaskedOneHotCategorical, ("logits", "mask"), Categorical),
    ],
)
def test_family_of_actor(distribution_class: Any, names: tuple[str, ...], family: Any) -> None:
    found = policy_family(make_actor(distribution_class, *names), SPEC, per_dim=None)
    assert type(found) is family
    if family is Categorical:
        made_by = getattr(distribution_class, "func", distribution_class)
        assert found.one_hot is ("OneHot" in made_by.__name__)
    else:
        assert found.per_dim
        assert found.action_dim == DIM
        assert not policy_family(
            make_actor(distribution_class, *names), None, per_dim=False
        ).constraint_shape


@pytest.mark.parametrize(
    ("actor", "kwargs", "error", "message"),
    [
        (
            lambda: nn.Linear(3, 2),
            {},
            TypeError,
            "actor_network must be a ProbabilisticTensorDictSequential .*got Linear",
        ),
        (
            lambda: make_actor(Delta, "param"),
            {},
            NotImplementedError,
            r"must be a diagonal Gaussian \(IndependentNormal.*Categorical or .*, got Delta",
        ),
        (
            lambda: make_actor(functools.partial(TruncatedNormal, low=-1.0), "loc", "scale"),
            {},
            NotImplementedError,
            r"must be a diagonal Gaussian .*, got TruncatedNormal",
        ),
        (
            lambda: make_actor(D.Categorical, "logits"),
            {"per_dim": True},
            ValueError,
            "per_dim_constraining=True is for Gaussian policies, not discrete ones",
        ),
        (
            lambda: make_actor(IndependentNormal, "loc", "scale"),
            {"action_spec": None, "per_dim": True},
            ValueError,
            "per_dim_constraining=True needs the size of the action: pass action_spec=",
        ),
        (
            lambda: make_actor(
                CompositeDistribution,
                "params",
                distribution_kwargs={"distribution_map": {"arm": TanhNormal, "leg": TanhNormal}},
            ),
            {},
            ValueError,
            r"parts .* must be inside one entry, such as .*, got \['arm', 'leg'\]",
        ),
        (
            lambda: make_actor(D.MultivariateNormal, "loc", "scale_tril"),
            {"per_dim": True},
            ValueError,
            "per_dim_constraining=True is for diagonal Gaussians: a covariance matrix has one",
        ),
    ],
    ids=["module", "delta", "truncated", "discrete", "size", "composite", "covariance"],
)
def test_rejects_actors(
    actor: Any, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    kwargs = {"action_spec": SPEC, "per_dim": None} | kwargs
    with pytest.raises(error, match=message):
        policy_family(actor(), **kwargs)


@pytest.mark.parametrize(
    ("kind", "action", "message"),
    [
        ("normal", torch.zeros(3, 2, dtype=torch.long), r"floating-point .*\(3, 2, 'D'\), got "),
        ("normal", torch.zeros(3, 2), r"'a' must be a floating-point tensor of shape .*\(3, 2\)"),
        ("normal", torch.zeros(3, 2, 5), r"'a' must have 2 dimensions as in action_spec, got 5"),
        ("tanh", torch.zeros(3, 2, 5), r"'a' must have 2 dimensions as in action_spec, got 5"),
        ("categorical", torch.zeros(3, 2, 1), r"'a' is an index and .* \(3, 2\), got \(3, 2, 1\)"),
        ("one-hot", torch.zeros(3, 2), r"'a' is one-hot and .* \(3, 2, 'A'\), got \(3, 2\)"),
        ("one-hot", torch.zeros(2, 3, 4), r"'a' is one-hot and .*, got \(2, 3, 4\)"),
    ],
)
def test_rejects_actions(kind: str, action: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_family(kind).check_action("a", action, torch.Size(BATCH))
    good = distribution(kind, **parameters(kind)).sample()
    make_family(kind).check_action("a", good, torch.Size(BATCH))


def test_rejects_action_of_other_size() -> None:
    """Without a spec it shows when the action is scored; it would be broadcast."""
    dist = distribution("normal", **parameters("normal"))
    with pytest.raises(ValueError, match=r"shape of the policy's mean, \(3, 2, 2\), got \(3, 2, 1"):
        DiagonalGaussian().log_prob(dist, torch.zeros(3, 2, 1))


@pytest.mark.parametrize(
    ("loc", "scale"), [(0.0, 0.0), (0.0, -1.0), (math.nan, 1.0), (0, math.inf)]
)
def test_rejects_parameters(loc: float, scale: float) -> None:
    policy = TensorDict({"loc": torch.full((3, 2), loc), "scale": torch.full((3, 2), scale)}, [3])
    family: PolicyFamily = DiagonalGaussian()
    message = r"old policy's \['m', 's'\] must be finite with positive .*init_random_frames"
    with pytest.raises(ValueError, match=message):
        family.check_parameters(["m", "s"], policy)
    policy = TensorDict({"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)}, [3])
    family.check_parameters(["m", "s"], policy)
