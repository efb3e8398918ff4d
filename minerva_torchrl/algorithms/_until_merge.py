"""The coming signatures of V-MPO's and PPO's parts, on top of the present ones. To be removed."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torchrl.trainers import Trainer

from minerva_torchrl.objectives import vmpo
from minerva_torchrl.objectives.clip_ppo import DirectClipPPOLoss
from minerva_torchrl.trainers import ppo, steppers

__all__ = [
    "DirectClipPPOLoss",
    "PPOOptimizationStepper",
    "VMPOLoss",
    "VMPOOptimizationStepper",
    "make_ppo_trainer",
]


class VMPOLoss(vmpo.VMPOLoss):
    """``epsilon_eta`` becomes ``epsilon``."""

    def __init__(
        self,
        actor_network: Any,
        critic_network: Any,
        *,
        top_k_fraction: float = 0.5,
        epsilon: float = 0.1,
        epsilon_mean: float | None = None,
        epsilon_stddev: float | None = None,
        epsilon_policy: float | None = None,
        per_dim_constraining: bool = False,
        init_temperature: float = 1.0,
        init_alpha_mean: float | None = None,
        init_alpha_stddev: float | None = None,
        init_alpha_policy: float | None = None,
        temperature_update: str = "solve",
        kl_samples: str = "all",
        normalize_advantage: bool = True,
        critic_coeff: float = 0.5,
        loss_critic_type: str = "l2",
        clip_value: float | None = None,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(epsilon_eta=arguments.pop("epsilon"), **arguments)


VMPOLoss.__doc__ = (vmpo.VMPOLoss.__doc__ or "").replace("epsilon_eta", "epsilon")


class VMPOOptimizationStepper(steppers.VMPOOptimizationStepper):
    """``dual_order`` is new.

    Keyword Args:
        dual_order (str): ``"simultaneous"`` (default) or ``"dual_first"``.
        lr_scaling (str, optional): scale of the learning rates.
        clip (float, optional): largest gradient norm.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_alpha: Optimizer,
        optimizer_temperature: Optimizer | None = None,
        *,
        num_policy_steps: int = 1,
        minibatch_size: int | None = None,
        dual_order: str = "simultaneous",
        lr_scaling: Any = None,
        clip: float | None = 1.0,
    ) -> None:
        super().__init__(
            optimizer,
            optimizer_alpha,
            optimizer_temperature,
            num_policy_steps=num_policy_steps,
            minibatch_size=minibatch_size,
            lr_scaling=lr_scaling,
            clip=clip,
        )
        self.dual_order = dual_order


class PPOOptimizationStepper(steppers.PPOOptimizationStepper):
    """Epochs and minibatches are the stepper's.

    Keyword Args:
        num_epochs (int): passes over a rollout.
        minibatch_size (int): frames in a minibatch.
        target_kl (float, optional): ends the epochs early.
        clip (float, optional): largest gradient norm.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        num_epochs: int = 10,
        minibatch_size: int = 64,
        target_kl: float | None = None,
        clip: float | None = 0.5,
    ) -> None:
        super().__init__(optimizer, clip=clip)
        self.loop = {
            "num_epochs": num_epochs,
            "minibatch_size": minibatch_size,
            "target_kl": target_kl,
        }


def make_ppo_trainer(*, optimization_stepper: PPOOptimizationStepper, **arguments: Any) -> Trainer:
    """Epochs and minibatches are the stepper's."""
    loop: dict[str, Any] = optimization_stepper.loop
    return ppo.make_ppo_trainer(optimization_stepper=optimization_stepper, **loop, **arguments)
