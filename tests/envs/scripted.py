"""An environment that records what it emits, and what the tests of transforms share."""

from __future__ import annotations

import io

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, SerialEnv


class ScriptedEnv(EnvBase):
    """Episodes of a fixed length with observations and rewards from a seeded generator.

    Every second episode is truncated, the others terminate. Everything it emits is recorded.
    """

    def __init__(
        self, seed: int = 0, length: int = 4, loc: float = 0.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(batch_size=[])
        self.generator = torch.Generator().manual_seed(seed)
        self.length, self.loc, self.dtype = length, loc, dtype
        self.observation_spec = Composite(observation=Unbounded((2,), dtype=dtype))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Bounded(low=-1.0, high=1.0, shape=(1,), dtype=dtype)
        flags = ("done", "terminated", "truncated")
        self.full_done_spec = Composite({f: Binary(1, dtype=torch.bool) for f in flags})
        self.step_in_episode, self.episode = 0, 0
        self.observations: list[Tensor] = []

    def draw(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=self.dtype) * 2 - 1

    def observe(self, terminated: bool, truncated: bool) -> dict[str, Tensor]:
        observation = self.loc + self.draw(2)
        self.observations.append(observation)
        return {
            "observation": observation,
            "terminated": torch.tensor([terminated]),
            "truncated": torch.tensor([truncated]),
            "done": torch.tensor([terminated or truncated]),
        }

    def _reset(self, tensordict: TensorDict | None = None, **kwargs) -> TensorDict:
        self.step_in_episode = 0
        self.episode += 1
        return TensorDict(self.observe(False, False), batch_size=[])

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self.step_in_episode += 1
        end = self.step_in_episode >= self.length
        data = self.observe(end and self.episode % 2 == 0, end and self.episode % 2 == 1)
        return TensorDict({**data, "reward": self.draw(1)}, batch_size=[])

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed)


def make_batched(*lengths: int, loc: float = 0.0) -> SerialEnv:
    return SerialEnv(
        len(lengths),
        [lambda i=i, n=n: ScriptedEnv(seed=i, length=n, loc=loc) for i, n in enumerate(lengths)],
    )


def save_and_load(state: dict) -> dict:
    """Through a file, as a checkpoint would."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def collect(env: EnvBase, steps: int) -> TensorDict:
    """A reset and then steps, ``[*B, T]``, as a collector takes them: ended episodes reset."""
    return env.rollout(steps, break_when_any_done=False)
