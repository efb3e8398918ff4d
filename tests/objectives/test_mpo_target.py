"""The target that MPOLoss regresses its critic on, by estimator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrl.objectives import ValueEstimators

from minerva_torchrl import Retrace
from tests.objectives.base import (
    InjectedNoise,
    assert_equal,
    make_actor,
    make_critic,
    run,
)
from tests.objectives.mpo_problem import (
    GAMMA,
    NUM_SAMPLES,
    Problem,
    make_data,
    make_noise,
)

POLICY_STATES = ["next", "current", "both"]


class TestMPOTarget:
    @pytest.mark.parametrize("td_est", [ValueEstimators.TD1, ValueEstimators.TDLambda, "retrace"])
    def test_mpo_single_steps(self, td_est: Any) -> None:
        """On transitions without a time dimension all are TD(0), with one warning."""
        data = make_data(9)
        loss = Problem(td_est).loss
        with pytest.warns(UserWarning, match="without a time dimension") as record:
            actual = run(loss, data.clone())
        assert len(record) == 1
        assert_equal(run(loss, data.clone()), actual, 0, 0)  # another warning would be an error
        assert_equal(actual, run(Problem(None).loss, data.clone()))

    @pytest.mark.parametrize("num_critics", [1, 2])
    def test_mpo_retrace(self, num_critics: int) -> None:
        """The target is that of the estimator by itself with the target networks."""
        problem = Problem("retrace", num_critics=num_critics, lmbda=0.8, reduction="none")
        loss, data = problem.loss, make_data(4, 5)
        noise = make_noise(NUM_SAMPLES, 4, 5)
        loss.policy._draw_noise = InjectedNoise(noise)
        loss_qvalue, _ = loss.qvalue_loss(data)
        next_q_value = problem.at_states(data["next", "observation"], noise)[0]

        class Smallest(nn.Module):
            def forward(self, observation: Tensor, action: Tensor) -> Tensor:
                return problem.target_q_value(observation, action).unsqueeze(-1)

        estimator = Retrace(
            gamma=GAMMA,
            lmbda=0.8,
            value_network=make_critic(Smallest()),
            actor_network=make_actor(problem.target_policy),
        )
        estimator.set_keys(sample_log_prob="action_log_prob")
        next_value = next_q_value.mean(0).unsqueeze(-1)
        target = estimator.value_estimate(data, next_value=next_value).squeeze(-1)
        error = problem.q_value(data, data["action"]) - target
        torch.testing.assert_close(loss_qvalue, error.square().sum(0))
        torch.testing.assert_close(data["td_error"], error.abs().amax(0).detach())

    def test_mpo_retrace_ends(self) -> None:
        """lambda = 0 is TD(0); a policy far from the behaviour cuts the traces as well."""
        data = make_data(4, 5)
        expected = run(Problem(None).loss, data.clone())
        assert_equal(run(Problem("retrace", lmbda=0.0).loss, data.clone()), expected)
        data["action_log_prob"] += 1e4
        assert_equal(run(Problem("retrace", lmbda=1.0).loss, data.clone()), expected)

    def test_mpo_td_lambda(self) -> None:
        """TD(lambda) over sequences, by the recursion."""
        problem = Problem(ValueEstimators.TDLambda, lmbda=0.8, reduction="none")
        loss, data = problem.loss, make_data(4, 5)
        noise = make_noise(NUM_SAMPLES, 4, 5)
        loss.policy._draw_noise = InjectedNoise(noise)
        loss_qvalue, _ = loss.qvalue_loss(data)
        next_value = problem.at_states(data["next", "observation"], noise)[0].mean(0)
        reward = data["next", "reward"].squeeze(-1)
        done, terminated = (data["next", key].squeeze(-1) for key in ("done", "terminated"))
        targets, following = [], next_value[:, -1]
        for t in reversed(range(5)):
            ended = done[:, t] if t < 4 else torch.ones(4, dtype=torch.bool)
            mixed = torch.where(ended, next_value[:, t], 0.2 * next_value[:, t] + 0.8 * following)
            following = reward[:, t] + GAMMA * torch.where(terminated[:, t], 0.0, mixed)
            targets.insert(0, following)
        error = problem.q_value(data, data["action"]) - torch.stack(targets, 1)
        torch.testing.assert_close(loss_qvalue, error.square().sum(0))

    def test_mpo_raw_and_clipped_action(self) -> None:
        """The critic sees the clipped action, the likelihood ratio the raw one."""
        data = make_data(4, 5)
        data["next", "done"].fill_(False)
        data["next", "terminated"].fill_(False)
        data["action"][:, 2] = 2.0
        # Above the policy's density, so that the ratio is not clipped; at other steps it vanishes.
        data["action_log_prob"].fill_(100.0)
        data["action_log_prob"][:, 2] = 0.5
        further = data.clone()
        further["action"][:, 2] = 3.0
        results = {}
        for td_est in (None, "retrace"):
            loss = Problem(td_est, reduction="none").loss
            results[td_est] = [run(loss, td.clone())["loss_qvalue"] for td in (data, further)]
        assert torch.equal(*results[None])
        before, after = results["retrace"]
        # The ratio of step 2 weighs what step 1 takes from its successors.
        changed = before != after
        assert changed[:, 1].all()
        assert not changed[:, 0].any()
        assert not changed[:, 2:].any()

    @pytest.mark.parametrize("policy_states", POLICY_STATES)
    @pytest.mark.parametrize("time_first", [False, True])
    def test_mpo_sequence_steps(self, time_first: bool, policy_states: Any) -> None:
        """``"first"`` keeps the first step of what ``"all"`` computes."""
        data = make_data(4, 5)
        noise = make_noise(2, NUM_SAMPLES, 4, 5)
        kwargs = {"policy_states": policy_states, "reduction": "none"}
        everything = Problem("retrace", **kwargs).loss
        everything.policy._draw_noise = InjectedNoise(*noise)
        expected = everything(data.clone())[:, 0]

        first = Problem("retrace", sequence_steps="first", **kwargs).loss
        draws = [noise[0], noise[1, :, :, 0]]
        if time_first:
            data = data.transpose(0, 1).contiguous()
            data.names = ["time", None]
            draws[0] = draws[0].transpose(1, 2)
        first.policy._draw_noise = InjectedNoise(*draws)
        assert_equal(first(data), expected)
        time_dim = 0 if time_first else 1
        assert data["td_error"].shape == data.shape
        torch.testing.assert_close(
            data["td_error"].select(time_dim, 0), expected["loss_qvalue"].sqrt().detach()
        )
        assert (data["td_error"] == data["td_error"].narrow(time_dim, 0, 1)).all()

    def test_mpo_time_dim(self) -> None:
        """A dimension named "time" is taken for time wherever it stands."""
        for td_est in (ValueEstimators.TDLambda, "retrace"):
            data, noise = make_data(4, 5), make_noise(NUM_SAMPLES, 4, 5)
            outputs = []
            for transposed in (False, True):
                loss = Problem(td_est).loss
                loss.policy._draw_noise = InjectedNoise(
                    noise.transpose(1, 2) if transposed else noise
                )
                if transposed:
                    data = data.transpose(0, 1).contiguous()
                    data.names = ["time", None]
                outputs.append(loss(data))
            assert_equal(*outputs)
