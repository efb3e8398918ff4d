"""Tables of the documentation name every argument and every metric."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import MultivariateNormal
from torchrl.data import Bounded
from torchrl.modules import (
    MLP,
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    ValueOperator,
)

from minerva_torchrl import MPOLoss, VMPOLoss
from minerva_torchrl.modules import CholeskyPolicy
from minerva_torchrl.objectives import CostLimit
from minerva_torchrl.objectives.critics import TwoHotCritic
from minerva_torchrl.report import load_runs
from tests.test_docstring_arguments import PUBLIC, place_of

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS.parent / "results"
sys.path.insert(0, str(DOCS / "_ext"))
try:
    from reference_origins import argument_rows
finally:
    sys.path.pop(0)

ORIGINS = yaml.safe_load((DOCS / "origins.yaml").read_text())
METRICS = yaml.safe_load((DOCS / "metrics.yaml").read_text())


@pytest.mark.parametrize("name", ORIGINS)
def test_origins(name: str) -> None:
    rows = argument_rows(f"minerva_torchrl.{name}", ORIGINS)
    assert list(ORIGINS[name]) == [argument for argument, *_ in rows]
    assert all(meaning and origin for _, _, meaning, origin in rows)


def test_every_table_of_arguments_has_origins() -> None:
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert set(re.findall(r"^```{arguments} minerva_torchrl\.(.+)$", pages, re.M)) == set(ORIGINS)


def gaussian() -> ProbabilisticActor:
    network = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-1, 1, (2,)),
        distribution_class=IndependentNormal,
    )


def categorical() -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(3, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )


def documented(algorithm: str) -> set[str]:
    return {name.strip() for names in METRICS[algorithm] for name in names.split(",")}


def test_metrics_of_mpo() -> None:
    critic = ValueOperator(MLP(5, 1), in_keys=["observation", "action"])
    metrics = {key for key in MPOLoss(gaussian(), critic).out_keys if not key.startswith("loss_")}
    assert metrics == documented("mpo")


def of_mpo(actor: ProbabilisticActor, width: int = 1, **arguments: Any) -> set[str]:
    """What a member of the family adds to the metrics of MPO."""
    critic = ValueOperator(MLP(5, width), in_keys=["observation", "action"])
    metrics = {k for k in MPOLoss(actor, critic, **arguments).out_keys if k[:5] != "loss_"}
    return metrics - (documented("mpo") - {"entropy"})


def test_metrics_of_members() -> None:
    full = ProbabilisticActor(
        TensorDictModule(CholeskyPolicy(3, 2, [8]), ["observation"], ["loc", "scale_tril"]),
        in_keys=["loc", "scale_tril"],
        spec=Bounded(-1, 1, (2,)),
        distribution_class=MultivariateNormal,
    )
    goals = {"energy": 0.1, "cost": CostLimit(1.0)}
    entropy = {"entropy"}
    assert of_mpo(categorical()) == documented("categorical")
    assert of_mpo(full) - entropy == documented("covariance")
    assert of_mpo(gaussian(), 51, critic=TwoHotCritic()) - entropy == documented("bins")
    assert of_mpo(gaussian(), 3, objectives=goals) - entropy == documented("objectives")


def test_metrics_of_vmpo() -> None:
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    metrics = set()
    for actor in (gaussian(), categorical()):
        metrics |= {k for k in VMPOLoss(actor, critic).out_keys if not k.startswith("loss_")}
    assert metrics == documented("vmpo")


def test_reference_lists_what_there_is() -> None:
    """Every name below an ``autosummary`` exists, and every public object is on a page."""
    listed = set()
    for page in (DOCS / "api").glob("*.rst"):
        for part in page.read_text().split(".. currentmodule:: ")[1:]:
            module = importlib.import_module(part.split()[0])
            names = re.findall(r"^   ([A-Za-z]\w*)$", part, re.MULTILINE)
            assert set(names) <= set(module.__all__), page.name
            listed |= {place_of(getattr(module, name)) for name in names}
    assert set(PUBLIC) - listed == set()


def last_returns() -> dict[str, float]:
    """By folder of the recorded runs."""
    runs = load_runs(RESULTS).runs
    return {run.folder.relative_to(RESULTS).as_posix(): run.returns[-1] for run in runs}


def test_returns_of_members() -> None:
    """Tables have the returns of all seeds, or their mean first, as they are recorded."""
    section = (DOCS / "family.md").read_text().split("## What they learn")[1]
    recorded = last_returns()

    def seeds(run: str) -> list[int]:
        return [round(recorded[f"{run}-{s}"]) for s in range(3) if f"{run}-{s}" in recorded]

    critics = re.findall(r"^\| `(\w+)` \|(.*)\|(.*)\|(.*)\|$", section, re.MULTILINE)
    assert len(critics) == 6
    for critic, *cells in critics:
        for task, cell in zip(("walker-walk", "cheetah-run", "HalfCheetah-v5"), cells, strict=True):
            folder = "gym" if task == "HalfCheetah-v5" else "suite"
            default = f"{folder}/mpo-{task}"
            values = seeds(default if critic == "scalar" else f"critics/mpo-{task}-{critic}")
            numbers = [int(text.replace(",", "")) for text in re.findall(r"[\d,]*\d", cell)]
            expected = [round(sum(values) / len(values)), *values] if len(values) > 1 else values
            assert numbers == expected, (critic, task)
    others = re.findall(r"^\| [^|]+ \| [^|]+ \| [\d,]+ \| (.*) \|$", section, re.MULTILINE)
    assert [[int(text) for text in cell.split(", ")] for cell in others] == [
        seeds("family/mpo-walker-walk-full_covariance"),
        seeds("discrete/mpo-CartPole-v1"),
        seeds("discrete/mpo-CartPole-v1-three_steps"),
        seeds("discrete/mpo-Acrobot-v1"),
        seeds("family/mpo-geared-pendulum"),
    ]
