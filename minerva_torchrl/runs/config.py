"""The settings of a run. Every field's default and meaning is here, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "CONFIGS",
    "CheckpointConfig",
    "CompileConfig",
    "EvalConfig",
    "LoggerConfig",
    "MPOConfig",
    "PPOConfig",
    "RunConfig",
    "VMPOConfig",
]

# Sections that all algorithms have ---------------------------------------------------------------


@dataclass(frozen=True)
class EnvConfig:
    """The task."""

    name: str = "cartpole-balance"
    """``domain-task`` of DM Control, or ``gym:`` and a Gymnasium name."""
    num_envs: int = 1
    """Copies to collect from."""
    num_workers: int = 0
    """Processes that the copies are spread over; 0 is the training process itself."""
    frame_skip: int = 1
    """Simulator steps per action."""
    max_episode_steps: int | None = None
    """Actions after which an episode is truncated, besides the task's own limit."""


@dataclass(frozen=True)
class OnPolicyEnvConfig(EnvConfig):
    """The task, as on-policy algorithms see it."""

    num_envs: int = 8
    staggered: bool = False
    """Spread the copies over the length of an episode, by cutting their first ones short."""
    observation_norm: bool = True
    """Shift and scale observations by running statistics."""
    reward_scaling: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""


@dataclass(frozen=True)
class CollectorConfig:
    """Collection."""

    frames_per_batch: int = 50
    """Actions between two rounds of updates, in all environments together."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation of the deterministic policy, in environments of its own."""

    interval: int = 5_000
    """Frames between two evaluations; there is one at the end in any case."""
    episodes: int = 5
    """Episodes, run side by side. They begin the same way at every evaluation."""
    seed: int | None = None
    """Seed of these environments. By default it follows from that of the run."""
    video: bool = False
    """Record the first episode of every evaluation to ``videos/``."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    interval: int = 20_000
    """Frames between two checkpoints; there is one at the end in any case."""
    keep: int = 1
    """Checkpoints to keep, besides the best one."""
    best: bool = True
    """Keep the one with the best evaluation as well, without replay buffer."""
    replay_buffer: bool = True
    """Save the replay buffer. Without it a resumed run begins with an empty one."""


@dataclass(frozen=True)
class LoggerConfig:
    """Where metrics go, besides ``metrics.csv`` and ``eval.csv``."""

    backend: Literal["csv", "tensorboard", "wandb"] = "csv"
    """``csv`` is those two files only; the others go through TorchRL's loggers."""
    interval: int = 1_000
    """Frames between two rows of metrics."""
    project: str = "minerva_torchrl"
    """Project of wandb."""
    mode: Literal["online", "offline"] = "online"
    """Whether wandb sends anything."""


@dataclass(frozen=True)
class CompileConfig:
    """``torch.compile``, which takes up to a minute at first.

    Small networks on a CPU gain nothing from it.
    """

    enabled: bool = False
    """Compile the networks' heavy parts."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of ``torch.compile``."""


# Sections of MPO ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayBufferConfig:
    """What is stored, and what is drawn from it."""

    size: int = 1_000_000
    """Transitions to keep."""
    batch_size: int = 128
    """Transitions, or sequences, to draw for an update."""
    n_steps: int = 5
    """Steps that a transition spans."""
    sequence_length: int = 1
    """Length of the sequences to draw, for ``td_lambda`` and ``retrace``; 1 draws transitions."""
    warmup_frames: int = 1_000
    """Frames to collect before the first update."""


@dataclass(frozen=True)
class MPONetworkConfig:
    """Networks with a LayerNorm-tanh first layer and ELU above."""

    actor_sizes: tuple[int, ...] = (256, 256)
    critic_sizes: tuple[int, ...] = (256, 256)
    num_critics: int = 1
    """Critics in the ensemble."""
    init_scale: float = 0.5
    """Initial standard deviation of the policy. ``loss.epsilon_stddev`` lets it change slowly."""


@dataclass(frozen=True)
class MPOLossConfig:
    """Arguments of ``MPOLoss`` and of its value estimator, explained there."""

    gamma: float = 0.99
    value_estimator: Literal["td0", "td_lambda", "retrace"] = "td0"
    """``td0`` uses n-step transitions, the others sequences."""
    lmbda: float = 0.95
    """Trace parameter of ``td_lambda`` and ``retrace``."""
    num_action_samples: int = 10
    """Half as many as in the papers, for twice as many updates in the same time."""
    num_value_samples: int | None = None
    epsilon: float = 0.5
    """With the 0.1 of the papers the weights of so few samples are almost uniform."""
    epsilon_mean: float = 1e-2
    epsilon_stddev: float = 1e-6
    per_dim_constraining: bool = True
    action_penalization: bool | None = None
    epsilon_penalty: float = 0.05
    """With the 1e-3 of the papers many means leave the bounds (metric ``out_of_bounds``)."""
    init_temperature: float = 1.0
    init_alpha_mean: float = 1.0
    init_alpha_stddev: float = 1000.0
    init_penalty_temperature: float = 1.0
    temperature_update: Literal["gradient", "solve"] = "gradient"
    policy_states: Literal["next", "current", "both"] = "next"
    sequence_steps: Literal["all", "first"] = "all"
    qvalue_reduction: Literal["min", "mean"] = "min"
    loss_function: Literal["l2", "l1", "smooth_l1"] = "l2"


@dataclass(frozen=True)
class MPOOptimConfig:
    """Optimisers, and the arguments of ``MPOOptimizationStepper``."""

    updates_per_frame: float = 0.5
    """Updates per action."""
    lr_actor: float = 1e-3
    lr_critic: float = 1e-3
    """Larger than in the papers, to make up for fewer updates."""
    lr_dual: float = 1e-2
    """Learning rate of the multipliers and temperatures."""
    lr_temperature: float | None = None
    """That of the temperatures, if it differs."""
    adam_eps: float = 1e-8
    target_period: int | None = 100
    """Updates between two copies to the target networks; null if ``target_tau`` is set."""
    target_tau: float | None = None
    """Moving average of the target networks instead."""
    num_policy_steps: int = 1
    dual_order: Literal["simultaneous", "dual_first"] = "simultaneous"
    clip_critic: float | None = 40.0
    clip_actor: float | None = 40.0
    clip_dual: float | None = None


# Sections of the on-policy algorithms ------------------------------------------------------------


@dataclass(frozen=True)
class OnPolicyNetworkConfig:
    """Tanh networks with orthogonal initialisation."""

    actor_sizes: tuple[int, ...] = (256, 256)
    critic_sizes: tuple[int, ...] = (256, 256)
    init_scale: float = 0.4
    """Initial standard deviation, one free parameter per action dimension.

    Much larger, and most actions would be cut off at their bounds.
    """


@dataclass(frozen=True)
class VMPOEnvConfig(OnPolicyEnvConfig):
    """The same; what V-MPO imitates should be of all phases of an episode."""

    staggered: bool = True


@dataclass(frozen=True)
class VMPONetworkConfig(OnPolicyNetworkConfig):
    """The same, with a policy that explores more at first.

    V-MPO only imitates the better actions, and its standard deviation falls faster.
    """

    init_scale: float = 0.6


@dataclass(frozen=True)
class VMPOLossConfig:
    """Arguments of ``VMPOLoss`` and of its value estimator, explained there."""

    gamma: float = 0.99
    lmbda: float = 0.95
    top_k_fraction: float = 0.5
    epsilon_eta: float = 0.1
    epsilon_mean: float | None = None
    epsilon_stddev: float | None = None
    epsilon_policy: float | None = None
    per_dim_constraining: bool | None = None
    """Null: for Gaussian policies, as in MPO."""
    init_temperature: float = 1.0
    init_alpha_mean: float | None = None
    init_alpha_stddev: float | None = None
    init_alpha_policy: float | None = None
    temperature_update: Literal["solve", "gradient"] = "solve"
    kl_samples: Literal["all", "selected"] = "all"
    normalize_advantage: bool = True
    critic_coeff: float = 0.5
    loss_critic_type: Literal["l2", "l1", "smooth_l1"] = "l2"
    clip_value: float | None = None


@dataclass(frozen=True)
class VMPOOptimConfig:
    """Optimisers, and the arguments of ``VMPOOptimizationStepper``."""

    lr_actor: float = 3e-4
    lr_critic: float = 3e-4
    lr_alpha: float = 1e-3
    """Learning rate of the multipliers."""
    anneal_lr: bool = False
    """Let the learning rates of the networks fall linearly to zero over ``total_frames``."""
    lr_temperature: float = 1e-2
    """That of a temperature with ``temperature_update=gradient``."""
    adam_eps: float = 1e-5
    num_policy_steps: int = 320
    minibatch_size: int | None = 64
    """Samples of a policy step; null is all of the rollout."""
    lr_scaling: Literal["1/sqrt(M)", "1/M"] | None = None
    clip: float | None = 1.0


@dataclass(frozen=True)
class PPOLossConfig:
    """Arguments of ``make_ppo_loss``, explained there."""

    gamma: float = 0.98
    lmbda: float = 0.92
    clip_epsilon: float = 0.2
    clip_value: bool = True
    value_coeff: float = 0.5
    entropy_coeff: float = 0.0
    normalize_advantage: bool = True
    truncation_is_terminal: bool = False


@dataclass(frozen=True)
class PPOOptimConfig:
    """The optimiser, and how often it sees a rollout."""

    lr: float = 3e-4
    anneal_lr: bool = True
    """Let the learning rate fall linearly to zero over ``total_frames``."""
    adam_eps: float = 1e-5
    num_epochs: int = 10
    minibatch_size: int = 64
    clip: float | None = 0.5
    target_kl: float | None = None
    """End the epochs over a rollout when the policy has moved further than this."""


# Whole configurations ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RunConfig:
    """What the configurations of all algorithms have."""

    algo: str = ""
    preset: str = "default"
    """Name of the preset that the other settings started from; a record only."""
    seed: int = 0
    device: str = "auto"
    """``auto`` takes a GPU if there is one."""
    total_frames: int = 100_000
    """Simulator steps, rounded up to whole batches."""
    run_dir: str | None = None
    """Folder of the run. By default one with a name of its own in ``runs/``."""
    resume: str | None = None
    """Folder of a run to go on with."""
    num_threads: int = 1
    """Threads of torch: small networks are fastest with one."""
    max_skipped: int = 10
    """Batches in a row that may not be finite before the run is given up."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)

    env: EnvConfig = field(default_factory=EnvConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)

    def problems(self) -> Iterator[str]:
        """What is impossible about these settings, one line each."""
        yield from _not_positive(self, "total_frames", "num_threads", "max_skipped")
        yield from _not_positive(self, "env.num_envs", "env.frame_skip", "env.max_episode_steps")
        yield from _not_positive(self, "collector.frames_per_batch", "logger.interval")
        yield from _not_positive(self, "eval.interval", "eval.episodes")
        yield from _not_positive(self, "checkpoint.interval", "checkpoint.keep")
        for name, seed in (("seed", self.seed), ("eval.seed", self.eval.seed)):
            if seed is not None and not 0 <= seed < 2**32:
                yield f"{name} must be between 0 and 2**32 - 1, got {seed}."
        if self.env.num_workers < 0:
            yield f"env.num_workers must not be negative, got {self.env.num_workers}."
        elif self.env.num_workers > 1 and self.env.num_envs % self.env.num_workers:
            yield (
                "env.num_envs must be a multiple of env.num_workers, got "
                f"{self.env.num_envs} and {self.env.num_workers}."
            )
        if self.env.num_envs > 0 and self.collector.frames_per_batch % self.env.num_envs:
            yield (
                "collector.frames_per_batch must be a multiple of env.num_envs, got "
                f"{self.collector.frames_per_batch} and {self.env.num_envs}."
            )


@dataclass(frozen=True)
class MPOConfig(RunConfig):
    """Settings of MPO."""

    algo: Literal["mpo"] = "mpo"
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    network: MPONetworkConfig = field(default_factory=MPONetworkConfig)
    loss: MPOLossConfig = field(default_factory=MPOLossConfig)
    optim: MPOOptimConfig = field(default_factory=MPOOptimConfig)

    @property
    def updates_per_batch(self) -> int:
        """Updates after each collected batch."""
        return round(self.optim.updates_per_frame * self.collector.frames_per_batch)

    def problems(self) -> Iterator[str]:
        """What is impossible about these settings, one line each."""
        yield from super().problems()
        buffer, estimator = self.replay_buffer, self.loss.value_estimator
        yield from _not_positive(self, "replay_buffer.size", "replay_buffer.batch_size")
        yield from _not_positive(self, "replay_buffer.n_steps", "replay_buffer.sequence_length")
        yield from _not_positive(self, "optim.updates_per_frame", *_rates(self))
        yield from _not_positive(self, "network.num_critics", "network.init_scale")
        yield from _not_layers(self, "network.actor_sizes", "network.critic_sizes")
        yield from _not_discount(self, "loss.gamma", "loss.lmbda")
        if estimator == "td0" and buffer.sequence_length > 1:
            yield (
                "loss.value_estimator=td0 is for transitions (replay_buffer.sequence_length=1), "
                f"got sequences of {buffer.sequence_length}; td_lambda and retrace use sequences."
            )
        if estimator != "td0" and buffer.sequence_length < 2:
            yield (
                f"loss.value_estimator={estimator} needs replay_buffer.sequence_length of at least "
                f"2, got {buffer.sequence_length}."
            )
        if buffer.sequence_length > 1 and buffer.n_steps > 1:
            yield (
                "replay_buffer.n_steps must be 1 for sequences (replay_buffer.sequence_length="
                f"{buffer.sequence_length}), got {buffer.n_steps}."
            )
        if (self.env.max_episode_steps or math.inf) < buffer.sequence_length:
            yield (
                "replay_buffer.sequence_length must be at most env.max_episode_steps, got "
                f"{buffer.sequence_length} and {self.env.max_episode_steps}."
            )
        steps = self.collector.frames_per_batch // max(self.env.num_envs, 1)
        if self.env.num_envs > 1 and buffer.sequence_length > steps:
            yield (
                f"replay_buffer.sequence_length must be at most the {steps} steps that each of "
                f"env.num_envs={self.env.num_envs} environments makes in a batch "
                "(collector.frames_per_batch / env.num_envs), because sequences do not go from one "
                f"batch to the next; got {buffer.sequence_length}."
            )
        if buffer.size < buffer.batch_size * buffer.sequence_length:
            yield (
                "replay_buffer.size must be at least replay_buffer.batch_size times "
                f"replay_buffer.sequence_length, got {buffer.size} and {buffer.batch_size} times "
                f"{buffer.sequence_length}."
            )
        if buffer.size < self.collector.frames_per_batch:
            yield (
                "replay_buffer.size must be at least collector.frames_per_batch, got "
                f"{buffer.size} and {self.collector.frames_per_batch}."
            )
        if buffer.warmup_frames < 0:
            yield f"replay_buffer.warmup_frames must not be negative, got {buffer.warmup_frames}."
        if (self.optim.target_period is None) == (self.optim.target_tau is None):
            yield (
                "exactly one of optim.target_period and optim.target_tau must be set, the other "
                f"null; got {self.optim.target_period} and {self.optim.target_tau}."
            )
        if self.updates_per_batch < 1:
            yield (
                "optim.updates_per_frame times collector.frames_per_batch must be at least one "
                f"update, got {self.optim.updates_per_frame} times "
                f"{self.collector.frames_per_batch}."
            )


@dataclass(frozen=True)
class OnPolicyConfig(RunConfig):
    """What the configurations of on-policy algorithms have."""

    env: OnPolicyEnvConfig = field(default_factory=OnPolicyEnvConfig)
    collector: CollectorConfig = field(default_factory=lambda: CollectorConfig(2048))
    network: OnPolicyNetworkConfig = field(default_factory=OnPolicyNetworkConfig)

    def problems(self) -> Iterator[str]:
        """What is impossible about these settings, one line each."""
        yield from super().problems()
        yield from _not_positive(self, "network.init_scale", *_rates(self))
        yield from _not_layers(self, "network.actor_sizes", "network.critic_sizes")
        yield from _not_discount(self, "loss.gamma", "loss.lmbda")


@dataclass(frozen=True)
class VMPOConfig(OnPolicyConfig):
    """Settings of V-MPO."""

    algo: Literal["vmpo"] = "vmpo"
    env: VMPOEnvConfig = field(default_factory=VMPOEnvConfig)
    network: VMPONetworkConfig = field(default_factory=VMPONetworkConfig)
    loss: VMPOLossConfig = field(default_factory=VMPOLossConfig)
    optim: VMPOOptimConfig = field(default_factory=VMPOOptimConfig)


@dataclass(frozen=True)
class PPOConfig(OnPolicyConfig):
    """Settings of PPO."""

    algo: Literal["ppo"] = "ppo"
    loss: PPOLossConfig = field(default_factory=PPOLossConfig)
    optim: PPOOptimConfig = field(default_factory=PPOOptimConfig)

    def problems(self) -> Iterator[str]:
        """What is impossible about these settings, one line each."""
        yield from super().problems()
        yield from _not_positive(self, "optim.num_epochs", "optim.minibatch_size")
        frames, minibatch = self.collector.frames_per_batch, self.optim.minibatch_size
        if minibatch > 0 and frames % minibatch:
            yield (
                "collector.frames_per_batch must be a multiple of optim.minibatch_size, got "
                f"{frames} and {minibatch}."
            )


CONFIGS: dict[str, type[RunConfig]] = {"mpo": MPOConfig, "vmpo": VMPOConfig, "ppo": PPOConfig}


# Checks ------------------------------------------------------------------------------------------


def _get(config: RunConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _not_positive(config: RunConfig, *names: str) -> Iterator[str]:
    for name in names:
        value = _get(config, name)
        if isinstance(value, (int, float)) and not value > 0:
            yield f"{name} must be positive, got {value}."


def _not_discount(config: RunConfig, *names: str) -> Iterator[str]:
    for name in names:
        value = _get(config, name)
        if isinstance(value, float) and not 0 <= value <= 1:
            yield f"{name} must be between 0 and 1, got {value}."


def _not_layers(config: RunConfig, *names: str) -> Iterator[str]:
    for name in names:
        sizes = _get(config, name)
        if isinstance(sizes, tuple) and (not sizes or min(sizes) < 1):
            yield f"{name} must have at least one layer, of at least one unit; got {list(sizes)}."


def _rates(config: MPOConfig | OnPolicyConfig) -> list[str]:
    """Names of the learning rates and of Adam's epsilon."""
    names = [name for name in vars(_get(config, "optim")) if name.startswith(("lr", "adam_eps"))]
    return [f"optim.{name}" for name in names]
