"""MPO on cartpole-balance in a plain TorchRL loop, to be read from top to bottom.

Takes a few minutes on a laptop's CPU. The return of an episode is at most 1000.
"""

import sys

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    CatTensors,
    Compose,
    DMControlEnv,
    DoubleToFloat,
    ExplorationType,
    InitTracker,
    MultiStepTransform,
    RewardSum,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import HardUpdate

from minerva_torchrl import MPOLoss
from minerva_torchrl.envs import ClipAction

FRAMES = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
torch.manual_seed(0)
torch.set_num_threads(1)  # small networks: threads cost more than they bring
env = DMControlEnv("cartpole", "balance")
action_spec = env.action_spec.to(torch.float32)
flatten = CatTensors(in_keys=list(env.observation_spec.keys()), out_key="observation")
clip = ClipAction(action_spec)  # the raw action is stored
env = TransformedEnv(env, Compose(flatten, DoubleToFloat(), clip, InitTracker(), RewardSum()))
env.set_seed(0)
size, actions = env.observation_spec["observation"].shape[-1], action_spec.shape[-1]

cells = {"num_cells": [256, 256], "activation_class": nn.ELU}
cells |= {"norm_class": nn.LayerNorm, "norm_kwargs": {"normalized_shape": 256}}
policy = nn.Sequential(MLP(size, 2 * actions, **cells), NormalParamExtractor("biased_softplus_0.5"))
actor = ProbabilisticActor(
    TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
    in_keys=["loc", "scale"],
    spec=action_spec,
    distribution_class=IndependentNormal,
)
critic = ValueOperator(MLP(size + actions, 1, **cells), in_keys=["observation", "action"])

loss = MPOLoss(actor, critic, epsilon_mean=1e-2).make_value_estimator(gamma=0.99)
updater = HardUpdate(loss, value_network_update_interval=99)  # a copy every 100 updates
networks = [*loss.actor_network_params.parameters(), *loss.qvalue_network_params.parameters()]
optimizer = torch.optim.Adam(
    [{"params": networks, "lr": 3e-4}, {"params": loss.dual_parameters(), "lr": 1e-2}]
)
loss.project_duals_after(optimizer)

# Without done_keys=[] a terminal state within five steps would not be marked as terminal.
five_steps = MultiStepTransform(n_steps=5, gamma=0.99, done_keys=[])
storage = LazyTensorStorage(FRAMES)
replay_buffer = TensorDictReplayBuffer(storage=storage, batch_size=128, transform=five_steps)
collector = Collector(env, actor, frames_per_batch=200, total_frames=FRAMES)
for iteration, data in enumerate(collector, start=1):
    replay_buffer.extend(data)
    for _ in range(100):
        losses = loss(replay_buffer.sample())
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.step()
    finished = data["next", "episode_reward"][data["next", "done"]]
    if len(finished):
        print(f"{200 * iteration:6d} frames, return {finished.mean().item():6.1f}")

with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
    rollout = env.rollout(1_000, actor)
print(f"without exploration: return {rollout['next', 'reward'].sum().item():.1f}")
collector.shutdown()
