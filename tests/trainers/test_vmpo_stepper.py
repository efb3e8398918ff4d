"""VMPOLoss in use: the steps of its stepper, learning, the meta device and compilation."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import ClipTransform, GymEnv, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.trainers import Trainer

from minerva_torchrl import VMPOLoss, VMPOOptimizationStepper
from minerva_torchrl.presets import vmpo_preset
from tests.objectives.base import assert_equal, gradients, make_mlp, total_loss
from tests.objectives.vmpo_problem import (
    CONTINUOUS,
    KINDS,
    make_actor,
    make_critic,
    make_loss,
    make_rollout,
    with_advantage,
)
from tests.trainers.problem import Recorder, count_calls

NETWORKS = ("actor_network_params.", "critic_network_params.")
ALPHAS, TEMPERATURE = "duals.alpha_", "duals.temperature."
UPDATES = ["solve", "gradient"]
ORDERS = ["simultaneous", "dual_first"]
INF, NAN = math.inf, math.nan


def make_stepper(
    loss: VMPOLoss, optimizer: Any = torch.optim.SGD, lr: float = 0.1, **kwargs: Any
) -> VMPOOptimizationStepper:
    kwargs = {"clip": None} | kwargs
    networks = [
        {"params": list(loss.actor_network_params.parameters()), "lr": lr},
        {"params": list(loss.critic_network_params.parameters()), "lr": 2 * lr},
    ]
    learned = loss.temperature_update == "gradient"
    return VMPOOptimizationStepper(
        optimizer(networks, lr=lr),
        optimizer(loss.alpha_parameters(), lr=lr),
        optimizer([loss.temperature.raw], lr=lr) if learned else None,
        **kwargs,
    )


def values(loss: VMPOLoss, *prefixes: str) -> dict[str, Tensor]:
    named = loss.named_parameters()
    return {k: p.detach().clone() for k, p in named if k.startswith(prefixes or "")}


def step_along(loss: VMPOLoss, gradient: dict[str, Tensor], prefix: str, lr: float) -> None:
    with torch.no_grad():
        for name, parameter in loss.named_parameters():
            if name.startswith(prefix):
                parameter.sub_(lr * gradient[name])


# Steps -------------------------------------------------------------------------------------------


class TestSteps:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("temperature_update", UPDATES)
    @pytest.mark.parametrize("num_policy_steps", [1, 3])
    @pytest.mark.parametrize("dual_order", ORDERS)
    def test_order(
        self, dual_order: Any, num_policy_steps: int, temperature_update: Any, kind: str
    ) -> None:
        """All along the gradient of their own loss, at once or with the multipliers first."""
        loss = make_loss(kind, temperature_update=temperature_update)
        data = with_advantage(make_rollout(kind))
        reference = copy.deepcopy(loss)
        stepper = make_stepper(loss, num_policy_steps=num_policy_steps, dual_order=dual_order)
        metrics = stepper.update(loss, data.clone())

        rollout, reported = reference.e_step(data)
        for i in range(num_policy_steps):
            loss_dual, dual_losses = reference.dual_loss(rollout)
            of_duals = gradients(reference, loss_dual)
            losses = reference.actor_loss(rollout), reference.critic_loss(rollout)
            of_networks = gradients(reference, losses[0][0] + losses[1][0])
            step_along(reference, of_duals, ALPHAS, 0.1)
            if i == 0 and temperature_update == "gradient":
                step_along(reference, of_duals, TEMPERATURE, 0.1)
            if dual_order == "dual_first":
                before = of_networks
                losses = reference.actor_loss(rollout), reference.critic_loss(rollout)
                of_networks = gradients(reference, losses[0][0] + losses[1][0])
                # The multipliers from before their step would have given something else.
                biases = [k for k in before if k.startswith("actor") and k.endswith("2.bias")]
                assert not any(torch.allclose(before[k], of_networks[k]) for k in biases)
            for prefix, lr in zip(NETWORKS, (0.1, 0.2), strict=True):
                step_along(reference, of_networks, prefix, lr)
        assert_equal(values(loss), values(reference))
        # What is reported belongs to the last step, and the duals are as they are now.
        (loss_actor, of_actor), (loss_critic, of_critic) = losses
        reported |= {**of_actor, **of_critic, **dual_losses, **reference.dual_values()}
        reported |= {"loss_actor": loss_actor, "loss_critic": loss_critic}
        assert_equal(metrics, {key: value.detach() for key, value in reported.items()})
        assert set(metrics.keys()) == set(loss.out_keys)
        assert all(value.shape == () and not value.requires_grad for value in metrics.values())

    @pytest.mark.parametrize("minibatch_size", [None, 8])
    @pytest.mark.parametrize("temperature_update", UPDATES)
    @pytest.mark.parametrize(("dual_order", "passes"), [("simultaneous", 4), ("dual_first", 8)])
    def test_graphs(
        self,
        dual_order: Any,
        passes: int,
        temperature_update: Any,
        minibatch_size: int | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """One estimate of the advantage, one E-step, and one backward pass for each policy step."""
        loss = make_loss(temperature_update=temperature_update)
        learner = Recorder(loss)
        estimates = count_calls(monkeypatch, loss.value_estimator, "forward")
        e_steps = count_calls(monkeypatch, loss, "e_step")
        backward = count_calls(monkeypatch, torch.autograd, "backward")
        kwargs = {"num_policy_steps": 4, "minibatch_size": minibatch_size}
        make_stepper(loss, dual_order=dual_order, **kwargs).step(learner, make_rollout())
        assert len(estimates) == len(e_steps) == 1
        assert len(backward) == len(learner.batches) == passes

    def test_solve(self) -> None:
        """A solved temperature meets its bound on every batch and is not stepped."""
        loss = make_loss(epsilon=0.2)
        stepper = make_stepper(loss, num_policy_steps=2)
        for seed in range(3):
            metrics = stepper.update(loss, make_rollout("normal", 4, 16, seed=seed))
            assert metrics["kl_q_rel"].item() == pytest.approx(1.0, abs=1e-3)
            assert metrics["temperature"] == loss.temperature()
        assert loss.temperature.raw.grad is None

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("lr_scaling", "factor"), [("1/sqrt(M)", 0.5), ("1/M", 0.25)])
    def test_lr_scaling(self, lr_scaling: Any, factor: float, kind: str) -> None:
        """Of multipliers, policy and critic, but not of the temperature; for the step only."""
        data = with_advantage(make_rollout(kind))
        losses = [make_loss(kind, temperature_update="gradient") for _ in range(2)]
        scaled = make_stepper(losses[0], num_policy_steps=4, lr_scaling=lr_scaling)
        plain = make_stepper(losses[1], lr=0.1 * factor, num_policy_steps=4)
        assert plain.optimizer_temperature is not None
        plain.optimizer_temperature.param_groups[0]["lr"] = 0.1
        assert scaled.lr_scale == factor
        for loss, stepper in zip(losses, (scaled, plain), strict=True):
            before = values(loss)
            stepper.update(loss, data.clone())
            assert all((value != before[name]).any() for name, value in values(loss).items())
        assert_equal(values(losses[0]), values(losses[1]), rtol=1e-6, atol=1e-7)
        groups = scaled.optimizer.param_groups + scaled.optimizer_alpha.param_groups
        assert [group["lr"] for group in groups] == [0.1, 0.2, 0.1]
        assert scaled.state_dict()["optimizer"]["param_groups"][1]["lr"] == 0.2

    def test_lr_scaling_of_one_step(self) -> None:
        for lr_scaling in (None, "1/sqrt(M)", "1/M"):
            assert make_stepper(make_loss(), lr_scaling=lr_scaling).lr_scale == 1.0
        assert make_stepper(make_loss(), num_policy_steps=9).lr_scale == 1.0

    def test_clip(self) -> None:
        """The joint norm of the gradients of policy and critic; the duals are not clipped."""
        data, moves, duals = with_advantage(make_rollout()), {}, {}
        for clip in (None, 1e-2, 1e6):
            loss = make_loss(temperature_update="gradient")
            stepper = make_stepper(loss, lr=1.0, clip=clip)
            stepper.optimizer.param_groups[1]["lr"] = 1.0
            before = values(loss)
            stepper.update(loss, data.clone())
            moves[clip] = {k: v - before[k] for k, v in values(loss, *NETWORKS).items()}
            duals[clip] = values(loss, "duals.")
        norms = {c: torch.cat([m.flatten() for m in moves[c].values()]).norm() for c in moves}
        assert norms[None] > 0.1
        assert norms[1e-2].item() == pytest.approx(1e-2, rel=1e-3)
        assert_equal(moves[1e6], moves[None])
        direction = {k: m / norms[None] for k, m in moves[None].items()}
        assert_equal({k: m / norms[1e-2] for k, m in moves[1e-2].items()}, direction, 0, 1e-4)
        assert_equal(duals[1e-2], duals[None], 0, 0)
        assert make_stepper(loss).clip is None
        optimizers = (stepper.optimizer, stepper.optimizer_alpha)
        assert VMPOOptimizationStepper(*optimizers).clip == 1.0

    def test_stale_gradients(self) -> None:
        """Gradients that others left behind do not count."""
        data, results = with_advantage(make_rollout()), []
        for stale in (False, True):
            loss = make_loss(temperature_update="gradient")
            if stale:
                for parameter in loss.parameters():
                    parameter.grad = torch.full_like(parameter, 100.0)
            make_stepper(loss).update(loss, data.clone())
            results.append(values(loss))
        assert_equal(*results, 0, 0)

    @pytest.mark.parametrize("kind", KINDS)
    def test_projection(self, kind: str) -> None:
        """The duals are put back above their floor after each of their steps."""
        bounds = {"epsilon_mean": 1e6} if kind in CONTINUOUS else {"epsilon_policy": 1e6}
        name = "alpha_mean" if kind in CONTINUOUS else "alpha_policy"
        # Far below the bounds, temperature and multiplier fall as far as they may.
        loss = make_loss(kind, temperature_update="gradient", epsilon=1e6, **bounds)
        make_stepper(loss, num_policy_steps=2).update(loss, with_advantage(make_rollout(kind)))
        floor = torch.tensor(2.5e-8)
        for dual in (loss.temperature, getattr(loss, name)):
            torch.testing.assert_close(dual().detach(), floor, rtol=1e-3, atol=0)

    @pytest.mark.parametrize("temperature_update", UPDATES)
    def test_state_dict(self, temperature_update: Any) -> None:
        """Continuing from a saved state gives what going on would have given."""
        settings = {"temperature_update": temperature_update}
        batches = [make_rollout(seed=seed) for seed in range(5)]

        def make(seed: int, lr: float) -> tuple[VMPOLoss, VMPOOptimizationStepper]:
            loss = make_loss(seed=seed, **settings)
            kwargs = {"num_policy_steps": 2, "lr_scaling": "1/M", "clip": 0.5}
            return loss, make_stepper(loss, torch.optim.Adam, lr, **kwargs)

        loss, stepper = make(0, 1e-2)
        for data in batches[:3]:
            stepper.update(loss, data)
        saved = copy.deepcopy((loss.state_dict(), stepper.state_dict()))
        expected = [stepper.update(loss, data.clone()) for data in batches[3:]]
        other, restored = make(1, 1e-3)
        other.load_state_dict(saved[0])
        restored.load_state_dict(saved[1])
        for data, metrics in zip(batches[3:], expected, strict=True):
            assert_equal(restored.update(other, data.clone()), metrics, 0, 0)
        assert_equal(values(other), values(loss), 0, 0)
        assert ("optimizer_temperature" in saved[1]) is (temperature_update == "gradient")


# Arguments ---------------------------------------------------------------------------------------


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            *(("num_policy_steps", v, ValueError, "at least 1") for v in (0, -1)),
            *(("num_policy_steps", v, TypeError, "an integer") for v in (1.5, True, None)),
            *(("minibatch_size", v, ValueError, "at least 1") for v in (0, -1)),
            *(("minibatch_size", v, TypeError, "an integer") for v in (1.5, True)),
            ("dual_order", "dual_last", ValueError, "'simultaneous', 'dual_first'"),
            ("lr_scaling", "M", ValueError, r"None, '1/sqrt\(M\)', '1/M'"),
            *(("clip", v, ValueError, "positive and finite") for v in (0, -1.0, INF, NAN)),
            ("clip", "1", TypeError, "a number"),
        ],
    )
    def test_values(self, name: str, value: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=f"^{name} must be .*{message}.*, got "):
            make_stepper(make_loss(), **{name: value})

    def test_optimizer_of_the_temperature(self) -> None:
        """It is needed exactly if the temperature is learned; nothing is stepped without."""
        for temperature_update in UPDATES:
            loss = make_loss(temperature_update=temperature_update)
            stepper = make_stepper(loss)
            learned = temperature_update == "gradient"
            wrong = None if learned else torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.1)
            stepper.optimizer_temperature = wrong
            before = values(loss)
            with pytest.raises(ValueError, match=f"optimizer_temperature.*{temperature_update}"):
                stepper.update(loss, make_rollout())
            assert_equal(values(loss), before, 0, 0)

    def test_reductions(self) -> None:
        loss = make_loss(reduction="none", scalar_output_mode="exclude")
        with pytest.raises(ValueError, match="needs a loss with reduction 'mean' or 'sum'"):
            make_stepper(loss).update(loss, make_rollout())
        # A sum over 20 samples with a 20th of the rate is a mean.
        summed, mean = make_loss(reduction="sum"), make_loss()
        make_stepper(summed, lr=0.1 / 20).update(summed, make_rollout())
        make_stepper(mean).update(mean, make_rollout())
        assert_equal(values(summed), values(mean), rtol=1e-4, atol=1e-5)


# Trainer and learning ----------------------------------------------------------------------------


def test_trainer() -> None:
    """As the optimization_stepper of TorchRL's Trainer, on rollouts of a collector."""
    torch.manual_seed(0)
    clip = ClipTransform(in_keys_inv=["action"], low=-2.0, high=2.0)
    env = TransformedEnv(GymEnv("Pendulum-v1"), clip)
    network = nn.Sequential(make_mlp(3, 2), NormalParamExtractor())
    actor = make_actor("normal", network, spec=env.base_env.action_spec)
    loss = VMPOLoss(actor, make_critic()).make_value_estimator("gae", gamma=0.9)
    stepper = make_stepper(loss, torch.optim.Adam, 1e-2, num_policy_steps=2)
    before = values(loss)
    collector = Collector(
        env, actor, frames_per_batch=32, total_frames=96, auto_register_policy_transforms=True
    )
    trainer = Trainer(
        collector=collector,
        total_frames=96,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimization_stepper=stepper,
        progress_bar=False,
    )
    assert trainer.state_dict()["optimization_stepper"].keys() == stepper.state_dict().keys()
    trainer.train()
    assert trainer.collected_frames == 96
    assert set(loss.out_keys) <= set(trainer._log_dict)
    # The policy is the one of the collector: at the first of two steps it has not moved.
    assert all(value < 0.5 for value in trainer._log_dict["kl_mean"])
    for name, value in values(loss).items():
        assert (value != before[name]).any(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["default", "minerva-seed"])
def test_vmpo_bandit(preset: str, kind: str) -> None:
    """The policy learns which action is best in which context."""
    torch.manual_seed(0)
    continuous = kind in CONTINUOUS
    settings = vmpo_preset(preset).loss
    if not continuous:
        settings = {k: v for k, v in settings.items() if not k.endswith(("_mean", "_stddev"))}
    actor = make_actor(kind)
    loss = VMPOLoss(actor, make_critic(), **settings).make_value_estimator("td0")
    stepper = make_stepper(loss, torch.optim.Adam, 1e-2, num_policy_steps=8)
    best = torch.tensor([0.6, -0.6]) if continuous else torch.tensor([2, 0, 1])
    rewards = []
    for _ in range(20):
        context = torch.randint(3, (256,))
        observation = nn.functional.one_hot(context, 3).float()
        end = torch.ones(256, 1, dtype=torch.bool)
        data = TensorDict({"observation": observation}, [256])
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            data = actor(data)
        if continuous:
            wanted = best * (context.float() - 1).unsqueeze(-1)
            reward = -(data["action"] - wanted).square().sum(-1, keepdim=True)
        else:
            index = data["action"].argmax(-1) if kind == "one-hot" else data["action"]
            reward = (index == best[context]).float().unsqueeze(-1)
        following = {"observation": observation, "reward": reward, "done": end, "terminated": end}
        data["next"] = TensorDict(following, [256])
        stepper.update(loss, data)
        rewards.append(reward.mean().item())
    first, last = rewards[0], sum(rewards[-3:]) / 3
    assert first < (-1.0 if continuous else 0.4)
    assert last > (-0.05 if continuous else 0.9)


# Meta device and compilation ---------------------------------------------------------------------


# TanhNormal itself compares its bounds on the host.
@pytest.mark.parametrize("kind", ["normal", "one-hot", "categorical"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"temperature_update": "gradient", "kl_samples": "selected"},
        {"reduction": "none", "scalar_output_mode": "exclude", "normalize_advantage": False},
        {"clip_value": 0.2},
    ],
    ids=str,
)
def test_vmpo_meta(kwargs: dict[str, Any], kind: str) -> None:
    """Tensors on the meta device have no values: whatever reads one on the host fails."""
    actor, critic = make_actor(kind).to("meta"), make_critic().to("meta")
    loss = VMPOLoss(actor, critic, **kwargs)
    data = with_advantage(make_rollout(kind))
    data["collector", "mask"] = torch.ones(4, 5, dtype=torch.bool)
    data["restarting_weight"] = data["importance_weight"] = torch.ones(4, 5)
    data["state_value"] = torch.zeros(4, 5, 1)
    output = loss(data.to("meta"))
    shape = (4, 5) if kwargs.get("reduction") == "none" else ()
    assert all(value.is_meta and value.shape == shape for value in output.values())
    total_loss(output).backward()
    learnable = [p for p in loss.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.is_meta for p in learnable)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "backend", "kwargs"),
    [
        # Code generation takes most of the time; these check the graph that it starts from.
        pytest.param(
            "normal",
            "aot_eager",
            {"temperature_update": "solve", "kl_samples": "selected"},
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(kind, "inductor", {"temperature_update": update}, marks=pytest.mark.slow)
            for kind, update in (
                ("normal", "gradient"),
                ("normal", "solve"),
                ("one-hot", "solve"),
                ("tanh", "gradient"),
            )
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("fresh_compiler")
# tensordict reads a setting of the compiler that has gone, and remarks on its locks.
@pytest.mark.filterwarnings(
    r"ignore:torch\._dynamo\.config\.inline_inbuilt_nn_modules is deprecated:FutureWarning"
)
@pytest.mark.filterwarnings(r"ignore:Using lock_\(\) inside a compiled graph:UserWarning")
# The compiler makes an instance of the autograd function behind TorchRL's inverse tanh.
@pytest.mark.filterwarnings(
    r"ignore:<class 'torch\.autograd\.function\.Function'> should not be ins:DeprecationWarning"
)
# The compiler imports a module of torch that is written with torch.jit.
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script_method` is deprecated:DeprecationWarning")
def test_vmpo_compile(kind: str, backend: str, kwargs: dict[str, Any]) -> None:
    """The compiled loss has no graph break and gives the values and gradients of the plain one."""
    loss, data = make_loss(kind, **kwargs), with_advantage(make_rollout(kind))
    plain = loss(data.clone())
    expected = gradients(loss, total_loss(plain))
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for _ in range(2):
        output = compiled(data.clone())
        assert_equal(output, plain, rtol=1e-4, atol=1e-5)
        assert_equal(gradients(loss, total_loss(output)), expected, rtol=1e-4, atol=1e-5)
