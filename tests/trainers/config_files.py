"""Configuration files of the nodes, as users write them."""

MPO = """
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
  - target_net_updater@trainer.target_net_updater: soft
  - optimizer@trainer.optimizer_critic: sgd
  - optimizer@trainer.optimizer_actor: adam
  - optimizer@trainer.optimizer_dual: adam
  - _self_

trainer:
  total_frames: 200
  optim_steps_per_batch: 3
  n_steps: 5
  progress_bar: false
  collector:
    _partial_: true
    frames_per_batch: 50
    create_env_fn: {name: cartpole-balance, seed: 0}
  actor_network:
    network: {in_features: 5, out_features: 2, num_cells: [16]}
  qvalue_network:
    in_keys: [observation, action]
    network: {in_features: 6, out_features: 1, num_cells: [16]}
  loss_module:
    _partial_: true
  replay_buffer:
    batch_size: 16
    storage: {max_size: 1000}
"""

VMPO = """
defaults:
  - trainer: vmpo
  - collector@trainer.collector: sync
  - env@trainer.collector.create_env_fn: minerva
  - model@trainer.actor_network: independent_normal
  - network@trainer.actor_network.network: mlp
  - model@trainer.critic_network: value
  - network@trainer.critic_network.network: mlp
  - loss@trainer.loss_module: vmpo
  - optimizer@trainer.optimizer: adam
  - optimizer@trainer.optimizer_alpha: adam
  - _self_

trainer:
  total_frames: 200
  progress_bar: false
  collector:
    _partial_: true
    frames_per_batch: 100
    create_env_fn: {name: cartpole-balance, num_envs: 2, seed: 0}
  actor_network:
    network: {in_features: 5, out_features: 2, num_cells: [16]}
  critic_network:
    in_keys: [observation]
    network: {in_features: 5, out_features: 1, num_cells: [16]}
  loss_module:
    _partial_: true
"""

# As TorchRL's own examples do it: every part complete, and used by its name.
WHOLE_PARTS = """
defaults:
  - trainer: vmpo
  - collector: sync
  - env: minerva
  - model@actor: independent_normal
  - network@actor.network: mlp
  - model@critic: value
  - network@critic.network: mlp
  - loss: vmpo
  - optimizer: adam
  - _self_

env: {name: cartpole-balance}
actor:
  network: {in_features: 5, out_features: 2, num_cells: [16]}
critic:
  in_keys: [observation]
  network: {in_features: 5, out_features: 1, num_cells: [16]}
collector: {create_env_fn: "${env}", policy: "${actor}", frames_per_batch: 100}
loss: {actor_network: "${actor}", critic_network: "${critic}"}
trainer:
  total_frames: 200
  progress_bar: false
  collector: ${collector}
  loss_module: ${loss}
  optimizer: ${optimizer}
  optimizer_alpha: ${optimizer}
"""

# The policy, critic, environment and collector are TorchRL's.
LOSS_ALONE = """
defaults:
  - collector: sync
  - env@collector.create_env_fn: gym
  - model@collector.policy: tanh_normal
  - network@collector.policy.network: mlp
  - loss: mpo
  - model@loss.qvalue_network: value
  - network@loss.qvalue_network.network: mlp
  - target_net_updater: soft
  - _self_

collector:
  frames_per_batch: 20
  auto_register_policy_transforms: false
  create_env_fn: {env_name: Pendulum-v1}
  policy:
    in_keys: [observation]
    param_keys: [loc, scale]
    out_keys: [action]
    low: -2.0
    high: 2.0
    return_log_prob: true
    network: {in_features: 3, out_features: 2, num_cells: [16]}
loss:
  actor_network: ${collector.policy}
  qvalue_network:
    in_keys: [observation, action]
    network: {in_features: 4, out_features: 1, num_cells: [16]}
  action_spec: {_target_: torchrl.data.Bounded, low: -2.0, high: 2.0, shape: 1}
"""
