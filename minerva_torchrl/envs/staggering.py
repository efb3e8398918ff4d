"""Copies of a task that are not all in the same phase of their episodes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from minerva_torchrl.objectives.checks import check_count

__all__ = ["StaggeredEpisodes"]


class StaggeredEpisodes(Transform):
    r"""Ends the first episodes of a batch of environments at different times.

    Copies that start together and have episodes of the same length stay together: a rollout that is
    shorter than an episode then has its beginnings only, or its ends only, and an on-policy
    algorithm forgets the one while it learns the other. Here the running episode of copy ``k`` of
    ``K`` is truncated once, after

    .. math::
        \lceil k L / K \rceil

    steps with ``k = 1 .. K - 1``, where ``L`` is the length of an episode. The copies are spread
    over an episode's length from then on. A truncation is no termination: values are bootstrapped.

    It starts over when all copies are reset at once. The count of steps is part of ``state_dict``,
    so that a run can be resumed exactly. TorchRL's ``RandomTruncationTransform`` draws its lengths
    at random and does not save them.

    Args:
        episode_length (int): steps of an episode, ``L``.

    Examples:
        >>> from torchrl.envs import TransformedEnv
        >>> from minerva_torchrl.envs import SuiteEnv
        >>> env = SuiteEnv("cartpole", "swingup", num_envs=4, seed=0)
        >>> env = TransformedEnv(env, StaggeredEpisodes(12))
        >>> rollout = env.rollout(10, break_when_any_done=False)
        >>> ends = rollout["next", "truncated"].squeeze(-1)
        >>> [steps.nonzero().flatten().add(1).tolist() for steps in ends]
        [[], [3], [6], [9]]
    """

    invertible = False

    def __init__(self, episode_length: int) -> None:
        check_count("episode_length", episode_length)
        super().__init__()
        self.episode_length = episode_length
        self.place: tuple[int, int] | None = None
        """If there are more copies elsewhere: the number of the first one here, and of all."""
        self._steps = 0  # since all copies were reset
        self._last_steps: Tensor | None = None  # of the copies' first episodes

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        cut = self.cut(next_tensordict.get("terminated"))
        if cut is None:
            return next_tensordict
        next_tensordict.set("truncated", next_tensordict.get("truncated") | cut)
        return next_tensordict.set("done", next_tensordict.get("done") | cut)

    def cut(self, terminated: Tensor) -> Tensor | None:
        """Count a step, and say whose episode it truncates.

        Args:
            terminated (Tensor): of the step, ``[*K, 1]``.

        Returns:
            A mask of the same shape, or ``None`` once all copies are spread.
        """
        self._steps += 1
        if self._steps >= self.episode_length:
            return None
        if self._last_steps is None:
            first, count = self.place or (0, terminated.numel())
            copies = torch.arange(terminated.numel(), device=terminated.device)
            copies = first + copies.reshape(terminated.shape)
            self._last_steps = -(-copies * self.episode_length // count)
        return (self._last_steps == self._steps) & ~terminated

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        if tensordict is None or tensordict.get("_reset", None) is None:
            self._steps = 0
        return tensordict_reset

    def get_extra_state(self) -> dict[str, Tensor]:
        """Steps since all copies were reset."""
        return {"steps": torch.tensor(self._steps)}

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a count of steps."""
        self._steps = int(state["steps"])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Not available: outside an environment there are no steps to count."""
        raise RuntimeError(
            "StaggeredEpisodes counts the steps of an environment and must be part of a "
            "TransformedEnv."
        )
