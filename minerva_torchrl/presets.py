"""Named settings: the package's own defaults and those of other implementations.

A preset says how the loss, the optimisers and their order differ from the defaults, and how a
training run does. It has what the implementation that it is named after fixes for all its tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minerva_torchrl.objectives.checks import check_choice

__all__ = ["PRESETS", "Preset", "mpo_preset", "ppo_preset", "vmpo_preset"]


@dataclass(frozen=True)
class Preset:
    """Keyword arguments by the object that takes them."""

    loss: dict[str, Any] = field(default_factory=dict)
    """Of the loss (``MPOLoss``, ``VMPOLoss``, ``make_ppo_loss``)."""
    stepper: dict[str, Any] = field(default_factory=dict)
    """Of the optimisation stepper."""
    adam: dict[str, Any] = field(default_factory=dict)
    """Of every ``torch.optim.Adam``."""
    run: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of a training run beyond these, by section."""

    def settings(self) -> dict[str, dict[str, Any]]:
        """All of it as settings of a training run, by section."""
        sections = {name: dict(section) for name, section in self.run.items()}
        sections["loss"] = {**sections.get("loss", {}), **self.loss}
        adam = {f"adam_{name}": value for name, value in self.adam.items()}
        sections["optim"] = {**sections.get("optim", {}), **self.stepper, **adam}
        return sections


_MPO_PRESETS = {
    "default": Preset(),
    # The reference agent (Minerva): policy trained at the current states with samples of its own,
    # one bound for mean and standard deviation, no action penalty, only the first step of a
    # sequence, multipliers stepped before the policy, gradients clipped at one everywhere.
    "minerva-seed": Preset(
        loss={
            "policy_states": "current",
            "sequence_steps": "first",
            "action_penalization": False,
            "epsilon": 0.1,
            "epsilon_mean": 2.5e-3,
            "epsilon_stddev": 2.5e-3,
            "init_temperature": 10.0,
            "init_alpha_mean": 10.0,
            "init_alpha_stddev": 1000.0,
            "num_action_samples": 64,
        },
        stepper={
            "dual_order": "dual_first",
            "clip_critic": 1.0,
            "clip_actor": 1.0,
            "clip_dual": 1.0,
        },
        adam={"eps": 1e-5},
        run={
            "collector": {"frames_per_batch": 50},
            "replay_buffer": {"batch_size": 256, "n_steps": 1, "warmup_frames": 10_000},
            "network": {"actor_sizes": [512, 256], "critic_sizes": [512, 256], "init_scale": 1.0},
            "loss": {"gamma": 0.98},
            "optim": {
                "updates_per_frame": 1.0,
                "lr_actor": 1e-4,
                "lr_critic": 1e-4,
                "lr_dual": 1e-2,
                "lr_temperature": 1e-3,
                "target_period": 100,
            },
        },
    ),
    # Acme's TensorFlow agent: policy trained at the next states with the samples of the critic's
    # target, a large initial temperature, an update for every eight frames.
    "acme": Preset(
        loss={
            "epsilon": 0.1,
            "epsilon_mean": 2.5e-3,
            "epsilon_stddev": 1e-6,
            "init_temperature": 10.0,
            "init_alpha_mean": 10.0,
            "init_alpha_stddev": 1000.0,
            "init_penalty_temperature": 10.0,
            "epsilon_penalty": 1e-3,
            "num_action_samples": 20,
            "action_penalization": True,
            "policy_states": "next",
        },
        run={
            "collector": {"frames_per_batch": 80},
            "replay_buffer": {"batch_size": 256, "n_steps": 5, "warmup_frames": 1_000},
            "network": {
                "actor_sizes": [256, 256, 256],
                "critic_sizes": [512, 512, 256],
                "init_scale": 0.7,
            },
            "loss": {"gamma": 0.99},
            "optim": {
                "updates_per_frame": 0.125,
                "lr_actor": 1e-4,
                "lr_critic": 1e-4,
                "lr_dual": 1e-2,
                "target_period": 100,
            },
        },
    ),
    # tonic: policy trained at the current states with samples of its own, targets as a moving
    # average, no clipping of gradients. Its networks are kept in size only: there they are ReLU
    # networks with a tanh mean and normalised observations.
    "tonic": Preset(
        loss={
            "epsilon": 0.1,
            "epsilon_mean": 1e-3,
            "epsilon_stddev": 1e-6,
            "init_temperature": 1.3133,
            "init_alpha_mean": 1.3133,
            "init_alpha_stddev": 10.0,
            "init_penalty_temperature": 1.3133,
            "epsilon_penalty": 1e-3,
            "num_action_samples": 20,
            "action_penalization": True,
            "policy_states": "current",
        },
        stepper={"clip_critic": None, "clip_actor": None},
        run={
            "collector": {"frames_per_batch": 50},
            "replay_buffer": {"batch_size": 100, "n_steps": 5, "warmup_frames": 10_000},
            "network": {"actor_sizes": [256, 256], "critic_sizes": [256, 256], "init_scale": 0.7},
            "loss": {"gamma": 0.99},
            "optim": {
                "updates_per_frame": 1.0,
                "lr_actor": 3e-4,
                "lr_critic": 3e-4,
                "lr_dual": 1e-2,
                "target_period": None,
                "target_tau": 0.005,
            },
        },
    ),
}


_VMPO_PRESETS = {
    "default": Preset(),
    # The reference agent (Minerva): temperature learned by one step per rollout, KL divergences
    # over the selected samples only, multipliers stepped before the policy, learning rates as they
    # are for any number of policy steps.
    "minerva-seed": Preset(
        loss={
            "top_k_fraction": 0.7,
            "epsilon": 0.15,
            "epsilon_mean": 0.05,
            "epsilon_stddev": 1e-3,
            "init_temperature": 5.0,
            "init_alpha_mean": 1.0,
            "init_alpha_stddev": 1.0,
            "temperature_update": "gradient",
            "kl_samples": "selected",
            "per_dim_constraining": False,
        },
        stepper={
            "num_policy_steps": 64,
            "minibatch_size": None,
            "dual_order": "dual_first",
            "clip": 0.5,
            "lr_scaling": None,
        },
        adam={"eps": 1e-5},
        run={
            "collector": {"frames_per_batch": 4096},
            "env": {"num_envs": 1},
            "network": {"actor_sizes": [512, 256], "critic_sizes": [512, 256], "init_scale": 1.0},
            "loss": {"gamma": 0.98, "lmbda": 0.92},
            "optim": {
                "lr_actor": 1e-4,
                "lr_critic": 1e-4,
                "lr_alpha": 1e-4,
                "lr_temperature": 1e-4,
                "anneal_lr": False,
            },
        },
    ),
}


_PPO_PRESETS = {
    "default": Preset(adam={"eps": 1e-5}),
    # The reference agent (Minerva), which among other things ends the return at a time limit.
    "minerva-seed": Preset(
        loss={"gamma": 0.98, "lmbda": 0.92, "truncation_is_terminal": True},
        adam={"eps": 1e-5},
        run={
            "collector": {"frames_per_batch": 2048},
            "env": {"num_envs": 1},
            "network": {"actor_sizes": [512, 256], "critic_sizes": [512, 256], "init_scale": 1.0},
            "optim": {"lr": 2e-4, "minibatch_size": 32},
        },
    ),
}


PRESETS = {"mpo": _MPO_PRESETS, "vmpo": _VMPO_PRESETS, "ppo": _PPO_PRESETS}
"""All presets, by algorithm and name."""


def mpo_preset(name: str) -> Preset:
    """The preset of MPO with a name.

    Args:
        name (str): ``"default"``, ``"minerva-seed"``, ``"acme"`` or ``"tonic"``.

    Examples:
        >>> mpo_preset("minerva-seed").adam
        {'eps': 1e-05}
    """
    return _preset("mpo", name)


def vmpo_preset(name: str) -> Preset:
    """The preset of V-MPO with a name.

    Args:
        name (str): ``"default"`` or ``"minerva-seed"``.

    Examples:
        >>> vmpo_preset("minerva-seed").loss["kl_samples"]
        'selected'
    """
    return _preset("vmpo", name)


def ppo_preset(name: str) -> Preset:
    """The preset of PPO with a name.

    Args:
        name (str): ``"default"`` or ``"minerva-seed"``.

    Examples:
        >>> ppo_preset("minerva-seed").loss["truncation_is_terminal"]
        True
    """
    return _preset("ppo", name)


def _preset(algo: str, name: str) -> Preset:
    check_choice("name", name, PRESETS[algo])
    return PRESETS[algo][name]
