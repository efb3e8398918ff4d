"""Where settings come from: Hydra's command line, a dictionary, or the folder of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from minerva_torchrl.presets import PRESETS
from minerva_torchrl.runs.checkpoints import CheckpointError
from minerva_torchrl.runs.config import CONFIGS, RunConfig
from minerva_torchrl.runs.strict import ConfigError, parse, unknown_setting

__all__ = [
    "affects_learning",
    "check_overrides",
    "default_run_dir",
    "hydra_text",
    "load_config",
    "parse_config",
    "register_configs",
    "resumed_config",
]

# How a run is executed and recorded. A name that ends with a dot is a whole section.
_EXECUTION = ("device", "num_threads", "checkpoint.", "logger.")
# Settings that may be changed when a run is resumed.
_CHANGEABLE = ("total_frames", *_EXECUTION, "eval.video")
# Settings that have no influence on what a run learns.
_WITHOUT_INFLUENCE = (*_EXECUTION, "eval.", "run_dir", "resume")


def parse_config(algo: str, settings: Mapping[str, Any]) -> RunConfig:
    """Settings of an algorithm from plain data; what is not there has its default.

    Args:
        algo (str): ``"mpo"``, ``"vmpo"`` or ``"ppo"``.
        settings (mapping): with sections as mappings. ``"preset"`` names a preset that the others
            change.

    Examples:
        >>> parse_config("mpo", {"preset": "acme", "seed": 3}).loss.init_temperature
        10.0
        >>> parse_config("mpo", {"optim": {"lr": 1e-3}})
        Traceback (most recent call last):
        ...
        minerva_torchrl.runs.strict.ConfigError: there is no setting 'optim.lr'. ...
    """
    if algo not in CONFIGS:
        raise ConfigError([f"algo must be one of {', '.join(CONFIGS)}, got {algo!r}."])
    preset = settings.get("preset", "default")
    if not isinstance(preset, str) or preset not in PRESETS[algo]:
        raise ConfigError(
            [f"preset must be one of {', '.join(PRESETS[algo])} for {algo}, got {preset!r}."]
        )
    merged = _merge(PRESETS[algo][preset].settings(), settings)
    config = parse(CONFIGS[algo], merged)
    problems = list(config.problems())
    if problems:
        raise ConfigError(problems)
    return config


def load_config(run_dir: Path) -> RunConfig:
    """The settings in the folder of a run."""
    file = run_dir / "config.yaml"
    if not run_dir.is_dir():
        raise CheckpointError(f"there is no run in {run_dir}: no such folder.")
    try:
        settings: Any = OmegaConf.to_container(OmegaConf.load(file))
        return parse_config(settings["algo"], settings)
    except FileNotFoundError:
        raise CheckpointError(f"there is no run in {run_dir}: it has no config.yaml.") from None
    except ConfigError as error:
        raise CheckpointError(f"{file} has settings that can't be used: {error}") from None
    except (YAMLError, OmegaConfBaseException, OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{file} is not the configuration of a run.") from None


def resumed_config(run_dir: Path, overrides: Mapping[str, Any]) -> RunConfig:
    """The settings of a run to go on with, some of them changed.

    Args:
        run_dir (Path): folder of the run.
        overrides (mapping): dotted names and new values.
    """
    fixed = [name for name in overrides if not name.startswith(_CHANGEABLE)]
    if fixed:
        allowed = ", ".join(name + "*" * name.endswith(".") for name in _CHANGEABLE)
        raise ConfigError(
            [f"{name} can't change when a run is resumed. What can: {allowed}." for name in fixed]
        )
    config = load_config(run_dir)
    settings = asdict(config)
    for name, value in overrides.items():
        section, names = settings, name.split(".")
        for part in names[:-1]:
            section = section[part]
        section[names[-1]] = value
    return parse_config(config.algo, settings)


def affects_learning(name: str) -> bool:
    """Whether a setting has an influence on what a run learns.

    Args:
        name (str): its dotted name.

    Examples:
        >>> affects_learning("optim.lr_actor"), affects_learning("eval.episodes")
        (True, False)
    """
    return not name.startswith(_WITHOUT_INFLUENCE)


def default_run_dir(config: RunConfig) -> Path:
    """A folder in ``runs/`` that is not there yet, named after the run."""
    env = config.env.name.replace("gym:", "").replace("/", "_")
    preset = "" if config.preset == "default" else f"_{config.preset}"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{config.algo}{preset}_{env}_seed{config.seed}_{stamp}"
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


# Hydra -------------------------------------------------------------------------------------------


def register_configs(algo: str) -> None:
    """Tell Hydra the settings of an algorithm and its presets.

    They become the node ``defaults`` and the group ``preset``. What Hydra puts together is plain
    data, which :func:`parse_config` checks.

    Args:
        algo (str): ``"mpo"``, ``"vmpo"`` or ``"ppo"``.
    """
    store = ConfigStore.instance()
    store.repo.pop("preset", None)  # of another algorithm
    store.store(name="defaults", node=asdict(CONFIGS[algo]()))
    for name, preset in PRESETS[algo].items():
        node = {"preset": name, **preset.settings()}
        store.store(group="preset", name=name, node=node, package="_global_")


def check_overrides(algo: str, arguments: Sequence[str] | None = None) -> None:
    """End the program with a message if the command line names a setting that does not exist.

    Hydra would do the same without saying what is allowed.

    Args:
        algo (str): ``"mpo"``, ``"vmpo"`` or ``"ppo"``.
        arguments (sequence of str, optional): defaults to ``sys.argv[1:]``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    problems = []
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:
            continue  # Hydra says what is wrong with it
        name = override.key_or_group
        if name == "preset" and str(override.value()) not in PRESETS[algo]:
            if not override.is_sweep_override():
                allowed = ", ".join(PRESETS[algo])
                problems.append(f"preset must be one of {allowed}, got {override.value()!r}.")
        elif name.split(".")[0] != "hydra":
            problems += filter(None, [unknown_setting(CONFIGS[algo], name)])
    if problems:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
        raise SystemExit(2)


def hydra_text(text: str) -> str:
    """A text as the value of an override: in quotes, unless Hydra reads it as it is.

    Examples:
        >>> hydra_text("runs/walker"), hydra_text("1e-3"), hydra_text("a b")
        ('runs/walker', '"1e-3"', 'a b')
    """
    try:
        parsed = OverridesParser.create().parse_override(f"name={text}").value()
    except HydraException:
        parsed = None
    return text if parsed == text else QuotedString(text, Quote.double).with_quotes()


def explicit_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Names and values of overrides as Hydra parses them."""
    overrides = OverridesParser.create().parse_overrides(list(arguments))
    return {override.key_or_group: override.value() for override in overrides}


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = _merge(merged[name], value)
        else:
            merged[name] = value
    return merged
