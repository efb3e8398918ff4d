"""Policies and critics for actions of several parts, discrete and continuous ones."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey
from tensordict.nn import CompositeDistribution
from torch import distributions as D
from torch import nn
from torchrl.data import Composite, OneHot, TensorSpec
from torchrl.modules import IndependentNormal, OneHotCategorical, ProbabilisticActor, TanhNormal

from minerva_torchrl.algorithms.common import (
    action_bounds_for,
    bounded_mean,
    scale_settings,
    torso_settings,
)
from minerva_torchrl.modules import (
    CholeskyPolicy,
    ControlTorso,
    DirectModule,
    GaussianPolicy,
    PartedPolicy,
    StateIndependentScale,
    initialize_,
)

__all__ = ["FullNormal", "part_keys", "parted_policy"]


class FullNormal(D.MultivariateNormal):
    """A multivariate normal distribution whose deterministic sample is its mean."""

    def __init__(self, loc: Any, scale_tril: Any) -> None:
        super().__init__(loc, scale_tril=scale_tril, validate_args=False)

    @property
    def deterministic_sample(self) -> Any:
        """The mean."""
        return self.mean


def part_keys(action_spec: TensorSpec) -> list[NestedKey]:
    """Where the data has the action, or all of its parts.

    Args:
        action_spec (TensorSpec): of a single action.
    """
    if isinstance(action_spec, Composite):
        return [("action", name) for name in action_spec.keys()]
    return ["action"]


def parted_policy(obs_dim: int, action_spec: Composite, network: Any) -> ProbabilisticActor:
    """Parts that are drawn independently, from hidden layers that they share.

    Discrete parts are categorical; continuous ones have the distribution that the settings say.

    Args:
        obs_dim (int): size of an observation.
        action_spec (Composite): specs of the parts of a single action, by name.
        network (NetworkConfig): the settings of the networks.
    """
    if network.policy != "gaussian" and all(isinstance(s, OneHot) for s in action_spec.values()):
        raise ValueError(
            f"network.policy={network.policy} does not fit a task whose actions are discrete."
        )
    torso = ControlTorso(obs_dim, network.actor_sizes, **torso_settings(network))
    heads: dict[str, nn.Module] = {}
    written: list[NestedKey] = []
    classes: dict[str, Any] = {}
    arguments: dict[str, dict[str, Any]] = {}
    for name, spec in action_spec.items():
        heads[name], classes[name], parameters = _part(torso.out_features, spec, network)
        written += [("params", name, parameter) for parameter in parameters]
        if classes[name] is TanhNormal:
            low, high = action_bounds_for("network.policy=tanh_gaussian", spec)
            arguments[name] = {"low": low, "high": high, "tanh_loc": False}
    return ProbabilisticActor(
        DirectModule(PartedPolicy(torso, heads), in_keys=["observation"], out_keys=written),
        in_keys=["params"],
        out_keys=part_keys(action_spec),
        spec=Composite(action=action_spec),
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": classes,
            "name_map": {name: ("action", name) for name in classes},
            "extra_kwargs": arguments,
        },
        return_log_prob=True,
    )


def _part(features: int, spec: TensorSpec, network: Any) -> tuple[nn.Module, Any, tuple[str, ...]]:
    """The layers of a part, its distribution and the names of the parameters of that."""
    size, gaussian = spec.shape[-1], ("loc", "scale")
    if isinstance(spec, OneHot):
        logits = initialize_(nn.Linear(features, size), "loc", network.initializer)
        return logits, OneHotCategorical, ("logits",)
    bound = bounded_mean(network, spec)
    kind = TanhNormal if network.policy == "tanh_gaussian" else IndependentNormal
    scales = scale_settings(network)
    if network.scale == "free":
        mean = nn.Sequential(initialize_(nn.Linear(features, size), "loc", network.initializer))
        mean = mean if bound is None else mean.append(bound)
        return StateIndependentScale(mean, size, **scales), kind, gaussian
    settings = {
        **scales,
        "scale_function": network.scale,
        "loc_activation": bound,
        "initializer": network.initializer,
        "torso": nn.Identity(),
    }
    if network.policy == "full_covariance":
        cholesky = CholeskyPolicy(features, size, (features,), **settings)
        return cholesky, FullNormal, ("loc", "scale_tril")
    return GaussianPolicy(features, size, (features,), **settings), kind, gaussian
