"""The order of updates, and trainers that run them."""

from minerva_torchrl.trainers.annealing import linear_lr_annealing
from minerva_torchrl.trainers.hooks import make_target_updater
from minerva_torchrl.trainers.mpo import MPOOptimizationStepper, MPOTrainer
from minerva_torchrl.trainers.ppo import KLEarlyStop, PPOOptimizationStepper, make_ppo_trainer
from minerva_torchrl.trainers.sequences import SequenceSampler
from minerva_torchrl.trainers.stepping import NonFiniteError
from minerva_torchrl.trainers.vmpo import VMPOOptimizationStepper, VMPOTrainer

__all__ = [
    "KLEarlyStop",
    "MPOOptimizationStepper",
    "MPOTrainer",
    "NonFiniteError",
    "PPOOptimizationStepper",
    "SequenceSampler",
    "VMPOOptimizationStepper",
    "VMPOTrainer",
    "linear_lr_annealing",
    "make_ppo_trainer",
    "make_target_updater",
]
