"""A default is written once: in a signature, or in the settings of a run that departs from it."""

from __future__ import annotations

from dataclasses import fields
from inspect import Parameter, signature
from typing import Any

import pytest

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.algorithms.config import arguments_of

# Defaults of runs, and those of the loss or stepper that they are not.
DEPARTURES: dict[str, dict[str, tuple[Any, Any]]] = {
    "mpo": {
        "loss.num_action_samples": (10, 20),
        "loss.epsilon": (None, 0.1),
        "loss.epsilon_mean": (1e-2, None),
        # The loss's own, by way of the policy's constraints.
        "loss.epsilon_stddev": (1e-6, None),
        "loss.per_dim_constraining": (True, None),
        "loss.init_alpha_mean": (1.0, None),
        "loss.init_alpha_stddev": (1000.0, None),
        "loss.alpha_update": ("relative", "gradient"),
        "loss.epsilon_penalty": (0.05, 1e-3),
        "loss.objectives": ({}, None),
    },
    "vmpo": {
        "loss.alpha_update": ("relative", "gradient"),
        "loss.per_dim_constraining": (None, False),
        "optim.num_policy_steps": (320, 1),
        "optim.minibatch_size": (64, None),
    },
    "ppo": {"loss.lmbda": (0.9, 0.95)},
}


@pytest.mark.parametrize("algo", list(ALGORITHMS))
def test_departures(algo: str) -> None:
    config = ALGORITHMS[algo].config_class()
    found = {}
    for name in ("loss", "optim"):
        section = getattr(config, name)
        function = type(section).__arguments_of__
        theirs = {
            p.name: p.default
            for p in signature(function).parameters.values()
            if p.default is not Parameter.empty
        }
        for field in fields(section):
            ours = getattr(section, field.name)
            if field.name in theirs and ours != theirs[field.name]:
                found[f"{name}.{field.name}"] = (ours, theirs[field.name])
    assert found == DEPARTURES[algo]


def scale(reward: float, factor: float = 2.0, shift: float = 0.0) -> float:
    return factor * reward + shift


def test_a_section_follows_its_function() -> None:
    @arguments_of(scale)
    class Config:
        shift: float = 0.5
        factor: float

    assert (Config().factor, Config().shift) == (2.0, 0.5)
    assert [field.name for field in fields(Config)] == ["shift", "factor"]


@pytest.mark.parametrize("name", ["offset", "reward"])
def test_a_setting_without_any_default(name: str) -> None:
    with pytest.raises(TypeError, match=f"Config.{name} needs a default: scale has none for it"):
        arguments_of(scale)(type("Config", (), {"__annotations__": {name: "float"}}))
