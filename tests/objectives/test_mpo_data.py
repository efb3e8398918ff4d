"""How MPOLoss treats its data: reductions, masks, weights, ends of episodes, n-step transitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.modules import IndependentNormal, TanhNormal
from torchrl.objectives import ValueEstimators

from minerva_torchrl import MPOLoss
from tests.objectives.base import (
    ACTION_DIM,
    OBSERVATION_DIM,
    InjectedNoise,
    assert_equal,
    gradients,
    make_actor,
    make_critic,
    make_transitions,
    run,
    total_loss,
    with_updater,
)

POLICY_STATES = ["next", "current", "both"]
LOSSES = [
    "loss_qvalue",
    "loss_actor",
    "loss_temperature",
    "loss_alpha_mean",
    "loss_alpha_stddev",
    "loss_penalty_temperature",
]
# Losses of the policy and the duals, all of which are taken over the states of the policy loss.
STATE_LOSSES = LOSSES[1:]
NUM_SAMPLES = 5
NAN = math.nan


def make_loss(
    td_est: Any = None, *, distribution_class: Any = IndependentNormal, **kwargs: Any
) -> MPOLoss:
    """A loss whose online networks differ from its targets."""
    torch.manual_seed(0)
    actor = make_actor(distribution_class=distribution_class)
    kwargs = {"num_action_samples": NUM_SAMPLES, "init_alpha_stddev": 10.0} | kwargs
    kwargs = {"num_qvalue_nets": 2, "scalar_output_mode": "exclude"} | kwargs
    loss = with_updater(MPOLoss(actor, make_critic(), **kwargs))
    loss.make_value_estimator(td_est, gamma=0.9)
    with torch.no_grad():
        for name in ("actor_network_params", "qvalue_network_params"):
            for parameter in getattr(loss, name).parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return loss


def without_ends(data: TensorDict) -> TensorDict:
    for key in ("done", "terminated", "truncated"):
        data["next", key].fill_(False)
    return data


def next_value(loss: MPOLoss, data: TensorDict) -> Tensor:
    """Mean target value of the sampled actions at the next states, ``[B, 1]``."""
    samples, _ = loss._sample(data["next"].select("observation"), NUM_SAMPLES)
    return samples["scores", "value"].mean(-1, keepdim=True)


def losses_of(output: TensorDict) -> TensorDict:
    return output.select(*LOSSES)


# Reduction ---------------------------------------------------------------------------------------


class TestMPOReduction:
    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    @pytest.mark.parametrize("ends", [False, True])
    def test_mpo_reduction(self, ends: bool, policy_states: Any) -> None:
        data = make_transitions(8)
        if not ends:
            without_ends(data)
        output = {
            r: run(make_loss(reduction=r, policy_states=policy_states), data.clone())
            for r in (None, "mean", "sum", "none")
        }
        assert_equal(output[None], output["mean"], 0, 0)
        assert set(output["none"].keys()) == set(LOSSES)
        assert output["none"].batch_size == data.batch_size
        terminated = data["next", "terminated"].squeeze(-1)
        for key in LOSSES:
            elements = output["none"][key]
            assert elements.shape == data.shape
            assert output["sum"][key].shape == output["mean"][key].shape == ()
            torch.testing.assert_close(output["sum"][key], elements.sum())
            # Terminal next states are left out of the policy loss, and of what it is divided by.
            left_out = terminated if policy_states == "next" and key != "loss_qvalue" else None
            count = 8 if left_out is None else (~left_out).sum()
            torch.testing.assert_close(output["mean"][key], elements.sum() / count)
            assert left_out is None or not elements[left_out].any()

    def test_mpo_scalar_output_mode(self) -> None:
        data = make_transitions(8)
        metrics = set(make_loss().out_keys) - set(LOSSES)
        match = r"leaves out its 0-d metrics.*scalar_output_mode="
        with pytest.warns(UserWarning, match=match) as warned:
            loss = make_loss(reduction="none", scalar_output_mode=None)
        assert warned[0].filename == __file__  # where the loss is made
        assert loss.scalar_output_mode == "exclude"
        for mode, expected in (("exclude", set()), ("non_tensor", metrics)):
            loss = make_loss(reduction="none", scalar_output_mode=mode)
            output = run(loss, data.clone())
            assert set(output.keys()) == set(loss.out_keys) == set(LOSSES) | expected
        scalars = run(make_loss(), data.clone())
        for key in metrics:
            torch.testing.assert_close(output[key], scalars[key])
        # Without reduction "none" it changes nothing.
        for mode in (None, "exclude", "non_tensor"):
            assert_equal(run(make_loss(scalar_output_mode=mode), data.clone()), scalars)

    def test_mpo_metrics(self) -> None:
        loss = make_loss()
        output = run(loss, make_transitions(8))
        for key in output.keys():
            assert output[key].shape == ()
            assert output[key].requires_grad is key.startswith("loss_")
        assert output["q_min"] <= output["q_mean"] <= output["q_max"]
        assert 0 < output["stddev_min"] <= output["stddev_max"]
        assert 1 <= output["ess"] <= NUM_SAMPLES
        entropy = math.log(NUM_SAMPLES) - output["kl_q_rel"] * loss.epsilon
        torch.testing.assert_close(output["weight_entropy"], entropy)
        torch.testing.assert_close(output["kl_mean"], output["kl_mean_rel"] * loss.epsilon_mean)
        kl_stddev = output["kl_stddev_rel"] * loss.epsilon_stddev
        torch.testing.assert_close(output["kl_stddev"], kl_stddev)
        assert output["kl_mean"] > 0
        assert output["kl_stddev"] > 0

    @pytest.mark.parametrize(
        ("bound", "changed"),
        [
            ("epsilon", {"loss_temperature", "kl_q_rel"}),
            ("epsilon_mean", {"loss_alpha_mean", "kl_mean_rel"}),
            ("epsilon_stddev", {"loss_alpha_stddev", "kl_stddev_rel"}),
            ("epsilon_penalty", {"loss_penalty_temperature", "kl_penalty_rel"}),
        ],
    )
    def test_mpo_schedulable_bounds(self, bound: str, changed: set[str]) -> None:
        loss, data = make_loss(), make_transitions(8)
        before, buffer = run(loss, data), getattr(loss, bound)
        setattr(loss, bound, 0.7)
        assert getattr(loss, bound) is buffer
        assert buffer.item() == pytest.approx(0.7)
        after = run(loss, data)
        assert {key for key in before.keys() if before[key] != after[key]} == changed
        assert_equal(run(make_loss(**{bound: 0.7}), data), after, 0, 0)


# Masks and weights -------------------------------------------------------------------------------


class TestMPOMask:
    """Steps left out by ``("collector", "mask")`` give what the data without them gives."""

    @staticmethod
    def flat(policy_states: str, key: Any = ("collector", "mask")) -> tuple[TensorDict, ...]:
        """Masked data and the valid part of it, each with the noise of its samples."""
        data = make_transitions(8)
        data["priority_weight"] = torch.linspace(0.5, 1.5, 8)
        mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
        draws = torch.randn(2, NUM_SAMPLES, 8, ACTION_DIM)
        part = data[mask]
        data["next", "reward"][~mask] = NAN
        data["action_log_prob"][~mask] = NAN
        data[key] = mask
        count = 1 if policy_states == "next" else 2
        return (
            (data, InjectedNoise(*draws[:count])),
            (part, InjectedNoise(*draws[:count, :, mask])),
        )

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    def test_mpo_mask(self, policy_states: Any, reduction: Any) -> None:
        loss = make_loss(policy_states=policy_states, reduction=reduction)
        (data, noise), (part, part_noise) = self.flat(policy_states)
        loss.policy._draw_noise = noise
        masked = loss(data)
        loss.policy._draw_noise = part_noise
        # The extremes are a matter of their own (below).
        keys = [key for key in loss.out_keys if not key.endswith(("_min", "_max"))]
        assert_equal(masked.select(*keys), loss(part).select(*keys))
        assert data["td_error"].shape == data.shape

    def test_mpo_mask_extremes(self) -> None:
        loss = make_loss()
        (data, noise), (part, part_noise) = self.flat("next")
        data["next", "observation"][~data["collector", "mask"]] *= 100
        loss.policy._draw_noise = noise
        masked = loss(data)
        loss.policy._draw_noise = part_noise
        keys = ["q_min", "q_max", "stddev_min", "stddev_max"]
        assert_equal(masked.select(*keys), loss(part).select(*keys))

    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    def test_mpo_mask_gradients(self, policy_states: Any) -> None:
        loss = make_loss(policy_states=policy_states)
        (data, noise), (part, part_noise) = self.flat(policy_states)
        loss.policy._draw_noise = noise
        masked = gradients(loss, total_loss(loss(data)))
        loss.policy._draw_noise = part_noise
        assert_equal(masked, gradients(loss, total_loss(loss(part))))

    def test_mpo_mask_priority(self) -> None:
        """A step that is left out must not poison the replay buffer's priorities."""
        loss = make_loss()
        (data, loss.policy._draw_noise), _ = self.flat("next")
        loss(data)
        assert data["td_error"].isfinite().all()

    def test_mpo_mask_none(self) -> None:
        loss = make_loss(reduction="none")
        (data, loss.policy._draw_noise), _ = self.flat("next")
        output = loss(data)
        assert output.shape == data.shape
        for key in LOSSES:
            assert not output[key][~data["collector", "mask"]].any()
            assert output[key].isfinite().all()

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_mpo_mask_weights(self, reduction: Any) -> None:
        """Whatever weight a step that is left out has, it is left out."""
        loss = make_loss(reduction=reduction)
        data, _ = self.flat("next")[0]
        expected = losses_of(run(loss, data.clone()))
        data["priority_weight"][~data["collector", "mask"]] = NAN
        assert_equal(losses_of(run(loss, data)), expected, 0, 0)

    def test_mpo_mask_key(self) -> None:
        """Another entry can be named as the mask, and masking can be switched off."""
        loss = make_loss()
        (data, noise), (part, part_noise) = self.flat("next", key="valid")
        loss.policy._draw_noise, loss.loss_mask_key = noise, "valid"
        masked = loss(data)["loss_qvalue"]
        loss.policy._draw_noise = part_noise
        torch.testing.assert_close(masked, loss(part)["loss_qvalue"])
        loss.loss_mask_key = None
        loss.policy._draw_noise = InjectedNoise(torch.randn(NUM_SAMPLES, 8, ACTION_DIM))
        assert loss(data)["loss_qvalue"].isnan()

    @pytest.mark.parametrize("end", ["done", "cut"])
    @pytest.mark.parametrize("td_est", [None, ValueEstimators.TDLambda, "retrace"])
    def test_mpo_mask_padding(self, td_est: Any, end: str) -> None:
        """Padding behind a sequence, whether it ended or was cut off, does not reach back."""
        loss = make_loss(td_est, policy_states="next", sequence_steps="all")
        data = without_ends(make_transitions(2, 5))
        part = data[:, :3].clone()
        if end == "done":
            for td in (data, part):
                for key in ("done", "truncated"):
                    td["next", key][:, 2] = True
        data["collector", "mask"] = torch.arange(5).expand(2, 5) < 3
        draws = torch.randn(NUM_SAMPLES, 2, 5, ACTION_DIM)
        loss.policy._draw_noise = InjectedNoise(draws[:, :, :3])
        expected = losses_of(loss(part))
        loss.policy._draw_noise = InjectedNoise(draws)
        assert_equal(losses_of(loss(data)), expected)

    @pytest.mark.parametrize("td_est", [None, ValueEstimators.TDLambda, "retrace"])
    def test_mpo_mask_padding_not_finite(self, td_est: Any) -> None:
        loss = make_loss(td_est)
        data = without_ends(make_transitions(2, 5))
        data["next", "done"][:, 2] = data["next", "truncated"][:, 2] = True
        data["collector", "mask"] = torch.arange(5).expand(2, 5) < 3
        expected = losses_of(run(loss, data.clone()))
        data["next", "reward"][:, 3:] = NAN
        data["action_log_prob"][:, 3:] = NAN
        output = losses_of(run(loss, data))
        assert_equal(output, expected)
        for name, gradient in gradients(loss, total_loss(output)).items():
            assert gradient.isfinite().all(), name

    def test_mpo_mask_empty(self) -> None:
        loss, data = make_loss(), make_transitions(8)
        data["collector", "mask"] = torch.zeros(8, dtype=torch.bool)
        output = loss(data)
        for key in LOSSES:
            assert output[key] == 0
        assert all(not g.any() for g in gradients(loss, total_loss(output)).values())


class TestMPOPrioritizedWeights:
    @pytest.mark.parametrize("shape", [(8,), (8, 1)])
    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    def test_mpo_prioritized_weights(self, policy_states: Any, shape: tuple[int, ...]) -> None:
        data, weights = make_transitions(8), torch.rand(8)
        elements = run(make_loss(reduction="none", policy_states=policy_states), data.clone())
        plain = run(make_loss(policy_states=policy_states), data.clone())
        data["priority_weight"] = weights.reshape(shape)
        terminated = data["next", "terminated"].squeeze(-1)
        weighted = {
            use: run(
                make_loss(policy_states=policy_states, use_prioritized_weights=use), data.clone()
            )
            for use in ("auto", True, False)
        }
        for key in LOSSES:
            valid = torch.ones(8)
            if policy_states == "next" and key != "loss_qvalue":
                valid[terminated] = 0
            expected = (weights * elements[key]).sum() / (weights * valid).sum()
            for use in ("auto", True):
                torch.testing.assert_close(weighted[use][key], expected)
            torch.testing.assert_close(weighted[False][key], plain[key])
        assert weighted["auto"]["loss_qvalue"] != plain["loss_qvalue"]
        assert_equal(
            run(make_loss(reduction="none", policy_states=policy_states), data.clone()),
            elements * weights,
        )

    def test_mpo_prioritized_weights_sequence(self) -> None:
        data = make_transitions(4, 3)
        data["priority_weight"] = torch.rand(4, 3)
        weighted = run(make_loss("retrace", sequence_steps="first"), data.clone())
        weights, first = data["priority_weight"][:, 0], data.exclude("priority_weight")
        elements = run(
            make_loss("retrace", sequence_steps="first", reduction="none"), first.clone()
        )
        expected = (weights * elements["loss_qvalue"]).sum() / weights.sum()
        torch.testing.assert_close(weighted["loss_qvalue"], expected)

    def test_mpo_prioritized_weights_missing(self) -> None:
        loss, data = make_loss(use_prioritized_weights=True), make_transitions(8)
        with pytest.raises(ValueError, match=r"needs the entries \['priority_weight'\]"):
            loss(data)

    def test_mpo_priority(self) -> None:
        """The priority is the largest error of the ensemble."""
        loss, data = make_loss(), make_transitions(8)
        loss.policy._draw_noise = InjectedNoise(*[torch.randn(NUM_SAMPLES, 8, ACTION_DIM)] * 2)
        loss.qvalue_loss(data)
        bootstrap = torch.where(data["next", "terminated"], 0.0, next_value(loss, data))
        target = data["next", "reward"] + 0.9 * bootstrap
        error = (loss._online_outputs(data)[..., 0, 0] - target.squeeze(-1)).abs().amax(0)
        torch.testing.assert_close(data["td_error"], error.detach())


# Ends of episodes and n-step transitions ---------------------------------------------------------


class TestMPOEnds:
    @pytest.mark.parametrize("distribution_class", [IndependentNormal, TanhNormal])
    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    @pytest.mark.parametrize("td_est", [None, ValueEstimators.TDLambda, "retrace"])
    def test_mpo_terminating(
        self, td_est: Any, policy_states: Any, distribution_class: Any
    ) -> None:
        """Observations of terminal states may be NaN."""
        loss = make_loss(
            td_est,
            policy_states=policy_states,
            skip_done_states=True,
            distribution_class=distribution_class,
        )
        data = make_transitions(4, 3, action_scale=0.3)
        finite = run(loss, data.clone())
        terminated = data["next", "terminated"].squeeze(-1)
        data["next", "observation"][terminated] = NAN
        output = run(loss, data)
        assert_equal(output, finite)
        assert data["td_error"].isfinite().all()
        for name, gradient in gradients(loss, total_loss(output)).items():
            assert gradient.isfinite().all(), name

    @pytest.mark.parametrize("skip_done_states", [False, True])
    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    @pytest.mark.parametrize("td_est", [None, ValueEstimators.TDLambda, "retrace"])
    def test_mpo_terminal_next_states(
        self, td_est: Any, policy_states: Any, skip_done_states: bool
    ) -> None:
        """Terminal next observations change no loss; truncated ones bootstrap and are trained."""
        loss = make_loss(td_est, policy_states=policy_states, skip_done_states=skip_done_states)
        data = make_transitions(4, 3)
        before = run(loss, data.clone())
        after = {}
        for kind in ("terminated", "truncated"):
            changed = data.clone()
            where = changed["next", kind].squeeze(-1)
            assert where.any()
            changed["next", "observation"][where] += 1.0
            after[kind] = run(loss, changed)
        assert_equal(losses_of(after["terminated"]), losses_of(before), 1e-6, 0)
        assert after["truncated"]["loss_qvalue"] != before["loss_qvalue"]
        policy = [after["truncated"][key] != before[key] for key in ("loss_actor", "kl_mean")]
        assert all(policy) if policy_states != "current" else not any(policy)

    def test_mpo_both_states(self) -> None:
        """With both kinds of states a transition's loss is the mean over those that count."""
        data = make_transitions(8)
        noise = torch.randn(2, NUM_SAMPLES, 8, ACTION_DIM)
        elements = {}
        # The next states are sampled first, whichever states the policy is trained at.
        for policy_states, draws in (("next", noise[:1]), ("current", noise), ("both", noise)):
            loss = make_loss(policy_states=policy_states, reduction="none")
            loss.policy._draw_noise = InjectedNoise(*draws)
            elements[policy_states] = loss(data.clone())
        terminated = data["next", "terminated"].squeeze(-1)
        for key in STATE_LOSSES:
            at_current, at_next = elements["current"][key], elements["next"][key]
            expected = torch.where(terminated, at_current, (at_current + at_next) / 2)
            torch.testing.assert_close(elements["both"][key], expected)

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_mpo_batcher(self, n: int) -> None:
        """Transitions over n steps bootstrap with gamma**n."""
        loss, data = make_loss(), make_transitions(8)
        data["steps_to_next_obs"] = torch.full((8, 1), n)
        draws = [torch.randn(NUM_SAMPLES, 8, ACTION_DIM)] * 4
        loss.policy._draw_noise = InjectedNoise(*draws)
        loss.qvalue_loss(data)
        bootstrap = torch.where(data["next", "terminated"], 0.0, next_value(loss, data))
        target = data["next", "reward"] + 0.9**n * bootstrap
        error = (loss._online_outputs(data)[..., 0, 0] - target.squeeze(-1)).abs().amax(0)
        torch.testing.assert_close(data["td_error"], error.detach())
        if n == 1:
            expected = run(loss, data.exclude("steps_to_next_obs"))
            assert_equal(run(loss, data), expected)

    def test_mpo_batcher_mixed(self) -> None:
        """Shorter transitions at the ends of episodes have their own power."""
        loss, data = make_loss(reduction="none"), without_ends(make_transitions(8))
        steps = torch.tensor([1, 1, 2, 2, 3, 3, 4, 4]).unsqueeze(-1)
        mixed = run(loss, data.clone().set("steps_to_next_obs", steps))
        for n in range(1, 5):
            uniform = run(loss, data.clone().set("steps_to_next_obs", torch.full_like(steps, n)))
            where = (steps == n).squeeze(-1)
            actual = mixed["loss_qvalue"][where]
            torch.testing.assert_close(actual, uniform["loss_qvalue"][where])

    def test_mpo_batcher_retrace(self) -> None:
        loss, data = make_loss("retrace"), make_transitions(4, 3)
        data["steps_to_next_obs"] = torch.ones(4, 3, 1, dtype=torch.long)
        with pytest.raises(ValueError, match="Retrace needs one-step data"):
            loss(data)

    def test_mpo_extra_entries(self) -> None:
        """Entries that no network reads change nothing, whatever they hold."""
        loss, data = make_loss(), make_transitions(8)
        expected = run(loss, data.clone())
        data["pixels"] = torch.zeros(8, 3, dtype=torch.uint8)
        data["next", "info"] = torch.full((8, OBSERVATION_DIM), NAN)
        data["state_action_value"] = torch.full((8, 1), NAN)
        data["loc"] = torch.full((8, ACTION_DIM), NAN)
        data["next", "action"] = torch.full((8, ACTION_DIM), NAN)
        assert_equal(run(loss, data), expected, 0, 0)
