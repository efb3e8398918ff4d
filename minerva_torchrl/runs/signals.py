"""Ending a run from outside."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["StopRequest"]


class StopRequest:
    """While it is entered, SIGINT and SIGTERM ask to stop; a second SIGINT stops at once.

    Args:
        announce (callable): called with one line when the first signal arrives.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.name: str | None = None
        """The signal that asked to stop, if any."""
        self._announce = announce
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.name is None:
            self.name = signal.Signals(number).name
            # Not if the signal came while something else was being written to the same stream.
            with contextlib.suppress(RuntimeError):
                self._announce(
                    f"{self.name}: finishing this batch and saving. Ctrl-C stops at once, unsaved."
                )
