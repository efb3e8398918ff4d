"""Whether a run fits the machine, found out before anything large is made."""

from __future__ import annotations

import os
from pathlib import Path

from torchrl.envs import EnvBase

from minerva_torchrl.algorithms import RunConfig
from minerva_torchrl.runs.strict import ConfigError

__all__ = ["check_copies", "check_memory", "check_threads", "free_memory"]

# What a copy of a task takes at least, and a process with its libraries, in bytes.
_COPY, _PHYSICS, _PROCESS = 3e4, 1e6, 2e8
_MOST_THREADS = 256


def free_memory() -> float:
    """Bytes that can still be used: of the machine, or of the control group if that has less."""
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):  # with what caches would give back
            free = 1024.0 * int(line.split()[1])
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        values = [next(iter(_lines(Path(folder, name))), "") for name in (limit, used)]
        if all(value.isdigit() for value in values):
            free = min(free, float(values[0]) - float(values[1]))
    return max(free, 0.0)


def check_threads(config: RunConfig) -> None:
    """Raise if torch can't have so many threads."""
    most = max(_MOST_THREADS, os.cpu_count() or 1)
    if config.num_threads > most:
        raise ConfigError(
            [
                f"num_threads must be at most {most} (this machine has {os.cpu_count()} "
                f"processors), got {config.num_threads}."
            ]
        )


def check_copies(config: RunConfig, *, episodes: int | None = None) -> None:
    """Raise if there are more copies of the task, or processes, than fit the memory.

    Args:
        config (RunConfig): the settings.

    Keyword Args:
        episodes (int, optional): copies for evaluation. Defaults to ``eval.episodes``; if it is
            given, nothing is trained.
    """
    name = config.env.name
    is_light = name.startswith("gym:") or config.env.factory is not None
    copy = _COPY if is_light else _PHYSICS
    if episodes is not None:
        _check([(f"{episodes} episodes side by side", copy * episodes)])
        return
    _check(
        [
            (f"env.num_envs={config.env.num_envs}", copy * config.env.num_envs),
            (f"env.num_workers={config.env.num_workers}", _PROCESS * config.env.num_workers),
            (f"eval.episodes={config.eval.episodes}", copy * config.eval.episodes),
        ]
    )


def check_memory(config: RunConfig, env: EnvBase) -> None:
    """Raise if networks, replay buffer and batches do not fit the memory.

    Args:
        config (RunConfig): the settings.
        env (EnvBase): the environment, which has the sizes of observations and actions.
    """
    observation = env.observation_spec["observation"].shape[-1]
    parts = env.full_action_spec.values(True, True)
    action = sum(part.shape[-1] if len(part.shape) else 1 for part in parts)
    _check(list(config.memory(observation, action)))


def _check(needs: list[tuple[str, float]]) -> None:
    total, free = sum(size for _, size in needs), free_memory()
    if total > free:
        needs = sorted(needs, key=lambda need: -need[1])
        large = [f"{what} {_gigabytes(size)}" for what, size in needs if size > 0.1 * total]
        raise ConfigError(
            [
                f"there is not enough memory: the run needs about {_gigabytes(total)}, and "
                f"{_gigabytes(free)} are free. What needs most: {', '.join(large)}."
            ]
        )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, ValueError):
        return []
