"""A small MPO problem with discrete actions in double precision, and its losses by enumeration."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Categorical, OneHot
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator

from minerva_torchrl import MPOLoss
from tests.objectives.base import OBSERVATION_DIM, make_transitions, with_updater

GAMMA, NUM_ACTIONS = 0.9, 4
KINDS = ["categorical", "one-hot"]
CRITICS = ["all actions", "single action"]


class ActionTable(nn.Linear):
    """Values of all actions, of which one is looked up if an action is given."""

    def forward(self, observation: Tensor, action: Tensor | None = None) -> Tensor:
        values = super().forward(observation)
        if action is None:
            return values
        if action.ndim == values.ndim:
            return (values * action).sum(-1, keepdim=True)
        return values.gather(-1, action.unsqueeze(-1))


def make_discrete_actor(kind: str, network: nn.Module) -> ProbabilisticActor:
    one_hot = kind == "one-hot"
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=OneHot(NUM_ACTIONS) if one_hot else Categorical(NUM_ACTIONS),
        distribution_class=OneHotCategorical if one_hot else D.Categorical,
        return_log_prob=True,
    )


def make_discrete_critic(
    kind: str, network: nn.Module, value_key: NestedKey | None = None
) -> ValueOperator:
    """A critic that writes the values of all actions, or of the one that it reads."""
    if kind == "all actions":
        return ValueOperator(network, ["observation"], [value_key or "action_value"])
    return ValueOperator(network, ["observation", "action"], [value_key or "state_action_value"])


def make_discrete_data(kind: str, *batch: int, seed: int = 0) -> TensorDict:
    data = make_transitions(*batch, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(NUM_ACTIONS, batch, generator=generator)
    one_hot = nn.functional.one_hot(index, NUM_ACTIONS)
    return data.set("action", one_hot if kind == "one-hot" else index)


def uniform_log_prob(data: TensorDict) -> TensorDict:
    """The data with the likelihoods of a policy that picks actions at random."""
    log_prob = torch.full(data.shape, 1 / NUM_ACTIONS, dtype=torch.float64).log()
    return data.set("action_log_prob", log_prob)


class DiscreteProblem:
    """A loss in double precision, its networks, and the same update by enumeration."""

    def __init__(
        self,
        kind: str = "categorical",
        critic: str = "all actions",
        td_est: Any = None,
        *,
        num_critics: int = 1,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.policy = nn.Linear(OBSERVATION_DIM, NUM_ACTIONS).double()
        tables = [ActionTable(OBSERVATION_DIM, NUM_ACTIONS).double() for _ in range(num_critics)]
        critics = [make_discrete_critic(critic, table) for table in tables]
        kwargs = {"scalar_output_mode": "exclude"} | kwargs
        self.loss = MPOLoss(make_discrete_actor(kind, self.policy), critics, **kwargs).double()
        for dual in self.loss.dual_variables():
            dual.reset_parameters()
        with_updater(self.loss.make_value_estimator(td_est, gamma=GAMMA).double())
        self.target_policy, self.target_tables = copy.deepcopy((self.policy, tables))
        self.tables = tables
        with torch.no_grad():
            for parameter in self.loss.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def q_value(self, data: TensorDict) -> Tensor:
        """Online values of the stored actions, ``[K, B]``, by the loss's own parameters."""
        index = data["action"].argmax(-1) if self.kind == "one-hot" else data["action"]
        params = dict(self.loss.qvalue_network_params.named_parameters())
        values = []
        for i, table in enumerate(self.tables):
            member = params if len(self.tables) == 1 else {k: p[i] for k, p in params.items()}
            member = {k.removeprefix("module."): p for k, p in member.items()}
            of_all = torch.func.functional_call(table, member, (data["observation"],))
            values.append(of_all.gather(-1, index.unsqueeze(-1)).squeeze(-1))
        return torch.stack(values)

    def at_states(self, observation: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Expected target value ``[B]``, and the losses of the policy and the duals ``[B]``."""
        loss = self.loss
        values = torch.stack([table(observation) for table in self.target_tables]).detach()
        q_value = values.amin(0) if loss.qvalue_reduction == "min" else values.mean(0)
        old = D.Categorical(logits=self.target_policy(observation).detach())
        new = D.Categorical(logits=self.policy(observation))
        temperature, alpha = loss.temperature(), loss.alpha_policy()
        mean_exp = (old.probs * (q_value / temperature).exp()).sum(-1)
        weights = (old.probs * (q_value / temperature).exp()).detach()
        weights = weights / weights.sum(-1, keepdim=True)
        kl = D.kl_divergence(old, new)
        losses = {
            "loss_temperature": temperature * (loss.epsilon + mean_exp.log()),
            "loss_actor": -(weights * new.logits).sum(-1) + alpha.detach() * kl,
            "loss_alpha_policy": alpha * (loss.epsilon_policy - kl.detach()),
        }
        return (old.probs * q_value).sum(-1), losses

    def reference(self, data: TensorDict) -> dict[str, Tensor]:
        """All losses of transitions ``[B]``."""
        terminated = data["next", "terminated"].squeeze(-1)
        next_value, at_next = self.at_states(data["next", "observation"])
        target = data["next", "reward"].squeeze(-1) + GAMMA * ~terminated * next_value
        losses = {"loss_qvalue": (self.q_value(data) - target).square().sum(0).mean()}
        if self.loss.policy_states == "next":
            return losses | {key: value[~terminated].mean() for key, value in at_next.items()}
        _, at_current = self.at_states(data["observation"])
        for key, value in at_current.items():
            if self.loss.policy_states == "both":
                value = torch.where(terminated, value, (value + at_next[key]) / 2)
            losses[key] = value.mean()
        return losses
