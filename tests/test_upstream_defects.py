"""Defects of TorchRL and tensordict that the code works around are still there."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "upstream" / "defects"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_defect(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"defects_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
        if not module.defect():
            pytest.skip("fixed")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_issue_text(path: Path) -> None:
    text = inspect.cleandoc(path.read_text().split('"""')[1])
    title, _, body = text.partition("\n\n")
    assert "\n" not in title
    assert body.startswith("**Describe the bug.**")
    assert "**Expected.**" in body


def test_page_lists_all() -> None:
    page = (FOLDER.parents[1] / "upstream.md").read_text()
    assert [path.stem for path in SCRIPTS if f"`{path.name}`" not in page] == []
