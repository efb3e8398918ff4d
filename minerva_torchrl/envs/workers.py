"""Copies of a task in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import ParallelEnv
from torchrl.envs.batched_envs import _dispatch_caller_parallel

from minerva_torchrl.envs.actions import no_action
from minerva_torchrl.envs.batched import BatchedEnv
from minerva_torchrl.envs.failures import EnvironmentFailure

__all__ = ["Workers"]

_LONGEST_REPORT = 2048  # bytes


class Workers(ParallelEnv):
    """A ``ParallelEnv`` whose processes end with it, and say why if they end before.

    Signals from the keyboard do not reach the processes. A process in which an environment fails
    reports that and ends without a word; here it is raised as :class:`EnvironmentFailure`, as is
    the death of a process by any other cause.

    Args:
        make_copies (callable): makes the environment of a process.
        kwargs (sequence of mappings): its arguments, those of one process each.

    Keyword Args:
        device (torch.device, optional): device of the data.
    """

    def __init__(
        self,
        make_copies: Callable[..., BatchedEnv],
        kwargs: Sequence[Mapping[str, Any]],
        *,
        device: torch.device | str | None,
    ) -> None:
        self._reports = torch.zeros(len(kwargs), _LONGEST_REPORT, dtype=torch.uint8).share_memory_()
        self._processes: list[BaseProcess] = []
        super().__init__(
            len(kwargs),
            _Worker(make_copies, os.getpid()),
            create_env_kwargs=[
                {**each, "report": report}
                for each, report in zip(kwargs, self._reports, strict=True)
            ],
            device=device,
        )

    # As in BatchedEnv: ParallelEnv would return an object that always counts as true.

    @property
    def exact_state(self) -> bool:
        """As in :class:`BatchedEnv`."""
        return all(self._ask("exact_state"))

    @property
    def step_limit(self) -> int | None:
        """As in :class:`BatchedEnv`."""
        limit: int | None = self._ask("step_limit")[0]
        return limit

    def _ask(self, attribute: str) -> list[Any]:
        if self.is_closed:
            self.start()
        with self._watched():
            return list(_dispatch_caller_parallel(attribute, self))

    # What the processes do -----------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        for action in tensordict.select("action").values(True, True):  # one, or its parts
            if action.is_floating_point() and action.isnan().any():
                raise no_action(float("nan"))
        with self._watched():
            return super()._step(tensordict)

    def _reset(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        with self._watched():
            return super()._reset(tensordict, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of all copies."""
        with self._watched():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Go on where :meth:`state_dict` was called."""
        with self._watched():
            super().load_state_dict(state_dict, **kwargs)
        # TorchRL 0.14.1 leaves these set, and the next step would not wait for the workers
        # (https://github.com/pytorch/rl/pull/4341).
        for worker in range(self.num_workers):
            self._shm_done_flags[worker] = 0

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Say in one line that a process is dead, and why."""
        try:
            yield
        except EnvironmentFailure:
            raise
        except (RuntimeError, OSError, EOFError, ValueError):
            failure = self._failure()
            if failure is None:
                raise
            raise failure from None

    def _failure(self) -> EnvironmentFailure | None:
        for report in self._reports:
            if report[0]:
                text = bytes(report.tolist()).rstrip(b"\0").decode(errors="replace")
                return EnvironmentFailure(text)
        ends = {}
        for index, process in enumerate(self._processes):
            with suppress(ValueError):  # TorchRL has closed it already
                process.join(1.0)
                if process.exitcode is not None:
                    ends[index] = process.exitcode
        if not ends:
            return None
        # TorchRL ends the others when it finds a dead one.
        index = next((i for i, code in ends.items() if code not in (0, -signal.SIGTERM)), min(ends))
        code = ends[index]
        how = f"with status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        return EnvironmentFailure(
            f"worker process {index} of {self.num_workers} (env.num_workers) was ended {how}."
        )

    # Beginning and end ---------------------------------------------------------------------------

    def _start_workers(self) -> None:
        # A mask is inherited, so that Ctrl-C in a terminal never reaches the processes.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super()._start_workers()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes = list(self._workers)

    def _shutdown_workers(self) -> None:
        try:
            super()._shutdown_workers()
        except (RuntimeError, OSError, EOFError, ValueError):  # one is dead: so are all, now
            for process in self._processes:
                with suppress(ValueError):
                    process.kill()
                    process.join()


class _Worker:
    """Makes the environment of a process."""

    def __init__(self, make_copies: Callable[..., BatchedEnv], parent: int) -> None:
        self.make_copies, self.parent = make_copies, parent

    def __call__(self, *, report: Tensor, **kwargs: Any) -> BatchedEnv:
        env = self.make_copies(**kwargs)
        if os.getpid() != self.parent:  # there one is made for its specs only
            env.on_failure = lambda failure: _report_and_end(failure, report)
        return env


def _report_and_end(failure: EnvironmentFailure, report: Tensor) -> None:
    """Write an error where the parent finds it, and end the process without a traceback."""
    text = str(failure).encode()[:_LONGEST_REPORT]
    report[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sys.stderr.flush()
    os._exit(1)
