from __future__ import annotations

import math

import pytest
import torch
from torchrl.modules import TanhNormal
from torchrl.objectives import HardUpdate, SoftUpdate

from minerva_torchrl.algorithms import ALGORITHMS
from minerva_torchrl.envs import ReturnStdScaling, RunningObservationNorm
from minerva_torchrl.modules import TanhInterval
from minerva_torchrl.presets import PRESETS, mpo_preset, ppo_preset, vmpo_preset
from minerva_torchrl.runs import parse_config
from minerva_torchrl.runs.assemble import Assembly, assemble

ALL = [(algo, name) for algo, presets in PRESETS.items() for name in presets]


def build(algo: str, preset: str, **settings: object) -> Assembly:
    """A run with a preset as it is, on a task that costs little."""
    env = {"name": "gym:Pendulum-v1"}
    return assemble(parse_config(algo, {"preset": preset, "env": env, **settings}))


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("algo", "name"), ALL)
def test_has_no_problems_and_names_settings_only(algo: str, name: str) -> None:
    config = parse_config(algo, {"preset": name})
    assert list(config.problems()) == []
    assert config.preset == name
    for section, values in PRESETS[algo][name].settings().items():
        found = getattr(config, section)
        if not isinstance(values, dict):
            assert found == values
            continue
        for key, value in values.items():
            assert getattr(found, key) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("algo", list(PRESETS))
def test_default_is_what_the_settings_say(algo: str) -> None:
    assert parse_config(algo, {}) == ALGORITHMS[algo].config_class()


def test_other_settings_change_a_preset() -> None:
    config = parse_config("mpo", {"preset": "acme", "loss": {"gamma": 0.9}, "seed": 2})
    assert (config.loss.gamma, config.loss.init_temperature, config.seed) == (0.9, 10.0, 2)


def test_lookups_by_name() -> None:
    assert mpo_preset("acme") is PRESETS["mpo"]["acme"]
    assert vmpo_preset("minerva-seed") is PRESETS["vmpo"]["minerva-seed"]
    assert ppo_preset("default") is PRESETS["ppo"]["default"]
    with pytest.raises(ValueError, match="acme"):
        ppo_preset("acme")


@pytest.mark.parametrize("algo", list(PRESETS))
def test_the_reference_evaluates_150_times(algo: str) -> None:
    config = parse_config(algo, {"preset": "minerva-seed", "total_frames": 500_000})
    assert (config.frames_per_evaluation, config.eval.episodes) == (3333, 50)


# What they come to -------------------------------------------------------------------------------


@pytest.mark.parametrize(("algo", "name"), ALL)
def test_can_be_built(algo: str, name: str) -> None:
    assembly = build(algo, name)
    config = parse_config(algo, {"preset": name})
    assert assembly.collector.requested_frames_per_batch == config.collector.frames_per_batch
    assert assembly.env.batch_size == (config.env.num_envs,)


def test_acme() -> None:
    assembly = build("mpo", "acme")
    loss, trainer = assembly.loss, assembly.trainer
    stepper = trainer.optimization_stepper
    assert loss.policy_states == "next"
    assert loss.action_penalization
    assert loss.temperature().item() == pytest.approx(10.0)
    assert loss.penalty_temperature().item() == pytest.approx(10.0)
    assert loss.alpha_stddev().unique().tolist() == pytest.approx([1000.0])
    assert (trainer.optim_steps_per_batch, loss.critic_coeff) == (1, 0.5)
    assert assembly.actor(assembly.env.reset())["scale"].mean().item() == pytest.approx(0.7, 0.1)
    assert trainer.warmup_frames == 1000
    assert assembly.replay_buffer.batch_size == 256
    assert isinstance(trainer.target_net_updater, HardUpdate)
    assert (stepper.clip_critic, stepper.clip_actor, stepper.clip_dual) == (40.0, 40.0, None)
    # Temperatures and multipliers share a rate unless a preset says otherwise.
    assert rates(stepper.optimizer_dual) == [1e-2, 1e-2]
    assert rates(stepper.optimizer_critic) == rates(stepper.optimizer_actor) == [1e-4]


def test_tonic() -> None:
    assembly = build("mpo", "tonic")
    stepper, updater = assembly.trainer.optimization_stepper, assembly.trainer.target_net_updater
    assert isinstance(updater, SoftUpdate)
    assert updater.eps == pytest.approx(1 - 0.005)
    assert (stepper.clip_critic, stepper.clip_actor, stepper.clip_dual) == (None, None, None)
    assert assembly.loss.policy_states == "current"
    assert assembly.loss.temperature().item() == pytest.approx(1.3133)
    assert assembly.trainer.optim_steps_per_batch == 50
    policy = assembly.actor.module[0].module
    assert isinstance(policy.loc_activation, TanhInterval)
    assert isinstance(policy.torso.rest[0], torch.nn.ReLU)
    assert any(isinstance(t, RunningObservationNorm) for t in assembly.env.transform)


def test_minerva_seed_of_mpo() -> None:
    assembly = build("mpo", "minerva-seed")
    loss, stepper = assembly.loss, assembly.trainer.optimization_stepper
    temperature, multipliers = stepper.optimizer_dual.param_groups
    assert (temperature["lr"], multipliers["lr"]) == (1e-3, 1e-2)
    assert [id(p) for p in temperature["params"]] == [id(loss.temperature.raw)]
    expected = {id(loss.alpha_mean.raw), id(loss.alpha_stddev.raw)}
    assert {id(p) for p in multipliers["params"]} == expected
    assert {group["eps"] for group in stepper.optimizer_actor.param_groups} == {1e-5}
    assert stepper.dual_order == "dual_first"
    assert (stepper.clip_critic, stepper.clip_actor, stepper.clip_dual) == (1.0, 1.0, 1.0)
    assert not loss.action_penalization
    assert (loss.policy_states, loss.sequence_steps) == ("current", "first")
    assert loss.num_action_samples == 64
    assert loss.value_estimator.gamma == pytest.approx(0.98)
    assert (loss.tensor_keys.terminated, stepper.lr_scaling) == ("done", "1/M")
    policy = assembly.actor.module[0].module
    assert (policy.scale_function, policy.init_scale) == ("exp", 1.0)
    assert (policy.min_scale, policy.max_scale) == (math.exp(-20), math.exp(2))
    assert policy.loc.weight.std().item() == pytest.approx(1 / 16, rel=0.2)  # 256 inputs


def test_every_dual_is_optimised_once() -> None:
    for preset in PRESETS["mpo"]:
        assembly = build("mpo", preset)
        groups = assembly.trainer.optimization_stepper.optimizer_dual.param_groups
        optimised = [id(p) for group in groups for p in group["params"]]
        assert sorted(optimised) == sorted(id(p) for p in assembly.loss.dual_parameters())


def test_minerva_seed_of_vmpo() -> None:
    assembly = build("vmpo", "minerva-seed")
    loss, stepper = assembly.loss, assembly.trainer.optimization_stepper
    assert (stepper.num_policy_steps, stepper.minibatch_size) == (64, None)
    assert (stepper.clip, stepper.lr_scale) == (0.5, 1.0)
    assert rates(stepper.optimizer) == [1e-4, 1e-4]
    assert rates(stepper.optimizer_alpha) == rates(stepper.optimizer_temperature) == [1e-4]
    assert [*stepper.optimizer_temperature.param_groups[0]["params"]] == [loss.temperature.raw]
    assert (loss.temperature_update, loss.kl_samples) == ("gradient", "selected")
    assert loss.top_k_fraction == 0.7
    assert not loss.per_dim_constraining
    data = assembly.actor(assembly.env.reset())
    assert isinstance(assembly.actor.get_dist(data), TanhNormal)
    assert data["scale"].unique().numel() == data["scale"].numel()
    (scaling,) = (t for t in assembly.env.transform if isinstance(t, ReturnStdScaling))
    assert (scaling.gamma, scaling.reset_rule) == (0.98, "termination")


def test_default_of_vmpo_solves_the_temperature() -> None:
    stepper = build("vmpo", "default").trainer.optimization_stepper
    assert stepper.optimizer_temperature is None
    assert (stepper.num_policy_steps, stepper.minibatch_size, stepper.clip) == (320, 64, 1.0)


@pytest.mark.parametrize(
    ("task", "setting", "expected"),
    [
        ("gym:Reacher-v5", None, True),
        ("gym:Reacher-v5", False, False),
        ("gym:CartPole-v1", None, False),
    ],
)
def test_vmpo_bounds_each_dimension_of_gaussian_policies(
    task: str, setting: bool | None, expected: bool
) -> None:
    settings = {"env": {"name": task}, "loss": {"per_dim_constraining": setting}}
    loss = build("vmpo", "default", **settings).loss
    assert loss.per_dim_constraining is expected
    if task == "gym:Reacher-v5":
        assert loss.alpha_mean().shape == ((2,) if expected else ())


def test_minerva_seed_of_ppo() -> None:
    assembly = build("ppo", "minerva-seed")
    assert torch.backends.cudnn.deterministic
    (scaling,) = (t for t in assembly.env.transform if isinstance(t, ReturnStdScaling))
    assert (scaling.gamma, scaling.reset_rule) == (0.99, "termination")
    stepper = assembly.trainer.optimization_stepper
    assert rates(stepper.optimizer) == [2e-4]
    assert stepper.optimizer.param_groups[0]["eps"] == 1e-5
    assert (stepper.num_epochs, stepper.minibatch_size, stepper.target_kl) == (10, 32, None)


def test_settings_without_a_preset_reach_their_objects() -> None:
    settings = {
        "optim": {"target_period": 7, "lr_temperature": 0.5, "num_policy_steps": 3},
        "replay_buffer": {"size": 600, "n_steps": 1, "sequence_length": 4},
        "loss": {"value_estimator": "retrace", "lmbda": 0.5},
        "network": {"num_critics": 2, "init_scale": 0.25},
        "max_skipped": 4,
    }
    assembly = build("mpo", "default", **settings)
    stepper = assembly.trainer.optimization_stepper
    assert assembly.trainer.target_net_updater.value_network_update_interval == 6
    assert stepper.num_policy_steps == 3
    assert rates(stepper.optimizer_dual) == [0.5, 1e-3]
    assert assembly.replay_buffer.storage.max_size == 600
    assert assembly.replay_buffer.batch_size == 64
    assert assembly.replay_buffer.sampler.sequence_length == 4
    assert assembly.replay_buffer.sampler.sequence_steps == "all"
    assert assembly.trainer.finite_batches.limit == 4
    assert float(assembly.loss.value_estimator.lmbda) == 0.5
    observation = assembly.env.reset()
    assert assembly.actor(observation)["scale"].mean().item() == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize(
    ("task", "given", "epsilon"),
    [("gym:Pendulum-v1", None, 0.5), ("gym:CartPole-v1", None, 0.1), ("gym:CartPole-v1", 0.3, 0.3)],
)
def test_the_bound_of_the_weights_fits_the_actions(
    task: str, given: float | None, epsilon: float
) -> None:
    assembly = build("mpo", "default", env={"name": task}, loss={"epsilon": given})
    assert assembly.loss.epsilon.item() == pytest.approx(epsilon)


@pytest.mark.parametrize("preset", ["acme", "tonic"])
def test_presets_of_others_do_not_follow_the_defaults(preset: str) -> None:
    """What these implementations share with the papers, and the defaults here do not."""
    assembly = build("mpo", preset)
    loss = assembly.loss
    assert loss.num_action_samples == 20
    assert loss.epsilon.item() == pytest.approx(0.1)
    assert loss.epsilon_stddev.item() == pytest.approx(1e-6)
    assert loss.alpha_update == "gradient"
    assert rates(assembly.trainer.optimization_stepper.optimizer_dual) == [1e-2, 1e-2]
    assert loss.epsilon_penalty.item() == pytest.approx(1e-3)


@pytest.mark.parametrize(("algo", "name"), [pair for pair in ALL if pair[1] != "default"])
def test_no_gain_for_the_standard_deviation_of_others(algo: str, name: str) -> None:
    """They have none, whatever the default here."""
    assert PRESETS[algo][name].settings()["network"]["scale_gain"] == 1.0


@pytest.mark.parametrize(("algo", "name"), [pair for pair in ALL if pair[1] != "default"])
def test_means_of_others(algo: str, name: str) -> None:
    assert parse_config(algo, {"preset": name}).network.tanh_mean is (name == "tonic")


@pytest.mark.parametrize(("algo", "name"), [pair for pair in ALL if pair[1] != "default"])
def test_others_explore_with_independent_samples(algo: str, name: str) -> None:
    assert parse_config(algo, {"preset": name}).collector.noise == "white"
