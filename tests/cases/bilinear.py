"""Cases: products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import case, constant

case("mm", torch.mm, (3, 4), (4, 5))
case("mm left only", lambda x: torch.mm(x, constant(x, 4, 5)), (3, 4))
case("mm right only", lambda x: torch.mm(constant(x, 3, 4), x), (4, 5))
case("mm transposed", lambda a, b: torch.mm(a.t(), b.t()), (4, 3), (5, 4))
case("mm strided", lambda a, b: torch.mm(a[::2, 1:], b[:, ::2]), (6, 5), (4, 6))
case("mm empty", torch.mm, (3, 0), (0, 5))
case("mm with itself", lambda x: torch.mm(x, x), (4, 4))

case("addmm", lambda b, x, w: torch.addmm(b, x, w, alpha=2, beta=3), (5,), (3, 4), (4, 5))
case("addmm matrix summand", lambda b, x, w: torch.addmm(b, x, w, alpha=-0.5), (3, 5), (3, 4), (4, 5))
case("addmm column summand", lambda b, x, w: torch.addmm(b, x, w, beta=-2), (3, 1), (3, 4), (4, 5))
case("addmm beta=0", lambda b, x, w: torch.addmm(b, x, w, beta=0), (5,), (3, 4), (4, 5))
case("addmm alpha=0", lambda b, x, w: torch.addmm(b, x, w, alpha=0), (5,), (3, 4), (4, 5))
case("addmm summand only", lambda b: torch.addmm(b, constant(b, 3, 4), constant(b, 4, 5), beta=2), (5,))
case("addmm left only", lambda x: torch.addmm(constant(x, 5), x, constant(x, 4, 5), alpha=3), (3, 4))
case("addmm right only", lambda w: torch.addmm(constant(w, 5), constant(w, 3, 4), w, alpha=3), (4, 5))
case("addmm square", lambda b, x: torch.addmm(b, x, x, alpha=2, beta=3), (4,), (4, 4))
case("addmm square, constant summand", lambda x: torch.addmm(constant(x, 4), x, x, alpha=-2), (4, 4))


def sparse(like: Tensor, layout: torch.layout) -> Tensor:
    return torch.tensor([[0.0, 1.5, 0.0], [-2.0, 0.0, 0.5]], dtype=like.dtype).to_sparse(layout=layout)


for kind in (torch.sparse_coo, torch.sparse_csr):
    case(f"mm {kind}", lambda x, kind=kind: sparse(x, kind) @ x, (3, 4))
    case(f"mm {kind} transposed", lambda x, kind=kind: sparse(x, kind) @ x.t(), (4, 3))
    case(f"mv {kind}", lambda x, kind=kind: torch.mv(sparse(x, kind), x), (3,))
    case(f"addmm {kind}", lambda b, x, kind=kind: torch.addmm(b, sparse(x, kind), x), (2, 4), (3, 4))
    case(f"sparse.mm {kind}", lambda x, kind=kind: torch.sparse.mm(sparse(x, kind), x), (3, 4))
case(
    "sparse.addmm",
    lambda b, x: torch.sparse.addmm(b, sparse(x, torch.sparse_coo), x, alpha=2, beta=3),
    (2, 4),
    (3, 4),
)

case("linear", F.linear, (3, 4), (5, 4), (5,))
case("linear without bias", F.linear, (3, 4), (5, 4))
case("linear first layer", lambda w, b: F.linear(constant(w, 3, 4), w, b), (5, 4), (5,))
case("linear frozen", lambda x: F.linear(x, constant(x, 5, 4), constant(x, 5)), (3, 4))
case("linear one sample", F.linear, (4,), (5, 4), (5,))
case("linear one sample without bias", F.linear, (4,), (5, 4))
case("linear 3-d", F.linear, (2, 3, 4), (5, 4), (5,))
case("linear 3-d without bias", F.linear, (2, 3, 4), (5, 4))
case("linear 3-d transposed", lambda x, w, b: F.linear(x.transpose(0, 1), w, b), (3, 2, 4), (5, 4), (5,))
case("linear 4-d", F.linear, (2, 2, 3, 4), (5, 4), (5,))
case("linear vector weight", F.linear, (3, 4), (4,))

case("mv", torch.mv, (3, 4), (4,))
case("mv matrix only", lambda x: torch.mv(x, constant(x, 4)), (3, 4))
case("mv vector only", lambda x: torch.mv(constant(x, 3, 4), x), (4,))
case("addmv", lambda b, a, v: torch.addmv(b, a, v, alpha=2, beta=3), (3,), (3, 4), (4,))
case("addmv scalar summand", lambda b, a, v: torch.addmv(b, a, v, beta=0.5), (1,), (3, 4), (4,))
case("addmv matrix only", lambda a: torch.addmv(constant(a, 3), a, constant(a, 4), alpha=-2), (3, 4))
case("addmv vector only", lambda v: torch.addmv(constant(v, 3), constant(v, 3, 4), v, alpha=-2), (4,))

case("bmm", torch.bmm, (2, 3, 4), (2, 4, 5))
case("bmm left only", lambda x: torch.bmm(x, constant(x, 2, 4, 5)), (2, 3, 4))
case("bmm right only", lambda x: torch.bmm(constant(x, 2, 3, 4), x), (2, 4, 5))
case("bmm transposed", lambda q, k: torch.bmm(q.mT, k.mT), (2, 4, 3), (2, 5, 4))
case("bmm with itself", lambda x: torch.bmm(x, x), (2, 3, 3))
case("baddbmm", lambda b, x, y: torch.baddbmm(b, x, y, alpha=2, beta=3), (2, 3, 5), (2, 3, 4), (2, 4, 5))
case("baddbmm row summand", lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5), (5,), (2, 3, 4), (2, 4, 5))
case("baddbmm beta=0", lambda b, x, y: torch.baddbmm(b, x, y, beta=0), (2, 1, 5), (2, 3, 4), (2, 4, 5))
case("baddbmm right only", lambda y: torch.baddbmm(constant(y, 5), constant(y, 2, 3, 4), y, alpha=2), (2, 4, 5))
case("baddbmm square", lambda b, x: torch.baddbmm(b, x, x, alpha=2, beta=3), (2, 3, 3), (2, 3, 3))
case("addbmm", lambda b, x, y: torch.addbmm(b, x, y, alpha=2, beta=3), (3, 5), (2, 3, 4), (2, 4, 5))
case("addbmm row summand", lambda b, x, y: torch.addbmm(b, x, y), (5,), (2, 3, 4), (2, 4, 5))
case("addbmm transposed", lambda b, x, y: torch.addbmm(b, x.mT, y.mT), (5,), (2, 4, 3), (2, 5, 4))
case("addbmm left only", lambda x: torch.addbmm(constant(x, 5), x, constant(x, 2, 4, 5)), (2, 3, 4))
case("addbmm square", lambda b, x: torch.addbmm(b, x, x, alpha=2, beta=3), (3, 3), (2, 3, 3))

case("addr", lambda b, u, v: torch.addr(b, u, v, alpha=2, beta=3), (3, 4), (3,), (4,))
case("addr row summand", lambda b, u, v: torch.addr(b, u, v, beta=0.5), (4,), (3,), (4,))
case("addr left only", lambda u: torch.addr(constant(u, 4), u, constant(u, 4)), (3,))
case("addr right only", lambda v: torch.addr(constant(v, 4), constant(v, 3), v), (4,))
case("addr square", lambda b, v: torch.addr(b, v, v, alpha=2, beta=3), (3,), (3,))
case("outer", torch.outer, (3,), (4,))
case("dot", torch.dot, (4,), (4,))
case("dot left only", lambda x: torch.dot(x, constant(x, 4)), (4,))
case("dot right only", lambda x: torch.dot(constant(x, 4), x), (4,))
case("dot with itself", lambda x: torch.dot(x, x), (4,))
case("vdot", torch.vdot, (4,), (4,))
case("vdot left only", lambda x: torch.vdot(x, constant(x, 4)), (4,))
case("vdot with itself", lambda x: torch.vdot(x, x), (4,))

for shape in ((3,), (2, 3), (4, 2, 3), (1, 2, 3), (2, 4, 2, 3)):
    for other in ((3,), (3, 5), (4, 3, 2), (2, 1, 3, 2)):
        case(f"matmul {shape}, {other}", torch.matmul, shape, other)

case("einsum matrices", lambda a, b: torch.einsum("ij,kj->ki", a, b), (3, 4), (2, 4))
case("einsum batches", lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), (2, 3, 2, 4), (2, 2, 2, 4))
case("einsum outer", lambda a, b: torch.einsum("i,j->ji", a, b), (3,), (4,))
case("einsum diagonal", lambda a, b: torch.einsum("ii,ij->j", a, b), (3, 3), (3, 4))
case("einsum sum", lambda a, b: torch.einsum("...ij,jk->...k", a, b), (2, 3, 4), (4, 5))
case("tensordot", lambda a, b: torch.tensordot(a, b, dims=([1, 2], [1, 0])), (2, 3, 4), (4, 3, 5))
case("tensordot outer", lambda a, b: torch.tensordot(a, b, dims=0), (2, 3), (4,))
case("inner", torch.inner, (2, 3), (4, 3))
case("inner vectors", torch.inner, (3,), (3,))
case("vecdot", torch.linalg.vecdot, (2, 3), (2, 3))
case("kron", torch.kron, (2, 3), (3, 2))
case("multi_dot", lambda a, b: torch.linalg.multi_dot([a, b]), (2, 3), (3, 4))
case("matrix_power", lambda x: torch.linalg.matrix_power(x, 2), (3, 3))

case("cross", torch.linalg.cross, (4, 3), (4, 3))
case("cross dim", lambda a, b: torch.cross(a, b, dim=0), (3, 2), (3, 2))
case("cross broadcast", lambda a, b: torch.linalg.cross(a, b, dim=-2), (3, 1), (3, 4))
case("cross left only", lambda x: torch.linalg.cross(x, constant(x, 2, 3)), (1, 3))
case("cross right only", lambda x: torch.linalg.cross(constant(x, 2, 3), x), (2, 3))
case("cross with itself", lambda x: torch.linalg.cross(x, x), (2, 3))

case("bilinear", F.bilinear, (3, 4), (3, 2), (5, 4, 2), (5,))
case("bilinear without bias", F.bilinear, (2, 3, 4), (2, 3, 2), (5, 4, 2))
case("bilinear first input", lambda x: F.bilinear(x, constant(x, 3, 2), constant(x, 5, 4, 2)), (3, 4))
case("bilinear second input", lambda x: F.bilinear(constant(x, 3, 4), x, constant(x, 5, 4, 2)), (3, 2))
case("bilinear weight", lambda w: F.bilinear(constant(w, 3, 4), constant(w, 3, 2), w), (5, 4, 2))


def grouped(
    name: str,
    *shapes: tuple[int, ...],
    offsets: tuple[int, ...] | None = None,
    views=lambda *factors: factors,
    dtype=torch.float32,
):
    """A product by groups, of which no kernel takes float64."""
    ends = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)

    def function(*factors: Tensor) -> Tensor:
        return torch._grouped_mm(*views(*factors), offs=ends)

    case(f"grouped_mm {name}", function, *shapes, low_precision=False, dtype=dtype)


grouped("rows", (6, 8), (3, 8, 8), offsets=(2, 2, 6))
grouped("rows, transposed", (6, 8), (3, 4, 8), offsets=(2, 3, 6), views=lambda x, w: (x, w.mT))
grouped("rows, strided", (12, 8), (3, 8, 8), offsets=(1, 4, 6), views=lambda x, w: (x[::2], w[:, :, :4]))
grouped("rows, left only", (6, 8), offsets=(2, 2, 6), views=lambda x: (x, constant(x, 3, 8, 4)))
grouped("rows, right only", (3, 8, 4), offsets=(2, 2, 6), views=lambda w: (constant(w, 6, 8), w))
grouped("rows, bfloat16", (6, 8), (3, 8, 8), offsets=(2, 2, 6), dtype=torch.bfloat16)
grouped("columns", (3, 8, 8), (8, 24), offsets=(8, 16, 24))
grouped("inner", (4, 8), (8, 4), offsets=(4, 8))
grouped("batches", (3, 4, 8), (3, 8, 8))
