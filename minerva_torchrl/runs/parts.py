"""Networks, environments and callbacks of the user's: objects, or names of what to import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import isclass, isfunction, signature
from pathlib import Path
from typing import Any

from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.envs import make_env as make_env_by_name
from minerva_torchrl.runs.callbacks import Callback
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.runs.trust import code_in
from minerva_torchrl.text import close_names, did_you_mean

__all__ = ["Networks", "UserParts", "find_callbacks", "find_parts", "with_names"]

Networks = Callable[[EnvBase, Any], tuple[Any, Any]] | tuple[Any, Any]
"""A function of the environment and the settings that returns policy and critic, or both."""


@dataclass(frozen=True)
class UserParts:
    """What a run uses in place of its own; ``None`` where it has nothing of the user's."""

    networks: Networks | None
    make_env: Callable[..., Any] | None
    wrappers: tuple[Callable[..., Any], ...]
    networks_title: str
    env_title: str

    def make_networks(self, env: EnvBase, config: RunConfig) -> tuple[nn.Module, Any]:
        """The user's policy, and critic or list of critics, if they are such."""
        made = self.networks(env, config) if callable(self.networks) else self.networks
        if isinstance(made, (tuple, list)) and len(made) == 2:
            actor, critic = made
            critics = critic if isinstance(critic, (list, tuple)) else [critic]
            is_policy = isinstance(actor, ProbabilisticTensorDictSequential)
            are_critics = all(isinstance(one, TensorDictModuleBase) for one in critics)
            if is_policy and are_critics and critics:
                if getattr(actor, "spec", {}).get("action", None) is None:
                    problem = "needs spec=env.action_spec_unbatched for its policy."
                    raise ConfigError([f"{self.networks_title} {problem}"])
                return actor, critic
            kinds = [type(actor), *map(type, critics)]
            got = ", ".join(kind.__name__ for kind in kinds)
        else:
            got = type(made).__name__
        raise ConfigError(
            [
                f"{self.networks_title} must give a policy (a ProbabilisticActor of TorchRL) and a "
                f"critic (a TensorDictModule) or a list of critics, got {got}."
            ]
        )

    def simulator(self, config: RunConfig, *, video: bool) -> tuple[Any, dict[str, Any]]:
        """The first argument of :func:`~minerva_torchrl.make_env`, and those of the task.

        Args:
            config (RunConfig): the settings.

        Keyword Args:
            video (bool): whether Gymnasium environments must draw pictures.
        """
        kwargs = dict(config.env.kwargs)
        pictures = {"render_mode": "rgb_array", **kwargs}
        if self.make_env is None:
            is_gym = config.env.name.startswith("gym:")
            return config.env.name, pictures if video and is_gym else kwargs
        takes_mode = _misfit(self.make_env, **pictures) is None
        return partial(self.make_env, **(pictures if video and takes_mode else kwargs)), {}


def find_parts(
    config: RunConfig,
    *,
    networks: Networks | None = None,
    make_env: Callable[..., Any] | None = None,
) -> UserParts:
    """Import what the settings name, and check that it can be called.

    Args:
        config (RunConfig): the settings.

    Keyword Args:
        networks (callable or pair, optional): to be used in place of ``network.factory``.
        make_env (callable, optional): to be used in place of ``env.factory``.
    """
    if code_in(config):
        _make_current_folder_importable()
    networks_title, env_title = "networks", "make_env"
    if networks is None and config.network.factory is not None:
        networks_title = f"network.factory={config.network.factory}"
        networks = _import("network.factory", config.network.factory)
    if make_env is None and config.env.factory is not None:
        env_title = f"env.factory={config.env.factory}"
        make_env = _import("env.factory", config.env.factory)
    if callable(networks) and not isinstance(networks, nn.Module):
        reason = _misfit(networks, None, None)
        if reason is not None:
            problem = f"{networks_title} must take the environment and the settings: {reason}."
            raise ConfigError([problem])
    elif networks is not None and not isinstance(networks, (tuple, list)):
        raise ConfigError(
            [
                "networks must be a function of environment and settings, or a pair of policy and "
                f"critic, got {type(networks).__name__}."
            ]
        )
    if make_env is None:
        _check_names(config)
    elif not callable(make_env):
        raise ConfigError([f"make_env must be callable, got {type(make_env).__name__}."])
    else:
        reason = _misfit(make_env, **config.env.kwargs)
        if reason is not None:
            problem = f"{env_title} can't be called with what env.kwargs has: {reason}."
            raise ConfigError([problem])
    wrappers = tuple(_import("env.wrappers", name) for name in config.env.wrappers)
    return UserParts(networks, make_env, wrappers, networks_title, env_title)


def find_callbacks(config: RunConfig) -> Sequence[Callback]:
    """Import the callbacks that the settings name, and make them.

    Args:
        config (RunConfig): the settings.
    """
    if config.callbacks:
        _make_current_folder_importable()
    callbacks = []
    for name in config.callbacks:
        make = _import("callbacks", name)
        reason = _misfit(make)
        if reason is not None:
            raise ConfigError([f"callbacks: {name} must need no arguments: {reason}."])
        callback = make()
        if not isinstance(callback, Callback):
            kind = type(callback).__name__
            raise ConfigError([f"callbacks: {name} must give a Callback, got {kind}."])
        callbacks.append(callback)
    return callbacks


def with_names(
    config: RunConfig, networks: Networks | None, make_env: Callable[..., Any] | None
) -> RunConfig:
    """Settings that say of which objects a run was made, as far as names can.

    Args:
        config (RunConfig): the settings.
        networks (callable or pair, optional): given in place of ``network.factory``.
        make_env (callable, optional): given in place of ``env.factory``.
    """
    if networks is not None:
        config = replace(config, network=replace(config.network, factory=_name(networks)))
    if make_env is not None:
        config = replace(config, env=replace(config.env, factory=_name(make_env)))
    return config


# Names -------------------------------------------------------------------------------------------


def _name(part: Any) -> str:
    """``module:name``; in angle brackets if nothing can be imported under it."""
    kind = part if isfunction(part) or isclass(part) else type(part)
    name = f"{kind.__module__}:{kind.__qualname__}"
    importable = kind is part and kind.__module__ != "__main__" and "<" not in name
    return name if importable else f"<{name}>"


def _import(setting: str, text: str) -> Callable[..., Any]:
    """What ``module:name`` stands for, which must be callable."""
    module_name, colon, name = text.partition(":")
    if text.startswith("<"):
        argument = {"network.factory": "networks", "env.factory": "make_env"}.get(setting, setting)
        raise ConfigError(
            [f"{setting}={text} is an object that was given in Python: pass {argument}=... again."]
        )
    if not (colon and module_name and name):
        raise ConfigError([f"{setting} must be written as module:name, got {text!r}."])
    try:
        found: Any = import_module(module_name)
    except (ImportError, SyntaxError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError([f"{setting}: {module_name} can't be imported ({reason})."]) from error
    for part in name.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(close_names(part, dir(found)))
            raise ConfigError([f"{setting}: there is no {name} in {module_name}.{hint}"])
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError([f"{setting}: {text} must be callable, and is {type(found).__name__}."])
    return found


def _make_current_folder_importable() -> None:
    """As it is with ``python -m``, also if a script was started."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


# Calls -------------------------------------------------------------------------------------------


def _misfit(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Why a function can't be called with some arguments; ``None`` if it can."""
    try:
        parameters = signature(function)
    except (ValueError, TypeError):  # of some that are not written in Python
        return None
    try:
        parameters.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _check_names(config: RunConfig) -> None:
    """Raise if ``env.kwargs`` has what a setting of its own is for."""
    taken = {*signature(make_env_by_name).parameters, "categorical_actions"}
    names = [name for name in config.env.kwargs if name in taken]
    if names:
        raise ConfigError(
            [
                f"env.kwargs.{name} can't reach {config.env.name}: it is for make_env."
                for name in names
            ]
        )
