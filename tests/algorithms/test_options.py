"""Options that reference agents have: what a run with each of them is made of, and does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Bounded, TensorSpec, Unbounded
from torchrl.modules import TanhNormal

from minerva_torchrl.algorithms.common import bounded_mean, make_optimizer
from minerva_torchrl.algorithms.config import OptimConfig
from minerva_torchrl.envs import ReturnStdScaling
from minerva_torchrl.runs import ConfigError
from minerva_torchrl.runs.assemble import Assembly, assemble
from minerva_torchrl.trainers import make_target_updater
from tests.runs.tiny import (
    assert_same_runs,
    resume,
    tiny_config,
    train,
    train_and_kill,
)

SHORT = {"total_frames": 100}


def build(kind: str, **changes: Any) -> Assembly:
    return assemble(tiny_config(kind, **changes))


def collect(assembly: Assembly) -> TensorDictBase:
    return next(iter(assembly.collector))


def network_of(assembly: Assembly) -> Any:
    return assembly.actor.module[0].module


# Optimisers --------------------------------------------------------------------------------------


class TestSGD:
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_is_that_of_torch(self, momentum: float) -> None:
        ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
        settings = OptimConfig(optimizer="sgd", momentum=momentum)
        optimizer = make_optimizer({"actor": ([ours], 0.1)}, settings, eps=1e-8)
        other = torch.optim.SGD([theirs], lr=0.1, momentum=momentum)
        for step in range(4):
            for parameter in (ours, theirs):
                parameter.grad = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
            optimizer.step()
            other.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)

    def test_first_step_can_be_left_out(self) -> None:
        """Without zeros in its state, PyTorch goes on from memory that nobody wrote."""
        parameter = nn.Parameter(torch.zeros(1000))
        settings = OptimConfig(optimizer="sgd")
        optimizer: Any = make_optimizer({"": ([parameter], 1.0)}, settings, eps=1e-8)
        parameter.grad = torch.full_like(parameter, torch.nan)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        del optimizer.found_inf
        assert not parameter.any()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert parameter.eq(-1).all()

    @pytest.mark.parametrize("kind", ["mpo", "vmpo", "ppo"])
    def test_in_runs(self, kind: str) -> None:
        stepper: Any = build(kind, optim__optimizer="sgd", optim__momentum=0.5)
        stepper = stepper.trainer.optimization_stepper
        for optimizer in stepper._optimizers.values():
            assert isinstance(optimizer, torch.optim.SGD)
            assert {group["momentum"] for group in optimizer.param_groups} == {0.5}

    def test_refuses_a_momentum_of_one(self) -> None:
        with pytest.raises(ConfigError, match=r"optim.momentum must be .* below 1, got 1"):
            tiny_config("mpo", optim__momentum=1.0)


# Networks ----------------------------------------------------------------------------------------


BOUNDED, UNBOUNDED = Bounded(-2.0, 2.0, (3,)), Unbounded((3,))


@pytest.mark.parametrize(
    ("settings", "spec", "bounded"),
    [
        ({}, BOUNDED, True),
        ({}, UNBOUNDED, False),
        ({"network__policy": "tanh_gaussian"}, BOUNDED, False),
        ({"network__policy": "full_covariance"}, BOUNDED, False),
        ({"network__tanh_mean": False}, BOUNDED, False),
        ({"network__tanh_mean": True}, BOUNDED, True),
    ],
)
def test_bounded_mean_where_it_fits(
    settings: dict[str, Any], spec: TensorSpec, bounded: bool
) -> None:
    bound = bounded_mean(tiny_config("mpo", **settings).network, spec)
    assert (bound is not None) is bounded
    if bound is not None:
        torch.testing.assert_close(bound(torch.full((3,), 100.0)), torch.full((3,), 2.0))


@pytest.mark.parametrize("kind", ["vmpo", "ppo"])
def test_means_of_on_policy_algorithms_are_free(kind: str) -> None:
    assert bounded_mean(tiny_config(kind).network, BOUNDED) is None


def test_bounded_mean_needs_bounds() -> None:
    settings = tiny_config("mpo", network__tanh_mean=True).network
    with pytest.raises(ValueError, match=r"network\.tanh_mean=true needs an action with bounds"):
        bounded_mean(settings, UNBOUNDED)


@pytest.mark.parametrize("kind", ["mpo", "vmpo", "ppo"])
class TestPolicies:
    def test_squashed(self, kind: str) -> None:
        """Samples within the bounds of canonical actions, which are one."""
        assembly = build(kind, network__policy="tanh_gaussian", network__init_scale=5.0, **SHORT)
        data = collect(assembly)
        assert isinstance(assembly.actor.get_dist(data), TanhNormal)
        assert 0.75 < data["action"].abs().max() <= 1
        assembly.trainer.train()

    @pytest.mark.parametrize("scale", ["softplus", "exp", "free"])
    def test_scale(self, kind: str, scale: str) -> None:
        bounds = {"network__min_scale": 0.1, "network__max_scale": 0.9}
        assembly = build(kind, network__scale=scale, network__init_scale=0.6, **bounds)
        found = collect(assembly)["scale"]
        assert (found.unique().numel() == 1) is (scale == "free")
        assert found.mean().item() == pytest.approx(0.6, abs=0.15)
        network = network_of(assembly)
        with torch.no_grad():
            (network.log_scale if scale == "free" else network.scale.bias).fill_(100)
        highest = network(torch.zeros(1, 3))[1]
        torch.testing.assert_close(highest, torch.full((1, 1), 0.9))

    @pytest.mark.parametrize("scale", ["softplus", "exp", "free"])
    def test_gain_of_the_scale(self, kind: str, scale: str) -> None:
        assembly = build(kind, network__scale=scale, network__scale_gain=0.2)
        assert network_of(assembly).scale_gain == 0.2

    @pytest.mark.parametrize("noise", ["white", "pink"])
    @pytest.mark.parametrize("policy", ["gaussian", "tanh_gaussian"])
    def test_noise(self, kind: str, policy: str, noise: str) -> None:
        assembly = build(kind, network__policy=policy, collector__noise=noise)
        collect(assembly)
        assert (assembly.collector.noise is not None) is (noise == "pink")

    @pytest.mark.parametrize("scale", ["softplus", "free"])
    def test_bounded_mean(self, kind: str, scale: str) -> None:
        assembly = build(kind, network__tanh_mean=True, network__scale=scale)
        network = network_of(assembly)
        head = network.loc if scale == "softplus" else network.loc_network[-2]
        with torch.no_grad():
            head.bias.fill_(100.0)
        torch.testing.assert_close(network(torch.zeros(1, 3))[0], torch.ones(1, 1))

    def test_refuses_two_tanhs(self, kind: str) -> None:
        with pytest.raises(ConfigError, match=r"network\.tanh_mean=true is for network\.policy=g"):
            tiny_config(kind, network__tanh_mean=True, network__policy="tanh_gaussian")


@pytest.mark.parametrize("kind", ["vmpo", "ppo", "vmpo-discrete"])
@pytest.mark.parametrize("scale", ["free", "exp"])
@pytest.mark.parametrize("norm", ["layer_norm", "norm_every_layer"])
def test_shared_layers(kind: str, scale: str, norm: str) -> None:
    """Both networks train them; each is in one group of one optimiser, with the policy's rate."""
    assembly = build(
        kind,
        **{"network__shared": True, "network__scale": scale, f"network__{norm}": True},
        **SHORT,
    )
    loss: Any = assembly.loss
    actor = {id(parameter) for parameter in loss.actor_network_params.parameters()}
    critic = {id(parameter) for parameter in loss.critic_network_params.parameters()}
    assert len(actor & critic) == 4  # a linear layer and its LayerNorm
    assert len(critic - actor) == 2
    optimizer = assembly.trainer.optimization_stepper.optimizer
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(actor | critic)
    before = {name: p.detach().clone() for name, p in loss.named_parameters()}
    assembly.trainer.train()
    changed = {name for name, p in loss.named_parameters() if not torch.equal(p, before[name])}
    assert {name for name in before if "network_params" in name} <= changed


def test_goes_on_exactly(tmp_path: Path) -> None:
    """With everything at once that has a state of its own."""
    changes = {
        "network__shared": True,
        "network__policy": "tanh_gaussian",
        "optim__optimizer": "sgd",
        "optim__dual_order": "dual_first",
        "env__reward_scaling_reset": "termination",
        "loss__restarting_weights": True,
    }
    train(tmp_path / "whole", "vmpo", **changes)
    train_and_kill(tmp_path / "parts", "vmpo", at=150, **changes)
    resume(tmp_path / "parts")
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")


# Returns and rewards -----------------------------------------------------------------------------


def test_time_limit_as_the_end_for_mpo() -> None:
    """Only with the switch does the target at a truncated step lack its bootstrap."""
    targets = {}
    for terminal in (False, True):
        loss: Any = build(
            "mpo", loss__truncation_is_terminal=terminal, loss__policy_states="current"
        ).loss
        batch = collect(build("mpo", replay_buffer__n_steps=1)).reshape(-1)
        assert batch["next", "truncated"].any()
        assert not batch["next", "terminated"].any()
        torch.manual_seed(0)
        data, _ = loss.e_step(batch)
        targets[terminal] = data["value_target"]
    ended = batch["next", "truncated"]
    assert torch.equal(targets[True][ended], batch["next", "reward"][ended])
    assert (targets[False][ended] != batch["next", "reward"][ended]).all()
    assert torch.equal(targets[True][~ended], targets[False][~ended])


def advantage(**changes: Any) -> tuple[TensorDictBase, Tensor]:
    assembly = build("vmpo", loss__gamma=0.9, **changes)
    loss: Any = assembly.loss
    rollout = collect(assembly)
    loss.e_step(rollout)
    return rollout, rollout["advantage"]


@pytest.mark.parametrize(("estimator", "lmbda"), [("returns", 1.0), ("td0", 0.0)])
def test_estimators_of_vmpo(estimator: str, lmbda: float) -> None:
    """Both are special cases of generalised advantages."""
    _, found = advantage(loss__value_estimator=estimator)
    _, expected = advantage(loss__lmbda=lmbda)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["vmpo", "ppo"])
def test_reward_scaling(kind: str) -> None:
    changes = {"env__reward_scaling_gamma": 0.5, "env__reward_scaling_reset": "termination"}
    for changed, expected in (({}, (0.99, "done")), (changes, (0.5, "termination"))):
        env = build(kind, loss__gamma=0.99, **changed).env
        (scaling,) = (t for t in env.transform if isinstance(t, ReturnStdScaling))
        assert (scaling.gamma, scaling.reset_rule) == expected
    with pytest.raises(ConfigError, match=r"env\.reward_scaling_gamma must be .*; got 2"):
        tiny_config(kind, env__reward_scaling_gamma=2.0)


# Weights of samples ------------------------------------------------------------------------------


def weighted(*, widened: float = 0.0, **changes: Any) -> tuple[Assembly, TensorDictBase]:
    """A run and a rollout with its weights, as hooks leave it after a change of the policy."""
    assembly = build("vmpo", **changes)
    rollout: Any = collect(assembly)
    with torch.no_grad():
        network_of(assembly).log_scale.add_(widened)
    for hook, kwargs in assembly.trainer._batch_process_ops:
        changed = hook(rollout, **kwargs)
        rollout = rollout if changed is None else changed
    return assembly, rollout


def test_restarting_weights() -> None:
    assembly, rollout = weighted(loss__restarting_weights=True)
    loss: Any = assembly.loss
    first = rollout["step_count"] == 0
    assert 0 < first.sum() < first.numel()
    assert torch.equal(rollout["restarting_weight"], (~first).float())
    data, metrics = loss.e_step(rollout)
    assert metrics["restarting_fraction"].item() == pytest.approx(first.float().mean().item())
    assert not data["e_step"].policy_weight[first.squeeze(-1)].any()


@pytest.mark.parametrize("policy", ["gaussian", "tanh_gaussian"])
def test_importance_weights(policy: str) -> None:
    """One for the policy that collected; the ratio, at most one, for any other."""
    changes = {"loss__importance_weights": True, "network__policy": policy}
    _, rollout = weighted(**changes)
    weight = rollout["importance_weight"]
    torch.testing.assert_close(weight, torch.ones_like(weight), rtol=1e-4, atol=1e-4)
    assembly, rollout = weighted(widened=0.5, **changes)
    log_prob = assembly.actor.get_dist(rollout).log_prob(rollout["action"])
    expected = (log_prob - rollout["action_log_prob"]).exp().clamp_max(1)
    weight = rollout["importance_weight"]
    torch.testing.assert_close(weight, expected)
    assert (weight < 1).any()
    assert (weight == 1).any()


def test_no_weights_by_default() -> None:
    _, rollout = weighted()
    assert "restarting_weight" not in rollout.keys()
    assert "importance_weight" not in rollout.keys()


# Execution ---------------------------------------------------------------------------------------


def test_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    build("ppo", deterministic=True)
    assert torch.backends.cudnn.deterministic
    build("ppo")
    assert not torch.backends.cudnn.deterministic


# Targets and critic of MPO -----------------------------------------------------------------------


def test_target_periods() -> None:
    """The policy's target every second update, that of the critic every third."""
    assembly = build("mpo", optim__target_period=3, optim__target_period_actor=2)
    loss: Any = assembly.loss
    updater: Any = assembly.trainer.target_net_updater
    periods = {"period": 3, "actor_period": 2}
    copied = []
    for update in range(1, 13):
        if update == 8:  # as after a checkpoint
            state, updater = updater.state_dict(), make_target_updater(loss, **periods)
            updater.load_state_dict(state)
        fresh = {}
        for name in ("actor_network_params", "qvalue_network_params"):
            source = next(iter(getattr(loss, name).parameters()))
            with torch.no_grad():
                source.add_(1.0)
            fresh[name] = source
        updater.step()
        targets = {
            name: next(iter(getattr(loss, f"target_{name}").values(True, True))) for name in fresh
        }
        copied.append(tuple(bool((targets[n] == fresh[n]).all()) for n in fresh))
    assert copied == [(update % 2 == 0, update % 3 == 0) for update in range(1, 13)]


def test_refuses_a_period_beside_an_average() -> None:
    with pytest.raises(ConfigError, match=r"optim\.target_period_actor is for copies .*; got 2"):
        tiny_config(
            "mpo", optim__target_period=None, optim__target_tau=0.1, optim__target_period_actor=2
        )
    loss = build("mpo").loss
    with pytest.raises(ValueError, match="actor_period is for period, not for tau; got 2"):
        make_target_updater(loss, tau=0.1, actor_period=2)


def test_half_the_squared_error() -> None:
    losses = {}
    for coefficient in (1.0, 0.5):
        assembly = build("mpo", loss__critic_coeff=coefficient, replay_buffer__n_steps=1)
        batch = collect(assembly).reshape(-1)
        torch.manual_seed(0)
        losses[coefficient] = assembly.loss(batch)
    torch.testing.assert_close(losses[0.5]["loss_qvalue"], losses[1.0]["loss_qvalue"] / 2)
    torch.testing.assert_close(losses[0.5]["loss_actor"], losses[1.0]["loss_actor"])


def test_bursts() -> None:
    """Updates come in bursts, one after each batch of frames, as large as that is."""
    for frames, burst in ((4, 1), (40, 10)):
        changes = {"collector__frames_per_batch": frames, "optim__updates_per_frame": 0.25}
        trainer = build("mpo", **changes).trainer
        assert trainer.optim_steps_per_batch == burst


def test_observation_norm_for_mpo() -> None:
    raw, normed = (collect(build("mpo", env__observation_norm=on)) for on in (False, True))
    assert raw["observation"].abs().max() > 1
    assert normed["observation"][:, -1].abs().max() < 5
    assert not torch.equal(raw["observation"], normed["observation"])
