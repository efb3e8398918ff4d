"""What VMPOLoss still asks of PopArt by itself; everything is in ``modules/popart.py``."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from minerva_torchrl.modules import popart

    return getattr(popart, name)


def popart_heads(critic_network: Any) -> Any:
    """See ``modules/popart.py``."""
    return __getattr__("popart_heads")(critic_network)


def popart_normalize(loss: Any, *values: Any) -> Any:
    """See ``modules/popart.py``."""
    return __getattr__("popart_normalize")(loss, *values)
