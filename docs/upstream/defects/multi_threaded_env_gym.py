"""MultiThreadedEnv needs the abandoned package gym.

**Describe the bug.** ``MultiThreadedEnv`` makes its environments with ``envpool.make(...,
env_type="gym")``, which imports ``gym``. Where only Gymnasium is installed this fails, although
envpool has ``env_type="gymnasium"``.

**Expected.** The environment type that is installed, or an argument.

This script reads TorchRL's source, so that it needs neither envpool nor gym.
"""

import inspect

from torchrl.envs import MultiThreadedEnv


def defect() -> bool:
    source = inspect.getsource(MultiThreadedEnv)
    return 'env_type="gym"' in source and 'env_type="gymnasium"' not in source


if __name__ == "__main__":
    print("present" if defect() else "fixed")
