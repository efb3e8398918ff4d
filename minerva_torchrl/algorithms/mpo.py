"""MPO: settings, presets, networks, loss, replay buffer and trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tensordict.nn import ProbabilisticTensorDictSequential
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import EnvBase
from torchrl.objectives import ValueEstimators

from minerva_torchrl.algorithms.common import (
    Algorithm,
    make_optimizer,
    single_specs,
)
from minerva_torchrl.algorithms.config import (
    CollectorConfig,
    LossConfig,
    NetworkConfig,
    OptimConfig,
    RunConfig,
    arguments_of,
    not_positive,
    out_of_range,
)
from minerva_torchrl.algorithms.family import (
    make_action_critic,
    make_critic,
    make_policy,
    objectives_from,
)
from minerva_torchrl.algorithms.mpo_presets import PRESETS
from minerva_torchrl.modules import DirectModule
from minerva_torchrl.objectives import MPOLoss
from minerva_torchrl.objectives.critics import side_by_side
from minerva_torchrl.objectives.goals import MAIN_OBJECTIVE
from minerva_torchrl.objectives.policies import policy_family
from minerva_torchrl.trainers import (
    MPOOptimizationStepper,
    MPOTrainer,
    SequenceSampler,
    make_target_updater,
)
from minerva_torchrl.trainers.stepping import LRScaling

__all__ = ["MPO", "MPOConfig"]

# Settings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MPOCollectorConfig(CollectorConfig):
    """Collection, with noise that is correlated over time."""

    noise: Literal["white", "pink"] | None = None
    """Null: pink if the policy is Gaussian. Where a reward takes many actions that work together,
    it may be found much earlier than with independent samples."""


@dataclass(frozen=True)
class ReplayBufferConfig:
    """What is stored, and what is drawn from it."""

    size: int = 1_000_000
    """Transitions to keep."""
    batch_size: int = 64
    """Transitions, or sequences, to draw for an update. With 128 runs take almost twice as long;
    on walker-walk and cheetah-run they learned no more from as many frames."""
    n_steps: int = 3
    """Steps that a transition spans. With 5 walker-walk learned less, on both seeds tried."""
    sequence_length: int = 1
    """Length of the sequences to draw, for ``td_lambda`` and ``retrace``; 1 draws transitions.
    Where an episode has fewer steps left, a sequence is padded."""
    warmup_frames: int = 1_000
    """Frames to collect before the first update."""
    device: str = "cpu"
    """Where transitions are stored: ``cpu``, ``cuda``, ..., or ``auto`` for where updates are
    computed. From the host's memory batches are copied to a GPU through pinned memory."""


@dataclass(frozen=True)
class MPONetworkConfig(NetworkConfig):
    """Networks with a LayerNorm-tanh first layer and ELU above."""

    policy: Literal["gaussian", "tanh_gaussian", "full_covariance"] = "gaussian"  # type: ignore[assignment]
    """Distribution of continuous actions. Those of discrete tasks are categorical."""
    critic: Literal[
        "scalar", "categorical", "two_hot", "hl_gauss", "quantile", "gaussian_mixture"
    ] = "scalar"
    """What the critics predict: the value, probabilities of bins, or a distribution of returns."""
    critic_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of that critic, as in ``network.critic_kwargs.v_max=100``."""
    norm_every_layer: bool = True
    """LayerNorm after every hidden layer, before its activation."""
    tanh_mean: bool | None = None
    """Keep the mean of a Gaussian within the bounds of the action by a tanh. Outside of them noise
    changes nothing, because actions are clipped. Null: if there are bounds, and ``policy`` is
    ``gaussian``."""
    scale_gain: float = 0.3
    """With 1 single updates move the standard deviation beyond ``loss.epsilon_stddev``."""
    init_scale: float = 0.5
    """``loss.epsilon_stddev`` lets it change slowly."""
    num_critics: int = 1
    """Critics in the ensemble."""
    objective_networks: Literal["shared", "separate"] = "shared"
    """Critics of several objectives (``loss.objectives``): one network with an output for each,
    or a network for each."""


@arguments_of(MPOLoss)
class MPOLossConfig(LossConfig):
    """Arguments of :class:`~minerva_torchrl.MPOLoss`, and its value estimator."""

    value_estimator: Literal["td0", "td_lambda", "retrace"] = "td0"
    """``td0`` uses n-step transitions, the others sequences."""
    num_action_samples: int = 10
    """Half as many as in the papers, for more updates in the same time."""
    num_value_samples: int | None
    control_variate: bool
    epsilon: float | None = None
    """Null: 0.5 for continuous actions, because with the 0.1 of the papers the weights of so few
    samples are almost uniform, and 0.1 for discrete ones, whose weights can hardly be as far as
    0.5 from a policy of two or three actions."""
    epsilon_mean: float = 1e-2
    """Larger than in the papers, whose agents had many times more frames."""
    epsilon_stddev: float = MPOLoss.default_constraints["stddev"][0]
    epsilon_covariance: float | None
    epsilon_policy: float | None
    per_dim_constraining: bool = True
    action_penalization: bool | None
    epsilon_penalty: float = 0.05
    """With the 1e-3 of the papers many means leave the bounds (metric ``out_of_bounds``)."""
    init_temperature: float
    init_alpha_mean: float = MPOLoss.default_constraints["mean"][1]
    init_alpha_stddev: float = MPOLoss.default_constraints["stddev"][1]
    init_alpha_covariance: float | None
    init_alpha_policy: float | None
    init_penalty_temperature: float
    temperature_update: Literal["gradient", "solve"]
    alpha_update: Literal["gradient", "relative"] = "relative"
    """Steps along the gradient are too small for a multiplier that has to change tenfold."""
    policy_states: Literal["next", "current", "both"]
    sequence_steps: Literal["all", "first"]
    qvalue_reduction: Literal["min", "mean"]
    loss_function: Literal["l2", "l1", "smooth_l1"]
    objectives: dict[str, Any] = field(default_factory=dict)
    """By name, objectives beside the return: a bound, as in ``loss.objectives.energy=0.1``, or the
    fields of an ``Objective`` or a ``CostLimit``, as in ``loss.objectives.energy.threshold=20``."""
    critic_coeff: float
    clip_critic_actions: bool
    truncation_is_terminal: bool = False
    """Let the return end at a time limit, which makes it wrong. The reference agent does so."""


@arguments_of(MPOOptimizationStepper)
class MPOOptimConfig(OptimConfig):
    """Optimisers, and arguments of :class:`~minerva_torchrl.MPOOptimizationStepper`."""

    updates_per_frame: float = 1.0
    """Updates per action. With 0.5 a run takes half the time, and learns less from a frame."""
    lr_actor: float = 5e-4
    """Learning rate of the policy."""
    lr_critic: float = 5e-4
    """Learning rate of the critic. With 1e-3 its values can grow without bound before there is any
    reward, on finger-spin for example."""
    lr_dual: float = 1e-3
    """Learning rate of the multipliers, of their logarithm with ``loss.alpha_update=relative``."""
    lr_temperature: float | None = 1e-2
    """That of the temperatures; null is ``lr_dual``."""
    adam_eps: float = 1e-8
    """Adam's constant in the denominator. Gradients of dual variables can be small."""
    target_period: int | None = 100
    """Updates between two copies to the target networks; null if ``target_tau`` is set."""
    target_period_actor: int | None = None
    """That of the policy, if it differs."""
    target_tau: float | None = None
    """Moving average of the target networks instead."""
    num_policy_steps: int
    dual_order: Literal["simultaneous", "dual_first"]
    lr_scaling: LRScaling | None
    clip_critic: float | None
    clip_actor: float | None
    clip_dual: float | None


@dataclass(frozen=True)
class MPOConfig(RunConfig):
    """Settings of MPO."""

    algo: Literal["mpo"] = "mpo"
    collector: MPOCollectorConfig = field(default_factory=MPOCollectorConfig)
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    network: MPONetworkConfig = field(default_factory=MPONetworkConfig)
    loss: MPOLossConfig = field(default_factory=MPOLossConfig)
    optim: MPOOptimConfig = field(default_factory=MPOOptimConfig)

    @property
    def updates_per_batch(self) -> int:
        """Updates after each collected batch."""
        return round(self.optim.updates_per_frame * self.collector.frames_per_batch)

    @property
    def shared_batch(self) -> int:
        """What is drawn from the replay buffer for an update."""
        return self.replay_buffer.batch_size

    @property
    def compilable_steps(self) -> int:
        """All updates, unless they are taken in parts, or by learners on a cluster."""
        if self.ray.collectors:
            return 0
        whole = self.optim.num_policy_steps == 1 and self.optim.dual_order == "simultaneous"
        return self.num_batches * self.updates_per_batch if whole else 0

    def problems(self) -> Iterator[str]:
        """What is impossible about these settings, one line each."""
        yield from super().problems()
        yield from not_positive(self, "replay_buffer.size", "replay_buffer.batch_size")
        yield from not_positive(self, "replay_buffer.n_steps", "replay_buffer.sequence_length")
        yield from not_positive(self, "optim.updates_per_frame", "network.num_critics")
        yield from out_of_range(self, 1_000, "optim.updates_per_frame")
        yield from out_of_range(self, 1.0, "optim.target_tau")
        yield from self._problems_with_sequences()
        yield from self._problems_with_critics()
        buffer = self.replay_buffer
        if buffer.size < buffer.batch_size:
            yield (
                "replay_buffer.size must be at least replay_buffer.batch_size, got "
                f"{buffer.size} and {buffer.batch_size}."
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
        if self.optim.target_tau is not None and self.optim.target_period_actor is not None:
            yield (
                "optim.target_period_actor is for copies (optim.target_period), and must be null "
                f"with optim.target_tau; got {self.optim.target_period_actor}."
            )
        if self.optim.updates_per_frame * self.collector.frames_per_batch <= 0.5:
            yield (
                "optim.updates_per_frame times collector.frames_per_batch must be at least one "
                f"update, got {self.optim.updates_per_frame} times "
                f"{self.collector.frames_per_batch}."
            )

    def _problems_with_critics(self) -> Iterator[str]:
        network, estimator = self.network, self.loss.value_estimator
        try:
            critic = make_critic(network.critic, network.critic_kwargs)
        except ValueError as error:
            yield f"network.critic_kwargs: {error}"
            return
        if critic.one_step_targets and estimator != "td0":
            yield (
                f"network.critic={network.critic} takes one-step and n-step targets "
                f"(loss.value_estimator=td0), got {estimator}."
            )
        if network.critic != "scalar" and self.loss.loss_function != "l2":
            yield (
                f"loss.loss_function={self.loss.loss_function} is for network.critic=scalar, got "
                f"{network.critic}."
            )
        try:
            objectives_from(self.loss.objectives)
        except (ValueError, TypeError) as error:
            yield f"loss.objectives: {error}"

    def _problems_with_sequences(self) -> Iterator[str]:
        estimator, length = self.loss.value_estimator, self.replay_buffer.sequence_length
        if estimator == "td0" and length > 1:
            yield (
                "loss.value_estimator=td0 is for transitions (replay_buffer.sequence_length=1), "
                f"got sequences of {length}; td_lambda and retrace use sequences."
            )
        if estimator != "td0" and length < 2:
            yield (
                f"loss.value_estimator={estimator} needs replay_buffer.sequence_length of at least "
                f"2, got {length}."
            )
        if length > 1 and self.replay_buffer.n_steps > 1:
            yield (
                "replay_buffer.n_steps must be 1 for sequences (replay_buffer.sequence_length="
                f"{length}), got {self.replay_buffer.n_steps}."
            )

    def problems_with_episodes(self, steps: int | None) -> Iterator[str]:
        """What is impossible with episodes of so many actions at most (``None``: no limit)."""
        n_steps = self.replay_buffer.n_steps
        if steps is not None and n_steps > steps > 0:
            yield (
                f"replay_buffer.n_steps must be at most the {steps} steps of an episode "
                f"(env.max_episode_steps, or the task's own limit), got {n_steps}."
            )

    def problems_of_new_run(self) -> Iterator[str]:
        """What makes no sense to begin with, though there may be such runs already."""
        yield from super().problems_of_new_run()
        warmup = self.replay_buffer.warmup_frames
        if self.total_frames < warmup:
            yield (
                "total_frames must be at least replay_buffer.warmup_frames, before which nothing "
                f"is learned; got {self.total_frames} and {warmup}."
            )

    def memory(self, observation_size: int, action_size: int) -> Iterator[tuple[str, float]]:
        """What needs much memory, and about how many bytes."""
        yield from super().memory(observation_size, action_size)
        buffer, critics = self.replay_buffer, self.network.num_critics
        step = 4.0 * (2 * observation_size + action_size + 8)
        yield f"replay_buffer.size={_short(buffer.size)}", step * buffer.size
        states = float(buffer.batch_size) * buffer.sequence_length
        samples = states * self.loss.num_action_samples
        # What is kept of a layer for its gradient, and as much while it is computed.
        widths = float(sum(self.network.critic_sizes) + action_size)
        yield (
            f"replay_buffer.batch_size={_short(buffer.batch_size)} with loss.num_action_samples="
            f"{_short(self.loss.num_action_samples)}",
            8 * samples * widths * critics + 2 * step * states,
        )


def _short(number: int) -> str:
    return str(number) if number < 10**15 else f"{float(number):.3g}"


# The algorithm -----------------------------------------------------------------------------------


class MPO(Algorithm[MPOConfig]):
    """Maximum a posteriori policy optimisation, off-policy, for continuous and discrete actions."""

    title = "MPO"
    config_class = MPOConfig
    presets = PRESETS
    earlier: ClassVar = {
        **Algorithm.earlier,
        "network.norm_every_layer": False,
        "network.tanh_mean": False,
        "loss.control_variate": False,
        "loss.alpha_update": "gradient",
        "optim.lr_temperature": None,
    }

    def make_networks(
        self, env: EnvBase
    ) -> tuple[ProbabilisticTensorDictSequential, list[DirectModule]]:
        """The policy of the task's actions, and critics of states and actions."""
        obs_dim, action_spec = single_specs(env)
        settings = self.config.network
        critic = make_critic(settings.critic, settings.critic_kwargs)
        values = [MAIN_OBJECTIVE, *self.config.loss.objectives]
        actor = make_policy(obs_dim, action_spec, settings)

        def network(outputs: int) -> DirectModule:
            return make_action_critic(obs_dim, action_spec, settings, outputs)

        if settings.objective_networks == "shared":
            return actor, [network(critic.width * len(values)) for _ in range(settings.num_critics)]
        members = [
            {name: network(critic.width) for name in values} for _ in range(settings.num_critics)
        ]
        return actor, side_by_side(members, values, critic.width)

    def make_loss(self, actor: ProbabilisticTensorDictSequential, critic: Any) -> MPOLoss:
        """The loss of a policy and one or several critics."""
        arguments, network = dict(vars(self.config.loss)), self.config.network
        gamma, estimator, lmbda = (arguments.pop(k) for k in ("gamma", "value_estimator", "lmbda"))
        truncation_is_terminal = arguments.pop("truncation_is_terminal")
        arguments["objectives"] = objectives_from(arguments["objectives"])
        if arguments["epsilon"] is None:
            discrete = policy_family(actor, None, per_dim=False).enumerates
            arguments["epsilon"] = 0.1 if discrete else 0.5
        if network.critic != "scalar":
            arguments["critic"] = make_critic(network.critic, network.critic_kwargs)
        loss = MPOLoss(actor, critic, **self._applicable(arguments, actor))
        if truncation_is_terminal:
            loss.set_keys(terminated=loss.tensor_keys.done)
        if estimator == "td0":
            return loss.make_value_estimator(gamma=gamma)
        if estimator == "retrace":
            return loss.make_value_estimator("retrace", gamma=gamma, lmbda=lmbda)
        # TorchRL's vectorised form looks at where episodes end, which a compiled graph can't.
        kind, vectorized = ValueEstimators.TDLambda, False
        return loss.make_value_estimator(kind, gamma=gamma, lmbda=lmbda, vectorized=vectorized)

    def _applicable(self, arguments: dict[str, Any], actor: Any) -> dict[str, Any]:
        """Without defaults of runs that are not for the constraints of this policy.

        A setting that differs from its default is left, for the loss to refuse.
        """
        family = policy_family(actor, None, per_dim=False)
        kinds = {kind for kind, _ in family.constraint_kinds().values()}
        absent = {"mean", "stddev", "covariance", "policy"} - kinds
        names = [f"{name}_{kind}" for name in ("epsilon", "init_alpha") for kind in absent]
        if "stddev" in absent:  # no dimensions to constrain by themselves
            names.append("per_dim_constraining")
        default = vars(MPOLossConfig())
        given = {name: arguments[name] for name in names if arguments[name] == default[name]}
        return {**arguments, **dict.fromkeys(given)}

    def make_replay_buffer(self) -> TensorDictReplayBuffer:
        """A buffer that draws transitions, or sequences of one episode each."""
        settings = self.config.replay_buffer
        sampler = None
        if settings.sequence_length > 1:
            sampler = SequenceSampler(
                settings.sequence_length, sequence_steps=self.config.loss.sequence_steps
            )
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(settings.size, device=settings.device),
            sampler=sampler,
            batch_size=settings.batch_size,
        )

    def make_trainer(
        self, loss: MPOLoss, replay_buffer: TensorDictReplayBuffer | None, **arguments: Any
    ) -> MPOTrainer:
        """The trainer, with an optimiser each for critic, policy and dual variables."""
        optim, buffer = self.config.optim, self.config.replay_buffer
        lr_temperature = optim.lr_dual if optim.lr_temperature is None else optim.lr_temperature
        groups: list[dict[str, Any]] = [
            {"critic": (loss.qvalue_network_params.parameters(), optim.lr_critic)},
            {"actor": (loss.actor_network_params.parameters(), optim.lr_actor)},
            {
                "temperature": (loss.temperature_parameters(), lr_temperature),
                "alpha": (loss.alpha_parameters(), optim.lr_dual),
            },
        ]
        return MPOTrainer(
            optimization_stepper=MPOOptimizationStepper(
                *(make_optimizer(group, optim, eps=optim.adam_eps) for group in groups),
                num_policy_steps=optim.num_policy_steps,
                dual_order=optim.dual_order,
                lr_scaling=optim.lr_scaling,
                clip_critic=optim.clip_critic,
                clip_actor=optim.clip_actor,
                clip_dual=optim.clip_dual,
                metrics_interval=self.config.updates_per_batch,
            ),
            replay_buffer=replay_buffer,
            target_net_updater=make_target_updater(
                loss,
                period=optim.target_period,
                tau=optim.target_tau,
                actor_period=optim.target_period_actor,
            ),
            optim_steps_per_batch=self.config.updates_per_batch,
            warmup_frames=buffer.warmup_frames,
            n_steps=buffer.n_steps,
            gamma=self.config.loss.gamma,
            max_skipped=self.config.max_skipped,
            **arguments,
        )
