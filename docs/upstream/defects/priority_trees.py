"""The compiled priority trees of torchrl 0.14.1 can't be loaded with torch 2.13.

**Describe the bug.** The extension ``torchrl._torchrl`` was built against another torch and has
an undefined symbol, so that ``PrioritizedSampler`` raises when it is made.
``test_sac_prioritized_weights`` of TorchRL fails for the same reason.

**Expected.** Wheels for the torch that their metadata allows, or an upper bound there.
"""

from torchrl.data.replay_buffers.samplers import PrioritizedSampler


def defect() -> bool:
    try:
        PrioritizedSampler(max_capacity=10, alpha=0.7, beta=0.9)
    except (ImportError, RuntimeError, AttributeError, NameError, TypeError):
        return True
    return False


if __name__ == "__main__":
    print("present" if defect() else "fixed")
