"""What the tests of the trainers share: small problems, given data, and comparison to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer, Unbounded

from minerva_torchrl import MPOLoss, MPOTrainer, VMPOTrainer, make_ppo_loss
from minerva_torchrl.modules import DirectClipPPOLoss
from minerva_torchrl.objectives.ppo import estimate_advantage
from minerva_torchrl.trainers import (
    MPOOptimizationStepper,
    PPOOptimizationStepper,
    VMPOOptimizationStepper,
    make_ppo_trainer,
    make_target_updater,
)
from minerva_torchrl.trainers.stepping import LocalLearner
from tests.envs.scripted import make_batched
from tests.objectives import base, ppo_problem, vmpo_problem

KINDS = ["mpo", "mpo-solve", "mpo-steps", "mpo-dual_first", "mpo-solve-steps-dual_first"]
KINDS += ["vmpo-gradient", "vmpo-solve", "vmpo-gradient-dual_first", "vmpo-solve-dual_first", "ppo"]
_LOSS_OPTIONS = {name: {"temperature_update": name} for name in ("gradient", "solve")}
_STEPPER_OPTIONS = {"steps": {"num_policy_steps": 2}, "dual_first": {"dual_order": "dual_first"}}
LEARNING_RATE = 1e-2
ENV_OBSERVATION_DIM, ENV_ACTION_DIM = 2, 1  # of ScriptedEnv


class Problem:
    """A loss and its stepper with Adam, and batches for them.

    Args:
        kind (str): one of ``KINDS``.
        fused (bool): whether the optimisers are fused.
    """

    loss: Any
    stepper: Any

    def __init__(self, kind: str, *, fused: bool = False) -> None:
        self.algorithm, *options = kind.split("-")
        settings: dict[str, Any] = {}
        steps: dict[str, Any] = {}
        for option in options:
            settings |= _LOSS_OPTIONS.get(option, {})
            steps |= _STEPPER_OPTIONS.get(option, {})
        adam = {"lr": LEARNING_RATE, "fused": fused}
        getattr(self, f"_make_{self.algorithm}")(settings, steps, adam)

    def _make_mpo(
        self, settings: dict[str, Any], steps: dict[str, Any], adam: dict[str, Any]
    ) -> None:
        torch.manual_seed(0)
        self.actor = base.make_actor()
        self.loss = MPOLoss(self.actor, base.make_critic(), num_action_samples=5, **settings)
        base.with_updater(self.loss).make_value_estimator(gamma=0.99)
        self.stepper = make_mpo_stepper(self.loss, steps, **adam)

    def _make_vmpo(
        self, settings: dict[str, Any], steps: dict[str, Any], adam: dict[str, Any]
    ) -> None:
        self.loss = vmpo_problem.make_loss(**settings)
        self.stepper = make_vmpo_stepper(self.loss, steps, **adam)

    def _make_ppo(
        self, settings: dict[str, Any], steps: dict[str, Any], adam: dict[str, Any]
    ) -> None:
        policy, critic = ppo_problem.make_networks(torch.float32)
        self.actor = ppo_problem.make_actor(policy)
        self.behaviour = copy.deepcopy(self.actor)
        settings = {"loss_class": DirectClipPPOLoss} | settings
        self.loss = make_ppo_loss(self.actor, ppo_problem.make_critic(critic), **settings)
        optimizer = torch.optim.Adam(self.loss.parameters(), **adam)
        self.stepper = PPOOptimizationStepper(optimizer, num_epochs=1, minibatch_size=20)

    def batch(self, seed: int) -> TensorDict:
        """What a collector would give: ``[2, 4]`` transitions, or a rollout ``[4, 5]``."""
        if self.algorithm == "mpo":
            return base.make_transitions(2, 4, seed=seed)
        if self.algorithm == "vmpo":
            return vmpo_problem.make_rollout(seed=seed)
        return ppo_problem.make_rollout(self.behaviour, (4, 5), seed=seed)

    def update(self, batch: TensorDict, seed: int = 0) -> TensorDict:
        """One update, with known random numbers."""
        batch = batch.clone()
        if self.algorithm == "ppo":
            batch = estimate_advantage(self.loss, batch)
        torch.manual_seed(seed)
        flat = self.algorithm != "vmpo"
        return self.stepper.update(self.loss, batch.reshape(-1) if flat else batch)

    def state(self) -> dict[str, Any]:
        """Parameters, targets, duals and the optimisers' state, without the counters."""
        state = {"loss": self.loss.state_dict(), "stepper": self.stepper.state_dict()}
        state["stepper"].pop("skips")
        state["stepper"].pop("updates")  # an update that is left out is counted
        return copy.deepcopy(state)

    def trainer(self, batches: list[TensorDict], **kwargs: Any) -> Any:
        """A trainer on batches that were collected before; for PPO with settings of its stepper."""
        frames = batches[0].numel()
        kwargs = {"total_frames": frames * len(batches), "progress_bar": False} | kwargs
        kwargs.setdefault("collector", FakeCollector(batches))
        if self.algorithm == "ppo":
            settings = {"num_epochs": 2, "minibatch_size": 5, "target_kl": None}
            settings = {name: kwargs.pop(name, default) for name, default in settings.items()}
            self.stepper = PPOOptimizationStepper(self.stepper.optimizer, **settings)
        kwargs |= {"loss_module": self.loss, "optimization_stepper": self.stepper}
        if self.algorithm == "vmpo":
            return VMPOTrainer(**kwargs)
        if self.algorithm == "ppo":
            return make_ppo_trainer(frames_per_batch=frames, **kwargs)
        kwargs.setdefault("replay_buffer", make_buffer())
        kwargs.setdefault("target_net_updater", make_target_updater(self.loss, period=3))
        return MPOTrainer(**{"optim_steps_per_batch": 2} | kwargs)


def make_mpo_stepper(
    loss: MPOLoss, steps: dict[str, Any] | None = None, **adam: Any
) -> MPOOptimizationStepper:
    """A stepper with settings of its own, and those of its optimisers."""
    adam = {"lr": LEARNING_RATE} | adam
    return MPOOptimizationStepper(
        torch.optim.Adam(loss.qvalue_network_params.parameters(), **adam),
        torch.optim.Adam(loss.actor_network_params.parameters(), **adam),
        torch.optim.Adam(loss.dual_parameters(), **adam),
        **steps or {},
    )


def make_vmpo_stepper(
    loss: Any, steps: dict[str, Any] | None = None, **adam: Any
) -> VMPOOptimizationStepper:
    """The same for V-MPO, with two policy steps unless it is told otherwise."""
    adam = {"lr": LEARNING_RATE} | adam
    networks = [*loss.actor_network_params.parameters(), *loss.critic_network_params.parameters()]
    learned = loss.temperature_update == "gradient"
    return VMPOOptimizationStepper(
        torch.optim.Adam(networks, **adam),
        torch.optim.Adam(loss.alpha_parameters(), **adam),
        torch.optim.Adam([loss.temperature.raw], **adam) if learned else None,
        **{"num_policy_steps": 2} | (steps or {}),
    )


class Recorder(LocalLearner):
    """Notes which batches a loss is evaluated on, and by which of its methods."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.batches: list[TensorDictBase] = []
        self.methods: list[str | None] = []

    def compute_loss(self, sub_batch: TensorDictBase, method: str | None = None) -> Any:
        self.batches.append(sub_batch)
        self.methods.append(method)
        return super().compute_loss(sub_batch, method)


# Environments and collection ---------------------------------------------------------------------


class FakeCollector:
    """Yields batches that were collected before, and notes the weights that it is given."""

    init_random_frames = 0

    def __init__(self, batches: list[TensorDict]) -> None:
        self.batches = batches
        self.weights: list[TensorDictBase] = []

    def __iter__(self) -> Iterator[TensorDict]:
        return iter(self.batches)

    def shutdown(self) -> None:
        pass

    def update_policy_weights_(self, weights: TensorDictBase) -> None:
        self.weights.append(weights.data.clone())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def make_env_actor(seed: int = 0) -> Any:
    """A policy for ScriptedEnv."""
    torch.manual_seed(seed)
    mlp = base.make_mlp(ENV_OBSERVATION_DIM, 2 * ENV_ACTION_DIM)
    network = nn.Sequential(mlp, NormalParamExtractor())
    return base.make_actor(network, spec=Unbounded((ENV_ACTION_DIM,)))


def make_collector(*lengths: int, policy: Any = None, **kwargs: Any) -> Collector:
    """Collects from one ScriptedEnv for each length of its episodes."""
    return Collector(
        make_batched(*lengths),
        make_env_actor() if policy is None else policy,
        total_frames=-1,
        auto_register_policy_transforms=True,
        **kwargs,
    )


def make_env_loss(td_est: Any = None, **kwargs: Any) -> MPOLoss:
    """An MPO loss for ScriptedEnv, and its actor as ``loss.actor_network``."""
    actor = make_env_actor()
    mlp = base.make_mlp(ENV_OBSERVATION_DIM + ENV_ACTION_DIM, 1)
    critic = base.make_critic(base.Concatenate(mlp))
    loss = MPOLoss(actor, critic, num_action_samples=5, **kwargs)
    base.with_updater(loss)
    return loss.make_value_estimator(td_est, gamma=0.9)


def make_env_trainer(loss: Any, collector: Any, **kwargs: Any) -> MPOTrainer:
    """MPO on a ScriptedEnv."""
    kwargs = {"optim_steps_per_batch": 2, "progress_bar": False} | kwargs
    kwargs.setdefault("replay_buffer", make_buffer())
    return MPOTrainer(
        collector=collector,
        loss_module=loss,
        optimization_stepper=make_mpo_stepper(loss),
        target_net_updater=make_target_updater(loss, period=3),
        **kwargs,
    )


def make_buffer(
    capacity: int = 256, *, batch_size: int = 8, slice_len: int | None = None
) -> TensorDictReplayBuffer:
    """A replay buffer of transitions, or of slices by trajectory."""
    sampler = None
    if slice_len is not None:
        traj_key = ("collector", "traj_ids")
        sampler = SliceSampler(slice_len=slice_len, traj_key=traj_key, strict_length=True)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size
    )


def numbered_steps(*episodes: list[tuple[int, str]]) -> TensorDict:
    """Steps ``[K, T]`` whose entries say where they are from.

    For each environment the lengths of its episodes and how each ends: "terminated", "truncated" or
    "open". An observation is ``[environment, time]``; the observation after the last step of an
    episode has half a step more. Rewards are powers of two of the time.
    """
    length = {sum(n for n, _ in env) for env in episodes}.pop()
    data = {k: torch.zeros(len(episodes), length, 1) for k in ("reward", "terminated", "truncated")}
    ids = torch.zeros(len(episodes), length, dtype=torch.int64)
    number = 0
    for k, env in enumerate(episodes):
        end = 0
        for n, kind in env:
            ids[k, end : end + n] = number
            number, end = number + 1, end + n
            if kind != "open":
                data[kind][k, end - 1] = 1
    time = torch.arange(length, dtype=torch.float32).expand(len(episodes), -1)
    env = torch.arange(len(episodes), dtype=torch.float32).unsqueeze(-1).expand_as(time)
    terminated, truncated = data["terminated"].bool(), data["truncated"].bool()
    done = terminated | truncated
    following = torch.where(done.squeeze(-1), time + 0.5, time + 1)
    return TensorDict(
        {
            "observation": torch.stack([env, time], -1),
            "action": torch.stack([env, time], -1),
            "collector": {"traj_ids": ids},
            "next": {
                "observation": torch.stack([env, following], -1),
                "reward": 2.0 ** (time % 8).unsqueeze(-1),
                "done": done,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        batch_size=[len(episodes), length],
    )


# Comparison --------------------------------------------------------------------------------------


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The results of a method, as they come."""
    method, results = getattr(owner, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        results.append(method(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(owner, name, counted)
    return results


def spoil(batch: TensorDict, key: Any, value: float) -> TensorDict:
    """A copy in which one number of a step that ends no episode is another, not finite or huge."""
    batch = batch.clone()
    going_on = (~batch["next", "done"]).flatten().nonzero().flatten()
    batch[key].view(batch.numel(), -1)[going_on[0], 0] = value
    return batch


def assert_identical(actual: Any, expected: Any, where: str = "") -> None:
    """Nested containers hold the same bits."""
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected), f"{where}: {actual} is not {expected}"
    elif isinstance(expected, (dict, TensorDictBase)):
        assert set(actual.keys()) == set(expected.keys()), where
        for key in expected.keys():
            assert_identical(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_identical(*pair, f"{where}/{i}")
    else:
        assert actual == expected, where


def differs(one: dict[str, Any], other: dict[str, Any]) -> bool:
    try:
        assert_identical(one, other)
    except AssertionError:
        return True
    return False
