"""Runs on a Ray cluster: collectors, replay and learners elsewhere, everything else here.

The process that was started, the *driver*, has the same objects as a local run: environment, loss,
stepper, replay memory. They are what learners and collectors are made from, and what checkpoints
are written from, after the state of the learners was brought here. So a checkpoint of either kind
of run can be resumed as the other, with any number of collectors and learners.

- :mod:`.cluster` connects, and refuses what the cluster can't give.
- :mod:`.worker` is what runs in a collector's process; :mod:`.collector` is the driver's side,
  which replaces those that are lost.
- :mod:`.replay` is the replay service, :mod:`.trainer` drives the learners, in which
  :mod:`.stepper` takes the steps.
- :mod:`.statistics` merges running means and variances.
- :mod:`.assembly` puts them together.

Only these modules import Ray, and nothing imports them before a run has ``ray.collectors``.
"""

from __future__ import annotations

__all__ = ["WorkersLost"]


class WorkersLost(RuntimeError):
    """A process that a run on a cluster can't do without is gone.

    The folder of the run is complete up to its last checkpoint, from which it can be resumed.
    """
