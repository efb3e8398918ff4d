"""A trained policy as one module: what an environment observes goes in, what it takes comes out."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchrl.envs import TransformedEnv

from minerva_torchrl.envs import RunningObservationNorm
from minerva_torchrl.envs.actions import (
    Actions,
    ArrayOfParts,
    BoxActions,
    DiscreteActions,
    PartedActions,
)
from minerva_torchrl.envs.batched import ObservationLayout
from minerva_torchrl.objectives.specs import keys_without

__all__ = ["DeployedPolicy", "flatten_observation"]


class DeployedPolicy(nn.Module):
    r"""A policy and all that training kept around it, as one module without TensorDicts.

    It normalises the observation with the statistics of training, asks the network, takes the
    deterministic action of its distribution (the mean of a Gaussian, its ``tanh`` where it is
    squashed, the most probable discrete action, and so for each part of an action with several),
    and turns it into the action that the bare environment takes: clipped to its bounds, in its
    shape and precision, or the number of a discrete action; a dict or a tuple of such where the
    environment takes that.

    Networks and statistics are copied: training on does not change it.

    Args:
        actor (ProbabilisticTensorDictSequential): the policy. Reads ``"observation"`` only.
        env (TransformedEnv): from :func:`~minerva_torchrl.make_env`, as in training.

    Examples:
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor, TanhNormal
        >>> from minerva_torchrl import make_env
        >>> env = make_env("cartpole-balance", observation_norm=True)
        >>> network = nn.Sequential(nn.Linear(5, 2), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=TanhNormal,
        ... )
        >>> policy = DeployedPolicy(actor, env)
        >>> policy.predict(np.zeros(5)).shape
        (1,)
        >>> policy.predict({"position": np.zeros((4, 3)), "velocity": np.zeros((4, 2))}).shape
        (4, 1)
    """

    def __init__(self, actor: ProbabilisticTensorDictSequential, env: TransformedEnv) -> None:
        super().__init__()
        read = keys_without(actor.in_keys, actor.out_keys)
        if read != ["observation"]:
            raise ValueError(f"actor must read 'observation' only, and reads {read}.")
        self.observation_layout: ObservationLayout = env.base_env.observation_layout
        self.observation_size: int = env.observation_spec["observation"].shape[-1]
        _check_transforms(env)
        norms = [t for t in env.transform if isinstance(t, RunningObservationNorm)]
        self.normalise = _Normalisation(norms[0]) if norms else nn.Identity()
        self.actor = copy.deepcopy(actor).eval().requires_grad_(False)
        self.to_environment = _action_module(env.base_env.actions)
        distribution = self._distribution(torch.zeros(1, self.observation_size))
        kinds = (Tensor, TensorDictBase)
        if not isinstance(getattr(distribution, "deterministic_sample", None), kinds):
            raise TypeError(
                "the distribution of actor must have a deterministic sample, as IndependentNormal, "
                f"TanhNormal and OneHotCategorical have; got {type(distribution).__name__}."
            )

    # Acting --------------------------------------------------------------------------------------

    def forward(self, observation: Tensor) -> Any:
        """The deterministic action.

        Args:
            observation (Tensor): as the environment gives it, but flat: ``[*B, O]``, float32.

        Returns:
            As the environment takes it: ``[*B, *A]``, or ``[*B]`` integers if it is discrete; a
            dict or tuple of such if the action has parts.
        """
        return self.to_environment(self._distribution(observation).deterministic_sample)

    def sample(self, observation: Tensor) -> Any:
        """An action drawn from the policy; otherwise as :meth:`forward`."""
        return self.to_environment(self._distribution(observation).sample())

    @torch.no_grad()
    def predict(self, observation: Any, *, deterministic: bool = True) -> Any:
        """Actions for what the bare environment observes, as it takes them in ``step``.

        Args:
            observation (array or dict of arrays): one observation, or a batch of them. An array
                is flat (``[*B, O]``) or of the environment's own shape. A dict is what DM Control
                has in ``TimeStep.observation``, or an observation of a Gymnasium ``Dict`` space.

        Keyword Args:
            deterministic (bool): the deterministic action; otherwise one is drawn with torch's
                random generator. Defaults to ``True``.

        Returns:
            Array ``[*B, *A]``, or integers ``[*B]`` if actions are discrete; a dict or tuple of
            such if they have parts.
        """
        flat = flatten_observation(observation, self.observation_layout)
        rows = torch.from_numpy(flat.reshape(-1, self.observation_size))
        action = (self if deterministic else self.sample)(rows)

        def array(part: Tensor) -> NDArray[Any]:
            result: NDArray[Any] = part.numpy().reshape((*flat.shape[:-1], *part.shape[1:]))[()]
            return result

        return pytree.tree_map(array, action)

    def _distribution(self, observation: Tensor) -> Any:
        batch_size = observation.shape[:-1]
        data = TensorDict({"observation": self.normalise(observation)}, batch_size=batch_size)
        return self.actor.get_dist(data)

    # Files ---------------------------------------------------------------------------------------

    def export(self, path: Path | str) -> None:
        """Write the deterministic policy to a file that needs nothing of this package.

        ``.pt2`` is read by :func:`torch.export.load`, ``.onnx`` by ONNX runtimes. Both take one
        input, ``observation`` (float32 ``[N, O]`` with any ``N``), and give one output, ``action``,
        as :meth:`forward` does; for an action of several parts a ``.onnx`` gives one output each,
        ``action_arm`` and so on, in their order. The entries of an observation that is a dict
        follow each other in the order in which the environment gives them.

        Args:
            path (Path or str): where to, with the ending ``.pt2`` or ``.onnx``. Missing folders are
                made.
        """
        path = Path(path)
        if path.suffix not in (".pt2", ".onnx"):
            raise ValueError(f"path must end in .pt2 or .onnx, got {str(path)!r}.")
        if path.suffix == ".onnx":
            _require_onnx()
        example = torch.zeros(2, self.observation_size)
        batch = {"observation": {0: torch.export.Dim("batch")}}
        # Without gradients some activations would take forms that are faster on a CPU only.
        with torch.enable_grad():
            program = torch.export.export(self, (example,), dynamic_shapes=batch, strict=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".pt2":
            torch.export.save(program, path)
        else:
            _save_onnx(program, path, _output_names(self(example)))


class _Normalisation(nn.Module):
    """What :class:`RunningObservationNorm` does, with its statistics of this moment."""

    loc: Tensor
    scale: Tensor

    def __init__(self, norm: RunningObservationNorm) -> None:
        super().__init__()
        self.register_buffer("loc", norm.loc["observation"])
        self.register_buffer("scale", norm.scale["observation"])
        self.clip = math.inf if norm.clip is None else norm.clip

    def forward(self, observation: Tensor) -> Tensor:
        normalised = (observation.double() - self.loc) / self.scale
        return normalised.clamp(-self.clip, self.clip).float()


def _check_transforms(env: TransformedEnv) -> None:
    """Raise if a transform changes observations or actions in a way that is not known here."""
    for transform in env.transform:
        keys = {*transform.out_keys, *transform.in_keys_inv, *transform.out_keys_inv}
        if keys & {"observation", "action"} and not isinstance(transform, RunningObservationNorm):
            raise ValueError(
                f"{type(transform).__name__} changes observations or actions, which a policy "
                "outside of TorchRL would have to do without. Use the actor with make_env(), or a "
                "Gymnasium wrapper in place of the transform."
            )


def _action_module(actions: Actions) -> nn.Module:
    if isinstance(actions, BoxActions):
        return _BoxAction(actions)
    if isinstance(actions, PartedActions):
        return _PartedAction(actions)
    if isinstance(actions, DiscreteActions) and not actions.categorical:
        return _DiscreteAction(actions.start)
    raise TypeError(f"actions must be continuous or one-hot, got {actions.spec()}.")


class _PartedAction(nn.Module):
    """What :class:`PartedActions` does."""

    def __init__(self, actions: PartedActions) -> None:
        super().__init__()
        self.actions = actions
        self.parts = nn.ModuleList(map(_action_module, actions.parts.values()))

    def forward(self, action: TensorDictBase) -> Any:
        parts = action.get("action")
        values = {
            name: part(parts.get(name))
            for name, part in zip(self.actions.parts, self.parts, strict=True)
        }
        return self.actions.assemble(values, self._array)

    def _array(self, form: ArrayOfParts, values: list[Tensor]) -> Tensor:
        dtype = torch.from_numpy(np.empty(0, form.dtype)).dtype
        return torch.stack(values, -1).unflatten(-1, form.shape).to(dtype)


class _BoxAction(nn.Module):
    """What :class:`BoxActions` does."""

    low: Tensor
    high: Tensor
    center: Tensor
    scale: Tensor

    def __init__(self, actions: BoxActions) -> None:
        super().__init__()
        for name in ("low", "high", "center", "scale"):
            self.register_buffer(name, torch.tensor(getattr(actions, name)))

    def forward(self, action: Tensor) -> Tensor:
        action = action.reshape(*action.shape[:-1], *self.low.shape).to(self.low.dtype)
        return (self.center + self.scale * action).clamp(self.low, self.high)


class _DiscreteAction(nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def forward(self, one_hot: Tensor) -> Tensor:
        return one_hot.argmax(-1) + self.start


# Files -------------------------------------------------------------------------------------------


def _require_onnx() -> None:
    try:
        for name in ("onnx", "onnxscript"):
            importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            'a file .onnx needs onnx and onnxscript: pip install "minerva_torchrl[export]" '
            f"({error})."
        ) from error


def _is_not_about_torchvision(record: logging.LogRecord) -> bool:
    return "torchvision is not installed" not in record.getMessage()


def _output_names(action: Any) -> list[str]:
    """A name for each tensor of an action, after the keys that lead to it."""
    leaves, _ = pytree.tree_flatten_with_path(action)
    inside = (["".join(filter(str.isalnum, str(key))) for key in path] for path, _ in leaves)
    return ["_".join(["action", *keys]) for keys in inside]


def _save_onnx(program: torch.export.ExportedProgram, path: Path, outputs: list[str]) -> None:
    # Torch's exporter looks for operators of torchvision, which no policy has.
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.addFilter(_is_not_about_torchvision)
    with warnings.catch_warnings():
        # Torch's exporter uses what torch itself has deprecated.
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")
        torch.onnx.export(
            program,
            f=path,
            dynamo=True,
            input_names=["observation"],
            output_names=outputs,
            dynamic_shapes={"observation": {0: "batch"}},
            external_data=False,
            verbose=False,
        )


# Observations ------------------------------------------------------------------------------------


def flatten_observation(observation: Any, layout: ObservationLayout) -> NDArray[np.float32]:
    """What an environment observes as the flat observation that policies read.

    Args:
        observation (array or dict of arrays): of the environment's own form, or flat already.
        layout (dict): that of the environment (``env.base_env.observation_layout``).

    Returns:
        Array ``[*B, O]``.

    Examples:
        >>> layout = {("position",): (2,), ("height",): ()}
        >>> flatten_observation({"height": 3.0, "position": [1.0, 2.0]}, layout)
        array([1., 2., 3.], dtype=float32)
        >>> flatten_observation([1.0, 2.0], layout)
        Traceback (most recent call last):
        ...
        ValueError: observation must have the shape [*B, 3], got [2].
    """
    parts = {keys: _numbers(keys, value) for keys, value in _leaves(observation)}
    size = sum(math.prod(shape) for shape in layout.values())
    if parts.keys() == {()}:
        # The longer one: a single observation of shape [1, O] is no batch.
        shapes = sorted({(size,), layout.get((), (size,))}, key=len)
        fitting = [shape for shape in shapes if _ends_in(parts[()], shape)]
        layout = {(): fitting[-1] if fitting else (size,)}
    elif parts.keys() != layout.keys():
        raise ValueError(
            f"observation must have {', '.join(map(_name, layout))} or be an array [*B, {size}]; "
            f"it has {', '.join(map(_name, parts)) or 'nothing'}."
        )
    for keys, shape in layout.items():
        if not _ends_in(parts[keys], shape):
            wanted, got = ", ".join(map(str, ("*B", *shape))), list(parts[keys].shape)
            raise ValueError(f"{_name(keys)} must have the shape [{wanted}], got {got}.")
    batches = {parts[keys].shape[: parts[keys].ndim - len(layout[keys])] for keys in layout}
    if len(batches) > 1:
        raise ValueError(
            "the entries of observation must be batches of the same shape, got "
            f"{' and '.join(str(list(batch)) for batch in sorted(batches))}."
        )
    (batch,) = batches
    flat = [parts[keys].reshape((*batch, math.prod(layout[keys]))) for keys in layout]
    return np.concatenate(flat, -1)


def _leaves(observation: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(observation, Mapping):
        for key, value in observation.items():
            yield from _leaves(value, (*keys, key))
    else:
        yield keys, observation


def _numbers(keys: tuple[str, ...], value: Any) -> NDArray[np.float32]:
    try:
        array = np.asarray(value)
    except ValueError:  # of rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{_name(keys)} must be an array of numbers, got {type(value).__name__}"
            + (f" of {array.dtype}." if isinstance(value, np.ndarray) else ".")
        )
    if np.isnan(array).any():
        raise ValueError(f"{_name(keys)} has a value that is not a number (nan).")
    return array.astype(np.float32)


def _ends_in(array: NDArray[Any], shape: tuple[int, ...]) -> bool:
    return array.ndim >= len(shape) and array.shape[array.ndim - len(shape) :] == shape


def _name(keys: tuple[str, ...]) -> str:
    return "observation" + "".join(f"[{key!r}]" for key in keys)
