"""Mixed-precision quantization: layers with more curvature get more bits.

To second order, at a minimum, a change of a weight by Δ raises the loss by ½ h Δ². :func:`costs` sums this over each layer for
several numbers of bits. :func:`allocate` chooses the bits of each layer under a budget. :func:`quantize` rounds the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

BITS = (2, 3, 4, 5, 6, 7, 8)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Round to the nearest of 2^bits − 1 evenly spaced values from −max|w| to max|w|, including zero.

    Each entry of the first dimension has its own maximum: an output channel, or an input channel of a transposed convolution. A
    vector, such as a bias, has one maximum.

    Example:
        >>> import torch
        >>> from hesscale.uses.quantization import rounded
        >>> rounded(torch.tensor([[1.0, 0.6, 0.2, -0.9]]), bits=2)
        tensor([[ 1.,  1.,  0., -1.]])
    """
    if bits < 2:
        raise ValueError(f"rounding needs at least 2 bits, for −1, 0 and 1 times a step, not {bits}")
    if not weight.isfinite().all():
        raise ValueError("a weight has entries that are not finite, which rounding would turn into NaN")
    levels = 2 ** (bits - 1) - 1
    if not weight.numel():
        return weight
    w = weight.to(torch.promote_types(weight.dtype, torch.float32))  # half precision cannot represent the steps
    dims = tuple(range(1, w.dim()))
    step = w.abs().amax(dims, keepdim=True) / levels if dims else w.abs().max() / levels
    return torch.where(step > 0, (w / step).round() * step, w).to(weight)


@torch.no_grad()
def costs(
    weights: Mapping[str, Tensor], diagonals: Mapping[str, Tensor], bits: Sequence[int] = BITS
) -> dict[str, dict[int, float]]:
    """Σ ½ h Δ² for each weight and each number of bits, with Δ the change by :func:`rounded`.

    Args:
        weights: by name.
        diagonals: h of the same names and shapes, which should not be negative: HesScaleGN or a Gauss-Newton diagonal.
        bits: the numbers of bits to choose from.

    Example:
        >>> import torch
        >>> from hesscale.uses.quantization import costs
        >>> costs({"weight": torch.tensor([[1.0, 0.25]])}, {"weight": torch.tensor([[9.0, 8.0]])}, bits=(2,))
        {'weight': {2: 0.25}}
    """
    for name, w in weights.items():
        if name not in diagonals or diagonals[name].shape != w.shape:
            met = f"one of shape {tuple(diagonals[name].shape)}" if name in diagonals else "none"
            raise ValueError(f"the weight {name} has shape {tuple(w.shape)} and needs a diagonal of that shape; there is {met}")
    return {name: {b: cost(w, diagonals[name], b) for b in bits} for name, w in weights.items()}


def cost(w: Tensor, diagonal: Tensor, bits: int) -> float:
    change = (rounded(w, bits) - w).to(torch.promote_types(w.dtype, torch.float32))  # its square may underflow in float16
    return float((diagonal * change.square()).double().sum() / 2)


def allocate(found: Mapping[str, Mapping[int, float]], sizes: Mapping[str, int], budget: float) -> dict[str, int]:
    """Choose the bits of each weight, so that the average is at most ``budget`` bits per entry and the sum of costs is low.

    The choice is greedy. Every weight starts with the fewest bits. Then, as long as the budget allows, the increase that lowers
    the cost most per additional bit of memory is made. An increase may skip numbers of bits that do not help.

    Args:
        found: costs, as from :func:`costs`.
        sizes: the number of entries of each of these weights.
        budget: in bits per entry.

    Example:
        >>> from hesscale.uses.quantization import allocate
        >>> allocate({"a": {2: 8.0, 4: 1.0}, "b": {2: 0.2, 4: 0.1}}, {"a": 10, "b": 10}, budget=3)
        {'a': 4, 'b': 2}
    """
    if missing := found.keys() - sizes.keys():
        raise ValueError(f"there are costs, but no sizes, for {', '.join(sorted(missing))}")
    for name, options in found.items():
        if not all(math.isfinite(cost) and cost >= 0 for cost in options.values()):
            raise ValueError(
                f"the costs of {name} must be finite and not negative, but are {dict(options)}; "
                "compute them from a diagonal that is never negative, such as HesScaleGN"
            )
    chosen = {name: min(options) for name, options in found.items()}
    room = budget * sum(sizes[name] for name in found) - sum(sizes[name] * bits for name, bits in chosen.items())
    if room < 0:
        least = sum(sizes[name] * bits for name, bits in chosen.items()) / sum(sizes[name] for name in found)
        raise ValueError(f"a budget of {budget:g} bits is not enough: the smallest numbers of bits need {least:g}")
    while True:
        steps = [
            ((cost - found[name][now]) / size, name, bits)
            for name, now in chosen.items()
            for bits, cost in found[name].items()
            if 0 < (size := sizes[name] * (bits - now)) <= room and cost < found[name][now]
        ]
        if not steps:
            return chosen
        _, name, bits = min(steps)
        room -= sizes[name] * (bits - chosen[name])
        chosen[name] = bits


@torch.no_grad()
def quantize(model: nn.Module, bits: Mapping[str, int]) -> None:
    """Round these parameters of a model in place, each to its number of bits. They stay floating-point numbers.

    Example:
        >>> import torch
        >>> from hesscale.uses.quantization import quantize
        >>> layer = torch.nn.Linear(3, 4)
        >>> quantize(layer, {"weight": 2})
        >>> [len(row.unique()) <= 3 for row in layer.weight]
        [True, True, True, True]
    """
    params = dict(model.named_parameters())
    if missing := bits.keys() - params.keys():
        raise ValueError(f"the model has no parameters {', '.join(sorted(missing))}")
    changed = {name: rounded(params[name], b) for name, b in bits.items()}  # one may raise, before any parameter has changed
    for name, value in changed.items():
        params[name].copy_(value)
