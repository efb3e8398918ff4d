"""Sequences of consecutive steps out of a replay buffer of single steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import TensorStorage
from torchrl.data.replay_buffers.samplers import Sampler

from minerva_torchrl.objectives.checks import check_choice, check_count

__all__ = ["SequenceSampler"]

_MASK = ("collector", "mask")  # where TorchRL's losses look for it


class SequenceSampler(Sampler):
    r"""Draws sequences ``[B, T]`` such that every stored step is trained on equally often.

    A sequence goes through one trajectory, step by step, whatever is stored between its steps:
    those of other environments, other collectors, other batches. It ends with the trajectory, or
    where what is stored of it ends; behind that it is padded up to ``T`` steps, and the entry
    ``("collector", "mask")`` is false there. The ``batch_size`` of the buffer counts sequences.

    *Which sequences.* Let :math:`N` steps be stored, in pieces of trajectories.

    - ``"first"``, for losses that train on the first step of a sequence: sequences begin at every
      step with the same probability :math:`1 / N`, also at the last one of an episode.
    - ``"all"``, for losses that train on all of them: if sequences only began at stored steps, a
      step with :math:`p < T` steps before it would be in :math:`p + 1` of them, and any later one
      in :math:`T`. So those are added that would have begun :math:`j = 1, \dots, T - 1` steps
      before the piece: of each the :math:`T - j` steps that are inside. Now every step is in
      exactly :math:`T` sequences, one for each place that it can have there. All sequences, of
      which there are :math:`N + M (T - 1)` for :math:`M` pieces, are equally likely. Hence every
      step is drawn :math:`B\,T / (N + M (T - 1))` times per batch on average, whatever the lengths
      of episodes; and the number of steps from it to the end of its sequence is uniform.

      They are drawn by rejection: a step and a :math:`j \in \{0, \dots, T - 1\}`, both uniform, are
      accepted if :math:`j = 0` or the step is the first of its piece.

    The steps of a trajectory must be stored in their order. The links between steps are made from
    the storage when a batch is drawn: once for all that is stored, then for what is new.

    Args:
        sequence_length (int): steps of a sequence, ``T``.

    Keyword Args:
        sequence_steps (str): the steps that are trained on, ``"all"`` (default) or ``"first"``, as
            in :class:`~minerva_torchrl.MPOLoss`.
        trajectory_key (NestedKey): entry with the number of the trajectory. Defaults to
            ``("collector", "traj_ids")``.
        done_key (NestedKey): entry that says where a trajectory ends. Defaults to
            ``("next", "done")``.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(100), sampler=SequenceSampler(4), batch_size=8
        ... )
        >>> steps = {"collector": {"traj_ids": torch.tensor([0, 0, 0, 1, 1])}}
        >>> done = torch.tensor([False, False, True, False, False])
        >>> steps |= {"next": {"done": done.unsqueeze(-1)}}
        >>> index = buffer.extend(TensorDict(steps, [5]))
        >>> sample = buffer.sample()
        >>> sample.shape, sample["collector", "mask"][:, [0, 3]].any(0)
        (torch.Size([8, 4]), tensor([ True, False]))
    """

    _written: list[Tensor]
    _newest: int | None

    def __init__(
        self,
        sequence_length: int,
        *,
        sequence_steps: Literal["all", "first"] = "all",
        trajectory_key: NestedKey = ("collector", "traj_ids"),
        done_key: NestedKey = ("next", "done"),
    ) -> None:
        check_count("sequence_length", sequence_length)
        check_choice("sequence_steps", sequence_steps, ("all", "first"))
        self.sequence_length = sequence_length
        self.sequence_steps = sequence_steps
        self.trajectory_key = trajectory_key
        self.done_key = done_key
        self._empty()

    def sample(self, storage: Any, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        """Places of the steps of sequences ``[B, T]``, and the mask of those that are valid.

        Args:
            storage (TensorStorage): what is stored, with one dimension.
            batch_size (int): number of sequences.
        """
        self._follow(storage)
        start, length = self._draw(len(storage), batch_size)
        steps = start.new_empty(self.sequence_length, batch_size)
        steps[0] = start
        for t in range(1, self.sequence_length):
            torch.index_select(self._successor, 0, steps[t - 1], out=steps[t])
        valid = torch.ones_like(steps, dtype=torch.bool)
        valid[1:] = steps[1:] != steps[:-1]
        valid &= torch.arange(self.sequence_length).unsqueeze(-1) < length
        return steps.T.contiguous(), {_MASK: valid.T.contiguous()}

    def _draw(self, num_steps: int, count: int) -> tuple[Tensor, Tensor]:
        """Where sequences begin, and how many of their steps count at most."""
        longest = self.sequence_length
        if self.sequence_steps == "first":
            start = torch.randint(num_steps, (count,), generator=self._rng)
            return start, torch.full_like(start, longest)
        accepted: list[Tensor] = []
        missing = count
        while missing > 0:  # hardly ever more than once
            candidates = 5 * missing * longest // 4 + 16
            drawn = torch.randint(num_steps * longest, (candidates,), generator=self._rng)
            start, skipped = drawn // longest, drawn % longest
            fits = (skipped == 0) | self._is_first[start]
            accepted.append(drawn[fits][:missing])
            missing -= len(accepted[-1])
        drawn = torch.cat(accepted)
        return drawn // longest, longest - drawn % longest

    # Links ---------------------------------------------------------------------------------------

    def extend(self, index: Tensor) -> None:
        """Steps were stored at these places, in this order."""
        index = torch.as_tensor(index, device="cpu").reshape(-1)
        self._written.append(index)
        self._newest = int(index[-1])

    def add(self, index: int) -> None:
        """A step was stored at this place."""
        self.extend(torch.as_tensor(index))

    def _follow(self, storage: Any) -> None:
        """Link what was stored since the last time, or all that is stored."""
        if not isinstance(storage, TensorStorage) or storage.ndim != 1:
            raise TypeError(
                "SequenceSampler needs a TensorStorage with one dimension, such as "
                f"LazyTensorStorage(max_size), got {type(storage).__name__} with "
                f"{getattr(storage, 'ndim', 'unknown')}."
            )
        if self._is_linked and not self._written:
            return
        stored = storage.get(slice(None))
        written = sum(len(index) for index in self._written)
        if not self._is_linked or written > storage.max_size:
            self._link(stored, self._all_in_order(storage), storage.max_size)
        else:
            self._link(stored, torch.cat(self._written))
        self._written.clear()

    def _all_in_order(self, storage: Any) -> Tensor:
        """All places, from the oldest to the newest step."""
        newest = storage._last_cursor_index if self._newest is None else self._newest
        places = torch.arange(len(storage))
        is_full = len(storage) == storage.max_size and newest is not None
        return places.roll(-(newest + 1)) if is_full else places

    def _link(self, stored: TensorDictBase, index: Tensor, size: int | None = None) -> None:
        """Make the links of new steps, stored at ``index`` in this order; of ``size`` if of all."""
        number = self._entry(stored, self.trajectory_key, index)
        if size is not None:
            self._successor = torch.arange(size)
            self._is_first = torch.ones(size, dtype=torch.bool)
            self._open = index.new_empty(2, 0)
            self._is_linked = True
        # What was there before is gone, and what came after it is the first of its piece now. Its
        # predecessors are older and gone as well: nothing is left that leads here.
        self._is_first[self._successor[index]] = True
        self._is_first[index] = True
        self._successor[index] = index
        # Trajectory by trajectory.
        order = number.argsort(stable=True)
        number, place = number[order], index[order]
        changes = number[1:] != number[:-1]
        self._connect(place[:-1][~changes], place[1:][~changes])
        edge = changes.new_ones(1)
        first, last = torch.cat([edge, changes]), torch.cat([changes, edge])
        # Trajectories that had begun before, unless their last step is overwritten.
        numbers, tails = self._open[:, ~torch.isin(self._open[1], index)]
        if len(numbers):
            found = torch.searchsorted(numbers, number[first]).clamp_max(len(numbers) - 1)
            goes_on = numbers[found] == number[first]
            self._connect(tails[found[goes_on]], place[first][goes_on])
        ended = self._entry(stored, self.done_key, place[last]).bool()
        elsewhere = ~torch.isin(numbers, number[first])
        numbers = torch.cat([numbers[elsewhere], number[last][~ended]])
        tails = torch.cat([tails[elsewhere], place[last][~ended]])
        numbers, order = numbers.sort()
        self._open = torch.stack([numbers, tails[order]])

    def _connect(self, before: Tensor, after: Tensor) -> None:
        self._successor[before] = after
        self._is_first[after] = False

    def _entry(self, stored: TensorDictBase, key: NestedKey, index: Tensor) -> Tensor:
        entry = stored.get(key, None)
        if entry is None:
            present = sorted(str(key) for key in stored.keys(True, True))
            raise ValueError(
                f"SequenceSampler needs the entry {key!r}, which the stored data does not have. It "
                f"has {present}."
            )
        return entry[index.to(entry.device)].reshape(len(index)).cpu()

    # State: all but the place of the newest step follows from what is stored ---------------------

    def _empty(self) -> None:
        self._is_linked = False
        self._written = []  # places of steps that are not linked yet
        self._newest = None
        # Place of the next step of the trajectory; its own place for the last one.
        self._successor = torch.empty(0, dtype=torch.int64)
        # Whether the step before it is not stored.
        self._is_first = torch.empty(0, dtype=torch.bool)
        # Numbers of trajectories that may go on, sorted, and the places of their last steps.
        self._open = torch.empty(2, 0, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """The place of the newest step."""
        return {"newest": self._newest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, beside the storage that it was saved with."""
        self._empty()
        self._newest = state_dict["newest"]

    def dumps(self, path: Any) -> None:
        """Write the state into a folder."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / "sequence_sampler.json").write_text(json.dumps(self.state_dict()))

    def loads(self, path: Any) -> None:
        """Read the state that :meth:`dumps` wrote."""
        self.load_state_dict(json.loads((Path(path) / "sequence_sampler.json").read_text()))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(sequence_length={self.sequence_length}, "
            f"sequence_steps={self.sequence_steps!r})"
        )
