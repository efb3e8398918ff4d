"""Every example in a docstring runs and shows what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import minerva_torchrl

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(minerva_torchrl.__path__, "minerva_torchrl.")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        pytest.skip("needs the extra `ray`")
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failures, _ = doctest.testmod(module, optionflags=flags, raise_on_error=False)
    assert failures == 0
