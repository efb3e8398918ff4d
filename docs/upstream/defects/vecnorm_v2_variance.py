"""VecNormV2 loses the variance of observations whose mean is large.

**Describe the bug.** The variance is E[x^2] - E[x]^2, in float32. For observations around 10,000
with a standard deviation of 1 both terms are about 1e8, where float32 has steps of 8: the result
is noise, often negative (then NaN or the least scale).

**Expected.** Welford's update of the variance itself, or double precision.
"""

import torch
from tensordict import TensorDict
from torchrl.envs import VecNormV2


def defect() -> bool:
    torch.manual_seed(0)
    norm = VecNormV2(in_keys=["observation"], decay=1.0, reduce_batch_dims=True)
    for _ in range(50):
        data = TensorDict({"observation": 1e4 + torch.randn(64, 3)}, [64])
        normalised = norm._step(data, data.clone())["observation"]
    spread = normalised.std()
    return not 0.8 < spread.item() < 1.25


if __name__ == "__main__":
    print("present" if defect() else "fixed")
