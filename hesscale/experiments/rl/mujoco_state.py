"""The state of a MuJoCo simulation as two arrays: MuJoCo's own state, and the values derived in the last step."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = Any  # of numpy


def is_mujoco(value: Any, name: str) -> bool:
    """Whether a value is an instance of the MuJoCo class of that name. MuJoCo need not be installed."""
    module = sys.modules.get("mujoco")
    return module is not None and type(value) is getattr(module, name)


def can_sleep(data: Any) -> bool:
    """Whether bodies may fall asleep. MuJoCo's state does not say which ones do."""
    import mujoco

    return bool(data.model.opt.enableflags & int(getattr(mujoco.mjtEnableBit, "mjENBL_SLEEP", 0)))


def save_simulation(data: Any) -> list[Any]:
    """The model's fingerprint, the state with warm starts, and the names and contents of derived arrays."""
    import mujoco

    what = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.empty(mujoco.mj_stateSize(data.model, what))
    mujoco.mj_getState(data.model, data, state, what)
    fields = derived(data)
    values = np.concatenate([field.reshape(-1) for field in fields.values()])
    return [fingerprint(data.model), torch.from_numpy(state), list(fields), torch.from_numpy(values)]


def load_simulation(data: Any, model: str, state: Tensor, names: list[str], values: Tensor) -> bool:
    """Restore a saved state. Returns False if it is of another model."""
    import mujoco

    fields = derived(data)
    if model != fingerprint(data.model) or names != list(fields):
        return False
    mujoco.mj_setState(data.model, data, state.numpy(), int(mujoco.mjtState.mjSTATE_INTEGRATION))
    ends = np.cumsum([field.size for field in fields.values()])
    for field, part in zip(fields.values(), np.split(values.numpy(), ends[:-1]), strict=True):
        field[...] = part.reshape(field.shape)
    return True


def derived(data: Any) -> dict[str, Array]:
    """Positions, forces and other values of the last step. Rewards may depend on them before the next step.

    ``mj_forward`` would give other values, since a step computes them before it integrates. Values of contacts and constraints
    are not included, since their memory is allocated in each step.
    """
    import mujoco

    blank = mujoco.MjData(data.model)
    found = {name: getattr(blank, name) for name in dir(blank) if not name.startswith("_")}
    arrays = {name: value for name, value in found.items() if isinstance(value, np.ndarray) and value.dtype == np.float64}
    return {name: getattr(data, name) for name, value in arrays.items() if value.size and value.base is not None}


def fingerprint(model: Any) -> str:
    """A hash of a model's numbers, rounded to nine decimals, since their last bits depend on the machine that compiled it."""
    found = hashlib.sha256()
    for part in (model, model.opt):
        for name in dir(part):
            value = None if name.startswith("_") else getattr(part, name)
            if isinstance(value, np.ndarray | int | float):
                number = np.asarray(value)
                number = np.round(number, 9) + 0.0 if number.dtype.kind == "f" else number
                found.update(name.encode() + number.tobytes())
    return found.hexdigest()
