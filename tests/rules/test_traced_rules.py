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

import hesscale
from hesscale.compile import make_fx as tracing
from hesscale.compile.workarounds import vmap as mapping
from hesscale.rules import BL89

BY_SHAPE = "the shape of its output depends on values"
BY_VALUE = "a mask decides which entries are written"
BY_NAME = "one of its arguments is called `from`, which no generated Python can say"
BY_LENGTH = "PyTorch guesses the shape of its output, which depends on values"
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


@pytest.fixture
def constants_allowed(monkeypatch):
    """Index tensors and their like, which cases take from around them, are constants of the graph."""
    monkeypatch.setattr(tracing, "is_number", lambda constant: True)
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


def check(name: str, method: str) -> None:
    function, values = prepare(name, method)
    graph = tracing.trace(function, [blank(value) for value in values])
    results = []
    for run in (graph, function):
        torch.manual_seed(0)
        results.append(run(*values))
    assert_same(*results)


def assert_same(got, expected):
    for mine, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-11, equal_nan=True)


def check_mapped(name: str) -> None:
    """The graph under vmap: with all tensors mapped, with the operator's inputs alone, and with (g, s) alone."""
    function, values = prepare(name, "hesscale")
    blanks = [blank(value) for value in values]
    graph = mapping.functional(tracing.trace(function, blanks), blanks)
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


@pytest.mark.usefixtures("constants_allowed")
@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
def test_traced_rules_give_the_numbers_of_eager_mode(method):
    names = chosen(2 if method == "hesscale" else 1)
    if method == "bl89":
        names = [name for name in names if nodes_of(name) & BL89.keys()]
    assert names
    wrong = failures(functools.partial(check, method=method), names)
    assert not wrong, in_words(wrong)


@pytest.mark.usefixtures("constants_allowed")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_mapped_rules_give_the_numbers_of_eager_mode():
    """Where vmap can map the operator at all."""
    errors = failures(check_mapped, chosen(1))
    wrong = {name: error for name, error in errors.items() if not isinstance(error, RuntimeError)}
    assert not wrong, in_words(wrong)
    assert len(errors) < len(chosen(1)) / 10, in_words(errors)


@pytest.mark.slow
@pytest.mark.usefixtures("constants_allowed")
def test_every_traced_case_gives_the_numbers_of_eager_mode():
    wrong = failures(functools.partial(check, method="hesscale"), [name for name in CASES if name not in UNTRACEABLE])
    assert not wrong, in_words(wrong)


@pytest.mark.usefixtures("constants_allowed")
@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_cannot_be_traced_is_refused(name):
    function, values = prepare(name, "hesscale")
    function(*values)
    with pytest.raises(tracing.CannotTrace):
        tracing.trace(function, [blank(value) for value in values])
