"""VTrace does not score the stored actions.

**Describe the bug.** The importance ratio is pi(a|s) / mu(a|s) of the *stored* action a. ``VTrace``
calls the actor instead and takes the log-probability of the action that comes out: a fresh sample,
or the mode, whatever the exploration type says. The stored action is never read: other stored
actions with the same log-probabilities give the same targets.

**Expected.** ``dist.log_prob(tensordict["action"])``.
"""

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives.value import VTrace


def defect() -> bool:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(torch.nn.Linear(3, 1), in_keys=["observation"])
    estimator = VTrace(gamma=0.99, actor_network=actor, value_network=critic)
    end = torch.zeros(1, 10, 1, dtype=torch.bool)
    following = {"observation": torch.randn(1, 10, 3), "reward": torch.randn(1, 10, 1)}
    following |= {"done": end, "terminated": end}
    data = {"observation": torch.randn(1, 10, 3), "action": torch.randn(1, 10, 2)}
    data |= {"action_log_prob": torch.randn(1, 10), "next": following}
    batch = TensorDict(data, [1, 10])
    other = batch.clone().set("action", 10 + batch["action"])
    with torch.no_grad():
        first, second = (estimator(data.clone())["value_target"] for data in (batch, other))
    return torch.equal(first, second)


if __name__ == "__main__":
    print("present" if defect() else "fixed")
