"""What ends a run that an environment, or its policy, can't go on with."""

from __future__ import annotations

__all__ = ["EnvironmentFailure", "PolicyFailure"]


class EnvironmentFailure(RuntimeError):
    """An environment raised, its process died, or it kept giving numbers that are not finite.

    The message is one line: which environment and copy, at which step, and what happened.
    """


class PolicyFailure(ValueError):
    """A policy acts with what is not a number, though all that it observes is finite."""
