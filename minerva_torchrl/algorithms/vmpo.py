"""V-MPO: settings, presets, loss and trainer. Its networks are those of on-policy algorithms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential

from minerva_torchrl.algorithms.common import Preset, make_optimizer
from minerva_torchrl.algorithms.config import (
    LossConfig,
    OptimConfig,
    arguments_of,
    not_positive,
    out_of_range,
)
from minerva_torchrl.algorithms.on_policy import (
    OnPolicyAlgorithm,
    OnPolicyConfig,
)
from minerva_torchrl.objectives import VMPOLoss
from minerva_torchrl.objectives.log_probs import joint_log_prob, log_prob_keys
from minerva_torchrl.objectives.specs import keys_without
from minerva_torchrl.trainers import VMPOOptimizationStepper, VMPOTrainer

__all__ = ["VMPO", "VMPOConfig"]

# Settings ----------------------------------------------------------------------------------------


@arguments_of(VMPOLoss)
class VMPOLossConfig(LossConfig):
    """Arguments of :class:`~minerva_torchrl.VMPOLoss`, and its value estimator."""

    value_estimator: Literal["gae", "returns", "td0"] = "gae"
    """Generalised advantages, whole returns (λ = 1), or one step (λ = 0)."""
    restarting_weights: bool = False
    """Leave the first step of every episode out of the E-step."""
    importance_weights: bool = False
    """Weigh samples by min(1, π / π_b), for data of an older policy π_b."""
    top_k_fraction: float
    epsilon: float
    epsilon_mean: float | None
    epsilon_stddev: float | None
    epsilon_covariance: float | None
    epsilon_policy: float | None
    per_dim_constraining: bool | None = None
    """Null: for Gaussian policies, as in MPO."""
    init_temperature: float
    init_alpha_mean: float | None
    init_alpha_stddev: float | None
    init_alpha_covariance: float | None
    init_alpha_policy: float | None
    temperature_update: Literal["solve", "gradient"]
    alpha_update: Literal["gradient", "relative"] = "relative"
    """Steps along the gradient are too small for a multiplier that has to grow tenfold."""
    kl_samples: Literal["all", "selected"]
    normalize_advantage: bool
    critic_coeff: float
    loss_critic_type: Literal["l2", "l1", "smooth_l1"]
    clip_value: float | None


@arguments_of(VMPOOptimizationStepper)
class VMPOOptimConfig(OptimConfig):
    """Optimisers, and arguments of :class:`~minerva_torchrl.VMPOOptimizationStepper`."""

    lr_actor: float = 3e-4
    """Learning rate of the policy."""
    lr_critic: float = 3e-4
    """Learning rate of the critic."""
    lr_alpha: float = 5e-2
    """Learning rate of the multipliers, of their logarithm with ``loss.alpha_update=relative``."""
    anneal_lr: bool = False
    """Let the learning rates of the networks fall linearly to zero over ``total_frames``."""
    lr_temperature: float = 1e-2
    """That of a temperature with ``temperature_update=gradient``."""
    adam_eps_dual: float = 1e-8
    """That for the dual variables, whose gradients can be small."""
    num_policy_steps: int = 320
    """With minibatches of 64, ten times over a rollout of 2048 frames."""
    minibatch_size: int | None = 64
    """Null is all of the rollout."""
    dual_order: Literal["simultaneous", "dual_first"]
    lr_scaling: Literal["1/sqrt(M)", "1/M"] | None
    clip: float | None


@dataclass(frozen=True)
class VMPOConfig(OnPolicyConfig):
    """Settings of V-MPO."""

    algo: Literal["vmpo"] = "vmpo"
    loss: VMPOLossConfig = field(default_factory=VMPOLossConfig)
    optim: VMPOOptimConfig = field(default_factory=VMPOOptimConfig)

    @property
    def compilable_steps(self) -> int:
        """All policy steps, unless the multipliers are stepped first."""
        whole = self.optim.dual_order == "simultaneous"
        return self.num_batches * self.optim.num_policy_steps if whole else 0

    def problems(self) -> Iterator[str]:
        """What is impossible about these settings, one line each."""
        yield from super().problems()
        yield from not_positive(self, "loss.top_k_fraction")
        yield from out_of_range(self, 1.0, "loss.top_k_fraction")

    def problems_of_new_run(self) -> Iterator[str]:
        """What makes no sense to begin with, though there may be such runs already."""
        yield from super().problems_of_new_run()
        frames, minibatch = self.collector.frames_per_batch, self.optim.minibatch_size
        if minibatch is not None and minibatch > frames:
            yield (
                "optim.minibatch_size must be at most collector.frames_per_batch, got "
                f"{minibatch} and {frames}."
            )


# Presets -----------------------------------------------------------------------------------------

PRESETS = {
    "default": Preset(description="what learns best here"),
    "minerva-seed": Preset(
        description=(
            "the reference agent (Minerva): temperature learned by one step per rollout, KL "
            "divergences over the selected samples only, multipliers stepped before the policy, "
            "learning rates as they are for any number of policy steps, a squashed policy whose "
            "standard deviation depends on the state, no first steps of episodes"
        ),
        loss={
            "top_k_fraction": 0.7,
            "epsilon": 0.15,
            "epsilon_mean": 0.05,
            "epsilon_stddev": 1e-3,
            "init_temperature": 5.0,
            "init_alpha_mean": 1.0,
            "init_alpha_stddev": 1.0,
            "temperature_update": "gradient",
            "alpha_update": "gradient",
            "kl_samples": "selected",
            "per_dim_constraining": False,
        },
        stepper={
            "num_policy_steps": 64,
            "minibatch_size": None,
            "dual_order": "dual_first",
            "clip": 0.5,
            "lr_scaling": None,
        },
        adam={"eps": 1e-5},
        run={
            "eval": {"interval": 1 / 150, "episodes": 50},
            "collector": {"frames_per_batch": 4096},
            "env": {"num_envs": 1, "staggered": False, "reward_scaling_reset": "termination"},
            "network": {
                "actor_sizes": [512, 256],
                "critic_sizes": [512, 256],
                "activation": "elu",
                "layer_norm": True,
                "initializer": "xavier_heads",
                "policy": "tanh_gaussian",
                "scale": "exp",
                "scale_gain": 1.0,
                "init_scale": math.exp(-0.5),
                "min_scale": math.exp(-20),
                "max_scale": math.exp(2),
            },
            "loss": {"gamma": 0.98, "lmbda": 0.92, "restarting_weights": True},
            "optim": {
                "lr_actor": 1e-4,
                "lr_critic": 1e-4,
                "lr_alpha": 1e-4,
                "lr_temperature": 1e-4,
                "adam_eps_dual": 1e-5,
                "anneal_lr": False,
            },
        },
    ),
}


# The algorithm -----------------------------------------------------------------------------------


class VMPO(OnPolicyAlgorithm[VMPOConfig]):
    """On-policy maximum a posteriori policy optimisation, for continuous and discrete actions."""

    title = "V-MPO"
    config_class = VMPOConfig
    presets = PRESETS
    renamed: ClassVar = {"loss.epsilon_eta": "loss.epsilon"}
    earlier: ClassVar = {
        **OnPolicyAlgorithm.earlier,
        "optim.dual_order": "dual_first",
        "loss.alpha_update": "gradient",
        "optim.adam_eps_dual": 1e-5,
    }

    def make_loss(self, actor: ProbabilisticTensorDictSequential, critic: Any) -> VMPOLoss:
        """The loss, with its value estimator."""
        arguments = dict(vars(self.config.loss))
        gamma, lmbda, estimator = (arguments.pop(k) for k in ("gamma", "lmbda", "value_estimator"))
        del arguments["restarting_weights"], arguments["importance_weights"]
        if self.config.network.critic != "scalar":
            arguments["critic"] = self.make_critic()
        loss = VMPOLoss(actor, critic, **arguments)
        trace = {"lmbda": lmbda} if estimator == "gae" else {}
        return loss.make_value_estimator(estimator, gamma=gamma, **trace)

    def make_trainer(self, loss: VMPOLoss, replay_buffer: None, **arguments: Any) -> VMPOTrainer:
        """The trainer, with an optimiser for the networks and others for the dual variables."""
        optim = self.config.optim
        networks = {  # of layers that they share, the rate is the policy's
            "actor": (loss.actor_network_params.parameters(), optim.lr_actor),
            "critic": (loss.critic_network_params.parameters(), optim.lr_critic),
        }
        optimizer = make_optimizer(networks, optim, eps=optim.adam_eps)
        alpha = {"alpha": (loss.alpha_parameters(), optim.lr_alpha)}
        temperature = None
        if self.config.loss.temperature_update == "gradient":
            learned = {"temperature": (loss.temperature_parameters(), optim.lr_temperature)}
            temperature = make_optimizer(learned, optim, eps=optim.adam_eps_dual)
        trainer = VMPOTrainer(
            optimization_stepper=VMPOOptimizationStepper(
                optimizer,
                make_optimizer(alpha, optim, eps=optim.adam_eps_dual),
                temperature,
                num_policy_steps=optim.num_policy_steps,
                minibatch_size=optim.minibatch_size,
                dual_order=optim.dual_order,
                lr_scaling=optim.lr_scaling,
                clip=optim.clip,
            ),
            lr_scheduler=self.annealing(optimizer) if optim.anneal_lr else None,
            max_skipped=self.config.max_skipped,
            **arguments,
        )
        trainer.register_op("batch_process", partial(self._with_weights, loss))
        return trainer

    @torch.no_grad()
    def _with_weights(self, loss: VMPOLoss, rollout: TensorDictBase) -> TensorDictBase:
        """A rollout with the weights of its samples that the settings ask for."""
        keys = loss.tensor_keys
        if self.config.loss.restarting_weights:
            begun = rollout.get("step_count") > 0
            rollout.set(keys.restarting_weight, begun.to(rollout.get(("next", "reward")).dtype))
        if self.config.loss.importance_weights:
            actor, key = loss.actor_network, keys.sample_log_prob
            dist = actor.get_dist(rollout.select(*keys_without(actor.in_keys, actor.out_keys)))
            log_pi = loss.policy.log_prob(dist, rollout.get(keys.action))
            log_mu = joint_log_prob(rollout, log_prob_keys(actor, key))
            rollout.set(keys.importance_weight, (log_pi - log_mu).clamp_max(0).exp())
        return rollout
