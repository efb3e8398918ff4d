from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss

from minerva_torchrl.modules import StateIndependentScale
from minerva_torchrl.objectives.ppo import (
    estimate_advantage,
    kl_k3,
    make_ppo_loss,
    ppo_kl_k3,
)
from minerva_torchrl.presets import ppo_preset
from tests.objectives.ppo_problem import (
    ACTION_DIM,
    LEARNING_RATE,
    OBSERVATION_DIM,
    gaussian_log_prob,
    make_actor,
    make_critic,
    make_networks,
    make_rollout,
    total_loss,
)

# A PPO update in plain PyTorch, from the formulas ------------------------------------------------


def plain_gae(
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
    gamma: float,
    lmbda: float,
) -> tuple[Tensor, Tensor]:
    """All ``[B, T]``. Bootstraps unless terminated; the trace ends at done."""
    advantage = torch.zeros_like(value)
    trace = torch.zeros_like(value[:, 0])
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * next_value[:, t] * ~terminated[:, t] - value[:, t]
        trace = delta + gamma * lmbda * trace * ~done[:, t]
        advantage[:, t] = trace
    return advantage, advantage + value


def plain_ppo_update(
    policy: nn.Module,
    critic: nn.Module,
    rollout: TensorDict,
    permutations: list[Tensor],
    minibatch_size: int,
    learning_rate: float,
    *,
    clip: float = 0.2,
    value_coeff: float = 0.5,
    entropy_coeff: float = 0.0,
    gamma: float,
    lmbda: float,
    truncation_is_terminal: bool = False,
) -> None:
    observation, action = rollout["observation"], rollout["action"]
    done = rollout["next", "done"].squeeze(-1)
    terminated = done if truncation_is_terminal else rollout["next", "terminated"].squeeze(-1)
    with torch.no_grad():
        old_log_prob = gaussian_log_prob(action, *policy(observation))
        old_value = critic(observation).squeeze(-1)
        next_value = critic(rollout["next", "observation"]).squeeze(-1)
        reward = rollout["next", "reward"].squeeze(-1)
        advantages, returns = plain_gae(
            old_value, next_value, reward, done, terminated, gamma, lmbda
        )
    observation, action = observation.flatten(0, 1), action.flatten(0, 1)
    old_log_prob, old_value = old_log_prob.flatten(), old_value.flatten()
    advantages, returns = advantages.flatten(), returns.flatten()
    parameters = [*policy.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, eps=1e-5)
    for permutation in permutations:
        for rows in permutation.split(minibatch_size):
            loc, scale = policy(observation[rows])
            ratio = (gaussian_log_prob(action[rows], loc, scale) - old_log_prob[rows]).exp()
            advantage = advantages[rows]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
            policy_loss = torch.maximum(-advantage * ratio, -advantage * clipped_ratio).mean()
            value = critic(observation[rows]).squeeze(-1)
            clipped_value = old_value[rows] + (value - old_value[rows]).clamp(-clip, clip)
            errors = [(v - returns[rows]).square() for v in (value, clipped_value)]
            value_loss = 0.5 * torch.maximum(*errors).mean()
            entropy = (scale.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1).mean()
            loss = policy_loss + value_coeff * value_loss - entropy_coeff * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()


@pytest.mark.parametrize(
    "case",
    [
        {"gamma": 0.9, "lmbda": 0.8},
        {"gamma": 0.9, "lmbda": 0.8, "entropy_coeff": 0.02, "value_coeff": 0.8},
        {"gamma": 0.98, "lmbda": 0.92, "truncation_is_terminal": True},
    ],
)
def test_full_update_equals_the_formulas(case: dict) -> None:
    policy, critic = make_networks()
    reference_policy, reference_critic = copy.deepcopy(policy), copy.deepcopy(critic)
    actor = make_actor(policy)
    rollout = make_rollout(actor)
    generator = torch.Generator().manual_seed(3)
    permutations = [torch.randperm(64, generator=generator) for _ in range(4)]
    plain_ppo_update(
        reference_policy, reference_critic, rollout, permutations, 16, LEARNING_RATE, **case
    )

    loss = make_ppo_loss(actor, make_critic(critic), **case)
    initial = [parameter.detach().clone() for parameter in loss.parameters()]
    data = estimate_advantage(loss, rollout).reshape(-1)
    optimizer = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE, eps=1e-5)
    clip_fractions = []
    for permutation in permutations:
        for rows in permutation.split(16):
            losses = loss(data[rows])
            optimizer.zero_grad()
            total_loss(losses).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
            clip_fractions.append((losses["clip_fraction"], losses["value_clip_fraction"]))
    # The update really exercises both kinds of clipping, and moves every parameter.
    assert max(ratio.item() for ratio, _ in clip_fractions) > 0
    assert max(value.item() for _, value in clip_fractions) > 0
    for before, after in zip(initial, loss.parameters(), strict=True):
        assert not torch.equal(before, after)

    for network, reference in ((policy, reference_policy), (critic, reference_critic)):
        for (name, value), expected in zip(
            network.named_parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-12, msg=name)


# Settings ----------------------------------------------------------------------------------------


class TestSettings:
    def test_preset_builds_a_loss(self) -> None:
        policy, critic = make_networks()
        loss = make_ppo_loss(
            make_actor(policy), make_critic(critic), **ppo_preset("minerva-seed").loss
        )
        estimator = loss.value_estimator
        assert float(estimator.gamma) == pytest.approx(0.98)
        assert float(estimator.lmbda) == pytest.approx(0.92)
        assert estimator.tensor_keys.terminated == "done"
        assert ppo_preset("minerva-seed").adam == {"eps": 1e-5}

    def test_unknown_preset(self) -> None:
        with pytest.raises(ValueError, match="name must be one of 'default', 'minerva-seed'"):
            ppo_preset("tonic")

    @pytest.mark.parametrize("value_coeff", [0.5, 2.0])
    def test_value_loss_carries_half_of_the_coefficient(self, value_coeff: float) -> None:
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic), value_coeff=value_coeff, clip_value=False)
        data = estimate_advantage(loss, make_rollout(actor)).reshape(-1)
        error = (critic(data["observation"]) - data["value_target"]).square().mean()
        torch.testing.assert_close(loss(data)["loss_critic"], value_coeff * 0.5 * error)

    def test_value_coeff_zero_leaves_out_the_value_loss(self) -> None:
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic), value_coeff=0.0)
        data = estimate_advantage(loss, make_rollout(actor)).reshape(-1)
        assert "loss_critic" not in loss(data)

    @pytest.mark.parametrize(("clip_value", "radius"), [(True, 0.1), (0.7, 0.7)])
    def test_radius_of_the_value_clip(self, clip_value: bool | float, radius: float) -> None:
        policy, critic = make_networks()
        loss = make_ppo_loss(
            make_actor(policy), make_critic(critic), clip_epsilon=0.1, clip_value=clip_value
        )
        assert loss.clip_value == pytest.approx(radius)

    def test_advantages_are_standardised_per_minibatch(self) -> None:
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic))
        raw = make_ppo_loss(actor, make_critic(critic), normalize_advantage=False)
        data = estimate_advantage(loss, make_rollout(actor)).reshape(-1)[:10]
        # With a ratio of one the objective is minus the mean advantage.
        assert loss(data)["loss_objective"].item() == pytest.approx(0.0, abs=1e-12)
        torch.testing.assert_close(raw(data)["loss_objective"], -data["advantage"].mean())
        data["action"] += 0.1
        shifted = data.clone()
        shifted["advantage"] = 5.0 + 3.0 * shifted["advantage"]
        torch.testing.assert_close(loss(shifted)["loss_objective"], loss(data)["loss_objective"])
        assert not torch.allclose(raw(shifted)["loss_objective"], raw(data)["loss_objective"])

    def test_entropy_is_reported_even_when_it_is_not_rewarded(self) -> None:
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic))
        losses = loss(estimate_advantage(loss, make_rollout(actor)).reshape(-1))
        expected = ACTION_DIM * (math.log(0.6) + 0.5 * math.log(2 * math.pi * math.e))
        assert losses["entropy"].item() == pytest.approx(expected, rel=1e-6)
        assert losses["loss_entropy"].item() == 0.0

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_reduction(self, reduction: str) -> None:
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic), reduction=reduction)
        data = estimate_advantage(loss, make_rollout(actor)).reshape(-1)
        mean = make_ppo_loss(actor, make_critic(critic))(data)["loss_critic"]
        value = loss(data)["loss_critic"]
        if reduction == "none":
            assert value.shape == (64,)
            value = value.mean()
        torch.testing.assert_close(value, 64 * mean if reduction == "sum" else mean)

    def test_shared_parameters_can_be_kept_from_the_value_loss(self) -> None:
        torso = nn.Linear(OBSERVATION_DIM, 8).double()
        policy = StateIndependentScale(nn.Sequential(torso, nn.Linear(8, 2)), 2).double()
        critic = nn.Sequential(torso, nn.Linear(8, 1)).double()
        actor = make_actor(policy)
        for separate in (True, False):
            torso.zero_grad()
            loss = make_ppo_loss(actor, make_critic(critic), separate_losses=separate)
            data = estimate_advantage(loss, make_rollout(actor)).reshape(-1)
            loss(data)["loss_critic"].backward()
            reached = torso.weight.grad is not None and bool(torso.weight.grad.any())
            assert reached is not separate

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"clip_epsilon": 0.0}, "clip_epsilon must lie strictly between 0 and 1, got 0.0"),
            ({"clip_epsilon": 1.0}, "clip_epsilon must lie strictly between 0 and 1, got 1.0"),
            ({"clip_value": 0.0}, "clip_value must be True, False or a positive radius, got 0.0"),
            ({"value_coeff": -1.0}, "value_coeff must not be negative, got -1.0"),
            ({"entropy_coeff": -0.1}, "entropy_coeff must not be negative, got -0.1"),
            ({"entropy_coeff": {"a": -0.1}}, "entropy_coeff must not be negative"),
            ({"gamma": 1.1}, "gamma must lie between 0 and 1, got 1.1"),
            ({"lmbda": float("nan")}, "lmbda must lie between 0 and 1, got nan"),
        ],
    )
    def test_rejects_values(self, setting: dict, message: str) -> None:
        policy, critic = make_networks()
        with pytest.raises(ValueError, match=message):
            make_ppo_loss(make_actor(policy), make_critic(critic), **setting)

    def test_rejects_types(self) -> None:
        policy, critic = make_networks()
        actor, critic_module = make_actor(policy), make_critic(critic)
        with pytest.raises(TypeError, match=r"actor_network must be .* got StateIndependentScale"):
            make_ppo_loss(policy, critic_module)
        with pytest.raises(TypeError, match=r"critic_network must be .* got Sequential"):
            make_ppo_loss(actor, critic)
        with pytest.raises(TypeError, match="loss_class must be ClipPPOLoss or a subclass"):
            make_ppo_loss(actor, critic_module, loss_class=nn.Linear)


# Ratio and KL ------------------------------------------------------------------------------------


class TestKL:
    def test_ratio_is_exactly_one_before_the_first_step(self) -> None:
        policy, critic = make_networks(torch.float32)
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic))
        data = estimate_advantage(loss, make_rollout(actor).reshape(-1)).detach()
        losses = loss(data)
        assert losses["mean_ratio"].item() == 1.0
        assert losses["max_ratio"].item() == 1.0
        assert losses["clip_fraction"].item() == 0.0
        assert ppo_kl_k3(losses).item() == 0.0

    @settings(deadline=None, max_examples=50)
    @given(st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=20))
    def test_k3_identity(self, log_ratios: list[float]) -> None:
        log_ratio = torch.tensor(log_ratios, dtype=torch.float64)
        losses = TensorDict(
            {"mean_ratio": log_ratio.exp().mean(), "kl_approx": (-log_ratio).mean()}
        )
        torch.testing.assert_close(ppo_kl_k3(losses), kl_k3(log_ratio), rtol=1e-9, atol=1e-12)
        assert kl_k3(log_ratio) >= 0.0

    def test_k3_from_the_loss_is_that_of_the_log_ratios(self) -> None:
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic))
        data = estimate_advantage(loss, make_rollout(actor)).reshape(-1)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            log_prob = gaussian_log_prob(data["action"], *policy(data["observation"]))
        kl = ppo_kl_k3(loss(data))
        assert not kl.requires_grad
        torch.testing.assert_close(kl, kl_k3(log_prob - data["action_log_prob"]))

    def test_k3_estimates_the_divergence_from_the_old_policy(self) -> None:
        torch.manual_seed(0)
        old = torch.distributions.Normal(0.0, 1.0)
        new = torch.distributions.Normal(0.3, 1.2)
        action = old.sample((200_000,))
        estimate = kl_k3(new.log_prob(action) - old.log_prob(action))
        exact = torch.distributions.kl_divergence(old, new)
        assert estimate.item() == pytest.approx(exact.item(), rel=0.02)

    def test_k3_names_what_is_missing(self) -> None:
        with pytest.raises(ValueError, match=r"\['kl_approx'\] are missing from \['mean_ratio'\]"):
            ppo_kl_k3(TensorDict({"mean_ratio": torch.ones(())}))


# Advantages --------------------------------------------------------------------------------------


class TableCritic(nn.Module):
    """Value of a state is its only feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, observation: Tensor) -> Tensor:
        return self.weight * observation[..., :1]


def make_table_loss(**settings_: float | bool) -> ClipPPOLoss:
    policy = StateIndependentScale(nn.Linear(1, 1), 1).double()
    return make_ppo_loss(make_actor(policy), make_critic(TableCritic()), **settings_)


def table_rollout(
    value: Tensor, last_value: Tensor, reward: Tensor, done: Tensor, terminated: Tensor
) -> TensorDict:
    """Rollout ``[B, T]`` in which states have the given values."""
    next_value = torch.cat([value[:, 1:], last_value[:, None]], dim=1)
    return TensorDict(
        {
            "observation": value[..., None],
            "next": {
                "observation": next_value[..., None],
                "reward": reward[..., None],
                "done": done[..., None],
                "terminated": terminated[..., None],
            },
        },
        batch_size=value.shape,
    )


@pytest.fixture
def random_table() -> dict[str, Tensor]:
    torch.manual_seed(0)
    done = torch.rand(5, 12) < 0.3
    return {
        "value": torch.randn(5, 12, dtype=torch.float64),
        "last_value": torch.randn(5, dtype=torch.float64),
        "reward": torch.randn(5, 12, dtype=torch.float64),
        "done": done,
        "terminated": done & (torch.rand(5, 12) < 0.5),
    }


class TestAdvantage:
    def test_worked_case(self) -> None:
        # Two environments, three steps, written with time first.
        reward = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]], dtype=torch.float64).T
        done = torch.tensor([[0, 0], [0, 1], [1, 0]], dtype=torch.bool).T
        last_value = torch.tensor([0.7, 0.8], dtype=torch.float64)
        value = torch.randn(2, 3, dtype=torch.float64)
        rollout = table_rollout(value, last_value, reward, done, terminated=done)
        loss = make_table_loss(gamma=0.9, lmbda=1.0)
        target = estimate_advantage(loss, rollout)["value_target"].squeeze(-1)
        expected = [[3.88, 1.10], [3.20, -1.0], [3.0, 0.72]]
        torch.testing.assert_close(target.T, torch.tensor(expected, dtype=torch.float64))

    def test_lambda_zero_is_the_one_step_target(self, random_table: dict[str, Tensor]) -> None:
        rollout = table_rollout(**random_table)
        loss = make_table_loss(gamma=0.9, lmbda=0.0)
        target = estimate_advantage(loss, rollout)["value_target"]
        bootstrap = ~rollout["next", "terminated"] * rollout["next", "observation"]
        torch.testing.assert_close(target, rollout["next", "reward"] + 0.9 * bootstrap)

    def test_lambda_one_is_the_return(self, random_table: dict[str, Tensor]) -> None:
        rollout = table_rollout(**random_table)
        loss = make_table_loss(gamma=0.9, lmbda=1.0)
        target = estimate_advantage(loss, rollout)["value_target"]
        expected = torch.zeros(5, 12, 1, dtype=torch.float64)
        following = random_table["last_value"][:, None]
        for t in reversed(range(12)):
            step = rollout["next"][:, t]
            # At a truncation the return goes on with the value of the state reached.
            following = torch.where(step["done"], step["observation"], following)
            following = step["reward"] + 0.9 * following * ~step["terminated"]
            expected[:, t] = following
        torch.testing.assert_close(target, expected)

    def test_truncation_bootstraps_unless_told_otherwise(self) -> None:
        ones = torch.ones(1, 2, dtype=torch.float64)
        truncated = torch.tensor([[True, False]])
        rollout = table_rollout(
            value=torch.tensor([[1.0, 2.0]], dtype=torch.float64),
            last_value=torch.tensor([4.0], dtype=torch.float64),
            reward=ones,
            done=truncated,
            terminated=torch.zeros_like(truncated),
        )
        rollout["next", "observation"][0, 0] = 7.0  # the state at the time limit, before the reset
        target = estimate_advantage(make_table_loss(gamma=0.5), rollout.clone())["value_target"]
        torch.testing.assert_close(target[0, 0].item(), 1.0 + 0.5 * 7.0)
        torch.testing.assert_close(target[0, 1].item(), 1.0 + 0.5 * 4.0)
        parity = make_table_loss(gamma=0.5, truncation_is_terminal=True)
        target = estimate_advantage(parity, rollout.clone())["value_target"]
        torch.testing.assert_close(target[0, 0].item(), 1.0)
        torch.testing.assert_close(target[0, 1].item(), 1.0 + 0.5 * 4.0)

    def test_episodes_do_not_leak_into_each_other(self) -> None:
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic))
        rollout = make_rollout(actor, (1, 10))
        for key in ("done", "terminated"):
            rollout["next", key].fill_(False)
        rollout["next", "done"][0, 4] = True  # truncated
        whole = estimate_advantage(loss, rollout.clone())["advantage"]
        parts = [estimate_advantage(loss, rollout[:, s].clone()) for s in (slice(5), slice(5, 10))]
        torch.testing.assert_close(whole, torch.cat([part["advantage"] for part in parts], 1))

    def test_no_gradient_and_the_precision_of_the_critic(self) -> None:
        policy, critic = make_networks()
        actor = make_actor(policy)
        loss = make_ppo_loss(actor, make_critic(critic), gamma=0.99)
        assert loss.value_estimator.gamma.item() == 0.99  # and not its nearest float32
        rollout = estimate_advantage(loss, make_rollout(actor))
        for key in ("advantage", "value_target", "state_value"):
            assert not rollout[key].requires_grad
            assert rollout[key].shape == (4, 16, 1)
        torch.testing.assert_close(rollout["state_value"], critic(rollout["observation"]).detach())
