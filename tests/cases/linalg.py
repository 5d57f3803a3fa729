"""Cases: inverses, determinants and decompositions of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .table import Input, case, constant, normal

linalg = torch.linalg


def regular(*shape: int) -> Input:
    """Matrices far from singular ones."""
    return lambda generator: normal(*shape)(generator) + 3 * torch.eye(shape[-1], dtype=torch.float64, device=generator.device)


def definite(*shape: int) -> Input:
    """Symmetric matrices with positive eigenvalues that are well apart."""

    def make(generator: torch.Generator) -> Tensor:
        x = normal(*shape)(generator) / 4
        steps = torch.arange(1.0, shape[-1] + 1, dtype=torch.float64, device=generator.device)
        return (x + x.mT) / 2 + torch.diag(2 * steps)

    return make


def matrices(name: str, function: Callable[..., Any], *inputs: Any) -> None:
    case(name, function, *inputs, low_precision=False)


matrices("inv", linalg.inv, regular(3, 3))
matrices("inv batch", torch.inverse, regular(2, 2, 3, 3))
matrices("inv transposed", lambda x: linalg.inv(x.mT), regular(2, 3, 3))
matrices("inv 1×1", linalg.inv, regular(1, 1))

matrices("solve", linalg.solve, regular(3, 3), (3, 2))
matrices("solve batch", linalg.solve, regular(2, 3, 3), (2, 3, 4))
matrices("solve vector", linalg.solve, regular(3, 3), (3,))
matrices("solve vectors", linalg.solve, regular(2, 3, 3), (2, 3))
matrices("solve one vector for all", linalg.solve, regular(2, 3, 3), (3,))
matrices("solve broadcast matrix", linalg.solve, regular(3, 3), (2, 3, 2))
matrices("solve broadcast right side", linalg.solve, regular(2, 3, 3), (3, 2))
matrices("solve transposed", lambda a, b: linalg.solve(a.mT, b.mT), regular(3, 3), (2, 3))
matrices("solve from the right", lambda a, b: linalg.solve(a, b, left=False), regular(2, 3, 3), (2, 4, 3))
matrices("solve matrix only", lambda a: linalg.solve(a, constant(a, 3, 2)), regular(3, 3))
matrices("solve right side only", lambda b: linalg.solve(constant(b, 3, 3) + 3 * torch.eye(3).to(b.dtype), b), (3, 2))

for upper in (False, True):
    for left in (False, True):
        for unit in (False, True):
            matrices(
                f"solve_triangular upper={upper} left={left} unitriangular={unit}",
                lambda a, b, upper=upper, left=left, unit=unit: linalg.solve_triangular(
                    a, b, upper=upper, left=left, unitriangular=unit
                ),
                regular(2, 3, 3),
                (3, 3),
            )
matrices("solve_triangular broadcast", lambda a, b: linalg.solve_triangular(a, b, upper=True), regular(3, 3), (2, 3, 2))
matrices("solve_triangular transposed", lambda a, b: linalg.solve_triangular(a.mT, b, upper=True), regular(3, 3), (3, 2))
matrices("solve_triangular matrix only", lambda a: linalg.solve_triangular(a, constant(a, 3, 2), upper=False), regular(3, 3))
matrices(
    "solve_triangular right side only", lambda b: linalg.solve_triangular(3 * torch.eye(3).to(b.dtype), b, upper=True), (3, 2)
)

matrices("det", linalg.det, regular(3, 3))
matrices("det batch", torch.det, (2, 3, 3))
matrices("slogdet", linalg.slogdet, regular(2, 3, 3))
matrices("slogdet negative", lambda x: linalg.slogdet(-x)[1], regular(3, 3))
matrices("logdet", torch.logdet, definite(2, 3, 3))

matrices("cholesky", linalg.cholesky, definite(4, 4))
matrices("cholesky batch", linalg.cholesky, definite(2, 3, 3))
matrices("cholesky upper", lambda x: linalg.cholesky(x, upper=True), definite(2, 3, 3))
matrices("cholesky old", torch.cholesky, definite(3, 3))
matrices("cholesky old upper", lambda x: torch.cholesky(x, upper=True), definite(3, 3))
matrices("cholesky 1×1", linalg.cholesky, definite(1, 1))


def solve_by_factor(b: Tensor, factor: Tensor) -> Tensor:
    """Of a triangular factor, since PyTorch's gradient is not zero above its diagonal."""
    return torch.cholesky_solve(b, factor.tril())


matrices("cholesky_solve", solve_by_factor, (3, 2), regular(3, 3))
matrices("cholesky_solve batch", solve_by_factor, (2, 3, 4), regular(2, 3, 3))
matrices("cholesky_solve broadcast", solve_by_factor, (2, 3, 4), regular(3, 3))
matrices("cholesky_solve broadcast right side", solve_by_factor, (3, 4), regular(2, 3, 3))
matrices("cholesky_solve upper", lambda b, u: torch.cholesky_solve(b, u.triu(), upper=True), (3, 2), regular(2, 3, 3))
matrices("cholesky_solve factor only", lambda f: torch.cholesky_solve(constant(f, 3, 2), f.tril()), regular(3, 3))
matrices("cholesky_solve right side only", lambda b: torch.cholesky_solve(b, 2 * torch.eye(3).to(b.dtype)), (3, 2))

matrices("eigvalsh", linalg.eigvalsh, definite(4, 4))
matrices("eigvalsh batch", linalg.eigvalsh, definite(2, 3, 3))
matrices("eigvalsh upper", lambda x: linalg.eigvalsh(x, UPLO="U"), definite(3, 3))
matrices("eigh values", lambda x: linalg.eigh(x)[0], definite(3, 3))
matrices("svdvals", linalg.svdvals, (3, 3))
matrices("svdvals wide", linalg.svdvals, (2, 2, 4))
matrices("svdvals tall", linalg.svdvals, (4, 3))
matrices("svd values, full", lambda x: linalg.svd(x)[1], (2, 4))
matrices("svd values", lambda x: torch.svd(x)[1], (4, 2))
