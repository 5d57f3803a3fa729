"""One backward pass that carries curvature: what the hooks do while PyTorch's engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..distributed.averaging import Replica
from ..distributed.fully_sharded import sharded_pass
from ..distributed.sharding import check_local, check_unsharded
from ..distributed.shards import placed_like
from ..errors import UnsupportedOperator
from ..rules import brute_force
from ..rules.registry import RuleFunction, Shares
from .arguments import output_edges
from .checkpointing import keep_recomputed_tensors
from .dispatch import check_data, diagonal_dtype
from .freed import check_not_freed
from .head_values import exact_diagonals
from .nodes import Node, edge_of
from .schedule import Graph, Instruction, TensorKey, head_in, schedule_for, walk

Result = TypeVar("Result")
SHARDED_HEAD = (
    "the Hessian diagonal at the model's outputs needs double backward for this loss (or fallback='exact' is used), which is not "
    "supported under fully_shard (FSDP2) or tensor parallelism. No .grad or .hess_diag has changed. Pass head='rules' to use the "
    "rules alone, which are not exact there, or train the model under DistributedDataParallel"
)
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class Propagation:
    """One pass through a graph: its schedule, its nodes, and the diagonals that have been computed but not yet used."""

    def __init__(
        self,
        loss: Tensor,
        *,
        method: str,
        outputs: Tensor | Sequence[Tensor] | None,
        requested: Sequence[Tensor] | None,
        head: str,
        fallback: str,
        curvature_dtype: torch.dtype | None = None,
        fills_leaves: bool = False,
    ) -> None:
        graph = walk(edge_of(loss)[0], method)
        check_local(loss)
        leaves = (graph.nodes[index].variable for index in graph.leaves.values())
        self.shards = sharded_pass(leaves) if fills_leaves else None
        if not fills_leaves:
            check_unsharded(leaves)
        if self.shards is not None:
            self.shards.wanted = None if requested is None else {id(tensor) for tensor in requested}
            requested = None
        if fills_leaves and requested is not None and is_every_leaf(requested, graph.leaves):
            requested = None
        ends = output_edges(outputs, loss, graph.nodes)
        self.requested = {} if requested is None else keys_of(requested, graph)
        self.schedule = schedule_for(
            graph,
            None if ends is None else frozenset([(graph.index_of[node], i) for node, i in ends]),
            None if requested is None else frozenset(self.requested),
            (method, head, fallback, curvature_dtype),
            is_fused=self.shards is None,
        )
        check_not_freed(graph.nodes, self.schedule.saved_attributes)
        self.kept = self.schedule.requested
        self.graph = graph
        self.nodes = graph.nodes
        self.loss = loss
        self.product_dtype = curvature_dtype
        self.uses_double_backward = head != "rules" and method != "bl89"
        if (self.shards is not None or self.schedule.is_parallel) and (
            (self.uses_double_backward and self.schedule.head.inexact) or self.schedule.uses_brute_force
        ):
            raise UnsupportedOperator(SHARDED_HEAD)
        self.replica: Replica | None = None  # the DDP module that is told which leaves are filled
        self.graph_task: int | None = None
        self.diagonals: dict[TensorKey, Tensor] = {}
        self.owned: set[TensorKey] = set()  # diagonals whose memory nothing else refers to
        self.leaves: dict[int, tuple[Tensor, Tensor | None, int]] = {}  # each with its gradient and that gradient's version
        for index in self.schedule.leaves:
            leaf = self.nodes[index].variable
            check_data(leaf)
            gradient = leaf.grad
            self.leaves[index] = leaf, gradient, 0 if gradient is None else gradient._version

    def run(self, run_backward: Callable[[], Result]) -> Result:
        """Register the hooks, run the backward pass, and remove the hooks."""
        instructions = self.schedule.instructions(self.compute_head())
        if self.schedule.uses_brute_force:
            for instruction in instructions:
                if instruction.function is brute_force.RULE.function and instruction.keeps_gradient:
                    brute_force.check_second_derivatives(self.nodes[instruction.node_index])
        is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        handles = []
        try:
            handles.append(self.nodes[0].register_prehook(self.begin))
            for instruction in instructions:
                visit = partial(self.visit, instruction)
                handles.append(
                    self.nodes[instruction.node_index].register_prehook(without_autocast(visit) if is_autocast else visit)
                )
            if self.replica is not None:
                handles += [self.nodes[index].register_prehook(self.advance) for index in self.schedule.leaves]
            with keep_recomputed_tensors:
                return run_backward()
        finally:
            for handle in handles:
                handle.remove()

    def compute_head(self) -> frozenset[TensorKey]:
        """Compute diagonals by double backward where the head's rules are not exact. Returns the keys where that was possible."""
        head = self.schedule.head
        if not self.uses_double_backward or not head.inexact:
            return frozenset()
        keys = {(self.nodes[index], i): (index, i) for index, i in head.inexact}
        found = exact_diagonals(self.loss, head_in(self.graph, head), self.graph.metas)
        self.diagonals = {keys[edge]: fit(exact.diagonal, self.schedule.targets[keys[edge]]) for edge, exact in found.items()}
        return frozenset(self.diagonals)

    def begin(self, gradients: Sequence[Tensor | None]) -> None:
        """Store the id of this pass's graph task in PyTorch's engine, by which hooks ignore other passes."""
        if self.graph_task is None:
            self.graph_task = current_graph_task()

    def advance(self, gradients: Sequence[Tensor | None]) -> None:
        """Send diagonals to the other processes if DDP has just sent the gradients of a bucket."""
        if self.replica is not None:
            self.replica.advance()

    def visit(self, instruction: Instruction, gradients: Sequence[Tensor | None]) -> None:
        """Process a node when PyTorch's engine reaches it, given the gradients at its outputs."""
        if self.graph_task != current_graph_task():  # another pass, started by a rule or by another thread
            return
        index, function, outputs, _, many, _, _, is_curved, keeps_gradient = instruction
        key = outputs[0]
        if function is None:
            if gradients[0] is not None:
                self.fill_leaf(index, self.diagonals.pop(key, None), key in self.owned)
        elif many:
            many_s = tuple([self.take(key) for key in outputs])
            many_g = tuple([upcast(g) if keeps_gradient else None for g in gradients])
            if not is_zero(many_s) or (is_curved and not is_zero(many_g)):
                self.apply_rule(instruction, many_g, many_s, False)
        else:
            s = self.take(key)
            g = upcast(gradients[0]) if keeps_gradient else None
            if s is not None or (is_curved and g is not None):
                self.apply_rule(instruction, g, s, key in self.owned)

    def take(self, key: TensorKey) -> Tensor | None:
        """The diagonal at a tensor whose consumers have all been visited. Drops it, unless the user requested it."""
        if key in self.kept:
            self.owned.discard(key)
            return self.diagonals.get(key)
        return self.diagonals.pop(key, None)

    def apply_rule(self, instruction: Instruction, g: Any, s: Any, owned: bool) -> None:
        """Add the shares of a node's inputs to their diagonals, and run the fused instructions.

        ``owned`` says that nothing else refers to the memory of s.
        """
        pending = [(instruction, g, s, owned)]
        while pending:
            instruction, g, s, owned = pending.pop()
            index, function, _, targets, _, is_contraction, is_fresh, _, _ = instruction
            assert function is not None
            if is_contraction and (self.product_dtype is not None or self.loss.is_cuda):
                shares = apply_in_dtype(function, self.nodes[index], g, s, self.product_dtype)
            else:
                shares = function(self.nodes[index], g, s)
            for target, share in zip(targets, shares if isinstance(shares, (list, tuple)) else (shares,), strict=True):
                if share is None or target is None:
                    continue
                key, shape, dtype, device, fused = target
                fitted = share
                if share.shape != shape or share.dtype != dtype or share.device != device:
                    fitted = fit(share, target)
                # A share may alias s. If it was fitted, it is a new tensor.
                is_new = fitted is not share or (is_fresh and share is not s) or (owned and len(targets) == 1)
                if fused is None:
                    self.add(key, fitted, is_new)
                elif fused.function is None:
                    self.fill_leaf(fused.node_index, fitted, is_new)
                else:
                    pending.append((fused, None, fitted, is_new))

    def add(self, key: TensorKey, share: Tensor, owned: bool) -> None:
        """Add a share to the diagonal at a tensor, in place only in memory that nothing else refers to."""
        present = self.diagonals.get(key)
        if present is None:
            self.diagonals[key] = share
            if owned:
                self.owned.add(key)
        elif key in self.owned and present.is_contiguous():
            present.add_(share)
        else:
            self.diagonals[key] = share.add_(present) if owned and share.is_contiguous() else present + share
            self.owned.add(key)

    def fill_leaf(self, index: int, diagonal: Tensor | None, owned: bool) -> None:
        """Fill a parameter's hess_diag."""
        leaf, gradient, _ = self.leaves.pop(index)
        if self.shards is not None and self.shards.takes(leaf, diagonal):
            return
        accumulate(leaf, diagonal, gradient is None, owned)
        if self.replica is not None:
            self.replica.filled(leaf)

    def fill_uncurved_leaves(self) -> None:
        """Fill in zeros at leaves that received a gradient, but no curvature."""
        for index, before in list(self.leaves.items()):
            if has_changed(*before):
                self.fill_leaf(index, None, False)


def has_changed(leaf: Tensor, gradient: Tensor | None, version: int) -> bool:
    return leaf.grad is not gradient or (gradient is not None and gradient._version != version)


def is_every_leaf(tensors: Sequence[Tensor], leaves: dict[int, int]) -> bool:
    """Whether these tensors are leaves, and every leaf of the graph is among them."""
    return leaves.keys() <= {id(tensor) for tensor in tensors} and all(tensor.is_leaf for tensor in tensors)


def keys_of(tensors: Sequence[Tensor], graph: Graph) -> dict[TensorKey, Tensor]:
    """The tensors that are in the graph, by their key."""
    keys = {}
    for tensor in tensors:
        if tensor.is_complex():
            raise UnsupportedOperator("a complex tensor has no single Hessian diagonal; pass its real and imaginary parts")
        if tensor.is_leaf and id(tensor) in graph.leaves:
            keys[graph.leaves[id(tensor)], 0] = tensor
        else:
            node, index = edge_of(tensor)
            if node in graph.index_of:
                keys[graph.index_of[node], index] = tensor
    return keys


def apply_in_dtype(function: RuleFunction, node: Node, g: Any, s: Any, dtype: torch.dtype | None) -> Shares:
    """A contraction's shares, computed in ``dtype``, or in the dtype of s. The share of a bias is s itself, without rounding."""
    if not isinstance(s, Tensor):
        return function(node, g, s)
    low = rounded(s, s.dtype if dtype is None else dtype)
    shares = function(node, g, low)
    return [s if share is low else share for share in shares] if isinstance(shares, list) else shares


def rounded(s: Tensor, dtype: torch.dtype) -> Tensor:
    """s in this dtype. On a GPU, rows of a 16-bit matrix are aligned to 16 bytes. Without that, products are far slower."""
    is_narrow = s.is_cuda and s.dim() == 2 and dtype.itemsize == 2 and type(s) is Tensor
    if not is_narrow or s.shape[1] % 8 == 0 or torch.compiler.is_compiling():
        return s.to(dtype)
    rows, columns = s.shape
    return s.new_empty(rows, columns + -columns % 8, dtype=dtype)[:, :columns].copy_(s)


def is_zero(values: Sequence[Tensor | None]) -> bool:
    return all(value is None for value in values)


def fit(share: Tensor, meta: Any) -> Tensor:
    """A share in the shape, dtype and device of its tensor, summed over dimensions along which the tensor was broadcast."""
    shape, dtype = meta.shape, diagonal_dtype(meta.dtype)
    if share.dtype != dtype or share.device != meta.device:
        share = share.to(device=meta.device, dtype=dtype)
    if share.shape[1:] == shape:  # a bias
        return share.sum(0)
    return share if share.shape == torch.Size(shape) else share.sum_to_size(shape)


def upcast(gradient: Tensor | None) -> Tensor | None:
    """A gradient in a dtype in which squares do not overflow."""
    return gradient.float() if gradient is not None and gradient.dtype == torch.float16 else gradient


def accumulate(tensor: Tensor, diagonal: Tensor | None, overwrite: bool, owned: bool = False) -> None:
    """Add to ``tensor.hess_diag``, or overwrite it if the pass does not add to an earlier gradient either."""
    diagonal = placed_like(diagonal, tensor)
    present = getattr(tensor, "hess_diag", None)
    if present is not None and not overwrite:
        if diagonal is not None:
            present.add_(diagonal)
    elif owned and diagonal is not None and diagonal.dtype == tensor.dtype and diagonal.stride() == tensor.stride():
        tensor.hess_diag = diagonal  # type: ignore[attr-defined]
    else:
        tensor.hess_diag = dense_copy(diagonal, tensor)  # type: ignore[attr-defined]


def dense_copy(diagonal: Tensor | None, like: Tensor) -> Tensor:
    """A copy with the layout of ``like``. Without it, shares could alias each other and the gradient."""
    if diagonal is None:
        return torch.zeros_like(like, requires_grad=False)
    return torch.empty_like(like, requires_grad=False).copy_(diagonal)


def without_autocast(visit: Callable[..., None]) -> Callable[..., None]:
    def visit_in_full_precision(gradients: Sequence[Tensor | None]) -> None:
        device = next((g.device.type for g in gradients if g is not None), "cpu")
        with torch.autocast(device, enabled=False):
            visit(gradients)

    return visit_in_full_precision
