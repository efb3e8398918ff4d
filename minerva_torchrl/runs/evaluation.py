"""Evaluation of the deterministic policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type

from minerva_torchrl.envs import EnvironmentFailure

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Episodes of the deterministic policy."""

    returns: Tensor
    """Undiscounted returns, ``[episodes]``."""
    lengths: Tensor
    """Numbers of actions, ``[episodes]``."""
    lost: int = 0
    """Episodes that were begun again because the environment gave what is not finite."""

    def row(self) -> dict[str, float]:
        """What ``eval.csv`` has of it, besides the frames."""
        returns = self.returns.double()
        return {
            "return_mean": returns.mean().item(),
            "return_std": returns.std(correction=0).item(),
            "return_min": returns.min().item(),
            "return_max": returns.max().item(),
            "length_mean": self.lengths.double().mean().item(),
        }


@torch.no_grad()
def evaluate(
    env: EnvBase,
    actor: Callable[[TensorDictBase], TensorDictBase],
    *,
    seed: int | None = None,
    on_step: Callable[[], None] | None = None,
    max_skipped: int = 10,
) -> Evaluation:
    """One episode in each copy of an environment, side by side.

    An episode with a step that the environment lost, because something was not finite, does not
    count: its copy begins another one.

    Neither torch's random generator nor anything in training is touched: the environment is one of
    its own, with frozen statistics.

    Args:
        env (EnvBase): from :func:`~minerva_torchrl.make_env`, with batch size ``[episodes]``.
        actor (callable): the policy, usually a TensorDict module.

    Keyword Args:
        seed (int, optional): seed the environment first, so that the episodes begin the same way
            every time.
        on_step (callable, optional): called at every state of the first copy's episode but the
            last.
        max_skipped (int): episodes in a row that a copy may lose. Defaults to ``10``.

    Returns:
        Returns and lengths of the episodes.

    Examples:
        >>> from minerva_torchrl import make_env
        >>> from torchrl.envs.utils import RandomPolicy
        >>> env = make_env("cartpole-balance", num_envs=3, max_episode_steps=10)
        >>> evaluate(env, RandomPolicy(env.action_spec), seed=0).lengths
        tensor([10, 10, 10])
    """
    parameters = actor.parameters() if isinstance(actor, nn.Module) else iter(())
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    with (
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
        set_exploration_type(ExplorationType.DETERMINISTIC),
    ):
        if seed is not None:
            env.set_seed(seed)
        data = env.reset()
        running = torch.ones(env.batch_size, dtype=torch.bool)
        returns = torch.zeros(env.batch_size)
        lengths, lost = torch.zeros(2, *env.batch_size, dtype=torch.int64)
        if on_step is not None:
            on_step()
        while running.any():
            data = actor(data.to(device)).to("cpu")
            step, data = env.step_and_maybe_reset(data)
            after = step["next"]
            returns = torch.where(running, after["episode_reward"].squeeze(-1), returns)
            lengths = torch.where(running, after["step_count"].squeeze(-1), lengths)
            is_lost = running & after["reward"].isnan().squeeze(-1)
            running &= ~after["done"].squeeze(-1) | is_lost
            lost += is_lost
            if is_lost.any() and lost.max() >= max_skipped:
                raise EnvironmentFailure(
                    f"the environment lost {max_skipped} episodes of an evaluation in a row (the "
                    "limit, max_skipped), because observations or rewards were not finite."
                )
            if on_step is not None and running.flatten()[0]:  # else it has been reset already
                on_step()
    return Evaluation(returns.flatten(), lengths.flatten(), int(lost.sum()))
