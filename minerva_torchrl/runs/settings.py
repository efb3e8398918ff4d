"""Where settings come from: Hydra's command line, a dictionary, or the folder of a run."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from minerva_torchrl.algorithms import ALGORITHMS, RunConfig
from minerva_torchrl.algorithms.ray_config import RayConfig
from minerva_torchrl.runs.manifest import CheckpointError
from minerva_torchrl.runs.settings_file import read_settings_text
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
_EXECUTION = ("device", "num_threads", "replay_buffer.device", "checkpoint.", "logger.")
# Settings that may be changed when a run is resumed.
_CHANGEABLE = ("total_frames", *_EXECUTION, "eval.video", "ray.")
# Sections that may have settings of any name.
_FREE_SECTIONS = ("env.kwargs", "network.critic_kwargs", "loss.objectives")
# Settings that have no influence on what a run learns.
_WITHOUT_INFLUENCE = (*_EXECUTION, "compile.", "eval.", "run_dir", "resume", "trust")
# What reading settings that nobody wrote on purpose ends in.
_UNUSABLE = (
    YAMLError,
    OmegaConfBaseException,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    RecursionError,
)


def parse_config(algo: str, settings: Mapping[str, Any]) -> RunConfig:
    """Settings of an algorithm from plain data; what is not there has its default.

    Args:
        algo (str): name of the algorithm, for example ``"mpo"``.
        settings (mapping): with sections as mappings. ``"preset"`` names a preset that the others
            change.

    Returns:
        The settings, checked.

    Examples:
        >>> parse_config("mpo", {"preset": "acme", "seed": 3}).loss.init_temperature
        10.0
        >>> parse_config("mpo", {"optim": {"lr": 1e-3}})
        Traceback (most recent call last):
        ...
        minerva_torchrl.runs.strict.ConfigError: there is no setting 'optim.lr'. ...
    """
    if algo not in ALGORITHMS:
        raise ConfigError([f"algo must be one of {', '.join(ALGORITHMS)}, got {algo!r}."])
    algorithm = ALGORITHMS[algo]
    preset = settings.get("preset", "default")
    if not isinstance(preset, str) or preset not in algorithm.presets:
        allowed = ", ".join(algorithm.presets)
        raise ConfigError([f"preset must be one of {allowed} for {algo}, got {preset!r}."])
    merged = _merge(algorithm.presets[preset].settings(), settings)
    for old, new in _rename(merged, algorithm.renamed):
        warnings.warn(_is_now(old, new), FutureWarning, stacklevel=2)
    config = parse(algorithm.config_class, merged)
    problems = list(config.problems())
    if problems:
        raise ConfigError(problems)
    return config


def load_config(run_dir: Path) -> RunConfig:
    r"""The settings in the folder of a run. Code that they name is not imported.

    Args:
        run_dir (Path): folder of the run.

    Returns:
        The settings, checked.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.yaml").write_text("algo: mpo\nseed: 3")
        >>> load_config(folder).seed
        3
    """
    file = run_dir / "config.yaml"
    if not run_dir.is_dir():
        raise CheckpointError(f"there is no run in {run_dir}: no such folder.")
    try:
        settings: Any = OmegaConf.to_container(OmegaConf.create(read_settings_text(file)))
        algo = settings["algo"]
        if algo in ALGORITHMS:
            _rename(settings, ALGORITHMS[algo].renamed)
            # What the file lacks did not exist then, so it is not what a preset says today.
            earlier = asdict(ALGORITHMS[algo].config_class())
            for name, value in ALGORITHMS[algo].earlier.items():
                _set(earlier, name, value)
            settings = _merge(earlier, settings)
        # Whether the folder is trusted is not for the folder to say.
        return parse_config(algo, {**settings, "trust": False})
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no run in {run_dir}: it has no config.yaml. If a run was stopped before it "
            f"began, start it again with run_dir={hydra_text(str(run_dir))}."
        ) from None
    except ConfigError as error:
        raise CheckpointError(f"{file} has settings that can't be used: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}.") from None
    except _UNUSABLE as error:
        reason = str(error) if type(error) is ValueError else type(error).__name__
        message = f"{file} is not the configuration of a run ({reason})."
        raise CheckpointError(" ".join(message.split())) from None


def resumed_config(run_dir: Path, overrides: Mapping[str, Any]) -> RunConfig:
    """The settings of a run to go on with, some of them changed.

    Args:
        run_dir (Path): folder of the run.
        overrides (mapping): dotted names and new values. Of settings that can't change, they must
            be the old ones.
    """
    config = load_config(run_dir)
    settings = asdict(config)
    fixed = [
        name
        for name, value in overrides.items()
        if not name.startswith(_CHANGEABLE) and not _has(settings, name, value)
    ]
    if fixed:
        allowed = ", ".join(name + "*" * name.endswith(".") for name in _CHANGEABLE)
        raise ConfigError(
            [f"{name} can't change when a run is resumed. What can: {allowed}." for name in fixed]
        )
    for name, value in overrides.items():
        _set(settings, name, value)
    if settings["ray"]["collectors"] and config.shared_batch is not None:
        settings["compile"]["enabled"] = False  # not for learners on a cluster
    if not settings["ray"]["collectors"]:  # the rest of the section is for a cluster only
        named = {name.partition(".")[2] for name in overrides if name.startswith("ray.")}
        kept = {name: settings["ray"][name] for name in named & settings["ray"].keys()}
        settings["ray"] = {**asdict(RayConfig()), **kept}
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
    env = re.sub(r"[^\w.-]+", "_", config.env.name.replace("gym:", "")).strip("_")
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

    They become the node ``defaults`` and the group ``preset``. The node ``train`` is both, without
    the files that Hydra would write: it is what a configuration file starts from. What Hydra puts
    together is plain data, which :func:`parse_config` checks.

    Args:
        algo (str): name of the algorithm, for example ``"mpo"``.

    Examples:
        >>> register_configs("mpo")
    """
    store = ConfigStore.instance()
    store.repo.pop("preset", None)  # of another algorithm
    store.store(name="defaults", node=asdict(ALGORITHMS[algo].config_class()))
    for name, preset in ALGORITHMS[algo].presets.items():
        node = {"preset": name, **preset.settings()}
        store.store(group="preset", name=name, node=node, package="_global_")
    store.store(name="train", node=_HYDRA)


# Runs make folders of their own, and what Hydra would add to the present one is not needed.
_HYDRA = {
    "defaults": [
        "defaults",
        {"preset": "default"},
        "_self_",
        {"override hydra/job_logging": "none"},
        {"override hydra/hydra_logging": "none"},
    ],
    "hydra": {
        "output_subdir": None,
        "run": {"dir": "."},
        "sweep": {"dir": ".", "subdir": "."},
    },
}


def check_overrides(algo: str, arguments: Sequence[str] | None = None) -> list[str]:
    """End the program with a message if the command line names a setting that does not exist.

    Hydra would do the same without saying what is allowed. Old names of settings are replaced by
    the new ones, with a warning.

    Args:
        algo (str): name of the algorithm, for example ``"mpo"``.
        arguments (sequence of str, optional): defaults to ``sys.argv[1:]``, which then is changed.

    Returns:
        The arguments, with new names.

    Examples:
        >>> check_overrides("mpo", ["seed=1"])
        ['seed=1']
    """
    checked = list(sys.argv[1:] if arguments is None else arguments)
    algorithm = ALGORITHMS[algo]
    problems = list(_not_overrides(checked, algorithm.config_class))
    for index, argument in enumerate(checked):
        if argument.startswith("-") or "=" not in argument:
            continue
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException:
            continue  # Hydra says what is wrong with it
        name = override.key_or_group
        if name in algorithm.renamed:
            sys.stderr.write(f"warning: {_is_now(name, algorithm.renamed[name])}\n")
            checked[index] = argument.replace(name, algorithm.renamed[name], 1)
        elif name == "preset" and str(override.value()) not in algorithm.presets:
            if not override.is_sweep_override():
                allowed = ", ".join(algorithm.presets)
                problems.append(f"preset must be one of {allowed}, got {override.value()!r}.")
        elif not name.startswith(("hydra.", "hydra/")):
            problems += filter(None, [unknown_setting(algorithm.config_class, name)])
            if name.startswith(_FREE_SECTIONS) and argument.startswith(_FREE_SECTIONS):
                checked[index] = f"++{argument}"  # Hydra would want names that it knows
    if problems:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
        raise SystemExit(2)
    if arguments is None:
        sys.argv[1:] = checked
    return checked


def _not_overrides(arguments: Sequence[str], kind: type) -> Iterator[str]:
    """What to say about arguments that look like settings, but are not written as such."""
    flags = {
        flag: action.nargs
        for action in get_args_parser()._actions
        for flag in action.option_strings
    }
    takes_value = False
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, value = argument.partition("=")
        if name in flags:
            takes_value = flags[name] != 0 and not has_value
            continue
        if not takes_value and (argument.startswith("-") or not (has_value or "~" in argument)):
            setting = name.lstrip("-").replace("-", "_")
            value = value if has_value else following
            if unknown_setting(kind, setting) is None and setting:
                value = value if value and not value.startswith("-") else "VALUE"
                yield f"settings are written as name=value: {setting}={value}, not {argument!r}."
            elif argument.startswith("-"):
                yield f"there is no flag {argument!r}. Settings are written as name=value."
            else:
                yield f"settings are written as name=value, got {argument!r}."
            takes_value = True  # what follows would be its value
            continue
        takes_value = False


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


def _rename(settings: dict[str, Any], names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Put settings under their new names, in place; returns the old and new ones that were."""
    found = []
    for old, new in names.items():
        section, _, name = old.rpartition(".")
        if name in _section(settings, section):
            _set(settings, new, _section(settings, section).pop(name))
            found.append((old, new))
    return found


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        if isinstance(value, Mapping):
            section = merged.get(name)
            merged[name] = _merge(section if isinstance(section, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged


def _section(settings: Any, name: str) -> dict[str, Any]:
    """A section by its dotted name; an empty one if there is none, or something else."""
    for part in filter(None, name.split(".")):
        settings = settings.setdefault(part, {})
    return settings if isinstance(settings, dict) else {}


def _has(settings: Any, name: str, value: Any) -> bool:
    """Whether a setting exists and has this value."""
    for part in name.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return False
        settings = settings[part]
    if isinstance(settings, tuple):
        settings = list(settings)
    return bool(settings == value)


def _set(settings: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    section, _, last = name.rpartition(".")
    _section(settings, section)[last] = value
    return settings


def _is_now(old: str, new: str) -> str:
    return f"the setting {old} is now called {new}."
