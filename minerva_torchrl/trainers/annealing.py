"""Learning rates that fall in the course of training."""

from __future__ import annotations

import warnings

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torchrl.trainers import Trainer

__all__ = ["linear_lr_annealing", "register_lr_scheduler"]


def linear_lr_annealing(optimizer: Optimizer, num_updates: int) -> LambdaLR:
    r"""Learning rate falling linearly to zero over the updates.

    Update ``u = 1, ..., U`` runs with :math:`lr_u = lr\,(1 - (u - 1) / U)`, in every parameter
    group. Call ``step()`` once **after** the update of each rollout, as a trainer does
    with its ``lr_scheduler``.

    Args:
        optimizer (Optimizer): the optimiser, with its initial learning rates.
        num_updates (int): number of updates ``U``, that is of rollouts, at least 1.

    Returns:
        The scheduler. Its ``state_dict`` resumes it.

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(()))
        >>> optimizer = torch.optim.Adam([weight], lr=1.0, eps=1e-5)
        >>> scheduler = linear_lr_annealing(optimizer, num_updates=4)
        >>> rates = []
        >>> for update in range(4):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     optimizer.step()  # all epochs of this rollout
        ...     scheduler.step()
        >>> rates
        [1.0, 0.75, 0.5, 0.25]
    """
    if not num_updates >= 1:
        raise ValueError(f"num_updates must be at least 1, got {num_updates}.")
    return LambdaLR(optimizer, lambda finished: max(0.0, 1.0 - finished / num_updates))


def register_lr_scheduler(trainer: Trainer, scheduler: LRScheduler) -> None:
    """Have a trainer step a scheduler after each rollout, and save it with everything else.

    Args:
        trainer (Trainer): the trainer.
        scheduler (LRScheduler): a scheduler of an optimiser that the trainer steps.
    """

    def step() -> None:
        with warnings.catch_warnings():
            # The optimiser may have had nothing to do: rollouts that are not finite are left out.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            scheduler.step()

    trainer.register_op("post_steps", step)
    trainer.register_module("lr_scheduler", scheduler)
