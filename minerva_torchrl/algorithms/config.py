"""The settings that runs of all algorithms have. Every default and its meaning is written once.

What an algorithm adds, or does differently, is in its own file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from inspect import Parameter, signature
from itertools import pairwise
from math import inf
from typing import Any, Literal, TypeVar

from minerva_torchrl.algorithms.ray_config import RayConfig, problems_with_ray
from minerva_torchrl.modules.init import Initializer
from minerva_torchrl.modules.networks import Activation
from minerva_torchrl.objectives.duals import DualVariable

__all__ = [
    "CheckpointConfig",
    "CollectorConfig",
    "CompileConfig",
    "EnvConfig",
    "EvalConfig",
    "LoggerConfig",
    "LossConfig",
    "NetworkConfig",
    "OptimConfig",
    "RunConfig",
    "arguments_of",
    "not_positive",
    "out_of_range",
]

T = TypeVar("T")

_SMALLEST_DUAL = signature(DualVariable).parameters["floor"].default


def arguments_of(function: Callable[..., Any]) -> Callable[[type[T]], type[T]]:
    """Make a section of settings that become arguments of a function or class.

    A setting without a default has that of the argument with its name, and its meaning is in the
    function's docstring. What the section does differently, or adds, has a default of its own.

    Args:
        function (callable): has the defaults.

    Examples:
        >>> def scale(reward: float, factor: float = 2.0, shift: float = 0.0): ...
        >>> @arguments_of(scale)
        ... class RewardConfig:
        ...     factor: float
        ...     shift: float = 0.5
        >>> RewardConfig()
        RewardConfig(factor=2.0, shift=0.5)
    """
    parameters = signature(function).parameters

    def make_section(kind: type[T]) -> type[T]:
        for name in kind.__annotations__:
            if name in vars(kind):
                continue
            if name not in parameters or parameters[name].default is Parameter.empty:
                raise TypeError(
                    f"{kind.__name__}.{name} needs a default: {function.__name__} has none for it."
                )
            setattr(kind, name, parameters[name].default)
        kind.__arguments_of__ = function  # type: ignore[attr-defined] # has their meanings
        return dataclass(frozen=True)(kind)

    return make_section


# Sections ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnvConfig:
    """The task: arguments of :func:`~minerva_torchrl.make_env`."""

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
    canonical_actions: bool = True
    """Policies act between -1 and 1, whatever the bounds of the task. Without it they act in the
    task's own units, as in runs of version 0.1."""
    factory: str | None = None
    """``module:name`` of what makes an environment of your own, of Gymnasium or TorchRL, when it is
    called. ``name`` is then no more than a title."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task, of ``gymnasium.make`` or of ``factory``, as in ``env.kwargs.g=5``."""
    wrappers: tuple[str, ...] = ()
    """``module:name`` of Gymnasium wrappers, and then of TorchRL transforms, the innermost first.
    """
    observation_norm: bool = False
    """Shift and scale observations by running statistics. A replay buffer keeps what they were when
    they were collected."""

    def __post_init__(self) -> None:
        if self.factory is not None and self.name == EnvConfig.name:
            object.__setattr__(self, "name", self.factory)  # no title was given


@dataclass(frozen=True)
class CollectorConfig:
    """Collection."""

    frames_per_batch: int = 50
    """Actions between two rounds of updates, in all environments together."""
    noise: Literal["white", "pink"] | None = "white"
    """Exploration of a Gaussian policy: samples of different steps are independent (``white``), or
    related over up to hundreds of steps (``pink``). Null: pink if the policy is Gaussian."""


@dataclass(frozen=True)
class NetworkConfig:
    """The networks."""

    actor_sizes: tuple[int, ...] = (256, 256)
    """Units of the policy's hidden layers."""
    critic_sizes: tuple[int, ...] = (256, 256)
    """Units of the critic's hidden layers."""
    activation: Activation = "elu"
    """Activation of the hidden layers."""
    layer_norm: bool = True
    """LayerNorm and tanh after the first layer, in place of its activation."""
    norm_every_layer: bool = False
    """LayerNorm after every hidden layer, before its activation."""
    initializer: Initializer = "small_heads"
    """How hidden layers and heads start, see :func:`~minerva_torchrl.modules.initialize_`."""
    policy: Literal["gaussian", "tanh_gaussian"] = "gaussian"
    """Family of the policy for continuous actions. With a tanh, samples stay within the bounds."""
    tanh_mean: bool | None = False
    """Keep the mean of a Gaussian within the bounds of the action by a tanh. Null: if there are
    bounds, and ``policy`` is ``gaussian``."""
    scale: Literal["softplus", "exp", "free"] = "softplus"
    """Standard deviation of a Gaussian: a function of a layer's output, or free parameters, the
    same in every state."""
    scale_gain: float = 1.0
    """Factor of that output, or of these parameters. With a small one an update changes the
    standard deviation less."""
    init_scale: float = 0.5
    """Initial standard deviation, for heads that start small."""
    min_scale: float = 1e-4
    """Smallest standard deviation."""
    max_scale: float | None = None
    """Largest one."""
    factory: str | None = None
    """``module:name`` of a function that makes networks of your own: called with the environment
    and all settings, it returns the policy, and the critic or a list of critics."""


@dataclass(frozen=True)
class LossConfig:
    """The loss and its value estimator."""

    gamma: float = 0.99
    """Discount."""
    lmbda: float = 0.95
    """Trace parameter of the value estimator, if that has one."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimisers. Learning rates have names that begin with ``lr``."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """All of them."""
    momentum: float = 0.9
    """That of SGD."""
    adam_eps: float = 1e-5
    """Adam's constant in the denominator."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation of the deterministic policy, in environments of its own."""

    interval: int | float = 5_000
    """Frames between two evaluations, or, below one, which share of ``total_frames``; there is one
    at the end in any case."""
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
    param_delta: bool = False
    """A metric of how far updates move the parameters of the policy, which has its price."""
    project: str = "minerva_torchrl"
    """Project of wandb."""
    mode: Literal["online", "offline"] = "online"
    """Whether wandb sends anything."""


@dataclass(frozen=True)
class CompileConfig:
    """``torch.compile``, which takes up to a minute at first."""

    enabled: bool | Literal["auto", "recorded"] = "auto"
    """Compile the losses and gradients of an update. ``recorded`` compiles nothing, but calls the
    operations of the first update again, which gives the same numbers as ``false`` in less time.
    ``auto`` takes what pays for a run of this length, compiles only where there is a C++ compiler,
    and is stored as what it came to."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of ``torch.compile``. ``max-autotune`` picks kernels by their speed, so that a run that
    is resumed need not be the same to the last bit."""


# All of them -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunConfig:
    """What the settings of all algorithms have. Each algorithm has a subclass."""

    algo: str = ""
    """Name of the algorithm."""
    preset: str = "default"
    """Name of the preset that the other settings started from; a record only."""
    seed: int = 0
    """Seed of everything: networks, environments, sampling."""
    device: str = "auto"
    """``auto`` takes a GPU if there is one."""
    total_frames: int = 100_000
    """Simulator steps, rounded up to whole batches."""
    run_dir: str | None = None
    """Folder of the run. By default one with a name of its own in ``runs/``."""
    resume: str | None = None
    """Folder of a run to go on with."""
    trust: bool = False
    """Import the code that the settings of the run to go on with name."""
    num_threads: int = 1
    """Threads of torch: small networks are fastest with one."""
    deterministic: bool = False
    """Use only those algorithms of cuDNN that give the same numbers every time."""
    max_skipped: int = 10
    """Steps of an environment, batches or updates in a row that may not be finite before the run is
    given up."""
    callbacks: tuple[str, ...] = ()
    """``module:name`` of callbacks of your own: classes or functions that are called with nothing.
    """
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    env: EnvConfig = field(default_factory=EnvConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def num_batches(self) -> int:
        """Batches that the run collects."""
        per_batch = self.collector.frames_per_batch * self.env.frame_skip
        return math.ceil(self.total_frames / per_batch)

    @property
    def compilable_steps(self) -> int:
        """Gradient steps of the run that ``compile`` applies to."""
        return 0

    @property
    def shared_batch(self) -> int | None:
        """Samples of an update that learners could share; ``None`` if all stay in one process."""
        return None

    @property
    def copies_per_collector(self) -> int:
        """Copies of the task in a collector on a Ray cluster."""
        copies = self.ray.envs_per_collector
        return self.env.num_envs if copies is None else copies

    @property
    def frames_per_evaluation(self) -> int:
        """Frames between two evaluations."""
        interval = self.eval.interval
        share = interval * self.total_frames + 1e-6  # 1/150 of 300 are 2, whatever the rounding
        return max(1, int(share if interval < 1 else interval))

    def problems(self) -> Iterator[str]:
        """What is impossible about these settings, one line each."""
        yield from not_positive(self, "total_frames", "num_threads", "max_skipped")
        yield from not_positive(self, "env.num_envs", "env.frame_skip", "env.max_episode_steps")
        yield from not_positive(self, "collector.frames_per_batch", "logger.interval")
        yield from not_positive(self, "eval.interval", "eval.episodes")
        if self.eval.interval > 1 and self.eval.interval % 1:
            yield (
                "eval.interval must be a whole number of frames, or a share of total_frames below "
                f"one, got {self.eval.interval}."
            )
        yield from not_positive(self, "checkpoint.interval", "checkpoint.keep")
        rates = _names(self, "optim", "lr", "adam_eps")
        bounds = _names(self, "loss", "epsilon", "clip_value", "critic_coeff")
        scales = _names(self, "network", "init_scale", "min_scale", "max_scale", "scale_gain")
        yield from not_positive(self, *rates, *bounds, *scales)
        yield from not_positive(self, *_names(self, "loss", "num_"))
        duals = _names(self, "loss", "init_")
        yield from out_of_range(self, 1e6, *duals, least=_SMALLEST_DUAL)
        yield from not_positive(
            self, *_names(self, "optim", "num_", "clip", "target_", "minibatch")
        )
        yield from out_of_range(self, 10.0, *rates)
        yield from out_of_range(self, 1e6, *bounds, *scales)
        yield from out_of_range(self, 1_000, "env.frame_skip")
        yield from out_of_range(self, 2**63 - 1, *_integers(self))
        for name in ("run_dir", "resume"):
            yield from _problems_with_path(name, getattr(self, name))
        yield from self.problems_with_episodes(self.env.max_episode_steps)
        for name, seed in (("seed", self.seed), ("eval.seed", self.eval.seed)):
            if seed is not None and not 0 <= seed < 2**32:
                yield f"{name} must be between 0 and 2**32 - 1, got {seed}."
        for name, value in (("gamma", self.loss.gamma), ("lmbda", self.loss.lmbda)):
            if not 0 <= value <= 1:
                yield f"loss.{name} must be between 0 and 1, got {value}."
        for name in ("actor_sizes", "critic_sizes"):
            sizes = getattr(self.network, name)
            if not sizes or min(sizes) < 1:
                yield (
                    f"network.{name} must have at least one layer, of at least one unit; "
                    f"got {list(sizes)}."
                )
        enabled = self.compile.enabled
        if enabled in (True, "recorded") and self.compilable_steps == 0:
            name = str(enabled).lower()
            yield f"compile.enabled={name} is for updates taken as a whole, which these are not."
        yield from self._problems_with_scale()
        if not 0 <= self.optim.momentum < 1:
            yield f"optim.momentum must be at least 0 and below 1, got {self.optim.momentum}."
        if self.env.num_workers < 0:
            yield f"env.num_workers must not be negative, got {self.env.num_workers}."
        elif self.env.num_workers > 1 and self.env.num_envs % self.env.num_workers:
            yield (
                "env.num_envs must be a multiple of env.num_workers, got "
                f"{self.env.num_envs} and {self.env.num_workers}."
            )
        yield from problems_with_ray(self)
        copies = self.env.num_envs if self.ray.collectors <= 0 else 0
        if copies > 0 and self.collector.frames_per_batch % copies:
            yield (
                "collector.frames_per_batch must be a multiple of env.num_envs, got "
                f"{self.collector.frames_per_batch} and {self.env.num_envs}."
            )

    def _problems_with_scale(self) -> Iterator[str]:
        network = self.network
        largest = inf if network.max_scale is None else network.max_scale
        if network.init_scale > 0 and not network.min_scale <= network.init_scale <= largest:
            yield (
                "network.init_scale must lie between network.min_scale and network.max_scale, got "
                f"{network.init_scale}, {network.min_scale} and {network.max_scale}."
            )
        if network.tanh_mean and network.policy == "tanh_gaussian":
            yield (
                "network.tanh_mean=true is for network.policy=gaussian: the samples of "
                "tanh_gaussian have a tanh already."
            )

    def problems_with_episodes(self, steps: int | None) -> Iterator[str]:
        """What is impossible with episodes of so many actions at most (``None``: no limit)."""
        yield from ()

    def problems_of_new_run(self) -> Iterator[str]:
        """What makes no sense to begin with, though there may be such runs already."""
        yield from ()

    def memory(self, observation_size: int, action_size: int) -> Iterator[tuple[str, float]]:
        """What needs much memory, and about how many bytes.

        Args:
            observation_size (int): numbers in an observation.
            action_size (int): numbers in an action.
        """
        step = 4.0 * (2 * observation_size + 3 * action_size + 12)
        frames = self.collector.frames_per_batch
        yield f"collector.frames_per_batch={frames}", 2 * step * frames
        # Parameters, gradients, two moments of Adam, and targets.
        sizes, copies = self.network, getattr(self.network, "num_critics", 1)
        actor = _weights(observation_size, sizes.actor_sizes, 2 * action_size)
        yield f"network.actor_sizes={list(sizes.actor_sizes)}", 20 * actor
        critic = _weights(observation_size + action_size, sizes.critic_sizes, 1)
        number = f" and network.num_critics={copies}" if copies > 1 else ""
        # Besides their numbers, the tensors of a network are objects themselves.
        yield (
            f"network.critic_sizes={list(sizes.critic_sizes)}{number}",
            (20 * critic + 1e5) * copies,
        )


def _names(config: RunConfig, section: str, *beginnings: str) -> list[str]:
    """Dotted names of the settings of a section that begin in certain ways."""
    names = [name for name in vars(getattr(config, section)) if name.startswith(beginnings)]
    return [f"{section}.{name}" for name in names]


def _weights(inputs: int, sizes: Sequence[int], outputs: int) -> float:
    """Parameters of a network of linear layers."""
    widths = [float(inputs), *map(float, sizes), float(outputs)]
    return sum((before + 1) * after for before, after in pairwise(widths))


def _integers(section: Any, path: str = "") -> Iterator[str]:
    """Dotted names of all settings that are integers."""
    for name, value in vars(section).items():
        if is_dataclass(value):
            yield from _integers(value, f"{path}{name}.")
        elif (
            isinstance(value, int) and not isinstance(value, bool) and name not in ("seed", "size")
        ):  # with bounds of their own
            yield f"{path}{name}"


def _problems_with_path(name: str, path: str | None) -> Iterator[str]:
    """What file systems can't take."""
    if path is None:
        return
    longest = max((len(part.encode(errors="replace")) for part in path.split("/")), default=0)
    if longest > 255 or len(path.encode(errors="replace")) > 4000:
        yield f"{name} is too long: names have at most 255 bytes, and paths 4000."
    if not path.strip() or not path.isprintable():
        yield f"{name} must be the path of a folder, got {path!r}."


def not_positive(config: RunConfig, *names: str) -> Iterator[str]:
    """A line for each of some settings that is a number, but not a positive one."""
    for name in names:
        value: object = config
        for part in name.split("."):
            value = getattr(value, part)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
            yield f"{name} must be positive, got {value}."


def out_of_range(config: RunConfig, most: float, *names: str, least: float = -inf) -> Iterator[str]:
    """A line for each of some settings that is a number outside of a range."""
    for name in names:
        value: object = config
        for part in name.split("."):
            value = getattr(value, part)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not least <= value <= most:
            where = f"at most {_number(most)}" if value > most else f"at least {_number(least)}"
            yield f"{name} must be {where}, got {_number(value)}."


def _number(value: float) -> str:
    if isinstance(value, int) and abs(value) >= 10**9:
        return "2**63 - 1" if value == 2**63 - 1 else f"{value:.4g}"
    return str(value)
