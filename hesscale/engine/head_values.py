"""The values of the head: the exact diagonal of the loss at tensors where the rules are not exact, by double backward.

If H is diagonal, one Hessian-vector product H·v gives its diagonal. If different samples of a batch have no mixed second
derivatives, one product per entry of a sample is enough. It is not known beforehand which dimensions are samples, so the
candidates are tried, cheapest first. Each is verified: products with one random vector must predict the product with another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from ..errors import NeedsEagerPass
from .block_structure import MAX_PRODUCTS, Block, BlockStructure, Probes, candidate_blocks, warn
from .head_structure import Head
from .nodes import Edge, Node, edge_of, is_once_differentiable, metadata, path_to, vjp_along

MAX_ROWS, MAX_NUMBERS = 64, 2**24  # products in one batch, and numbers in their vectors
MAX_KEPT_NUMBERS = 2**16  # in vectors that are cached from pass to pass
ROUNDED_TERMS = 32  # terms as large as the gradient whose rounding errors a second derivative may contain
_has_mapped = False
CANNOT = "PyTorch cannot differentiate this loss twice; the diagonal at the outputs comes from the rules and may not be exact"


class Exact(NamedTuple):
    """A diagonal, and how many Hessian-vector products it took."""

    diagonal: Tensor
    products: int


def exact_diagonals(loss: Tensor, head: Head, metas: dict[Node, Any] | None = None) -> dict[Edge, Exact]:
    """Diagonals of the loss at the head's inexact tensors, by double backward through the head alone.

    ``metas`` caches the metadata of the nodes' outputs.
    """
    metas = {} if metas is None else metas
    found: dict[Edge, Exact] = {}
    if not head.inexact:
        return found
    stops = {node for node, _ in head.ends}
    with torch.enable_grad():
        try:
            gradients = vjp_along(head.path, {edge_of(loss): torch.ones_like(loss)}, head.inexact, metas)
            for edge, structure in head.inexact.items():
                gradient = gradients.get(edge)
                if head.has_custom_functions and (gradient is None or not gradient.requires_grad):
                    warn(f"{CANNOT} (a custom function in it returns gradients without a graph)")
                    continue
                exact = hessian_diagonal(gradient, edge, stops, structure)
                if exact is not None:
                    found[edge] = exact
        except RuntimeError as error:
            if "derivative for" not in str(error) and "once_differentiable" not in str(error):
                raise
            warn(f"{CANNOT} ({error})")
    return found


def hessian_diagonal(gradient: Tensor | None, edge: Edge, stops: set[Node], structure: BlockStructure) -> Exact | None:
    """diag ∂g/∂x at the tensor x; None if PyTorch cannot compute it, or if it takes too many products.

    Every call verifies that samples do not interact. On a CPU, the result of this check is read at once; on a GPU, by a later
    pass. In a trace, the graph itself uses it.
    """
    if gradient is None or not gradient.requires_grad:
        meta = metadata(edge)
        return Exact(torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device), 0)
    is_traced = torch.compiler.is_compiling()
    if is_traced and not may_be_traced(structure):
        return None
    if not is_traced:
        structure.read_check()
        if structure.is_left_to_rules():
            return None
    if structure.block is None and is_once_differentiable(gradient):
        structure.is_out_of_reach = True
        warn(CANNOT)
        return None
    compute: Compute = partial(compute_with_block, gradient, edge, stops, structure)
    blocks = affordable_blocks(gradient.shape, structure)
    exact = None
    if blocks and is_traced:
        exact = diagonal_in_trace(compute, blocks[0])
    elif blocks and gradient.is_cuda and structure.block is not None:
        exact = diagonal_on_gpu(compute, blocks, structure)
    elif blocks:
        exact = diagonal_by_search(compute, blocks, structure)
    if exact is None:
        structure.is_out_of_reach = True
        costly = "" if structure.max_products == MAX_PRODUCTS else ", which take longer than a backward pass"
        more = "head='rules' to silence this" if not costly else "head='exact' to allow more, head='rules' to silence this"
        warn(
            f"the exact diagonal of a loss at a tensor of shape {tuple(gradient.shape)} would take more than "
            f"{structure.max_products} Hessian-vector products{costly}; the rules' value, which may not be exact, is used there. "
            f"Pass {more}, or outputs= to say where the model ends and the loss begins"
        )
    return exact


def may_be_traced(structure: BlockStructure) -> bool:
    """Whether a trace can compute the diagonal here. It cannot if an eager pass has failed to.

    Raises:
        NeedsEagerPass: if no eager pass has found the block structure yet.
    """
    if structure.block is None and structure.is_out_of_reach:
        return False
    if structure.block is None or structure.is_out_of_reach:
        raise NeedsEagerPass("only a pass in eager mode can find the structure of the loss at the model's outputs")
    return True


def affordable_blocks(shape: Sequence[int], structure: BlockStructure) -> list[Block]:
    """The blocks to try, starting with the known one, without those that take too many products."""
    blocks = candidate_blocks(len(shape))
    blocks = blocks if structure.block is None else blocks[blocks.index(structure.block) :]
    return [block for block in blocks if math.prod(shape[d] for d in block) <= structure.max_products]


class Trial(NamedTuple):
    """The diagonal under the assumption that only entries of one block interact, and the check of that assumption."""

    exact: Exact
    passed: Tensor | None  # a boolean on the device; None if the block is the whole tensor, so that nothing is assumed
    product: Tensor | None  # H·v
    predicted: Tensor  # H·v as predicted from the diagonal's products


Compute = Callable[[Block], Trial]


def diagonal_in_trace(compute: Compute, block: Block) -> Exact:
    """In a traced graph, the host does not read the result of the check. If it fails, the diagonal is NaN."""
    exact, passed, _, _ = compute(block)
    return exact if passed is None else Exact(torch.where(passed, exact.diagonal, torch.nan), exact.products)


def diagonal_on_gpu(compute: Compute, blocks: Sequence[Block], structure: BlockStructure) -> Exact:
    """On a GPU with a known block, a later pass reads the result of the check. Waiting for it would synchronize with the GPU."""
    trial = compute(blocks[0])
    if trial.passed is not None:
        candidates = candidate_blocks(trial.exact.diagonal.dim())
        structure.check.start(trial.passed, candidates[candidates.index(blocks[0]) + 1])
    return trial.exact


def diagonal_by_search(compute: Compute, blocks: Sequence[Block], structure: BlockStructure) -> Exact | None:
    """Try one block after the other, and store the first that passes."""
    for block in blocks:
        trial = compute(block)
        if trial.passed is None or trial.passed:
            structure.is_out_of_reach = False
            if structure.block != block and is_conclusive(trial.predicted):
                structure.block = block
            return trial.exact
        assert trial.product is not None
        if not bool(trial.product.isfinite().all()):  # the check says nothing about the block
            return Exact(torch.full_like(trial.exact.diagonal, torch.nan), trial.exact.products)
    return None


def is_conclusive(predicted: Tensor) -> bool:
    """Whether a passed check says anything about the block. If all products are zero, every block passes."""
    return bool(predicted.any() & predicted.isfinite().all())


def compute_with_block(gradient: Tensor, edge: Edge, stops: set[Node], structure: BlockStructure, block: Block) -> Trial:
    """Compute the diagonal as if only the entries of a block interacted, and check that assumption."""
    layout = BlockLayout(gradient.shape, block)
    products = partial(hessian_vector_products, gradient, edge, stops)
    found = block_products(products, layout, structure.probes_like(gradient, layout.count))
    exact = Exact(layout.restore(found.diagonal).detach(), layout.count)
    if found.product is None:
        return Trial(exact, None, None, found.predicted)
    # Second derivatives are sums of terms as large as the gradient, and may be smaller than the rounding errors of these terms.
    floor = ROUNDED_TERMS * torch.finfo(gradient.dtype).eps * largest(gradient.detach().abs())
    return Trial(exact, agree(found.product, found.predicted, found.magnitude, floor), found.product, found.predicted)


class BlockLayout:
    """Reshapes a tensor to a matrix (block, samples), and back."""

    def __init__(self, shape: Sequence[int], block: Block) -> None:
        self.order = block + tuple(d for d in range(len(shape)) if d not in block)
        self.inverse = [self.order.index(d) for d in range(len(shape))]
        self.permuted_shape = [shape[d] for d in self.order]
        self.count = math.prod(shape[d] for d in block)

    def flatten(self, tensor: Tensor) -> Tensor:
        return tensor.permute(self.order).reshape(self.count, -1)

    def restore(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.permuted_shape).permute(self.inverse)

    def flatten_all(self, tensors: Tensor) -> Tensor:
        """:meth:`flatten` for each of several tensors."""
        return tensors.permute(0, *[d + 1 for d in self.order]).reshape(len(tensors), self.count, -1)

    def restore_all(self, matrices: Tensor) -> Tensor:
        return matrices.reshape(len(matrices), *self.permuted_shape).permute(0, *[d + 1 for d in self.inverse])


class BlockProducts(NamedTuple):
    """Results of products with the probes, each of shape (block, samples)."""

    diagonal: Tensor
    predicted: Tensor  # H·(second probe), if samples do not interact
    magnitude: Tensor  # the sum of the absolute terms of that prediction, which bounds its rounding error
    product: Tensor | None  # H·(second probe); None for a single sample, where there is nothing to check


def block_products(products: Callable[[Tensor], Tensor], layout: BlockLayout, probes: Probes) -> BlockProducts:
    """Products with the first probe, one per entry of the block, and one product with the second probe in the same batch."""
    z = probes.first
    at_once = max(1, min(MAX_ROWS, MAX_NUMBERS // max(1, z.numel())))
    diagonal, product = torch.empty_like(z), None
    predicted = magnitude = None
    for start in range(0, len(z), at_once):
        stop = min(start + at_once, len(z))
        is_kept = stop - start == len(z) and len(z) * z.numel() <= MAX_KEPT_NUMBERS
        rows = probes.all_rows if is_kept else probes.rows(start, stop)
        found = layout.flatten_all(products(layout.restore_all(rows)))
        if start == 0 and probes.is_checked:
            product, found = found[0], found[1:]
        diagonal[start:stop] = found[:, start:stop].diagonal(dim1=0, dim2=1).T / z[start:stop]
        terms = found * probes.ratio[start:stop]
        predicted = plus(predicted, terms.sum(0))
        magnitude = plus(magnitude, terms.abs().sum(0))
    assert predicted is not None
    assert magnitude is not None
    return BlockProducts(diagonal, predicted, magnitude, product)


def plus(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total + value


def agree(product: Tensor, predicted: Tensor, magnitude: Tensor, floor: Tensor | float = 0.0) -> Tensor:
    """Whether all entries of a product are as predicted, up to a rounding error that is at least ``floor``."""
    eps = torch.finfo(product.dtype).eps
    scale = magnitude + product.abs()
    relative = eps**0.5 if eps < 1e-4 else 4 * eps  # in half precision, the root would be too large a tolerance
    return ((predicted - product).abs() <= relative * scale + 8 * eps * largest(scale) + floor).all()


def largest(tensor: Tensor) -> Tensor | float:
    return tensor.max() if tensor.numel() else 0.0


def hessian_vector_products(gradient: Tensor, edge: Edge, stops: set[Node], rows: Tensor) -> Tensor:
    """∂(g·v)/∂x for every row v, batched where PyTorch can batch it."""
    source = edge_of(gradient)
    path, metas = path_to([edge], source[0], stops=stops), dict[Node, Any]()

    def product(row: Tensor) -> Tensor:
        found = vjp_along(path, {source: row}, [edge], metas).get(edge)
        return torch.zeros_like(row) if found is None else found

    with torch.no_grad():
        if len(rows) == 1:  # faster without vmap
            return product(rows[0]).unsqueeze(0)
        try:
            return map_rows(product, rows)
        except RuntimeError as error:
            # PyTorch cannot batch the second derivatives of norms whose input and weight differ in dtype: "expected scalar type"
            if not any(word in str(error).lower() for word in ("vmap", "batch", "scalar type")):
                raise
        return torch.stack([product(row) for row in rows])


def map_rows(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """``torch.vmap(function)(rows)``, without its handling of other arguments, which takes as long as ten small operators."""
    global _has_mapped
    if torch.compiler.is_compiling() or not _has_mapped:
        _has_mapped = True  # the first call of torch.vmap registers rules for operators
        return torch.vmap(function)(rows)
    level = functorch._vmap_increment_nesting(len(rows), "error")
    try:
        mapped = function(functorch._add_batch_dim(rows, 0, level))
        return functorch._remove_batch_dim(mapped, level, len(rows), 0)
    finally:
        functorch._vmap_decrement_nesting()
