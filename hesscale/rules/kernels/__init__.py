"""Triton kernels for some of the rules. On a GPU, they compute the same shares as operators, in fewer passes over memory.

Without Triton, this module can be imported, but the other modules of this folder cannot.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor

from ...errors import CurvatureWarning


def has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # another module is called triton
        return False


HAS_TRITON = has_triton()
MIN_SOFTMAX_SIZE = 128  # for shorter rows, PyTorch's operators are faster
MAX_HEAD_SIZE = 128  # blocks of rows have to fit into on-chip memory
MAX_NORM_SIZE = 2**14  # rows have to fit into on-chip memory


_found_usable: dict[torch.device, bool] = {}


def can_replace(x: Tensor) -> bool:
    """Whether kernels can replace PyTorch's operators on x. They do not under a compiler, which generates its own kernels."""
    is_fit = x.is_cuda and x.dtype != torch.float64 and x.numel() > 0 and is_plain(x)
    return is_fit and not torch.compiler.is_compiling() and is_usable(x.device)


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor. Kernels cannot read the memory of others, for example of a DTensor."""
    return type(x) in (Tensor, torch.nn.Parameter)


def is_usable(device: torch.device) -> bool:
    """Whether Triton can compile kernels for this GPU, which must support bfloat16. It is tried once, outside of traces."""
    if device not in _found_usable:
        if not HAS_TRITON or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
            _found_usable[device] = False
        elif torch.compiler.is_compiling():
            return True
        else:
            _found_usable[device] = compiles(device)
    return _found_usable[device]


def compiles(device: torch.device) -> bool:
    """Try to compile the smallest kernel. This fails, for example, without a C compiler, which Triton needs."""
    try:
        log_softmax_share(torch.zeros(1, 2, device=device), None, torch.ones(1, 2, device=device))
    except Exception as error:
        warnings.warn(
            f"Triton cannot compile kernels here ({type(error).__name__}: {error}). Curvature takes more time without them",
            CurvatureWarning,
            stacklevel=2,
        )
        return False
    return True


def log_softmax_share(y: Tensor, s: Tensor | None, g: Tensor | None) -> Tensor:
    """The share of the logits. Each row of y is the log_softmax of a row of logits."""
    from .softmax import launch

    return launch(y, s, g)


def norm_shares(
    x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, s: Tensor | None, g: Tensor | None, *, is_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of x, weight and bias of a norm over each row of x: layer norm if ``is_centred``, else RMS norm."""
    from .normalization import launch

    return launch(x, mean, scale, weight, s, g, is_centred)


# This is registered as a PyTorch operator to make it traceable. No compiler fuses the operators of the rule into such kernels.
@torch.library.custom_op(
    "hesscale::attention_shares",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? s, Tensor? g, Tensor? mean, float scale, bool is_causal)"
    " -> (Tensor, Tensor, Tensor)",
)
def attention_shares(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, g: Tensor | None, mean: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of Q, K and V, of shape (batch · heads, length, size). ``mean`` is Σ g O for each row."""
    from .attention import launch

    return launch(q, k, v, s, g, mean, scale, is_causal)


@attention_shares.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    shares = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    return shares[0], shares[1], shares[2]


@attention_shares.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Members of an ensemble become additional heads."""
    tensors = [
        x if x is None else (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(arguments[:6], in_dims, strict=False)
    ]
    shares = attention_shares(*tensors, *arguments[6:])
    return tuple([share.unflatten(0, (info.batch_size, -1)) for share in shares]), (0, 0, 0)
