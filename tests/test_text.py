"""Texts that every part of the package writes in the same way."""

from __future__ import annotations

import pytest

from minerva_torchrl.text import close_names, did_you_mean, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-3, "0s"),
        (12.4, "12s"),
        (59.6, "1m00s"),
        (65, "1m05s"),
        (165, "2m45s"),
        (3_599.7, "1h00m"),
        (3_780, "1h03m"),
        (360_000, "100h00m"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("walker_walk", ["walker-walk"]),
        ("humanoid_cmu-run", ["humanoid_CMU-run"]),
        ("runs", []),
        ("??", []),
    ],
)
def test_close_names(name: str, close: list[str]) -> None:
    assert close_names(name, ["cheetah-run", "humanoid_CMU-run", "walker-walk"]) == close


def test_the_closest_name_is_first() -> None:
    assert close_names("lr_acto", ["lr_alpha", "lr_actor", "lr_critic"])[0] == "lr_actor"


def test_did_you_mean() -> None:
    assert did_you_mean([]) == ""
    assert did_you_mean(["a", "b"]) == " Did you mean a or b?"
