"""Whole MPO updates against the reference agent (Minerva)."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import HardUpdate

from minerva_torchrl import MPOLoss, MPOOptimizationStepper
from minerva_torchrl.presets import mpo_preset
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
    "gamma": 0.99,
    "target_networks_update_period": 100,
    "policy_lr": 3e-4,
    "q_lr": 3e-4,
    "kl_epsilon": 0.1,
    "mstep_kl_epsilon": 0.1,
    "temperature_init": 1.0,
    "temperature_lr": 3e-4,
    "lambda_lr": 3e-4,
    "max_grad_norm": 1.0,
    "action_samples": 20,
    "use_retrace": False,
    "retrace_mc_actions": 8,
    "retrace_lambda": 0.95,
    "init_log_alpha_mean": 10.0,
    "init_log_alpha_stddev": 1000.0,
    "m_steps": 1,
    "optimizer_type": "adam",
    "sgd_momentum": 0.9,
}

METRICS = {
    "loss/q": "loss_qvalue",
    "loss/policy": "cross_entropy",
    "loss/dual_eta": "loss_temperature",
    "kl/q_pi": "kl_q_rel",
    "kl/mean": "kl_mean",
    "kl/std": "kl_stddev",
    "eta": "temperature",
    "lambda": "alpha_mean",
    "alpha_mean": "alpha_mean",
    "alpha_std": "alpha_stddev",
    "q/min": "q_min",
    "q/max": "q_max",
    "pi/std_min": "stddev_min",
    "pi/std_max": "stddev_max",
    "entropy": "weight_entropy",
}

# The reference adds 1e-8 inside the logarithms of these two: KL moves by 1e-8 (before the division
# by the bound) and the entropy of N weights by N * 1e-8.
LOGARITHM_GUARD = 1e-8


class Torso(nn.Module):
    """Linear, LayerNorm, Tanh, Linear, ELU with the sizes of the stored weights."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        hidden, inputs = state["encoder.net.0.weight"].shape
        outputs = state["encoder.net.3.weight"].shape[0]
        self.net = nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.LayerNorm(hidden),
            nn.Tanh(),
            nn.Linear(hidden, outputs),
            nn.ELU(),
        )
        self.out_features = outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Policy(nn.Module):
    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.encoder = Torso(state)
        dim = state["policy_mean.weight"].shape[0]
        self.policy_mean = nn.Linear(self.encoder.out_features, dim)
        self.policy_logstd = nn.Linear(self.encoder.out_features, dim)
        self.double().load_state_dict({k: v for k, v in state.items() if "action_" not in k})

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.encoder(observation)
        return self.policy_mean(features), self.policy_logstd(features).clamp(-20, 2).exp()


class Critic(nn.Module):
    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.encoder = Torso(state)
        self.head = nn.Linear(self.encoder.out_features, 1)
        self.double().load_state_dict({k: v for k, v in state.items() if "action_" not in k})

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.head(self.encoder(torch.cat([observation, action], -1)))


class Run:
    """The loss, the stepper and the networks of a golden case."""

    def __init__(self, case: Tree) -> None:
        hp = hyperparameters(case, SEED_DEFAULTS)
        policy_state, critic_state = flatten(case["init"]["policy"]), flatten(case["init"]["q"])
        self.policy, self.critic = Policy(policy_state), Critic(critic_state)
        spec = Bounded(policy_state["action_low"], policy_state["action_high"])
        actor = ProbabilisticActor(
            TensorDictModule(self.policy, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            spec=spec,
            distribution_class=IndependentNormal,
            return_log_prob=True,
        )
        preset = mpo_preset("minerva-seed")
        loss_kwargs = preset.loss | {
            "num_action_samples": hp["action_samples"],
            "num_value_samples": hp["retrace_mc_actions"] if hp["use_retrace"] else None,
            "epsilon": hp["kl_epsilon"],
            "epsilon_mean": hp["mstep_kl_epsilon"],
            "epsilon_stddev": hp["mstep_kl_epsilon"],
            # The reference takes the arguments of the softplus.
            "init_temperature": _softplus(hp["temperature_init"]),
            "init_alpha_mean": _softplus(hp["init_log_alpha_mean"]),
            "init_alpha_stddev": _softplus(hp["init_log_alpha_stddev"]),
        }
        critic = ValueOperator(self.critic, in_keys=["observation", "action"])
        self.loss = MPOLoss(actor, critic, **loss_kwargs).double()
        # Raw values are read from the file again: float32 construction would round them.
        for dual in self.loss.dual_variables():
            dual.reset_parameters()
        if hp["use_retrace"]:
            self.loss.make_value_estimator("retrace", gamma=hp["gamma"], lmbda=hp["retrace_lambda"])
        else:
            self.loss.make_value_estimator(gamma=hp["gamma"])
        self.loss.double()
        self.period = hp["target_networks_update_period"]
        self.updater = HardUpdate(self.loss, value_network_update_interval=1)
        self.noise: list[Tensor] = []
        self.loss.policy._draw_noise = lambda num, like: self.noise.pop(0).reshape(num, *like.shape)
        loss = self.loss
        temperature = {"params": [loss.temperature.raw], "lr": hp["temperature_lr"]}
        alphas = {"params": [loss.alpha_mean.raw, loss.alpha_stddev.raw]}
        self.stepper = MPOOptimizationStepper(
            make_optimizer(self.critic.parameters(), hp, lr=hp["q_lr"]),
            make_optimizer(self.policy.parameters(), hp, lr=hp["policy_lr"]),
            make_optimizer([temperature, alphas], hp, lr=hp["lambda_lr"]),
            **preset.stepper
            | {
                "num_policy_steps": hp["m_steps"],
                "clip_critic": hp["max_grad_norm"],
                "clip_actor": hp["max_grad_norm"],
                "clip_dual": hp["max_grad_norm"],
            },
        )
        self.batch = self._batch(case["batch"])

    @staticmethod
    def _batch(batch: Tree) -> TensorDict:
        done = batch["dones"].bool()
        return TensorDict(
            {
                "observation": batch["obs"],
                "action": batch["actions_raw"],
                "action_log_prob": batch["behaviour_logp"].squeeze(-1),
                # The reference treats every end as a termination.
                "next": {
                    "observation": batch["next_obs"],
                    "reward": batch["rewards"],
                    "done": done,
                    "terminated": done,
                },
            },
            batch_size=batch["obs"].shape[:-1],
        )

    def update(self, k: int, update: Tree) -> TensorDict:
        if k % self.period == 0:
            for name in ("actor_network_params", "qvalue_network_params"):
                target = getattr(self.loss, f"target_{name}")
                target.data.update_(getattr(self.loss, name).data)
        self.noise[:] = [update["noise0"], update["noise1"]]
        before = nn.utils.parameters_to_vector(self.policy.parameters()).detach().clone()
        metrics = self.stepper.update(self.loss, self.batch)
        after = nn.utils.parameters_to_vector(self.policy.parameters()).detach()
        assert not self.noise, "every draw must be used"
        return metrics.set("param_delta", (after - before).norm())


def _softplus(raw: float) -> float:
    return nn.functional.softplus(torch.tensor(raw, dtype=torch.float64)).item() + 1e-8


def _names() -> list[str]:
    return sorted(name for name in load("seed") if name.startswith("mpo"))


@pytest.mark.parametrize("name", _names())
def test_golden_mpo_updates(name: str) -> None:
    case = load("seed")[name]
    run = Run(case)
    for k, update in enumerate(updates(case)):
        metrics = run.update(k, update)
        for module, stored in ((run.policy, "policy"), (run.critic, "q")):
            for key, parameter in module.named_parameters():
                expected = flatten(update[stored])[key]
                assert_close(parameter, expected, message=f"{name} update {k} {stored}.{key}")
        for dual, stored in (
            (run.loss.temperature, "log_temperature"),
            (run.loss.alpha_mean, "log_alpha_mean"),
            (run.loss.alpha_stddev, "log_alpha_stddev"),
        ):
            assert_close(dual.raw, update[stored], message=f"{name} update {k} {stored}")
        _check_metrics(metrics, update["metrics"], run.loss, f"{name} update {k}")


def _check_metrics(metrics: TensorDict, expected: Tree, loss: MPOLoss, message: str) -> None:
    atol = {
        "kl/q_pi": 2 * LOGARITHM_GUARD / loss.epsilon.item(),
        "entropy": 2 * LOGARITHM_GUARD * loss.num_action_samples,
    }
    for theirs, ours in METRICS.items():
        assert_close(
            metrics[ours],
            expected[theirs],
            atol=atol.get(theirs, 1e-12),
            message=f"{message} {theirs}",
        )
    dual = sum(metrics[key] for key in ("loss_temperature", "loss_alpha_mean", "loss_alpha_stddev"))
    assert_close(dual, expected["loss/dual"], message=f"{message} loss/dual")
    assert_close(
        metrics["param_delta"], expected["train/param_delta"], message=f"{message} param_delta"
    )
