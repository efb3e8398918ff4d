"""Graphs of recorded operations: what they read anew, when another one is made, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch._guards import TracingContext

from minerva_torchrl.trainers import tracing
from minerva_torchrl.trainers.compiled import CompiledGradients
from tests.trainers.test_compiled import PROBLEMS


class Toy(nn.Module):
    """A loss with a setting, a bound that can be scheduled, a count and a constant."""

    bound: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.other = nn.Parameter(torch.ones(()))
        self.factor, self._power = 1.0, 1
        self.register_buffer("bound", torch.tensor(0.5))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, data: TensorDict) -> dict[str, Tensor]:
        self.count.add_(1)
        noise = torch.randn(2)
        constant = torch.tensor([1.0, 2.0])
        error = (self.weight * data["x"] * self.factor**self._power - constant).square().mean(-1)
        data["error"] = error.detach()
        loss = error.mean() + (self.weight * noise).sum() + self.bound * self.other
        return {"loss_toy": loss, "unused": data["x"].sum()}


def make_data(size: int = 3) -> TensorDict:
    return TensorDict(
        {"x": torch.arange(2.0 * size).reshape(size, 2), "y": torch.ones(size)}, [size]
    )


class Problem:
    """The toy, evaluated by recorded operations and eagerly."""

    def __init__(self) -> None:
        self.loss, self.announced = Toy(), []
        self.evaluate = CompiledGradients(backend="eager")
        self.evaluate.announce = self.announced.append

    @property
    def graphs(self) -> int:
        """Graphs that were made so far."""
        return len(self.announced) // 2

    def run(self, data: TensorDict | None = None, seed: int = 0) -> TensorDict:
        """Evaluate, and compare with what eager PyTorch says."""
        data = make_data() if data is None else data
        expected_data, parameters = data.clone(), list(self.loss.parameters())
        count = self.loss.count.clone()
        torch.manual_seed(seed)
        expected = self.loss(expected_data)
        gradients = torch.autograd.grad(expected["loss_toy"], parameters, allow_unused=True)
        after = torch.get_rng_state()
        self.loss.count.copy_(count)
        torch.manual_seed(seed)
        self.evaluate.begin_update()
        actual = self.evaluate(self.loss, data, None, [(parameters, None)])
        assert torch.equal(torch.get_rng_state(), after)
        assert self.loss.count == count + 1
        torch.testing.assert_close(actual.losses, {k: x.detach() for k, x in expected.items()})
        torch.testing.assert_close(list(actual.gradients), list(gradients))
        torch.testing.assert_close(data.to_dict(), expected_data.to_dict())
        return data


def test_one_graph_for_many_updates() -> None:
    problem = Problem()
    for seed in range(3):
        assert "error" in problem.run(seed=seed).keys()
    assert problem.graphs == 1


def test_values_are_read_anew() -> None:
    problem = Problem()
    problem.run()
    with torch.no_grad():
        problem.loss.weight.mul_(3)
        problem.loss.bound.fill_(0.25)
    problem.loss.other.data = torch.tensor(7.0)
    problem.run(make_data() * 2)
    assert problem.graphs == 1


def changed_setting(loss: Toy) -> None:
    loss.factor = 2.0


def changed_private_setting(loss: Toy) -> None:
    loss.factor, loss._power = 2.0, 2


def replaced_tensor(loss: Toy) -> None:
    loss.bound = torch.tensor(0.1)


def replaced_parameter(loss: Toy) -> None:
    loss.other = nn.Parameter(torch.tensor(3.0))


@pytest.mark.parametrize(
    "change", [changed_setting, changed_private_setting, replaced_tensor, replaced_parameter]
)
def test_another_graph_for_another_loss(change: Any) -> None:
    problem = Problem()
    problem.run()
    change(problem.loss)
    problem.run()
    problem.run()
    assert problem.graphs == 2


def test_frozen_parameters_need_another_graph() -> None:
    problem = Problem()
    problem.run()
    problem.loss.other.requires_grad_(False)
    problem.evaluate.begin_update()
    weight = [([problem.loss.weight], None)]
    assert problem.evaluate(problem.loss, make_data(), None, weight).finite
    assert problem.graphs == 2


@pytest.mark.parametrize(
    "data",
    [
        make_data(4),
        make_data().double(),
        make_data().exclude("y"),
        make_data().set("x", torch.ones(2, 3).T),
    ],
)
def test_another_graph_for_another_kind_of_batch(data: TensorDict) -> None:
    problem = Problem()
    problem.run()
    problem.run(data)
    problem.run()
    assert problem.graphs == 2


def test_within_an_update_nothing_is_compared() -> None:
    problem = Problem()
    problem.run()
    problem.loss.factor = 2.0
    groups = [(list(problem.loss.parameters()), None)]
    problem.evaluate(problem.loss, make_data(), None, groups)
    assert problem.graphs == 1
    problem.evaluate.begin_update()
    problem.evaluate(problem.loss, make_data(), None, groups)
    assert problem.graphs == 2


def test_settings_that_never_rest_are_named() -> None:
    problem = Problem()
    for i in range(16):
        problem.loss.factor = float(i)
        problem.run()
    problem.loss.factor = -1.0
    with pytest.raises(RuntimeError, match="17th time, because factor changes"):
        problem.run()


@pytest.mark.parametrize(
    "look", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: torch.equal(x, x)]
)
@pytest.mark.parametrize("at", ["batch", "buffer"])
def test_values_can_not_be_looked_at(look: Any, at: str) -> None:
    class Looking(Toy):
        def forward(self, data: TensorDict) -> dict[str, Tensor]:
            look(data["x"] if at == "batch" else self.bound)
            return super().forward(data)

    loss = Looking()
    with pytest.raises(RuntimeError, match="can't look at the values"):
        CompiledGradients(backend="eager")(loss, make_data(), None, [([loss.weight], None)])


def test_tensors_of_the_loss_have_static_addresses() -> None:
    """Which CUDA graphs need; they copy the others with each call."""
    loss, found = Toy(), []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        function = aot_eager(graph, inputs)
        context = TracingContext.get()
        found.append((context.fw_metadata.static_input_indices, len(graph._buffers)))
        return function

    tracing.TracedFunction(loss, lambda data: list(loss(data).values()), make_data(), backend)
    indices, number = found[0]
    assert indices == list(range(number))
    assert number == 4 + 1  # weight, other, bound and count, and the constant


# The package's losses ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PROBLEMS)
def test_losses_are_one_graph(kind: str) -> None:
    """Updates with recorded operations are the eager ones, also after a bound has changed."""
    results = []
    for compiled in (None, CompiledGradients(backend="eager")):
        loss, stepper, data = PROBLEMS[kind]()
        stepper.compiled, lines = compiled, []
        if compiled is not None:
            compiled.announce = lines.append
        outputs = []
        for i in range(3):
            if i == 2 and hasattr(loss, "epsilon_mean"):
                loss.epsilon_mean = 1e-4
            if i == 2 and hasattr(loss, "clip_epsilon"):
                loss.clip_epsilon.fill_(0.01)
            torch.manual_seed(i)
            outputs.append(dict(stepper.update(loss, data.clone()).items()))
        results.append((dict(loss.named_parameters()), outputs, len(lines)))
    (eager, outputs, _), (actual, traced_outputs, lines) = results
    torch.testing.assert_close(actual, eager, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(traced_outputs, outputs, rtol=1e-5, atol=1e-7)
    assert lines == 2  # begin and end of one compilation
