"""Nodes for what TorchRL has no working node for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import SliceSampler
from torchrl.modules import IndependentNormal, ProbabilisticActor
from torchrl.trainers.algorithms.configs import ModelConfig
from torchrl.trainers.algorithms.configs.common import _normalize_hydra_key, _normalize_hydra_keys
from torchrl.trainers.algorithms.configs.data import SamplerConfig
from torchrl.trainers.algorithms.configs.envs_libs import EnvLibsConfig

__all__ = [
    "IndependentNormalModelConfig",
    "MinervaEnvConfig",
    "RetraceSliceSamplerConfig",
    "complete",
]


def complete(name: str, node: Any, kind: type, **missing: Any) -> Any:
    """An object as it is, or what a partial node makes of what it lacks."""
    if callable(node) and not isinstance(node, kind):
        node = node(**missing)
    if not isinstance(node, kind):
        raise TypeError(
            f"{name} must be of type {kind.__name__}, or a partial node that makes one, "
            f"got {type(node).__name__}."
        )
    return node


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


@dataclass
class RetraceSliceSamplerConfig(SamplerConfig):
    """Node ``sampler/retrace_slice``: sequences of ``slice_len`` steps, each of one trajectory.

    The buffer's ``batch_size`` counts steps: the number of sequences times ``slice_len``.

    Examples:
        >>> from hydra.utils import instantiate
        >>> sampler = instantiate(RetraceSliceSamplerConfig(slice_len=8))
        >>> sampler.slice_len, sampler.truncated_key
        (8, ('next', 'truncated'))
    """

    slice_len: int = MISSING
    traj_key: Any = field(default_factory=lambda: ["collector", "traj_ids"])
    cache_values: bool = True  # where trajectories end is looked up once per write, not per sample
    _target_: str = "minerva_torchrl.trainers._config_parts._make_retrace_slice_sampler"


def _make_retrace_slice_sampler(*, traj_key: Any, **kwargs: Any) -> SliceSampler:
    return SliceSampler(traj_key=_normalize_hydra_key(traj_key), **kwargs)


@dataclass
class MinervaEnvConfig(EnvLibsConfig):
    """Node ``env/minerva`` for :func:`~minerva_torchrl.make_env`.

    Examples:
        >>> from hydra.utils import instantiate
        >>> instantiate(MinervaEnvConfig(name="cartpole-balance", num_envs=4)).batch_size
        torch.Size([4])
    """

    name: str = MISSING
    num_envs: int | None = None
    num_workers: int = 0
    seed: int | None = None
    frame_skip: int = 1
    max_episode_steps: int | None = None
    staggered: bool = False
    observation_norm: Any = False
    device: Any = None
    _target_: str = "minerva_torchrl.envs.make_env"
