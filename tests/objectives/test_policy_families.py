"""Full-covariance, composite and masked policies in both losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch import distributions as D
from torchrl.modules import ValueOperator

from minerva_torchrl import MPOLoss, VMPOLoss
from minerva_torchrl.objectives.policies import (
    Categorical,
    CompositePolicy,
    DiagonalGaussian,
    FullGaussian,
    policy_family,
)
from tests.objectives.base import assert_equal, gradients, run, total_loss, with_updater
from tests.objectives.family_problem import (
    DIM,
    FAMILIES,
    NUM_ACTIONS,
    Free,
    Payoff,
    make_family_actor,
    make_family_data,
)


def make_mpo(family: str, network: nn.Module | None = None, **kwargs: Any) -> MPOLoss:
    critic = TensorDictModule(Payoff(), ["observation", "action"], ["state_action_value"])
    loss = MPOLoss(make_family_actor(family, network), critic, **kwargs)
    return with_updater(loss.make_value_estimator(gamma=0.9))


def make_vmpo(family: str, network: nn.Module | None = None, **kwargs: Any) -> VMPOLoss:
    torch.manual_seed(0)
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    return VMPOLoss(make_family_actor(family, network), critic, **kwargs)


def with_advantage(data: TensorDict) -> TensorDict:
    generator = torch.Generator().manual_seed(3)
    for name in ("advantage", "value_target"):
        data[name] = torch.randn(*data.shape, 1, generator=generator)
    return data


def disturb(loss: Any) -> Any:
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in loss.actor_network_params.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return loss


# Full covariance ---------------------------------------------------------------------------------


class Diagonal(nn.Module):
    """A diagonal policy, also written as a Cholesky factor."""

    def __init__(self, full: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.full = nn.Linear(3, 2 * DIM), full

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, raw = self.linear(observation).chunk(2, -1)
        return loc, torch.diag_embed(raw.exp()) if self.full else raw.exp()


@pytest.mark.parametrize("make", [make_mpo, make_vmpo])
def test_diagonal_factor_is_the_diagonal_family(make: Any) -> None:
    """The same losses, metrics and gradients, with one bound for all dimensions."""
    data = make_family_data("normal", 6, actor=make_family_actor("normal", Diagonal(False)))
    data = with_advantage(data)
    data["scale_tril"] = torch.diag_embed(data["scale"])
    outputs, slopes = [], []
    for full in (False, True):
        kind = "covariance" if full else "stddev"
        bounds = {f"epsilon_{kind}": 0.03, f"init_alpha_{kind}": 7.0}
        loss = make(
            "full" if full else "normal", Diagonal(full), per_dim_constraining=False, **bounds
        )
        output = run(disturb(loss), data.clone())
        renamed = {key.replace("covariance", "stddev"): value for key, value in output.items()}
        outputs.append(TensorDict(renamed))
        slope = gradients(loss, total_loss(output))
        slopes.append({key.replace("covariance", "stddev"): x for key, x in slope.items()})
    assert_equal(*outputs)
    assert_equal(*slopes)


def test_full_gaussian_candidates() -> None:
    torch.manual_seed(0)
    tril = torch.tensor([[0.7, 0.0], [-0.4, 0.2]]).expand(3, 2, 2)
    loc = torch.randn(3, 2)
    family = FullGaussian()
    dist = D.MultivariateNormal(loc, scale_tril=tril)
    candidates = family.candidates(dist, 20_000)
    torch.testing.assert_close(candidates.action.mean(0), loc, rtol=0, atol=0.02)
    torch.testing.assert_close(
        candidates.action[:, 0].T.cov(), tril[0] @ tril[0].T, rtol=0, atol=0.02
    )
    weights = torch.rand(3, 20_000)
    new = D.MultivariateNormal(loc + 0.1, scale_tril=2 * tril)
    old = family.describe(dist)
    cross_entropy = family.cross_entropy(
        family.describe(new), old, family.statistics(candidates.basis, weights)
    )
    halves = (
        D.MultivariateNormal(loc + 0.1, scale_tril=tril),
        D.MultivariateNormal(loc, scale_tril=2 * tril),
    )
    log_prob = sum(half.log_prob(candidates.action) for half in halves)
    torch.testing.assert_close(cross_entropy, -(weights.T * log_prob).sum(0), rtol=1e-4, atol=0)
    entropy = family.metrics(new, None)["entropy"]
    torch.testing.assert_close(entropy, new.entropy().mean())
    torch.testing.assert_close(family.metrics(new, None)["stddev_max"], new.stddev.max())


# Several parts -----------------------------------------------------------------------------------


def hybrid(loc: Tensor, scale: Tensor, logits: Tensor) -> D.Distribution:
    actor = make_family_actor("hybrid")
    params = {"arm": {"loc": loc, "scale": scale}, "tool": {"logits": logits}}
    data = TensorDict({"params": params}, batch_size=loc.shape[:-1], device=None).auto_batch_size_(
        1
    )
    return actor.build_dist_from_params(data)


def test_composite_policy_by_torch_distributions() -> None:
    torch.manual_seed(0)
    old, new = (
        hybrid(torch.randn(5, DIM), torch.rand(5, DIM) + 0.1, torch.randn(5, NUM_ACTIONS))
        for _ in range(2)
    )
    family = policy_family(
        make_family_actor("hybrid"), make_family_actor("hybrid").spec["action"], per_dim=None
    )
    assert isinstance(family, CompositePolicy)
    assert family.constraint_kinds() == {
        "arm_mean": ("mean", (DIM,)),
        "arm_stddev": ("stddev", (DIM,)),
        "tool_policy": ("policy", ()),
    }
    candidates = family.candidates(old, 7)
    assert candidates.action.shape == (7, 5)
    weights = torch.rand(5, 7)
    described = family.describe(new), family.describe(old)
    cross_entropy = family.cross_entropy(*described, family.statistics(candidates.basis, weights))
    arm, tool = candidates.action["arm"], candidates.action["tool"]
    (new_arm, new_tool), (old_arm, old_tool) = (tuple(x.dists.values()) for x in (new, old))
    (loc, scale), (old_loc, old_scale) = (
        (d.base_dist.loc, d.base_dist.scale) for d in (new_arm, old_arm)
    )
    log_prob = new_tool.log_prob(tool)
    log_prob = log_prob + D.Normal(loc, old_scale).log_prob(arm).sum(-1)
    log_prob = log_prob + D.Normal(old_loc, scale).log_prob(arm).sum(-1)
    torch.testing.assert_close(cross_entropy, -(weights.T * log_prob).sum(0))
    divergences = family.divergences(*described)
    torch.testing.assert_close(
        divergences["tool_policy"].squeeze(-1), D.kl_divergence(old_tool, new_tool)
    )
    torch.testing.assert_close(
        divergences["arm_mean"],
        D.kl_divergence(D.Normal(old_loc, old_scale), D.Normal(loc, old_scale)),
    )
    stored = candidates.action[0]
    joint = new_arm.log_prob(stored["arm"]) + new_tool.log_prob(stored["tool"])
    torch.testing.assert_close(family.log_prob(new, stored), joint)
    entropy = (new_arm.base_dist.entropy().sum(-1) + new_tool.entropy()).mean()
    torch.testing.assert_close(family.metrics(new, None)["entropy"], entropy)
    cost = family.bounds_cost(candidates.action)
    torch.testing.assert_close(
        cost, DiagonalGaussian(make_family_actor("normal").spec["action"]).bounds_cost(arm)
    )
    assert family.clip(candidates.action)["arm"].abs().max() <= 1


def test_hybrid_of_one_part_is_that_part() -> None:
    torch.manual_seed(0)
    part = DiagonalGaussian()
    whole = CompositePolicy({"arm": ("arm", part)})
    dist = hybrid(torch.randn(5, DIM), torch.rand(5, DIM) + 0.1, torch.zeros(5, NUM_ACTIONS))
    dist.dists = {"arm": next(iter(dist.dists.values()))}
    alone = dist.dists["arm"]
    draws = []
    for family, of in ((part, alone), (whole, dist)):
        torch.manual_seed(1)
        draws.append(family.candidates(of, 4))
    assert torch.equal(draws[0].action, draws[1].action["arm"])
    weights = torch.rand(5, 4)
    statistics = [f.statistics(d.basis, weights) for f, d in zip((part, whole), draws, strict=True)]
    plain, parts = part.describe(alone), whole.describe(dist)
    torch.testing.assert_close(
        part.cross_entropy(plain, plain, statistics[0]),
        whole.cross_entropy(parts, parts, statistics[1]),
    )
    assert whole.divergences(parts, parts).keys() == {"arm_mean", "arm_stddev"}


def test_sampled_categorical_counts_its_samples() -> None:
    """The weights of all actions are the sums over the samples of each."""
    torch.manual_seed(0)
    for family in (Categorical(), Categorical(one_hot=True)):
        drawn = family.samples(D.Categorical(logits=torch.randn(4, 3)), 9)
        weights = torch.rand(4, 9)
        index = drawn.action.argmax(-1) if family.one_hot else drawn.action
        expected = torch.zeros(4, 3).scatter_add(-1, index.T, weights)
        torch.testing.assert_close(family.statistics(drawn.basis, weights)["weights"], expected)


# In the losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_both_losses(family: str) -> None:
    """Every parameter of the policy and every multiplier gets a finite gradient."""
    data = make_family_data(family, 6)
    for make in (make_mpo, make_vmpo):
        loss = disturb(make(family))
        output = run(loss, with_advantage(data.clone()))
        assert set(output.keys()) == set(loss.out_keys)
        assert all(value.isfinite().all() for value in output.values())
        slopes = gradients(loss, total_loss(output))
        for name in loss.constraints:
            assert slopes[f"duals.alpha_{name}.raw"].any()


@pytest.mark.parametrize("family", ["full", "hybrid"])
def test_padding_may_be_anything(family: str) -> None:
    data = with_advantage(make_family_data(family, 6))
    valid = torch.arange(6) < 4
    padded = data.clone()
    padded["collector", "mask"] = valid
    for key in ("params", "loc", "scale_tril", "advantage", "value_target", "action"):
        entry = padded.get(key, None)
        if entry is not None:
            leaves = entry.values(True, True) if isinstance(entry, TensorDict) else [entry]
            for leaf in leaves:
                if leaf.is_floating_point():
                    leaf[~valid] = 0.0 if key == "action" else math.nan
    loss = disturb(make_vmpo(family))
    short, long = loss(data[:4]), loss(padded)
    assert_equal(long, short)
    assert all(x.isfinite().all() for x in gradients(loss, total_loss(long)).values())


@pytest.mark.parametrize("name", ["epsilon_covariance", "init_alpha_covariance"])
def test_bounds_of_other_families_are_refused(name: str) -> None:
    for make in (make_mpo, make_vmpo):
        with pytest.raises(ValueError, match=f"{name} does not apply to a policy whose"):
            make("normal", **{name: 0.1})
        with pytest.raises(ValueError, match=f"{name} must be positive and finite, got -1"):
            make("full", **{name: -1.0})
    with pytest.raises(ValueError, match="per_dim_constraining=True is for policies with a diag"):
        make_mpo("discrete parts", per_dim_constraining=True)


def test_critic_may_read_the_parts() -> None:
    """As it may the action with all of them."""

    class OfParts(Payoff):
        def forward(self, observation: Tensor, arm: Tensor, tool: Tensor) -> Tensor:
            return super().forward(observation, {"arm": arm, "tool": tool})

    names = ["observation", ("action", "arm"), ("action", "tool")]
    critic = TensorDictModule(OfParts(), names, ["state_action_value"])
    loss = MPOLoss(make_family_actor("hybrid"), critic).make_value_estimator(gamma=0.9)
    data = make_family_data("hybrid", 6)
    assert_equal(run(with_updater(loss), data.clone()), run(make_mpo("hybrid"), data.clone()))


def test_missing_part_of_an_action() -> None:
    loss, data = make_mpo("hybrid"), make_family_data("hybrid", 4)
    del data["action", "tool"]
    with pytest.raises(ValueError, match=r"'action' must have the parts .*\['tool'\] are missing"):
        loss(data)


# Masks of illegal actions ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["masked", "masked one-hot"])
@pytest.mark.parametrize("make", [make_mpo, make_vmpo])
def test_masked_actions_take_no_part(make: Any, family: str) -> None:
    """The same losses and gradients as where their logits are minus infinity."""

    class MinusInfinity(Free):
        def forward(self, observation: Tensor) -> Tensor:
            illegal = torch.tensor([False, False, True])
            return super().forward(observation).masked_fill(illegal, -math.inf)

    plain = "one-hot" if "one-hot" in family else "categorical"
    data = make_family_data(plain, 6, actor=make_family_actor(plain, MinusInfinity(plain)))
    data = with_advantage(data)
    masked = data.clone()
    masked["mask"] = torch.tensor([True, True, False]).expand(6, 3).clone()
    masked["next", "mask"] = masked["mask"].clone()
    masked["logits"] = torch.zeros(6, 3)
    expected_loss, loss = (
        disturb(make(plain, MinusInfinity(plain))),
        disturb(make(family, Free(plain))),
    )
    expected, output = run(expected_loss, data), run(loss, masked)
    assert "mask" in loss.in_keys
    assert_equal(output, expected)
    slopes = [gradients(x, total_loss(o)) for x, o in ((loss, output), (expected_loss, expected))]
    assert_equal(*slopes)
    assert slopes[0]["actor_network_params.module.0.module.logits"][0, :2].any()


def test_terminal_states_may_have_no_legal_action() -> None:
    loss = disturb(make_mpo("masked", Free("categorical"), policy_states="both"))
    data = make_family_data("categorical", 6)
    data["mask"] = torch.ones(6, 3, dtype=torch.bool)
    data["next", "mask"] = data["mask"].clone()
    data["next", "terminated"][2] = data["next", "done"][2] = True
    data["next", "mask"][2] = False
    output = run(loss, data)
    slopes = gradients(loss, total_loss(output))
    assert all(x.isfinite().all() for x in (*output.values(), *slopes.values()))


# A bandit with a known optimum -------------------------------------------------------------------


QUICK = ["full", "one-hot", "hybrid"]


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_bandit(family: str) -> None:
    """The policy reaches the best action, and each step keeps to the bounds."""
    torch.manual_seed(0)
    bounds = {"epsilon_mean": 0.05, "init_alpha_mean": 1.0}
    if family in ("categorical", "one-hot", "discrete parts"):
        bounds = {}
    loss = make_mpo(
        family, num_action_samples=30, temperature_update="solve", epsilon=0.5, **bounds
    )
    data = make_family_data(family, 16)
    optimizer = torch.optim.Adam(loss.actor_network_params.parameters(), lr=0.03)
    duals = torch.optim.Adam(loss.alpha_parameters(), lr=0.05)
    loss.project_duals_after(duals)
    relative = []
    for step in range(80):
        output = loss(data)
        for o in (optimizer, duals):
            o.zero_grad()
        total_loss(output).backward()
        optimizer.step()
        duals.step()
        if step % 4 == 3:
            relative.append(torch.stack([output[f"kl_{name}_rel"] for name in loss.constraints]))
            loss.target_actor_network_params.data.copy_(loss.actor_network_params.data)
    policy = Free(family)
    parameters = {k.rsplit(".", 1)[-1]: p for k, p in loss.actor_network_params.named_parameters()}
    policy.load_state_dict(parameters)
    if family in ("normal", "tanh", "full", "hybrid"):
        loc = policy.loc.tanh() if family == "tanh" else policy.loc
        torch.testing.assert_close(loc, Payoff.best, rtol=0, atol=0.2)
    if family in ("categorical", "one-hot", "discrete parts", "hybrid"):
        parts = policy.logits if family == "discrete parts" else policy.logits[:1]
        assert parts.softmax(-1)[:, 1].min() > 0.7
    assert torch.stack(relative)[5:].mean(0).max() < 2
