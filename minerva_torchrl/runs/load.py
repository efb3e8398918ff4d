"""A trained policy from the folder of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torchrl.envs import TransformedEnv
from torchrl.objectives.common import LossModule

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs.assemble import (
    evaluation_seed,
    make_actor_and_loss,
    make_evaluation_env,
    make_training_env,
)
from minerva_torchrl.runs.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from minerva_torchrl.runs.evaluation import evaluate
from minerva_torchrl.runs.parts import Networks, UserParts, find_parts, with_names
from minerva_torchrl.runs.policy import DeployedPolicy
from minerva_torchrl.runs.published import (
    is_published,
    publish,
    published_frames,
    restore_published,
)
from minerva_torchrl.runs.settings import load_config
from minerva_torchrl.runs.snapshot import restore_model
from minerva_torchrl.runs.trust import check_trust

__all__ = ["TrainedPolicy", "load_policy"]


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy, and what it was trained with.

    :meth:`predict` acts in the bare environment, and :meth:`export` writes a file that does;
    ``actor`` acts in TorchRL environments from :meth:`make_env`.
    """

    config: RunConfig
    """The settings of its run."""
    frames: int
    """How long it was trained."""
    actor: ProbabilisticTensorDictSequential
    """The policy, as TorchRL has it."""
    checkpoint: Checkpoint | None
    """That it is from, ``None`` for a policy that was published."""
    _loss: LossModule
    _training_env: TransformedEnv
    _parts: UserParts

    @property
    def evaluation_seed(self) -> int:
        """Seed of the run's evaluations."""
        return evaluation_seed(self.config)

    def make_env(
        self, *, episodes: int = 1, seed: int | None = None, video: bool = False
    ) -> TransformedEnv:
        """Environments as in the run's evaluation, with the statistics of its observations.

        Keyword Args:
            episodes (int): number of copies. Defaults to ``1``.
            seed (int, optional): their seed. Defaults to that of the run's evaluations.
            video (bool): let them be rendered. Defaults to ``False``.
        """
        seed = self.evaluation_seed if seed is None else seed
        settings = replace(self.config.eval, episodes=episodes, seed=seed, video=video)
        config = replace(self.config, eval=settings)
        return make_evaluation_env(config, self._training_env, self._parts)

    @cached_property
    def deployed(self) -> DeployedPolicy:
        """The policy with normalisation and action bounds inside, as a module of torch."""
        return DeployedPolicy(self.actor, self._training_env)

    def predict(self, observation: Any, *, deterministic: bool = True) -> Any:
        """Actions as the bare environment takes them, see :meth:`DeployedPolicy.predict`.

        In training each action was repeated ``config.env.frame_skip`` times.
        """
        return self.deployed.predict(observation, deterministic=deterministic)

    def export(self, path: Path | str) -> None:
        """Write the policy to a file ``.pt2`` or ``.onnx``, see :meth:`DeployedPolicy.export`."""
        self.deployed.export(path)

    def publish(
        self, path: Path | str, *, card: Mapping[str, Any] = {}, episodes: int = 10
    ) -> None:
        """Write what others need to act as this policy does, and see what they then should see.

        The folder has ``policy.safetensors``, the settings, and ``card.json`` with the returns of
        some episodes, the versions of packages, and what else you say. :func:`load_policy` and
        ``python -m minerva_torchrl evaluate`` take it as they take the folder of a run.

        Args:
            path (Path or str): a new or an empty folder.

        Keyword Args:
            card (mapping): more to be known about the policy, as JSON can hold it.
            episodes (int): how many episodes to evaluate. Defaults to ``10``.
        """
        env = self.make_env(episodes=episodes)
        result = evaluate(env, self.actor, seed=self.evaluation_seed)
        env.close()
        about = {
            "algo": self.config.algo,
            "task": self.config.env.name,
            "seed": self.config.seed,
            "frames": self.frames,
            "episodes": episodes,
            **result.row(),
        }
        publish(Path(path), self.config, self._loss, self._training_env, {**about, **card})


def load_policy(
    path: Path | str,
    *,
    name: str = "last",
    networks: Networks | None = None,
    make_env: Callable[..., Any] | None = None,
    trust: bool = False,
) -> TrainedPolicy:
    """Load the policy of a run, on the CPU.

    Code that the folder's settings name is not imported, unless it is trusted: a run with networks
    or environments of the user's needs them again, or ``trust=True``.

    Args:
        path (Path or str): folder of the run, of one of its checkpoints, or of a policy that was
            published.

    Keyword Args:
        name (str): ``"last"`` or ``"best"``, if ``path`` is the folder of a run. Defaults to
            ``"last"``.
        networks (callable or pair, optional): as in :class:`Run`. The trained parameters go into
            the modules of a pair.
        make_env (callable, optional): as in :class:`Run`.
        trust (bool): import the code that the folder's settings name. Defaults to ``False``.

    Returns:
        The policy, ready to act.

    Examples:
        >>> load_policy("no/such/run")
        Traceback (most recent call last):
        ...
        minerva_torchrl.runs.manifest.CheckpointError: ...
    """
    path = Path(path)
    run_dir, checkpoint = (path, None) if is_published(path) else _of_a_run(path, name)
    config = load_config(run_dir)
    if checkpoint is not None and checkpoint.metadata.get("algo") != config.algo:
        raise CheckpointError(f"{checkpoint.path} is not a checkpoint of the run in {run_dir}.")
    given = {"network.factory": networks, "env.factory": make_env}
    again = {"callbacks", *(name for name, part in given.items() if part is not None)}
    config = with_names(config, networks, make_env)
    check_trust(config, run_dir, named_again=again, trust=trust)
    parts = find_parts(config, networks=networks, make_env=make_env)
    one = replace(config, env=replace(config.env, num_envs=1, num_workers=0))
    env = make_training_env(one, parts)
    loss = make_actor_and_loss(one, env, torch.device("cpu"), parts)
    if checkpoint is None:
        restore_published(loss, env, path)
        frames = published_frames(path)
    else:
        restore_model(loss, env, checkpoint)
        frames = checkpoint.frames
    return TrainedPolicy(config, frames, loss.actor_network, checkpoint, loss, env, parts)


def _of_a_run(path: Path, name: str) -> tuple[Path, Checkpoint]:
    """The folder of a run, and its checkpoint or the one that the path is."""
    if os.path.lexists(path / "checkpoints"):
        return path, open_checkpoint(path, name)
    checkpoint = open_checkpoint(path)
    return checkpoint.path.parent.parent, checkpoint
