"""MPO Example.

Maximum a posteriori policy optimisation with Retrace, for tasks of Gymnasium and DM
Control with continuous actions and states.

The helper functions are coded in the utils.py associated with this script.
"""
from __future__ import annotations

import hydra
import numpy as np
import torch
import tqdm
from omegaconf import DictConfig
from torchrl._utils import get_available_device, logger as torchrl_logger, timeit
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.record.loggers import generate_exp_name, get_logger
from utils import (
    make_collector,
    make_environment,
    make_loss_module,
    make_mpo_agent,
    make_optimizer,
    make_replay_buffer,
)

METRICS = ("kl_q_rel", "kl_mean_rel", "kl_stddev_rel", "temperature")


def evaluate(env, actor, cfg):
    """Mean return of the deterministic policy."""
    returns = []
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        for _ in range(cfg.logger.eval_episodes):
            rollout = env.rollout(
                cfg.env.max_episode_steps, actor, auto_cast_to_device=True
            )
            returns.append(rollout["next", "reward"].sum().item())
    return sum(returns) / len(returns)


@hydra.main(version_base="1.3", config_path="", config_name="config")
def main(cfg: DictConfig):
    device = (
        torch.device(cfg.network.device)
        if cfg.network.device
        else get_available_device()
    )
    logger = None
    if cfg.logger.backend:
        logger = get_logger(
            logger_type=cfg.logger.backend,
            logger_name="mpo_logging",
            experiment_name=generate_exp_name("MPO", cfg.logger.exp_name),
            wandb_kwargs={
                "mode": cfg.logger.mode,
                "config": dict(cfg),
                "project": cfg.logger.project_name,
                "group": cfg.logger.group_name,
            },
        )

    torch.manual_seed(cfg.env.seed)
    np.random.seed(cfg.env.seed)
    train_env = make_environment(cfg, cfg.env.seed, cfg.collector.env_per_collector)
    eval_env = make_environment(cfg, cfg.env.seed + 1000, 1)
    actor, critic = make_mpo_agent(cfg, train_env, device)
    loss_module, target_updater = make_loss_module(cfg, actor, critic)
    optimizer = make_optimizer(cfg, loss_module)
    replay_buffer = make_replay_buffer(cfg, device)
    collector = make_collector(cfg, train_env, actor)

    def update(batch):
        losses = loss_module(batch)
        total = sum(value for key, value in losses.items() if key.startswith("loss_"))
        total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        target_updater.step()
        return losses.detach()

    def log_return(frames):
        with timeit("eval"):
            reward = evaluate(eval_env, actor, cfg)
        torchrl_logger.info(f"{frames} frames: return {reward:.1f}")
        return {"eval/reward": reward}

    num_updates = int(cfg.collector.frames_per_batch * cfg.optim.utd_ratio)
    collected_frames = 0
    metrics = log_return(0)  # of the untrained policy
    if logger is not None:
        logger.log_metrics(metrics, 0)
    pbar = tqdm.tqdm(total=cfg.collector.total_frames)
    for data in collector:
        collected_frames += data.numel()
        pbar.update(data.numel())
        data = data.reshape(-1)
        with timeit("rb - extend"):
            replay_buffer.extend(data)

        metrics = {}
        if collected_frames >= cfg.collector.warmup_frames:
            with timeit("train"):
                for _ in range(num_updates):
                    batch = replay_buffer.sample().to(device)
                    losses = update(batch.reshape(-1, cfg.replay_buffer.slice_len))
            collector.update_policy_weights_()
            names = [name for name in losses.keys() if name.startswith("loss_")]
            names += [name for name in METRICS if name in losses.keys()]
            metrics = {f"train/{name}": losses[name].mean().item() for name in names}

        done = data["next", "done"]
        if done.any():
            reward = data["next", "episode_reward"][done]
            metrics["train/reward"] = reward.mean().item()
        if collected_frames % cfg.logger.eval_iter < cfg.collector.frames_per_batch:
            metrics.update(log_return(collected_frames))
        if logger is not None:
            metrics.update(timeit.todict(prefix="time"))
            logger.log_metrics(metrics, collected_frames)

    collector.shutdown()
    for env in (eval_env, train_env):
        if not env.is_closed:
            env.close()


if __name__ == "__main__":
    main()
