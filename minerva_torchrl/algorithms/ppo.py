"""PPO: settings, presets, loss and trainer. Its networks are those of on-policy algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from tensordict.nn import ProbabilisticTensorDictSequential
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers import Trainer

from minerva_torchrl.algorithms.common import Preset, make_optimizer, single_specs
from minerva_torchrl.algorithms.config import LossConfig, OptimConfig, arguments_of, out_of_range
from minerva_torchrl.algorithms.on_policy import OnPolicyAlgorithm, OnPolicyConfig
from minerva_torchrl.modules import BinnedClipPPOLoss, DirectClipPPOLoss, DirectModule
from minerva_torchrl.objectives import make_ppo_loss
from minerva_torchrl.trainers import PPOOptimizationStepper, make_ppo_trainer

__all__ = ["PPO", "PPOConfig"]

# Settings ----------------------------------------------------------------------------------------


@arguments_of(make_ppo_loss)
class PPOLossConfig(LossConfig):
    """Arguments of :func:`~minerva_torchrl.make_ppo_loss`."""

    lmbda: float = 0.9
    """Of generalised advantages. With 0.95, which is noisier, cheetah-run learned half as much."""
    clip_epsilon: float
    clip_value: bool
    value_coeff: float
    entropy_coeff: float
    normalize_advantage: bool
    truncation_is_terminal: bool


@arguments_of(PPOOptimizationStepper)
class PPOOptimConfig(OptimConfig):
    """The optimiser, and arguments of ``PPOOptimizationStepper``."""

    lr: float = 3e-4
    """Learning rate."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to zero over ``total_frames``."""
    num_epochs: int
    minibatch_size: int
    clip: float | None
    target_kl: float | None


@dataclass(frozen=True)
class PPOConfig(OnPolicyConfig):
    """Settings of PPO."""

    algo: Literal["ppo"] = "ppo"
    loss: PPOLossConfig = field(default_factory=PPOLossConfig)
    optim: PPOOptimConfig = field(default_factory=PPOOptimConfig)

    @property
    def compilable_steps(self) -> int:
        """All minibatches of all epochs."""
        minibatches = self.collector.frames_per_batch // max(1, self.optim.minibatch_size)
        return self.num_batches * self.optim.num_epochs * minibatches

    def problems(self) -> Iterator[str]:
        """What is impossible about these settings, one line each."""
        yield from super().problems()
        yield from out_of_range(self, 1e6, "loss.value_coeff", "loss.entropy_coeff", least=0)
        if not 0 < self.loss.clip_epsilon < 1:
            yield f"loss.clip_epsilon must be between 0 and 1, got {self.loss.clip_epsilon}."
        frames, minibatch = self.collector.frames_per_batch, self.optim.minibatch_size
        if minibatch > 0 and frames % minibatch:
            yield (
                "collector.frames_per_batch must be a multiple of optim.minibatch_size, got "
                f"{frames} and {minibatch}."
            )


# Presets -----------------------------------------------------------------------------------------

PRESETS = {
    "default": Preset(
        description="what learns best here",
        adam={"eps": PPOOptimConfig.adam_eps},  # for pipelines of one's own
    ),
    "minerva-seed": Preset(
        description=(
            "the reference agent (Minerva), which among other things ends the return at a time "
            "limit, and scales rewards with a discount of its own"
        ),
        loss={"gamma": 0.98, "lmbda": 0.92, "truncation_is_terminal": True},
        adam={"eps": 1e-5},
        run={
            "deterministic": True,
            "eval": {"interval": 1 / 150, "episodes": 50},
            "collector": {"frames_per_batch": 2048},
            "env": {
                "num_envs": 1,
                "staggered": False,
                "reward_scaling_gamma": 0.99,
                "reward_scaling_reset": "termination",
            },
            "network": {
                "actor_sizes": [512, 256],
                "critic_sizes": [512, 256],
                "scale_gain": 1.0,
                "init_scale": 1.0,
            },
            "optim": {"lr": 2e-4, "minibatch_size": 32},
        },
    ),
}


# The algorithm -----------------------------------------------------------------------------------


class PPO(OnPolicyAlgorithm[PPOConfig]):
    """Proximal policy optimisation with clipping, for continuous and discrete actions."""

    title = "PPO"
    config_class = PPOConfig
    presets = PRESETS

    def make_networks(self, env: EnvBase) -> tuple[ProbabilisticTensorDictSequential, DirectModule]:
        """The policy of the task's actions, and a critic of states."""
        if isinstance(single_specs(env)[1], Composite):
            raise ValueError(
                "PPO does not train on actions of several parts, such as those of a Dict or "
                "MultiDiscrete space; MPO and V-MPO do."
            )
        return super().make_networks(env)

    def make_loss(self, actor: ProbabilisticTensorDictSequential, critic: Any) -> ClipPPOLoss:
        """The loss, with generalised advantages."""
        arguments: dict[str, Any] = {"loss_class": DirectClipPPOLoss}
        if self.config.network.critic != "scalar":
            arguments = {"loss_class": BinnedClipPPOLoss, "critic": self.make_critic()}
        return make_ppo_loss(actor, critic, **vars(self.config.loss), **arguments)

    def make_trainer(self, loss: ClipPPOLoss, replay_buffer: None, **arguments: Any) -> Trainer:
        """The trainer, with one optimiser for both networks."""
        optim = self.config.optim
        optimizer = make_optimizer({"": (loss.parameters(), optim.lr)}, optim, eps=optim.adam_eps)
        return make_ppo_trainer(
            optimization_stepper=PPOOptimizationStepper(
                optimizer,
                num_epochs=optim.num_epochs,
                minibatch_size=optim.minibatch_size,
                target_kl=optim.target_kl,
                clip=optim.clip,
            ),
            frames_per_batch=self.config.collector.frames_per_batch,
            lr_scheduler=self.annealing(optimizer) if optim.anneal_lr else None,
            max_skipped=self.config.max_skipped,
            **arguments,
        )
