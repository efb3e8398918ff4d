"""Environment transforms: running normalisation of observations and scaling of rewards.

The statistics of both transforms live in shared memory, in double precision. Several processes use
the same statistics when their environments come from one :class:`~torchrl.envs.EnvCreator`::

    make_env = EnvCreator(lambda: TransformedEnv(make_base_env(), RunningObservationNorm()))
    local_env = make_env()  # sees, saves and restores the statistics of all workers
    collector = MultiSyncCollector([make_env] * 2, policy, ...)

An ordinary function in place of the ``EnvCreator`` gives every process statistics of its own.

Loading a ``state_dict`` from a checkpoint writes into the memory that is already shared, so workers
that are running see it. Loading the ``state_dict`` of a transform that is alive joins its memory:
this is how an ``EnvCreator`` connects its environments. For a copy use ``frozen_copy``, which keeps
the statistics of the moment; ``frozen_view`` follows them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torch import multiprocessing as mp
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, Transform, VecNormV2

__all__ = ["ReturnStdScaling", "RunningObservationNorm"]


def _check_clip(clip: float | None) -> None:
    if clip is not None and not clip > 0.0:
        raise ValueError(f"clip must be positive or None, got {clip}.")


def _merge_moments_(mean: Tensor, variance: Tensor, count: Tensor, rows: Tensor) -> None:
    r"""Merge a batch ``rows`` ``[N, ...]`` into running statistics, in place.

    .. math::
        \mu' = \mu + \tfrac{N}{n + N} (m - \mu), \qquad
        \sigma'^2 = \tfrac{1}{n + N} \big(n \sigma^2 + N v + \tfrac{n N}{n + N} (m - \mu)^2 \big)

    with ``m`` and ``v`` the mean and the population variance of the batch. No large numbers are
    subtracted, unlike in the mean square minus the squared mean. Rows with an entry that is not
    finite are left out.
    """
    if not math.isfinite(float(rows.sum())):  # much quicker than a look at every number
        rows = rows[rows.isfinite().flatten(1).all(1) if rows.ndim > 1 else rows.isfinite()]
    batch_count = rows.shape[0]
    if batch_count == 0:
        return
    batch_variance, batch_mean = torch.var_mean(rows, 0, correction=0)
    share = batch_count / (float(count) + batch_count)
    deviation = batch_mean - mean
    variance.lerp_(batch_variance.addcmul_(deviation, deviation, value=1.0 - share), share)
    mean.add_(deviation, alpha=share)
    count.add_(batch_count)


class RunningObservationNorm(VecNormV2):
    r"""Observations shifted and scaled by their running mean and standard deviation, then clipped.

    .. math::
        o' = \mathrm{clip}\big((o - \mu) / \max(\sigma, eps), -c, c\big)

    Every observation seen so far has the same weight in :math:`\mu` and :math:`\sigma`, those of
    all environments of a batch together. It is TorchRL's
    :class:`~torchrl.envs.transforms.VecNormV2` with an infinite memory (``decay=1``) and
    ``reduce_batch_dims=True``, whose interface it keeps (``freeze``, ``unfreeze``, ``loc``,
    ``scale``, ``denorm``, ``to_observation_norm``, and an ``Evaluator`` freezes it by itself), with
    these differences:

    - The variance is updated directly and in double precision. ``VecNormV2`` subtracts the squared
      mean from the mean square in the precision of the data: in float32 and with a mean of 100 its
      standard deviation is off by half at :math:`\sigma = 0.1`, and it is not a number at a mean of
      1000 with :math:`\sigma = 1`.
    - When only some environments of a batch reset, only their observations count. ``VecNormV2``
      counts a stale observation of each of the others.
    - A checkpoint is loaded into the statistics in place, so that other processes see it.
    - Clipping is included.

    Put it outside a batched environment, where one transform sees all environments. For evaluation
    use :meth:`frozen_view` or :meth:`frozen_copy`.

    Args:
        in_keys (sequence of NestedKey): observations to normalise, each with its own statistics per
            element. Defaults to ``["observation"]``.
        out_keys (sequence of NestedKey, optional): where to write them. Defaults to ``in_keys``.

    Keyword Args:
        clip (float, optional): ``c``; ``None`` does not clip. Defaults to 10.
        eps (float): smallest standard deviation to divide by. Defaults to 1e-4.

    Examples:
        >>> from torchrl.envs import GymEnv, SerialEnv, TransformedEnv
        >>> env = TransformedEnv(
        ...     SerialEnv(2, lambda: GymEnv("Pendulum-v1")), RunningObservationNorm()
        ... )
        >>> rollout = env.rollout(20)
        >>> env.transform.loc["observation"].shape
        torch.Size([3])
        >>> eval_env = TransformedEnv(GymEnv("Pendulum-v1"), env.transform.frozen_view())
        >>> _ = eval_env.rollout(20)  # leaves the statistics alone
        >>> torch.equal(eval_env.transform.loc["observation"], env.transform.loc["observation"])
        True
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] = ("observation",),
        out_keys: Sequence[NestedKey] | None = None,
        *,
        clip: float | None = 10.0,
        eps: float = 1e-4,
    ) -> None:
        if isinstance(in_keys, str) or len(in_keys) == 0:
            raise ValueError(f"in_keys must be a sequence of at least one key, got {in_keys!r}.")
        if out_keys is not None and len(out_keys) != len(in_keys):
            raise ValueError(
                "out_keys must have as many keys as in_keys, "
                f"got {list(out_keys)} for {list(in_keys)}."
            )
        _check_clip(clip)
        if not eps > 0.0:
            raise ValueError(f"eps must be positive, got {eps}.")
        super().__init__(
            in_keys=list(in_keys),
            out_keys=None if out_keys is None else list(out_keys),
            decay=1.0,
            eps=eps,
            reduce_batch_dims=True,
        )
        self.clip = clip

    def set_container(self, container: Transform | EnvBase) -> None:
        """Attach to an environment and allocate the statistics."""
        with warnings.catch_warnings():
            # With reduced batch dimensions a batch is only a larger sample.
            warnings.filterwarnings("ignore", message="Support of .* for containers with non-empty")
            super().set_container(container)

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy statistics into those in use, or join them if they are in shared memory."""
        if not state:
            super().set_extra_state(state)
            return
        statistics = TensorDict(dict(state)).unflatten_keys(self.SEP)
        if all(leaf.is_shared() for leaf in statistics.values(True, True)):
            self._adopt(statistics)
        elif self._loc is None:
            self._adopt(statistics.clone().share_memory_())
        else:
            for current, name in ((self._loc, "loc"), (self._var, "var"), (self._count, "count")):
                current.update_(statistics[name])

    def clone(self) -> RunningObservationNorm:
        """A copy with its own statistics and no parent."""
        other = super().clone()
        if other._loc is not None:
            for statistics in (other._loc, other._var, other._count):
                statistics.share_memory_()
        return other

    def frozen_view(self) -> RunningObservationNorm:
        """A frozen transform without parent that follows the statistics of this one."""
        if self._loc is None:
            raise RuntimeError("attach the transform to its environment before making a view.")
        other = super().clone()
        other._loc, other._var, other._count = self._loc, self._var, self._count
        return other.freeze()

    def _adopt(self, statistics: TensorDictBase) -> None:
        self._loc, self._var, self._count = (statistics[key] for key in ("loc", "var", "count"))
        self.initialized.fill_(True)

    def _maybe_stateful_init(self, data: TensorDictBase) -> None:
        if not self.initialized:
            super()._maybe_stateful_init(data.double())  # integers have no mean
            for statistics in (self._loc, self._var, self._count):
                statistics.share_memory_()

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        mask = tensordict.get("_reset", None)
        if mask is None or mask.all():
            return super()._reset(tensordict, tensordict_reset)
        with self.lock:
            self._maybe_stateful_init(tensordict_reset)
            observations = tensordict_reset.select(*self.in_keys, strict=False)
            batch_dims = tensordict_reset.batch_dims
            rows = mask.flatten(batch_dims).any(-1) if mask.ndim > batch_dims else mask
            self._stateful_update(observations[rows])
            tensordict_reset.update(self._stateful_norm(observations))
        return tensordict_reset

    def _stateful_update(self, data: TensorDictBase) -> None:
        if self.frozen:
            return
        for key in data.keys(True, True):
            rows = data.get(key).to("cpu", torch.float64).reshape(-1, *self._loc.get(key).shape)
            _merge_moments_(self._loc.get(key), self._var.get(key), self._count.get(key), rows)

    def _norm(
        self, data: TensorDictBase, loc: TensorDictBase, var: TensorDictBase, count: TensorDictBase
    ) -> TensorDictBase:
        out_keys = dict(zip(self.in_keys, self.out_keys, strict=True))
        result = data.empty()
        for key in data.keys(True, True):
            observation = data.get(key)
            mean, variance = (td.get(key).to(observation.device) for td in (loc, var))
            result.set(out_keys[key], self._normalized(observation, mean, variance))
        return result

    def _normalized(self, observation: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        normalized = (observation.double() - mean).div_(variance.sqrt().clamp_min_(self.eps))
        if self.clip is not None:
            normalized.clamp_(-self.clip, self.clip)
        floating = observation.dtype.is_floating_point
        return normalized.to(observation.dtype if floating else torch.get_default_dtype())

    def observe(self, observations: Tensor) -> Tensor:
        """Let observations change the statistics, and normalise them: a step without TensorDict.

        Args:
            observations (Tensor): ``[*B, O]`` on the CPU, those of ``in_keys[0]``.

        Returns:
            Their normalised values.
        """
        key = self.in_keys[0]
        mean, variance, count = (td.get(key) for td in (self._loc, self._var, self._count))
        with self.lock:
            if not self.frozen:
                rows = observations.double().reshape(-1, *mean.shape)
                _merge_moments_(mean, variance, count, rows)
            return self._normalized(observations, mean, variance)

    def _get_loc_scale(
        self, loc_only: bool = False
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        loc = self._loc.clone()
        return loc, None if loc_only else self._var.sqrt().clamp_min(self.eps)


class ReturnStdScaling(Transform):
    r"""Rewards divided by the running standard deviation of the discounted return, then clipped.

    .. math::
        G_t = \gamma\, G_{t-1} + r_t, \qquad
        r'_t = \mathrm{clip}\big(r_t / \sqrt{\mathrm{Var}[G] + eps}, -c, c\big)

    Rewards are scaled but not shifted, which would change the task. Each environment of a batch has
    its own :math:`G`; all of them go into the same variance.

    With ``reset="done"`` each episode starts with :math:`G = 0`. With ``reset="termination"`` the
    accumulator does what Gymnasium's ``NormalizeReward`` does, and with it the reference agent
    (Minerva): :math:`G_t = \gamma (1 - terminated_t) G_{t-1} + r_t`, so that the reward of a
    terminal step still enters the next episode, and a truncated episode runs on into the next one.

    The scaled reward takes the place of the reward. The original is kept under ``raw_key``. A
    :class:`~torchrl.envs.RewardSum` that is to report returns in real units must come **before**
    this transform. Evaluate without it, or with a :meth:`frozen_copy`.

    Args:
        gamma (float): discount of the return; usually that of the agent. Defaults to 0.99.

    Keyword Args:
        reset (str): ``"done"`` or ``"termination"``. Defaults to ``"done"``.
        clip (float, optional): ``c``; ``None`` does not clip. Defaults to 10.
        eps (float): added to the variance. Defaults to 1e-8.
        reward_key (NestedKey): the reward. Defaults to ``"reward"``.
        raw_key (NestedKey, optional): where to keep the original reward; ``None`` drops it. It is
            an entry like an observation: zero after a reset. Defaults to ``"raw_reward"``.

    Examples:
        >>> from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, TransformedEnv
        >>> env = TransformedEnv(
        ...     SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
        ...     Compose(RewardSum(), ReturnStdScaling(gamma=0.98)),
        ... )
        >>> rollout = env.rollout(5)
        >>> rewards = rollout["next"].select("reward", "raw_reward", "episode_reward")
        >>> torch.allclose(rewards["raw_reward"].sum(1), rewards["episode_reward"][:, -1])
        True
        >>> env.transform[1].count.round()  # two environments, five steps
        tensor(10., dtype=torch.float64)
    """

    def __init__(
        self,
        gamma: float = 0.99,
        *,
        reset: Literal["done", "termination"] = "done",
        clip: float | None = 10.0,
        eps: float = 1e-8,
        reward_key: NestedKey = "reward",
        raw_key: NestedKey | None = "raw_reward",
    ) -> None:
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must lie between 0 and 1, got {gamma}.")
        if reset not in ("done", "termination"):
            raise ValueError(f"reset must be 'done' or 'termination', got {reset!r}.")
        _check_clip(clip)
        if not eps > 0.0:
            raise ValueError(f"eps must be positive, got {eps}.")
        if raw_key == reward_key:
            raise ValueError(f"raw_key must differ from reward_key, got {raw_key!r} for both.")
        out_keys = [reward_key] if raw_key is None else [reward_key, raw_key]
        super().__init__(in_keys=[reward_key], out_keys=out_keys)
        self.gamma = gamma
        self.reset_rule = reset
        self.clip = clip
        self.eps = eps
        self.reward_key = reward_key
        self.raw_key = raw_key
        self.frozen = False
        # An EnvCreator hands the lock and the statistics to its workers.
        self.lock = mp.Lock()
        # Mean, variance and count. The small count gives the initial variance little weight.
        self._moments = torch.tensor([0.0, 1.0, 1e-4], dtype=torch.float64).share_memory_()
        self._discounted_return: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """Mean of the discounted return."""
        return self._moments[0].clone()

    @property
    def variance(self) -> Tensor:
        """Variance of the discounted return."""
        return self._moments[1].clone()

    @property
    def count(self) -> Tensor:
        """Number of steps seen, plus 1e-4."""
        return self._moments[2].clone()

    def freeze(self) -> ReturnStdScaling:
        """Keep the statistics as they are."""
        self.frozen = True
        return self

    def unfreeze(self) -> ReturnStdScaling:
        """Let steps change the statistics again."""
        self.frozen = False
        return self

    def clone(self) -> ReturnStdScaling:
        """A copy with its own statistics, at the start of an episode, and no parent."""
        other = super().clone()
        other._moments = self._moments.clone().share_memory_()
        other._discounted_return = None
        return other

    def frozen_copy(self) -> ReturnStdScaling:
        """A frozen transform with the statistics of this moment."""
        return self.clone().freeze()

    def get_extra_state(self) -> dict[str, Tensor]:
        """The statistics: the tensor in use, not a copy."""
        return {"moments": self._moments}

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy statistics into those in use, or join them if they are in shared memory."""
        moments = state["moments"]
        if moments.is_shared():
            self._moments = moments
        else:
            self._moments.copy_(moments)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        reward = next_tensordict.get(self.reward_key)
        terminated = None
        if self.reset_rule == "termination":
            terminated = next_tensordict.get("terminated").cpu()
        if self.raw_key is not None:
            next_tensordict.set(self.raw_key, reward)
        return next_tensordict.set(self.reward_key, self.scale(reward, terminated))

    def scale(self, reward: Tensor, terminated: Tensor | None) -> Tensor:
        """Let the rewards of a step change the statistics, and scale them.

        Args:
            reward (Tensor): ``[*B, 1]``.
            terminated (Tensor, optional): of the same shape, on the CPU. Needed with
                ``reset="termination"`` only.
        """
        raw = reward.detach().to("cpu", torch.float64)
        previous = self._discounted_return
        if previous is None or previous.shape != raw.shape:
            previous = torch.zeros_like(raw)
        if self.reset_rule == "termination":
            assert terminated is not None
            previous = previous * ~terminated
        # A reward that is not finite, as a step that was lost has, does not count.
        discounted_return = torch.where(raw.isfinite(), self.gamma * previous + raw, previous)
        with self.lock:
            if not self.frozen:
                mean, variance, count = self._moments
                _merge_moments_(mean, variance, count, discounted_return.flatten())
            scale = (self._moments[1] + self.eps).sqrt()
        self._discounted_return = discounted_return
        scaled = raw / scale
        if self.clip is not None:
            scaled = scaled.clamp(-self.clip, self.clip)
        return scaled.to(reward)

    def end_episodes(self, ended: Tensor | None) -> None:
        """Start anew where episodes begin, unless ``reset="termination"``.

        Args:
            ended (Tensor, optional): where, ``[*B, 1]``; ``None`` for everywhere.
        """
        if self.reset_rule == "done" and self._discounted_return is not None:
            if ended is None:
                self._discounted_return = None
            else:
                mask = expand_as_right(ended.cpu(), self._discounted_return)
                self._discounted_return = self._discounted_return.masked_fill(mask, 0.0)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        self.end_episodes(tensordict.get("_reset", None))
        if self.raw_key is not None:
            zero = self.parent.full_reward_spec[self.reward_key].zero()
            tensordict_reset.set(self.raw_key, zero)
        return tensordict_reset

    def _reset_on_native_autoreset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._reset(tensordict, tensordict_reset)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The scaled reward has no bounds of its own."""
        spec = reward_spec[self.reward_key]
        reward_spec[self.reward_key] = Unbounded(
            shape=spec.shape, dtype=spec.dtype, device=spec.device
        )
        return reward_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the original reward."""
        if self.raw_key is not None:
            observation_spec[self.raw_key] = self.parent.full_reward_spec[self.reward_key].clone()
        return observation_spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Not available: outside an environment there is no order of steps."""
        raise RuntimeError(
            "ReturnStdScaling follows returns step by step and must be part of a TransformedEnv."
        )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["lock"]  # cannot be copied; an EnvCreator passes it on by itself
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "lock": mp.Lock()})
