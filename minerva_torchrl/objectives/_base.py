"""What the losses of this package share beyond TorchRL's ``LossModule``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictParams,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch import distributions as D
from torch.utils.hooks import RemovableHandle
from torchrl.objectives.utils import ValueEstimators, dispatch_value_estimator

from minerva_torchrl.objectives._batches import BatchLoss
from minerva_torchrl.objectives.checks import check_choice, check_positive
from minerva_torchrl.objectives.duals import (
    Constraint,
    CostMultiplier,
    DualVariable,
    Temperature,
)
from minerva_torchrl.objectives.goals import MAIN_OBJECTIVE
from minerva_torchrl.objectives.precision import full_precision, in_full_precision
from minerva_torchrl.objectives.specs import keys_without
from minerva_torchrl.objectives.swapping import using

if TYPE_CHECKING:
    from typing_extensions import Self

_ESTIMATOR_PREFIX = "_value_estimator."


class DualLossModule(BatchLoss):
    """A loss with temperatures and constraints.

    Subclasses fill ``temperatures`` (by objective) and ``constraints`` (by divergence) through
    :meth:`_add_temperature` and :meth:`_add_constraints`, list their inputs in
    :meth:`_set_in_keys` and name their outputs in ``_loss_keys`` and ``_metric_keys``.
    """

    duals: nn.ModuleDict
    """All dual variables, by the names of their values among the metrics."""
    SUPPORTED_VALUE_ESTIMATORS: tuple[Any, ...]

    actor_network: ProbabilisticTensorDictSequential
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams

    _network_dtype: torch.dtype | None = None
    """Precision of the networks under autocast, while a method is in full precision."""

    def __init__(
        self,
        *,
        reduction: Literal["none", "mean", "sum"] | None,
        use_prioritized_weights: Literal["auto"] | bool,
        scalar_output_mode: Literal["exclude", "non_tensor"] | None,
    ) -> None:
        self._in_keys: list[NestedKey] | None = None
        self._out_keys: list[str] | None = None
        super().__init__(
            reduction=reduction,
            use_prioritized_weights=use_prioritized_weights,
            scalar_output_mode=scalar_output_mode,
        )
        self.temperatures: dict[str, Temperature] = {}
        self.constraints: dict[str, Constraint] = {}
        self.cost_multipliers: dict[str, CostMultiplier] = {}
        self._bounds: dict[
            str, Temperature | Constraint | CostMultiplier
        ] = {}  # by the name of the bound
        self.register_load_state_dict_pre_hook(_upgrade_before_loading)

    # Dual variables ------------------------------------------------------------------------------

    def _add_temperature(self, name: str, init: float, epsilon: float, *, solved: bool) -> None:
        """Give an objective its temperature."""
        main = name == MAIN_OBJECTIVE
        alias = "temperature" if main else f"{name}_temperature"
        bound = "epsilon" if main else f"epsilon_{name}"
        check_positive(f"init_{alias}", init)
        check_positive(bound, epsilon)
        temperature = Temperature(init, epsilon, solved=solved)
        self.temperatures[name] = temperature
        self._register_dual(alias, bound, temperature)

    def _add_constraints(
        self,
        kinds: Mapping[str, tuple[str, tuple[int, ...]]],
        given: Mapping[str, tuple[float | None, float | None]],
        defaults: Mapping[str, tuple[float, float]],
        alpha_update: str,
    ) -> None:
        """Give every constraint of the policy its bound and its multiplier.

        ``kinds`` has what is constrained and the shape by constraint, as the policy's family says.
        ``given`` and ``defaults`` have the bound and the initial multiplier by what is constrained.
        """
        check_choice("alpha_update", alpha_update, ("gradient", "relative"))
        self.alpha_update, relative = alpha_update, alpha_update == "relative"
        constrained = {kind for kind, _ in kinds.values()}
        for name, values in given.items():
            for argument, value in zip(
                (f"epsilon_{name}", f"init_alpha_{name}"), values, strict=True
            ):
                if name not in constrained and value is not None:
                    raise ValueError(
                        f"{argument} does not apply to a policy whose constraints are "
                        f"{', '.join(kinds)}; got {value}."
                    )
        for name, (kind, shape) in kinds.items():
            epsilon, init = (
                default if value is None else value
                for value, default in zip(given[kind], defaults[kind], strict=True)
            )
            check_positive(f"epsilon_{kind}", epsilon)
            check_positive(f"init_alpha_{kind}", init)
            self.constraints[name] = Constraint(init, epsilon, shape, relative=relative)
            self._register_dual(f"alpha_{name}", f"epsilon_{name}", self.constraints[name])

    def _add_cost_multiplier(self, name: str, init: float, threshold: float) -> None:
        """Give a cost its multiplier."""
        self.cost_multipliers[name] = CostMultiplier(init, threshold)
        self._register_dual(f"{name}_multiplier", f"threshold_{name}", self.cost_multipliers[name])

    def _register_dual(
        self, name: str, bound: str, dual: Temperature | Constraint | CostMultiplier
    ) -> None:
        if "duals" not in self._modules:  # only now: the networks' parameters come first
            self.duals = nn.ModuleDict()
        self.duals[name] = self._bounds[bound] = dual.to(self._default_device)

    def __getattr__(self, name: str) -> Any:
        """Duals and bounds by name: ``loss.alpha_mean``, ``loss.epsilon_mean``."""
        duals, bounds = self.__dict__["_modules"].get("duals", ()), self.__dict__.get("_bounds", ())
        if name in duals:
            return duals[name]
        return bounds[name].epsilon if name in bounds else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Bounds can be scheduled: ``loss.epsilon_mean = 1e-3``."""
        dual = self.__dict__.get("_bounds", {}).get(name)
        if dual is None:
            super().__setattr__(name, value)
        else:
            if not isinstance(dual, CostMultiplier):  # whose threshold may have any sign
                check_positive(name, value)
            dual.epsilon.fill_(value)

    def dual_variables(self) -> Iterator[DualVariable]:
        """The temperatures and multipliers of this loss."""
        for dual in self.duals.values():
            assert isinstance(dual, DualVariable)
            yield dual

    def dual_values(self) -> dict[str, Tensor]:
        """Present values of the dual variables, means over dimensions, 0-d and detached."""
        return {name: dual().detach().mean() for name, dual in self.duals.items()}

    def dual_parameters(self) -> list[nn.Parameter]:
        """The learnable parameters of the dual variables, for an optimiser."""
        return [dual.raw for dual in self.dual_variables() if dual.raw.requires_grad]

    def temperature_parameters(self) -> list[nn.Parameter]:
        """Those of the temperatures only; none if they are solved for."""
        duals = self.temperatures.values()
        return [dual.raw for dual in duals if dual.raw.requires_grad]

    def alpha_parameters(self) -> list[nn.Parameter]:
        """Those of the multipliers only."""
        return [dual.raw for dual in (*self.constraints.values(), *self.cost_multipliers.values())]

    def solved_parameters(self) -> list[nn.Parameter]:
        """Dual variables that are set by the E-step, not by an optimiser."""
        return [dual.raw for dual in self.temperatures.values() if not dual.raw.requires_grad]

    def project_duals_(self) -> None:
        """Put every dual variable back into its range. Call it after each optimiser step."""
        duals = list(self.dual_variables())
        with torch.no_grad():
            torch._foreach_clamp_min_([dual.raw for dual in duals], [d.raw_floor for d in duals])
        for constraint in self.constraints.values():
            constraint.cap_()

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

    @property
    def _loss_keys(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def _metric_keys(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def _dual_loss_keys(self) -> tuple[str, ...]:
        return tuple(f"loss_{name}" for name in self.duals)

    def _set_in_keys(self) -> None:
        raise NotImplementedError

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        """Note what the names mean for the networks, each time that one is set."""
        # The in_keys of an actor may also have an entry that it writes in parts and then reads as a
        # whole, such as the parameters of a CompositeDistribution.
        network = self.actor_network
        self._actor_in_keys = keys_without(network.in_keys, network.out_keys)
        self._in_keys = None

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
            has_metrics = self.reduction != "none" or self.scalar_output_mode == "non_tensor"
            self._out_keys = [*self._loss_keys, *(self._metric_keys if has_metrics else ())]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[str]) -> None:
        self._out_keys = values

    def _make_value_estimator(
        self, value_type: Any, value_network: TensorDictModule | None, /, **hyperparams: Any
    ) -> Self:
        """Build a supported estimator around ``value_network`` and tell it the loss's keys."""
        if isinstance(value_type, str):
            value_type = self._estimator_name(value_type)
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

    def _estimator_name(self, name: str) -> str:
        names = [getattr(kind, "name", kind).lower() for kind in self.SUPPORTED_VALUE_ESTIMATORS]
        plain = name.lower().replace("_", "")
        # TorchRL says of those that are not supported here which ones are.
        if plain in names or plain in {kind.name.lower() for kind in ValueEstimators}:
            return plain
        close = get_close_matches(plain, names, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{type(self).__name__} has no value estimator {name!r}.{hint} Allowed: "
            f"{', '.join(map(repr, names))}, an estimator class or an estimator."
        )

    # The whole update in one call ----------------------------------------------------------------

    @in_full_precision
    def training_loss(self, tensordict: TensorDictBase) -> TensorDict:
        """The losses of :meth:`forward` without the metrics, for steps that nobody looks at."""
        return self._forward(tensordict, with_metrics=False)

    def _forward(self, tensordict: TensorDictBase, *, with_metrics: bool) -> TensorDict:
        """All losses of a batch, and the metrics if they are wanted."""
        raise NotImplementedError

    # The update in parts -------------------------------------------------------------------------

    def e_step(
        self, tensordict: TensorDictBase, *, with_metrics: bool = True
    ) -> tuple[TensorDictBase, dict[str, Tensor]]:
        """The batch with what the E-step found as its entry ``e_step``, and 0-d metrics."""
        raise NotImplementedError

    def _with_e_step(
        self, tensordict: TensorDictBase, with_metrics: bool = True
    ) -> tuple[TensorDictBase, dict[str, Tensor]]:
        """A batch that has its E-step as it is, any other with one."""
        if tensordict.get("e_step", None) is not None:
            return tensordict, {}
        return self.e_step(tensordict, with_metrics=with_metrics)

    @in_full_precision
    def m_step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Evaluate the policy once for both :meth:`dual_loss` and :meth:`networks_loss`.

        Without it each of them evaluates the policy itself.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`, or what :meth:`e_step` returned.

        Returns:
            The data with the entry ``m_step``, which holds until the policy's parameters change.
        """
        data, _ = self._with_e_step(tensordict, with_metrics=False)
        _, fit, divergences = self._m_step(data)
        found = TensorDict({"fit": fit, "divergences": divergences}, batch_size=fit.shape)
        return data.copy().set("m_step", found)

    @in_full_precision
    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the policy with the present multipliers, and its metrics.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`, or what :meth:`e_step` returned.
        """
        data, metrics = self._with_e_step(tensordict)
        dist, fit, divergences = self._m_step(data)
        of_constraints = self._constraint_losses(divergences, data.get("e_step").mask)
        metrics |= self._actor_metrics(data.get("e_step"), dist, fit, divergences, of_constraints)
        return self._actor_loss(data, fit, of_constraints), metrics

    @in_full_precision
    def dual_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the losses of temperatures and multipliers, and each of them by name.

        Args:
            tensordict (TensorDictBase): as in :meth:`forward`, or what :meth:`e_step` returned.
        """
        data, _ = self._with_e_step(tensordict, with_metrics=False)
        with torch.no_grad():  # no gradient of the duals goes to the policy
            _, divergences = self._fit_and_divergences(data)
        of_constraints = self._constraint_losses(divergences, data.get("e_step").mask)
        losses = self._dual_losses(data, of_constraints)
        return torch.stack(list(losses.values())).sum(0), losses

    def _m_step(self, data: TensorDictBase) -> tuple[D.Distribution, Tensor, dict[str, Tensor]]:
        """The online policy, how badly it fits the E-step ``[*S]``, and its divergences."""
        raise NotImplementedError

    def _actor_loss(
        self, data: TensorDictBase, fit: Tensor, of_constraints: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Loss of the policy, from its fit and the penalties of the constraints, ``[*S]`` each."""
        raise NotImplementedError

    def _dual_losses(
        self, data: TensorDictBase, of_constraints: dict[str, tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """By name, the losses of temperatures and multipliers."""
        raise NotImplementedError

    def _actor_metrics(
        self,
        e_step: Any,
        dist: D.Distribution,
        fit: Tensor,
        divergences: dict[str, Tensor],
        of_constraints: dict[str, tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        """Metrics of the policy and of its constraints."""
        raise NotImplementedError

    def _fit_and_divergences(self, data: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """What :meth:`m_step` put into the data, evaluated now if it has nothing."""
        found = data.get("m_step", None)
        if found is None:
            return self._m_step(data)[1:]
        return found.get("fit"), dict(found.get("divergences").items())

    def _constraint_losses(
        self, divergences: dict[str, Tensor], mask: Tensor | None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """By constraint, the penalty on the policy and the loss of the multiplier, ``[*B]``."""
        return {
            name: dual.losses(divergences[name], self._mean_kl(divergences[name], mask))
            for name, dual in self.constraints.items()
        }

    def _dist(self, states: TensorDictBase, params: TensorDictParams) -> D.Distribution:
        """The policy with some parameters at some states."""
        inputs, network = states.select(*self._actor_in_keys), self.actor_network
        with using(network, params):
            if self._network_dtype is None:
                return _distribution(network, inputs)
            with self._precision_of_networks():
                parameters: Any = network.get_dist_params(inputs)
            return network.build_dist_from_params(parameters.apply(full_precision))

    def _precision_of_networks(self) -> AbstractContextManager[Any]:
        """Autocast as it was before the equations switched it off."""
        if self._network_dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, self._network_dtype)

    @property
    def _device_type(self) -> str:
        return next(self.parameters()).device.type

    def _mean_kl(self, kl: Tensor, mask: Tensor | None) -> Tensor | None:
        """Mean divergence per dimension over the states of all processes, if multipliers use it."""
        if self.alpha_update != "relative":
            return None
        kl = kl.detach().flatten(0, -2)
        mask = torch.ones_like(kl[:, :1]) if mask is None else mask.reshape(-1, 1)
        sums = torch.cat([torch.where(mask.bool(), kl, 0.0).sum(0), mask.to(kl.dtype).sum(0)])
        sums = self._total(sums)
        return sums[:-1] / sums[-1].clamp_min(1)

    # States of other versions --------------------------------------------------------------------

    def upgrade_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a loss of version 0.1 under the present names; others as they are.

        Args:
            state_dict (mapping): what ``state_dict()`` of such a loss returned.
        """
        renamed = {f"{name}.raw": f"duals.{name}.raw" for name in self.duals}
        for name, dual in self.duals.items():
            bounds = (bound for bound, of_dual in self._bounds.items() if of_dual is dual)
            renamed |= dict.fromkeys(bounds, f"duals.{name}.epsilon")
        return {renamed.get(key, key): value for key, value in state_dict.items()}


def _distribution(
    network: ProbabilisticTensorDictSequential, inputs: TensorDictBase
) -> D.Distribution:
    """``network.get_dist(inputs)``, with less around it for a network and its distribution."""
    first, *rest = network.module
    if len(rest) != 1 or not isinstance(rest[0], ProbabilisticTensorDictModule):
        return network.get_dist(inputs)
    with set_interaction_type(interaction_type() or rest[0].default_interaction_type):
        return rest[0].get_dist(first(inputs))


def _upgrade_before_loading(
    module: DualLossModule, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let a state be loaded whatever version and value estimator it was saved with.

    The estimator's entries are hyperparameters (``gamma``, ``lmbda``). Those that the present
    estimator has too are loaded, the others are left as they are.
    """
    own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
    for key in own:
        del state_dict[prefix + key]
    own = module.upgrade_state_dict(own)
    saved = {key for key in own if key.startswith(_ESTIMATOR_PREFIX)}
    if saved:
        _ = module.value_estimator  # made now, if it was not needed before
    present = {k: v for k, v in module.state_dict().items() if k.startswith(_ESTIMATOR_PREFIX)}
    own = {key: value for key, value in own.items() if key not in saved or key in present}
    own = {**present, **own}
    state_dict.update({prefix + key: value for key, value in own.items()})
