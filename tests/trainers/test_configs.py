"""The nodes compose with TorchRL's, and make trainers that train."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.objectives import HardUpdate, SoftUpdate
from torchrl.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator
from torchrl.trainers.algorithms import configs as torchrl_configs

from minerva_torchrl import (
    MPOLoss,
    MPOTrainer,
    Retrace,
    VMPOLoss,
    VMPOTrainer,
)
from minerva_torchrl.objectives.critics import CRITICS, HLGaussCritic
from minerva_torchrl.trainers import SequenceSampler, configs
from tests.trainers.config_files import LOSS_ALONE, MPO, VMPO, WHOLE_PARTS

Compose = Callable[..., DictConfig]


@pytest.fixture
def composed(tmp_path: Path) -> Compose:
    def compose_file(text: str, *overrides: str) -> DictConfig:
        (tmp_path / "config.yaml").write_text(text)
        with initialize_config_dir(str(tmp_path), version_base=None):
            return compose("config", overrides=list(overrides))

    return compose_file


def documented() -> str:
    """The file that the module's docstring shows."""
    text = cleandoc(configs.__doc__ or "")
    found = re.search(r"code-block:: yaml\n\n(.*?)\n\nand a script", text, re.DOTALL)
    assert found is not None
    return cleandoc(found[1])


def copies(*parts: Any) -> list[Tensor]:
    return [p.detach().clone() for part in parts for p in parameters(part)]


def parameters(part: Any) -> list[Tensor]:
    return list(part.parameters() if hasattr(part, "parameters") else part)


def held(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def ids(*parts: Any) -> list[int]:
    return [id(p) for part in parts for p in parameters(part)]


def all_changed(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(not torch.equal(b, a) for b, a in zip(before, after, strict=True))


class TestMPOTrainer:
    def test_trains_on_n_step_transitions(self, composed: Compose) -> None:
        trainer = instantiate(composed(MPO).trainer)
        assert isinstance(trainer, MPOTrainer)
        loss = trainer.loss_module
        parts = (
            loss.qvalue_network_params,
            loss.actor_network_params,
            loss.dual_parameters(),
            list(loss.target_qvalue_network_params.values(True, True)),
            list(loss.target_actor_network_params.values(True, True)),
        )
        before = copies(*parts)
        trainer.train()
        assert trainer.collected_frames == 200
        assert trainer._optim_count == 12
        # The last five wait for their successors, the first four are stored as single steps, too.
        assert len(trainer.replay_buffer) == 199
        assert isinstance(loss.value_estimator, TD0Estimator)
        assert all_changed(before, copies(*parts))
        assert trainer.optimization_stepper.skipped_updates == 0

    def test_trains_with_a_critic_of_a_node(self, composed: Compose) -> None:
        config = composed(
            MPO,
            "+critic@trainer.loss_module.critic=hl_gauss",
            "trainer.loss_module.critic.num_atoms=7",
            "trainer.qvalue_network.network.out_features=7",
        )
        trainer = instantiate(config.trainer)
        (critic,) = trainer.loss_module.critics
        assert isinstance(critic, HLGaussCritic)
        assert critic.width == 7
        before = copies(trainer.loss_module.qvalue_network_params)
        trainer.train()
        assert all_changed(before, copies(trainer.loss_module.qvalue_network_params))

    def test_documented_file_trains_with_retrace(self, composed: Compose) -> None:
        few = ("total_frames=200", "optim_steps_per_batch=2", "progress_bar=false")
        config = composed(documented(), *(f"trainer.{override}" for override in few))
        config.trainer.collector.create_env_fn.update(num_envs=2, max_episode_steps=15)
        trainer = instantiate(config.trainer)
        assert isinstance(trainer.loss_module.value_estimator, Retrace)
        before = copies(trainer.loss_module.actor_network_params)
        trainer.train()
        assert trainer.collected_frames == 200
        assert all_changed(before, copies(trainer.loss_module.actor_network_params))
        batch = trainer.memory.sample()
        trajectories = batch["collector", "traj_ids"]
        assert batch.shape == (32, 8)
        assert trajectories.unique().numel() > 3
        assert (trajectories == trajectories[:, :1]).all()

    def test_optimizers_hold_their_parameters(self, composed: Compose) -> None:
        trainer = instantiate(composed(MPO).trainer)
        stepper, loss = trainer.optimization_stepper, trainer.loss_module
        assert held(stepper.optimizer_critic) == ids(loss.qvalue_network_params)
        assert held(stepper.optimizer_actor) == ids(loss.actor_network_params)
        assert held(stepper.optimizer_dual) == ids(loss.dual_parameters())
        assert isinstance(stepper.optimizer_critic, torch.optim.SGD)
        assert isinstance(stepper.optimizer_actor, torch.optim.Adam)

    def test_collector_acts_with_the_policy_of_the_loss(self, composed: Compose) -> None:
        trainer = instantiate(composed(MPO).trainer)
        assert ids(trainer.collector.policy) == ids(trainer.loss_module.actor_network_params)

    def test_overrides_reach_the_objects(self, composed: Compose) -> None:
        overrides = {
            "n_steps": 3,
            "gamma": 0.9,
            "warmup_frames": 70,
            "max_skipped": 4,
            "log_interval": 17,
            "seed": 5,
            "num_policy_steps": 2,
            "dual_order": "dual_first",
            "clip_critic": 1.5,
            "clip_actor": "null",
            "clip_dual": 2.5,
            "optimizer_critic.lr": 0.25,
            "target_net_updater.tau": 0.125,
            "loss_module.gamma": 0.9,
            "loss_module.epsilon": 0.3,
            "loss_module.num_action_samples": 7,
            "loss_module.num_qvalue_nets": 2,
            "loss_module.policy_states": "both",
            "replay_buffer.batch_size": 11,
            "collector.create_env_fn.frame_skip": 2,
            "collector.create_env_fn.num_envs": 5,
        }
        given = (f"trainer.{name}={value}" for name, value in overrides.items())
        trainer = instantiate(composed(MPO, *given).trainer)
        stepper, loss = trainer.optimization_stepper, trainer.loss_module
        assert trainer.memory._multi_step.n_steps == 3
        assert trainer.memory._multi_step.gamma == pytest.approx(0.9)
        assert trainer.warmup_frames == 70
        assert trainer.finite_batches.limit == 4
        assert trainer._log_interval == 17
        assert trainer.seed == 5
        assert stepper.num_policy_steps == 2
        assert stepper.dual_order == "dual_first"
        assert (stepper.clip_critic, stepper.clip_actor, stepper.clip_dual) == (1.5, None, 2.5)
        assert stepper.optimizer_critic.param_groups[0]["lr"] == 0.25
        assert isinstance(trainer.target_net_updater, SoftUpdate)
        assert trainer.target_net_updater.eps == 1 - 0.125
        assert loss.value_estimator.gamma.item() == pytest.approx(0.9)
        assert loss.epsilon.item() == pytest.approx(0.3)
        assert loss.num_action_samples == 7
        assert loss.num_qvalue_nets == 2
        assert loss.policy_states == "both"
        assert trainer.replay_buffer._batch_size == 11
        assert trainer.collector.env.batch_size == (5,)
        assert trainer.collector.env.base_env.frame_skip == 2

    def test_action_spec_is_that_of_the_environment(self, composed: Compose) -> None:
        loss = instantiate(composed(MPO).trainer).loss_module
        assert (loss.policy.low.item(), loss.policy.high.item()) == (-1.0, 1.0)
        assert loss.alpha_mean().shape == (1,)

    def test_action_spec_of_the_loss_comes_first(self, composed: Compose) -> None:
        spec = "{_target_: torchrl.data.Bounded, low: -3.0, high: 2.0, shape: 1}"
        config = composed(MPO, f"trainer.loss_module.action_spec={spec}")
        loss = instantiate(config.trainer).loss_module
        assert (loss.policy.low.item(), loss.policy.high.item()) == (-3.0, 2.0)

    def test_hooks_are_registered(self, composed: Compose) -> None:
        hook = "{_target_: torchrl.trainers.trainers.CountFramesLog, frame_skip: 1}"
        trainer = instantiate(composed(MPO, f"trainer.hooks=[{hook}]").trainer)
        assert trainer._modules["count_frames_log"].frame_skip == 1

    @pytest.mark.parametrize(("gamma", "n_steps", "allowed"), [(0.9, 5, False), (0.9, 1, True)])
    def test_gamma_must_be_that_of_the_loss(
        self, composed: Compose, gamma: float, n_steps: int, allowed: bool
    ) -> None:
        config = composed(MPO, f"trainer.gamma={gamma}", f"trainer.n_steps={n_steps}")
        if allowed:
            instantiate(config.trainer)
        else:
            message = r"gamma must be that of .* got 0.9 and 0.99"
            with pytest.raises(InstantiationException, match=message):
                instantiate(config.trainer)


class TestVMPOTrainer:
    def test_trains(self, composed: Compose) -> None:
        trainer = instantiate(composed(VMPO).trainer)
        assert isinstance(trainer, VMPOTrainer)
        loss = trainer.loss_module
        parts = (
            loss.actor_network_params,
            loss.critic_network_params,
            loss.alpha_parameters(),
            [loss.temperature.raw],
        )
        before = copies(*parts)
        trainer.train()
        assert trainer.collected_frames == 200
        assert trainer._optim_count == 2
        assert all_changed(before, copies(*parts))
        assert trainer.optimization_stepper.skipped_updates == 0

    def test_learned_temperature_has_an_optimizer(self, composed: Compose) -> None:
        config = composed(
            VMPO,
            "+optimizer@trainer.optimizer_temperature=sgd",
            "trainer.loss_module.temperature_update=gradient",
        )
        trainer = instantiate(config.trainer)
        stepper, temperature = trainer.optimization_stepper, trainer.loss_module.temperature.raw
        assert held(stepper.optimizer_temperature) == [id(temperature)]
        before = copies([temperature])
        trainer.train()
        assert all_changed(before, copies([temperature]))

    def test_optimizers_hold_their_parameters(self, composed: Compose) -> None:
        trainer = instantiate(composed(VMPO).trainer)
        stepper, loss = trainer.optimization_stepper, trainer.loss_module
        networks = (loss.actor_network_params, loss.critic_network_params)
        assert held(stepper.optimizer) == ids(*networks)
        assert held(stepper.optimizer_alpha) == ids(loss.alpha_parameters())
        assert stepper.optimizer_temperature is None

    def test_overrides_reach_the_objects(self, composed: Compose) -> None:
        overrides = {
            "num_policy_steps": 3,
            "lr_scaling": "1/M",
            "clip": "null",
            "optimizer_alpha.lr": 0.5,
            "num_epochs": 2,
            "loss_module.top_k_fraction": 0.25,
            "loss_module.epsilon_mean": 0.2,
            "loss_module.lmbda": 0.8,
            "loss_module.normalize_advantage": "false",
        }
        given = (f"trainer.{name}={value}" for name, value in overrides.items())
        trainer = instantiate(composed(VMPO, *given).trainer)
        stepper, loss = trainer.optimization_stepper, trainer.loss_module
        assert (stepper.num_policy_steps, stepper.lr_scaling, stepper.clip) == (3, "1/M", None)
        assert stepper.optimizer_alpha.param_groups[0]["lr"] == 0.5
        assert trainer.num_epochs == 2
        assert loss.top_k_fraction == 0.25
        assert loss.epsilon_mean.item() == pytest.approx(0.2)
        assert loss.value_estimator.lmbda.item() == pytest.approx(0.8)
        assert loss.normalize_advantage is False

    def test_target_policy_is_updated_once_per_step(self, composed: Compose) -> None:
        config = composed(
            VMPO,
            "+target_net_updater@trainer.target_net_updater=hard",
            "trainer.loss_module.old_policy=target",
        )
        trainer = instantiate(config.trainer)
        assert isinstance(trainer.target_net_updater, HardUpdate)
        trainer.train()
        assert trainer.target_net_updater.counter == 2  # it counts its steps

    def test_learning_rate_is_annealed(self, composed: Compose) -> None:
        target = "minerva_torchrl.trainers.linear_lr_annealing"
        node = f"{{_target_: {target}, _partial_: true, num_updates: 4}}"
        trainer = instantiate(composed(VMPO, f"trainer.lr_scheduler={node}").trainer)
        [group] = trainer.optimization_stepper.optimizer.param_groups
        lr = group["lr"]
        trainer.train()
        assert group["lr"] == pytest.approx(lr / 2)  # after two rollouts of four

    @pytest.mark.parametrize(
        "override",
        [
            "trainer.loss_module.old_policy=target",
            "+target_net_updater@trainer.target_net_updater=soft",
        ],
    )
    def test_target_updater_goes_with_a_target_policy(
        self, composed: Compose, override: str
    ) -> None:
        with pytest.raises(InstantiationException, match=r"old_policy|any target parameters"):
            instantiate(composed(VMPO, override).trainer)

    def test_whole_parts_used_by_name(self, composed: Compose) -> None:
        trainer = instantiate(composed(WHOLE_PARTS).trainer)
        of_collector = parameters(trainer.collector.policy)
        of_loss = parameters(trainer.loss_module.actor_network_params)
        torch.testing.assert_close(of_collector, of_loss, rtol=0, atol=0)
        trainer.train()
        assert trainer.collected_frames == 200
        torch.testing.assert_close(of_collector, of_loss, rtol=0, atol=0)

    def test_partial_collector_takes_the_policy_of_a_whole_loss(self, composed: Compose) -> None:
        config = composed(WHOLE_PARTS, "collector._partial_=true")
        trainer = instantiate(config.trainer)
        assert ids(trainer.collector.policy) == ids(trainer.loss_module.actor_network_params)


class TestMistakes:
    @pytest.mark.parametrize("text", [MPO, VMPO])
    @pytest.mark.parametrize("name", ["unknown", "loss_module.unknown"])
    def test_unknown_field(self, composed: Compose, text: str, name: str) -> None:
        with pytest.raises(ConfigCompositionException, match=f"Could not override.*{name}"):
            composed(text, f"trainer.{name}=1")

    @pytest.mark.parametrize(
        ("name", "value"),
        [("total_frames", "many"), ("loss_module.epsilon_mean", "small"), ("frame_skip", "null")],
    )
    def test_wrong_type(self, composed: Compose, name: str, value: str) -> None:
        with pytest.raises(ConfigCompositionException, match=f"Error merging override.*{name}"):
            composed(MPO, f"trainer.{name}={value}")

    def test_value_that_the_loss_refuses(self, composed: Compose) -> None:
        with pytest.raises(InstantiationException, match="policy_states must be"):
            instantiate(composed(MPO, "trainer.loss_module.policy_states=previous").trainer)

    def test_missing_field(self, composed: Compose) -> None:
        text = MPO.replace("  optim_steps_per_batch: 3\n", "")
        with pytest.raises(MissingMandatoryValue, match=r"trainer\.optim_steps_per_batch"):
            instantiate(composed(text).trainer)

    @pytest.mark.parametrize(
        ("text", "name"), [(MPO, "optimizer_actor"), (VMPO, "optimizer"), (MPO, "collector")]
    )
    def test_missing_part(self, composed: Compose, text: str, name: str) -> None:
        with pytest.raises(InstantiationException, match=f"{name} must be of type .* got NoneType"):
            instantiate(composed(text, f"trainer.{name}=null").trainer)

    def test_collector_without_policy(self, composed: Compose) -> None:
        config = composed(MPO, "trainer.collector._partial_=false")
        with pytest.raises(InstantiationException, match="collector has no policy"):
            instantiate(config.trainer)

    def test_networks_that_nothing_takes(self, composed: Compose) -> None:
        config = composed(WHOLE_PARTS, "+trainer.actor_network=${actor}")
        with pytest.raises(InstantiationException, match="loss_module has its networks already"):
            instantiate(config.trainer)


class TestLosses:
    def test_alone_among_nodes_of_torchrl(self, composed: Compose) -> None:
        config = composed(LOSS_ALONE)
        loss = instantiate(config.loss)
        updater = instantiate(config.target_net_updater)(loss)
        collector = instantiate(config.collector)
        batch = next(iter(collector))
        output = loss(batch)
        sum(value for name, value in output.items() if name.startswith("loss_")).backward()
        assert all(p.grad.isfinite().all() for p in loss.parameters() if p.requires_grad)
        updater.step()
        collector.shutdown()

    @pytest.mark.parametrize(
        ("name", "estimator"),
        [
            ("td0", TD0Estimator),
            ("td1", TD1Estimator),
            ("td_lambda", TDLambdaEstimator),
            ("retrace", Retrace),
        ],
    )
    def test_estimators_of_mpo(self, composed: Compose, name: str, estimator: type) -> None:
        overrides = (f"loss.value_estimator={name}", "loss.gamma=0.9", "loss.lmbda=0.7")
        loss = instantiate(composed(LOSS_ALONE, *overrides).loss)
        assert type(loss) is MPOLoss
        assert type(loss.value_estimator) is estimator
        assert loss.value_estimator.gamma.item() == pytest.approx(0.9)
        if hasattr(loss.value_estimator, "lmbda"):
            assert loss.value_estimator.lmbda.item() == pytest.approx(0.7)

    @pytest.mark.parametrize(
        ("name", "estimator"),
        [
            ("gae", GAE),
            ("td0", TD0Estimator),
            ("td1", TD1Estimator),
            ("td_lambda", TDLambdaEstimator),
        ],
    )
    def test_estimators_of_vmpo(self, composed: Compose, name: str, estimator: type) -> None:
        overrides = (f"loss.value_estimator={name}", "loss.gamma=0.9", "loss.lmbda=0.7")
        loss = instantiate(composed(WHOLE_PARTS, *overrides).loss)
        assert type(loss) is VMPOLoss
        assert type(loss.value_estimator) is estimator
        assert loss.value_estimator.gamma.item() == pytest.approx(0.9)
        if hasattr(loss.value_estimator, "lmbda"):
            assert loss.value_estimator.lmbda.item() == pytest.approx(0.7)

    @pytest.mark.parametrize(("text", "name"), [(LOSS_ALONE, "gae"), (WHOLE_PARTS, "retrace")])
    def test_estimator_of_the_other_loss(self, composed: Compose, text: str, name: str) -> None:
        with pytest.raises(InstantiationException, match=f"value_estimator must be .*{name}"):
            instantiate(composed(text, f"loss.value_estimator={name}").loss)


class TestOtherNodes:
    @pytest.mark.parametrize(("scale_lb", "scale"), [(0.01, 0.3), (0.4, 0.4)])
    def test_gaussian_policy(self, composed: Compose, scale_lb: float, scale: float) -> None:
        overrides = ("actor.scale_mapping=biased_softplus_0.3", f"actor.scale_lb={scale_lb}")
        actor = instantiate(composed(WHOLE_PARTS, *overrides).actor)
        last = actor[0].module[0][-1]
        nn.init.zeros_(last.weight)
        with torch.no_grad():
            last.bias.copy_(torch.tensor([5.0, 0.0]))
        output = actor(TensorDict({"observation": torch.randn(4, 5)}, [4]))
        torch.testing.assert_close(output["scale"], torch.full((4, 1), scale))
        torch.testing.assert_close(output["action"], torch.full((4, 1), 5.0))  # no tanh
        assert output["action_log_prob"].shape == (4,)

    def test_gaussian_policy_with_nested_keys(self, composed: Compose) -> None:
        overrides = ("actor.in_keys=[[robot,state]]", "actor.out_keys=[[robot,torque]]")
        config = composed(WHOLE_PARTS, *overrides, "actor.return_log_prob=false")
        actor = instantiate(config.actor)
        assert actor.in_keys == [("robot", "state")]
        assert actor.out_keys == ["loc", "scale", ("robot", "torque")]

    def test_gaussian_policy_in_shared_memory(self, composed: Compose) -> None:
        actor = instantiate(composed(WHOLE_PARTS, "actor.shared=true").actor)
        assert all(p.is_shared() for p in actor.parameters())

    def test_sampler(self, composed: Compose) -> None:
        config = composed("defaults: [sampler: sequences]", "sampler.sequence_length=7")
        sampler = instantiate(config.sampler)
        assert isinstance(sampler, SequenceSampler)
        assert (sampler.sequence_length, sampler.sequence_steps) == (7, "all")
        config.sampler.sequence_steps = "first"
        assert instantiate(config.sampler).sequence_steps == "first"

    def test_the_sampler_of_older_files(self, composed: Compose) -> None:
        config = composed("defaults: [sampler: retrace_slice]", "sampler.slice_len=7")
        sampler = instantiate(config.sampler)
        assert (sampler.slice_len, sampler.traj_key) == (7, ("collector", "traj_ids"))

    def test_environment(self, composed: Compose) -> None:
        overrides = ("env.num_envs=3", "env.max_episode_steps=4", "env.observation_norm=true")
        env = instantiate(composed(WHOLE_PARTS, *overrides).env)
        rollout = env.rollout(10)
        assert rollout.shape == (3, 4)
        assert type(env.transform[-1]).__name__ == "RunningObservationNorm"


class TestRegistration:
    NODES = frozenset(
        {
            "env/minerva",
            "loss/mpo",
            "loss/vmpo",
            "model/independent_normal",
            *(f"critic/{name}" for name in CRITICS),
            "sampler/retrace_slice",
            "sampler/sequences",
            "trainer/mpo",
            "trainer/vmpo",
        }
    )

    def stored(self) -> dict[str, Any]:
        return {
            f"{group}/{name.removesuffix('.yaml')}": node.node
            for group, entries in ConfigStore.instance().repo.items()
            if isinstance(entries, dict)
            for name, node in entries.items()
            if not isinstance(node, dict)
        }

    def test_adds_its_nodes_and_replaces_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ConfigStore.instance(), "repo", {})
        torchrl_configs._register_configs()
        before = self.stored()
        configs.register()
        after = self.stored()
        assert after.keys() - before.keys() == self.NODES
        assert {name: after[name] for name in before} == before

    def test_importing_again_is_harmless(self, composed: Compose) -> None:
        before = self.stored()
        config = composed(MPO)
        importlib.reload(configs)
        configs.register()
        assert self.stored().keys() == before.keys()
        assert composed(MPO) == config

    def test_import_is_enough(self) -> None:
        assert self.stored().keys() >= self.NODES
