"""HardUpdate(value_network_update_interval=n) copies at every call n + 1.

**Describe the bug.** With an interval of 2 the target network changes at calls 3, 6, 9, ... of
``step()``, not 2, 4, 6, ...

**Expected.** A copy at every n-th call, as the argument's name and documentation say.

**Workaround.** Pass n - 1.
"""

import torch
from tensordict.nn import TensorDictModule
from torchrl.data import OneHot
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, HardUpdate


def defect() -> bool:
    network = TensorDictModule(torch.nn.Linear(2, 2), ["observation"], ["action_value"])
    loss = DQNLoss(QValueActor(network, spec=OneHot(2)), action_space="one_hot", delay_value=True)
    updater = HardUpdate(loss, value_network_update_interval=2)
    with torch.no_grad():
        for parameter in loss.value_network_params.values(True, True):
            parameter.add_(1.0)

    def copied() -> bool:
        pairs = zip(
            loss.value_network_params.values(True, True),
            loss.target_value_network_params.values(True, True),
            strict=True,
        )
        return all(torch.equal(online, target) for online, target in pairs)

    calls = 0
    while not copied():
        updater.step()
        calls += 1
    return calls != 2


if __name__ == "__main__":
    print("present" if defect() else "fixed")
