from __future__ import annotations

import pytest

from tests.report.test_documents import PNG


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take most of the time, and most tests are not about them."""
    monkeypatch.setattr("minerva_torchrl.report.make.draw_task", lambda *_, **__: PNG)
