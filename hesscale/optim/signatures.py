"""The types of options that optimizers pass on to their base class, and signatures that list these options in ``help``."""

from __future__ import annotations

import inspect
from typing import Any, TypedDict

import torch


class SharedOptions(TypedDict, total=False):
    """Keyword arguments of all optimizers; :class:`CurvatureOptimizer` documents them."""

    decoupled_weight_decay: bool
    trust_radius: float | None
    trust_region: str
    bias_correction: bool
    curvature_every: int
    curvature_warmup: int
    update_clip: float | None
    curvature_dtype: torch.dtype | None
    on_nonfinite: str
    maximize: bool
    foreach: bool | None
    capturable: bool


class CurvatureOptions(SharedOptions, total=False):
    """:class:`SharedOptions`, and the two options whose defaults differ between optimizers."""

    damping: float
    graft: tuple[float, float] | None


class SampledOptions(CurvatureOptions, total=False):
    """:class:`CurvatureOptions`, and the options of random estimates."""

    num_samples: int
    generator: torch.Generator | None


def full_signature(cls: type) -> inspect.Signature:
    """The signature of a class whose ``__init__`` may pass options, typed as ``Unpack[…]``, on to its base class."""
    _, *own = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    rest = own[-1] if own else None
    if rest is None or rest.kind is not rest.VAR_KEYWORD or "Unpack" not in str(rest.annotation):
        return inspect.Signature(own)
    inherited = inspect.signature(cls.__mro__[1]).parameters.values()
    found: dict[str, Any] = {parameter.name: parameter for parameter in [*own[:-1], *inherited]}
    found |= {parameter.name: parameter for parameter in own[:-1]}
    return inspect.Signature(sorted(found.values(), key=lambda parameter: parameter.kind))
