"""Metrics between two rows of ``metrics.csv``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

__all__ = ["MetricsBuffer"]


class MetricsBuffer:
    """Collects episodes and losses batch by batch, and averages them for a row.

    Losses stay on their device until then.

    Examples:
        >>> metrics = MetricsBuffer()
        >>> metrics.add_losses(TensorDict({"loss_actor": torch.tensor(1.0)}))
        >>> metrics.add_losses(TensorDict({"loss_actor": torch.tensor(2.0)}))
        >>> metrics.take()
        {'episode_return': None, 'episode_length': None, 'loss_actor': 1.5, 'loss_total': 1.5}
    """

    def __init__(self) -> None:
        self.episode_return: float | None = None
        """Mean return of the episodes that ended in the last batch in which one did."""
        self._returns: list[float] = []
        self._lengths: list[float] = []
        self._losses: list[TensorDictBase] = []

    def add_batch(self, batch: TensorDictBase) -> None:
        """Note the episodes that ended in a collected batch, but for those that were lost."""
        after = batch["next"]
        ended = (after["done"] & after["episode_reward"].isfinite()).squeeze(-1)
        if ended.any():
            returns = after["episode_reward"].squeeze(-1)[ended].tolist()
            self._returns += returns
            self._lengths += after["step_count"].squeeze(-1)[ended].tolist()
            self.episode_return = sum(returns) / len(returns)

    def add_losses(self, losses: TensorDictBase) -> None:
        """Note the losses and metrics of the updates on a batch."""
        self._losses.append(losses)

    def state_dict(self) -> dict[str, Any]:
        """What was collected since the last row, for a run that goes on from here."""
        losses = TensorDict.stack(self._losses).cpu().to_dict() if self._losses else None
        return {
            "episode_return": self.episode_return,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "losses": losses,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | None = None) -> None:
        """Go on from a state of :meth:`state_dict`.

        Args:
            state (mapping): the state.
            device (torch.device, optional): where the losses of the run are.
        """
        self.episode_return = state["episode_return"]
        self._returns, self._lengths = list(state["returns"]), list(state["lengths"])
        losses, self._losses = state["losses"], []
        if losses is not None:
            number = len(next(iter(losses.values())))
            stacked = TensorDict(losses, batch_size=[number], device=device)
            self._losses = list(stacked.unbind(0))

    def take(self) -> dict[str, float | None]:
        """The averages since the last call, ``None`` where there was nothing."""
        row: dict[str, float | None] = {
            "episode_return": _mean(self._returns),
            "episode_length": _mean(self._lengths),
        }
        if self._losses:
            mean = TensorDict.stack(self._losses).mean(0)
            values = torch.stack([value.double() for value in mean.values()])
            row |= _with_sums(dict(zip(mean.keys(), values.tolist(), strict=True)))
        self._returns, self._lengths, self._losses = [], [], []
        return row


def _with_sums(means: dict[str, float]) -> dict[str, float]:
    """Metrics, and the sums of the losses of networks and of dual variables, if there are any."""
    losses = {name: value for name, value in means.items() if name.startswith("loss_")}
    duals = [losses.pop(name) for name in [*losses] if "alpha" in name or "temperature" in name]
    total = {"loss_total": sum(losses.values())} if losses else {}
    return {**means, **total, **({"loss_dual": sum(duals)} if duals else {})}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
