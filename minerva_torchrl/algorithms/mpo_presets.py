"""Presets of MPO: the default, and the published agents with what still differs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from minerva_torchrl.algorithms.common import Preset

__all__ = ["PRESETS"]

PRESETS = {
    "default": Preset(description="what learns best here"),
    "minerva-seed": Preset(
        description=(
            "the reference agent (Minerva): policy trained at the current states with samples of "
            "its own, one bound for mean and standard deviation, no action penalty, only the first "
            "step of a sequence, multipliers stepped before the policy, gradients clipped at one "
            "everywhere, an exponential for the standard deviation, a time limit as the end"
        ),
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
            "alpha_update": "gradient",
            "num_action_samples": 64,
        },
        stepper={
            "dual_order": "dual_first",
            "clip_critic": 1.0,
            "clip_actor": 1.0,
            "clip_dual": 1.0,
            "lr_scaling": "1/M",
        },
        adam={"eps": 1e-5},
        run={
            "eval": {"interval": 1 / 150, "episodes": 50},
            "collector": {"frames_per_batch": 50, "noise": "white"},
            "replay_buffer": {"batch_size": 256, "n_steps": 1, "warmup_frames": 10_000},
            "network": {
                "actor_sizes": [512, 256],
                "critic_sizes": [512, 256],
                "norm_every_layer": False,
                "initializer": "kaiming_mean",
                "tanh_mean": False,
                "scale": "exp",
                "scale_gain": 1.0,
                "init_scale": 1.0,
                "min_scale": math.exp(-20),
                "max_scale": math.exp(2),
            },
            "loss": {"gamma": 0.98, "truncation_is_terminal": True},
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
    "acme": Preset(
        description=(
            "Acme's TensorFlow agent: policy trained at the next states with the samples of the "
            "critic's target, a large initial temperature, an update for every eight frames. "
            "Unlike in its distributed form, the online policy acts, not its target; the target "
            "policy is copied together with the critic, not every 25 updates as in Acme's examples "
            "(optim.target_period_actor=25); and updates come one by one, not in bursts of about "
            "ten (collector.frames_per_batch=80). Unlike in both, no policy is trained at terminal "
            "states"
        ),
        loss={
            "epsilon": 0.1,
            "epsilon_mean": 2.5e-3,
            "epsilon_stddev": 1e-6,
            "init_temperature": 10.0,
            "init_alpha_mean": 10.0,
            "init_alpha_stddev": 1000.0,
            "alpha_update": "gradient",
            "init_penalty_temperature": 10.0,
            "epsilon_penalty": 1e-3,
            "num_action_samples": 20,
            "action_penalization": True,
            "policy_states": "next",
            "critic_coeff": 0.5,
        },
        run={
            "collector": {"frames_per_batch": 8, "noise": "white"},
            "replay_buffer": {"batch_size": 256, "n_steps": 5, "warmup_frames": 1_000},
            "network": {
                "actor_sizes": [256, 256, 256],
                "critic_sizes": [512, 512, 256],
                "norm_every_layer": False,
                "initializer": "fan_out",
                "tanh_mean": False,
                "scale_gain": 1.0,
                "init_scale": 0.7,
                "min_scale": 1e-6,
            },
            "loss": {"gamma": 0.99},
            "optim": {
                "updates_per_frame": 0.125,
                "lr_actor": 1e-4,
                "lr_critic": 1e-4,
                "lr_dual": 1e-2,
                "lr_temperature": None,
                "target_period": 100,
            },
        },
    ),
    "tonic": Preset(
        description=(
            "tonic: policy trained at the current states with samples of its own, targets as a "
            "moving average, no clipping of gradients, ReLU networks with a tanh mean, actions "
            "as they were drawn for the critic. Unlike there, stored observations stay normalised "
            "with the statistics of their time and clipped at 10, and 1e-4 is added to the "
            "standard deviation instead of being its smallest value"
        ),
        loss={
            "epsilon": 0.1,
            "epsilon_mean": 1e-3,
            "epsilon_stddev": 1e-6,
            "init_temperature": 1.3133,
            "init_alpha_mean": 1.3133,
            "init_alpha_stddev": 10.0,
            "alpha_update": "gradient",
            "init_penalty_temperature": 1.3133,
            "epsilon_penalty": 1e-3,
            "num_action_samples": 20,
            "action_penalization": True,
            "policy_states": "current",
            "clip_critic_actions": False,
        },
        stepper={"clip_critic": None, "clip_actor": None},
        run={
            "collector": {"frames_per_batch": 50, "noise": "white"},
            "replay_buffer": {"batch_size": 100, "n_steps": 5, "warmup_frames": 10_000},
            "env": {"observation_norm": True},
            "network": {
                "actor_sizes": [256, 256],
                "critic_sizes": [256, 256],
                "activation": "relu",
                "layer_norm": False,
                "norm_every_layer": False,
                "initializer": "pytorch",
                "tanh_mean": True,
                "scale_gain": 1.0,
                "init_scale": math.log(2),
                "max_scale": 1.0,
            },
            "loss": {"gamma": 0.99},
            "optim": {
                "updates_per_frame": 1.0,
                "lr_actor": 3e-4,
                "lr_critic": 3e-4,
                "lr_dual": 1e-2,
                "lr_temperature": None,
                "target_period": None,
                "target_tau": 0.005,
            },
        },
    ),
}


def _acme_with(description: str, **network: Any) -> Preset:
    """The preset of Acme's agent with other networks. Only its scalar critic's loss is halved."""
    acme = PRESETS["acme"]
    run = {**acme.run, "network": {**acme.run["network"], **network}}
    loss = {**acme.loss, "critic_coeff": 1.0}
    return replace(acme, loss=loss, run=run, description=description)


_ATOMS = {"v_min": -150.0, "v_max": 150.0, "num_atoms": 51}
PRESETS |= {
    "acme-dmpo": _acme_with(
        "as acme, with the categorical critic of its distributional agent (DMPO)",
        critic="categorical",
        critic_kwargs=_ATOMS,
    ),
    "acme-mog": _acme_with(
        "as acme, with the mixture of five Gaussians that its JAX agent has as a critic. Unlike "
        "there, a target has 128 sampled returns of all actions together, not of each",
        critic="gaussian_mixture",
        critic_kwargs={
            "num_components": 5,
            "num_samples": 128,
            "init_scale": 1e-3,
            "min_scale": 1e-6,
        },
    ),
    "acme-categorical": _acme_with(
        "as acme, with the critic of its JAX agent that fits bins to a scalar target (two-hot)",
        critic="two_hot",
        critic_kwargs=_ATOMS,
    ),
}
