"""Updates as compiled graphs, and updates that never wait for the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minerva_torchrl.modules import DirectClipPPOLoss
from minerva_torchrl.trainers.compiled import CompiledGradients, clip_gradients, why_not
from minerva_torchrl.trainers.stepping import _is_plain_adam, _step_adam
from tests.objectives import vmpo_problem
from tests.objectives.base import assert_equal, compiles, make_transitions
from tests.trainers import test_mpo_stepper, test_ppo_stepper, test_vmpo_stepper
from tests.trainers.problem import assert_identical, spoil


def fused_adam(parameters: Any, lr: float = 1e-2) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=lr, fused=True)


def make_mpo(**kwargs: Any) -> tuple[Any, Any, TensorDict]:
    loss = test_mpo_stepper.make_loss(num_qvalue_nets=1)
    stepper = test_mpo_stepper.make_stepper(loss, fused_adam, clip_actor=0.1, **kwargs)
    return loss, stepper, make_transitions(8)


def make_vmpo() -> tuple[Any, Any, TensorDict]:
    loss = vmpo_problem.make_loss()
    stepper = test_vmpo_stepper.make_stepper(
        loss, fused_adam, num_policy_steps=4, minibatch_size=10
    )
    return loss, stepper, vmpo_problem.with_advantage(vmpo_problem.make_rollout())


def make_ppo() -> tuple[Any, Any, TensorDict]:
    loss = test_ppo_stepper.make_loss()
    return loss, test_ppo_stepper.make_stepper(loss), test_ppo_stepper.make_data(loss)


PROBLEMS = {"mpo": make_mpo, "vmpo": make_vmpo, "ppo": make_ppo}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("mpo", "aot_eager"),
        *(pytest.param(x, "aot_eager", marks=pytest.mark.slow) for x in ("vmpo", "ppo")),
        *((x, "recorded") for x in PROBLEMS),
    ],
)
@compiles
def test_compiled_updates_are_the_eager_ones(kind: str, backend: str) -> None:
    """Parameters, optimisers, metrics and what is left out, with the same random numbers."""
    results = []
    for compiled in (None, CompiledGradients(backend=backend)):
        loss, stepper, data = PROBLEMS[kind]()
        stepper.compiled = compiled
        outputs = []
        for i in range(4):
            torch.manual_seed(i)
            batch = data.clone()
            if i == 2 and kind == "mpo":
                batch = spoil(batch, ("next", "reward"), torch.nan)
            if i == 3:  # a schedule
                for optimizer in stepper._optimizers.values():
                    optimizer.param_groups[0]["lr"] *= 0.5
            outputs.append(stepper.update(loss, batch))
            if kind == "mpo":
                outputs[-1]["td_error"] = batch["td_error"]
        results.append((dict(loss.named_parameters()), outputs, stepper.skipped_updates))
    (eager, outputs, skipped), (actual, compiled_outputs, compiled_skipped) = results
    rtol, atol = (0.0, 0.0) if backend == "recorded" else (1e-6, 1e-8)
    assert_equal(actual, eager, rtol=rtol, atol=atol)
    assert skipped == compiled_skipped == (1 if kind == "mpo" else 0)
    for i, (output, expected) in enumerate(zip(compiled_outputs, outputs, strict=True)):
        if not (i == 2 and kind == "mpo"):
            expected, output = dict(expected.items()), dict(output.items())
            assert_equal(output, expected, rtol=10 * rtol, atol=100 * atol)


@compiles
def test_one_graph_for_each_shape_and_clip() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    lines: list[str] = []

    class Square(nn.Module):
        def forward(self, data: TensorDict) -> TensorDict:
            return TensorDict({"loss_a": (weight * data["x"]).sum(), "b": data["x"].sum()})

    evaluate, loss = CompiledGradients(backend="aot_eager"), Square()
    evaluate.announce = lines.append
    for size, clip in ((2, None), (2, None), (4, None), (2, 1.0)):
        data = TensorDict({"x": torch.ones(size, 2)}, [size])
        losses, gradients, finite = evaluate(loss, data, None, [([weight], clip)])
        expected = torch.full((2,), float(size))
        expected = expected if clip is None else expected / expected.norm()
        torch.testing.assert_close(gradients[0], expected)
        assert losses["loss_a"] == 7 * size
        assert not losses["loss_a"].requires_grad
        assert finite
    assert len(lines) == 2 * 3  # begin and end of three compilations
    data = TensorDict({"x": torch.full((2, 2), torch.inf)}, [2])
    assert not evaluate(loss, data, None, [([weight], None)]).finite
    assert len(lines) == 2 * 3


def test_nothing_to_clip() -> None:
    assert clip_gradients([], 1.0) == 0


def test_clipped_as_torch_does() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(3), torch.randn(2, 2)]
    parameters = [nn.Parameter(torch.zeros_like(x)) for x in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, 0.5)
    assert torch.equal(clip_gradients(gradients, 0.5), expected)
    assert_identical(gradients, [parameter.grad for parameter in parameters])


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nowhere/c++",))
    why_not.cache_clear()
    assert why_not("cpu") == "no C++ compiler was found"
    why_not.cache_clear()


# Adam --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_that_of_torch(weight_decay: float) -> None:
    torch.manual_seed(0)
    own = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (), (2,))]
    theirs = copy.deepcopy(own)
    optimizers = [
        torch.optim.Adam(
            [{"params": params[:2], "lr": 1e-2}, {"params": params[2:]}],
            lr=1e-3,
            weight_decay=weight_decay,
            fused=True,
        )
        for params in (own, theirs)
    ]
    for i in range(5):
        left_out = torch.tensor(float(i == 3))
        for parameter, other in zip(own, theirs, strict=True):
            parameter.grad = torch.randn_like(parameter) / (1 - left_out)
            other.grad = parameter.grad.clone()
        assert _is_plain_adam(optimizers[0]) == (i > 0)  # its first step makes its state
        if i == 0:
            optimizers[0].step()
        else:
            _step_adam(optimizers[0], left_out == 0)
        optimizers[1].found_inf = left_out
        optimizers[1].step()
        del optimizers[1].found_inf
        assert_identical(own, theirs)
    assert_identical(optimizers[0].state_dict(), optimizers[1].state_dict())


@pytest.mark.parametrize("kwargs", [{"amsgrad": True}, {"maximize": True}, {"hook": True}])
def test_other_adams_step_themselves(kwargs: dict[str, bool]) -> None:
    weight = nn.Parameter(torch.zeros(2))
    hook = kwargs.pop("hook", False)
    optimizer = torch.optim.Adam([weight], fused=True, **kwargs)
    if hook:
        optimizer.register_step_post_hook(lambda *_: None)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert not _is_plain_adam(optimizer)


# Metrics -----------------------------------------------------------------------------------------


def test_metrics_are_evaluated_once_in_a_while() -> None:
    results = []
    for interval in (1, 3):
        loss, stepper, data = make_mpo(metrics_interval=interval)
        torch.manual_seed(0)
        outputs = [stepper.update(loss, data.clone()) for _ in range(6)]
        results.append((outputs, copy.deepcopy(dict(loss.named_parameters()))))
    (every, parameters), (some, same_parameters) = results
    assert [i for i, output in enumerate(some) if len(output.keys())] == [0, 4]
    for i in (0, 4):
        assert_identical(dict(some[i].items()), dict(every[i].items()))
    assert_identical(same_parameters, parameters)
    resumed = test_mpo_stepper.make_stepper(loss, fused_adam, metrics_interval=3)
    resumed.load_state_dict(stepper.state_dict())
    assert len(resumed.update(loss, data.clone()).keys())  # the seventh
    assert not len(resumed.update(loss, data.clone()).keys())


@pytest.mark.parametrize("interval", [1, 2, 10, 25, 50])
def test_metrics_see_all_parts_of_a_target_period(interval: int) -> None:
    """Once in each interval, and in the course of time just after a copy as well as just before."""
    _, stepper, _ = make_mpo(metrics_interval=interval)
    chosen = []
    for stepper._updates in range(100 * interval):
        chosen += [stepper._updates] if stepper._has_metrics() else []
    assert [update // interval for update in chosen] == list(range(100))
    for period in (interval, 100):
        phases = sorted(update % period for update in chosen)
        assert phases[0] <= 0.05 * period
        assert phases[-1] >= 0.9 * (period - 1)


# Host --------------------------------------------------------------------------------------------


class NoHostSync(TorchDispatchMode):
    """Refuses operations that read a value on the host: ``.item()``, ``bool(tensor)``, ..."""

    REFUSED = ("_local_scalar_dense", "nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.REFUSED, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, lambda x: x[x > 0]])
def test_the_guard_notices(read: Any) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), NoHostSync():
        read(torch.ones(()))


@pytest.mark.parametrize("kind", PROBLEMS)
def test_updates_never_wait_for_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A look at a coefficient that is on the host already.
    monkeypatch.setattr(DirectClipPPOLoss, "_entropy_is_ignored", lambda self: False)
    loss, stepper, data = PROBLEMS[kind]()
    stepper.update(loss, data.clone())  # a first look at the data is allowed
    with NoHostSync():
        stepper.update(loss, data.clone())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@compiles
def test_on_a_gpu(mode: str) -> None:
    """CUDA graphs included, with static addresses and no wait from one update to the next."""
    results = []
    for compiled in (None, CompiledGradients(mode)):
        loss = test_mpo_stepper.make_loss(num_qvalue_nets=1).cuda()
        stepper = test_mpo_stepper.make_stepper(loss, fused_adam)
        stepper.compiled = compiled
        data = make_transitions(8).cuda()
        for i in range(6):
            torch.manual_seed(i)
            if i == 4:
                torch.cuda.set_sync_debug_mode("error")
            stepper.update(loss, data)
        torch.cuda.set_sync_debug_mode("default")
        results.append(dict(loss.named_parameters()))
    assert_equal(results[1], results[0], rtol=1e-5, atol=1e-7)
