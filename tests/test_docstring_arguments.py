"""Docstrings of public objects say everything: each argument, what is returned, and an example."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from abc import ABC
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "_ext"))
try:
    import docstrings
finally:
    sys.path.pop(0)

PACKAGES = (
    "minerva_torchrl",
    "minerva_torchrl.objectives",
    "minerva_torchrl.objectives.functional",
    "minerva_torchrl.objectives.value.functional",
    "minerva_torchrl.objectives.policies",
    "minerva_torchrl.objectives.critics",
    "minerva_torchrl.modules",
    "minerva_torchrl.envs",
    "minerva_torchrl.trainers",
    "minerva_torchrl.algorithms",
    "minerva_torchrl.runs",
    "minerva_torchrl.report",
)


def public() -> dict[str, Any]:
    """Public functions and classes by their place of definition, each once."""
    found = {}
    for place in PACKAGES:
        module = importlib.import_module(place)
        for name in module.__all__:
            obj = getattr(module, name)
            if inspect.isclass(obj) or inspect.isfunction(obj):
                found[place_of(obj)] = obj
    return found


def place_of(obj: Any) -> str:
    """Where an object is defined."""
    return f"{obj.__module__}.{obj.__qualname__}"


PUBLIC = public()
ours = pytest.mark.parametrize("obj", PUBLIC.values(), ids=PUBLIC.keys())


def shown_by_fields(obj: Any) -> bool:
    """Whether the arguments are fields, each of which has a docstring of its own."""
    return dataclasses.is_dataclass(obj) or hasattr(obj, "_fields")


@ours
def test_arguments(obj: Any) -> None:
    if inspect.isclass(obj) and issubclass(obj, Exception):
        return
    text = inspect.getdoc(obj) or ""
    if shown_by_fields(obj) and not docstrings.arguments(text):
        # A section of settings describes itself, and the name of an algorithm was described above.
        other = r"ClassVar|\w*Config\b|Literal\['(mpo|vmpo|ppo)'\]"
        types = vars(obj)["__annotations__"]
        fields = {n for n, kind in types.items() if n[0] != "_" and not re.match(other, str(kind))}
        assert fields - set(docstrings.fields(obj)) == set(), "fields without a description"
        return
    if inspect.isclass(obj) and "__init__" not in vars(obj):
        others = re.search(r"Takes the\s+arguments of\s+:class:", text)
        if others or ABC in obj.__bases__ or obj.__init__ is object.__init__:
            return
    documented = set(docstrings.arguments(text))
    given = set(docstrings.parameters(obj))
    assert given - documented == set(), "arguments without a description"
    assert documented - given == set(), "descriptions of arguments that do not exist"


@ours
def test_returns(obj: Any) -> None:
    if inspect.isclass(obj):
        return
    returned = inspect.signature(obj).return_annotation
    if returned not in (None, "None", inspect.Signature.empty):
        assert "Returns" in docstrings.sections(inspect.getdoc(obj) or "")


@ours
def test_shapes(obj: Any) -> None:
    """Of every tensor that goes in."""
    if shown_by_fields(obj) or (inspect.isclass(obj) and issubclass(obj, Exception)):
        return
    types = {name: str(a.annotation) for name, a in inspect.signature(obj).parameters.items()}
    for name, argument in docstrings.arguments(inspect.getdoc(obj) or "").items():
        if re.search(r"\bTensor\b", types.get(name, "")):
            assert re.search(r"``[\[(]|shape|scalar|``reward``", argument.text), name


NO_PAPER = {
    "categorical_kl",
    "effective_sample_size",
    "gaussian_entropy",
    "masked_mean",
    "sample_kl",
    "sample_kl_to_uniform",
    "standardize",
    "weight_entropy",
    "weighted_moments",
    "weighted_multivariate_moments",
}
"""Functions that are nobody's idea."""


@ours
def test_paper(obj: Any) -> None:
    """Every equation and loss but the commonplace ones has a link."""
    place = obj.__module__.removeprefix("minerva_torchrl.objectives.")
    maths = inspect.isfunction(obj) and re.match(r"functional\b|value\.functional", place)
    if (maths and obj.__name__ not in NO_PAPER) or obj.__name__ in ("MPOLoss", "VMPOLoss"):
        assert "https://arxiv.org/abs/" in (inspect.getdoc(obj) or "")


@ours
def test_example(obj: Any) -> None:
    no_instances = inspect.isclass(obj) and (issubclass(obj, Exception) or ABC in obj.__bases__)
    if shown_by_fields(obj) or no_instances:
        return
    parts = docstrings.sections(inspect.getdoc(obj) or "")
    example = parts.get("Examples", "") + parts.get("Example", "")
    assert ">>> " in example or "See :" in example


# The parser, with bad docstrings -----------------------------------------------------------------


def test_parser() -> None:
    def function(a, b=1, *, c, **kwargs):
        """Do something.

        Args:
            a (int): the first,
                over two lines: with a colon.
            b (tuple of (int, int), optional): the second.

        Keyword Args:
            c: the third.

        A paragraph behind it.

        Returns:
            Nothing: much.
        """

    found = docstrings.arguments(inspect.getdoc(function) or "")
    assert list(found) == ["a", "b", "c"]
    assert found["a"].text == "the first, over two lines: with a colon."
    assert found["b"].type == "tuple of (int, int), optional"
    assert set(docstrings.parameters(function)) - set(found) == {"kwargs"}
