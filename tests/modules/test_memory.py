"""Freed memory is kept from update to update."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from minerva_torchrl.modules import StateActionCritic, keep_freed_memory
{before}
critic = StateActionCritic(17, 6, (512, 256))
observation, action = torch.randn(1024, 17), torch.randn(1024, 6)
def faults():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        with torch.no_grad():
            critic(observation, action)
        critic(observation, action).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
# The least of several: a system that is short of memory takes pages away at any time.
print(min(faults() for _ in range(6)))
"""


def page_faults(before: str) -> int:
    command = [sys.executable, "-W", "ignore", "-c", FAULTS.format(before=before)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators decide themselves")
def test_freed_memory_is_not_mapped_afresh():
    assert page_faults("keep_freed_memory()") < page_faults("") / 10
