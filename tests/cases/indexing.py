"""Cases: indexing, gathering, scattering, writes into views."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .table import case, exactly

aten = torch.ops.aten
rows = torch.tensor([2, 0, 2])
columns = torch.tensor([3, 1, 3])
apart = torch.tensor([2, 0])
mask = torch.tensor([[True, False, True, True], [False, False, True, False], [True, True, False, False]])
places = torch.tensor([[0, 2, 1, 1], [0, 2, 0, 2]])

# picking
case("index", lambda x: x[rows], (3, 4))
case("index pairs", lambda x: x[rows, columns], (3, 4))
case("index negative", lambda x: x[:, -columns], (3, 4))
case("index mixed with slices", lambda x: x[rows[:, None], 1:, columns - 1], (3, 4, 3))
case("index mask", lambda x: x[mask], (3, 4))
case("index rows by mask", lambda x: x[mask[:, 0]], (3, 4))
case("index not contiguous", lambda x: x.t()[:, rows], (3, 4))
case("index nothing", lambda x: x[rows[:0]], (3, 4))
case("unsafe index", lambda x: aten._unsafe_index(x, [None, columns]), (3, 4))
case("unsafe masked index", lambda x: aten._unsafe_masked_index(x, mask[0, :3], [rows], 0.5), (3,))
case("index select", lambda x: x.index_select(-1, columns), (3, 4))
case("index select scalar", lambda x: x.index_select(0, torch.tensor([0])), ())
case("gather", lambda x: x.gather(0, places), (3, 4))
case("gather negative dim", lambda x: torch.gather(x, -1, places[:, :3]), (3, 4))
case("take along dim", lambda x: torch.take_along_dim(x, places, 0), (3, 4))
case("take", lambda x: x.take(torch.tensor([[0, 5], [-1, 5]])), (3, 4))
case("masked select", lambda x: x.masked_select(mask), (3, 4))
case("masked select broadcast", lambda x: x.masked_select(mask), (3, 1))
case("repeat interleave", lambda x: x.repeat_interleave(torch.tensor([2, 0, 1]), 0), (3, 4))

# choosing
case("sort", lambda x: x.sort(0, descending=True)[0], (3, 4))
case("sort stable", lambda x: x.sort(dim=-1, stable=True)[0], (3, 4))
case("sort ties", lambda x: x.sort(stable=True)[0], exactly([1.0, 0.0, 1.0, 0.0]))
case("msort", torch.msort, (3, 4))
case("topk", lambda x: x.topk(2, -1, largest=False)[0], (3, 4))
case("kthvalue", lambda x: x.kthvalue(2, 0)[0], (3, 4))
case("kthvalue keepdim", lambda x: x.kthvalue(3, -1, keepdim=True)[0], (3, 4))
case("median", torch.median, (3, 3))
case("median ties", torch.median, exactly([1.0, 2.0, 1.0, 0.0, 1.0]))
case("median dim", lambda x: x.median(-1)[0], (3, 4))
case("nanmedian", torch.nanmedian, exactly([1.0, float("nan"), 1.0, 0.0, 3.0]))
case("nanmedian dim", lambda x: x.nanmedian(0, keepdim=True)[0], exactly([[1.0, float("nan")], [2.0, 3.0], [0.0, 4.0]]))
case("mode", lambda x: x.mode(0)[0], exactly([[1.0, 2.0], [1.0, 0.0], [3.0, 2.0]]))

# overwriting
case("masked fill", lambda x: x.masked_fill(mask, 2.0), (3, 4))
case("masked fill broadcast", lambda x: x.masked_fill(mask, 2.0), (3, 1))
case("masked fill with a tensor", lambda x, y: x.masked_fill(mask, y), (3, 4), ())
case("index fill", lambda x: x.index_fill(-1, columns, 2.0), (3, 4))
case("index fill with a tensor", lambda x, y: x.index_fill(0, rows, y), (3, 4), ())
case("index copy", lambda x, y: x.index_copy(0, apart, y), (3, 4), (2, 4))
case("index copy same", lambda x: x.index_copy(0, torch.tensor([1, 0, 2]), x), (3, 4))
case("masked scatter", lambda x, y: x.masked_scatter(mask, y), (3, 4), (9,))
case("masked scatter broadcast", lambda x, y: x.masked_scatter(mask, y), (3, 1), (2, 3))
case("masked scatter same", lambda x: x.masked_scatter(mask, x), (3, 4))
case("scatter", lambda x, y: x.scatter(0, places[:1], y), (3, 4), (1, 4))
case("scatter value", lambda x: x.scatter(-1, places[:, :2], 2.0), (3, 4))
case("scatter same", lambda x: x.scatter(0, torch.tensor([[2], [0], [1]]).expand(3, 4), x), (3, 4))
case("where", lambda x, y: torch.where(mask, x, y), (3, 4), (3, 4))
case("where broadcast", lambda x, y: torch.where(mask, x, y), (4,), ())
case("where condition broadcast", lambda x, y: torch.where(mask[:1, :, None], x, y), (4, 2), (4, 1))
case("where constant", lambda x: torch.where(mask, x, 0.0), (3, 4))
case("where same", lambda x: torch.where(mask, x, x), (3, 4))
case("index put", lambda x, y: x.index_put((apart,), y), (3, 4), (2, 4))
case("index put broadcast", lambda x, y: x.index_put((apart, apart + 1), y), (3, 4), ())
case("index put mask", lambda x, y: x.index_put((mask,), y), (3, 4), (6,))
case("index put same", lambda x: x.index_put((torch.tensor([1, 0, 2]),), x), (3, 4))
case("index put inplace", lambda x, y: torch._index_put_impl_(x.clone(), (apart,), y), (3, 4), (2, 4))
case("unsafe index put", lambda x, y: aten._unsafe_index_put(x, [apart], y), (3, 4), (2, 4))
case("put", lambda x, y: x.put(torch.tensor([[0, 7], [-1, 5]]), y), (3, 4), (4,))
case("put same", lambda x: x.put(torch.tensor([3, 1, 0, 2]), x), (2, 2))

# adding up
case("index add", lambda x, y: x.index_add(-1, columns, y, alpha=3), (3, 4), (3, 3))
case("index add to a constant", lambda y: torch.ones(3, 4, dtype=y.dtype).index_add(0, rows, y), (3, 4))
case("index add same", lambda x: x.index_add(0, rows, x, alpha=3), (3, 4))
case("index add negative dim same", lambda x: x.index_add(-1, rows, x, alpha=-3), (4, 3))
case("scatter add", lambda x, y: x.scatter_add(0, places, y), (3, 4), (2, 4))
case("scatter add same", lambda x: x.scatter_add(-1, places, x), (2, 4))
case("index put accumulate", lambda x, y: x.index_put((rows,), y, accumulate=True), (3, 4), (3, 4))
case("index put accumulate same", lambda x: x.index_put((rows,), x, accumulate=True), (3, 4))
case("put accumulate", lambda x, y: x.put(torch.tensor([0, 7, 0]), y, accumulate=True), (3, 4), (3,))
case("put accumulate same", lambda x: x.put(torch.tensor([0, 0, 0, 3]), x, accumulate=True), (2, 2))
case("masked index put", lambda x, y: aten._unsafe_masked_index_put_accumulate(x, mask[0, :3], [rows], y), (3,), (3,))


# of constants
ones = torch.ones(3)
case("put a constant", lambda x: x.put(rows, ones.to(x.dtype)), (3, 4))
case("put accumulate a constant", lambda x: x.put(rows, ones.to(x.dtype), accumulate=True), (3, 4))
case("index put a constant", lambda x: x.index_put((rows,), ones[0].to(x.dtype)), (3, 4))
case("index put accumulate a constant", lambda x: x.index_put((rows,), ones[0].to(x.dtype), accumulate=True), (3, 4))
case("index add a constant", lambda x: x.index_add(0, rows, ones.to(x.dtype)), (3,))
case("index put into a constant", lambda y: torch.ones(3, 4, dtype=y.dtype).index_put((apart,), y), (2, 4))
case("scatter into a constant", lambda y: torch.ones(3, 4, dtype=y.dtype).scatter(0, places[:1], y), (1, 4))
case("scatter reduce a constant", lambda x: x.scatter_reduce(0, rows, ones.to(x.dtype), "mean"), (3,))
case("scatter reduce into a constant", lambda y: ones.to(y.dtype).scatter_reduce(0, rows, y, "mean"), (3,))

# reducing
for reduce in ("sum", "mean", "amax", "amin", "prod"):
    for include in (True, False):
        case(
            f"scatter reduce {reduce} {include}",
            lambda x, y, reduce=reduce, include=include: x.scatter_reduce(0, places, y, reduce, include_self=include),
            (3, 4),
            (2, 4),
        )
        if reduce != "sum":
            case(
                f"index reduce {reduce} {include}",
                lambda x, y, reduce=reduce, include=include: x.index_reduce(-1, columns, y, reduce, include_self=include),
                (3, 4),
                (3, 3),
            )
tied = exactly([2.0, 1.0, 2.0]), exactly([2.0, 2.0, 1.0, 3.0])
tied_places = torch.tensor([0, 2, 1, 1])
case("scatter reduce amax ties", lambda x, y: x.scatter_reduce(0, tied_places, y, "amax"), *tied)
case("scatter reduce amax ties without self", lambda x, y: x.scatter_reduce(0, tied_places, y, "amax", include_self=False), *tied)
case("index reduce amin ties", lambda x, y: x.index_reduce(0, tied_places, y, "amin"), *tied)
zeros = exactly([0.0, 1.0, 2.0]), exactly([3.0, 0.0, 2.0, 0.5])
case("scatter reduce prod zeros", lambda x, y: x.scatter_reduce(0, tied_places, y, "prod"), *zeros)

# embedding
words = torch.tensor([[2, 0, 2], [1, 3, 0]])
case("embedding", lambda w: F.embedding(words, w), (5, 3))
case("embedding padding", lambda w: F.embedding(words, w, padding_idx=-3), (5, 3))


def differentiable_twice(function, reference):
    """PyTorch differentiates this operator only once: the oracle sees the gradient of an equal function in its place."""

    def run(*inputs):
        y = function(*inputs)

        def replace(given, gradients):
            if torch.is_grad_enabled():
                equal = torch.autograd.grad(reference(*inputs), inputs, gradients[0], create_graph=True)
                return tuple(None if old is None else new for old, new in zip(given, (*equal, None), strict=False))

        y.grad_fn.register_hook(replace)
        return y

    return run


def bag_case(name, bags, mode="sum", padding=None, weighted=False, **options):
    """A bag as the sum of its words' rows times their weights."""
    flat = torch.tensor([word for bag in bags for word in bag])
    offsets = torch.tensor([0] + [len(bag) for bag in bags]).cumsum(0)
    offsets = offsets if options.get("include_last_offset") else offsets[:-1]
    counted = [[i for i, word in enumerate(bag) if word != padding] for bag in bags]

    def reference(w, p=None):
        p = torch.ones(len(flat), dtype=w.dtype) if p is None else p
        parts = []
        for bag, counted_words, weights in zip(bags, counted, p.split([len(bag) for bag in bags]), strict=True):
            entries = w[torch.tensor(bag, dtype=torch.long)[counted_words]] * weights[counted_words, None]
            empty = entries.sum(0)
            parts.append(empty if not counted_words else entries.amax(0) if mode == "max" else getattr(entries, mode)(0))
        return torch.stack(parts)

    def bag(w, p=None):
        return F.embedding_bag(flat, w, offsets, mode=mode, padding_idx=padding, per_sample_weights=p, **options)

    shapes = [(5, 3), (len(flat),)] if weighted else [(5, 3)]
    case(name, differentiable_twice(bag, reference), *shapes)


sentences = [[2, 0, 2], [], [1, 4], [2, 2, 2, 3]]
bag_case("embedding bag", sentences)
bag_case("embedding bag padding", sentences, padding=2)
bag_case("embedding bag last offset", sentences, include_last_offset=True)
bag_case("embedding bag weighted", sentences, weighted=True)
bag_case("embedding bag weighted padding", sentences, weighted=True, padding=2)
bag_case("embedding bag mean", sentences, mode="mean")
bag_case("embedding bag mean padding", [*sentences, [2, 2]], mode="mean", padding=2)
bag_case("embedding bag mean last offset", sentences, mode="mean", include_last_offset=True)
bag_case("embedding bag max", sentences, mode="max")
bag_case("embedding bag max padding", [*sentences, [2, 2]], mode="max", padding=2)


# writes into views
def write(name, function, *inputs, **options):
    """``function(y, …)`` writes into y in place."""

    def run(x, *others):
        y = x.clone()
        function(y, *others)
        return y

    case(f"write {name}", run, *inputs, **options)


def assign(*at):
    """``y[at] = z``, one view after another."""

    def function(y, z):
        for view in at[:-1]:
            y = y[view]
        y[at[-1]] = z

    return function


row, slanted = (0,), (slice(None), 1)
write("row", assign(0), (3, 4), (4,))
write("column", assign(slanted), (3, 4), (3,))
write("row from a constant tensor", lambda y: assign(0)(y, torch.ones(4)), (3, 4))
write("number", lambda y: assign(0)(y, 3.0), (3, 4))
write("entry", assign((0, 1)), (3, 4), ())
write("broadcast", assign(slice(1, None)), (3, 4), (4,))
write("scalar broadcast", assign(slice(1, None)), (3, 4), ())
write("nested views", assign(slice(1, None), slanted), (3, 4), (2,))
write("transposed", lambda y, z: assign((slice(None, None, 2), 1))(y.t(), z), (3, 4), (2,))
write("copy", lambda y, z: y[1:].copy_(z), (3, 4), (1, 4))
write("diagonal", lambda y, z: y.diagonal().copy_(z), (3, 4), (3,))
write("several", lambda y, z: (assign(0)(y, z), assign(1)(y, 2 * z)), (3, 4), (4,))
write("row from another", lambda y: assign(0)(y, y[1]), (3, 4))
write("mask", assign(mask), (3, 4), (6,))
write("columns by index", assign((slice(None), apart)), (3, 4), (3, 2))
write("mask in a view", assign(0, mask[0]), (3, 4), (3,))
write("index in a view", assign((slice(1, None), apart)), (3, 4), (2, 2))
write("index in a view from a constant", lambda y: assign((slice(1, None), apart))(y, 3.0), (3, 4))
write("zero", lambda y: y[0].zero_(), (3, 4))
write("add", lambda y, z: y[1:].add_(z, alpha=3), (3, 4), (4,))
write("add assign", lambda y, z: y[1:].__iadd__(z), (3, 4), (2, 1))
write("sub", lambda y, z: y[:, 0].sub_(z), (3, 4), (3,))
write("mul constant", lambda y: y[:, 1].mul_(2), (3, 4))
write("mul constant tensor", lambda y: y[:2, 1].mul_(torch.tensor([2.0, 3.0], dtype=y.dtype)), (3, 4))
write("mul", lambda y, z: y[:2].mul_(z), (3, 4), (2, 1))
write("mul by another row", lambda y: y[0].mul_(y[1].clone()), (3, 4))
write("div", lambda y, z: y[0].div_(z), (3, 4), exactly([2.0, -1.0, 0.5, 3.0]))
write("addcmul", lambda y, z, u: y[0].addcmul_(z, u, value=2), (3, 4), (4,), (4,))
write("lerp", lambda y, z: y[0].lerp_(z, 0.3), (3, 4), (4,))
write("pow", lambda y: y[0].pow_(3), (3, 4))
write("clamp", lambda y: y[1:].clamp_(-0.5, 0.5), (3, 4))
write("relu", lambda y: F.relu_(y[1:]), (3, 4))
write("leaky relu", lambda y: F.leaky_relu_(y[1:], 0.1), (3, 4))
write("elu", lambda y: F.elu_(y[:, 1:]), (3, 4))
write("hardtanh", lambda y: F.hardtanh_(y[1:]), (3, 4))
write("silu", lambda y: F.silu(y[1:], inplace=True), (3, 4))
write("mish", lambda y: F.mish(y[1:], inplace=True), (3, 4))
write("hardswish", lambda y: F.hardswish(y[1:], inplace=True), (3, 4))
write("rrelu", lambda y: F.rrelu(y[1:], training=True, inplace=True), (3, 4), low_precision=False)
write("sigmoid", lambda y: y[..., :2].sigmoid_(), (3, 4))
write("tanh", lambda y: y[1].tanh_(), (3, 4))
write("exp", lambda y: y[1].exp_(), (3, 4))
write("dropout", lambda y: F.dropout(y[1:], 0.5, inplace=True), (3, 4))
write("masked fill", lambda y: y[1:].masked_fill_(mask[1:], 2.0), (3, 4))
write("masked scatter", lambda y, z: y[1:].masked_scatter_(mask[1:], z), (3, 4), (3,))
write("index add", lambda y, z: y[1:].index_add_(1, columns, z, alpha=2), (3, 4), (2, 3))
write("index copy", lambda y, z: y[1:].index_copy_(1, apart, z), (3, 4), (2, 2))
write("index fill", lambda y: y[1:].index_fill_(1, apart, 2.0), (3, 4))
write("scatter", lambda y, z: y[1:].scatter_(0, torch.tensor([[1, 0]]), z), (3, 4), (1, 2))
write("scatter add", lambda y, z: y[1:].scatter_add_(0, torch.tensor([[1, 0], [1, 1]]), z), (3, 4), (2, 2))
write("put", lambda y, z: y[1:].put_(torch.tensor([1, 4]), z), (3, 4), (2,))
case("write into a constant", lambda z: assign(0)(y := torch.zeros(3, 4, dtype=z.dtype), z) or y, (4,))
case("write by mask into a constant", lambda z: assign(0, mask[0])(y := torch.zeros(3, 4, dtype=z.dtype), z) or y, (3,))
case("write in float32", lambda z: assign(0)(y := torch.zeros(3, 4), z) or y.double(), (4,))
