"""What the losses of this package share beyond TorchRL's ``LossModule``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import dispatch_value_estimator
from typing_extensions import Self

from minerva_torchrl.objectives.checks import check_choice
from minerva_torchrl.objectives._memory import keep_freed_memory
from minerva_torchrl.objectives.duals import DualVariable
from minerva_torchrl.objectives.functional import masked_mean

_REDUCTIONS = ("mean", "sum", "none")
_ESTIMATOR_PREFIX = "_value_estimator."


class DualLossModule(LossModule):
    """A loss with positive dual variables, masked reductions and checked inputs.

    Subclasses register their :class:`~minerva_torchrl.objectives.duals.DualVariable` modules as
    attributes, list their inputs in :meth:`_set_in_keys` and name their outputs in
    ``_loss_keys`` and ``_metric_keys``.
    """

    _loss_keys: tuple[str, ...]
    _metric_keys: tuple[str, ...]
    SUPPORTED_VALUE_ESTIMATORS: tuple[Any, ...]

    def __init__(
        self,
        *,
        reduction: Literal["none", "mean", "sum"] | None,
        use_prioritized_weights: Literal["auto"] | bool,
        scalar_output_mode: Literal["exclude", "non_tensor"] | None,
    ) -> None:
        self._in_keys: list[NestedKey] | None = None
        self._out_keys: list[str] | None = None
        keep_freed_memory()
        super().__init__()
        self.reduction = "mean" if reduction is None else reduction
        check_choice("reduction", self.reduction, _REDUCTIONS)
        check_choice("use_prioritized_weights", use_prioritized_weights, (True, False, "auto"))
        check_choice("scalar_output_mode", scalar_output_mode, (None, "exclude", "non_tensor"))
        self.use_prioritized_weights = use_prioritized_weights
        self.scalar_output_mode = scalar_output_mode
        self.register_load_state_dict_pre_hook(_keep_estimator_entries_apart)

    # Dual variables ------------------------------------------------------------------------------

    def dual_variables(self) -> Iterator[DualVariable]:
        """The temperatures and multipliers of this loss."""
        for module in self.children():
            if isinstance(module, DualVariable):
                yield module

    def dual_values(self) -> dict[str, Tensor]:
        """Present values of the dual variables, means over dimensions, 0-d and detached."""
        return {
            name: module().detach().mean()
            for name, module in self.named_children()
            if isinstance(module, DualVariable)
        }

    def dual_parameters(self) -> list[nn.Parameter]:
        """The learnable parameters of the dual variables, for an optimiser."""
        return [dual.raw for dual in self.dual_variables() if dual.raw.requires_grad]

    def project_duals_(self) -> None:
        """Put every dual variable back above its floor. Call it after each optimiser step."""
        for dual in self.dual_variables():
            dual.project_()

    def project_duals_after(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Have an optimiser call :meth:`project_duals_` after each of its steps.

        Args:
            optimizer (torch.optim.Optimizer): the optimiser of the dual variables.

        Returns:
            A handle whose ``remove()`` undoes it.
        """
        return optimizer.register_step_post_hook(lambda *_: self.project_duals_())

    def reset_parameters_recursive(self) -> None:
        """Reset the networks, their targets and the dual variables."""
        super().reset_parameters_recursive()
        for dual in self.dual_variables():
            dual.reset_parameters()

    # Keys ----------------------------------------------------------------------------------------

    def _set_in_keys(self) -> None:
        raise NotImplementedError

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries that the loss reads."""
        if self._in_keys is None:
            self._set_in_keys()
        assert self._in_keys is not None
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[str]:
        """Entries that the loss returns: its losses, then its metrics."""
        if self._out_keys is None:
            metrics = self._metric_keys if self._returns_metrics else ()
            self._out_keys = [*self._loss_keys, *metrics]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[str]) -> None:
        self._out_keys = values

    @property
    def _returns_metrics(self) -> bool:
        return self.reduction != "none" or self.scalar_output_mode == "non_tensor"

    def _make_value_estimator(
        self, value_type: Any, value_network: TensorDictModule | None, /, **hyperparams: Any
    ) -> Self:
        """Build a supported estimator around ``value_network`` and tell it the loss's keys."""
        value_type, hyperparams = self._prepare_value_estimator_kwargs(value_type, **hyperparams)
        if value_type is not None:  # otherwise an estimator or its class was given
            hyperparams.setdefault("device", self._default_device)
            dispatch_value_estimator(
                self,
                value_type,
                supported=self.SUPPORTED_VALUE_ESTIMATORS,
                value_network=value_network,
                **hyperparams,
            )
        self._forward_value_estimator_keys()
        return self

    def _check_keys(self, tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> None:
        missing = [key for key in keys if tensordict.get(key, None) is None]
        if missing:
            present = sorted(str(key) for key in tensordict.keys(True, True))
            raise ValueError(
                f"{type(self).__name__} needs the entries {missing}, which the data does not have. "
                f"It has {present}. Other names can be given with set_keys(...)."
            )

    # Reduction -----------------------------------------------------------------------------------

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
        if self.use_prioritized_weights is False:
            return None
        key = self.tensor_keys.priority_weight
        if self.use_prioritized_weights is True:
            self._check_keys(tensordict, [key])
        weights = tensordict.get(key, None)
        return None if weights is None else weights.reshape(tensordict.shape)

    def _reduce(self, loss: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        """Reduce a loss ``[*B]`` as ``reduction`` says, with static shapes."""
        if self.reduction == "mean":
            return masked_mean(loss, mask, weights)
        if weights is not None:
            loss = loss * weights
        if mask is not None:
            loss = torch.where(mask, loss, 0.0)
        return loss.sum() if self.reduction == "sum" else loss

    def _output(
        self, losses: dict[str, Tensor], metrics: dict[str, Tensor], batch_size: torch.Size
    ) -> TensorDict:
        """The TensorDict that ``forward`` returns."""
        if self.reduction != "none":
            return TensorDict({**losses, **metrics}, batch_size=[])
        output = TensorDict(losses, batch_size=batch_size)
        if self.scalar_output_mode == "non_tensor":
            for name, value in metrics.items():
                output.set_non_tensor(name, value)
        return output


def masked_means(values: dict[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """Means of several ``[*B]`` where ``mask`` ``[*B]`` holds, 0-d, in one go."""
    stacked = torch.stack(list(values.values()))
    if mask is None:
        means = stacked.flatten(1).mean(1)
    else:
        means = torch.where(mask, stacked, 0.0).flatten(1).sum(1) / mask.sum().clamp_min(1)
    return dict(zip(values, means.unbind(), strict=True))


def masked_extreme(x: Tensor, mask: Tensor | None, which: Literal["min", "max"]) -> Tensor:
    """Smallest or largest entry of ``x`` ``[N, *B]`` where ``mask`` ``[*B]`` holds."""
    if mask is not None:
        x = torch.where(mask, x, torch.inf if which == "min" else -torch.inf)
    return x.amin() if which == "min" else x.amax()


def _keep_estimator_entries_apart(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let a state be loaded whatever value estimator it was saved with.

    The estimator's entries are hyperparameters (``gamma``, ``lmbda``). Those that the present
    estimator has too are loaded, the others are left as they are.
    """
    start = prefix + _ESTIMATOR_PREFIX
    present = {k: v for k, v in module.state_dict(prefix=prefix).items() if k.startswith(start)}
    for key in [key for key in state_dict if key.startswith(start) and key not in present]:
        del state_dict[key]
    for key, value in present.items():
        state_dict.setdefault(key, value)
