"""Code that settings name is imported only if the user asked for it.

Whoever starts a run names its code. Whoever goes on with a run, or evaluates it, may have the
folder from somebody else: what its ``config.yaml`` names is imported only if the user names it
again, or says that the folder is trusted.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs.manifest import CheckpointError

__all__ = ["check_trust", "code_in"]


def code_in(config: RunConfig) -> dict[str, str]:
    """Settings that name code, and what they name: all that a run of these settings would import.

    Args:
        config (RunConfig): the settings.

    Examples:
        >>> from minerva_torchrl.runs import parse_config
        >>> code_in(parse_config("ppo", {"env": {"name": "gym:my_package:Task-v0"}}))
        {'env.name': 'gym:my_package:Task-v0'}
        >>> code_in(parse_config("ppo", {"env": {"name": "gym:Pendulum-v1"}}))
        {}
    """
    code = {}
    if config.env.factory is not None:
        code["env.factory"] = config.env.factory
    elif config.env.name.startswith("gym:") and ":" in config.env.name.removeprefix("gym:"):
        code["env.name"] = config.env.name  # Gymnasium imports the module
    if config.env.wrappers:
        code["env.wrappers"] = f"[{','.join(config.env.wrappers)}]"
    if config.network.factory is not None:
        code["network.factory"] = config.network.factory
    if config.callbacks:
        code["callbacks"] = f"[{','.join(config.callbacks)}]"
    return code


def check_trust(
    config: RunConfig, run_dir: Path, *, named_again: Collection[str] = (), trust: bool = False
) -> None:
    """Raise if the settings in the folder of a run name code that the user did not ask for.

    Args:
        config (RunConfig): the settings that are in the folder.
        run_dir (Path): the folder.

    Keyword Args:
        named_again (collection of str): settings that the user gave again.
        trust (bool): whether the user trusts all of them. Defaults to ``False``.
    """
    code = [f"{name}={text}" for name, text in code_in(config).items() if name not in named_again]
    if code and not trust:
        raise CheckpointError(
            f"{run_dir / 'config.yaml'} names code, which is not imported without your word: "
            f"{' '.join(code)}. If you trust it, add trust=true to resume=..., --trust to "
            "evaluate, trust=True in Python; or give the same again."
        )
