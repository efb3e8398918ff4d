"""How training starts from a command line: with a line at once, before PyTorch is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from minerva_torchrl.algorithms.config import RunConfig
from minerva_torchrl.runs.settings import default_run_dir, explicit_overrides, hydra_text
from minerva_torchrl.runs.settings_file import read_settings_text

__all__ = ["evaluate_main", "first_line", "quiet_interrupts", "train_main"]


def train_main(
    algo: str, arguments: Sequence[str] | None = None, *, config_dir: Path | None = None
) -> None:
    """Train as the command line says.

    Args:
        algo (str): name of the algorithm, for example ``"mpo"``.
        arguments (sequence of str, optional): settings as ``name=value``, and Hydra's flags.
            Defaults to those of the command line.

    Keyword Args:
        config_dir (Path, optional): folder with a file of settings, named after the algorithm.
            Without it there are the defaults.

    Examples:
        >>> train_main("mpo", ["sed=1"])  # prints that there is no such setting, and what is meant
        Traceback (most recent call last):
        ...
        SystemExit: 2
    """
    with quiet_interrupts():
        given = list(sys.argv[1:] if arguments is None else arguments)
        if sys.stderr.isatty():
            given = _announce(algo, given, config_dir)
        from minerva_torchrl.runs import cli

        cli.run_training(algo, given, config_dir=config_dir)


def evaluate_main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Evaluate the policy of a run as the command line says.

    Args:
        arguments (sequence of str, optional): defaults to those of the command line.

    Keyword Args:
        prog (str, optional): how the help calls the program.

    Examples:
        >>> evaluate_main(["no/such/run"])  # prints that there is no such run
        Traceback (most recent call last):
        ...
        SystemExit: 1
    """
    with quiet_interrupts():
        from minerva_torchrl.runs import cli

        cli.run_evaluation(arguments, prog=prog)


def first_line(config: RunConfig, run_dir: Path | str, *, resumed: bool = False) -> str:
    """What a run is, in one line for the person who watches.

    Args:
        config (RunConfig): its settings.
        run_dir (Path or str): its folder.

    Keyword Args:
        resumed (bool): whether it goes on. Defaults to ``False``.

    Examples:
        >>> first_line(RunConfig(algo="mpo"), "runs/one")
        'mpo cartpole-balance, seed 0, device auto: runs/one'
    """
    name = f"{config.algo} {config.env.name}, seed {config.seed}, device {config.device}"
    text = f"{name}: {'going on in ' if resumed else ''}{run_dir}"
    return "".join(sign if sign.isprintable() else "?" for sign in text)  # nothing for a terminal


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """End the program on Ctrl-C with a word in place of a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped.\n")
        raise SystemExit(130) from None


def _announce(algo: str, arguments: list[str], config_dir: Path | None) -> list[str]:
    """Say what begins. Returns the arguments, which then name the folder of the run.

    What is wrong with them is not said here, but where they are checked.
    """
    if any(argument.startswith("-") for argument in arguments):
        return arguments
    try:
        given = explicit_overrides(arguments)
        file = None if config_dir is None else config_dir / f"{algo}.yaml"
        resume = given.get("resume")
        if resume is not None:
            file = Path(str(resume)) / "config.yaml"
        settings = _flat(yaml.safe_load(read_settings_text(file))) if file is not None else {}
        settings |= given
        config = RunConfig(algo=algo)
        for name in ("seed", "device", "preset"):
            config = replace(config, **{name: settings.get(name, getattr(config, name))})
        env = replace(config.env, name=str(settings.get("env.name", config.env.name)))
        config = replace(config, env=env)
        run_dir = resume or settings.get("run_dir")
        if run_dir is None:
            run_dir = str(default_run_dir(config))
            arguments = [*arguments, f"run_dir={hydra_text(run_dir)}"]
        line = first_line(config, str(run_dir), resumed=resume is not None)
    except Exception:  # of any kind: this is only a line
        return arguments
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    return arguments


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
