"""DirectModule is TensorDictModule without a look at what it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, set_skip_existing
from torch import nn

from minerva_torchrl.modules import DirectModule


def data() -> TensorDict:
    return TensorDict(x=torch.arange(6.0).reshape(3, 2), batch_size=[3])


CASES: dict[str, dict[str, Any]] = {
    "one output": {"module": nn.Tanh(), "out_keys": ["y"]},
    "two outputs": {"module": lambda x: (x + 1, x + 2), "out_keys": ["y", ("nested", "z")]},
    "one ignored": {"module": lambda x: (x + 1, x + 2), "out_keys": ["_", "z"]},
    "a dict": {"module": lambda x: {"y": x + 1, "other": x}, "out_keys": ["y"]},
    "not a tensor": {"module": lambda x: (x + 1, "text"), "out_keys": ["y", "z"]},
    "numpy": {"module": lambda x: x.numpy() + 1, "out_keys": ["y"]},
    "onto its input": {"module": lambda x: x + 1, "out_keys": ["x"]},
    "elsewhere": {"module": lambda x: x + 1, "out_keys": ["y"], "inplace": False},
    "empty": {"module": lambda x: x + 1, "out_keys": ["y"], "inplace": "empty"},
}


def assert_same(actual: TensorDict, expected: TensorDict) -> None:
    assert set(actual.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        same = actual[key] == value
        assert same if isinstance(same, bool) else same.all()


@pytest.mark.parametrize("case", CASES)
def test_writes_the_same(case: str) -> None:
    arguments = {"in_keys": ["x"], **CASES[case]}
    inputs, expected_inputs = data(), data()
    actual = DirectModule(**arguments)(inputs)
    expected = TensorDictModule(**arguments)(expected_inputs)
    assert_same(actual, expected)
    assert_same(inputs, expected_inputs)
    assert (actual is inputs) == (expected is expected_inputs)


def test_into_another() -> None:
    module, out = DirectModule(nn.Tanh(), ["x"], ["y"]), TensorDict(batch_size=[3])
    inputs = data()
    assert module(inputs, tensordict_out=out) is out
    assert "y" in out.keys()
    assert "y" not in inputs.keys()


def test_from_tensors_and_keywords() -> None:
    module = DirectModule(nn.Tanh(), ["x"], ["y"])
    assert torch.equal(module(torch.ones(3)), torch.ones(3).tanh())
    assert torch.equal(module(x=torch.ones(3)), torch.ones(3).tanh())


@pytest.mark.parametrize("skip", [False, True])
def test_leaves_existing_outputs_alone_if_asked_to(skip: bool) -> None:
    inputs = data().set("y", torch.zeros(3, 2))
    with set_skip_existing(skip):
        DirectModule(nn.Tanh(), ["x"], ["y"])(inputs)
    assert inputs["y"].any() != skip


def test_only_selected_outputs() -> None:
    module = DirectModule(lambda x: (x + 1, x + 2), ["x"], ["y", "z"]).select_out_keys("z")
    assert set(module(data()).keys()) == {"x", "z"}


def test_hooks_run() -> None:
    module, seen = DirectModule(nn.Tanh(), ["x"], ["y"]), []
    module.register_forward_hook(lambda *_: seen.append(1))
    module(data())
    assert seen == [1]


# TensorDict sets a flag of the compiler that newer versions of torch have dropped.
@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules.*:FutureWarning")
def test_in_compiled_code() -> None:
    compiled = torch.compile(DirectModule(nn.Tanh(), ["x"], ["y"]), backend="eager", fullgraph=True)
    assert_same(compiled(data()), data().set("y", data()["x"].tanh()))


def test_missing_input_is_named() -> None:
    with pytest.raises(KeyError, match="missing"):
        DirectModule(nn.Tanh(), ["missing"], ["y"])(data())


def test_wrong_number_of_outputs() -> None:
    with pytest.raises(RuntimeError, match="more out_keys than tensors"):
        DirectModule(nn.Tanh(), ["x"], ["y", "z"])(data())


def test_does_not_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDict, "from_any", lambda *_: pytest.fail("converted"))
    DirectModule(lambda x: (x + 1, x + 2), ["x"], ["y", "z"])(data())
