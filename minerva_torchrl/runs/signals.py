"""Ending a run from outside."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["StopOnSignals"]


class StopOnSignals:
    """While it is entered, SIGINT and SIGTERM ask to stop; a second SIGINT stops at once.

    Args:
        stop (callable): called with the name of the first signal that arrives.
        announce (callable): called with one line for the user when that happens.
    """

    def __init__(self, stop: Callable[[str], None], announce: Callable[[str], None]) -> None:
        self._stop, self._announce = stop, announce
        self._asked = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopOnSignals:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._asked:
            self._asked = True
            name = signal.Signals(number).name
            self._stop(name)
            # Not if the signal came while something else was being written to the same stream.
            with contextlib.suppress(RuntimeError):
                self._announce(
                    f"{name}: finishing this batch and saving. Press Ctrl-C again to stop at once."
                )
