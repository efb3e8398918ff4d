"""Small V-MPO problems with every kind of policy, and their losses in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch import distributions as D
from torchrl.collectors.utils import split_trajectories
from torchrl.data import Bounded, Categorical, Composite, OneHot, TensorSpec
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    ActorValueOperator,
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)

from minerva_torchrl import VMPOLoss
from tests.objectives.base import ACTION_DIM, OBSERVATION_DIM, make_mlp, make_transitions

GAMMA = 0.9
NUM_ACTIONS = 4
DISTRIBUTIONS: dict[str, Any] = {
    "normal": IndependentNormal,
    "tanh": TanhNormal,
    "one-hot": OneHotCategorical,
    "categorical": D.Categorical,
}
CONTINUOUS, DISCRETE = ["normal", "tanh"], ["one-hot", "categorical"]
KINDS = CONTINUOUS + DISCRETE

CRITIC_DISTANCES = {
    "l1": lambda x: x.abs(),
    "l2": lambda x: x.square(),
    "smooth_l1": lambda x: torch.where(x.abs() < 1, 0.5 * x.square(), x.abs() - 0.5),
}


# Networks ----------------------------------------------------------------------------------------


def parameter_names(kind: str) -> list[str]:
    """What the policy network writes, and a collector stores."""
    return ["loc", "scale"] if kind in CONTINUOUS else ["logits"]


def make_spec(kind: str) -> TensorSpec:
    if kind in CONTINUOUS:
        return Bounded(-1.0, 1.0, (ACTION_DIM,))
    return OneHot(NUM_ACTIONS) if kind == "one-hot" else Categorical(NUM_ACTIONS)


def make_policy_network(kind: str, inputs: int = OBSERVATION_DIM) -> nn.Module:
    if kind in CONTINUOUS:
        return nn.Sequential(make_mlp(inputs, 2 * ACTION_DIM), NormalParamExtractor())
    return make_mlp(inputs, NUM_ACTIONS)


def make_actor(
    kind: str,
    network: nn.Module | None = None,
    *,
    agent: str | None = None,
    spec: TensorSpec | str | None = "default",
) -> ProbabilisticActor:
    """A policy; with ``agent`` all of its entries are inside the entry of that name."""

    def name(key: str) -> Any:
        return key if agent is None else (agent, key)

    if spec == "default":
        spec = make_spec(kind)
        if agent is not None:
            spec = Composite({agent: Composite(action=spec)})
    network = make_policy_network(kind) if network is None else network
    parameters = {key: name(key) for key in parameter_names(kind)}
    return ProbabilisticActor(
        TensorDictModule(network, [name("observation")], list(parameters.values())),
        in_keys=parameters,
        out_keys=[name("action")],
        spec=spec,
        distribution_class=DISTRIBUTIONS[kind],
    )


def make_critic(
    network: nn.Module | None = None,
    *,
    observation_key: NestedKey = "observation",
    value_key: NestedKey = "state_value",
) -> ValueOperator:
    network = make_mlp(OBSERVATION_DIM, 1) if network is None else network
    return ValueOperator(network, in_keys=[observation_key], out_keys=[value_key])


def make_loss(
    kind: str = "normal",
    td_est: Any = None,
    *,
    seed: int = 0,
    estimator: dict[str, Any] | None = None,
    **kwargs: Any,
) -> VMPOLoss:
    torch.manual_seed(seed)
    kwargs = {"scalar_output_mode": "exclude"} | kwargs
    loss = VMPOLoss(make_actor(kind), make_critic(), **kwargs)
    return loss.make_value_estimator(td_est, gamma=GAMMA, **(estimator or {}))


def make_shared(kind: str, by: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(OBSERVATION_DIM, 6), nn.Tanh())
    common = TensorDictModule(encoder, ["observation"], ["hidden"])
    names = parameter_names(kind)
    head = TensorDictModule(make_policy_network(kind, 6), ["hidden"], names)
    value = ValueOperator(make_mlp(6, 1), in_keys=["hidden"])
    settings = {"in_keys": names, "distribution_class": DISTRIBUTIONS[kind]}
    if by == "sequence":
        actor = ProbabilisticActor(TensorDictSequential(common, head), **settings)
        return encoder, actor, TensorDictSequential(common, value)
    whole = ActorValueOperator(common, ProbabilisticActor(head, **settings), value)
    return encoder, whole.get_policy_operator(), whole.get_value_operator()


# Data --------------------------------------------------------------------------------------------


def make_rollout(
    kind: str = "normal", *batch: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TensorDict:
    """A rollout of a policy that differs from the one in the loss, as a collector returns it."""
    data = make_transitions(*(batch or (4, 5)), seed=seed, dtype=dtype)
    data = data.exclude("action", "action_log_prob")
    torch.manual_seed(100 + seed)
    behaviour = make_actor(kind).to(dtype)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        return behaviour(data)


def with_advantage(data: TensorDict, seed: int = 0) -> TensorDict:
    """The rollout with random advantages and value targets."""
    generator = torch.Generator().manual_seed(seed)
    like = data["observation"].dtype
    for key in ("advantage", "value_target"):
        data[key] = torch.randn(*data.shape, 1, generator=generator, dtype=like)
    return data


def connected(data: TensorDict) -> TensorDict:
    """The rollout with every next observation as the following one, except at ends."""
    ended = data["next", "done"][:, :-1]
    following = data["next", "observation"][:, :-1]
    observation = data["observation"].clone()
    observation[:, 1:] = torch.where(ended, observation[:, 1:], following)
    return data.set("observation", observation)


def with_weights(data: TensorDict, *names: str) -> TensorDict:
    """Restarting weights that are zero for some of the best samples, and importance weights."""
    torch.manual_seed(3)
    if "restarting_weight" in names:
        best = data["advantage"].flatten().argsort(descending=True)
        data["restarting_weight"] = torch.ones(data.shape, dtype=data["advantage"].dtype)
        data["restarting_weight"].view(-1)[best[[0, 3, -1]]] = 0.0
    if "importance_weight" in names:
        data["importance_weight"] = torch.rand_like(data["advantage"]) + 0.1
    return data


def make_padded(kind: str, fill: str) -> tuple[TensorDict, TensorDict]:
    """Trajectories of three and five steps, in one row and padded to the same length."""
    flat = with_advantage(make_rollout(kind, 8))
    flat["collector", "traj_ids"] = torch.tensor([0] * 3 + [1] * 5)
    padded = split_trajectories(flat)
    assert padded["collector", "mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    if fill == "nan":
        padding = torch.stack([flat[0]] * 2)
        padding["advantage"], padding["value_target"] = torch.full((2, 2, 1), math.nan)
        padding["collector", "mask"] = torch.zeros(2, dtype=torch.bool)
        padded[0, 3:] = padding
    return flat, padded


def by_keyword(data: TensorDict) -> dict[str, Tensor]:
    """The entries as keyword arguments: the names of nested ones are joined."""
    keys = data.keys(True, True)
    return {k if isinstance(k, str) else "_".join(k): data.get(k) for k in keys}


# Outputs -----------------------------------------------------------------------------------------


def loss_keys(kind: str) -> list[str]:
    constraints = ["mean", "stddev"] if kind in CONTINUOUS else ["policy"]
    losses = ["loss_actor", "loss_critic", "loss_temperature"]
    return [*losses, *(f"loss_alpha_{name}" for name in constraints)]


def weights_of(loss: VMPOLoss, data: TensorDict) -> Tensor:
    """Weights of the samples by the E-step, which sum to one."""
    e_step = loss.e_step(data)[0]["e_step"]
    return e_step.policy_weight / e_step.mask.sum()


def losses_of(output: TensorDict) -> dict[str, Tensor]:
    return {key: value for key, value in output.items() if key.startswith("loss_")}


# The losses in plain PyTorch ---------------------------------------------------------------------


class Problem:
    """A loss in double precision, its networks, and the same update in plain PyTorch."""

    def __init__(self, kind: str = "normal", **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.policy = make_policy_network(kind).double()
        self.critic = make_mlp(OBSERVATION_DIM, 1).double()
        actor = make_actor(kind, self.policy)
        self.loss = VMPOLoss(actor, make_critic(self.critic), **kwargs).double()
        self.loss.make_value_estimator(gamma=GAMMA)
        for dual in self.loss.dual_variables():
            dual.reset_parameters()  # now in double precision

    def data(self, *batch: int, seed: int = 0) -> TensorDict:
        rollout = make_rollout(self.kind, *(batch or (3, 4)), seed=seed, dtype=torch.float64)
        return with_advantage(rollout, seed)

    def select(self, data: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages, which samples are selected, and their prior weights, all flat."""
        advantage = data["advantage"].flatten()
        if self.loss.normalize_advantage:
            deviation = (advantage - advantage.mean()).square().mean().sqrt()
            advantage = (advantage - advantage.mean()) / (deviation + 1e-8)
        usable = torch.ones_like(advantage, dtype=torch.bool)
        if "restarting_weight" in data.keys():
            usable = data["restarting_weight"].flatten() != 0
        best_first = [i for i in advantage.argsort(descending=True).tolist() if usable[i]]
        kept = best_first[: max(1, math.floor(self.loss.top_k_fraction * len(advantage)))]
        selected = torch.zeros_like(usable)
        selected[kept] = True
        prior = selected.double()
        if "importance_weight" in data.keys():
            prior = prior * data["importance_weight"].flatten()
        return advantage, selected, prior

    def weigh(self, data: TensorDictBase, temperature: Tensor) -> Tensor:
        advantage, selected, prior = self.select(data)
        weights = prior * ((advantage - advantage[selected].max()) / temperature).exp()
        return torch.where(selected, weights / weights[selected].sum(), 0.0).detach()

    def divergence(self, data: TensorDictBase, temperature: Tensor) -> Tensor:
        """KL divergence of the weights from the prior."""
        weights, prior = self.weigh(data, temperature), self.select(data)[2]
        kept = weights > 0
        return (weights[kept] * (weights[kept] / (prior / prior.sum())[kept]).log()).sum()

    def temperature(self, data: TensorDictBase) -> Tensor:
        """The learned temperature, or the one that meets the bound, by bisection."""
        if self.loss.temperature_update == "gradient":
            return self.loss.temperature()
        low, high = torch.tensor([self.loss.temperature.floor, 1e6]).double().log()
        for _ in range(100):
            middle = (low + high) / 2
            if self.divergence(data, middle.exp()) > self.loss.epsilon:
                low = middle
            else:
                high = middle
        return high.exp()

    def distributions(self, data: TensorDictBase) -> tuple[Any, dict[str, Tensor]]:
        """The policy and its divergences from the old one, ``[B, D]`` or ``[B, 1]``, flat."""
        flat = data.reshape(-1)
        if self.kind in DISCRETE:
            new = D.Categorical(logits=self.policy(flat["observation"]))
            kl = D.kl_divergence(D.Categorical(logits=flat["logits"]), new)
            return new, {"policy": kl.unsqueeze(-1)}
        loc, scale = self.policy(flat["observation"])
        old = D.Normal(flat["loc"], flat["scale"])
        divergences = {
            "mean": D.kl_divergence(old, D.Normal(loc, flat["scale"])),
            "stddev": D.kl_divergence(old, D.Normal(flat["loc"], scale)),
        }
        if not self.loss.per_dim_constraining:
            divergences = {name: kl.sum(-1, keepdim=True) for name, kl in divergences.items()}
        new = D.Normal(loc, scale)
        if self.kind == "tanh":
            new = D.TransformedDistribution(new, D.TanhTransform())
        return D.Independent(new, 1), divergences

    def log_prob(self, data: TensorDictBase, new: D.Distribution) -> Tensor:
        action = data["action"].flatten(0, data.ndim - 1)
        return new.log_prob(action.argmax(-1) if self.kind == "one-hot" else action)

    def reference(self, data: TensorDictBase) -> dict[str, Tensor]:
        """All losses of a batch without masks."""
        loss = self.loss
        advantage, selected, prior = self.select(data)
        temperature = self.temperature(data)
        weights = self.weigh(data, temperature)
        best = advantage[selected].max()
        mean = (prior * ((advantage - best) / temperature).exp())[selected].mean()
        losses = {"loss_temperature": temperature * (loss.epsilon + mean.log()) + best}
        new, divergences = self.distributions(data)
        losses["loss_actor"] = -(weights * self.log_prob(data, new)).sum()
        over = selected if loss.kl_samples == "selected" else torch.ones_like(selected)
        for name, kl in divergences.items():
            kl = kl[over].mean(0)
            alpha, epsilon = getattr(loss, f"alpha_{name}")(), getattr(loss, f"epsilon_{name}")
            losses["loss_actor"] = losses["loss_actor"] + (alpha.detach() * kl).sum()
            losses[f"loss_alpha_{name}"] = (alpha * (epsilon - kl.detach())).sum()
        error = self.critic(data["observation"]) - data["value_target"]
        distance = CRITIC_DISTANCES[loss.loss_critic_type](error)
        losses["loss_critic"] = loss.critic_coeff * distance.mean()
        return losses

    def lambda_return(self, data: TensorDict, lmbda: float) -> tuple[Tensor, Tensor]:
        """Values and value targets, step by step from the end."""
        following = data["next"]
        with torch.no_grad():
            value, next_value = (self.critic(td["observation"]) for td in (data, following))
        targets = [next_value[:, -1]]
        for t in reversed(range(data.shape[1])):
            step = following[:, t]
            mixed = (1 - lmbda) * next_value[:, t] + lmbda * targets[0]
            bootstrap = torch.where(step["done"], next_value[:, t], mixed)
            targets.insert(0, step["reward"] + GAMMA * ~step["terminated"] * bootstrap)
        return value, torch.stack(targets[:-1], 1)

    def metrics(self, data: TensorDictBase) -> dict[str, Tensor]:
        """Metrics of a loss with ``kl_samples="selected"``."""
        with torch.no_grad():
            advantage, target = data["advantage"], data["value_target"]
            value = self.critic(data["observation"])
            standardised, selected, _ = self.select(data)
            temperature = self.temperature(data)
            weights = self.weigh(data, temperature)
            expected = {
                "temperature": temperature,
                "advantage_mean": advantage.mean(),
                "advantage_std": advantage.std(correction=0),
                "advantage_threshold": standardised[selected].min(),
                "advantage_std_over_temperature": standardised.std(correction=0) / temperature,
                "ess": 1 / weights.square().sum(),
                "restarting_fraction": torch.tensor(3 / 12),
                "explained_variance": 1 - (target - value).var() / target.var(),
                "value_mean": value.mean(),
                "value_std": value.std(correction=0),
                "value_target_mean": target.mean(),
                "value_target_std": target.std(correction=0),
            }
            new, divergences = self.distributions(data)
            for name, kl in divergences.items():
                expected[f"kl_{name}"] = kl.mean()
                expected[f"kl_{name}_selected"] = kl[selected].mean()
                epsilon, alpha = (getattr(self.loss, f"{k}_{name}") for k in ("epsilon", "alpha"))
                expected[f"kl_{name}_rel"] = kl[selected].mean() / epsilon
                expected[f"penalty_{name}"] = alpha() * kl[selected].mean()
                expected[f"alpha_{name}"] = alpha()
            if self.kind in CONTINUOUS:
                loc, scale = self.policy(data["observation"])
                action = loc.tanh() if self.kind == "tanh" else loc
                expected |= {"stddev_min": scale.min(), "stddev_max": scale.max()}
                expected["mean_abs_action"] = action.abs().mean()
                expected["entropy"] = (
                    D.Normal(loc, scale).entropy().sum(-1).flatten()[selected].mean()
                )
                expected["saturation"] = (action.abs() >= 0.99).double().mean()
                if self.kind == "normal":
                    expected["out_of_bounds"] = (action.abs() > 1).double().mean()
            else:
                expected["entropy"] = new.entropy()[selected].mean()
            expected["cross_entropy"] = -(weights * self.log_prob(data, new)).sum()
            expected["kl_q_rel"] = self.divergence(data, temperature) / self.loss.epsilon
        return expected


# Worked examples ---------------------------------------------------------------------------------


class Constant(nn.Module):
    """The same outputs for every observation, one parameter each."""

    def __init__(self, *values: float, together: bool = False) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, dtype=torch.float64))
        self.together = together

    def forward(self, observation: Tensor) -> Any:
        shape = observation.shape[:-1]
        if self.together:
            return self.values.expand(*shape, -1)
        return tuple(v.expand(*shape, 1) for v in self.values)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def constant_loss(kind: str, policy: Constant, **kwargs: Any) -> VMPOLoss:
    loss = VMPOLoss(
        make_actor(kind, policy, spec=None),
        make_critic(Constant(2.0, together=True)),
        normalize_advantage=False,
        temperature_update="gradient",
        init_temperature=2.0,
        epsilon=0.3,
        **kwargs,
    ).double()
    for dual in loss.dual_variables():
        dual.reset_parameters()
    return loss


def worked_data(**entries: Tensor) -> TensorDict:
    """Of the advantages 0, 4, 2, -1 the second and third are the better half."""
    common = {
        "observation": column(0, 0, 0, 0),
        "advantage": column(0, 4, 2, -1),
        "value_target": column(1, 2, 3, 6),
    }
    return TensorDict({**common, **entries}, [4])


def make_worked_rollout() -> tuple[VMPOLoss, TensorDict, Tensor]:
    """A loss whose values are the observations, two environments over three steps, the values."""
    critic = make_critic(nn.Linear(1, 1))
    with torch.no_grad():
        for parameter, value in zip(critic.parameters(), (1.0, 0.0), strict=True):
            parameter.fill_(value)  # the value is the observation
    actor = make_actor("normal", Constant(0.0, 1.0).float(), spec=None)
    reward = torch.tensor([[1, 2], [0.5, -1], [3, 0]]).T.unsqueeze(-1)
    end = torch.tensor([[0, 0], [0, 1], [1, 0]]).T.unsqueeze(-1).bool()
    value = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]]).T.unsqueeze(-1)
    following = {"observation": value[:, 1:], "reward": reward, "done": end, "terminated": end}
    data = {"observation": value[:, :-1], "action": torch.zeros(2, 3, 1), "next": following}
    data |= {"loc": torch.zeros(2, 3, 1), "scale": torch.ones(2, 3, 1)}
    return VMPOLoss(actor, critic), TensorDict(data, [2, 3]), value[:, :-1]
