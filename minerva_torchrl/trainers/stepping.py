"""What the optimisation steppers share: one backward pass, and steps that must be finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torchrl.objectives.common import LossModule
from torchrl.trainers.trainers import OptimizationStepper

from minerva_torchrl.objectives.checks import check_choice
from minerva_torchrl.trainers.compiled import CompiledGradients, clip_gradients, sum_of_losses

__all__ = [
    "GuardedStepper",
    "LRScaling",
    "Learner",
    "LocalLearner",
    "NonFiniteError",
    "Undo",
    "scale_of_lr",
]

LRScaling = Literal["1/sqrt(M)", "1/M"]
"""How learning rates depend on the number M of policy steps."""

_FLAGS_KEPT = 256  # before they become one tensor


class NonFiniteError(RuntimeError):
    """Too many batches in a row had a loss, a gradient or data that is not finite."""


class Learner(Protocol):
    """Where a loss is evaluated: a TorchRL ``Trainer``, or a learner of a distributed backend."""

    loss_module: LossModule

    def compute_loss(self, sub_batch: TensorDictBase, method: str | None = None) -> Any:
        """The loss of a batch, or one of its methods, with gradients of all processes."""


class LocalLearner:
    """A loss in a loop of one's own, without a trainer."""

    def __init__(self, loss_module: LossModule) -> None:
        self.loss_module = loss_module

    def compute_loss(self, sub_batch: TensorDictBase, method: str | None = None) -> Any:
        """The loss of a batch, or one of its methods."""
        call = self.loss_module if method is None else getattr(self.loss_module, method)
        return call(sub_batch)


class GuardedStepper(OptimizationStepper):
    """Steps several optimisers, each with its own clipping, on the losses of one backward pass.

    An update whose losses or gradients are not finite changes nothing: neither parameters nor
    optimisers. It is counted on the device, so that nothing waits for it: with a fused optimiser
    (``torch.optim.Adam(..., fused=True)``) the step is left out on the device as well, with any
    other one the decision is made on the host.

    Where several processes learn together, all of them take an update or none does.

    Args:
        optimizers (mapping): optimisers by the names under which their state is saved. Those that
            are ``None`` are left out.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer | None]) -> None:
        self._optimizers = {name: opt for name, opt in optimizers.items() if opt is not None}
        self._refuse_shared_parameters()
        self._rate_names = [
            [_rate_name(name, group, i) for i, group in enumerate(opt.param_groups)]
            for name, opt in self._optimizers.items()
        ]
        self.reports_param_delta = False
        """Whether an update returns ``param_delta``: how far, in the Euclidean norm, it moved the
        parameters of the policy. That takes a copy of them for each update."""
        self.latest = TensorDict()
        """What the latest step inside a trainer returned; the trainer may average into it later."""
        self._group: dist.ProcessGroup | None = None
        self.compiled: CompiledGradients | None = None
        """What evaluates losses and gradients as one compiled graph, if that is wanted."""
        self.metrics_interval = 1
        """Updates from one that returns losses and metrics to the next."""
        self.latest_taken = torch.ones((), dtype=torch.bool)
        """Whether the latest update was taken, 0-d."""
        self._updates = 0
        self._skips = (0, 0, 0)  # in all, in a row until now, most in a row
        self._uncounted: tuple[Tensor, ...] = ()  # flags of the latest updates, still on the device

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDict:
        """One update inside a TorchRL ``Trainer``."""
        self._join_processes(trainer)
        self.latest = self._measured_update(trainer, sub_batch)
        return self.latest

    def update(self, loss: LossModule, tensordict: TensorDictBase) -> TensorDict:
        """One update in a loop of one's own.

        Args:
            loss (LossModule): the loss whose parameters the optimisers hold.
            tensordict (TensorDictBase): the batch.

        Returns:
            The detached losses and metrics, 0-d.
        """
        return self._measured_update(LocalLearner(loss), tensordict)

    def _measured_update(self, learner: Learner, batch: TensorDictBase) -> TensorDict:
        if self.compiled is not None:
            self.compiled.begin_update()
        if not self.reports_param_delta:
            return self._update(learner, batch)
        actor: Any = learner.loss_module.actor_network_params
        parameters = [parameter.detach() for parameter in actor.parameters()]
        before = [parameter.clone() for parameter in parameters]
        metrics = self._update(learner, batch)
        if metrics.is_empty():
            return metrics
        change = torch._foreach_sub(parameters, before)
        return metrics.set("param_delta", nn.utils.get_total_norm(change))

    def _update(self, learner: Learner, batch: TensorDictBase) -> TensorDict:
        raise NotImplementedError

    @property
    def _one_graph(self) -> bool:
        """Whether one graph should serve updates with and without metrics."""
        return self.compiled is not None and self.compiled.one_graph

    # One backward pass ---------------------------------------------------------------------------

    def _evaluate(
        self,
        learner: Learner,
        batch: TensorDictBase,
        method: str | None,
        clips: Mapping[str, float | None],
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Losses of a batch, and their gradients where the optimisers look for them.

        Args:
            learner (Learner): evaluates the loss.
            batch (TensorDictBase): the batch.
            method (str, optional): method of the loss. By default the loss itself is called.
            clips (mapping): as in :meth:`_backward`.

        Returns:
            The losses with whatever metrics there are, detached, and whether losses and gradients
            are finite, in all processes, 0-d.
        """
        # The gradients of several processes are averaged by hooks of their backward pass.
        if self.compiled is None or self._group is not None:
            losses = learner.compute_loss(batch, method)
            finite = self._backward(losses, clips)
            return {name: x.detach() for name, x in losses.items()}, finite
        groups = [(_parameters(self._optimizers[name]), clip) for name, clip in clips.items()]
        result = self.compiled(learner.loss_module, batch, method, groups)
        parameters = (parameter for group, _ in groups for parameter in group)
        for parameter, gradient in zip(parameters, result.gradients, strict=True):
            parameter.grad = gradient
        return result.losses, result.finite

    def _backward(
        self,
        losses: Mapping[str, Tensor] | TensorDictBase | Tensor,
        clips: Mapping[str, float | None],
    ) -> Tensor:
        """Gradients of the sum of some losses, clipped for each optimiser by itself.

        Args:
            losses (TensorDictBase or Tensor): entries that begin with ``loss_`` count.
            clips (mapping): largest gradient norm, by the name of the optimiser whose parameters
                get it. The others keep the gradients that they have.

        Returns:
            Whether the losses and all gradients are finite, in all processes, 0-d.
        """
        if not isinstance(losses, Tensor):
            losses = sum_of_losses(losses)
        for name in clips:
            for parameter in _parameters(self._optimizers[name]):
                parameter.grad = None
        losses.backward()
        total = losses.detach()
        for name, clip in clips.items():
            parameters = _parameters(self._optimizers[name])
            total = total + clip_gradients([p.grad for p in parameters if p.grad is not None], clip)
        return self._in_all_processes(total.isfinite())

    def _lr_factor(self, name: str) -> float:
        """Factor on the learning rates of an optimiser, by which its steps are taken."""
        return 1.0

    def _step_if(self, taken: Tensor, name: str) -> None:
        """One step of an optimiser, if a 0-d flag is true.

        Args:
            taken (Tensor): the flag.
            name (str): the optimiser; its parameters have gradients.
        """
        optimizer: Any = self._optimizers[name]
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if not fused and not taken:
            return
        rates, factor = [group["lr"] for group in optimizer.param_groups], self._lr_factor(name)
        if factor != 1:
            # For this step only, so that schedulers and checkpoints see the nominal rates.
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        if not fused:
            optimizer.step()
        elif _is_plain_adam(optimizer):
            _step_adam(optimizer, taken)
        else:  # what gradient scalers use: the flag is read on the device
            optimizer.found_inf = (~taken).float()
            optimizer.step()
            del optimizer.found_inf
        if factor != 1:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    # Processes -----------------------------------------------------------------------------------

    def _join_processes(self, trainer: Any) -> None:
        """Share counts and decisions with the processes that a trainer's loss is spread over."""
        group = getattr(trainer, "process_group", None)
        self._group = getattr(group, "process_group", group)
        if hasattr(trainer.loss_module, "process_group"):
            trainer.loss_module.process_group = self._group

    def _in_all_processes(self, flag: Tensor) -> Tensor:
        if self._group is None:
            return flag
        smallest = flag.to(torch.int32)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._group)
        return smallest.bool()

    # Counts and state ----------------------------------------------------------------------------

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rates of a step now, by the ``name`` of a parameter group or its optimiser."""
        rates: dict[str, float] = {}
        for names, (of, optimizer) in zip(self._rate_names, self._optimizers.items(), strict=True):
            for name, group in zip(names, optimizer.param_groups, strict=True):
                rates[name] = float(group["lr"]) * self._lr_factor(of)
        return rates

    @property
    def skipped_updates(self) -> int:
        """Updates left out so far because something was not finite. Waits for the device."""
        return self._tally()[0]

    def note_skipped(self, count: int) -> None:
        """Count updates as well that were left out in another process.

        Args:
            count (int): how many.
        """
        total, in_a_row, longest = self._tally()
        self._skips = (total + count, in_a_row, longest)

    def check_finite(self, limit: int) -> None:
        """Raise :class:`NonFiniteError` if ``limit`` updates in a row were left out.

        Reads the flags of the updates, which waits for the device: once per collected batch is
        enough.

        Args:
            limit (int): number of updates in a row.
        """
        total, _, longest = self._tally()
        if longest >= limit:
            raise NonFiniteError(
                f"{longest} updates in a row had losses or gradients that are not finite "
                f"({total} in all; the limit is {limit})."
            )

    def state_dict(self) -> dict[str, Any]:
        """State of the optimisers, and the counters of updates left out."""
        state: dict[str, Any] = {n: opt.state_dict() for n, opt in self._optimizers.items()}
        state["skips"], state["updates"] = self._tally(), self._updates
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state_dict[name])
        total, in_a_row, longest = map(int, state_dict.get("skips") or (0, 0, 0))
        self._skips, self._uncounted = (total, in_a_row, longest), ()
        self._updates = int(state_dict.get("updates", 0))

    def _count(self, taken: Tensor) -> None:
        """Count an update, as left out unless a 0-d flag is true."""
        self._updates += 1
        self.latest_taken = taken
        self._uncounted = (*self._uncounted, taken.reshape(1))
        if len(self._uncounted) >= _FLAGS_KEPT:
            self._uncounted = (torch.cat(self._uncounted),)

    def _tally(self) -> tuple[int, int, int]:
        total, in_a_row, longest = self._skips
        for taken in torch.cat(self._uncounted).tolist() if self._uncounted else ():
            in_a_row = 0 if taken else in_a_row + 1
            total += not taken
            longest = max(longest, in_a_row)
        self._skips, self._uncounted = (total, in_a_row, longest), ()
        return self._skips

    # Refusals ------------------------------------------------------------------------------------

    def _refuse_shared_parameters(self) -> None:
        owners: dict[int, str] = {}
        for name, optimizer in self._optimizers.items():
            for parameter in _parameters(optimizer):
                other = owners.setdefault(id(parameter), name)
                if other != name:
                    raise ValueError(
                        f"{other} and {name} hold the same parameter, of shape "
                        f"{tuple(parameter.shape)}, which both would step. Give each parameter to "
                        "one optimiser only; those that actor and critic share to the actor's, "
                        "with separate_losses=True in the loss, or to one optimiser for both."
                    )

    def _refuse_unreduced(self, loss: LossModule) -> None:
        if loss.reduction == "none":
            raise ValueError(
                f"{type(self).__name__} needs a loss with reduction 'mean' or 'sum', got 'none'."
            )


class Undo:
    """Takes back what happens to a few small tensors and optimisers.

    Args:
        tensors (iterable of Tensor): what to remember.
        *optimizers (Optimizer): whose parameters and state to remember, too.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), *optimizers: Optimizer) -> None:
        self._given, self._optimizers = list(tensors), optimizers
        self._before = {id(tensor): tensor.detach().clone() for tensor in self._tensors()}

    @torch.no_grad()
    def unless(self, kept: Tensor) -> None:
        """Take everything back unless a 0-d flag is true."""
        for tensor in self._tensors():
            # An optimiser's state begins with zeros at its first step.
            before = self._before.get(id(tensor), tensor.new_zeros(()))
            tensor.copy_(torch.where(kept, tensor, before))

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._given
        for optimizer in self._optimizers:
            for parameter in _parameters(optimizer):
                yield parameter
                state = optimizer.state.get(parameter, {})
                yield from (value for value in state.values() if isinstance(value, Tensor))


def _is_plain_adam(optimizer: Optimizer) -> bool:
    """Whether a step is nothing but one call of the fused kernel for each group."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return (
        type(optimizer) is torch.optim.Adam
        and not hooks
        and all(p.grad is None or p in optimizer.state for p in _parameters(optimizer))
        and not any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups)
        and not any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
        and len({(p.dtype, p.device) for p in _parameters(optimizer)}) == 1
    )


@torch.no_grad()
def _step_adam(optimizer: Optimizer, taken: Tensor) -> None:
    """``step()`` of a plain fused Adam, if a 0-d flag is true.

    What ``step()`` does around the kernel takes longer than the kernel for a small network.
    """
    counted = taken.float()
    left_out = 1 - counted
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            continue
        states = [optimizer.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, [counted] * len(steps))
        torch._fused_adam_(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=left_out,
        )


def scale_of_lr(scaling: LRScaling | None, num_policy_steps: int) -> float:
    r"""The factor on learning rates: 1, :math:`1 / \sqrt M` or :math:`1 / M`."""
    check_choice("lr_scaling", scaling, (None, *get_args(LRScaling)))
    exponents = {None: 0.0, "1/sqrt(M)": -0.5, "1/M": -1.0}
    return float(num_policy_steps ** exponents[scaling])


def _rate_name(optimizer: str, group: Mapping[str, Any], index: int) -> str:
    default = optimizer.replace("optimizer", "lr") + f"_{index}" * (index > 0)
    return f"lr_{group['name']}".rstrip("_") if "name" in group else default


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
