from __future__ import annotations

import functools

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.envs import (
    CatTensors,
    Compose,
    DMControlEnv,
    DoubleToFloat,
    EnvCreator,
    InitTracker,
    ParallelEnv,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)
from torchrl.envs.libs.gym import GymEnv, set_gym_backend
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import HardUpdate, MPOLoss

# ====================================================================
# Environment
# -----------


def make_base_env(cfg):
    """One copy of the task, whose observation is one vector."""
    if cfg.env.library == "dm_control":
        env = DMControlEnv(cfg.env.name, cfg.env.task)
        keys = list(env.observation_spec.keys())
        return TransformedEnv(env, CatTensors(in_keys=keys, out_key="observation"))
    with set_gym_backend(cfg.env.library):
        return GymEnv(cfg.env.name)


class ClipAction(Transform):
    """Clips actions to bounds that may differ between dimensions.

    Only the environment sees the clipped action: the raw one is stored.
    """

    def __init__(self, low, high):
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def _inv_apply_transform(self, action):
        return action.clamp(self.low, self.high)


def make_environment(cfg, seed, num_envs):
    """Copies of the task that clip the actions of a Gaussian policy.

    The raw action is stored: its log-probability is what Retrace weighs.
    """
    maker = EnvCreator(functools.partial(make_base_env, cfg))
    env = ParallelEnv(num_envs, maker, serial_for_single=True)
    env.set_seed(seed)
    bounds = env.action_spec_unbatched.space
    return TransformedEnv(
        env,
        Compose(
            DoubleToFloat(),
            ClipAction(bounds.low, bounds.high),
            InitTracker(),
            StepCounter(cfg.env.max_episode_steps),
            RewardSum(),
        ),
    )


# ====================================================================
# Collector and replay buffer
# ---------------------------


def make_collector(cfg, env, actor):
    """Collector with the stochastic policy."""
    collector = Collector(
        env,
        actor,
        frames_per_batch=cfg.collector.frames_per_batch,
        total_frames=cfg.collector.total_frames,
        device=cfg.collector.device or None,
    )
    collector.set_seed(cfg.env.seed)
    return collector


def make_replay_buffer(cfg, device):
    """Replay buffer that draws slices of one trajectory each."""
    if cfg.replay_buffer.scratch_dir:
        storage = LazyMemmapStorage(
            cfg.replay_buffer.size, scratch_dir=cfg.replay_buffer.scratch_dir
        )
    else:
        storage = LazyTensorStorage(cfg.replay_buffer.size, device=device)
    sampler = SliceSampler(
        slice_len=cfg.replay_buffer.slice_len, traj_key=("collector", "traj_ids")
    )
    return TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=cfg.optim.batch_size
    )


# ====================================================================
# Model, loss and optimizer
# -------------------------


def make_mpo_agent(cfg, env, device):
    """Gaussian policy, and a critic of states and actions."""
    action_spec = env.base_env.action_spec_unbatched.to(torch.float32).to(device)
    observation_dim = env.observation_spec["observation"].shape[-1]
    action_dim = action_spec.shape[-1]

    cells = list(cfg.network.hidden_sizes)

    def mlp(in_features, out_features):
        return MLP(
            in_features=in_features,
            out_features=out_features,
            num_cells=cells,
            activation_class=nn.ELU,
            norm_class=nn.LayerNorm,
            norm_kwargs=[{"normalized_shape": size} for size in cells],
            device=device,
        )

    policy = nn.Sequential(
        mlp(observation_dim, 2 * action_dim),
        NormalParamExtractor(
            scale_mapping=f"biased_softplus_{cfg.network.policy_scale}",
            scale_lb=cfg.network.scale_lb,
        ),
    )
    with torch.no_grad():
        policy[0][-1].weight.mul_(1e-2)  # begins with its mean near zero
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=action_spec,
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(
        mlp(observation_dim + action_dim, 1), in_keys=["observation", "action"]
    )
    return actor, critic


def make_loss_module(cfg, actor, critic):
    """MPO with Retrace, and copies to its target networks."""
    arguments = dict(cfg.loss)
    gamma, lmbda = arguments.pop("gamma"), arguments.pop("lmbda")
    loss_module = MPOLoss(actor, critic, **arguments)
    loss_module.make_value_estimator("retrace", gamma=gamma, lmbda=lmbda)
    # HardUpdate copies at every call (interval + 1).
    interval = cfg.optim.target_update_interval - 1
    return loss_module, HardUpdate(
        loss_module, value_network_update_interval=interval
    )


def make_optimizer(cfg, loss_module):
    """One optimizer; dual variables have their own learning rate."""
    networks = [
        *loss_module.actor_network_params.parameters(),
        *loss_module.qvalue_network_params.parameters(),
    ]
    optimizer = torch.optim.Adam(
        [
            {"params": networks, "lr": cfg.optim.lr},
            {"params": loss_module.dual_parameters(), "lr": cfg.optim.lr_dual},
        ]
    )
    loss_module.project_duals_after(optimizer)
    return optimizer
