from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss

import minerva_torchrl.objectives
from minerva_torchrl.modules import DirectClipPPOLoss, StateIndependentScale
from minerva_torchrl.modules.popart import (
    PopArtClipPPOLoss,
    PopArtHead,
    PopArtVMPOLoss,
    popart_normalize,
    popart_scale,
    popart_update_,
)
from minerva_torchrl.objectives.ppo import estimate_advantage, make_ppo_loss


def make_networks(
    step_size: float = 0.5, dtype: torch.dtype = torch.float64
) -> tuple[ProbabilisticActor, TensorDictModule, PopArtHead]:
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(
            StateIndependentScale(nn.Linear(3, 2), action_dim=2),
            in_keys=["observation"],
            out_keys=["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    head = PopArtHead(8, step_size=step_size)
    critic = TensorDictModule(
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), head),
        in_keys=["observation"],
        out_keys=["state_value"],
    )
    return actor.to(dtype), critic.to(dtype), head


def make_rollout(actor: ProbabilisticActor, reward_scale: float = 100.0) -> TensorDict:
    torch.manual_seed(1)
    dtype = next(actor.parameters()).dtype
    done = torch.rand(4, 6, 1) < 0.2
    rollout = TensorDict(
        {
            "observation": torch.randn(4, 6, 3, dtype=dtype),
            "next": {
                "observation": torch.randn(4, 6, 3, dtype=dtype),
                "reward": reward_scale * (1.0 + torch.randn(4, 6, 1, dtype=dtype)),
                "done": done,
                "terminated": done & (torch.rand(4, 6, 1) < 0.5),
            },
        },
        batch_size=[4, 6],
    )
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        return actor(rollout)


class TestHead:
    @pytest.mark.parametrize("debias", [True, False])
    @pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3, 1e7])  # the first and last hit the bounds
    @pytest.mark.parametrize("out_features", [1, 3])
    def test_outputs_are_preserved(self, debias: bool, scale: float, out_features: int) -> None:
        torch.manual_seed(0)
        head = PopArtHead(4, out_features, step_size=0.1, debias=debias, dtype=torch.float64)
        features = torch.randn(32, 4, dtype=torch.float64)
        expected = head(features).detach()
        for _ in range(20):
            targets = 5.0 * scale + scale * torch.randn(16, out_features, dtype=torch.float64)
            head.update(targets)
            torch.testing.assert_close(head(features).detach(), expected, rtol=1e-6, atol=1e-6)
        assert not torch.equal(head.mean, torch.zeros_like(head.mean))

    def test_outputs_are_preserved_in_single_precision(self) -> None:
        torch.manual_seed(0)
        head = PopArtHead(4, step_size=0.1)
        features = torch.randn(32, 4)
        expected = head(features).detach()
        for _ in range(5):
            head.update(3.0 + 2.0 * torch.randn(16, 1))
            torch.testing.assert_close(head(features).detach(), expected, rtol=1e-5, atol=1e-5)

    @settings(deadline=None, max_examples=30)
    @given(
        shift=st.floats(-1e4, 1e4),
        log_scale=st.floats(-3.0, 4.0),
        step_size=st.floats(1e-4, 1.0),
        seed=st.integers(0, 100),
    )
    def test_outputs_are_preserved_for_any_targets(
        self, shift: float, log_scale: float, step_size: float, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        head = PopArtHead(4, step_size=step_size, dtype=torch.float64)
        features = torch.randn(8, 4, dtype=torch.float64, generator=generator)
        expected = head(features).detach()
        noise = torch.randn(16, 1, dtype=torch.float64, generator=generator)
        head.update(shift + 10.0**log_scale * noise)
        torch.testing.assert_close(head(features).detach(), expected, rtol=1e-6, atol=1e-6)

    def test_statistics_are_moving_averages_of_the_first_two_moments(self) -> None:
        torch.manual_seed(0)
        step_size = 0.3
        head = PopArtHead(4, step_size=step_size, debias=False, dtype=torch.float64)
        first, second = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        for _ in range(10):
            targets = 7.0 + 2.0 * torch.randn(16, 1, dtype=torch.float64)
            head.update(targets)
            first = first + step_size * (targets.mean(0) - first)
            second = second + step_size * (targets.square().mean(0) - second)
        torch.testing.assert_close(head.mean, first)
        torch.testing.assert_close(head.variance, second - first.square())

    def test_debiasing_weights_batches_without_the_initial_values(self) -> None:
        torch.manual_seed(0)
        step_size = 0.2
        head = PopArtHead(4, step_size=step_size, dtype=torch.float64)
        batches = [3.0 + torch.randn(16, 1, dtype=torch.float64) for _ in range(6)]
        for batch in batches:
            head.update(batch)
        ages = torch.arange(5, -1, -1)
        weights = (1.0 - step_size) ** ages.double()
        weights /= weights.sum()
        first = (weights * torch.stack([batch.mean() for batch in batches])).sum()
        second = (weights * torch.stack([batch.square().mean() for batch in batches])).sum()
        torch.testing.assert_close(head.mean[0], first)
        torch.testing.assert_close(head.variance[0], second - first.square())

    def test_large_mean_keeps_its_variance_in_single_precision(self) -> None:
        torch.manual_seed(0)
        head = PopArtHead(4, step_size=0.1)
        for _ in range(50):
            head.update(1e4 + torch.randn(256, 1))
        assert head.scale.item() == pytest.approx(1.0, abs=0.05)

    def test_bounds_of_the_scale(self) -> None:
        head = PopArtHead(4, step_size=1.0)
        head.update(torch.full((8, 1), 3.0))
        assert head.scale.item() == pytest.approx(1e-2)
        head.update(1e9 * torch.randn(8, 1))
        assert head.scale.item() == pytest.approx(1e6)
        narrow = PopArtHead(4, step_size=1.0, min_scale=0.5, max_scale=2.0)
        narrow.update(torch.zeros(8, 1))
        assert narrow.scale.item() == 0.5
        narrow.update(100.0 * torch.randn(8, 1))
        assert narrow.scale.item() == 2.0

    @pytest.mark.parametrize("mask_shape", [(4, 6), (4, 6, 1)])
    def test_masked_targets_do_not_count(self, mask_shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        targets = torch.randn(4, 6, 1, dtype=torch.float64)
        mask = torch.rand(4, 6) < 0.5
        masked = PopArtHead(4, step_size=0.1, dtype=torch.float64)
        selected = copy.deepcopy(masked)
        selected.update(targets[mask])
        targets[~mask] = float("nan")
        masked.update(targets, mask.reshape(mask_shape))
        for left, right in zip(
            masked.state_dict().values(), selected.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(left, right)

    @pytest.mark.parametrize("debias", [True, False])
    def test_batch_without_valid_targets_changes_nothing(self, debias: bool) -> None:
        head = PopArtHead(4, step_size=0.1, debias=debias)
        nothing = torch.zeros(5, dtype=torch.bool)
        for _ in range(2):  # as the first update and after another one
            before = copy.deepcopy(head.state_dict())
            head.update(torch.full((5, 1), float("nan")), nothing)
            for key, value in head.state_dict().items():
                assert torch.equal(value, before[key]), key
            head.update(torch.randn(8, 1))

    def test_update_does_not_wait_for_the_device(self) -> None:
        # Tensors on the meta device have no values: reading one would raise.
        head = PopArtHead(4, device=torch.device("meta"))
        mask = torch.ones(8, dtype=torch.bool, device="meta")
        head.update(torch.randn(8, 1, device="meta"), mask)

    def test_value_is_scaled_and_shifted_and_normalize_inverts_it(self) -> None:
        torch.manual_seed(0)
        head = PopArtHead(4, step_size=1.0, dtype=torch.float64)
        head.update(50.0 + 4.0 * torch.randn(64, 1, dtype=torch.float64))
        features = torch.randn(8, 4, dtype=torch.float64)
        normalized = features @ head.weight.T + head.bias
        torch.testing.assert_close(head(features), normalized * head.scale + head.mean)
        torch.testing.assert_close(head.normalize(head(features)), normalized)

    def test_state_dict_round_trip(self) -> None:
        head = PopArtHead(4, step_size=0.1)
        head.update(10.0 + torch.randn(8, 1))
        other = PopArtHead(4, step_size=0.1)
        other.load_state_dict(head.state_dict())
        features = torch.randn(3, 4)
        assert torch.equal(other(features), head(features))
        targets = torch.randn(8, 1)
        head.update(targets)
        other.update(targets)
        assert torch.equal(other.mean, head.mean)
        assert torch.equal(other.weight, head.weight)

    @pytest.mark.parametrize("step_size", [0.0, -0.1, 1.5])
    def test_rejects_step_size(self, step_size: float) -> None:
        with pytest.raises(ValueError, match=rf"step_size must be in \(0, 1\], got {step_size}"):
            PopArtHead(4, step_size=step_size)

    def test_rejects_bounds(self) -> None:
        with pytest.raises(ValueError, match=r"min_scale=2.0 and max_scale=1.0"):
            PopArtHead(4, min_scale=2.0, max_scale=1.0)
        with pytest.raises(ValueError, match="min_scale must be positive"):
            PopArtHead(4, min_scale=0.0)

    def test_rejects_shapes(self) -> None:
        with pytest.raises(ValueError, match=r"targets must have the 1 outputs.*\(8, 2\)"):
            PopArtHead(4).update(torch.zeros(8, 2))
        with pytest.raises(ValueError, match=r"mask must have the batch shape \(8,\).*\(7,\)"):
            PopArtHead(4).update(torch.zeros(8, 1), torch.ones(7, dtype=torch.bool))


class TestInsideALoss:
    def test_update_reaches_loss_and_module_and_keeps_values(self) -> None:
        actor, critic, head = make_networks()
        loss = make_ppo_loss(actor, critic, loss_class=PopArtClipPPOLoss)
        rollout = estimate_advantage(loss, make_rollout(actor))
        weight = head.weight.detach().clone()
        popart_update_(loss, rollout["value_target"])
        again = estimate_advantage(loss, rollout.clone())
        torch.testing.assert_close(again["state_value"], rollout["state_value"], rtol=1e-6, atol=0)
        torch.testing.assert_close(again["advantage"], rollout["advantage"], rtol=1e-6, atol=1e-6)
        # The module that the loss was built from (and that a collector may run) has it as well.
        assert not torch.allclose(head.weight, weight)
        torch.testing.assert_close(head.mean, rollout["value_target"].mean((0, 1)))
        torch.testing.assert_close(critic(rollout.clone())["state_value"], rollout["state_value"])
        # ... and so has the state that a checkpoint of the loss keeps.
        assert torch.equal(loss.state_dict()["critic_network_params.module.2.mean"], head.mean)

    def test_same_update_as_on_the_module(self) -> None:
        actor, critic, head = make_networks()
        reference = copy.deepcopy(head)
        loss = make_ppo_loss(actor, critic, loss_class=PopArtClipPPOLoss)
        for _ in range(3):
            targets = 10.0 * torch.randn(4, 6, 1, dtype=torch.float64)
            mask = torch.rand(4, 6) < 0.7
            reference.update(targets, mask)
            popart_update_(loss, targets, mask)
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(head.state_dict()[key], value, rtol=0, atol=0)
        torch.testing.assert_close(popart_scale(loss), reference.scale, rtol=0, atol=0)

    @pytest.mark.parametrize("clip_value", [False, True])
    def test_value_loss_is_that_of_the_normalised_problem(self, clip_value: bool) -> None:
        actor, critic, head = make_networks()
        loss = make_ppo_loss(actor, critic, clip_value=clip_value, loss_class=PopArtClipPPOLoss)
        rollout = estimate_advantage(loss, make_rollout(actor))
        rollout["state_value"] += 300.0 * torch.randn_like(rollout["state_value"])
        popart_update_(loss, rollout["value_target"])
        data = rollout.reshape(-1)
        losses = loss(data)
        normalized = head(critic.module[:2](data["observation"])).sub(head.mean).div(head.scale)
        target = (data["value_target"] - head.mean) / head.scale
        error = (normalized - target).square()
        if clip_value:
            old = (data["state_value"] - head.mean) / head.scale
            change = (normalized - old).clamp(-0.2, 0.2)
            assert (change.abs() == 0.2).any()
            assert (change.abs() < 0.2).any()
            error = torch.maximum(error, (old + change - target).square())
        # The radius is stored in single precision.
        expected = 0.25 * error.mean()
        torch.testing.assert_close(losses["loss_critic"], expected, rtol=1e-6, atol=0)

    def test_gradient_is_that_of_the_real_error_over_the_variance(self) -> None:
        actor, critic, _ = make_networks()
        settings_ = {"clip_value": False, "normalize_advantage": True}
        loss = make_ppo_loss(actor, critic, loss_class=PopArtClipPPOLoss, **settings_)
        rollout = estimate_advantage(loss, make_rollout(actor))
        popart_update_(loss, rollout["value_target"])
        plain = ClipPPOLoss(actor, critic, critic_coeff=0.25, loss_critic_type="l2", **settings_)
        data = rollout.reshape(-1)
        parameters = list(critic.parameters())
        expected = torch.autograd.grad(loss(data)["loss_critic"], parameters)
        scaled = plain(data)["loss_critic"] / popart_scale(plain).square().squeeze()
        for left, right in zip(torch.autograd.grad(scaled, parameters), expected, strict=True):
            torch.testing.assert_close(left, right)

    @pytest.mark.parametrize("clip_value", [None, 0.05])
    def test_with_vmpo(self, clip_value: float | None) -> None:
        actor, critic, head = make_networks()
        loss = PopArtVMPOLoss(actor, critic, clip_value=clip_value)
        loss.make_value_estimator("gae", gamma=0.99, lmbda=0.95)
        rollout = estimate_advantage(loss, make_rollout(actor))
        popart_update_(loss, rollout["value_target"])
        again = estimate_advantage(loss, rollout.clone())
        torch.testing.assert_close(again["state_value"], rollout["state_value"], rtol=1e-6, atol=0)
        data = rollout.reshape(-1)
        data["state_value"] += 300.0 * torch.randn_like(data["state_value"])
        value, target, old = (
            head.normalize(x)
            for x in (
                critic(data.clone())["state_value"],
                data["value_target"],
                data["state_value"],
            )
        )
        error = (value - target).square()
        if clip_value is not None:
            clipped = old + (value - old).clamp(-clip_value, clip_value)
            error = torch.maximum(error, (clipped - target).square())
        expected = loss.critic_coeff * error.mean()
        torch.testing.assert_close(loss(data)["loss_critic"], expected)

    @pytest.mark.parametrize("loss_class", [PopArtClipPPOLoss, PopArtVMPOLoss])
    def test_all_inputs_of_the_value_loss_are_normalised(self, loss_class: Any) -> None:
        """The seam that the losses have for it: target, value, stored value."""
        actor, critic, head = make_networks()
        loss = loss_class(actor, critic)
        popart_update_(loss, 100.0 * torch.randn(24, 1, dtype=torch.float64))
        target, value, old = torch.randn(3, 24, 1, dtype=torch.float64)
        actual = loss._critic_loss_inputs(target, value, old)
        for left, right in zip(actual, (target, value, old), strict=True):
            torch.testing.assert_close(left, head.normalize(right))
        assert loss._critic_loss_inputs(target, value, None)[2] is None

    def test_normalised_value_error_does_not_depend_on_the_scale_of_rewards(self) -> None:
        gradients = []
        for reward_scale in (1.0, 1000.0):
            actor, critic, _ = make_networks(step_size=1.0)
            loss = make_ppo_loss(actor, critic, clip_value=False, loss_class=PopArtClipPPOLoss)
            rollout = make_rollout(actor, reward_scale)
            for key in ("done", "terminated"):  # no bootstrapping: targets are rewards
                rollout["next", key].fill_(True)
            rollout = estimate_advantage(loss, rollout)
            popart_update_(loss, rollout["value_target"])
            (target,) = popart_normalize(loss, rollout["value_target"])
            gradients.append(target)
        torch.testing.assert_close(gradients[0], gradients[1])

    def test_critic_learns_large_returns_over_several_rollouts(self) -> None:
        actor, critic, _ = make_networks(step_size=0.3, dtype=torch.float32)
        loss = make_ppo_loss(actor, critic, clip_value=False, loss_class=PopArtClipPPOLoss)
        optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
        observation = torch.randn(256, 1, 3)
        returns = 5000.0 + 1000.0 * observation[..., :1]
        end = torch.ones(256, 1, 1, dtype=torch.bool)
        errors = []
        for _ in range(20):
            rollout = TensorDict(
                {
                    "observation": observation,
                    "next": {
                        "observation": observation,
                        "reward": returns,
                        "done": end,
                        "terminated": end,
                    },
                },
                batch_size=[256, 1],
            )
            with torch.no_grad():
                rollout = estimate_advantage(loss, actor(rollout))
            errors.append((rollout["state_value"] - returns).square().mean().sqrt().item())
            popart_update_(loss, rollout["value_target"])
            for _ in range(10):
                losses = loss(rollout.reshape(-1))
                optimizer.zero_grad()
                losses["loss_critic"].backward()
                optimizer.step()
        assert errors[0] > 4000.0
        # Without normalisation 200 steps of 0.01 could move a value by about 2.
        assert errors[-1] < 500.0

    def test_state_dict_round_trip_of_the_loss(self) -> None:
        actor, critic, _ = make_networks()
        loss = make_ppo_loss(actor, critic, loss_class=PopArtClipPPOLoss)
        rollout = estimate_advantage(loss, make_rollout(actor))
        popart_update_(loss, rollout["value_target"])
        other_actor, other_critic, _ = make_networks()
        other = make_ppo_loss(other_actor, other_critic, loss_class=PopArtClipPPOLoss)
        other.load_state_dict(loss.state_dict())
        data = rollout.reshape(-1)
        assert torch.equal(other(data)["loss_critic"], loss(data)["loss_critic"])

    def test_works_without_functional_parameters(self) -> None:
        actor, critic, head = make_networks()
        loss = PopArtClipPPOLoss(
            actor, critic, functional=False, loss_critic_type="l2", critic_coeff=1.0
        )
        targets = 10.0 + torch.randn(24, 1, dtype=torch.float64)
        popart_update_(loss, targets)
        torch.testing.assert_close(head.mean, targets.mean(0))
        torch.testing.assert_close(popart_normalize(loss, targets)[0], head.normalize(targets))

    def test_rejects_critic_without_head(self) -> None:
        actor, _, _ = make_networks()
        critic = TensorDictModule(
            nn.Linear(3, 1).double(), in_keys=["observation"], out_keys=["state_value"]
        )
        with pytest.raises(
            ValueError, match="exactly one PopArtHead, got PopArtClipPPOLoss with 0"
        ):
            make_ppo_loss(actor, critic, loss_class=PopArtClipPPOLoss)
        with pytest.raises(ValueError, match="exactly one PopArtHead, got PopArtVMPOLoss with 0"):
            PopArtVMPOLoss(actor, critic)
        plain = make_ppo_loss(actor, critic)
        with pytest.raises(ValueError, match="exactly one PopArtHead, got ClipPPOLoss with 0"):
            popart_update_(plain, torch.zeros(3, 1))

    @pytest.mark.parametrize("loss_class", [ClipPPOLoss, DirectClipPPOLoss])
    def test_refuses_a_loss_in_real_units(self, loss_class: type[ClipPPOLoss]) -> None:
        actor, critic, _ = make_networks()
        message = rf"a PopArtHead, .* but {loss_class.__name__} .* Use PopArtClipPPOLoss"
        with pytest.raises(ValueError, match=message):
            make_ppo_loss(actor, critic, loss_class=loss_class)


def test_objectives_give_the_same_names() -> None:
    assert minerva_torchrl.objectives.PopArtHead is PopArtHead
    assert minerva_torchrl.objectives.PopArtClipPPOLoss is PopArtClipPPOLoss
    assert minerva_torchrl.objectives.popart_update_ is popart_update_
    with pytest.raises(AttributeError, match="has no attribute 'PopArt'"):
        _ = minerva_torchrl.objectives.PopArt
