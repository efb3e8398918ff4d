"""Nodes for TorchRL's Hydra configs: the losses and trainers of this package, and what they need.

Importing this module adds nodes to the groups of :mod:`torchrl.trainers.algorithms.configs`:

- ``loss/mpo`` and ``loss/vmpo``: a loss with its value estimator;
- ``trainer/mpo`` and ``trainer/vmpo``: a trainer, which completes the nodes that it is given;
- ``critic/hl_gauss``, ``critic/quantile``, ...: what the outputs of a critic's network mean, for
  ``critic`` of a loss;
- ``model/independent_normal``: a Gaussian policy without tanh;
- ``sampler/sequences``: sequences of one trajectory each;
- ``env/minerva``: an environment by name.

A configuration file lists nodes, each before those inside it, and what differs from their defaults:

.. code-block:: yaml

    defaults:
      - trainer: mpo
      - collector@trainer.collector: sync
      - env@trainer.collector.create_env_fn: minerva
      - model@trainer.actor_network: independent_normal
      - network@trainer.actor_network.network: mlp
      - model@trainer.qvalue_network: value
      - network@trainer.qvalue_network.network: mlp
      - loss@trainer.loss_module: mpo
      - replay_buffer@trainer.replay_buffer: tensordict
      - storage@trainer.replay_buffer.storage: lazy_tensor
      - sampler@trainer.replay_buffer.sampler: sequences
      - target_net_updater@trainer.target_net_updater: hard
      - optimizer@trainer.optimizer_critic: adam
      - optimizer@trainer.optimizer_actor: adam
      - optimizer@trainer.optimizer_dual: adam
      - _self_

    trainer:
      total_frames: 100_000
      optim_steps_per_batch: 50
      collector:
        _partial_: true # the trainer gives it the policy
        frames_per_batch: 50
        create_env_fn: {name: cartpole-balance, seed: 0}
      actor_network:
        network: {in_features: 5, out_features: 2, num_cells: [64, 64]} # mean and scale
      qvalue_network:
        in_keys: [observation, action]
        network: {in_features: 6, out_features: 1, num_cells: [64, 64]}
      loss_module:
        _partial_: true # the trainer gives it the networks and the action's bounds
        value_estimator: retrace
      replay_buffer:
        batch_size: 32 # sequences
        storage: {max_size: 100_000}
        sampler: {sequence_length: 8}
      target_net_updater: {value_network_update_interval: 99} # copies at every 100th step
      optimizer_critic: {lr: 3e-4, eps: 1e-8} # the node's own eps is 1e-4, not PyTorch's 1e-8
      optimizer_actor: {lr: 3e-4, eps: 1e-8}
      optimizer_dual: {lr: 1e-2, eps: 1e-8}

and a script instantiates the trainer:

.. code-block:: python

    import hydra
    import minerva_torchrl.trainers.configs


    @hydra.main(config_path=".", config_name="config", version_base=None)
    def main(config):
        hydra.utils.instantiate(config.trainer).train()

Networks are initialised before the trainer applies its ``seed``: call ``torch.manual_seed`` first
for networks that are the same each time.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.collectors import BaseCollector
from torchrl.envs.utils import RandomPolicy
from torchrl.objectives import ValueEstimators
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms.configs import LossConfig, TrainerConfig
from torchrl.trainers.algorithms.configs.trainers import _register_trainer_hooks

from minerva_torchrl.objectives.checks import check_choice
from minerva_torchrl.objectives.mpo import MPOLoss
from minerva_torchrl.objectives.vmpo import VMPOLoss
from minerva_torchrl.trainers._config_parts import (
    IndependentNormalModelConfig,
    MinervaEnvConfig,
    RetraceSliceSamplerConfig,
    SequenceSamplerConfig,
    complete,
    critic_nodes,
    fields_from,
)
from minerva_torchrl.trainers.hooks import weights_to_collector
from minerva_torchrl.trainers.mpo import MPOOptimizationStepper, MPOTrainer
from minerva_torchrl.trainers.vmpo import VMPOOptimizationStepper, VMPOTrainer

__all__ = [
    "IndependentNormalModelConfig",
    "MPOLossConfig",
    "MPOTrainerConfig",
    "MinervaEnvConfig",
    "RetraceSliceSamplerConfig",
    "SequenceSamplerConfig",
    "VMPOLossConfig",
    "VMPOTrainerConfig",
    "register",
]

# Losses ------------------------------------------------------------------------------------------


@fields_from(MPOLoss)
class MPOLossConfig(LossConfig):
    """Node ``loss/mpo`` for :class:`~minerva_torchrl.MPOLoss`.

    Every argument of the loss is a field, with its default. Three more say how the critic's target
    is made: ``value_estimator`` (``"td0"``, ``"td1"``, ``"td_lambda"`` or ``"retrace"``),
    ``gamma``, and ``lmbda`` for the last two.

    With ``_partial_: true`` the networks are left to the trainer.

    Examples:
        >>> from hydra.utils import instantiate
        >>> from torchrl.trainers.algorithms.configs import MLPConfig, ValueModelConfig
        >>> policy = MLPConfig(in_features=3, out_features=4, num_cells=[32])
        >>> critic = MLPConfig(in_features=5, out_features=1, num_cells=[32])
        >>> config = MPOLossConfig(
        ...     actor_network=IndependentNormalModelConfig(network=policy),
        ...     qvalue_network=ValueModelConfig(network=critic, in_keys=["observation", "action"]),
        ...     action_spec={"_target_": "torchrl.data.Bounded", "low": -1, "high": 1, "shape": 2},
        ...     value_estimator="retrace",
        ...     lmbda=0.9,
        ... )
        >>> loss = instantiate(config)
        >>> loss.value_estimator.lmbda
        tensor(0.9000)
    """

    actor_network: Any = None
    qvalue_network: Any = None
    value_estimator: str = "td0"
    gamma: float = 0.99
    lmbda: float = 0.95
    _target_: str = "minerva_torchrl.trainers.configs._make_mpo_loss"


def _make_mpo_loss(*, value_estimator: str, gamma: float, lmbda: float, **kwargs: Any) -> MPOLoss:
    check_choice("value_estimator", value_estimator, ("td0", "td1", "td_lambda", "retrace"))
    return MPOLoss(**kwargs).make_value_estimator(**_estimator(value_estimator, gamma, lmbda))


@fields_from(VMPOLoss)
class VMPOLossConfig(LossConfig):
    """Node ``loss/vmpo`` for :class:`~minerva_torchrl.VMPOLoss`.

    Every argument of the loss is a field, with its default. Three more say how advantages are made:
    ``value_estimator`` (``"gae"``, ``"td0"``, ``"td1"`` or ``"td_lambda"``), ``gamma``, and
    ``lmbda`` for the first and the last.

    With ``_partial_: true`` the networks are left to the trainer.

    Examples:
        >>> from hydra import compose, initialize
        >>> with initialize(version_base=None):
        ...     config = compose(overrides=["+loss=vmpo", "loss.gamma=0.995"])
        >>> config.loss.gamma, config.loss.value_estimator
        (0.995, 'gae')
    """

    actor_network: Any = None
    critic_network: Any = None
    value_estimator: str = "gae"
    gamma: float = 0.99
    lmbda: float = 0.95
    _target_: str = "minerva_torchrl.trainers.configs._make_vmpo_loss"


def _make_vmpo_loss(*, value_estimator: str, gamma: float, lmbda: float, **kwargs: Any) -> VMPOLoss:
    check_choice("value_estimator", value_estimator, ("gae", "td0", "td1", "td_lambda"))
    return VMPOLoss(**kwargs).make_value_estimator(**_estimator(value_estimator, gamma, lmbda))


_ESTIMATORS = {
    "gae": ValueEstimators.GAE,
    "td0": ValueEstimators.TD0,
    "td1": ValueEstimators.TD1,
    "td_lambda": ValueEstimators.TDLambda,
    "retrace": "retrace",
}


def _estimator(name: str, gamma: float, lmbda: float) -> dict[str, Any]:
    """Arguments of ``make_value_estimator``."""
    arguments = {"value_type": _ESTIMATORS[name], "gamma": gamma}
    return arguments if name in ("td0", "td1") else {**arguments, "lmbda": lmbda}


# Trainers ----------------------------------------------------------------------------------------

_NOT_FOR_NODES = (
    # Done by the optimisation stepper.
    *("optimizer", "optimization_stepper", "clip_grad_norm", "clip_norm"),
    # For learners that the steppers refuse, and for collectors that write to the buffer themselves.
    *("learner_backend", "learner_backend_options", "learner_poll_interval"),
    *("batch_size", "async_collection"),
)
# V-MPO is on-policy, and takes its policy steps inside one step.
_OFF_POLICY = ("replay_buffer", "optim_steps_per_batch")


@fields_from(Trainer.__init__, MPOTrainer, MPOOptimizationStepper, leave_out=_NOT_FOR_NODES)
class MPOTrainerConfig(TrainerConfig):
    """Node ``trainer/mpo`` for :class:`~minerva_torchrl.MPOTrainer`.

    The arguments of the trainer, of TorchRL's :class:`~torchrl.trainers.Trainer` and of
    :class:`~minerva_torchrl.MPOOptimizationStepper` are fields, with their defaults. Optimisers and
    ``target_net_updater`` are TorchRL's nodes, which are partial: they are given the loss and its
    parameters. If ``collector`` and ``loss_module`` have ``_partial_: true`` too, the collector
    acts with ``actor_network``, and the loss is given the networks and, unless it has one, the
    action spec of the environment. ``hooks`` are
    :class:`~torchrl.trainers.TrainerHookBase` to register.

    Examples:
        >>> from hydra import compose, initialize
        >>> with initialize(version_base=None):
        ...     config = compose(overrides=["+trainer=mpo", "trainer.n_steps=5"])
        >>> config.trainer.n_steps, config.trainer.dual_order
        (5, 'simultaneous')
    """

    actor_network: Any = None
    qvalue_network: Any = None
    hooks: list[Any] | None = None
    _target_: str = "minerva_torchrl.trainers.configs._make_mpo_trainer"


def _make_mpo_trainer(**fields: Any) -> MPOTrainer:
    loss = _complete_collector_and_loss(fields, ("actor_network", "qvalue_network"))
    parameters = {
        "optimizer_critic": loss.qvalue_network_params.parameters(),
        "optimizer_actor": loss.actor_network_params.parameters(),
        "optimizer_dual": loss.dual_parameters(),
    }
    return _make_trainer(MPOTrainer, MPOOptimizationStepper, parameters, fields)


@fields_from(
    Trainer.__init__,
    VMPOTrainer,
    VMPOOptimizationStepper,
    leave_out=(*_NOT_FOR_NODES, *_OFF_POLICY),
)
class VMPOTrainerConfig(TrainerConfig):
    """Node ``trainer/vmpo`` for :class:`~minerva_torchrl.VMPOTrainer`.

    As :class:`MPOTrainerConfig`, with ``critic_network`` and the arguments of
    :class:`~minerva_torchrl.VMPOOptimizationStepper`. ``optimizer_temperature`` is for losses with
    ``temperature_update: gradient``, and ``target_net_updater``, which steps after every
    optimisation step, for those with ``old_policy: target``. ``lr_scheduler`` is partial and given
    ``optimizer``, for example ``_target_: minerva_torchrl.trainers.linear_lr_annealing``.

    Examples:
        >>> from hydra import compose, initialize
        >>> with initialize(version_base=None):
        ...     config = compose(overrides=["+trainer=vmpo", "+loss@trainer.loss_module=vmpo"])
        >>> config.trainer.clip, config.trainer.loss_module.value_estimator
        (1.0, 'gae')
    """

    optimizer: Any = MISSING  # the stepper's, not TorchRL's
    actor_network: Any = None
    critic_network: Any = None
    hooks: list[Any] | None = None
    _target_: str = "minerva_torchrl.trainers.configs._make_vmpo_trainer"


def _make_vmpo_trainer(**fields: Any) -> VMPOTrainer:
    loss = _complete_collector_and_loss(fields, ("actor_network", "critic_network"))
    networks = (loss.actor_network_params, loss.critic_network_params)
    parameters = {
        "optimizer": [p for network in networks for p in network.parameters()],
        "optimizer_alpha": loss.alpha_parameters(),
    }
    if fields["optimizer_temperature"] is not None:
        parameters["optimizer_temperature"] = [loss.temperature.raw]
    return _make_trainer(VMPOTrainer, VMPOOptimizationStepper, parameters, fields)


def _complete_collector_and_loss(fields: dict[str, Any], network_names: tuple[str, ...]) -> Any:
    """Complete the collector with the policy, and the loss with networks and action spec."""
    networks = {name: fields.pop(name) for name in network_names}
    loss = fields["loss_module"]
    if isinstance(loss, LossModule):
        if any(network is not None for network in networks.values()):
            raise ValueError(
                f"loss_module has its networks already and can't take {' and '.join(networks)} of "
                "the trainer. Give it _partial_: true, or leave them out."
            )
        policy = loss.actor_network
    else:
        networks = {name: complete(name, node, nn.Module) for name, node in networks.items()}
        policy = networks["actor_network"]
    collector = complete("collector", fields["collector"], BaseCollector, policy=policy)
    if isinstance(getattr(collector, "policy", None), RandomPolicy):
        raise ValueError(
            "collector has no policy and would act at random. Give it _partial_: true, and it "
            "acts with that of the loss."
        )
    if getattr(loss, "keywords", {}).get("action_spec") is None:
        networks["action_spec"] = collector.getattr_env("action_spec")
    loss = complete("loss_module", loss, LossModule, **networks)
    fields.update(collector=collector, loss_module=loss)
    return loss


def _make_trainer(
    trainer_class: Any, stepper_class: Any, parameters: dict[str, Any], fields: dict[str, Any]
) -> Any:
    """Complete target updater and optimisers, and make the stepper and the trainer of them."""
    hooks = fields.pop("hooks")
    for name, params in parameters.items():
        fields[name] = complete(name, fields[name], Optimizer, params=params)
    optional = (
        ("target_net_updater", TargetNetUpdater, {"loss_module": fields["loss_module"]}),
        ("lr_scheduler", LRScheduler, {"optimizer": fields.get("optimizer")}),
    )
    for name, kind, missing in optional:
        if fields.get(name) is not None:
            fields[name] = complete(name, fields[name], kind, **missing)
    of_stepper = {name: fields.pop(name) for name in signature(stepper_class).parameters}
    trainer = trainer_class(optimization_stepper=stepper_class(**of_stepper), **fields)
    # Nodes make an object for every place that they are used in, so that the policy of a collector
    # that was complete already is not that of the loss, and has weights of its own.
    weights_to_collector(trainer)()
    _register_trainer_hooks(trainer, hooks)
    return trainer


def register() -> None:
    """Add the nodes of this module to Hydra's ``ConfigStore``; importing it does so already."""
    store = ConfigStore.instance()
    nodes = {
        "loss/mpo": MPOLossConfig,
        "loss/vmpo": VMPOLossConfig,
        "trainer/mpo": MPOTrainerConfig,
        "trainer/vmpo": VMPOTrainerConfig,
        "model/independent_normal": IndependentNormalModelConfig,
        "sampler/sequences": SequenceSamplerConfig,
        "sampler/retrace_slice": RetraceSliceSamplerConfig,
        "env/minerva": MinervaEnvConfig,
        **{f"critic/{name}": node for name, node in critic_nodes().items()},
    }
    for path, node in nodes.items():
        group, _, name = path.partition("/")
        store.store(group=group, name=name, node=node, provider="minerva_torchrl")


register()
