"""Train MPO on a DM Control task, or with "gym:" before its name on a Gymnasium one.

    python examples/mpo_dmc.py --env cartpole-balance --frames 20000 --seed 0

The loop is written out: a TorchRL collector fills a replay buffer with raw actions, `MPOLoss` makes
the losses, `MPOOptimizationStepper` takes the steps, and the deterministic policy is evaluated from
time to time.
"""

from __future__ import annotations

import argparse
import logging
import time

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import EnvBase, ExplorationType, MultiStepTransform, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import HardUpdate
from tqdm import tqdm

from minerva_torchrl import MPOLoss, MPOOptimizationStepper
from minerva_torchrl.envs import make_env
from minerva_torchrl.modules import GaussianPolicy, StateActionCritic

GAMMA = 0.99
N_STEPS = 5
FRAMES_PER_BATCH = 200
TARGET_PERIOD = 100


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="cartpole-balance", help="name of the task")
    parser.add_argument("--frames", type=int, default=20_000, help="environment steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=2_000, help="frames between evaluations")
    parser.add_argument("--updates-per-frame", type=float, default=0.5)
    return parser.parse_args()


def make_loss(env: EnvBase) -> MPOLoss:
    """A Gaussian policy and a critic, two hidden layers each, in an MPO loss."""
    obs_dim = env.observation_spec["observation"].shape[-1]
    action_dim = env.action_spec.shape[-1]
    policy = GaussianPolicy(obs_dim, action_dim, (256, 256))
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=IndependentNormal,
    )
    critic = StateActionCritic(obs_dim, action_dim, (256, 256))
    critic = ValueOperator(critic, in_keys=["observation", "action"])
    return MPOLoss(actor, critic, epsilon_mean=1e-2).make_value_estimator(gamma=GAMMA)


@torch.no_grad()
def evaluate(env: EnvBase, actor: TensorDictModule, episodes: int = 2) -> float:
    """Mean return of the deterministic policy."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        returns = [env.rollout(10_000, actor)["next", "reward"].sum() for _ in range(episodes)]
    return torch.stack(returns).mean().item()


def main() -> None:
    args = parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # its notes would tear the progress bar
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # small networks: threads cost more than they bring
    env, eval_env = make_env(args.env, seed=args.seed), make_env(args.env, seed=args.seed + 1_000)
    loss = make_loss(env)
    # TorchRL's HardUpdate(n) copies at every call n + 1.
    updater = HardUpdate(loss, value_network_update_interval=TARGET_PERIOD - 1)
    stepper = MPOOptimizationStepper(
        torch.optim.Adam(loss.qvalue_network_params.parameters(), lr=3e-4),
        torch.optim.Adam(loss.actor_network_params.parameters(), lr=3e-4),
        torch.optim.Adam(loss.dual_parameters(), lr=1e-2),
    )
    replay_buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(min(args.frames, 1_000_000)),
        batch_size=128,
        transform=MultiStepTransform(n_steps=N_STEPS, gamma=GAMMA),
    )
    collector = Collector(
        env, loss.actor_network, frames_per_batch=FRAMES_PER_BATCH, total_frames=args.frames
    )

    start, updates = time.perf_counter(), 0
    progress = tqdm(total=args.frames, unit="frame", desc=f"MPO {args.env}")
    next_eval, last_return, curve = args.eval_every, float("nan"), []
    for data in collector:
        replay_buffer.extend(data)
        for _ in range(round(data.numel() * args.updates_per_frame)):
            metrics = stepper.update(loss, replay_buffer.sample())
            updater.step()
            updates += 1
        progress.update(data.numel())
        finished = data["next", "episode_reward"][data["next", "done"]]
        if len(finished):
            last_return = finished.mean().item()
        if progress.n >= next_eval:
            next_eval += args.eval_every
            curve.append(evaluate(eval_env, loss.actor_network))
            progress.write(
                f"{progress.n:>7} frames   evaluation {curve[-1]:6.1f}   "
                f"training {last_return:6.1f}   temperature {metrics['temperature']:.3f}   "
                f"kl_mean_rel {metrics['kl_mean_rel']:.2f}"
            )
        progress.set_postfix({"return": f"{last_return:.0f}", "updates": updates})
    progress.close()
    collector.shutdown()
    print(
        f"{args.env}: {args.frames} frames, {updates} updates, {time.perf_counter() - start:.0f} s"
    )
    if curve:
        print(
            f"evaluation return: first {curve[0]:.0f}, last {curve[-1]:.0f}, best {max(curve):.0f}"
        )


if __name__ == "__main__":
    main()
