"""Freed memory is kept from update to update."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
{before}
def faults():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [torch.ones(2**20) for _ in range(4)]  # 4 MB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
faults()
print(faults())
"""
KEEP = "from minerva_torchrl.objectives._memory import keep_freed_memory; keep_freed_memory()"


def page_faults(before: str) -> int:
    command = [sys.executable, "-W", "ignore", "-c", FAULTS.format(before=before)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators decide themselves")
def test_freed_memory_is_not_mapped_afresh():
    assert page_faults(KEEP) < page_faults("") / 10
