from __future__ import annotations

import functools

import torch
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import (
    CatTensors,
    ClipTransform,
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
    VecNorm,
)
from torchrl.envs.libs.gym import GymEnv, set_gym_backend
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import VMPOLoss

# ====================================================================
# Environment and collector
# -------------------------


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
    """Copies of the task with normalized observations.

    The raw action of the Gaussian policy is stored, and clipped for the task.
    """
    maker = EnvCreator(functools.partial(make_base_env, cfg))
    env = ParallelEnv(num_envs, maker, serial_for_single=True)
    env.set_seed(seed)
    bounds = env.action_spec_unbatched.space
    return TransformedEnv(
        env,
        Compose(
            DoubleToFloat(),
            VecNorm(in_keys=["observation"], decay=0.99999, eps=1e-2),
            ClipTransform(in_keys=["observation"], low=-10, high=10),
            ClipAction(bounds.low, bounds.high),
            InitTracker(),
            StepCounter(cfg.env.max_episode_steps),
            RewardSum(),
        ),
    )


def statistics_of(env):
    """The transform that normalizes an environment's observations."""
    return next(part for part in env.transform if isinstance(part, VecNorm))


def make_collector(cfg, env, actor):
    """Collector of rollouts with the stochastic policy."""
    collector = Collector(
        env,
        actor,
        frames_per_batch=cfg.collector.frames_per_batch,
        total_frames=cfg.collector.total_frames,
        device=cfg.collector.device or None,
    )
    collector.set_seed(cfg.env.seed)
    return collector


# ====================================================================
# Model, loss and optimizer
# -------------------------


def make_vmpo_agent(cfg, env, device):
    """Gaussian policy whose scale is a parameter, and a critic of states."""
    action_spec = env.base_env.action_spec_unbatched.to(torch.float32).to(device)
    observation_dim = env.observation_spec["observation"].shape[-1]
    action_dim = action_spec.shape[-1]

    def mlp(out_features, gain):
        net = MLP(
            in_features=observation_dim,
            out_features=out_features,
            num_cells=list(cfg.network.hidden_sizes),
            activation_class=nn.Tanh,
            device=device,
        )
        layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)
        return net

    policy = nn.Sequential(
        mlp(action_dim, 0.01),
        AddStateIndependentNormalScale(
            action_dim, scale_mapping=f"biased_softplus_{cfg.network.policy_scale}"
        ).to(device),
    )
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=action_spec,
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    return actor, ValueOperator(mlp(1, 1.0), in_keys=["observation"])


def make_loss_module(cfg, actor, critic):
    """V-MPO with generalized advantages."""
    arguments = dict(cfg.loss)
    gamma, lmbda = arguments.pop("gamma"), arguments.pop("lmbda")
    loss_module = VMPOLoss(actor, critic, **arguments)
    loss_module.make_value_estimator("gae", gamma=gamma, lmbda=lmbda)
    return loss_module


def make_optimizer(cfg, loss_module):
    """One optimizer, and the parameters of the networks, whose gradients are clipped."""
    networks = [
        *loss_module.actor_network_params.parameters(),
        *loss_module.critic_network_params.parameters(),
    ]
    optimizer = torch.optim.Adam(
        [
            {"params": networks, "lr": cfg.optim.lr, "eps": 1e-5},
            {"params": loss_module.dual_parameters(), "lr": cfg.optim.lr_dual},
        ]
    )
    loss_module.project_duals_after(optimizer)
    return optimizer, networks
