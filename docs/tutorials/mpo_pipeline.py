r"""
MPO in your TorchRL pipeline
============================

:class:`~minerva_torchrl.MPOLoss` is a TorchRL ``LossModule``. You keep your environment, your
networks, your collector and your replay buffer; the loss takes a batch and returns losses.

This page builds the shortest loop that learns: a cart that has to keep a pole upright, some
thousand frames, one core.
"""

# %%
# Environment
# -----------
#
# A Gaussian policy may propose actions outside of the bounds. The *raw* action is stored and
# scored, and the environment clips it. The bounds come from the spec, so that the lines work for
# any task.

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

from minerva_torchrl import MPOLoss
from minerva_torchrl.envs import ClipAction

torch.manual_seed(0)
torch.set_num_threads(1)

env = GymEnv("InvertedPendulum-v5")
spec = env.action_spec
clip = ClipAction(spec)  # the raw action is stored
env = TransformedEnv(env, Compose(DoubleToFloat(), clip, InitTracker(), RewardSum()))
env.set_seed(0)

# %%
# Networks
# --------
#
# The actor writes ``loc`` and ``scale``; the critic reads observation and action and writes
# ``state_action_value``.

size, actions = env.observation_spec["observation"].shape[-1], spec.shape[-1]
cells = {"num_cells": [64, 64], "activation_class": nn.ELU}
policy = nn.Sequential(MLP(size, 2 * actions, **cells), NormalParamExtractor("biased_softplus_1.0"))
actor = ProbabilisticActor(
    TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
    in_keys=["loc", "scale"],
    spec=spec,
    distribution_class=IndependentNormal,
)
critic = ValueOperator(MLP(size + actions, 1, **cells), in_keys=["observation", "action"])

# %%
# Loss
# ----
#
# One loss module, one optimiser with two groups: networks, and dual variables (the temperature
# and the multipliers), which want a larger learning rate. ``project_duals_after`` keeps them
# above their floor.

loss = MPOLoss(actor, critic, num_action_samples=10, epsilon=0.5, epsilon_mean=1e-2)
loss.make_value_estimator(gamma=0.99)
updater = SoftUpdate(loss, tau=0.02)
networks = [*loss.actor_network_params.parameters(), *loss.qvalue_network_params.parameters()]
optimizer = torch.optim.Adam(
    [{"params": networks, "lr": 2e-3}, {"params": loss.dual_parameters(), "lr": 1e-2}]
)
loss.project_duals_after(optimizer)

# %%
# Loop
# ----
#
# Every parameter gets the gradient of its own loss and of nothing else, so one backward pass of
# the sum does.

replay_buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)
collector = Collector(env, actor, frames_per_batch=200, total_frames=7_000)
frames, returns, metrics = [], [], []
for data in collector:
    replay_buffer.extend(data)
    for _ in range(50):
        losses = loss(replay_buffer.sample())
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.step()
    finished = data["next", "episode_reward"][data["next", "done"]]
    frames += [len(replay_buffer)] * len(finished)
    returns += finished.tolist()
    metrics.append({name: losses[name].item() for name in ("kl_q_rel", "kl_mean_rel")})
collector.shutdown()
first, last = (sum(part) / 10 for part in (returns[:10], returns[-10:]))
print(f"mean return of the first ten episodes {first:.0f}, of the last ten {last:.0f}")

# %%
# What it learned
# ---------------
#
# Returns while exploring, and two divergences over their bounds: one means that the constraint is
# met exactly (:doc:`/diagnostics`).

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.plot(frames, returns, ".")
left.set(xlabel="frames", ylabel="return of an episode", title="InvertedPendulum-v5")
batches = range(200, 200 * len(metrics) + 1, 200)
for name in metrics[0]:
    right.plot(batches, [row[name] for row in metrics], label=name)
right.axhline(1.0, color="grey", linewidth=0.8)
right.set(xlabel="frames", ylabel="divergence / bound", yscale="log")
right.legend()

# %%
# Where to go from here
# ---------------------
#
# - Sequences and off-policy corrections: ``loss.make_value_estimator("retrace", ...)``, see
#   :doc:`retrace_loss`.
# - Critics that predict distributions, discrete actions, several objectives: :doc:`/members/index`.
# - Every argument, and where its default is from: :doc:`/mpo`.
# - The same with evaluation, checkpoints and exact resuming: :doc:`/training`.
