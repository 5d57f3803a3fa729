"""The recursion written out slowly: a network as a list of operators, each differentiated twice, entry by entry.

Knows nothing of the rules, nor of autograd's graph: a program names its tensors, and every line makes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from oracle import hessian_diagonal, separable_loss
from torch import Tensor


class Line(NamedTuple):
    """``output = function(*inputs)``: one differentiable operator and views at most, or the loss, with what leads to it."""

    output: str
    function: Callable[..., Tensor]
    inputs: tuple[str, ...]
    is_loss: bool = False


Program = Sequence[Line]


def run(program: Program, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the program, in plain PyTorch."""
    tensors = dict(leaves)
    for line in program:
        tensors[line.output] = line.function(*(tensors[name] for name in line.inputs))
    return tensors


def recursion(program: Program, leaves: dict[str, Tensor], *, gauss_newton: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradient and diagonal (g, s) at every tensor, backwards through the program.

        s_x = Σ_lines Σ_k s_k (∂y_k/∂x)² + Σ_k g_k ∂²y_k/∂x²

    A loss is one line, so its second derivatives are exact; Gauss-Newton drops the second sum in all others.
    """
    values = evaluate(program, leaves)
    gradient = {name: torch.zeros_like(value) for name, value in values.items()}
    diagonal = {name: torch.zeros_like(value) for name, value in values.items()}
    gradient[program[-1].output] += 1
    for line in reversed(program):
        x = {name: values[name].clone().requires_grad_() for name in line.inputs}
        y = apply(line, x)
        g, s = gradient[line.output], diagonal[line.output]
        loss = separable_loss(y, None if gauss_newton and not line.is_loss else g, s)
        for name, x_i in x.items():
            diagonal[name] += hessian_diagonal(loss, x_i)
            gradient[name] += torch.autograd.grad(y, x_i, g, retain_graph=True)[0]
    return {name: (gradient[name], diagonal[name]) for name in values}


def evaluate(program: Program, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the program as it was when it was made."""
    values = {name: leaf.detach() for name, leaf in leaves.items()}
    with torch.no_grad():
        for line in program:
            values[line.output] = apply(line, values)
    return values


def apply(line: Line, tensors: dict[str, Tensor]) -> Tensor:
    """A line on copies, so that one which works in place leaves its input alone."""
    copies = {name: tensors[name].clone() for name in line.inputs}
    return line.function(*(copies[name] for name in line.inputs))
