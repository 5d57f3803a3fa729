"""How curvature rides along a backward pass: what is decided before it starts, and what the hooks do while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import heads
from .checkpointing import saved_tensors_stay
from .checks import output_edges
from .graph import Step, steps_of
from .nodes import Edge, Node, edge_of, leading_to, leaf_nodes, metadata, topological
from .rules.registry import Shares


class Plan:
    """Everything decided before backward starts: which rule serves which node, where the head is, what is already exact."""

    def __init__(
        self,
        loss: Tensor,
        *,
        method: str,
        outputs: Tensor | Sequence[Tensor] | None,
        wanted: Sequence[Tensor] | None,
        head: str,
        fallback: str,
        fills_leaves: bool = False,
    ) -> None:
        root = edge_of(loss)[0]
        order = topological(root)
        self.reached = frozenset(order)
        leaves = leaf_nodes(order)
        if fills_leaves and wanted is not None and is_all(leaves, wanted):
            wanted = None
        self.wanted = {(leaves[id(t)], 0) if t.is_leaf and id(t) in leaves else edge_of(t): t for t in wanted or ()}
        self.kept = frozenset(self.wanted)
        ends = output_edges(outputs, loss, order)
        self.steps = steps_of(order if wanted is None else leading_to(order, self.wanted), method=method, fallback=fallback)
        self.gauss_newton = method == "hesscale_gn"
        self.head = heads.Head.empty()
        if method != "bl89" and (head == "exact" or self.gauss_newton):
            self.head = heads.find(self.steps, ends, self.kept)
        self.loss = loss
        self.double_backward = head == "exact" and method != "bl89"
        self.task: int | None = None
        self.diagonals: dict[Edge, Tensor] = {}
        self.owned: set[Edge] = set()  # where the diagonal's memory is ours alone
        self.exact: dict[Edge, heads.Exact] = {}
        self.riders: dict[Node, Step] = {}
        self.root = root
        self.leaves = {step.node: Before.of(step.node.variable) for step in self.steps if step.rule is None}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Carry curvature through whatever backward pass runs inside the block."""
        if self.double_backward:
            self.exact = heads.exact_diagonals(self.loss, self.head)
        self.diagonals.update((edge, fit(exact.diagonal, metadata(edge))) for edge, exact in self.exact.items())
        settled = self.head.settled(self.exact, self.kept)
        self.riders = self.find_riders()
        quiet = without_autocast if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") else lambda visit: visit
        handles = []
        try:
            handles.append(self.root.register_prehook(self.begin))
            for step in self.steps:
                if step.node not in settled and step.node not in self.riders:
                    handles.append(step.node.register_prehook(quiet(self.hook(step))))
            with saved_tensors_stay():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, gradients: Sequence[Tensor | None]) -> None:
        """The pass has reached the loss: all calls that belong to it come from this graph task."""
        if self.task is None:
            self.task = torch._C._current_graph_task_id()

    def find_riders(self) -> dict[Node, Step]:
        """Nodes that need no hook: one consumer gives them all their curvature, and they need no gradient to pass it on."""
        consumers = Counter([child for step in self.steps for child, _ in step.edges])
        busy = {node for node, _ in self.kept} | {node for node, _ in self.exact}
        return {
            step.node: step
            for step in self.steps
            if consumers[step.node] < 2 and step.node not in busy and not self.waits_for_gradient(step)
        }

    def waits_for_gradient(self, step: Step) -> bool:
        node, rule, _, repeated = step
        if rule is None:
            return bool(node.variable._post_accumulate_grad_hooks)  # these may clear the gradient that says whether there was one
        return rule.many or (rule.uses_gradient(repeated) and (not self.gauss_newton or node in self.head.nodes))

    def hook(self, step: Step) -> Callable[[Sequence[Tensor | None]], None]:
        """What happens when PyTorch's engine reaches this node with the gradients at its outputs."""
        node, rule, _, repeated = step
        keeps_gradient = node in self.head.nodes or not self.gauss_newton
        if rule is None:

            def visit(gradients: Sequence[Tensor | None]) -> None:
                if gradients[0] is not None and not self.is_foreign():
                    self.arrive(node, self.diagonals.pop((node, 0), None), (node, 0) in self.owned)

        elif rule.many:
            tensors = [(node, i) for i in range(len(node._input_metadata))]

            def visit(gradients: Sequence[Tensor | None]) -> None:
                if self.is_foreign():
                    return
                s = tuple([self.take(tensor) for tensor in tensors])
                g = tuple([carried(t) if keeps_gradient else None for t in gradients])
                if not is_zero(s) or (rule.uses_gradient(repeated) and not is_zero(g)):
                    self.give(step, step.function(node, g, s), None, False)

        else:
            bends = rule.uses_gradient(repeated)

            def visit(gradients: Sequence[Tensor | None]) -> None:
                if self.is_foreign():
                    return
                s = self.take((node, 0))
                g = carried(gradients[0]) if keeps_gradient else None
                if s is not None or (bends and g is not None):
                    self.give(step, step.function(node, g, s), s, s is not None and (node, 0) in self.owned)

        return visit

    def is_foreign(self) -> bool:
        """Whether this call comes from another backward pass: one that a rule runs, or another thread's that shares a node."""
        return self.task != torch._C._current_graph_task_id()

    def take(self, edge: Edge) -> Tensor | None:
        """The diagonal at a tensor, all of whose consumers have been visited."""
        if edge in self.kept:
            self.owned.discard(edge)
            return self.diagonals.get(edge)
        return self.diagonals.pop(edge, None)

    def give(self, step: Step, shares: Shares, s: Tensor | None, owned: bool) -> None:
        """Hand each input of a node its share, and what rides along further down; ``owned``: nothing else refers to s."""
        pending = [(step, shares, s, owned)]
        while pending:
            (node, rule, edges, _), shares, s, owned = pending.pop()
            assert rule is not None
            in_head = node in self.head.nodes
            for edge, share in zip(edges, (shares,) if isinstance(shares, Tensor) or shares is None else shares, strict=True):
                if share is None or edge[0] is None or (in_head and edge in self.exact):
                    continue
                fitted = fit(share, metadata(edge))
                # a share may alias s; a product's are its own, and so is what had to be fitted
                ours = fitted is not share or (owned and len(edges) == 1) or (rule.contraction and share is not s)
                rider = self.riders.get(edge[0])
                if rider is None:
                    self.add(edge, fitted, ours)
                elif rider.rule is None:
                    self.arrive(edge[0], fitted, ours)
                else:
                    pending.append((rider, rider.function(rider.node, None, fitted), fitted, ours))

    def add(self, edge: Edge, share: Tensor, owned: bool) -> None:
        """Add a share to the diagonal at a tensor, in place only in memory that nothing else refers to."""
        present = self.diagonals.get(edge)
        if present is None:
            self.diagonals[edge] = share
            if owned:
                self.owned.add(edge)
        elif edge in self.owned and present.is_contiguous():
            present.add_(share)
        else:
            self.diagonals[edge] = present + share
            self.owned.add(edge)

    def arrive(self, leaf: Node, diagonal: Tensor | None, owned: bool) -> None:
        """Fill a parameter's hess_diag."""
        accumulate(leaf.variable, diagonal, self.leaves.pop(leaf).gradient is None, owned)

    def fill_the_flat(self) -> None:
        """Zeros for leaves that received a gradient, but no curvature."""
        for leaf, before in list(self.leaves.items()):
            if before.has_changed(leaf.variable):
                self.arrive(leaf, None, False)


def is_all(leaves: dict[int, Node], wanted: Sequence[Tensor]) -> bool:
    """Whether the wanted tensors are leaves, and every leaf of the graph is among them."""
    return all(tensor.is_leaf for tensor in wanted) and leaves.keys() <= {id(tensor) for tensor in wanted}


class Before(NamedTuple):
    """A leaf's gradient as it was before the pass."""

    gradient: Tensor | None
    version: int

    @staticmethod
    def of(leaf: Tensor) -> Before:
        return Before(leaf.grad, 0 if leaf.grad is None else leaf.grad._version)

    def has_changed(self, leaf: Tensor) -> bool:
        return leaf.grad is not self.gradient or (leaf.grad is not None and leaf.grad._version != self.version)


def is_zero(values: Sequence[Tensor | None]) -> bool:
    return all(value is None for value in values)


def fit(share: Tensor, meta: Any) -> Tensor:
    """A share in the shape, dtype and device of the tensor it belongs to: what was broadcast is summed."""
    dtype = carrier(meta.dtype)
    if share.dtype != dtype or share.device != meta.device:
        share = share.to(device=meta.device, dtype=dtype)
    shape = meta.shape
    return share if list(share.shape) == shape else share.sum_to_size(shape)


def carrier(dtype: torch.dtype) -> torch.dtype:
    """The dtype that carries curvature: float16 has no room for squares, so float32 stands in for it."""
    return torch.float32 if dtype == torch.float16 else dtype


def carried(gradient: Tensor | None) -> Tensor | None:
    return gradient.float() if gradient is not None and gradient.dtype == torch.float16 else gradient


def accumulate(tensor: Tensor, diagonal: Tensor | None, afresh: bool, owned: bool = False) -> None:
    """Add to ``tensor.hess_diag``, or start it afresh where the gradient starts afresh too."""
    present = getattr(tensor, "hess_diag", None)
    if present is not None and not afresh:
        if diagonal is not None:
            present.add_(diagonal)
    elif owned and diagonal is not None and diagonal.dtype == tensor.dtype and diagonal.stride() == tensor.stride():
        tensor.hess_diag = diagonal  # type: ignore[attr-defined]
    else:
        tensor.hess_diag = own(diagonal, tensor)  # type: ignore[attr-defined]


def own(diagonal: Tensor | None, like: Tensor) -> Tensor:
    """A dense tensor of its own with the layout of ``like``: shares may alias each other and the gradient."""
    if diagonal is None:
        return torch.zeros_like(like, requires_grad=False)
    return torch.empty_like(like, requires_grad=False).copy_(diagonal)


def without_autocast(visit: Callable[..., None]) -> Callable[..., None]:
    def quiet(gradients: Sequence[Tensor | None]) -> None:
        device = next((g.device.type for g in gradients if g is not None), "cpu")
        with torch.autocast(device, enabled=False):
            visit(gradients)

    return quiet
