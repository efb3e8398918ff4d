"""Small networks and data for the tests of ``Retrace``."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator

from minerva_torchrl.objectives import Retrace
from minerva_torchrl.objectives.value.functional import retrace_return_estimate

OBSERVATION, ACTION = 3, 2
GAMMA, LMBDA = 0.5, 0.75  # exact in any precision
UNIT = Bounded(-1.0, 1.0, (ACTION,))
TRACES = ["retrace", "importance", "tree_backup", "q_lambda"]


def make_actor(spec: Any = None, action: Any = "action", **kwargs: Any) -> ProbabilisticActor:
    network = nn.Sequential(nn.Linear(OBSERVATION, 2 * ACTION, **kwargs), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=[action],
        distribution_class=IndependentNormal,
        spec=spec,
    )


def make_critic(action: Any = "action", value: Any = "state_action_value", **kwargs: Any):
    network = MLP(in_features=OBSERVATION + ACTION, out_features=1, num_cells=[8], **kwargs)
    return ValueOperator(network, in_keys=["observation", action], out_keys=[value])


def make_retrace(**kwargs: Any) -> Retrace:
    defaults: dict[str, Any] = {"gamma": GAMMA, "lmbda": LMBDA}
    if "value_network" not in kwargs:
        torch.manual_seed(1)
        defaults |= {"value_network": make_critic(), "actor_network": make_actor()}
    return Retrace(**(defaults | kwargs))


def make_data(*batch: int, seed: int = 0, ends: bool = True) -> TensorDict:
    """Random steps; a fifth of them end a trajectory, half of those truly."""
    batch = batch or (4, 7)
    torch.manual_seed(seed)
    done = torch.rand(*batch, 1) < 0.2 * ends
    following = {
        "observation": torch.randn(*batch, OBSERVATION),
        "reward": torch.randn(*batch, 1),
        "done": done,
        "terminated": done & (torch.rand(*batch, 1) < 0.5),
    }
    current = {
        "observation": torch.randn(*batch, OBSERVATION),
        "action": 2 * torch.randn(*batch, ACTION),
        "action_log_prob": torch.randn(*batch) - 3,
    }
    return TensorDict(current | {"next": following}, batch)


def with_values(data: TensorDict) -> TensorDict:
    """The data with values stored in it."""
    value, next_value = torch.randn(2, *data.shape, 1, generator=torch.Generator().manual_seed(7))
    stored = data.clone()
    stored["state_action_value"], stored["next", "state_action_value"] = value, next_value
    return stored


def next_value_of(data: TensorDict) -> Tensor:
    return data["next", "observation"].sum(-1, keepdim=True)


def expected_target(
    retrace: Retrace, data: TensorDict, next_value: Tensor, clip: bool = False
) -> Tensor:
    """The target from the networks and the tested function."""
    action = data["action"].clamp(-1, 1) if clip else data["action"]
    q = retrace.value_network.module(data["observation"], action)
    log_pi = retrace.actor_network.get_dist(data).log_prob(data["action"])
    following = [data["next", key] for key in ("reward", "done", "terminated")]
    log_probs = log_pi.unsqueeze(-1), data["action_log_prob"].unsqueeze(-1)
    return retrace_return_estimate(GAMMA, LMBDA, *log_probs, q, next_value, *following).detach()


def seeded(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the samples it always gets."""
    torch.manual_seed(3)
    return function(*args, **kwargs)
