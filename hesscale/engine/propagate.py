"""How curvature rides along a backward pass: what the hooks do while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..rules.registry import RuleFunction, Shares
from . import heads
from .arguments import output_edges
from .checkpointing import saved_tensors_stay
from .dispatch import carrier as carrier
from .dispatch import check_data
from .nodes import Node, edge_of
from .schedule import Instruction, Reading, Spot, blueprint_of, read, renamed_head

Result = TypeVar("Result")
current_task: Callable[[], int] = torch._C._current_graph_task_id


class Plan:
    """One backward pass: a blueprint with this graph's nodes, and the diagonals that are on their way."""

    def __init__(
        self,
        loss: Tensor,
        *,
        method: str,
        outputs: Tensor | Sequence[Tensor] | None,
        wanted: Sequence[Tensor] | None,
        head: str,
        fallback: str,
        curvature_dtype: torch.dtype | None = None,
        fills_leaves: bool = False,
    ) -> None:
        reading = read(edge_of(loss)[0], method)
        if fills_leaves and wanted is not None and is_all(reading.leaves, wanted):
            wanted = None
        ends = output_edges(outputs, loss, reading.nodes)
        self.wanted = {} if wanted is None else spots_of(wanted, reading)
        self.blueprint = blueprint_of(
            reading,
            None if ends is None else frozenset([(reading.places[node], i) for node, i in ends]),
            None if wanted is None else frozenset(self.wanted),
            (method, head, fallback, curvature_dtype),
        )
        self.kept = self.blueprint.kept
        self.nodes = reading.nodes
        self.loss = loss
        self.product_dtype = curvature_dtype
        self.double_backward = head == "exact" and method != "bl89"
        self.task: int | None = None
        self.diagonals: dict[Spot, Tensor] = {}
        self.owned: set[Spot] = set()  # where the diagonal's memory is ours alone
        self.leaves: dict[int, tuple[Tensor, Tensor | None, int]] = {}  # each with its gradient and that one's version
        for place in self.blueprint.leaves:
            leaf = self.nodes[place].variable
            check_data(leaf)
            gradient = leaf.grad
            self.leaves[place] = leaf, gradient, 0 if gradient is None else gradient._version

    def carry(self, run_backward: Callable[[], Result]) -> Result:
        """Carry curvature through a backward pass."""
        schedule = self.blueprint.schedule(self.find_exact())
        quiet = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        handles = []
        try:
            handles.append(self.nodes[0].register_prehook(self.begin))
            for instruction in schedule:
                visit = partial(self.visit, instruction)
                handles.append(self.nodes[instruction.place].register_prehook(without_autocast(visit) if quiet else visit))
            with saved_tensors_stay:
                return run_backward()
        finally:
            for handle in handles:
                handle.remove()

    def find_exact(self) -> frozenset[Spot]:
        """Fill in the diagonals at the head's doubtful tensors, as far as double backward gives them."""
        blueprint = self.blueprint
        if not self.double_backward or not blueprint.head.doubtful:
            return frozenset()
        spots = {(self.nodes[place], i): (place, i) for place, i in blueprint.head.doubtful}
        found = heads.exact_diagonals(self.loss, renamed_head(blueprint.head, self.nodes))
        self.diagonals = {spots[edge]: fit(exact.diagonal, blueprint.targets[spots[edge]]) for edge, exact in found.items()}
        return frozenset(self.diagonals)

    def begin(self, gradients: Sequence[Tensor | None]) -> None:
        """The pass has reached the loss: all calls that belong to it come from this graph task."""
        if self.task is None:
            self.task = current_task()

    def visit(self, instruction: Instruction, gradients: Sequence[Tensor | None]) -> None:
        """What happens when PyTorch's engine reaches this node with the gradients at its outputs."""
        if self.task != current_task():  # another pass: one that a rule runs, or another thread's that shares a node
            return
        place, function, spots, _, many, _, bends, keeps_gradient = instruction
        spot = spots[0]
        if function is None:
            if gradients[0] is not None:
                self.arrive(place, self.diagonals.pop(spot, None), spot in self.owned)
        elif many:
            many_s = tuple([self.take(spot) for spot in spots])
            many_g = tuple([carried(g) if keeps_gradient else None for g in gradients])
            if not is_zero(many_s) or (bends and not is_zero(many_g)):
                self.give(instruction, many_g, many_s, False)
        else:
            s = self.take(spot)
            g = carried(gradients[0]) if keeps_gradient else None
            if s is not None or (bends and g is not None):
                self.give(instruction, g, s, spot in self.owned)

    def take(self, spot: Spot) -> Tensor | None:
        """The diagonal at a tensor, all of whose consumers have been visited."""
        if spot in self.kept:
            self.owned.discard(spot)
            return self.diagonals.get(spot)
        return self.diagonals.pop(spot, None)

    def give(self, instruction: Instruction, g: Any, s: Any, owned: bool) -> None:
        """Hand each input of a node its share, and what rides along further down; ``owned``: nothing else refers to s."""
        pending = [(instruction, g, s, owned)]
        while pending:
            instruction, g, s, owned = pending.pop()
            place, function, _, targets, _, is_contraction, _, _ = instruction
            assert function is not None
            if is_contraction and self.product_dtype is not None:
                shares = rounded(function, self.nodes[place], g, s, self.product_dtype)
            else:
                shares = function(self.nodes[place], g, s)
            for target, share in zip(targets, shares if isinstance(shares, (list, tuple)) else (shares,), strict=True):
                if share is None or target is None:
                    continue
                spot, shape, dtype, device, rider = target
                fitted = share
                if share.shape != shape or share.dtype != dtype or share.device != device:
                    fitted = fit(share, target)
                # a share may alias s; a product's are its own, and so is what had to be fitted
                ours = fitted is not share or (is_contraction and share is not s) or (owned and len(targets) == 1)
                if rider is None:
                    self.add(spot, fitted, ours)
                elif rider.function is None:
                    self.arrive(rider.place, fitted, ours)
                else:
                    pending.append((rider, None, fitted, ours))

    def add(self, spot: Spot, share: Tensor, owned: bool) -> None:
        """Add a share to the diagonal at a tensor, in place only in memory that nothing else refers to."""
        present = self.diagonals.get(spot)
        if present is None:
            self.diagonals[spot] = share
            if owned:
                self.owned.add(spot)
        elif spot in self.owned and present.is_contiguous():
            present.add_(share)
        else:
            self.diagonals[spot] = present + share
            self.owned.add(spot)

    def arrive(self, place: int, diagonal: Tensor | None, owned: bool) -> None:
        """Fill a parameter's hess_diag."""
        leaf, gradient, _ = self.leaves.pop(place)
        accumulate(leaf, diagonal, gradient is None, owned)

    def fill_the_flat(self) -> None:
        """Zeros for leaves that received a gradient, but no curvature."""
        for place, before in list(self.leaves.items()):
            if has_changed(*before):
                self.arrive(place, None, False)


def has_changed(leaf: Tensor, gradient: Tensor | None, version: int) -> bool:
    return leaf.grad is not gradient or (gradient is not None and gradient._version != version)


def is_all(leaves: dict[int, int], wanted: Sequence[Tensor]) -> bool:
    """Whether the wanted tensors are leaves, and every leaf of the graph is among them."""
    return leaves.keys() <= {id(tensor) for tensor in wanted} and all(tensor.is_leaf for tensor in wanted)


def spots_of(tensors: Sequence[Tensor], reading: Reading) -> dict[Spot, Tensor]:
    """Where these tensors are in the graph, as far as they are."""
    spots = {}
    for tensor in tensors:
        if tensor.is_leaf and id(tensor) in reading.leaves:
            spots[reading.leaves[id(tensor)], 0] = tensor
        else:
            node, index = edge_of(tensor)
            if node in reading.places:
                spots[reading.places[node], index] = tensor
    return spots


def rounded(function: RuleFunction, node: Node, g: Any, s: Any, dtype: torch.dtype) -> Shares:
    """A product's shares, computed in the dtype of the s that it is given; a bias gets s itself."""
    if not isinstance(s, Tensor):
        return function(node, g, s)
    low = s.to(dtype)
    shares = function(node, g, low)
    return [s if share is low else share for share in shares] if isinstance(shares, list) else shares


def is_zero(values: Sequence[Tensor | None]) -> bool:
    return all(value is None for value in values)


def fit(share: Tensor, meta: Any) -> Tensor:
    """A share in the shape, dtype and device of the tensor it belongs to: what was broadcast is summed."""
    shape, dtype = meta.shape, carrier(meta.dtype)
    if share.dtype != dtype or share.device != meta.device:
        share = share.to(device=meta.device, dtype=dtype)
    if share.shape[1:] == shape:  # a bias
        return share.sum(0)
    return share if share.shape == torch.Size(shape) else share.sum_to_size(shape)


def carried(gradient: Tensor | None) -> Tensor | None:
    """A gradient to compute with: float16 has no room for squares."""
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
