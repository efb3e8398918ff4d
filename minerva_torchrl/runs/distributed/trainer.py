"""The driver of collectors and learners that are elsewhere."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError
from tensordict import TensorDict
from torchrl.trainers import Trainer

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs.distributed import WorkersLost
from minerva_torchrl.runs.distributed.collector import ClusterCollector
from minerva_torchrl.runs.distributed.replay import ReplayService, SamplingClient
from minerva_torchrl.runs.distributed.stepper import SKIPPED, ReportingStepper
from minerva_torchrl.runs.distributed.worker import Report, Workplace
from minerva_torchrl.trainers import MPOTrainer
from minerva_torchrl.trainers.stepping import NonFiniteError

__all__ = ["ClusterTrainer"]

# For learners that are told to end.
_SECONDS_TO_END = 5.0
# Hooks of the updates, which are elsewhere: they are called once per batch, here.
_AFTER_UPDATES = ("post_optim", "post_optim_complete_log")


class ClusterTrainer(Trainer):
    """TorchRL's ``Trainer`` with its Ray learners, in the place of a trainer in one process.

    Collectors store what they collect in the replay service. For every ``frames_per_batch`` actions
    the learners take ``optim_steps_per_batch`` steps, as a local run does, and every so many
    batches the weights go to the collectors with their version: the number of updates they had. The
    hooks of a run are called in its order. They get the ends of episodes in place of a batch, and
    the averages of a batch's updates in place of each.

    Args:
        local (MPOTrainer): made for one process. Its loss, stepper and target updater are what the
            learners begin with, and what :meth:`pull` brings their state to.

    Keyword Args:
        config (RunConfig): the settings.
        collector (ClusterCollector): the collectors.
        replay_buffer (ReplayService): the replay service.
    """

    def __init__(
        self,
        local: MPOTrainer,
        *,
        config: RunConfig,
        collector: ClusterCollector,
        replay_buffer: ReplayService,
    ) -> None:
        settings = config.ray
        self._config = config
        backend = {} if settings.backend == "auto" else {"backend": settings.backend}
        super().__init__(
            collector=collector,
            total_frames=local.total_frames,
            frame_skip=local.frame_skip,
            optim_steps_per_batch=local.optim_steps_per_batch,
            loss_module=local.loss_module,
            optimization_stepper=ReportingStepper(
                local.optimization_stepper,
                limit=config.max_skipped,
                num_threads=config.num_threads,
            ),
            target_net_updater=local.target_net_updater,
            replay_buffer=_ForLearners(replay_buffer),
            batch_size=config.shared_batch,
            learner_backend="ray",
            learner_backend_options={
                "world_size": settings.learners,
                "resources_per_rank": {
                    "num_cpus": settings.cpus_per_learner,
                    "num_gpus": settings.gpus_per_learner,
                },
                "setup_timeout": settings.timeout,
                "command_timeout": settings.timeout,
                **backend,
            },
            progress_bar=False,
            auto_log_optim_steps=False,
        )
        # After a loss TorchRL would wait for those that are left for as long as for an update,
        # though they may be waiting for the one that is gone.
        execution: Any = self._execution_backend
        execution.shutdown = partial(execution.shutdown, timeout=_SECONDS_TO_END)
        self.service, self.cluster = replay_buffer, collector
        # What a run asks a trainer for, and what checkpoints are made of.
        self.optimization_stepper = local.optimization_stepper
        self.finite_batches, self.memory = local.finite_batches, local.memory
        self.warmup_frames = local.warmup_frames
        self._modules = local._modules
        self._pulled = -1  # updates of the state that is here; none are elsewhere yet
        self._is_lost = False
        self._stored = 0
        self._unpublished = 0
        self._lags: list[float] = []

    def register_op(self, dest: Any, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register a hook, also for what TorchRL's learners have no hooks for."""
        if dest in _AFTER_UPDATES:
            getattr(self, f"_{dest}_ops").append((op, kwargs))
        else:
            super().register_op(dest, op, **kwargs)

    # The loop ------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the end, or until asked to stop.

        Raises:
            WorkersLost: if a learner or the replay service is lost.
        """
        backend = self._execution_backend
        generator = np.random.SeedSequence([self._config.seed, self._optim_count])
        backend.seed = int(generator.generate_state(1)[0])  # of the first learner; others follow
        try:
            with self._explained():
                self.cluster.start_members()  # while the learners do
                backend.start()
                self._pulled = self._optim_count
                self._stored = len(self.service)
                self._publish()
                for reports in self.cluster:
                    self._note(reports)
                    self._learn()
                    self._post_steps_hook()
                    if self._stop_training or self.collected_frames >= self.total_frames:
                        break
        except Exception:
            self._rescue()
            raise
        finally:
            self.shutdown()

    def _note(self, reports: list[Report]) -> None:
        """Count what was collected, and show it to the hooks."""
        frames = sum(report.frames for report in reports) * self.frame_skip
        self._stored += sum(report.stored for report in reports)
        self._lags += [self._optim_count - report.version for report in reports]
        self.finite_batches.skipped_frames += sum(report.skipped[0] for report in reports)
        self.finite_batches.skipped_batches += sum(report.skipped[1] for report in reports)
        self.memory.gaps = max(self.memory.gaps, _gaps(self.cluster))
        ends = self._process_batch_hook(torch.cat([report.ends for report in reports]))
        self.collected_frames += frames
        self._pre_steps_log_hook(ends)

    def _learn(self) -> None:
        """The updates after a batch; none during warm-up, or while nothing is stored."""
        if self.collected_frames < self.warmup_frames or not self._stored:
            return
        steps = self.optim_steps_per_batch
        receipt = self._execution_backend.step(steps)
        self._optim_count += receipt.optim_steps
        metrics = receipt.metrics
        self.optimization_stepper.note_skipped(round(float(metrics.pop(SKIPPED)) * steps))
        metrics = {name: metrics.get(name) for name in sorted(metrics.keys())}
        losses = TensorDict({**metrics, **self._figures()})
        self.optimization_stepper.latest = losses
        self._post_optim_hook()
        self._post_optim_complete_log_hook(steps, losses)
        self._unpublished += 1
        if self._unpublished >= self._config.ray.publish_interval:
            self._publish()

    def _figures(self) -> dict[str, torch.Tensor]:
        """How the run keeps together: metrics beside those of the updates."""
        batch = self._config.collector.frames_per_batch * self.frame_skip
        # The last batch of the warm-up is the first to be learned from.
        before = batch * max(math.ceil(self.warmup_frames / batch) - 1, 0)
        actions = (self.collected_frames - before) / self.frame_skip
        lags, self._lags = self._lags, []
        figures = {
            "updates_per_frame": self._optim_count / actions,
            "policy_lag": sum(lags) / max(len(lags), 1),
            "collectors": self.cluster.num_ready,
            "collectors_replaced": self.cluster.replaced,
        }
        return {name: torch.tensor(float(value)) for name, value in figures.items()}

    def _publish(self) -> None:
        self._unpublished = 0
        self.cluster.publish(self._execution_backend.get_weights(), self._optim_count)

    # State ---------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Bring the state of the learners into the loss, stepper and target updater that are here.

        Every learner has the same. Nothing happens if it is here already.
        """
        if self._is_lost:
            raise WorkersLost("what was learned since the last checkpoint was lost.")
        if self._pulled in (-1, self._optim_count):
            return
        with self._explained():
            actor = self._execution_backend._actors[0]
            state = ray.get(actor.__ray_call__.remote(_state_on_cpu))
        self.loss_module.load_state_dict(state["loss_module"])
        self.optimization_stepper.load_state_dict(state["optimization_stepper"])
        self.target_net_updater.load_state_dict(state["target_net_updater"])
        self._pulled = self._optim_count

    def _rescue(self) -> None:
        """After an error elsewhere, the state of the learners is still worth a checkpoint."""
        try:
            self.pull()
        except Exception:  # of any kind: the error that came before is the one to report
            self._is_lost = True

    def shutdown(self) -> None:
        """End collectors and learners. Can be called again."""
        self.cluster.shutdown()
        with contextlib.suppress(Exception):
            self._execution_backend.shutdown()
        self._pulled = -1

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in one line which process was lost; raise what was raised in one."""
        try:
            yield
        except (WorkersLost, NonFiniteError):
            raise
        except Exception as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, NonFiniteError) or not _is_loss(cause):
                raise cause from None
            self.service.check()
            raise WorkersLost("a learner was lost.") from error


def _is_loss(error: BaseException) -> bool:
    """Whether an error is what a process sees of another one that is gone."""
    if isinstance(error, (RayError, dist.DistError)):
        return True
    signs = ("gloo", "Ray learner generation is")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


class _ForLearners:
    """A replay service as TorchRL's learners take it."""

    def __init__(self, service: ReplayService) -> None:
        self._service = service

    def clients(self, count: int) -> list[SamplingClient]:
        """One for each learner."""
        return self._service.samplers(count)


def _gaps(collector: ClusterCollector) -> int:
    return Workplace.gaps_until(collector.last_number)


def _state_on_cpu(worker: Any) -> dict[str, Any]:
    """The state of a learner, from its process. Those without a GPU could not read another."""
    state = worker.learner.state_dict()
    state.pop("rng")
    return dict(_on_cpu(state))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        copy: Any = type(value)((key, _on_cpu(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):
            copy._metadata = value._metadata
        return copy
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(item) for item in value)
    return value
