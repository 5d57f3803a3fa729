"""Every rule in a traced graph: the numbers of eager mode, on other values than those that were there when it was traced."""

from __future__ import annotations

import functools
import logging
from collections import Counter

import pytest
import torch
from case_runner import build, nodes_of
from cases import CASES
from oracle import Separable
from torch._subclasses.fake_tensor import fake_tensor_tls
from torch.utils._python_dispatch import TorchDispatchMode

import hesscale
from hesscale.compile import make_fx as tracing
from hesscale.compile.workarounds import vmap as mapping
from hesscale.rules import BL89, RULES

BY_SHAPE = "the shape of its output depends on values"
BY_VALUE = "a mask decides which entries are written"
BY_NAME = "one of its arguments is called `from`, which no generated Python can say"
BY_LENGTH = "PyTorch guesses the shape of its output, which depends on values"
BY_DTYPE = "PyTorch knows its output in bfloat16 only"
UNTRACEABLE = {
    "index mask": BY_SHAPE,
    "index rows by mask": BY_SHAPE,
    "masked select": BY_SHAPE,
    "masked select broadcast": BY_SHAPE,
    "repeat interleave": BY_SHAPE,
    "index put mask": BY_VALUE,
    "write mask": BY_VALUE,
    "write mask in a view": BY_VALUE,
    "write by mask into a constant": BY_VALUE,
    "random_ between": BY_NAME,
    "pack padded sequence": BY_LENGTH,
    "pack batch first": BY_LENGTH,
    **{name: BY_SHAPE for name in CASES if name.startswith("ctc ")},
    **{name: BY_DTYPE for name in CASES if name.startswith("grouped_mm") and "bfloat16" not in name},
}


@functools.cache
def chosen(times: int) -> list[str]:
    """Cases that can be traced and meet every kind of node so many times, as far as there are as many."""
    met: Counter[str] = Counter()
    names = []
    for name in CASES:
        nodes = nodes_of(name)
        if name not in UNTRACEABLE and any(met[node] < times for node in nodes):
            met.update(nodes)
            names.append(name)
    return names


@functools.cache
def representative(per_family: int) -> list[str]:
    """So many of the chosen cases for every family of rules, evenly spaced."""
    of_family: dict[str, list[str]] = {}
    for name in chosen(1):
        for family in {RULES[node].family for node in nodes_of(name) & RULES.keys()}:
            of_family.setdefault(family, []).append(name)
    picked = [members[:: max(1, len(members) // per_family)][:per_family] for members in of_family.values()]
    return list(dict.fromkeys(name for members in picked for name in members))


class LooksAtValues(AssertionError):
    """A rule asks for a number, or for a shape that depends on numbers."""


class NoLooks(TorchDispatchMode):
    """Refuses operators that return values, or shapes that depend on values, to Python. A trace has no values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_numbers = func is torch.ops.aten.index.Tensor and all(i is None or i.dtype == torch.long for i in args[1])
        if not by_numbers and {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise LooksAtValues(str(func))
        return func(*args, **(kwargs or {}))


def check_looks(name: str, method: str) -> None:
    """Run the rules of a case in eager mode as if they were traced, so that no operator may read values."""
    inputs, outputs, draws = build(name)
    loss = sum(Separable.apply(y, g, s) for y, (g, s) in zip(outputs, draws, strict=True))
    with tracing.while_tracing(), NoLooks():
        hesscale.grad(loss, inputs, method=method, outputs=outputs, head="rules", allow_unused=True)


@pytest.fixture
def constants_allowed(monkeypatch):
    """Index tensors and their like, which cases take from around them, are constants of the graph."""
    monkeypatch.setattr(tracing, "can_be_constant", lambda value, constants: True)
    monkeypatch.setattr(tracing, "is_real", lambda tensor: False)
    monkeypatch.setattr(fake_tensor_tls, "allow_non_fake_inputs_override", True)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def prepare(name: str, method: str):
    """The case as a function of its inputs and of (g, s) at its outputs, which returns gradients and diagonals; and values."""
    inputs, _, draws = build(name)
    count = len(inputs)

    def function(*given: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in given[:count]]
        with torch.enable_grad():
            outputs = CASES[name].function(*leaves)
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            outputs = [y for y in outputs if y.requires_grad]
            pairs = zip(outputs, given[count::2], given[count + 1 :: 2], strict=True)
            loss = sum(Separable.apply(y, g, s) for y, g, s in pairs)
        found = hesscale.grad(loss, leaves, method=method, outputs=outputs, head="rules", allow_unused=True)
        return [tensor for tensors in found for tensor in tensors if tensor is not None]

    return function, [*[x.detach() for x in inputs], *[draw for pair in draws for draw in pair]]


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros with the same layout."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    zeros = torch.zeros(size, dtype=tensor.dtype)
    return zeros.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@functools.cache
def traced(name: str, method: str):
    function, values = prepare(name, method)
    return tracing.trace(function, [blank(value) for value in values])


def check(name: str, method: str) -> None:
    function, values = prepare(name, method)
    results = []
    for run in (traced(name, method), function):
        torch.manual_seed(0)
        results.append(run(*values))
    assert_same(*results)


def assert_same(got, expected):
    for mine, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-11, equal_nan=True)


def check_mapped(name: str) -> None:
    """The graph under vmap: with all tensors mapped, with the operator's inputs alone, and with (g, s) alone."""
    function, values = prepare(name, "hesscale")
    graph = mapping.functional(traced(name, "hesscale"), [blank(value) for value in values])
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes):
        return
    count = len(build(name)[0])
    others = [value if i < count else value.flip(0) if value.dim() else -value for i, value in enumerate(values)]
    for dims in ([0] * len(values), [0] * count, [None] * count + [0] * (len(values) - count)):
        dims = [*dims, *[None] * (len(values) - len(dims))]
        pairs = [torch.stack(pair) if dim == 0 else pair[0] for *pair, dim in zip(values, others, dims, strict=True)]
        got = torch.func.vmap(graph, tuple(dims))(*pairs)
        for k, given in enumerate((values, [v if dim is None else o for v, o, dim in zip(values, others, dims, strict=True)])):
            assert_same([tensor[k] for tensor in got], function(*given))


def failures(checking, names):
    """What an assertion has to say about each of these cases."""
    found = {}
    for name in names:
        try:
            checking(name)
        except Exception as error:
            found[name] = error
    return found


def in_words(errors: dict[str, Exception]) -> str:
    return "\n".join(f"{name}: {type(error).__name__}: {error}" for name, error in errors.items())


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
def test_no_rule_reads_values(method):
    """For every kind of node, since a trace costs ten times as much."""
    constant = "index fill with a tensor"  # its rule counts the entries of an index, which a trace knows too
    wrong = failures(functools.partial(check_looks, method=method), [name for name in chosen(1) if name != constant])
    assert not wrong, in_words(wrong)


def check_traces(method: str, names: list[str]) -> None:
    assert names
    wrong = failures(functools.partial(check, method=method), names)
    assert not wrong, in_words(wrong)


@pytest.mark.usefixtures("constants_allowed")
@pytest.mark.parametrize(("method", "per_family"), [("hesscale", 5), ("hesscale_gn", 2)])
def test_traced_rules_give_the_numbers_of_eager_mode(method, per_family):
    check_traces(method, representative(per_family))


@pytest.mark.usefixtures("constants_allowed")
def test_traced_rules_of_bl89_give_the_numbers_of_eager_mode():
    check_traces("bl89", [name for name in chosen(1) if nodes_of(name) & BL89.keys()])


@pytest.mark.slow
@pytest.mark.usefixtures("constants_allowed")
@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
def test_every_traced_case_gives_the_numbers_of_eager_mode(method):
    check_traces(method, [name for name in CASES if name not in UNTRACEABLE] if method == "hesscale" else chosen(1))


def check_maps(names: list[str]) -> None:
    errors = failures(check_mapped, names)
    wrong = {name: error for name, error in errors.items() if not isinstance(error, RuntimeError)}
    assert not wrong, in_words(wrong)
    assert len(errors) < len(names) / 10, in_words(errors)


@pytest.mark.usefixtures("constants_allowed")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_mapped_rules_give_the_numbers_of_eager_mode():
    """Where vmap can map the operator at all."""
    check_maps(representative(5))


@pytest.mark.slow
@pytest.mark.usefixtures("constants_allowed")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_every_mapped_rule_gives_the_numbers_of_eager_mode():
    check_maps(chosen(1))


@pytest.mark.usefixtures("constants_allowed")
@pytest.mark.parametrize("name", UNTRACEABLE)
def test_rules_that_cannot_be_traced_are_refused(name):
    function, values = prepare(name, "hesscale")
    function(*values)
    with pytest.raises(tracing.CannotTrace):
        tracing.trace(function, [blank(value) for value in values])
