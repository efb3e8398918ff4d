"""A2C with TorchRL's parts: a new algorithm, all of it, in one file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDictBase
from torchrl.objectives import A2CLoss, ValueEstimators
from torchrl.trainers import OptimizationStepper, Trainer

from minerva_torchrl.algorithms import Preset
from minerva_torchrl.algorithms.common import make_optimizer
from minerva_torchrl.algorithms.config import LossConfig, OptimConfig, arguments_of
from minerva_torchrl.algorithms.on_policy import OnPolicyAlgorithm, OnPolicyConfig
from minerva_torchrl.trainers.hooks import FiniteBatches, weights_to_collector


@arguments_of(A2CLoss)
class A2CLossConfig(LossConfig):
    """Arguments of TorchRL's ``A2CLoss``, and of its advantages."""

    critic_coeff: float = 0.5
    loss_critic_type: str


@dataclass(frozen=True)
class A2COptimConfig(OptimConfig):
    """The optimiser."""

    lr: float = 1e-3
    """Learning rate."""


@dataclass(frozen=True)
class A2CConfig(OnPolicyConfig):
    """Settings of A2C."""

    algo: Literal["a2c"] = "a2c"
    loss: A2CLossConfig = field(default_factory=A2CLossConfig)
    optim: A2COptimConfig = field(default_factory=A2COptimConfig)


class A2C(OnPolicyAlgorithm[A2CConfig]):
    """Advantage actor-critic: one step per rollout."""

    title = "A2C"
    config_class = A2CConfig
    presets: ClassVar = {
        "default": Preset(),
        "slow": Preset(run={"optim": {"lr": 1e-4}}, description="small steps"),
    }

    def make_loss(self, actor: Any, critic: Any) -> A2CLoss:
        settings = self.config.loss
        loss = A2CLoss(
            actor,
            critic,
            critic_coeff=settings.critic_coeff,
            loss_critic_type=settings.loss_critic_type,
        )
        loss.make_value_estimator(ValueEstimators.GAE, gamma=settings.gamma, lmbda=settings.lmbda)
        return loss

    def make_trainer(self, loss: A2CLoss, replay_buffer: None, **arguments: Any) -> Trainer:
        optim = self.config.optim
        optimizer = make_optimizer({"": (loss.parameters(), optim.lr)}, optim, eps=optim.adam_eps)
        trainer = Trainer(
            optimization_stepper=OneStep(optimizer), optim_steps_per_batch=1, **arguments
        )
        trainer.register_op("batch_process", torch.no_grad()(loss.value_estimator))
        trainer.register_op("post_steps", weights_to_collector(trainer))
        trainer.finite_batches = FiniteBatches(self.config.max_skipped)
        trainer.finite_batches.register(trainer)
        return trainer


class OneStep(OptimizationStepper):
    """One step of one optimiser."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        losses = trainer.loss_module(sub_batch)
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses.detach()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
