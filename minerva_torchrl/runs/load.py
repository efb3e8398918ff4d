"""A trained policy from the folder of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torchrl.envs import TransformedEnv

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs.assemble import (
    evaluation_seed,
    make_actor_and_loss,
    make_evaluation_env,
    make_training_env,
)
from minerva_torchrl.runs.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from minerva_torchrl.runs.parts import Networks, UserParts, find_parts, with_names
from minerva_torchrl.runs.policy import DeployedPolicy
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
    checkpoint: Checkpoint
    actor: ProbabilisticTensorDictSequential
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
        path (Path or str): folder of the run, or of one of its checkpoints.

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
    is_run = os.path.lexists(path / "checkpoints")
    checkpoint = open_checkpoint(path, name) if is_run else open_checkpoint(path)
    run_dir = path if is_run else checkpoint.path.parent.parent
    config = load_config(run_dir)
    if checkpoint.metadata.get("algo") != config.algo:
        raise CheckpointError(f"{checkpoint.path} is not a checkpoint of the run in {run_dir}.")
    given = {"network.factory": networks, "env.factory": make_env}
    again = {"callbacks", *(name for name, part in given.items() if part is not None)}
    config = with_names(config, networks, make_env)
    check_trust(config, run_dir, named_again=again, trust=trust)
    parts = find_parts(config, networks=networks, make_env=make_env)
    one = replace(config, env=replace(config.env, num_envs=1, num_workers=0))
    env = make_training_env(one, parts)
    loss = make_actor_and_loss(one, env, torch.device("cpu"), parts)
    restore_model(loss, env, checkpoint)
    return TrainedPolicy(config, checkpoint, loss.actor_network, env, parts)
