"""Checks of arguments, with messages that name the argument, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise unless a value is one of the allowed ones."""
    if value not in tuple(allowed):
        listed = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}.")


def check_positive(name: str, value: object) -> None:
    """Raise unless a value is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    if not (math.isfinite(float(value)) and float(value) > 0):
        raise ValueError(f"{name} must be positive and finite, got {float(value)}.")


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """Raise unless a value is an integer of at least one (or ``None`` if that is allowed)."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def check_fraction(name: str, value: object) -> None:
    """Raise unless a value is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}.")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value}.")


def check_value_scale(critic_network: nn.Module, loss_class: type) -> None:
    """Raise if a critic learns on a normalised scale, as with PopArt, and a loss in real units."""
    heads = [m for m in critic_network.modules() if getattr(m, "normalizes_targets", False)]
    if heads and not getattr(loss_class, "normalizes_targets", False):
        raise ValueError(
            f"critic_network has a {type(heads[0]).__name__}, which learns on a normalised scale, "
            f"but {loss_class.__name__} takes its error in real units. Use PopArtClipPPOLoss (as "
            "loss_class) or PopArtVMPOLoss of minerva_torchrl.modules."
        )
