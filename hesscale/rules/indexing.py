"""Indexing, gathering, scattering and masked writes: linear maps that depend on indices or masks, s_x = (J∘J)ᵀ s."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .registry import Final, Node, Share, dimension, linear, needs, saved, signed, zero_one

aten = torch.ops.aten

zero_one(
    "KthvalueBackward0",
    "MedianBackward1",
    "ModeBackward0",
    "NanmedianBackward1",
    "SortBackward0",
    "SortBackward1",
    "TopkBackward0",
    summary="selected entries: each share returns to its entry",
)
SPARSE_GRADIENT = Final("sparse_grad=True has no curvature rule. Gather without it")
zero_one("IndexSelectBackward0", fan_out=True, summary="selected entries: each share returns to its entry")
zero_one(
    "GatherBackward0",
    fan_out=True,
    refuse=lambda node: SPARSE_GRADIENT if saved(node, "sparse_grad") else None,
    summary="selected entries: each share returns to its entry",
)
zero_one("IndexFillBackward0", "ScatterBackward1", summary="the entries that were not overwritten")
zero_one("MaskedFillBackward0", broadcast=True, summary="the entries that were not overwritten")
zero_one(
    "IndexFillBackward1",
    "MaskedFillBackward1",
    "WhereBackward0",
    mixed=False,
    broadcast=True,
    summary="each entry from one of the two",
)
zero_one("IndexCopyBackward0", "ScatterBackward0", mixed=False, summary="each entry from the tensor or the source")
zero_one("MaskedScatterBackward0", mixed=False, broadcast=True, summary="each entry from the tensor or the source")
zero_one(
    "UnsafeMaskedIndexPutAccumulateBackward0",
    joint=True,
    mixed=False,
    fan_in=True,
    summary="the source's entries added where the mask is set",
)


@linear("IndexBackward0", "UnsafeIndexBackward0", fan_in=False)
def index(node: Node, s: Tensor) -> Share:
    """y = x[indices]: each selected entry gets the sum of its shares"""
    zeros = s.new_zeros(saved(node, "self_sym_sizes"))
    return aten.index_put(zeros, saved(node, "indices"), s, True)


@linear("UnsafeMaskedIndexBackward0", fan_in=False)
def masked_index(node: Node, s: Tensor) -> Share:
    """y = x[indices] where the mask is set: each selected entry gets the sum of its shares"""
    zeros = s.new_zeros(saved(node, "self_sym_sizes"))
    return aten._unsafe_masked_index_put_accumulate(zeros, saved(node, "mask"), saved(node, "indices"), s)


@linear("TakeBackward0", fan_in=False)
def take(node: Node, s: Tensor) -> Share:
    """y = x.flatten()[index]: each selected entry gets the sum of its shares"""
    return s.new_zeros(saved(node, "self").shape).put(saved(node, "index"), s, accumulate=True)


@linear("MaskedSelectBackward0", fan_in=False)
def masked_select(node: Node, s: Tensor) -> Share:
    """y = x where the mask is set: each selected entry gets its share"""
    mask = saved(node, "mask")
    shape = torch.broadcast_shapes(saved(node, "self").shape, mask.shape)
    return s.new_zeros(shape).masked_scatter(mask, s)


@linear("MedianBackward0", "NanmedianBackward0", fan_out=False)
def median(node: Node, s: Tensor) -> Share:
    """J = 1/k at the k entries equal to the median"""
    x, y = saved(node, "self"), saved(node, "result")
    ties = torch.where(y.isnan(), x.isnan(), x == y)
    return s * ties / ties.sum().square()


def add_to_itself(s: Tensor, pick: Callable[[Tensor], Tensor], alpha: float = 1) -> Tensor:
    """y = x + α x scattered: s + α² (s at the entry to which xᵢ is added), and 2α s more if that is entry i itself"""
    places = torch.arange(s.numel(), device=s.device).view(s.shape)
    return s + pick(s).reshape(s.shape) * (alpha**2 + 2 * alpha * (pick(places).reshape(s.shape) == places))


def index_add_to_itself(node: Node, g: Share, s: Tensor) -> list[Share]:
    dim, places = dimension(saved(node, "dim"), s.dim()), saved(node, "index")
    return [add_to_itself(s, lambda t: t.index_select(dim, places), saved(node, "alpha")), None]


@linear("IndexAddBackward0", mixed=False, fan_out=False, same=index_add_to_itself)
def index_add(node: Node, s: Tensor) -> list[Share]:
    """y = x + α source at index: s_x = s, s_source = α² s[index]"""
    source = node(s)[1]
    return [s, None if source is None else source * saved(node, "alpha")]


def scatter_add_to_itself(node: Node, g: Share, s: Tensor) -> list[Share]:
    dim, places = dimension(saved(node, "dim"), s.dim()), saved(node, "index")
    return [add_to_itself(s, lambda t: t.gather(dim, places)), None]


zero_one(
    "ScatterAddBackward0",
    joint=True,
    mixed=False,
    fan_in=True,
    same=scatter_add_to_itself,
    summary="entries are added at the index: each gets the share of its sum",
)


def broadcast_values(node: Node) -> str | None:
    """Refuse values that are broadcast with accumulate=True. An entry of them may be added to one entry of y several times."""
    if not (saved(node, "accumulate") and needs(node, 1)):
        return None
    y, (source, number) = node._input_metadata[0], node.next_functions[1]
    picked = aten.index(torch.zeros((), device=y.device).expand(tuple(y.shape)), saved(node, "indices"))
    if math.prod(source._input_metadata[number].shape) == picked.numel():
        return None
    return "accumulate=True with values that are broadcast has no curvature rule. Expand them to the shape of x[indices] first"


def put_into_itself(node: Node, g: Share, s: Tensor) -> list[Share]:
    places = saved(node, "indices")
    if saved(node, "accumulate"):
        return [add_to_itself(s, lambda t: aten.index(t, places)), None]
    kept, given = index_put(node, s)
    assert given is not None
    return [kept + given.sum_to_size(s.shape), None]


@linear(
    "IndexPutBackward0",
    "IndexPutImplBackward0",
    "UnsafeIndexPutBackward0",
    mixed=False,
    same=put_into_itself,
    refuse=broadcast_values,
)
def index_put(node: Node, s: Tensor) -> tuple[Tensor, Share]:
    """y[indices] = values, or += them: s_values = s[indices], s_x = s, without the overwritten entries"""
    places = saved(node, "indices")
    kept = s if saved(node, "accumulate") else aten.index_put(s, places, s.new_zeros(()))
    return kept, aten.index(s, places) if needs(node, 1) else None


def put_into_itself_flat(node: Node, g: Share, s: Tensor) -> list[Share]:
    if saved(node, "accumulate"):
        return [add_to_itself(s, lambda t: t.take(saved(node, "index"))), None]
    kept, given = put(node, s)
    assert given is not None
    return [kept + given, None]


@linear("PutBackward0", mixed=False, fan_out=False, same=put_into_itself_flat)
def put(node: Node, s: Tensor) -> tuple[Tensor, Share]:
    """y.flatten()[index] = source, or += it: s_source = s.flatten()[index], s_x = s, without the overwritten entries"""
    places = saved(node, "index")
    kept = s if saved(node, "accumulate") else s.put(places, s.new_zeros(places.shape))
    return kept, s.take(places).view(saved(node, "source").shape) if needs(node, 1) else None


@linear("ScatterReduceBackward0", fan_out=False, curved=True)  # mixed second derivatives, if it is a product of entries
def scatter_reduce(node: Node, s: Tensor) -> list[Share]:
    """every entry reaches one of y, with J = node(1) (1/count, a share in a tie, the product of the others): J² s there"""
    dim, places = dimension(saved(node, "dim"), s.dim()), saved(node, "index")
    return squared(node, s, s.gather(dim, places))


@linear("IndexReduceBackward0", fan_out=False, curved=True)
def index_reduce(node: Node, s: Tensor) -> list[Share]:
    """every entry reaches one of y, with J = node(1) (1/count, a share in a tie, the product of the others): J² s there"""
    dim, places = dimension(saved(node, "dim"), s.dim()), saved(node, "index")
    return squared(node, s, s.index_select(dim, places))


def squared(node: Node, *curvatures: Tensor) -> list[Share]:
    """J² s for each input. ``curvatures`` is s at the one output entry that each entry of the input reaches."""
    jacobians = node(torch.ones_like(curvatures[0], dtype=node._input_metadata[0].dtype))
    return [None if j is None else s * j.to(s.dtype).square() for j, s in zip(jacobians, curvatures, strict=True)]


def dense_gradients(node: Node) -> str | None:
    if saved(node, "sparse"):
        return Final("sparse=True makes sparse gradients, for which there is no curvature rule. Pass sparse=False")
    if saved(node, "scale_grad_by_freq"):
        return Final("scale_grad_by_freq=True makes gradients that are not those of the loss. Pass scale_grad_by_freq=False")
    return None


def in_full(node: Node, s: Tensor) -> Tensor:
    """s in the dtype of y or a wider one. Long sums would lose digits in a narrow dtype, and there is no product to speed up."""
    return s.to(torch.promote_types(s.dtype, node._input_metadata[0].dtype))


@linear("EmbeddingBackward0", contraction=True, joint=False, fan_in=False, refuse=dense_gradients)
def embedding(node: Node, s: Tensor) -> Share:
    """y = w[indices]: each row gets the sum of its shares, and the padding row gets none"""
    return node(in_full(node, s))


@linear("EmbeddingBagBackward0", contraction=True, refuse=dense_gradients)
def embedding_bag(node: Node, s: Tensor) -> list[Share]:
    """y_b = Σᵢ pᵢ w[iᵢ]: s_w = Σ_b (Σᵢ pᵢ)² s_b with the sum over equal indices of a bag, s_p = Σ_d s_bd w_d²

    The mean has pᵢ = 1/count. The maximum selects one entry per column.
    """
    s, words, bags = in_full(node, s), saved(node, "indices").long(), len(s)
    offsets, number = saved(node, "offsets"), torch.arange(len(words), device=s.device)
    bag = (torch.searchsorted(offsets, number.to(offsets.dtype), right=True) - 1).clamp_max(bags - 1)
    padding = signed(saved(node, "padding_idx"))  # −1 if there is none
    counts = words != padding
    size = s.new_zeros(bags).index_add(0, bag, counts.to(s.dtype))
    rows = s.new_zeros(saved(node, "weight_sym_argsize_0"), s.shape[1])
    if saved(node, "mode") == 2:
        largest = saved(node, "result3").long().clamp_min(0)
        return [rows.scatter_add(0, largest, torch.where(size[:, None] > 0, s, 0)), None]
    weights = saved(node, "per_sample_weights")
    p = counts.to(s.dtype) if weights is None else counts * weights.to(s.dtype)
    if saved(node, "mode") == 1:
        p = p / size.clamp_min(1)[bag]
    s = s[bag]
    share = rows.index_add(0, words, s * times_sum_of_key(bag * len(rows) + words, p)[:, None]) if needs(node, 0) else None
    if not needs(node, 1):
        return [share, None]
    return [share, (s * saved(node, "weight").square()[words]).sum(1) * counts]


def times_sum_of_key(keys: Tensor, values: Tensor) -> Tensor:
    """Each value times the sum of all values with the same key. The sum of these products over a key is that sum squared."""
    order = keys.argsort()
    ordered = keys[order]
    group = torch.zeros_like(keys)
    group[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    group = torch.empty_like(keys).index_copy(0, order, group)
    return values * torch.zeros_like(values).index_add(0, group, values)[group]
