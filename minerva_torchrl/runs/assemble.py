"""From settings to environments, networks, losses and trainers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, OneHot, SliceSampler, TensorDictReplayBuffer, TensorSpec
from torchrl.envs import TransformedEnv
from torchrl.modules import (
    MLP,
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    ValueOperator,
)
from torchrl.objectives import ValueEstimators
from torchrl.objectives.common import LossModule
from torchrl.trainers import Trainer

from minerva_torchrl.envs import ReturnStdScaling, RunningObservationNorm, make_env
from minerva_torchrl.modules import (
    DirectClipPPOLoss,
    DirectModule,
    GaussianPolicy,
    StateActionCritic,
    StateIndependentScale,
    Tanh,
    orthogonal_init_,
)
from minerva_torchrl.objectives import MPOLoss, VMPOLoss, make_ppo_loss
from minerva_torchrl.runs.config import MPOConfig, OnPolicyConfig, PPOConfig, RunConfig, VMPOConfig
from minerva_torchrl.runs.strict import ConfigError
from minerva_torchrl.trainers import (
    MPOOptimizationStepper,
    MPOTrainer,
    PPOOptimizationStepper,
    VMPOOptimizationStepper,
    VMPOTrainer,
    linear_lr_annealing,
    make_ppo_trainer,
    make_target_updater,
)

__all__ = [
    "Assembly",
    "assemble",
    "evaluation_seed",
    "make_actor_and_loss",
    "make_evaluation_env",
    "make_training_env",
    "resolve_device",
]

# An environment's seed and that of its evaluation must not meet, nor those of seeds in a row.
_EVALUATION_SEED = 1_000_003


@dataclass
class Assembly:
    """What a run consists of."""

    env: TransformedEnv
    collector: Collector
    loss: LossModule
    trainer: Trainer
    replay_buffer: TensorDictReplayBuffer | None = None

    @property
    def actor(self) -> ProbabilisticTensorDictSequential:
        """The policy; deterministic or not, as the exploration type says."""
        return self.loss.actor_network


def resolve_device(name: str) -> torch.device:
    """The device of a name, ``"auto"`` included; an error if it can't be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty((), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError([f"device {name!r} can't be used here: {reason}"]) from None
    return device


# Environments ------------------------------------------------------------------------------------


def make_training_env(config: RunConfig) -> TransformedEnv:
    """The environment to collect from, ``[num_envs]``."""
    env = config.env
    try:
        made = make_env(
            env.name,
            num_envs=env.num_envs,
            num_workers=env.num_workers,
            seed=config.seed,
            frame_skip=env.frame_skip,
            max_episode_steps=env.max_episode_steps,
            staggered=isinstance(config, OnPolicyConfig) and config.env.staggered,
            observation_norm=isinstance(config, OnPolicyConfig) and config.env.observation_norm,
        )
    except ValueError as error:
        raise ConfigError([f"env.name: {error}"]) from None
    if isinstance(config, (VMPOConfig, PPOConfig)) and config.env.reward_scaling:
        made.append_transform(ReturnStdScaling(config.loss.gamma))
    return made


def make_evaluation_env(config: RunConfig, training_env: TransformedEnv) -> TransformedEnv:
    """Environments for evaluation: rewards as they are, statistics those of training, frozen."""
    norms = [t for t in training_env.transform if isinstance(t, RunningObservationNorm)]
    extra: dict[str, Any] = {}
    if config.eval.video and config.env.name.startswith("gym:"):
        extra["render_mode"] = "rgb_array"
    return make_env(
        config.env.name,
        num_envs=config.eval.episodes,
        seed=evaluation_seed(config),
        frame_skip=config.env.frame_skip,
        max_episode_steps=config.env.max_episode_steps,
        observation_norm=norms[0].frozen_view() if norms else False,
        **extra,
    )


def evaluation_seed(config: RunConfig) -> int:
    """Seed of the environments for evaluation."""
    if config.eval.seed is not None:
        return config.eval.seed
    return (config.seed + _EVALUATION_SEED) % 2**32


# Networks and losses -----------------------------------------------------------------------------


def make_actor_and_loss(config: RunConfig, env: TransformedEnv, device: torch.device) -> LossModule:
    """Networks for an environment, in the loss of the algorithm."""
    make: dict[type, Callable[..., LossModule]] = {
        MPOConfig: _mpo_loss,
        VMPOConfig: _vmpo_loss,
        PPOConfig: _ppo_loss,
    }
    try:
        return make[type(config)](config, env, device)
    except (ValueError, TypeError) as error:
        raise ConfigError([f"loss: {error}"]) from error


def _mpo_loss(config: MPOConfig, env: TransformedEnv, device: torch.device) -> MPOLoss:
    obs_dim, action_spec = _sizes(env)
    if isinstance(action_spec, OneHot):
        raise ValueError(
            f"MPO is for continuous actions, and those of {config.env.name} are discrete. Use "
            "V-MPO or PPO."
        )
    action_dim, sizes = action_spec.shape[-1], config.network
    policy = GaussianPolicy(obs_dim, action_dim, sizes.actor_sizes, init_scale=sizes.init_scale)
    actor = _gaussian_actor(policy, action_spec)
    critics = [
        ValueOperator(
            StateActionCritic(obs_dim, action_dim, sizes.critic_sizes),
            in_keys=["observation", "action"],
        ).to(device)
        for _ in range(sizes.num_critics)
    ]
    arguments = asdict(config.loss)
    gamma, estimator, lmbda = (arguments.pop(k) for k in ("gamma", "value_estimator", "lmbda"))
    loss = MPOLoss(actor.to(device), critics, **arguments)
    if estimator == "td0":
        return loss.make_value_estimator(gamma=gamma)
    kind = "retrace" if estimator == "retrace" else ValueEstimators.TDLambda
    return loss.make_value_estimator(kind, gamma=gamma, lmbda=lmbda)


def _vmpo_loss(config: VMPOConfig, env: TransformedEnv, device: torch.device) -> VMPOLoss:
    arguments = asdict(config.loss)
    gamma, lmbda = arguments.pop("gamma"), arguments.pop("lmbda")
    if arguments["per_dim_constraining"] is None:
        arguments["per_dim_constraining"] = not isinstance(_sizes(env)[1], OneHot)
    loss = VMPOLoss(*_on_policy_networks(config, env, device), **arguments)
    return loss.make_value_estimator("gae", gamma=gamma, lmbda=lmbda)


def _ppo_loss(config: PPOConfig, env: TransformedEnv, device: torch.device) -> LossModule:
    networks = _on_policy_networks(config, env, device)
    return make_ppo_loss(*networks, **asdict(config.loss), loss_class=DirectClipPPOLoss)


def _on_policy_networks(
    config: VMPOConfig | PPOConfig, env: TransformedEnv, device: torch.device
) -> tuple[ProbabilisticTensorDictSequential, TensorDictModule]:
    obs_dim, action_spec = _sizes(env)
    out_dim, sizes = action_spec.shape[-1], config.network
    network = _tanh_mlp(obs_dim, out_dim, sizes.actor_sizes, last_gain=0.01)
    if isinstance(action_spec, OneHot):
        actor = ProbabilisticActor(
            DirectModule(network, in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            spec=action_spec,
            distribution_class=OneHotCategorical,
            return_log_prob=True,
        )
    else:
        policy = StateIndependentScale(network, out_dim, init_scale=sizes.init_scale)
        actor = _gaussian_actor(policy, action_spec)
    value = _tanh_mlp(obs_dim, 1, sizes.critic_sizes, last_gain=1.0)
    critic = DirectModule(value, in_keys=["observation"], out_keys=["state_value"])
    return actor.to(device), critic.to(device)


def _gaussian_actor(policy: nn.Module, action_spec: TensorSpec) -> ProbabilisticActor:
    return ProbabilisticActor(
        DirectModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=action_spec,
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def _tanh_mlp(
    in_features: int, out_features: int, sizes: tuple[int, ...], *, last_gain: float
) -> nn.Module:
    network = MLP(in_features, out_features, num_cells=list(sizes), activation_class=Tanh)
    return orthogonal_init_(network, last_gain=last_gain)


def _sizes(env: TransformedEnv) -> tuple[int, TensorSpec]:
    """Size of an observation, and the spec of a single action."""
    spec = env.action_spec
    for _ in env.batch_size:
        spec = spec[0]
    return env.observation_spec["observation"].shape[-1], spec


# Trainers ----------------------------------------------------------------------------------------


def assemble(config: RunConfig) -> Assembly:
    """Everything that a run of these settings trains with.

    Args:
        config (RunConfig): settings without problems.

    Returns:
        Its parts, seeded with ``config.seed``.
    """
    device = resolve_device(config.device)
    torch.manual_seed(config.seed)
    # Not used here, but some environments do.
    random.seed(config.seed)
    np.random.seed(config.seed)
    env = make_training_env(config)
    loss = make_actor_and_loss(config, env, device)
    if config.compile.enabled:
        _compile_networks(loss, config.compile.mode)
    collector = Collector(
        env,
        loss.actor_network,
        frames_per_batch=config.collector.frames_per_batch,
        total_frames=-1,
        policy_device=device,
        env_device="cpu",
        storing_device="cpu",
        trust_policy=True,
    )
    common = {
        "collector": collector,
        "total_frames": config.total_frames,
        "loss_module": loss,
        "frame_skip": config.env.frame_skip,
        "max_skipped": config.max_skipped,
        "progress_bar": False,
        "auto_log_optim_steps": False,
    }
    buffer = _replay_buffer(config) if isinstance(config, MPOConfig) else None
    try:
        trainer = _make_trainer(config, loss, buffer, common)
    except (ValueError, TypeError) as error:
        raise ConfigError([f"optim: {error}"]) from error
    return Assembly(env, collector, loss, trainer, buffer)


def _make_trainer(config: RunConfig, loss: Any, buffer: Any, common: dict[str, Any]) -> Trainer:
    if isinstance(config, MPOConfig):
        return _mpo_trainer(config, loss, buffer, common)
    if isinstance(config, VMPOConfig):
        return _vmpo_trainer(config, loss, common)
    assert isinstance(config, PPOConfig)
    return _ppo_trainer(config, loss, common)


def _compile_networks(loss: LossModule, mode: str) -> None:
    for name in ("actor_network", "critic_network", "qvalue_network"):
        network = getattr(loss, name, None)
        for module in () if network is None else network.modules():
            if isinstance(module, TensorDictModule) and not isinstance(
                module.module, (nn.ModuleList, TensorDictModule)
            ):
                module.module.compile(mode=mode)


def _replay_buffer(config: MPOConfig) -> TensorDictReplayBuffer:
    settings = config.replay_buffer
    length = settings.sequence_length
    sampler = None
    if length > 1:
        sampler = SliceSampler(
            slice_len=length,
            traj_key=("collector", "traj_ids"),
            strict_length=True,
            cache_values=True,
        )
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(settings.size),
        sampler=sampler,
        batch_size=settings.batch_size * length,
    )


def _mpo_trainer(
    config: MPOConfig, loss: MPOLoss, buffer: TensorDictReplayBuffer, common: dict[str, Any]
) -> Trainer:
    optim = config.optim
    lr_temperature = optim.lr_dual if optim.lr_temperature is None else optim.lr_temperature
    temperatures = [loss.temperature.raw]
    if loss.action_penalization:
        temperatures.append(loss.penalty_temperature.raw)
    duals = [
        {"params": [p for p in temperatures if p.requires_grad], "lr": lr_temperature},
        {"params": [p for p in loss.dual_parameters() if not _among(p, temperatures)]},
    ]
    stepper = MPOOptimizationStepper(
        _adam(loss.qvalue_network_params.parameters(), optim.lr_critic, optim.adam_eps),
        _adam(loss.actor_network_params.parameters(), optim.lr_actor, optim.adam_eps),
        _adam(duals, optim.lr_dual, optim.adam_eps),
        num_policy_steps=optim.num_policy_steps,
        dual_order=optim.dual_order,
        clip_critic=optim.clip_critic,
        clip_actor=optim.clip_actor,
        clip_dual=optim.clip_dual,
    )
    return MPOTrainer(
        optimization_stepper=stepper,
        replay_buffer=buffer,
        target_net_updater=make_target_updater(
            loss, period=optim.target_period, tau=optim.target_tau
        ),
        optim_steps_per_batch=config.updates_per_batch,
        warmup_frames=config.replay_buffer.warmup_frames,
        n_steps=config.replay_buffer.n_steps,
        sequence_length=config.replay_buffer.sequence_length,
        gamma=config.loss.gamma,
        **common,
    )


def _vmpo_trainer(config: VMPOConfig, loss: VMPOLoss, common: dict[str, Any]) -> Trainer:
    optim = config.optim
    networks = [
        {"params": list(loss.actor_network_params.parameters()), "lr": optim.lr_actor},
        {"params": list(loss.critic_network_params.parameters()), "lr": optim.lr_critic},
    ]
    temperature = None
    if config.loss.temperature_update == "gradient":
        temperature = _adam([loss.temperature.raw], optim.lr_temperature, optim.adam_eps)
    optimizer = _adam(networks, optim.lr_actor, optim.adam_eps)
    stepper = VMPOOptimizationStepper(
        optimizer,
        _adam(loss.alpha_parameters(), optim.lr_alpha, optim.adam_eps),
        temperature,
        num_policy_steps=optim.num_policy_steps,
        minibatch_size=optim.minibatch_size,
        lr_scaling=optim.lr_scaling,
        clip=optim.clip,
    )
    scheduler = _annealing(config, optimizer) if optim.anneal_lr else None
    return VMPOTrainer(optimization_stepper=stepper, lr_scheduler=scheduler, **common)


def _ppo_trainer(config: PPOConfig, loss: LossModule, common: dict[str, Any]) -> Trainer:
    optim = config.optim
    optimizer = _adam(loss.parameters(), optim.lr, optim.adam_eps)
    stepper = PPOOptimizationStepper(
        optimizer,
        num_epochs=optim.num_epochs,
        minibatch_size=optim.minibatch_size,
        target_kl=optim.target_kl,
        clip=optim.clip,
    )
    return make_ppo_trainer(
        optimization_stepper=stepper,
        frames_per_batch=config.collector.frames_per_batch,
        lr_scheduler=_annealing(config, optimizer) if optim.anneal_lr else None,
        **common,
    )


def _annealing(config: RunConfig, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Learning rates that fall to zero with the last rollout."""
    frames_per_rollout = config.collector.frames_per_batch * config.env.frame_skip
    return linear_lr_annealing(optimizer, -(-config.total_frames // frames_per_rollout))


def _adam(parameters: Any, lr: float, eps: float) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=lr, eps=eps, fused=True)


def _among(parameter: Tensor, others: Sequence[Tensor]) -> bool:
    return any(parameter is other for other in others)
