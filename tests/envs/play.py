"""What the tests of environments share: playing given actions, with resets where episodes end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl._utils import seed_generator
from torchrl.envs import EnvBase

from tests.envs.scripted import save_and_load

KEYS = ("observation", "reward", "terminated", "truncated", "done")


def play(env: EnvBase, actions: Tensor, first: TensorDictBase | None = None) -> TensorDict:
    """Steps ``[T, *B]`` from a reset, or from where an environment stands."""
    tensordict, steps = env.reset() if first is None else first.clone(), []
    for action in actions:
        step, tensordict = env.step_and_maybe_reset(tensordict.set("action", action))
        steps.append(step.clone())
    return torch.stack(steps)


def random_actions(env: EnvBase, steps: int, scale: float = 1.0) -> Tensor:
    actions = torch.stack([env.rand_action()["action"] for _ in range(steps)])
    return actions * scale if actions.is_floating_point() else actions


def chain(seed: int, count: int) -> list[int]:
    seeds = [seed]
    while len(seeds) < count:
        seeds.append(seed_generator(seeds[-1]))
    return seeds


def assert_same(actual: TensorDictBase, expected: TensorDictBase) -> None:
    """Bit for bit."""
    for root in (lambda td: td, lambda td: td["next"]):
        for key in KEYS:
            if key in root(expected).keys():
                torch.testing.assert_close(
                    root(actual)[key], root(expected)[key], rtol=0, atol=0, equal_nan=True
                )


def stack_reference(
    reset: Callable[[], Sequence[np.ndarray]],
    step: Callable[[np.ndarray], tuple[Sequence[np.ndarray], float, bool, bool]],
    actions: np.ndarray,
) -> TensorDict:
    """One copy, played without TorchRL: ``[T]``."""
    observation, steps = flat(reset()), []
    for action in actions:
        parts, reward, terminated, truncated = step(action)
        following = {
            "observation": flat(parts),
            "reward": torch.tensor([reward], dtype=torch.float32),
            "terminated": torch.tensor([terminated]),
            "truncated": torch.tensor([truncated]),
            "done": torch.tensor([terminated or truncated]),
        }
        steps.append(TensorDict({"observation": observation, "next": following}))
        observation = flat(reset()) if terminated or truncated else following["observation"]
    return torch.stack(steps)


def flat(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.ravel(part) for part in parts]).astype(np.float32))


def assert_goes_on_exactly(
    env: EnvBase, other: EnvBase, steps_before: int, actions: Tensor
) -> TensorDict:
    """``other`` loads the state of ``env`` after some steps, and both play the same ones then."""
    tensordict = env.reset()
    for action in actions[:steps_before]:
        _, tensordict = env.step_and_maybe_reset(tensordict.set("action", action))
    other.reset()
    other.load_state_dict(save_and_load(env.state_dict()))
    mine = play(env, actions[steps_before:], tensordict)
    theirs = play(other, actions[steps_before:], tensordict)
    assert_same(theirs, mine)
    assert torch.equal(other.reset()["observation"], env.reset()["observation"])
    return mine
