"""What the tests of every loss share: a harness of checks, small networks and random data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded, Composite, TensorSpec
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import SoftUpdate
from torchrl.objectives.common import LossModule

OBSERVATION_DIM, ACTION_DIM = 3, 2


class LossTestBase:
    """Checks that any loss of the package must pass.

    A subclass says which parameters each loss trains and builds the loss and its data; it calls the
    ``*_test`` methods from tests of its own.
    """

    loss_parameters: ClassVar[dict[str, str]]
    """Name of each loss -> the attribute of the loss module that holds its parameters."""

    def make_loss(self, **kwargs: Any) -> LossModule:
        """A loss that is ready to be called: with targets and their updater."""
        raise NotImplementedError

    def make_data(self, *batch: int) -> TensorDict:
        """A batch that the loss accepts."""
        raise NotImplementedError

    def test_reset_parameters_recursive(self) -> None:
        self.reset_parameters_recursive_test(self.make_loss())

    # Keys ----------------------------------------------------------------------------------------

    def tensordict_keys_test(
        self, loss_fn: LossModule, default_keys: dict[str, NestedKey], td_est: Any = None
    ) -> None:
        """Every key has its default, can be set alone or with the others, and can be reset."""
        if td_est is not None:
            loss_fn.make_value_estimator(td_est)
        accepted = set(loss_fn._AcceptedKeys.__dataclass_fields__)
        assert accepted == set(default_keys)
        with pytest.raises(ValueError, match="unknown is not an accepted tensordict key"):
            loss_fn.set_keys(unknown="x")

        self._assert_keys(loss_fn, default_keys)
        for name in default_keys:
            loss_fn.set_keys(**{name: f"{name}_test"})
            self._assert_keys(loss_fn, {**default_keys, name: f"{name}_test"})
            loss_fn.set_keys(**{name: None})
            self._assert_keys(loss_fn, default_keys)
        everything = {name: ("nested", name) for name in default_keys}
        loss_fn.set_keys(**everything)
        self._assert_keys(loss_fn, everything)
        loss_fn.set_keys(**dict.fromkeys(default_keys))
        self._assert_keys(loss_fn, default_keys)

    @staticmethod
    def _assert_keys(loss_fn: LossModule, expected: dict[str, NestedKey]) -> None:
        assert {name: getattr(loss_fn.tensor_keys, name) for name in expected} == expected

    def set_advantage_keys_through_loss_test(
        self,
        loss_fn: LossModule,
        td_est: Any,
        loss_advantage_key_mapping: dict[str, tuple[str, NestedKey]],
    ) -> None:
        """Keys of the loss reach its value estimator, set before or after it is made.

        The mapping is ``{key of the loss: (key of the estimator, new name)}``.
        """
        names = {key: new for key, (_, new) in loss_advantage_key_mapping.items()}
        loss_fn.make_value_estimator(td_est)
        self._assert_estimator_keys(loss_fn, loss_advantage_key_mapping, expect_new=False)
        loss_fn.set_keys(**names)
        self._assert_estimator_keys(loss_fn, loss_advantage_key_mapping, expect_new=True)
        loss_fn.make_value_estimator(td_est)
        self._assert_estimator_keys(loss_fn, loss_advantage_key_mapping, expect_new=True)

    @staticmethod
    def _assert_estimator_keys(
        loss_fn: LossModule, mapping: dict[str, tuple[str, NestedKey]], *, expect_new: bool
    ) -> None:
        for key, (estimator_key, new) in mapping.items():
            present = getattr(loss_fn.value_estimator.tensor_keys, estimator_key)
            assert present == getattr(loss_fn.tensor_keys, key)
            assert (present == new) is expect_new

    # Parameters ----------------------------------------------------------------------------------

    def reset_parameters_recursive_test(self, loss_fn: LossModule) -> None:
        """Resetting replaces every parameter: networks, targets and dual variables."""
        everything = dict(loss_fn.named_parameters())
        everything |= {k: v for k, v in loss_fn.named_buffers() if k.startswith("target_")}
        assert everything
        with torch.no_grad():
            for parameter in everything.values():
                parameter.add_(1000.0)
        shifted = {name: parameter.detach().clone() for name, parameter in everything.items()}
        loss_fn.reset_parameters_recursive()
        for name, parameter in everything.items():
            assert (parameter != shifted[name]).all(), name

    def no_duplicates_test(self, loss_fn: LossModule) -> None:
        """No parameter is listed twice, and no target is listed as a parameter."""
        parameters = [p.data_ptr() for _, p in loss_fn.named_parameters()]
        buffers = [b.data_ptr() for name, b in loss_fn.named_buffers()]
        assert len(set(parameters)) == len(parameters)
        assert len(set(buffers)) == len(buffers)
        assert not set(parameters) & set(buffers)
        assert not any(name.startswith("target_") for name, _ in loss_fn.named_parameters())

    def state_dict_test(
        self, loss_fn: LossModule, other: LossModule, tensordict: TensorDictBase
    ) -> None:
        """A state loaded into another instance makes the two return the same."""
        with torch.no_grad():
            for parameter in loss_fn.parameters():
                parameter.add_(0.1 * torch.rand_like(parameter))
        expected = run(loss_fn, tensordict.clone())
        before = run(other, tensordict.clone())
        assert any(before[key] != expected[key] for key in expected.keys())
        other.load_state_dict(loss_fn.state_dict())
        assert_equal(run(other, tensordict.clone()), expected)

    def gradient_isolation_test(self, loss_fn: LossModule, tensordict: TensorDictBase) -> None:
        """Each loss gives gradient to all of its own parameters and to no others."""
        output = loss_fn(tensordict)
        losses = [key for key in output.keys() if key.startswith("loss_")]
        assert losses
        for key in losses:
            loss_fn.zero_grad(set_to_none=True)
            output[key].sum().backward(retain_graph=True)
            for name, parameter in loss_fn.named_parameters():
                grad = parameter.grad
                if name.startswith(f"{self.loss_parameters[key]}."):
                    assert grad is not None, f"{key} leaves {name} without gradient"
                    assert grad.isfinite().all()
                    assert grad.norm() > 0, f"{key} leaves {name} without gradient"
                else:
                    assert grad is None, f"{key} gives gradient to {name}"
        for key in output.keys():
            assert output[key].requires_grad is (key in losses), key

    # Data ----------------------------------------------------------------------------------------

    @contextmanager
    def input_steady_test(
        self, tensordict: TensorDictBase, added: tuple[NestedKey, ...] = ()
    ) -> Iterator[None]:
        """Inside the block the data keeps its entries and their values; ``added`` may be added."""
        before = tensordict.clone()
        yield
        keys, old_keys = (set(td.keys(True, True)) for td in (tensordict, before))
        assert keys == old_keys | {unravel_key(key) for key in added}
        for key in old_keys:
            torch.testing.assert_close(
                tensordict.get(key), before.get(key), rtol=0, atol=0, equal_nan=True
            )


# Calls -------------------------------------------------------------------------------------------


def run(loss: LossModule, tensordict: TensorDictBase, seed: int = 0) -> TensorDict:
    """Call a loss with known random numbers."""
    torch.manual_seed(seed)
    return loss(tensordict)


def total_loss(output: TensorDictBase) -> Tensor:
    return torch.stack([v.sum() for k, v in output.items() if k.startswith("loss_")]).sum()


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss by the learnable parameters of a module; zero where there is none."""
    named = {k: p for k, p in module.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if grad is None else grad
        for (name, parameter), grad in zip(named.items(), grads, strict=True)
    }


def assert_equal(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Two mappings or TensorDicts have the same entries with the same values."""
    assert set(actual.keys()) == set(expected.keys())
    for key in expected.keys():
        torch.testing.assert_close(
            actual[key], expected[key], rtol=rtol, atol=atol, msg=lambda m, key=key: f"{key}: {m}"
        )


def with_updater(loss: LossModule) -> LossModule:
    """The loss with an updater of its targets, which it warns of the lack of."""
    SoftUpdate(loss, tau=0.01)
    return loss


def compiles(function: Any) -> Any:
    """A test that compiles something; the compiler may remark on code that is not ours."""
    for message in (
        # tensordict reads a setting of the compiler that has gone, and remarks on its locks.
        r"torch\._dynamo\.config\.inline_inbuilt_nn_modules is deprecated:FutureWarning",
        r"Using lock_\(\) inside a compiled graph:UserWarning",
        # The compiler imports a module of torch that is written with torch.jit.
        r"`torch\.jit\.script_method` is deprecated:DeprecationWarning",
    ):
        function = pytest.mark.filterwarnings(f"ignore:{message}")(function)
    return function


class InjectedNoise:
    """Stands in for the random draws of a loss: hands out given tensors and notes the requests."""

    def __init__(self, *draws: Tensor) -> None:
        self.draws = list(draws)
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, num_samples: int, like: Tensor) -> Tensor:
        shape = (num_samples, *like.shape)
        self.shapes.append(shape)
        draw = self.draws.pop(0)
        assert draw.shape == shape
        return draw.to(like.dtype)


# Networks ----------------------------------------------------------------------------------------


def make_mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def make_actor(
    network: nn.Module | None = None,
    *,
    distribution_class: Any = IndependentNormal,
    spec: TensorSpec | str | None = "bounded",
    observation_key: NestedKey = "observation",
    action_key: NestedKey = "action",
) -> ProbabilisticActor:
    """A Gaussian policy over actions in ``[-1, 1]``; ``spec=None`` makes one without a spec."""
    if network is None:
        network = nn.Sequential(make_mlp(OBSERVATION_DIM, 2 * ACTION_DIM), NormalParamExtractor())
    if spec == "bounded":
        spec = Bounded(-1.0, 1.0, (ACTION_DIM,))
    if spec is not None and not isinstance(action_key, str):
        for name in reversed(action_key):
            spec = Composite({name: spec})
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=[observation_key], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=[action_key],
        spec=spec,
        distribution_class=distribution_class,
        return_log_prob=True,
    )


class Concatenate(nn.Module):
    """Feeds several inputs to a network as one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.network(torch.cat(inputs, -1))


def make_critic(
    network: nn.Module | None = None,
    *,
    observation_key: NestedKey = "observation",
    action_key: NestedKey = "action",
    value_key: NestedKey = "state_action_value",
) -> ValueOperator:
    """An action-value network."""
    if network is None:
        network = Concatenate(make_mlp(OBSERVATION_DIM + ACTION_DIM, 1))
    return ValueOperator(network, in_keys=[observation_key, action_key], out_keys=[value_key])


# Data --------------------------------------------------------------------------------------------


def make_transitions(
    *batch: int, seed: int = 0, action_scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> TensorDict:
    """Random transitions with terminations and truncations, at least one of each.

    Actions are raw, so that some lie outside the bounds if ``action_scale`` is not small.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*batch, *shape, generator=generator, dtype=dtype)

    kind = torch.randint(5, (*batch, 1), generator=generator)
    if kind.numel() > 2:
        kind.view(-1)[:3] = torch.arange(3)
    terminated, truncated = kind == 0, kind == 1
    return TensorDict(
        {
            "observation": normal(OBSERVATION_DIM),
            "action": action_scale * normal(ACTION_DIM),
            "action_log_prob": normal() - 2.0,
            "next": {
                "observation": normal(OBSERVATION_DIM),
                "reward": normal(1),
                "done": terminated | truncated,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        batch_size=batch,
    )
