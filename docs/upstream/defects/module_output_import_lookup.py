"""TensorDictModule looks for optional packages with every output that it writes.

**Describe the bug.** ``TensorDictModule._write_to_tensordict`` passes each output through
``TensorDict.from_any``, which asks ``importlib`` whether optional packages are installed before
it returns a tensor as it is. For a small network this takes longer than the network.

**Expected.** A tensor is recognised first; or the answers are cached.
"""

import importlib.util
from unittest import mock

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule


def defect() -> bool:
    module = TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["features"])
    data = TensorDict({"observation": torch.zeros(5, 3)}, [5])
    module(data)  # whatever is done once
    with mock.patch("importlib.util.find_spec", wraps=importlib.util.find_spec) as find_spec:
        for _ in range(10):
            module(data)
    return find_spec.call_count >= 10


if __name__ == "__main__":
    print("present" if defect() else "fixed")
