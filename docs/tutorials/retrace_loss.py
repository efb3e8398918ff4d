r"""
Retrace in your loss
====================

:class:`~minerva_torchrl.Retrace` is a TorchRL value estimator. It corrects returns of stored
sequences for the difference between the policy that acted and the policy that is evaluated,

.. math::
    G_t = r_t + \gamma \Big[ v_{t+1} + \lambda \min \Big( 1, \frac{\pi(a_{t+1})}{\mu(a_{t+1})} \Big)
        (G_{t+1} - q_{t+1}) \Big]

(Munos et al., 2016, https://arxiv.org/abs/1606.02647). There are three ways to use it: as a
function of tensors, as an estimator on a TensorDict, and inside of a loss.
"""

# %%
# As a function
# -------------
#
# Tensors ``[B, T, 1]`` in, targets out.

import matplotlib.pyplot as plt
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    GymEnv,
    InitTracker,
    RewardSum,
    TransformedEnv,
)
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import SoftUpdate

from minerva_torchrl import MPOLoss, Retrace
from minerva_torchrl.envs import ClipAction
from minerva_torchrl.objectives.value.functional import vec_retrace_return_estimate
from minerva_torchrl.trainers import SequenceSampler

torch.manual_seed(0)
torch.set_num_threads(1)

log_pi, log_mu, q, v, reward = torch.randn(5, 2, 6, 1)
done = torch.zeros(2, 6, 1, dtype=torch.bool)
print(vec_retrace_return_estimate(0.99, 0.95, log_pi, log_mu, q, v, reward, done).shape)

# %%
# As an estimator
# ---------------
#
# The data must hold the raw action and the log-probability that it had when it was taken: build
# the policy with ``return_log_prob=True``.

env = GymEnv("InvertedPendulum-v5")
spec = env.action_spec
clip = ClipAction(spec)  # the raw action is stored
env = TransformedEnv(env, Compose(DoubleToFloat(), clip, InitTracker(), RewardSum()))
env.set_seed(0)
size, actions = env.observation_spec["observation"].shape[-1], spec.shape[-1]
cells = {"num_cells": [64, 64], "activation_class": nn.ELU}
policy = nn.Sequential(MLP(size, 2 * actions, **cells), NormalParamExtractor("biased_softplus_1.0"))
actor = ProbabilisticActor(
    TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
    in_keys=["loc", "scale"],
    spec=spec,
    distribution_class=IndependentNormal,
    return_log_prob=True,
)
critic = ValueOperator(MLP(size + actions, 1, **cells), in_keys=["observation", "action"])
estimator = Retrace(gamma=0.99, lmbda=0.95, value_network=critic, actor_network=actor)
with torch.no_grad():
    rollout = env.rollout(20, actor).unsqueeze(0)
estimator(rollout)
print(rollout["value_target"].shape, rollout["advantage"].shape)

# %%
# Inside of a loss
# ----------------
#
# ``make_value_estimator("retrace", ...)`` works for every TorchRL loss whose critic rates
# actions. Sequences come from ``SequenceSampler``, which draws every stored step equally often.

loss = MPOLoss(actor, critic, num_action_samples=10, epsilon=0.5, epsilon_mean=1e-2)
loss.make_value_estimator("retrace", gamma=0.99, lmbda=0.95)
updater = SoftUpdate(loss, tau=0.02)
networks = [*loss.actor_network_params.parameters(), *loss.qvalue_network_params.parameters()]
optimizer = torch.optim.Adam(
    [{"params": networks, "lr": 2e-3}, {"params": loss.dual_parameters(), "lr": 1e-2}]
)
loss.project_duals_after(optimizer)
replay_buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(10_000), sampler=SequenceSampler(8), batch_size=16
)
collector = Collector(env, actor, frames_per_batch=200, total_frames=5_000)
frames, returns = [], []
for data in collector:
    replay_buffer.extend(data)
    for _ in range(50):
        losses = loss(replay_buffer.sample())  # [16, 8]
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.step()
    finished = data["next", "episode_reward"][data["next", "done"]]
    frames += [len(replay_buffer)] * len(finished)
    returns += finished.tolist()
collector.shutdown()
first, last = (sum(part) / 10 for part in (returns[:10], returns[-10:]))
print(f"mean return of the first ten episodes {first:.0f}, of the last ten {last:.0f}")

# %%
# What it learned
# ---------------

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(frames, returns, ".")
axes.set(
    xlabel="frames", ylabel="return of an episode", title="InvertedPendulum-v5, MPO with Retrace"
)

# %%
# Two traps
# ---------
#
# - Frames drawn at random (``init_random_frames`` of a collector) carry a log-probability of
#   zero, which would count as a density of one. ``Retrace`` refuses such data: warm up with the
#   initial policy instead.
# - A multi-step transform in the buffer rewrites rewards. ``Retrace`` wants one-step data and
#   says so.
