r"""
V-MPO in your pipeline
======================

:class:`~minerva_torchrl.VMPOLoss` is for fresh rollouts, as PPO is. It takes continuous and
discrete actions; here it balances a pole with two actions.

An update has two parts. The E-step weighs the whole rollout once. Then policy, critic and
multipliers take several steps on minibatches of it.
"""

# %%
# Environment and networks
# ------------------------
#
# The loss needs the parameters of the policy that collected the data. The actor writes them
# (``logits``), so the collector stores them.

import matplotlib.pyplot as plt
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import Compose, GymEnv, InitTracker, RewardSum, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator

from minerva_torchrl import VMPOLoss
from minerva_torchrl.objectives import estimate_advantage

torch.manual_seed(0)
torch.set_num_threads(1)

env = TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), RewardSum()))
env.set_seed(0)
size, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
cells = {"num_cells": [64, 64], "activation_class": nn.Tanh}
actor = ProbabilisticActor(
    TensorDictModule(MLP(size, actions, **cells), in_keys=["observation"], out_keys=["logits"]),
    in_keys=["logits"],
    spec=env.action_spec,
    distribution_class=OneHotCategorical,
)
critic = ValueOperator(MLP(size, 1, **cells), in_keys=["observation"])

# %%
# Loss
# ----
#
# The temperature is solved for on every batch. ``alpha_update="relative"`` lets multipliers step
# in proportion to the violation of their bound.

loss = VMPOLoss(actor, critic, epsilon=0.1, epsilon_policy=1e-2, alpha_update="relative")
loss.make_value_estimator("gae", gamma=0.99, lmbda=0.95)
networks = [*loss.actor_network_params.parameters(), *loss.critic_network_params.parameters()]
optimizer = torch.optim.Adam(
    [{"params": networks, "lr": 1e-3}, {"params": loss.dual_parameters(), "lr": 1e-2}]
)
loss.project_duals_after(optimizer)

# %%
# Loop
# ----
#
# Advantages once per rollout, the E-step once per rollout, then steps on minibatches of what it
# returned.

collector = Collector(env, actor, frames_per_batch=1_000, total_frames=15_000)
frames, returns, divergences = [], [], []
for iteration, rollout in enumerate(collector, start=1):
    estimate_advantage(loss, rollout)
    samples, _ = loss.e_step(rollout)
    samples = samples.reshape(-1)
    for _ in range(8):
        for minibatch in samples[torch.randperm(len(samples))].split(125):
            losses = loss(minibatch)
            sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
            nn.utils.clip_grad_norm_(networks, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    finished = rollout["next", "episode_reward"][rollout["next", "done"]]
    if len(finished):
        frames.append(1_000 * iteration)
        returns.append(finished.mean().item())
        divergences.append(losses["kl_policy_rel"].item())
collector.shutdown()
print(f"mean return of the last rollout: {returns[-1]:.0f}")

# %%
# What it learned
# ---------------

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.plot(frames, returns)
left.set(xlabel="frames", ylabel="return of an episode", title="CartPole-v1")
right.plot(frames, divergences, label="kl_policy_rel")
right.axhline(1.0, color="grey", linewidth=0.8)
right.set(xlabel="frames", ylabel="divergence / bound")
right.legend()

# %%
# Continuous actions
# ------------------
#
# Only the actor changes: ``out_keys=["loc", "scale"]``, ``distribution_class=IndependentNormal``,
# and a ``ClipAction`` as in :doc:`mpo_pipeline`. The constraints are then ``mean`` and
# ``stddev``.
