"""The state of an environment in the middle of an episode as plain data, which loads with ``weights_only=True``.

Loading creates no objects and runs no code: the objects of a new environment, including MuJoCo's simulator, are filled in place.
Values that can be neither saved nor filled raise an error that names them. State outside of attributes (global variables, class
variables and closures) is not saved.
"""

from __future__ import annotations

import re
import types
from collections import deque
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space
from gymnasium.wrappers import PassiveEnvChecker

from .mujoco_state import can_sleep, is_mujoco, load_simulation, save_simulation

FORMAT = 1
Array: TypeAlias = Any  # of numpy

PLAIN = (type(None), bool, int, float, str)
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
CONSTANT = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, EnvSpec, np.dtype, np.ufunc)
DRAWING = ("pygame.", "glfw.", "mujoco.renderer.", "mujoco.rendering.", "gymnasium.envs.mujoco.mujoco_rendering.")  # modules
# attributes that describe how an environment was created, or where its files are
HOW_IT_WAS_MADE = {"spec", "_cached_spec", "metadata", "_metadata", "render_mode", "fullpath"}
HOW_IT_WAS_MADE |= {"_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"}


def snapshot(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """The state of an environment and its wrappers, from which :func:`restore` resumes.

    Raises:
        TypeError: if some of it cannot be saved.
    """
    return {"format": FORMAT, "name": name_of(env), "state": Saver(name_of(env)).save(env)}


def restore(env: gymnasium.Env[Any, Any], saved: dict[str, Any]) -> None:
    """Restore a saved state, bit for bit, in an environment that was just created and reset.

    Raises:
        ValueError: if the saved state is of another environment.
        TypeError: if the environment is not like the one that was saved.
    """
    if saved.get("format") != FORMAT or saved.get("name") != name_of(env):
        raise ValueError(f"the saved state belongs to {saved.get('name')} (format {saved.get('format')}), not to {name_of(env)}")
    Restorer(name_of(env)).load(saved["state"], env)


def name_of(env: gymnasium.Env[Any, Any]) -> str:
    return env.spec.id if env.spec else type(env.unwrapped).__name__


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that may change; None if not all of its state is in attributes."""
    if isinstance(value, PassiveEnvChecker):  # it only records which warnings it has given
        return {"env": value.env}
    if isinstance(value, gymnasium.Env):
        return {name: part for name, part in vars(value).items() if name not in HOW_IT_WAS_MADE}
    if isinstance(value, Space):
        parts = getattr(value, "spaces", {})
        inner = parts.items() if isinstance(parts, dict) else enumerate(parts)
        return {"_np_random": value._np_random} if not parts else {str(key): part for key, part in inner}
    kind: Any = type(value)
    if any(
        getattr(kind, name, None) is not getattr(object, name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    ):
        return None
    try:
        reduced: Any = object.__reduce_ex__(value, 2)
    except TypeError:  # it has state that Python cannot access
        return None
    _, _, state, *items = reduced
    return None if any(item is not None for item in items) or isinstance(state, tuple) else state or {}


def is_apart(value: Any) -> bool:
    """Whether a value is only used for rendering, or is a MuJoCo model, which is compared as part of its simulation."""
    return type_name(value).startswith(DRAWING) or is_mujoco(value, "MjModel")


class Saver:
    """Converts values to plain data: plain values unchanged, others to [kind, content …], repeated objects to their number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: dict[int, tuple[int, Any]] = {}  # number and value, by id
        self.arrays: list[tuple[str, Array]] = []

    def save(self, value: Any, where: str = "", is_held: bool = False) -> Any:
        """Convert a value. ``is_held``: it is in a container, so a new environment may have no object there to fill."""
        if type(value) in PLAIN:
            return value
        if is_apart(value) and not is_held:
            return ["apart"]
        if isinstance(value, CONSTANT) and not is_held:
            return ["constant", label(value)]
        if isinstance(value, np.generic) and not value.dtype.hasobject and not value.dtype.names:
            return ["scalar", *packed(np.asarray(value))]
        if type(value) is tuple:
            return ["tuple", self.save_all(value, where)]
        if id(value) in self.known:
            return ["same", self.known[id(value)][0]]
        self.known[id(value)] = len(self.known), value
        return self.save_container(value, where) or self.save_object(value, where, is_held)

    def save_container(self, value: Any, where: str) -> list[Any]:
        """Convert a container of Python or NumPy; an empty list for any other value."""
        kind = type(value)
        if kind is list:
            return ["list", self.save_all(value, where)]
        if kind is deque:
            return ["deque", value.maxlen, self.save_all(value, where)]
        if kind is dict:
            return ["dict", [[self.save(k, where, True), self.save(v, f"{where}[{k!r}]", True)] for k, v in value.items()]]
        if kind is np.ndarray:
            self.check_memory(value, where)
            return ["array", *packed(value)]
        return []

    def save_object(self, value: Any, where: str, is_held: bool) -> Any:
        """Convert an object that can only be filled in place."""
        if type(value) is np.random.Generator and type(value.bit_generator).__name__ in BIT_GENERATORS:
            return ["generator", self.save(value.bit_generator.state, where, True)]
        if is_mujoco(value, "MjData") and not is_held:
            if can_sleep(value):
                self.refuse(where, "is a simulation whose bodies may fall asleep")
            return ["simulation", *save_simulation(value)]
        parts = None if is_held else attributes(value)
        if parts is None:
            return self.refuse(where, f"is a {type_name(value)}{' in a container' if is_held else ''}")
        return ["object", type_name(value), {name: self.save(part, f"{where}.{name}") for name, part in parts.items()}]

    def save_all(self, values: Any, where: str) -> list[Any]:
        return [self.save(value, f"{where}[{k}]", True) for k, value in enumerate(values)]

    def refuse(self, where: str, why: str) -> Any:
        raise TypeError(f"the state of {self.name} cannot be saved (its attribute {readable(where)} {why})")

    def check_memory(self, array: Array, where: str) -> None:
        """Refuse an array that shares memory with another one, since restored arrays would not."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if root.base is not None and not isinstance(root.base, bytes):
            self.refuse(where, "is in memory that is not numpy's")
        if array.dtype.hasobject or array.dtype.names:
            self.refuse(where, f"is an array of {array.dtype}")
        for other_name, other in self.arrays:
            is_view = array.base is not None or other.base is not None
            if is_view and np.may_share_memory(array, other) and np.shares_memory(array, other):
                self.refuse(where, f"shares memory with {readable(other_name)}")
        self.arrays.append((where, array))


class Restorer:
    """Reads what a :class:`Saver` wrote, in the same order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: list[Any] = []
        self.filled: set[int] = set()

    def load(self, saved: Any, current: Any, where: str = "") -> Any:
        """Restore a value. Objects are filled in place. ``current`` is the environment's value at the same position."""
        if type(saved) in PLAIN:
            return saved
        kind, *content = saved
        if kind == "scalar":
            return unpacked(*content)[()]
        if kind == "tuple":
            return tuple(self.load(entry, None, where) for entry in content[0])
        if kind == "same":
            return self.known[content[0]]
        if kind == "constant":
            return self.checked(current, content[0] == label(current), where, content[0])
        number = len(self.known)
        self.known.append(None)
        if kind == "array":
            self.known[number] = unpacked(*content)
        elif kind in ("list", "deque"):
            self.known[number] = [] if kind == "list" else deque(maxlen=content[0])
            self.known[number].extend(self.load(entry, None, where) for entry in content[-1])
        elif kind == "dict":
            self.known[number] = {}
            for key, entry in content[0]:
                self.known[number][self.load(key, None, where)] = self.load(entry, None, where)
        elif kind == "generator":
            self.known[number] = self.generator(content[0], current)
        else:
            expected = "mujoco._structs.MjData" if kind == "simulation" else content.pop(0)
            is_alike = type_name(current) == expected and id(current) not in self.filled
            self.known[number] = self.checked(current, is_alike, where, expected)
            self.filled.add(id(current))
            self.fill(kind, current, where, content)
        return self.known[number]

    def fill(self, kind: str, current: Any, where: str, content: list[Any]) -> None:
        """Fill an object of the environment, or its simulation, with the saved state."""
        if kind == "object":
            self.load_object(current, where, *content)
        elif not load_simulation(current, *content):
            raise TypeError(
                f"{self.name} differs from the saved environment: {readable(where)} has another model. Either the version of "
                "MuJoCo or of the environment has changed, or the environment changes its model, which cannot be restored"
            )

    def checked(self, current: Any, is_alike: bool, where: str, expected: str) -> Any:
        if not is_alike:
            found = "the same object as another attribute" if id(current) in self.filled else label(current)
            raise TypeError(
                f"{self.name} differs from the saved environment: {readable(where)} was {expected} and is now {found}"
            )
        return current

    def load_object(self, current: Any, where: str, parts: dict[str, Any]) -> None:
        had = attributes(current) or {}
        for name in had.keys() - parts.keys():
            vars(current).pop(name)
        for name, part in parts.items():
            if part != ["apart"]:
                value = self.load(part, had.get(name), f"{where}.{name}")
                if name not in had or value is not had[name]:
                    vars(current)[name] = value

    def generator(self, saved: Any, current: Any) -> Any:
        """Restore a random number generator, in place if possible, since other objects may refer to it."""
        state = self.load(saved, None)
        name = state["bit_generator"]
        if name not in BIT_GENERATORS:
            raise TypeError(f"{name!r} is not a bit generator of NumPy")
        is_alike = type(current) is np.random.Generator and type(current.bit_generator).__name__ == name
        if not is_alike or id(current) in self.filled:
            current = np.random.Generator(getattr(np.random, name)(0))
        self.filled.add(id(current))
        current.bit_generator.state = state
        return current


def type_name(value: Any) -> str:
    kind = type(value)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"  # some types of extensions have no module


def label(value: Any) -> str:
    """The name of a function or class, or the type of any other value."""
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else type_name(value)


def readable(where: str) -> str:
    return re.sub(r"^(\.env)*\.", "", where)


def packed(array: Array) -> list[Any]:
    """Dtype, shape, whether columns are contiguous, and bytes."""
    raw = np.frombuffer(array.tobytes(), np.uint8).copy()
    return [array.dtype.str, list(array.shape), bool(array.flags.fnc), torch.from_numpy(raw)]


def unpacked(dtype: str, shape: list[int], is_by_column: bool, raw: torch.Tensor) -> Array:
    return np.array(np.frombuffer(raw.numpy(), np.dtype(dtype)).reshape(shape), order="F" if is_by_column else "C")
