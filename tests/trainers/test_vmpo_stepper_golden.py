"""Whole V-MPO updates against the reference agent (Minerva)."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

from minerva_torchrl import VMPOLoss, VMPOOptimizationStepper
from minerva_torchrl.objectives import functional
from minerva_torchrl.presets import vmpo_preset
from tests.golden_data import (
    Tree,
    assert_close,
    flatten,
    hyperparameters,
    load,
    make_optimizer,
    updates,
)

SEED_DEFAULTS = {
    "normalize_advantages": True,
    "policy_lr": 5e-4,
    "value_lr": 1e-3,
    "topk_fraction": 0.5,
    "temperature_init": 1.0,
    "temperature_lr": 1e-4,
    "epsilon_eta": 0.1,
    "epsilon_mu": 0.01,
    "epsilon_sigma": 0.01,
    "alpha_lr": 1e-4,
    "max_grad_norm": 10.0,
    "optimizer_type": "adam",
    "sgd_momentum": 0.9,
    "m_steps": 1,
}

# The reference guards its divisions and logarithms with 1e-8. Next to variances and sums of order
# one this moves a divergence and its gradient by about 1e-8 for each dimension.
GUARD = 1e-8
# Adam divides a gradient by its own size, or by its eps of 1e-5 if that is larger: a difference of
# a few guards moves a parameter by up to this part of the learning rate in each step.
ADAM_AMPLIFICATION = 5 * GUARD / 1e-5

METRICS = {
    "loss/value": "loss_critic",
    "loss/policy": "loss_actor",
    "loss/policy_weighted_nll": "cross_entropy",
    "loss/policy_kl_mean_pen": "penalty_mean",
    "loss/policy_kl_std_pen": "penalty_stddev",
    "kl/mean": "kl_mean",
    "kl/std": "kl_stddev",
    "kl/mean_sel": "kl_mean_selected",
    "kl/std_sel": "kl_stddev_selected",
    "vmpo/alpha_mu": "alpha_mean",
    "vmpo/alpha_sigma": "alpha_stddev",
    "vmpo/dual_loss": "loss_temperature",
    "vmpo/temperature_raw": "temperature",
    "vmpo/selected_frac": "selected_fraction",
    "vmpo/ess": "ess",
    "vmpo/restarting_frac": "restarting_fraction",
    "vmpo/importance_mean": "importance_mean",
    "train/entropy": "entropy",
    "returns/raw_mean": "value_target_mean",
    "returns/raw_std": "value_target_std",
}

# Evaluated by the reference after the update.
METRICS_AFTER = {
    "train/mean_abs_action": "mean_abs_action",
    "value/explained_var": "explained_variance",
    "value/pred_mean": "value_mean",
    "value/pred_std": "value_std",
}


class Policy(nn.Module):
    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.policy_encoder = _encoder(state["policy_encoder.0.weight"])
        self.policy_mean = _linear(state["policy_mean.weight"])
        self.policy_logstd = _linear(state["policy_logstd.weight"])
        self.double().load_state_dict({k: v for k, v in state.items() if k.startswith("policy")})

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.policy_encoder(observation)
        return self.policy_mean(features), self.policy_logstd(features).clamp(-20, 2).exp()


class Critic(nn.Module):
    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.value_encoder = _encoder(state["value_encoder.0.weight"])
        self.value_head = _linear(state["value_head.weight"])
        self.double().load_state_dict({k: v for k, v in state.items() if k.startswith("value")})

    def forward(self, observation: Tensor) -> Tensor:
        return self.value_head(self.value_encoder(observation))


def _linear(weight: Tensor) -> nn.Linear:
    return nn.Linear(weight.shape[1], weight.shape[0])


def _encoder(weight: Tensor) -> nn.Sequential:
    return nn.Sequential(_linear(weight), nn.Tanh())


class Run:
    """The loss, the stepper and the networks of a golden case."""

    def __init__(self, case: Tree) -> None:
        hp = hyperparameters(case, SEED_DEFAULTS)
        state = flatten(case["init"])
        self.policy, self.critic = Policy(state), Critic(state)
        actor = ProbabilisticActor(
            TensorDictModule(self.policy, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=IndependentNormal,
        )
        preset = vmpo_preset("minerva-seed")
        loss_kwargs = preset.loss | {
            "top_k_fraction": hp["topk_fraction"],
            "epsilon": hp["epsilon_eta"],
            "epsilon_mean": hp["epsilon_mu"],
            "epsilon_stddev": hp["epsilon_sigma"],
            "init_temperature": hp["temperature_init"],
            "normalize_advantage": hp["normalize_advantages"],
        }
        critic = ValueOperator(self.critic, in_keys=["observation"])
        self.loss = VMPOLoss(actor, critic, **loss_kwargs).double()
        # The reference inverts the softplus in single precision and without its offset of 1e-8.
        with torch.no_grad():
            for dual in self.loss.dual_variables():
                dual.raw.copy_(torch.tensor(dual.init).expm1().log().double())
        networks = [
            {"params": self.policy.parameters(), "lr": hp["policy_lr"]},
            {"params": self.critic.parameters(), "lr": hp["value_lr"]},
        ]
        self.stepper = VMPOOptimizationStepper(
            make_optimizer(networks, hp),
            make_optimizer(self.loss.alpha_parameters(), hp, lr=hp["alpha_lr"]),
            make_optimizer([self.loss.temperature.raw], hp, lr=hp["temperature_lr"]),
            **preset.stepper | {"num_policy_steps": hp["m_steps"], "clip": hp["max_grad_norm"]},
        )
        self.batch = self._batch(case["batch"])
        steps = hp["m_steps"] * len(updates(case))
        rate = max(hp["policy_lr"], hp["value_lr"])
        amplification = GUARD if hp["optimizer_type"] == "sgd" else ADAM_AMPLIFICATION
        self.parameter_tolerance = steps * rate * amplification

    @staticmethod
    def _batch(batch: Tree) -> TensorDict:
        data = {
            "observation": batch["obs"],
            "action": batch["actions"],
            "loc": batch["old_means"],
            "scale": batch["old_log_stds"].exp(),
            "advantage": batch["advantages"],
            "value_target": batch["returns"],
        }
        for theirs, ours in (
            ("restarting_weights", "restarting_weight"),
            ("importance_weights", "importance_weight"),
        ):
            if theirs in batch:
                data[ours] = batch[theirs]
        return TensorDict(data, batch_size=batch["obs"].shape[:1])

    def parameters(self) -> dict[str, Tensor]:
        named = [*self.policy.named_parameters(), *self.critic.named_parameters()]
        return {name: parameter.detach().clone() for name, parameter in named}


def _names() -> list[str]:
    return sorted(name for name in load("seed") if name.startswith("vmpo"))


def guarded_gaussian_kl(
    loc: Tensor, scale: Tensor, old_loc: Tensor, old_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The divergences with the reference's guards."""
    old_variance, variance = old_scale.square(), scale.square()
    kl_mean = 0.5 * (loc - old_loc).square() / (old_variance + GUARD)
    ratio = old_variance / (variance + GUARD)
    return kl_mean, 0.5 * (ratio - 1 + 2 * (scale.log() - old_scale.log()))


@pytest.mark.parametrize("guarded", [False, True], ids=["as-it-is", "with-guards"])
@pytest.mark.parametrize("name", _names())
def test_golden_vmpo_updates(name: str, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity of every update; to the last digits once the reference's guards are put in."""
    case = load("seed")[name]
    run = Run(case)
    atol = 1e-10
    if guarded:
        monkeypatch.setattr(functional, "decoupled_gaussian_kl", guarded_gaussian_kl)
    else:
        atol = run.parameter_tolerance
    for k, update in enumerate(updates(case)):
        message = f"{name} update {k}"
        before = run.parameters()
        temperature = run.loss.temperature().detach()
        metrics = run.stepper.update(run.loss, run.batch)
        after = run.parameters()
        expected = flatten(update["params"])
        assert after.keys() == expected.keys()
        for key, parameter in after.items():
            assert_close(parameter, expected[key], atol=atol, message=f"{message} {key}")
        for dual, stored in (
            (run.loss.temperature, "log_temperature"),
            (run.loss.alpha_mean, "log_alpha_mu"),
            (run.loss.alpha_stddev, "log_alpha_sigma"),
        ):
            assert_close(dual.raw, update[stored], atol=atol, message=f"{message} {stored}")
        change = sum((after[key] - before[key]).square().sum() for key in after).sqrt()
        _check_metrics(run, metrics, update["metrics"], temperature, message)
        assert_close(change, update["metrics"]["train/param_delta"], atol=atol, message=message)


def _check_metrics(
    run: Run, metrics: TensorDict, expected: Tree, temperature: Tensor, message: str
) -> None:
    atol = 4 * GUARD * run.batch["action"].shape[-1]

    def check(actual: Tensor, key: str) -> None:
        assert_close(actual, expected[key], atol=atol, message=f"{message} {key}")

    for theirs, ours in METRICS.items():
        check(metrics[ours], theirs)
    check(metrics["loss_actor"] + metrics["loss_critic"], "loss/total")
    check(metrics["loss_alpha_mean"] + metrics["loss_alpha_stddev"], "loss/alpha")
    check(run.loss.epsilon, "vmpo/epsilon_eta")
    # The reference divides its spread by the temperature after the step, its threshold by the one
    # before it.
    spread = metrics["advantage_std_over_temperature"] * temperature / metrics["temperature"]
    check(spread, "vmpo/adv_std_over_temperature")
    check(metrics["advantage_threshold"] / temperature, "vmpo/threshold")
    # The reference calls its standardised advantages raw; here raw means raw.
    advantage = run.batch["advantage"]
    assert_close(metrics["advantage_mean"], advantage.mean(), message=message)
    assert_close(metrics["advantage_std"], advantage.std(correction=0), message=message)
    with torch.no_grad():
        metrics_after = run.loss.actor_loss(run.batch)[1] | run.loss.critic_loss(run.batch)[1]
    for theirs, ours in METRICS_AFTER.items():
        check(metrics_after[ours], theirs)
