"""Memory of the CPU's networks, kept from one update to the next."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["keep_freed_memory"]


@cache
def keep_freed_memory() -> None:
    """Let the C library keep freed memory instead of handing it back to the system.

    By default glibc returns activations of a few MB as soon as they are freed, and the system maps
    and clears them anew, page by page, at every update. It stops doing so for blocks up to the
    largest it has seen freed, at most 32 MB: so one such block is freed here, without having been
    written to. It has no effect with other allocators.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8, device="cpu")
