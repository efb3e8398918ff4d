"""A TorchRL environment as a Gymnasium one, so that both kinds can be copied in the same way."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded
from torchrl.envs import EnvBase, step_mdp

__all__ = ["TorchRLAsGymnasium"]


class TorchRLAsGymnasium(gymnasium.Env[Any, Any]):
    """A single TorchRL environment behind Gymnasium's interface.

    Observations are the entry ``"observation"``; if there is none, all entries of the observation
    spec. Every episode is seeded anew, with numbers that follow from the seed of the first one, so
    that episodes can be repeated from their beginning.

    Args:
        env (EnvBase): with batch size ``[]`` and one action, continuous or discrete.

    Examples:
        >>> from torchrl.envs import GymEnv
        >>> env = TorchRLAsGymnasium(GymEnv("Pendulum-v1"))
        >>> observation, _ = env.reset(seed=0)
        >>> observation.shape, env.action_space
        ((3,), Box(-2.0, 2.0, (1,), float32))
    """

    def __init__(self, env: EnvBase) -> None:
        if env.batch_size != torch.Size([]):
            raise ValueError(
                "an environment must be a single one, with batch size [], because runs make the "
                f"copies; got {list(env.batch_size)}."
            )
        self.env = env
        spec = env.observation_spec
        self._has_one_entry = "observation" in spec.keys()
        self.observation_space = _observation_space(
            spec["observation"] if self._has_one_entry else spec
        )
        self.action_space = _action_space(env.action_spec)
        self.render_mode = "rgb_array" if hasattr(env, "render") else None
        self._state: TensorDictBase | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.env.set_seed(int(self.np_random.integers(2**31)))
        self._state = self.env.reset()
        return self._observation(self._state), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act."""
        if self._state is None:
            raise RuntimeError("the episode has not begun: reset the environment first.")
        spec = self.env.action_spec
        value = torch.as_tensor(action, device=spec.device)
        if isinstance(spec, OneHot):
            value = torch.nn.functional.one_hot(value.long(), spec.shape[-1])
        self._state.set(self.env.action_key, value.to(spec.dtype).reshape(spec.shape))
        step = self.env.step(self._state)
        after = step["next"]
        self._state = step_mdp(step)
        terminated = bool(after["terminated"])
        truncated = bool(after["done"]) and not terminated
        reward = float(after[self.env.reward_key])
        return self._observation(after), reward, terminated, truncated, {}

    def render(self) -> Any:
        """A picture, if the environment draws some."""
        return self.env.render()

    def close(self) -> None:
        """Free what the environment holds."""
        self.env.close(raise_if_closed=False)

    def _observation(self, data: TensorDictBase) -> Any:
        if self._has_one_entry:
            return _array(data["observation"])
        entries = data.select(*self.env.observation_spec.keys(True, True)).to_dict()
        return _arrays(entries)


def _arrays(entries: Any) -> Any:
    if isinstance(entries, dict):
        return {name: _arrays(entry) for name, entry in entries.items()}
    return _array(entries)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


def _observation_space(spec: TensorSpec) -> spaces.Space[Any]:
    if isinstance(spec, Composite):
        return spaces.Dict({str(name): _observation_space(part) for name, part in spec.items()})
    dtype: Any = np.uint8 if spec.dtype is torch.uint8 else np.float32
    low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
    return spaces.Box(low, high, tuple(spec.shape), dtype)


def _action_space(spec: TensorSpec) -> spaces.Space[Any]:
    if isinstance(spec, OneHot):
        return spaces.Discrete(spec.shape[-1])
    if isinstance(spec, Categorical) and not spec.shape:
        return spaces.Discrete(spec.n)
    if isinstance(spec, Bounded) and spec.dtype.is_floating_point:
        low, high = (bound.expand(spec.shape).cpu().numpy() for bound in (spec.low, spec.high))
        return spaces.Box(low, high, dtype=low.dtype)
    if isinstance(spec, Unbounded) and spec.dtype.is_floating_point:
        return spaces.Box(-np.inf, np.inf, tuple(spec.shape), np.float32)
    raise ValueError(f"actions must be continuous or discrete, one at a time; got {spec}.")
