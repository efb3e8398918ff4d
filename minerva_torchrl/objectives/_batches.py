"""How the losses of samples become those of a batch: masks, weights, several processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch import distributed as dist
from torchrl.objectives.common import LossModule

from minerva_torchrl.objectives.checks import check_choice

_REDUCTIONS = ("mean", "sum", "none")


class BatchLoss(LossModule):
    """A loss whose batch may be masked, weighted, and spread over several processes."""

    tensor_keys: Any

    process_group: dist.ProcessGroup | None = None
    """Processes that hold parts of one batch: means, counts and solved duals are those of all.

    An optimisation stepper sets it where the loss is wrapped for distributed training.
    """

    def __init__(
        self,
        *,
        reduction: Literal["none", "mean", "sum"] | None,
        use_prioritized_weights: Literal["auto"] | bool,
        scalar_output_mode: Literal["exclude", "non_tensor"] | None,
    ) -> None:
        super().__init__()
        self.reduction = "mean" if reduction is None else reduction
        check_choice("reduction", self.reduction, _REDUCTIONS)
        check_choice("use_prioritized_weights", use_prioritized_weights, (True, False, "auto"))
        check_choice("scalar_output_mode", scalar_output_mode, (None, "exclude", "non_tensor"))
        if self.reduction == "none" and scalar_output_mode is None:
            warnings.warn(
                f"{type(self).__name__} with reduction='none' leaves out its 0-d metrics. Pass "
                "scalar_output_mode='exclude' to say so, or 'non_tensor' to get them as non-tensor "
                "data.",
                category=UserWarning,
                stacklevel=5,
            )
            scalar_output_mode = "exclude"
        self.use_prioritized_weights = use_prioritized_weights
        self.scalar_output_mode = scalar_output_mode

    def _check_keys(self, tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> None:
        if 0 in tensordict.shape:
            raise ValueError(
                f"{type(self).__name__} needs data of at least one step, got an empty batch of "
                f"shape {tuple(tensordict.shape)}."
            )
        missing = [key for key in keys if tensordict.get(key, None) is None]
        if missing:
            present = sorted(str(key) for key in tensordict.keys(True, True))
            raise ValueError(
                f"{type(self).__name__} needs the entries {missing}, which the data does not have. "
                f"It has {present}. Other names can be given with set_keys(...)."
            )

    def _valid_mask(self, tensordict: TensorDictBase) -> Tensor | None:
        """Where the data is valid, ``[*B]``, by the masks that ``loss_mask_key`` names."""
        valid: Tensor | None = None
        for key in self._loss_mask_keys():
            mask = tensordict.get(key, None)
            if mask is not None:
                mask = mask.bool().reshape(tensordict.shape)
                valid = mask if valid is None else valid & mask
        return valid

    def _priority_weight(self, tensordict: TensorDictBase) -> Tensor | None:
        """Importance weights of prioritised replay, ``[*B]``."""
        key = self.tensor_keys.priority_weight
        if self.use_prioritized_weights is True:
            self._check_keys(tensordict, [key])
        # TorchRL's _maybe_get_priority_weight finds no nested entry.
        weights = tensordict.get(key, None) if self.use_prioritized_weights else None
        return None if weights is None else weights.reshape(tensordict.shape)

    def _reduce(self, loss: Tensor, mask: Tensor | None, weights: Tensor | None = None) -> Tensor:
        """Reduce a loss ``[*B]`` as ``reduction`` says, over the batches of all processes."""
        if mask is not None and (weights is not None or self.reduction == "none"):
            loss = torch.where(mask, loss, 0.0)
            weights = None if weights is None else torch.where(mask, weights, 0.0)
            mask = None
        if self.reduction == "none":
            return loss if weights is None else loss * weights
        if weights is None:
            reduced = self._reduce_loss(loss, mask=mask)
            count: Tensor | int = loss.numel() if mask is None else mask.sum()
        else:
            weights, count = weights.to(loss.dtype), weights.sum()
            # Where no weight is left, neither is any loss; the mean of nothing is zero.
            loss = torch.where(count > 0, loss, 0.0)
            weights = torch.where(count > 0, weights, 1.0)
            reduced = self._reduce_loss(loss, weights=weights)
        return reduced if self.process_group is None else reduced * self._share(loss, count)

    def _share(self, loss: Tensor, count: Tensor | int) -> Tensor | int:
        """What turns this process's reduction into its share of that over all processes.

        Distributed training averages gradients over the processes, whatever they have in them.
        """
        size = dist.get_world_size(self.process_group)
        if self.reduction == "sum":
            return size
        count = torch.as_tensor(count, dtype=loss.dtype, device=loss.device)
        total = self._total(count)
        return count * size / torch.where(total > 0, total, 1.0)

    def _total(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.process_group is None:
            return x
        x = x.clone()
        dist.all_reduce(x, group=self.process_group)
        return x

    def _gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """What all processes have, along a dimension; all have the same shape."""
        if self.process_group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim)

    def _output(
        self,
        losses: dict[str, Tensor],
        metrics: dict[str, Tensor],
        tensordict: TensorDictBase,
        batch_size: torch.Size,
    ) -> TensorDict:
        """What ``forward`` returns for a batch, with unreduced losses of the given shape."""
        if self.reduction != "none":
            output = TensorDict({**losses, **metrics}, batch_size=[])
        else:
            output = TensorDict(losses, batch_size=batch_size)
            if self.scalar_output_mode == "non_tensor":
                for name, value in metrics.items():
                    output.set_non_tensor(name, value)
        networks = [name for name in self._modules if name.endswith("_network_params")]
        self._clear_weakrefs(tensordict, output, *networks)
        return output
