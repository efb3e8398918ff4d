"""MPOOptimizationStepper: one graph or several, their order, and where the stepper plugs in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import ClipTransform, GymEnv, TransformedEnv
from torchrl.objectives import SoftUpdate, ValueEstimators
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import ReplayBufferTrainer, TargetNetUpdaterHook

from minerva_torchrl import MPOLoss, MPOOptimizationStepper
from minerva_torchrl.trainers.stepping import LocalLearner
from tests.objectives.base import (
    ACTION_DIM,
    Concatenate,
    InjectedNoise,
    assert_equal,
    gradients,
    make_actor,
    make_critic,
    make_mlp,
    make_transitions,
    with_updater,
)
from tests.trainers.problem import Recorder, count_calls

NUM_SAMPLES = 5
BATCH = 8
GROUPS = {
    "critic": ("qvalue_network_params.",),
    "actor": ("actor_network_params.",),
    "dual": ("duals.",),
}


def make_loss(seed: int = 0, **kwargs: Any) -> MPOLoss:
    """A loss whose online policy has moved away from its target."""
    torch.manual_seed(seed)
    kwargs = {"num_action_samples": NUM_SAMPLES, "init_alpha_stddev": 10.0} | kwargs
    kwargs = {"num_qvalue_nets": 2} | kwargs
    loss = with_updater(MPOLoss(make_actor(), make_critic(), **kwargs))
    with torch.no_grad():
        for parameter in loss.actor_network_params.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return loss


def make_stepper(
    loss: MPOLoss, optimizer: Any = torch.optim.SGD, lr: float = 0.1, **kwargs: Any
) -> MPOOptimizationStepper:
    kwargs = {"clip_critic": None, "clip_actor": None} | kwargs
    return MPOOptimizationStepper(
        optimizer(loss.qvalue_network_params.parameters(), lr=lr),
        optimizer(loss.actor_network_params.parameters(), lr=lr),
        optimizer(loss.dual_parameters(), lr=lr),
        **kwargs,
    )


def values(loss: MPOLoss) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in loss.named_parameters()}


def part(tree: dict[str, Tensor], group: str) -> dict[str, Tensor]:
    return {name: value for name, value in tree.items() if name.startswith(GROUPS[group])}


def difference(after: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: after[name] - before[name] for name in after}


def inject(*losses: MPOLoss, count: int = 1) -> None:
    """Give losses the same noise."""
    draws = torch.randn(count, NUM_SAMPLES, BATCH, ACTION_DIM)
    for loss in losses:
        loss.policy._draw_noise = InjectedNoise(*draws)


# Steps -------------------------------------------------------------------------------------------


class TestSteps:
    @pytest.mark.parametrize(
        ("kwargs", "methods"),
        [
            ({}, [None]),
            ({"dual_order": "dual_first"}, ["dual_loss", "networks_loss"]),
            ({"num_policy_steps": 2}, ["dual_loss", "networks_loss", "actor_loss"]),
        ],
        ids=str,
    )
    def test_graphs(
        self, kwargs: Any, methods: list[str | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By default one call of the loss and one backward pass; in parts one of each a part."""
        loss = make_loss()
        learner, stepper = Recorder(loss), make_stepper(loss, **kwargs)
        passes = count_calls(monkeypatch, torch.autograd, "backward")
        e_steps = count_calls(monkeypatch, loss, "e_step")
        stepper.step(learner, make_transitions(BATCH))
        assert learner.methods == methods
        assert len(passes) == len(methods)
        assert len(e_steps) == 1

    @pytest.mark.parametrize("dual_order", ["simultaneous", "dual_first"])
    def test_order(self, dual_order: Any) -> None:
        """Every step is along the gradient of its loss; the policy's is with old or new duals."""
        loss, data = make_loss(), make_transitions(BATCH)
        reference, before = copy.deepcopy(loss), values(loss)
        inject(loss, reference)
        make_stepper(loss, dual_order=dual_order).update(loss, data)
        after = values(loss)

        e_step, _ = reference.e_step(data)
        losses = {
            "critic": reference.qvalue_loss(e_step)[0],
            "dual": reference.dual_loss(e_step)[0],
            "actor": reference.actor_loss(e_step)[0],
        }
        expected = {
            group: part(gradients(reference, value), group) for group, value in losses.items()
        }
        new_duals = {"dual_first": True, "simultaneous": False}[dual_order]
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if name.startswith(GROUPS["dual"]):
                    parameter.copy_(after[name])
        with_new_duals = part(gradients(reference, reference.actor_loss(e_step)[0]), "actor")
        name = "actor_network_params.module.0.module.0.2.bias"
        assert not torch.isclose(with_new_duals[name], expected["actor"][name]).all()
        if new_duals:
            expected["actor"] = with_new_duals
        for group, gradient in expected.items():
            moved = difference(part(after, group), part(before, group))
            assert_equal(moved, {k: -0.1 * g for k, g in gradient.items()})

    @pytest.mark.parametrize("dual_order", ["simultaneous", "dual_first"])
    def test_policy_steps(self, dual_order: Any) -> None:
        """All policy steps use one E-step: its samples are drawn and its weights made once."""
        loss, data = make_loss(), make_transitions(BATCH)
        reference = copy.deepcopy(loss)
        inject(loss, reference)
        stepper = make_stepper(loss, num_policy_steps=3, dual_order=dual_order)
        metrics = stepper.update(loss, data)
        assert loss.policy._draw_noise.shapes == [(NUM_SAMPLES, BATCH, ACTION_DIM)]

        e_step, _ = reference.e_step(data)
        if dual_order == "dual_first":
            with torch.no_grad():
                for name, parameter in reference.named_parameters():
                    if name.startswith(GROUPS["dual"]):
                        parameter.copy_(values(loss)[name])
        optimizer = torch.optim.SGD(reference.actor_network_params.parameters(), lr=0.1)
        for _ in range(3):
            loss_actor, policy_metrics = reference.actor_loss(e_step)
            optimizer.zero_grad()
            loss_actor.backward()
            optimizer.step()
        assert_equal(part(values(loss), "actor"), part(values(reference), "actor"))
        # What is reported belongs to the last step.
        torch.testing.assert_close(metrics["loss_actor"], loss_actor.detach())
        torch.testing.assert_close(metrics["kl_mean"], policy_metrics["kl_mean"])

    @pytest.mark.parametrize("policy_states", ["next", "current", "both"])
    def test_draws(self, policy_states: Any) -> None:
        """As many draws as one call of the loss, however many policy steps there are."""
        loss, data = make_loss(policy_states=policy_states), make_transitions(BATCH)
        inject(loss, count=2)
        make_stepper(loss, num_policy_steps=4).update(loss, data)
        assert len(loss.policy._draw_noise.shapes) == (1 if policy_states == "next" else 2)

    @pytest.mark.parametrize("group", list(GROUPS))
    def test_clipping(self, group: str) -> None:
        """Each optimiser has its own bound on the joint norm of its gradients."""
        data = make_transitions(BATCH)
        moved = {}
        for clip in (None, 1e-3):
            loss = make_loss()
            torch.manual_seed(1)
            before = values(loss)
            make_stepper(loss, lr=1.0, **{f"clip_{group}": clip}).update(loss, data.clone())
            moved[clip] = difference(values(loss), before)
        free, clipped = (
            torch.cat([v.flatten() for v in part(moved[clip], group).values()])
            for clip in (None, 1e-3)
        )
        assert free.norm() > 1e-2
        torch.testing.assert_close(clipped.norm(), torch.tensor(1e-3), rtol=1e-3, atol=0)
        torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), rtol=0, atol=1e-3)
        for other in set(GROUPS) - {group}:
            assert_equal(part(moved[1e-3], other), part(moved[None], other))

    def test_clipping_defaults(self) -> None:
        loss = make_loss()
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in loss.dual_parameters()[:3]]
        stepper = MPOOptimizationStepper(*optimizers)
        assert (stepper.clip_critic, stepper.clip_actor, stepper.clip_dual) == (40.0, 40.0, None)

    @pytest.mark.parametrize("group", list(GROUPS))
    def test_separate_optimizers(self, group: str) -> None:
        """A learning rate of zero stops one group and no other."""
        loss, data = make_loss(), make_transitions(BATCH)
        stepper = make_stepper(loss)
        getattr(stepper, f"optimizer_{group}").param_groups[0]["lr"] = 0.0
        before = values(loss)
        targets = {k: b.clone() for k, b in loss.named_buffers()}
        stepper.update(loss, data)
        for name, moved in difference(values(loss), before).items():
            assert moved.any() != name.startswith(GROUPS[group]), name
        buffers = dict(loss.named_buffers())
        assert_equal({name: buffers[name] for name in targets}, targets, 0, 0)

    def test_stale_gradients(self) -> None:
        """Gradients that others left behind do not count."""
        data, results = make_transitions(BATCH), []
        for stale in (False, True):
            loss = make_loss()
            if stale:
                for parameter in loss.parameters():
                    parameter.grad = torch.full_like(parameter, 100.0)
            torch.manual_seed(1)
            make_stepper(loss).update(loss, data.clone())
            results.append(values(loss))
        assert_equal(*results, 0, 0)

    def test_projection(self) -> None:
        """The duals are put back above their floor after each of their steps."""
        loss, data = make_loss(epsilon_mean=1e6), make_transitions(BATCH)
        stepper = make_stepper(loss)
        stepper.optimizer_dual.param_groups[0]["lr"] = 1e3
        stepper.update(loss, data)
        # The divergence is far below its bound, so that the multiplier falls to the floor.
        floor = torch.full((ACTION_DIM,), 2.5e-8)
        torch.testing.assert_close(loss.alpha_mean().detach(), floor, rtol=1e-3, atol=0)

    def test_projection_keeps_gradient(self) -> None:
        """A multiplier that lies at its floor comes back when its constraint is violated."""
        loss, data = make_loss(epsilon_mean=1e-6), make_transitions(BATCH)
        with torch.no_grad():
            loss.alpha_mean.raw.fill_(-1e3)
        stepper = make_stepper(loss, optimizer=torch.optim.Adam)
        stepper.optimizer_actor.param_groups[0]["lr"] = 0.0
        # Below the floor there is no gradient to return by; the projection ends that.
        stepper.update(loss, data)
        raw = [loss.alpha_mean.raw.detach().clone()]
        for _ in range(20):
            stepper.update(loss, data)
            raw.append(loss.alpha_mean.raw.detach().clone())
        assert (raw[0] > -19).all()
        assert (torch.stack(raw).diff(dim=0) > 0).all()

    def test_solve(self) -> None:
        """With solved temperatures only the multipliers are stepped."""
        loss = make_loss(temperature_update="solve")
        stepper = make_stepper(loss)
        for seed in range(3):
            metrics = stepper.update(loss, make_transitions(BATCH, seed=seed))
            assert metrics["kl_q_rel"].item() == pytest.approx(1.0, abs=1e-3)
        assert loss.temperature.raw.grad is None
        assert metrics["temperature"] == loss.temperature()


# Metrics and state -------------------------------------------------------------------------------


class TestMetrics:
    @pytest.mark.parametrize("kwargs", [{}, {"action_penalization": False}], ids=str)
    def test_keys(self, kwargs: dict[str, Any]) -> None:
        loss = make_loss(**kwargs)
        stepper = make_stepper(loss, num_policy_steps=2)
        for seed in range(3):
            metrics = stepper.update(loss, make_transitions(BATCH, seed=seed))
            assert set(metrics.keys()) == set(loss.out_keys)
            for key, value in metrics.items():
                assert value.shape == (), key
                assert not value.requires_grad, key
                assert value.isfinite(), key

    def test_values(self) -> None:
        """What is reported is what one call of the loss reports, but for the new duals."""
        loss, data = make_loss(), make_transitions(BATCH)
        reference, old_duals = copy.deepcopy(loss), loss.dual_values()
        inject(loss, reference)
        metrics = make_stepper(loss).update(loss, data)
        expected = reference(make_transitions(BATCH))
        duals = list(old_duals)
        assert_equal(metrics.exclude(*duals), expected.detach().exclude(*duals))
        for name, old in old_duals.items():
            assert metrics[name] == loss.dual_values()[name]
            assert metrics[name] != old

    def test_priority(self) -> None:
        loss, data = make_loss(), make_transitions(BATCH)
        before = data.clone()
        make_stepper(loss).update(loss, data)
        assert data.pop("td_error").shape == (BATCH,)
        assert (data == before).all()

    def test_state_dict(self) -> None:
        """Continuing from a saved state gives what going on would have given."""
        loss = make_loss()
        stepper = make_stepper(loss, optimizer=torch.optim.Adam, lr=1e-2, num_policy_steps=2)
        batches = [make_transitions(BATCH, seed=seed) for seed in range(6)]

        def advance(loss: MPOLoss, stepper: MPOOptimizationStepper, seed: int) -> TensorDict:
            torch.manual_seed(seed)
            return torch.stack([stepper.update(loss, data.clone()) for data in batches[3:]])

        for data in batches[:3]:
            stepper.update(loss, data)
        saved = copy.deepcopy({"loss": loss.state_dict(), "stepper": stepper.state_dict()})
        expected = advance(loss, stepper, seed=7)

        other = make_loss(seed=1)
        restored = make_stepper(other, optimizer=torch.optim.Adam, lr=1e-3, num_policy_steps=2)
        other.load_state_dict(saved["loss"])
        restored.load_state_dict(saved["stepper"])
        assert_equal(advance(other, restored, seed=7), expected, 0, 0)
        assert_equal(values(other), values(loss), 0, 0)


# In use ------------------------------------------------------------------------------------------


class TestLoop:
    @pytest.mark.parametrize("td_est", [None, ValueEstimators.TDLambda, "retrace"])
    def test_hand_written(self, td_est: Any) -> None:
        """In a loop of one's own the critic's error falls on a fixed batch."""
        loss = make_loss().make_value_estimator(td_est, gamma=0.5)
        updater = SoftUpdate(loss, tau=0.01)
        stepper = make_stepper(loss, optimizer=torch.optim.Adam, lr=1e-2)
        data = make_transitions(16, 3)
        errors = []
        for _ in range(60):
            errors.append(stepper.update(loss, data)["loss_qvalue"])
            updater.step()
        assert errors[-1] < 0.8 * errors[0]

    @pytest.mark.parametrize("prioritized", [True, False])
    def test_replay_priority(self, prioritized: bool) -> None:
        class Buffer:
            def __init__(self) -> None:
                self.priorities: list[Tensor] = []

            def update_tensordict_priority(self, data: TensorDict) -> None:
                self.priorities.append(data["td_error"])

        loss, data, buffer = make_loss(), make_transitions(BATCH), Buffer()
        trainer: Any = LocalLearner(loss)
        trainer.replay_buffer = buffer if prioritized else None
        stepper = make_stepper(loss)
        assert stepper.updates_replay_priority
        stepper.step(trainer, data)
        assert len(buffer.priorities) == prioritized
        assert not prioritized or buffer.priorities[0].shape == (BATCH,)

    def test_trainer(self) -> None:
        """As the optimization_stepper of TorchRL's Trainer, from collection to targets."""
        torch.manual_seed(0)
        clip = ClipTransform(in_keys_inv=["action"], low=-2.0, high=2.0)
        env = TransformedEnv(GymEnv("Pendulum-v1"), clip)
        network = nn.Sequential(make_mlp(3, 2), NormalParamExtractor())
        actor = make_actor(network, spec=env.base_env.action_spec)
        critic = make_critic(Concatenate(make_mlp(4, 1)))
        loss = MPOLoss(actor, critic, num_action_samples=NUM_SAMPLES)
        loss.make_value_estimator(gamma=0.9)
        updater = SoftUpdate(loss, tau=0.5)
        stepper = make_stepper(loss, optimizer=torch.optim.Adam, lr=1e-2)
        before = values(loss)
        targets = {k: b.clone() for k, b in loss.named_buffers() if k.startswith("target_")}
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(256), batch_size=BATCH)
        collector = Collector(
            env,
            actor,
            frames_per_batch=16,
            total_frames=64,
            auto_register_policy_transforms=True,
        )
        trainer = Trainer(
            collector=collector,
            total_frames=64,
            frame_skip=1,
            optim_steps_per_batch=2,
            loss_module=loss,
            optimization_stepper=stepper,
            replay_buffer=buffer,
            progress_bar=False,
        )
        replay = ReplayBufferTrainer(buffer, batch_size=BATCH, flatten_tensordicts=True)
        trainer.register_op("batch_process", replay.extend)
        trainer.register_op("process_optim_batch", replay.sample)
        trainer.register_op("post_optim", TargetNetUpdaterHook(updater))
        saved = trainer.state_dict()["optimization_stepper"]
        assert saved.keys() == stepper.state_dict().keys()
        trainer.train()
        assert trainer.collected_frames == 64
        assert set(loss.out_keys) <= set(trainer._log_dict)
        for name, moved in difference(values(loss), before).items():
            assert moved.any(), name
        for name, buffer_ in loss.named_buffers():
            assert name not in targets or not torch.equal(buffer_, targets[name]), name


# Arguments ---------------------------------------------------------------------------------------


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            ("num_policy_steps", 0, ValueError, "at least 1"),
            ("num_policy_steps", -1, ValueError, "at least 1"),
            ("num_policy_steps", 1.5, TypeError, "an integer"),
            ("dual_order", "dual_last", ValueError, "'simultaneous', 'dual_first'"),
            *(
                (f"clip_{group}", value, ValueError, "positive and finite")
                for group in GROUPS
                for value in (0.0, -1.0, float("inf"), float("nan"))
            ),
            ("clip_dual", "1", TypeError, "a number"),
        ],
    )
    def test_rejects_values(
        self, name: str, value: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=f"^{name} must be .*{message}.*, got "):
            make_stepper(make_loss(), **{name: value})

    def test_rejects_no_reduction(self) -> None:
        loss = make_loss(reduction="none", scalar_output_mode="exclude")
        with pytest.raises(ValueError, match="reduction 'mean' or 'sum', got 'none'"):
            make_stepper(loss).update(loss, make_transitions(BATCH))

    def test_sum(self) -> None:
        loss = make_loss(reduction="sum")
        metrics = make_stepper(loss, lr=1e-3).update(loss, make_transitions(BATCH))
        assert all(value.isfinite() for value in metrics.values())

    def test_rejects_other_states(self) -> None:
        stepper = make_stepper(make_loss())
        state = stepper.state_dict()
        assert set(state) == {
            "optimizer_critic",
            "optimizer_actor",
            "optimizer_dual",
            "skips",
            "updates",
        }
        state.pop("optimizer_dual")
        with pytest.raises(KeyError, match="optimizer_dual"):
            stepper.load_state_dict(state)
