"""MultiStepTransform does not mark transitions whose episode terminates before step n.

**Describe the bug.** With ``n_steps=3`` and an episode that terminates at its second step, the
transition that begins at the first step ends in the terminal state, but its ``("next",
"terminated")`` is false: only ``reward`` and the next observation are moved. A TD(0) target on
such data bootstraps from a terminal state.

**Expected.** ``done``, ``terminated`` and ``truncated`` of the step whose next observation is
taken. Passing ``done_keys=[]`` happens to give this, because the entries are then treated like
observations.

**Impact.** Tasks that terminate are learned with wrong targets for the last n - 1 steps of every
episode.
"""

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import MultiStepTransform


def defect() -> bool:
    end = torch.tensor([False, True, False, False, False, False]).unsqueeze(-1)
    following = {"observation": torch.arange(1.0, 7.0).unsqueeze(-1), "reward": torch.ones(6, 1)}
    following |= {"done": end, "terminated": end, "truncated": torch.zeros_like(end)}
    current = {"observation": torch.arange(6.0).unsqueeze(-1)}
    data = TensorDict({**current, "next": following}, [6], names=["time"])
    transform = MultiStepTransform(n_steps=3, gamma=0.9)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), transform=transform, batch_size=1
    )
    buffer.extend(data)
    first = buffer[:][0]
    assert first["next", "reward"].item() > 1.5  # it spans both steps
    return not first["next", "terminated"].item()


if __name__ == "__main__":
    print("present" if defect() else "fixed")
