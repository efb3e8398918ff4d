"""Code of the user's that a run calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from minerva_torchrl.runs.run import Run

__all__ = ["Callback"]


class Callback:
    """What a run calls while it trains. Override what you need; by default nothing happens.

    Every method gets the run: ``run.config``, ``run.frames``, ``run.updates``, ``run.assembly``
    (environment, collector, loss, trainer, replay buffer) and ``run.eval_env`` are there to be
    used, and ``run.stop("reason")`` ends the run after the present batch, with a checkpoint.

    An error in a callback ends the run. What it draws from the global random generators changes the
    run, and so does a change of the batch or of the networks.

    Examples:
        >>> import io, tempfile
        >>> from minerva_torchrl.runs import Run, parse_config
        >>> class StopWhenSolved(Callback):
        ...     def __init__(self, wanted):
        ...         self.wanted = wanted
        ...
        ...     def on_evaluation(self, run, row):
        ...         if row["return_mean"] >= self.wanted:
        ...             run.stop(f"return of {self.wanted} reached")
        >>> settings = {"env": {"name": "gym:Pendulum-v1"}, "collector": {"frames_per_batch": 256}}
        >>> run = Run(
        ...     parse_config("ppo", settings),
        ...     Path(tempfile.mkdtemp()),
        ...     callbacks=[StopWhenSolved(-2000.0)],
        ...     stream=io.StringIO(),
        ... )
        >>> summary = run.train()
        >>> run.stopped_by, summary["frames"]
        ('return of -2000.0 reached', 0)
    """

    def on_start(self, run: Run) -> None:
        """Before the first batch. A run that is resumed starts again."""

    def on_batch(self, run: Run, batch: TensorDictBase) -> None:
        """After a batch was collected, ``[*num_envs, steps]``, and before the updates on it."""

    def on_update(self, run: Run, losses: TensorDictBase) -> None:
        """After each step of the optimisation stepper, with its losses and metrics.

        For on-policy algorithms that is one step per batch, with all its epochs or policy steps.
        A trainer of another kind is called once per batch, with averages.
        """

    def on_evaluation(self, run: Run, row: Mapping[str, float]) -> None:
        """After an evaluation. ``row`` is what ``eval.csv`` has of it."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """After a checkpoint was written to a folder. What changes here is not in it yet."""

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """After the last batch, unless an error ended the run. ``summary.json`` is written."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the next row of ``metrics.csv`` and for the logger, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep: tensors, numbers and texts, in lists and dictionaries."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`, before :meth:`on_start` of a resumed run."""
