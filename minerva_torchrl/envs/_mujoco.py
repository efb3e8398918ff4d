"""The state of a MuJoCo simulation, complete."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION

# Shapes and textures: large, and the same in every copy of a model.
_ASSETS = ("bvh_", "mesh_", "oct_", "skin_", "tex_")

# Constraints: of another size at every step, and always computed anew.
_CONSTRAINTS = ("efc_", "efm_", "iefc_", "ifrc_", "iacc")


def get_physics_state(model: Any, data: Any) -> dict[str, Any]:
    """Everything that a simulation's future depends on.

    This is MuJoCo's own state, the numbers of the model, into which some tasks write when an
    episode begins, and the quantities derived from the state: they may lag a step behind it, and
    rewards are computed from them.

    Args:
        model (mujoco.MjModel): the model.
        data (mujoco.MjData): the simulation.
    """
    state = np.zeros(mujoco.mj_stateSize(model, _STATE))
    mujoco.mj_getState(model, data, state, _STATE)
    return {
        "state": torch.from_numpy(state),
        "model": _to_tensors(_float_arrays(model, _ASSETS)),
        "data": _to_tensors(_float_arrays(data, _ASSETS + _CONSTRAINTS)),
    }


def set_physics_state(model: Any, data: Any, state: dict[str, Any]) -> None:
    """Put a simulation into a state of :func:`get_physics_state`."""
    _write_arrays(_float_arrays(model, _ASSETS), state["model"])
    mujoco.mj_setState(model, data, state["state"].numpy(), _STATE)
    mujoco.mj_step1(model, data)  # contacts and constraints
    _write_arrays(_float_arrays(data, _ASSETS + _CONSTRAINTS), state["data"])


def _float_arrays(struct: Any, excluded: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    names = [name for name in dir(struct) if not name.startswith(("_", *excluded))]
    arrays = {name: getattr(struct, name) for name in names}
    return {
        name: array
        for name, array in arrays.items()
        if isinstance(array, np.ndarray) and array.dtype.kind == "f"
    }


def _to_tensors(arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _write_arrays(arrays: dict[str, NDArray[Any]], values: dict[str, Tensor]) -> None:
    for name, array in arrays.items():
        array[...] = values[name].numpy()
