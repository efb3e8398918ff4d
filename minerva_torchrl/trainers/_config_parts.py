"""Nodes made of signatures, and nodes for what TorchRL has no working node for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, TypeVar

from omegaconf import MISSING
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import SliceSampler
from torchrl.modules import IndependentNormal, ProbabilisticActor
from torchrl.trainers.algorithms.configs import ModelConfig
from torchrl.trainers.algorithms.configs.common import _normalize_hydra_key, _normalize_hydra_keys
from torchrl.trainers.algorithms.configs.data import SamplerConfig
from torchrl.trainers.algorithms.configs.envs_libs import EnvLibsConfig

from minerva_torchrl.envs import make_env
from minerva_torchrl.objectives import critics
from minerva_torchrl.objectives.critics import CRITICS, Critic
from minerva_torchrl.trainers.sequences import SequenceSampler

__all__ = [
    "IndependentNormalModelConfig",
    "MinervaEnvConfig",
    "RetraceSliceSamplerConfig",
    "SequenceSamplerConfig",
    "complete",
    "critic_nodes",
    "fields_from",
]


T = TypeVar("T")


def fields_from(
    *functions: Callable[..., Any], leave_out: Iterable[str] = ()
) -> Callable[[type[T]], type[T]]:
    """Make a node of a class: the arguments of functions become fields, with their defaults.

    Of arguments with the same name the last one counts, and the class's own fields before them.
    What Hydra can't express, such as a choice between texts, has the type ``Any``: the function
    checks it.

    Args:
        *functions (callable): what the node's fields are handed on to.

    Keyword Args:
        leave_out (iterable of str): arguments that are no fields.

    Examples:
        >>> def scale(reward: float, factor: float = 2.0, shift: float = 0.0): ...
        >>> @fields_from(scale, leave_out=["reward"])
        ... class ScaleConfig:
        ...     _target_: str = "somewhere.scale"
        >>> ScaleConfig(shift=0.5)
        ScaleConfig(factor=2.0, shift=0.5, _target_='somewhere.scale')
    """

    def make_node(kind: type[T]) -> type[T]:
        own, types = kind.__annotations__, {}
        for function in functions:
            for name, parameter in signature(function).parameters.items():
                if parameter.kind is Parameter.VAR_KEYWORD or name in {"self", *own, *leave_out}:
                    continue
                written = str(getattr(parameter.annotation, "__name__", parameter.annotation))
                types[name] = written if _EXPRESSIBLE.fullmatch(written) else Any
                required = parameter.default is Parameter.empty
                setattr(kind, name, MISSING if required else parameter.default)
        kind.__annotations__ = {**types, **own}
        return dataclass(kind)

    return make_node


_EXPRESSIBLE = re.compile(r"(int|float|str|bool)( \| None)?")


def complete(name: str, part: Any, kind: type, **missing: Any) -> Any:
    """A part of a trainer; a partial node becomes one when it is called with what is missing."""
    if callable(part) and not isinstance(part, kind):
        part = part(**missing)
    if not isinstance(part, kind):
        raise TypeError(
            f"{name} must be of type {kind.__name__}, or a partial node that makes one, "
            f"got {type(part).__name__}."
        )
    return part


@dataclass
class IndependentNormalModelConfig(ModelConfig):
    """Node ``model/independent_normal``: a Gaussian policy without tanh, as MPO and V-MPO like it.

    ``network`` returns mean and standard deviation side by side, twice as many numbers as the
    action has, of which the latter are mapped to positive ones by ``scale_mapping`` and
    ``scale_lb``; or, with ``extract_normal_params: false``, it returns both by itself, such as
    :class:`~minerva_torchrl.modules.GaussianPolicy`. Actions may lie outside the bounds, so the
    environment has to clip them, which ``env/minerva`` does.

    Examples:
        >>> from hydra.utils import instantiate
        >>> network = {"_target_": "minerva_torchrl.modules.GaussianPolicy"}
        >>> network |= {"obs_dim": 3, "action_dim": 2, "sizes": [32]}
        >>> config = IndependentNormalModelConfig(network=network, extract_normal_params=False)
        >>> instantiate(config).out_keys
        ['loc', 'scale', 'action', 'action_log_prob']
    """

    network: Any = MISSING
    in_keys: Any = field(default_factory=lambda: ["observation"])
    param_keys: Any = field(default_factory=lambda: ["loc", "scale"])
    out_keys: Any = field(default_factory=lambda: ["action"])
    extract_normal_params: bool = True
    scale_mapping: str = "biased_softplus_1.0"
    scale_lb: float = 1e-4
    return_log_prob: bool = True  # Retrace reads it
    _target_: str = "minerva_torchrl.trainers._config_parts._make_independent_normal_model"


def _make_independent_normal_model(*, network: Any, **fields: Any) -> ProbabilisticActor:
    module = complete("network", network, nn.Module)
    if fields["extract_normal_params"]:
        extractor = NormalParamExtractor(fields["scale_mapping"], fields["scale_lb"])
        module = nn.Sequential(module, extractor)
    keys = {k: _normalize_hydra_keys(fields[k]) for k in ("in_keys", "param_keys", "out_keys")}
    actor = ProbabilisticActor(
        TensorDictModule(module, in_keys=keys["in_keys"], out_keys=keys["param_keys"]),
        in_keys=keys["param_keys"],
        out_keys=keys["out_keys"],
        distribution_class=IndependentNormal,
        return_log_prob=fields["return_log_prob"],
    )
    return actor.share_memory() if fields["shared"] else actor


@fields_from(SequenceSampler.__init__, leave_out=["trajectory_key", "done_key"])
class SequenceSamplerConfig(SamplerConfig):
    """Node ``sampler/sequences``: sequences of ``sequence_length`` steps of one trajectory each.

    The buffer's ``batch_size`` counts sequences.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(SequenceSamplerConfig(sequence_length=8))
        SequenceSampler(sequence_length=8, sequence_steps='all')
    """

    _target_: str = "minerva_torchrl.trainers.SequenceSampler"


@dataclass
class RetraceSliceSamplerConfig(SamplerConfig):
    """Node ``sampler/retrace_slice`` of version 0.1: TorchRL's slices, for older files.

    Episodes that are shorter than ``slice_len`` are left out, and the buffer's ``batch_size``
    counts steps. ``sampler/sequences`` does neither.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(RetraceSliceSamplerConfig(slice_len=8)).slice_len
        8
    """

    slice_len: int = MISSING
    traj_key: Any = field(default_factory=lambda: ["collector", "traj_ids"])
    cache_values: bool = True  # where trajectories end is looked up once per write, not per sample
    _target_: str = "minerva_torchrl.trainers._config_parts._make_slice_sampler"


def _make_slice_sampler(*, traj_key: Any, **kwargs: Any) -> SliceSampler:
    return SliceSampler(traj_key=_normalize_hydra_key(traj_key), **kwargs)


@fields_from(make_env)
class MinervaEnvConfig(EnvLibsConfig):
    """Node ``env/minerva``: the arguments of :func:`~minerva_torchrl.make_env`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(MinervaEnvConfig(name="cartpole-balance", num_envs=4)).batch_size
        torch.Size([4])
    """

    _target_: str = "minerva_torchrl.envs.make_env"


def critic_nodes() -> dict[str, type]:
    """By name, nodes of the group ``critic``: what the outputs of a critic's network mean.

    Examples:
        >>> from hydra.utils import instantiate
        >>> sorted(critic_nodes())[:3]
        ['categorical', 'gaussian_mixture', 'hl_gauss']
        >>> instantiate(critic_nodes()["quantile"](num_quantiles=8)).width
        8
    """
    return {name: _critic_node(kind) for name, kind in CRITICS.items()}


def _critic_node(kind: type[Critic]) -> type:
    target = f"{critics.__name__}.{kind.__name__}"
    node = type(f"{kind.__name__}Config", (), {"_target_": target, "__annotations__": {}})
    node.__annotations__["_target_"] = str
    return fields_from(kind.__init__)(node)
