"""Collectors store a log-probability of zero for frames of init_random_frames.

**Describe the bug.** With ``init_random_frames`` the policy is bypassed, and what it would have
written, ``action_log_prob``, ``loc``, ``scale``, is stored as 0.0 instead. A log-probability of
zero is a density of one: importance ratios and traces (V-trace, Retrace) of these frames are
wrong without any sign of it, and a ``scale`` of zero makes divergences infinite.

**Expected.** The log-density of the random policy, or NaN, or an error if such entries are in the
data.
"""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import IndependentNormal, ProbabilisticActor


def defect() -> bool:
    torch.manual_seed(0)
    env = GymEnv("Pendulum-v1")
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    collector = Collector(env, actor, frames_per_batch=8, total_frames=16, init_random_frames=8)
    first = next(iter(collector))
    collector.shutdown()
    return bool((first["action_log_prob"] == 0).all())


if __name__ == "__main__":
    print("present" if defect() else "fixed")
