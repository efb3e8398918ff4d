"""Settings that must be refused: in one line each that names the setting, before anything is made.

Every setting of every algorithm gets values of the wrong type and numbers that are none; the rest
is a table of values that have the right type and make no sense.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.global_hydra import GlobalHydra

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.runs import ConfigError, Run, parse_config
from minerva_torchrl.runs.cli import run_training
from tests.campaign.case import Case
from tests.runs.tiny import COMMON, MPO, PPO, VMPO, nested

GROUP = "bad settings"

NAN, INF = math.nan, math.inf
HUGE = 10**400
SMALL: dict[str, dict[str, Any]] = {
    "mpo": {**COMMON, **MPO},
    "vmpo": {**COMMON, **VMPO},
    "ppo": {**COMMON, **PPO},
}
"""Settings that the bad one is added to."""

# Wrong types and numbers that are none, by the type of a setting.
WRONG: dict[Any, list[Any]] = {
    int: [NAN, INF, 1.5, "many", True, [1], HUGE, 2**70],
    float: [NAN, INF, -INF, "fast", True, [1.0], HUGE],
    bool: [NAN, 1, "yes", []],
    str: [NAN, 5, True, []],
    dict: [5, [1], {"a": NAN}, {"a": [INF]}],
    tuple: [5, "text", [NAN], [[1]], [None]],
}
NONSENSE: dict[str, dict[str, list[Any]]] = {
    "all": {
        "total_frames": [0, -1],
        "num_threads": [0, -4, 100_000],
        "max_skipped": [0, -1],
        "seed": [-1, 2**32],
        "eval.seed": [-1, 2**32],
        "device": ["meta", "hpu", "nonsense", "cuda:99"],
        "run_dir": ["x" * 300, "a/" * 3000, "", "a\nb", "a\0b"],
        "preset": ["nonsense"],
        "env.name": ["", "cheeta-run", "gym:", "gym:Nonsense-v7", "gym:HalfCheetah-v2"],
        "env.num_envs": [0, -1, 3, 10**9],
        "env.num_workers": [-1, 3],
        "env.frame_skip": [0, -1, 10**9],
        "env.max_episode_steps": [0, -1, 2**63],
        "env.factory": ["nonsense", "nonsense:thing", "math:pi", "math:nothing"],
        "env.wrappers": [["nonsense"], ["math:nothing"]],
        "callbacks": [["nonsense"], ["math:nothing"], ["builtins:int"]],
        "network.factory": ["nonsense", "math:nothing", "math:pi"],
        "network.actor_sizes": [[], [0], [-3], [10**9, 10**9]],
        "network.critic_sizes": [[], [0], [8, -3], [10**12]],
        "network.init_scale": [0, -1.0, 1e30],
        "collector.frames_per_batch": [0, -50, 10**15],
        "eval.interval": [0, -1, 1.5],
        "eval.episodes": [0, -1, 10_000_000_000],
        "checkpoint.interval": [0, -1],
        "checkpoint.keep": [0, -1],
        "logger.interval": [0, -1],
        "logger.backend": ["paper"],
        "logger.mode": ["sometimes"],
        "loss.gamma": [-0.1, 1.1, 1e308],
        "loss.lmbda": [-0.1, 1.1],
        "optim.adam_eps": [0.0, -1e-8, 1e30],
        "nonsense": [1],
        "optim.nonsense": [1],
    },
    "mpo": {
        "optim.updates_per_frame": [0.0, -1.0, 1e308, 1e-9],
        "optim.lr_actor": [0.0, -1e-3, 1e30],
        "optim.lr_critic": [0.0, -1e-3, 1e30],
        "optim.lr_dual": [0.0, -1e-3, 1e30],
        "optim.target_period": [0, -1],
        "optim.target_tau": [0.0, -0.1, 1.5],
        "optim.clip_actor": [0.0, -1.0],
        "optim.num_policy_steps": [0, -1],
        "network.num_critics": [0, -1, 1_000_000_000],
        "replay_buffer.size": [0, -1, 3, 10**30],
        "replay_buffer.batch_size": [0, -1, 10**9],
        "replay_buffer.n_steps": [0, -1, 16, 10**6],
        "replay_buffer.sequence_length": [0, -1, 2],
        "replay_buffer.warmup_frames": [-1, 201],
        "loss.num_action_samples": [0, -1, 10**12],
        "loss.epsilon": [0.0, -0.1, 1e30],
        "loss.epsilon_mean": [0.0, -0.1],
        "loss.epsilon_stddev": [0.0, -0.1],
        "loss.init_temperature": [0.0, -1.0, 1e-12, 1e30],
        "loss.init_alpha_mean": [0.0, -1.0, 1e-12],
        "loss.value_estimator": ["retrace", "magic"],
    },
    "vmpo": {
        "optim.minibatch_size": [0, -1, 51],
        "optim.lr_alpha": [0.0, -1.0, 1e30],
        "optim.lr_temperature": [0.0, -1.0],
        "optim.num_policy_steps": [0, -1],
        "optim.clip": [0.0, -1.0],
        "loss.top_k_fraction": [0.0, -0.5, 1.5],
        "loss.epsilon": [0.0, -0.1],
        "loss.init_temperature": [0.0, -1.0, 1e-12],
        "loss.critic_coeff": [0.0, -1.0, 1e30],
        "loss.clip_value": [0.0, -1.0],
    },
    "ppo": {
        "optim.lr": [0.0, -1.0, 1e30],
        "optim.target_kl": [0.0, -1.0],
        "optim.minibatch_size": [0, -1, 24, 51],
        "optim.num_epochs": [0, -1],
        "optim.clip": [0.0, -1.0],
        "loss.clip_epsilon": [0.0, -0.1, 1.0, 2.0],
        "loss.value_coeff": [-1.0, 1e30],
        "loss.entropy_coeff": [-1.0, 1e30],
    },
}
NEEDED = {
    "optim.target_tau": {"optim.target_period": None},
    "env.num_workers": {"env.num_envs": 2},
}
"""Settings without which another one would be refused first."""
COMMANDS: list[tuple[list[str], str]] = [
    (["--seed=1"], "seed=1"),
    (["--seed", "1"], "seed=1"),
    (["seed", "1"], "seed=1"),
    (["env.num-envs", "3"], "env.num_envs=3"),
    (["--nonsense"], "--nonsense"),
    (["nonsense"], "nonsense"),
    (["sead=1"], "Did you mean seed?"),
    (["lr=1"], "there is no setting 'lr'"),
    (["resume=5"], "resume must be"),
    (["resume=nowhere"], "nowhere"),
    (["seed="], "seed must be"),
    (["seed=null"], "seed must be"),
    (["optim.adam_eps=inf"], "optim.adam_eps must be finite"),
    (["optim.adam_eps=nan"], "optim.adam_eps must be finite"),
    (["total_frames=1e-5"], "total_frames must be"),
    (["total_frames=1_000_000_000_000_000_000_000"], "total_frames must be"),
    (["device=meta"], "device 'meta' can't be used here"),
    (["preset=nonsense"], "preset must be one of"),
    (["env.kwargs.a=inf"], "env.kwargs must be finite"),
    (["run_dir=" + "x" * 300], "run_dir is too long"),
]


def cases(rng: random.Random, quick: bool) -> Iterator[Case]:
    """Bad settings, some of them or all."""
    found = [*_wrong_types(), *_nonsense(), *_commands()]
    if quick:
        found = rng.sample(found, 120)
    yield from found


def _wrong_types() -> Iterator[Case]:
    for algo in ALGORITHMS:
        for name, kinds in _settings(ALGORITHMS[algo].config_class):
            for value in WRONG.get(kinds[0], ["nonsense", 3, NAN, []]):
                if not any(_fits(kind, value) for kind in kinds):
                    yield _case(algo, name, value)


def _nonsense() -> Iterator[Case]:
    for algo in ALGORITHMS:
        for name, values in {**NONSENSE["all"], **NONSENSE[algo]}.items():
            for value in values:
                yield _case(algo, name, value)


def _commands() -> Iterator[Case]:
    for algo in ALGORITHMS:
        for arguments, message in COMMANDS:
            name = f"{algo} {' '.join(arguments)[:60]}"
            yield Case(name, partial(_try_command, algo, arguments, message))


def _case(algo: str, name: str, value: Any) -> Case:
    shown = "10**400" if value is HUGE else repr(value)[:40]
    return Case(f"{algo} {name}={shown}", partial(_try, algo, name, value))


# Settings ----------------------------------------------------------------------------------------


def _settings(kind: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Dotted names, and the types that values may have, as their origins."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _settings(hint, f"{path}{field.name}.")
        elif field.name != "algo":
            union = get_origin(hint) in (Union, UnionType)
            options = get_args(hint) if union else (hint,)
            kinds = [getattr(option, "__origin__", option) for option in options]
            yield f"{path}{field.name}", [one for one in kinds if one is not NoneType]


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value would be right after all: the table is for the first type of a setting."""
    if kind is float and isinstance(value, float) and math.isfinite(value):
        return True
    return (kind is tuple and value == []) or (kind is int and value == 2**70)


# Trying ------------------------------------------------------------------------------------------


def _try(algo: str, name: str, value: Any, folder: Path) -> str | None:
    settings = {**SMALL[algo], **NEEDED.get(name, {}), name: value}
    run_dir = folder / "run"
    try:
        config = parse_config(algo, nested(settings))
        run = Run(config, Path(config.run_dir or run_dir), stream=io.StringIO())
    except ConfigError as error:
        return _judge(error.problems, name, folder)
    with run._opened:
        return "it was accepted"


def _judge(problems: list[str], name: str, folder: Path) -> str | None:
    if any(len(problem.splitlines()) != 1 for problem in problems):
        return f"not one line each: {problems}"
    if any(len(problem) > 1500 for problem in problems):
        return f"too long: {problems[0][:100]}..."
    if not any(name in problem for problem in problems):
        return f"the setting is not named: {problems}"
    if any(folder.iterdir()):
        return "something was made"
    return None


def _try_command(algo: str, arguments: list[str], message: str, folder: Path) -> str | None:
    small = [f"{name}={value}".replace(" ", "") for name, value in SMALL[algo].items()]
    named = {argument.partition("=")[0] for argument in arguments}
    small = [setting for setting in small if setting.partition("=")[0] not in named]
    if "run_dir" not in named and "resume" not in named:
        small.append(f"run_dir={folder}/run")
    errors, before = io.StringIO(), sys.argv
    status: Any = "none"
    try:
        with contextlib.redirect_stderr(errors):
            run_training(algo, [*small, *arguments])
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv = before
        GlobalHydra.instance().clear()
    text = errors.getvalue()
    if status not in (1, 2):
        return f"exit status {status}: {text[-200:]}"
    if "Traceback" in text or message not in text:
        return f"it said: {text[-300:]}"
    return "something was made" if any(folder.iterdir()) else None
