"""From settings to a run on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.objectives.common import LossModule

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs.assemble import Assembly, assemble, exploring
from minerva_torchrl.runs.distributed.cluster import Cluster
from minerva_torchrl.runs.distributed.collector import ClusterCollector
from minerva_torchrl.runs.distributed.replay import ReplayService
from minerva_torchrl.runs.distributed.statistics import Statistics
from minerva_torchrl.runs.distributed.trainer import ClusterTrainer
from minerva_torchrl.runs.distributed.worker import Task, Workplace
from minerva_torchrl.runs.parts import UserParts
from minerva_torchrl.trainers.hooks import ReplayMemory
from minerva_torchrl.trainers.mpo import stored_keys

__all__ = ["ClusterAssembly", "assemble_on_cluster"]


@dataclass
class ClusterAssembly(Assembly):
    """What a run on a cluster consists of.

    Environment, collector and loss are those of a local run. The environment is only asked for its
    specs and statistics, and the collector for the numbers of its trajectories.
    """

    opened: ExitStack = field(default_factory=ExitStack)

    def refresh(self) -> None:
        """Bring the state of the learners here."""
        if isinstance(self.trainer, ClusterTrainer):
            self.trainer.pull()

    def shutdown(self) -> None:
        """End all processes of the run."""
        self.opened.close()
        super().shutdown()


def assemble_on_cluster(
    config: RunConfig, parts: UserParts, warn: Callable[[str], None]
) -> ClusterAssembly:
    """Everything that a run on a cluster trains with.

    Collectors and learners start with training; the replay service is there before, so that a
    checkpoint can be loaded into it.

    Args:
        config (RunConfig): settings without problems, with ``ray.collectors``.
        parts (UserParts): what the run takes from its user.
        warn (callable): shows a line to the user.
    """
    with ExitStack() as opened:
        cluster = Cluster(config)
        opened.callback(cluster.close)
        if config.shared_batch is None:
            assembly = _with_learner_here(config, parts, warn, opened)
        else:
            assembly = _with_learners(config, parts, warn, opened)
        assembly.opened = opened.pop_all()
        return assembly


def _freeze(env: TransformedEnv) -> None:
    """Let only what collectors saw count: the driver's environment is reset when it is made."""
    Statistics(env).freeze()


def _with_learner_here(
    config: RunConfig, parts: UserParts, warn: Callable[[str], None], opened: ExitStack
) -> ClusterAssembly:
    """Rollouts from elsewhere for a trainer in this process."""

    def make_collector(env: TransformedEnv, loss: LossModule) -> ClusterCollector:
        collector = ClusterCollector(
            Task(config, parts, None),
            exploring(config, loss.actor_network),
            statistics=Statistics(env),
            # A run that goes on has made updates, and its collectors get other seeds.
            first_number=lambda: Workplace.first_number(assembly.trainer._optim_count),
            on_lost=warn,
        )
        opened.callback(collector.shutdown)
        return collector

    def publish() -> None:
        """What rollouts begin with may be the weights of a checkpoint."""
        weights = TensorDict.from_module(assembly.loss.actor_network)
        assembly.trainer.collector.publish(weights, assembly.trainer._optim_count)

    assembly = assemble(config, parts, make_collector=make_collector, prepare_env=_freeze)
    assembly.trainer.register_op("setup", publish)
    return ClusterAssembly(**vars(assembly))


def _with_learners(
    config: RunConfig, parts: UserParts, warn: Callable[[str], None], opened: ExitStack
) -> ClusterAssembly:
    """Collectors, a replay service and learners, all elsewhere."""
    assembly = assemble(config, parts, prepare_env=_freeze)
    local: Any = assembly.trainer
    memory: ReplayMemory = local.memory
    service = ReplayService(assembly.replay_buffer, config.ray.learners)
    opened.callback(service.close)
    ahead = 0
    if not config.ray.sync:
        given = config.ray.max_frames_ahead
        ahead = config.collector.frames_per_batch if given is None else given
    collector = ClusterCollector(
        Task(
            config,
            parts,
            {
                "keys": stored_keys(assembly.loss),
                "n_steps": memory.n_steps,
                "gamma": config.loss.gamma,
                "reward_keys": assembly.loss.reward_keys,
                "every_next_state": memory.every_next_state,
            },
        ),
        exploring(config, assembly.loss.actor_network),
        frames_ahead=ahead,
        replay_buffer=service,
        statistics=Statistics(assembly.env),
        first_number=lambda: Workplace.first_number(memory.gaps + 1),
        on_lost=warn,
    )
    trainer = ClusterTrainer(local, config=config, collector=collector, replay_buffer=service)
    opened.callback(trainer.shutdown)
    return ClusterAssembly(assembly.env, assembly.collector, assembly.loss, trainer, service)
