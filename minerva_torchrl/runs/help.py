"""What ``--help`` says about training: presets, and all settings with their meanings."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any

from minerva_torchrl.algorithms import ALGORITHMS, RunConfig

__all__ = ["settings_text", "train_help"]

_WIDTH = 100
_COMMENTS = 38  # where they begin

_HELP = """\
Train {title}. {about}

examples:
  {command} env.name=walker-walk seed=1 total_frames=100_000
  {command} env.name=gym:HalfCheetah-v5 preset={preset}
  {command} --multirun seed=0,1,2
  {command} resume=runs/...

presets, to be chosen with preset=NAME:
{presets}

settings, to be changed with NAME=VALUE as in optim.adam_eps=1e-6:
{settings}
Flags of Hydra, which reads the command line: --hydra-help.
"""


def train_help(config: RunConfig, command: str) -> str:
    """What training has to offer.

    Args:
        config (RunConfig): settings to show.
        command (str): what to type to train.
    """
    algorithm = ALGORITHMS[config.algo]
    width = max(14, 2 + max(map(len, algorithm.presets)))
    presets = [
        textwrap.fill(
            preset.description,
            _WIDTH,
            initial_indent=f"  {name:<{width}}",
            subsequent_indent=" " * (width + 2),
        )
        for name, preset in algorithm.presets.items()
    ]
    return _HELP.format(
        title=algorithm.title,
        about=algorithm.about(),
        command=command,
        preset=list(algorithm.presets)[-1],
        presets="\n".join(presets),
        settings=textwrap.indent(settings_text(config), "  "),
    )


def settings_text(section: Any) -> str:
    """Settings as YAML, each with its meaning as a comment.

    Args:
        section (dataclass): a configuration or a section of one.

    Examples:
        >>> from minerva_torchrl.algorithms.config import CollectorConfig
        >>> settings_text(CollectorConfig())
        'frames_per_batch: 50                  # Actions between two rounds of updates, in ...
    """
    return "".join(_lines(section))


def _lines(section: Any) -> Iterator[str]:
    meanings = _meanings(type(section))
    for name, value in vars(section).items():
        if is_dataclass(value):
            about = inspect.cleandoc(type(value).__doc__ or "").partition("\n")[0]
            yield "\n" + _commented(f"{name}:", about)
            yield textwrap.indent(settings_text(value), "  ")
        else:
            shown = value if isinstance(value, str) else json.dumps(value)
            yield _commented(f"{name}: {shown}", meanings.get(name, ""))


def _commented(text: str, comment: str) -> str:
    """A line, and a comment beside it that may be several lines long."""
    comment = re.sub(r":\w+:`[~.\w]*?(\w+)`|``", r"\1", " ".join(comment.split()))
    lines = textwrap.wrap(comment, _WIDTH - _COMMENTS - 6) or [""]
    beside = ("\n" + " " * _COMMENTS).join(f"# {line}" for line in lines)
    return f"{text:<{_COMMENTS - 1}} {beside}\n" if comment else f"{text}\n"


def _meanings(kind: type) -> dict[str, str]:
    """What the settings of a section mean: the function's words, then those of the section."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        own = vars(part).get("__annotations__", {})
        arguments = _argument_docstrings(vars(part).get("__arguments_of__"))
        found |= {name: words for name, words in arguments if name in own}
        for name, words in _attribute_docstrings(part):
            found[name] = f"{found[name]} {words}" if name in found else words
    return found


def _argument_docstrings(function: Any) -> Iterator[tuple[str, str]]:
    """Names of arguments and what Google's style says about them, but for their defaults."""
    documentation = inspect.getdoc(function) or ""
    pattern = r"^ {4}(\w+) \(.*?\): (.*(?:\n {8}.*)*)"
    for name, words in re.findall(pattern, documentation, re.MULTILINE):
        words = re.sub(r"\s*Defaults\s+to\s+``[^`]*``\.", "", words)
        yield name, words[:1].upper() + words[1:]


def _attribute_docstrings(kind: type) -> Iterator[tuple[str, str]]:
    """Names of attributes, and the texts below them."""
    if not is_dataclass(kind):
        return
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body = getattr(definition, "body", [])
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            yield ast.unparse(statement.target), ast.literal_eval(following.value)
