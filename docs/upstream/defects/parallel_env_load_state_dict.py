"""After ParallelEnv.load_state_dict the next step returns before the worker has taken it.

**Describe the bug.** A worker that has loaded its state signals twice: by the flag in shared
memory, and by its event. The parent waits for the event and leaves the flag set. The next
``step`` finds the flag and returns at once, with what was in the buffers before.

**Expected.** ``load_state_dict`` clears the flag, or does not set it.
"""

import time

import torch
from tensordict import TensorDict
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase, ParallelEnv


class Slow(EnvBase):
    """Counts its steps, each of which takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded(1))
        self.action_spec = Unbounded(1)
        self.reward_spec = Unbounded(1)
        self.done_spec = Composite(done=Binary(1, dtype=torch.bool))
        self.count = 0

    def _reset(self, tensordict=None, **kwargs):
        self.count = 0
        return TensorDict({"observation": torch.zeros(1)})

    def _step(self, tensordict):
        time.sleep(0.5)
        self.count += 1
        observation = torch.full((1,), float(self.count))
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict({"observation": observation, "reward": torch.ones(1), "done": done})

    def _set_seed(self, seed):
        pass


def defect() -> bool:
    env = ParallelEnv(1, Slow)
    try:
        state = env.reset()
        env.load_state_dict(env.state_dict())
        after = env.step(state.set("action", torch.zeros(1, 1)))
        return after["next", "observation"].item() != 1.0
    finally:
        env.close()


if __name__ == "__main__":
    print("present" if defect() else "fixed")
