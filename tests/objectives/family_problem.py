"""Policies of all families over one bandit, and networks that ignore the observation."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Bounded, Categorical, Composite, OneHot
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)

DIM, NUM_ACTIONS = 2, 3
SPEC = Bounded(-1.0, 1.0, (DIM,))
FAMILIES = ["normal", "tanh", "full", "categorical", "one-hot", "discrete parts", "hybrid"]


class Free(nn.Module):
    """The same parameters of a policy in every state."""

    def __init__(self, family: str, scale: float = 0.5) -> None:
        super().__init__()
        self.family = family
        self.loc = nn.Parameter(torch.zeros(DIM))
        self.raw = nn.Parameter(torch.full((DIM, DIM), 0.0))
        self.logits = nn.Parameter(torch.zeros(2, NUM_ACTIONS))
        self.scale = scale

    def forward(self, observation: Tensor) -> Any:
        def expand(x: Tensor) -> Tensor:
            return x.expand(*observation.shape[:-1], *x.shape)

        stddev = nn.functional.softplus(self.raw.diagonal()) / 0.6931 * self.scale
        if self.family in ("normal", "tanh"):
            return expand(self.loc), expand(stddev)
        if self.family == "full":
            return expand(self.loc), expand(self.raw.tril(-1) + torch.diag_embed(stddev))
        if self.family in ("categorical", "one-hot"):
            return expand(self.logits[0])
        if self.family == "discrete parts":
            return expand(self.logits[0]), expand(self.logits[1])
        return expand(self.loc), expand(stddev), expand(self.logits[0])


def make_family_actor(family: str, network: nn.Module | None = None) -> ProbabilisticActor:
    network = Free(family) if network is None else network
    plain: dict[str, Any] = {
        "normal": (IndependentNormal, ["loc", "scale"], SPEC),
        "tanh": (TanhNormal, ["loc", "scale"], SPEC),
        "full": (D.MultivariateNormal, ["loc", "scale_tril"], SPEC),
        "categorical": (D.Categorical, ["logits"], Categorical(NUM_ACTIONS)),
        "one-hot": (OneHotCategorical, ["logits"], OneHot(NUM_ACTIONS)),
        "masked": (MaskedCategorical, ["logits", "mask"], Categorical(NUM_ACTIONS)),
        "masked one-hot": (MaskedOneHotCategorical, ["logits", "mask"], OneHot(NUM_ACTIONS)),
    }
    if family in plain:
        distribution, names, spec = plain[family]
        written = [name for name in names if name != "mask"]
        return ProbabilisticActor(
            TensorDictModule(network, ["observation"], written),
            in_keys=names,
            spec=spec,
            distribution_class=distribution,
            return_log_prob=True,
        )
    arm: Any = OneHotCategorical if family == "discrete parts" else IndependentNormal
    specs: Any = OneHot(NUM_ACTIONS) if family == "discrete parts" else SPEC
    of_arm = ["logits"] if family == "discrete parts" else ["loc", "scale"]
    written = [*(("params", "arm", name) for name in of_arm), ("params", "tool", "logits")]
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], written),
        in_keys=["params"],
        out_keys=[("action", "arm"), ("action", "tool")],
        spec=Composite(action=Composite(arm=specs, tool=Categorical(NUM_ACTIONS))),
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {"arm": arm, "tool": D.Categorical},
            "name_map": {"arm": ("action", "arm"), "tool": ("action", "tool")},
        },
        return_log_prob=True,
    )


class Payoff(nn.Module):
    """Known values of actions: the nearer to the best, the better, with a ridge between them."""

    best = torch.tensor([0.4, -0.3])

    def of(self, action: Any) -> Tensor:
        if not isinstance(action, Tensor):
            return self.of(action["arm"]) + self.of(action["tool"])
        if action.shape[-1:] == (DIM,) and action.is_floating_point():
            off = action - self.best.to(action)
            return -4 * off.square().sum(-1) - 2 * off[..., 0] * off[..., 1]
        index = action.argmax(-1) if action.shape[-1:] == (NUM_ACTIONS,) else action
        return torch.tensor([0.0, 1.0, 0.3], dtype=torch.float32)[index]

    def forward(self, observation: Tensor, action: Any) -> Tensor:
        return self.of(action).unsqueeze(-1) + 0 * observation[..., :1]


def make_family_data(family: str, *batch: int, actor: Any = None, seed: int = 0) -> TensorDict:
    """Transitions with actions of an actor."""
    torch.manual_seed(seed)
    data = TensorDict(
        {
            "observation": torch.randn(*batch, 3),
            "next": {
                "observation": torch.randn(*batch, 3),
                "reward": torch.randn(*batch, 1),
                "done": torch.zeros(*batch, 1, dtype=torch.bool),
                "terminated": torch.zeros(*batch, 1, dtype=torch.bool),
            },
        },
        batch,
    )
    with torch.no_grad():
        return (make_family_actor(family) if actor is None else actor)(data)
