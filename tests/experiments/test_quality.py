"""Approximation quality: every method against the library, one network at a time; the same numbers however the work is cut."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hesscale.estimators import estimate
from hesscale.experiments.figures import _quality_figures as figures
from hesscale.experiments.figures import _quality_methods as methods
from hesscale.experiments.figures import quality
from hesscale.experiments.lab.data import Dataset
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.series_layout import check
from hesscale.experiments.lab.store import Store

SIZES = [7, 5, 4, 6, 3]
NETWORKS = 3
SMALL = quality.Task("digits", 0, 4, examples=6, step_size=0.05, standardize=True, quirks="", seed=1)


def generators(purpose=0):
    return quality.generators(dataclasses.replace(SMALL, count=NETWORKS), purpose)


@pytest.fixture
def at():
    """Networks with weights that are large enough for curvature."""
    layers = [(2 * weight, 2 * bias) for weight, bias in methods.initial(SIZES, generators())]
    inputs = torch.randn(NETWORKS, 1, SIZES[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return methods.propagate(layers, inputs, torch.tensor([2, 0, 1]))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A data set of 4 × 4 random images in three classes, and networks to match."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 17, (40, 4, 4), generator=random, dtype=torch.uint8)
    labels = torch.randint(0, 3, (40,), generator=random)
    tiny = Dataset("digits", images[:30], labels[:30], images[30:], labels[30:], classes=3, title="tiny", scale=16)
    monkeypatch.setattr(quality, "load", lambda name, root: tiny)
    monkeypatch.setattr(quality, "HIDDEN", (5, 4, 6))
    return tiny


def module(layers, k):
    """Network k as a module, and its parameters."""
    parts = []
    for weight, bias in layers:
        linear = nn.Linear(weight.shape[2], weight.shape[1]).double()
        linear.weight.data, linear.bias.data = weight[k].clone(), bias[k, 0].clone()
        parts += [linear, nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def of_library(at, k, method, **options):
    """A diagonal by the library, as (weight, bias) for each layer."""
    net = module(at.layers, k)
    loss = F.cross_entropy(net(at.h[0][k]), at.labels[k : k + 1])
    found = estimate(method, loss, list(net.parameters()), **options)
    return list(zip(found[::2], found[1::2], strict=True))


def expanded(at, k, rows, row=0):
    """Diagonals t_i h_j² and t_i of network k."""
    return [(t[k, row, :, None] * h[k].square(), t[k, row]) for t, h in zip(rows, at.h, strict=True)]


def assert_same(found, expected, **tolerance):
    for mine, theirs in zip(found, expected, strict=True):
        for part, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(part.reshape(other.shape), other, **tolerance)


def all_structured(at, quirks=""):
    counts = torch.tensor([[1, 0, 0], [10, 15, 25]]).expand(NETWORKS, 2, 3)
    return methods.structured(at, methods.bl89(at, quirks), counts)


@pytest.mark.parametrize("k", range(NETWORKS))
def test_the_exact_diagonal(at, k):
    assert_same(expanded(at, k, methods.exact(at)), of_library(at, k, "exact"))


@pytest.mark.parametrize("k", range(NETWORKS))
@pytest.mark.parametrize(
    ("method", "theirs"),
    [
        ("HesScale", "hesscale"),
        ("HesScaleGN", "hesscale_gn"),
        ("BL89", "bl89"),
        ("diag(G)", "ggn"),
        ("g²", "squared_gradient"),
    ],
)
def test_deterministic_methods(at, k, method, theirs):
    found = expanded(at, k, all_structured(at), methods.STRUCTURED.index(method))
    assert_same(found, of_library(at, k, theirs))


def test_the_last_is_zero(at):
    assert all((rows[:, methods.STRUCTURED.index("|diag(H)|")] == 0).all() for rows in all_structured(at))


@pytest.mark.parametrize(("method", "counts"), [("GGN-MC1", [1, 0, 0]), ("GGN-MC50", [10, 15, 25])])
def test_ggn_by_drawn_labels(at, method, counts):
    """The mean of squared gradients, had the labels been those drawn."""
    found = expanded(at, 1, all_structured(at), methods.STRUCTURED.index(method))
    drawn = [of_library(dataclasses.replace(at, labels=torch.full((NETWORKS,), c)), 1, "squared_gradient") for c in range(3)]
    weights = [count / sum(counts) for count in counts]
    expected = [
        tuple(sum(w * label[l][part] for w, label in zip(weights, drawn, strict=True)) for part in (0, 1)) for l in range(4)
    ]
    assert_same(found, expected)


def test_labels_come_from_the_prediction(at):
    random = generators()
    draws = torch.stack([methods.draw_labels(at, random) for _ in range(400)]).double()
    assert (draws.sum(-1) == torch.tensor([1.0, methods.DRAWS])).all()
    share = draws.mean(0) / torch.tensor([[1.0], [methods.DRAWS]])
    deviation = (at.q * (1 - at.q) / 400).sqrt()
    assert ((share[:, :1] - at.q).abs() < 5 * deviation).all()
    assert ((share[:, 1:] - at.q).abs() < 5 * deviation / methods.DRAWS**0.5).all()


def hessian(at, k):
    """Dense, in the order of the parameters."""
    net = module(at.layers, k)
    parameters = list(net.parameters())
    loss = F.cross_entropy(net(at.h[0][k]), at.labels[k : k + 1])
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in gradient]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def flat(layers, k=0):
    return torch.cat([part[k].flatten() for layer in layers for part in layer])


def signs_of(z, k, draw):
    return torch.cat([part.flatten() for v, b in z for part in (v[k, :, draw], b[k, draw])])


def test_hutchinson_is_the_mean_of_products_with_the_hessian(at):
    z = methods.draw_signs(at.layers, 4, generators())
    found = methods.products(at, z)
    for k in range(NETWORKS):
        H = hessian(at, k)
        drawn = [signs_of(z, k, draw) for draw in range(4)]
        torch.testing.assert_close(flat(found.hutchinson(slice(0, 1)), k), drawn[0] * (H @ drawn[0]))
        mean = sum(signs * (H @ signs) for signs in drawn[1:]) / 3
        torch.testing.assert_close(flat(found.hutchinson(slice(1, None)), k), mean)
        torch.testing.assert_close(flat(found.absolute(2), k), (H @ drawn[2]).abs())


def test_hutchinson_in_expectation(at):
    one = at.of(0)
    found = methods.products(one, methods.draw_signs(one.layers, 20_000, generators()[:1])).hutchinson(slice(None))
    H = hessian(at, 0)
    deviation = (H.square().sum(1) - H.diagonal().square()).sqrt() / 20_000**0.5
    assert ((flat(found) - H.diagonal()).abs() < 5 * deviation + 1e-12).all()


def test_signs_are_fair_and_independent(at):
    z = methods.draw_signs(at.layers, 2000, generators())
    parts = torch.stack([torch.stack([signs_of(z, k, draw) for draw in range(2000)]) for k in range(NETWORKS)])
    assert (parts.abs() == 1).all()
    rows = torch.cat([*parts.mT, torch.ones(1, 2000)])  # of all parameters of all networks, and of a constant
    correlation = rows @ rows.T / 2000 - torch.eye(len(rows))
    assert correlation.abs().max() < 6 / 2000**0.5


def test_adahessian_uses_one_draw_and_others(at, monkeypatch):
    drawn = []
    monkeypatch.setattr(methods, "draw_signs", lambda *given, draw=methods.draw_signs: drawn.append(draw(*given)) or drawn[-1])
    one, many = methods.adahessian(at, generators())
    H = hessian(at, 0)
    z = [signs_of(drawn[0], 0, draw) for draw in range(1 + methods.DRAWS)]
    torch.testing.assert_close(flat(one), z[0] * (H @ z[0]))
    torch.testing.assert_close(flat(many), sum(signs * (H @ signs) for signs in z[1:]) / methods.DRAWS)


def test_quirks_of_adahessian(at, monkeypatch):
    drawn = []
    monkeypatch.setattr(methods, "draw_signs", lambda *given, draw=methods.draw_signs: drawn.append(draw(*given)) or drawn[-1])
    one, many = methods.adahessian(at, generators(), "authors")
    H = hessian(at, 0)
    torch.testing.assert_close(flat(one), (H @ signs_of(drawn[0], 0, 0)).abs())
    torch.testing.assert_close(flat(many), (H @ signs_of(drawn[0], 0, 1)).abs() / methods.DRAWS)


def test_quirks_of_bl89(at):
    """Zero in the last layer; below, only the curvature of activations."""
    found = methods.bl89(at, "authors")
    assert (found[-1] == 0).all()
    torch.testing.assert_close(found[-2], at.bend[-1])
    assert not torch.equal(found[-2], methods.bl89(at)[-2])


def test_distances(at):
    truth, found = methods.exact(at), all_structured(at)
    distances = methods.distances(at, found, truth)
    for k, row in [(0, 0), (2, 4)]:
        pairs = zip(expanded(at, k, found, row), expanded(at, k, truth), strict=True)
        expected = [sum((mine - true).abs().sum() for mine, true in zip(*pair, strict=True)) for pair in pairs]
        torch.testing.assert_close(distances[k, :, row], torch.stack(expected))
    each = [expanded(at, k, found) for k in range(NETWORKS)]
    full = [(torch.stack([e[l][0] for e in each]), torch.stack([e[l][1][None] for e in each])) for l in range(4)]
    torch.testing.assert_close(methods.distance(at, full, truth), distances[:, :, 0])


def test_a_step_is_pytorchs(at):
    after = methods.descend(at, 0.1)
    net = module(at.layers, 1)
    loss = F.cross_entropy(net(at.h[0][1]), at.labels[1:2])
    loss.backward()
    torch.testing.assert_close(methods.loss(at)[1], loss.detach())
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    torch.testing.assert_close(flat(after, 1), torch.cat([p.detach().flatten() for p in net.parameters()]))


def test_begins_as_linear_does():
    (weight, bias), _ = methods.initial([400, 300, 2], generators())
    linear = nn.Linear(400, 300)
    assert weight.shape == (NETWORKS, 300, 400)
    assert weight.abs().max() == pytest.approx(linear.weight.abs().max().item(), rel=1e-3)
    assert weight.std() == pytest.approx(linear.weight.std().item(), rel=0.01)
    assert bias.abs().max() == pytest.approx(0.05, rel=0.02)
    assert not torch.equal(weight[0], weight[1])


class Recorder:
    """A run that stores its checkpoints, and stops after a number of steps."""

    def __init__(self, state=None, breaks_after=math.inf):
        self.state, self.breaks_after, self.saved, self.logged = state, breaks_after, None, {}

    def log(self, step, **values):
        if step > self.breaks_after:
            raise KeyboardInterrupt
        self.logged[step] = values

    def progress(self, done, total):
        assert done <= total == SMALL.examples

    def checkpoint(self, state):
        self.saved = state


@pytest.mark.parametrize("quirks", ["", "authors"])
def test_networks_are_the_same_in_any_block(quirks):
    whole = quality.run(dataclasses.replace(SMALL, quirks=quirks), Recorder(), None)
    halves = [quality.run(dataclasses.replace(SMALL, quirks=quirks, first=f, count=2), Recorder(), None) for f in (0, 2)]
    for name in ("errors", "to_ggn"):
        torch.testing.assert_close(torch.cat([half[name] for half in halves]), whole[name], rtol=1e-10, atol=1e-14)
    assert not torch.equal(whole["errors"][0], whole["errors"][1])


@pytest.mark.parametrize("quirks", ["", "authors"])
def test_resumed_is_uninterrupted(tmp_path, monkeypatch, quirks):
    monkeypatch.setattr(quality, "CHECKPOINT_SECONDS", 0.0)
    task = as_task(dataclasses.replace(SMALL, quirks=quirks))
    straight, broken = Store(tmp_path / "straight"), Store(tmp_path / "broken")
    quality.EXPERIMENT.do(straight, task, None)
    with monkeypatch.context() as patch:
        steps = iter(range(4))
        patch.setattr(quality, "advance", lambda *given, advance=quality.advance: (next(steps), advance(*given))[1])
        with pytest.raises(StopIteration):
            quality.EXPERIMENT.do(broken, task, None)
    done = []
    monkeypatch.setattr(quality, "advance", lambda *given, advance=quality.advance: done.append(1) or advance(*given))
    quality.EXPERIMENT.do(broken, task, None)
    assert len(done) == SMALL.examples - 4
    one, other = (quality.EXPERIMENT.results(store, [task])[0] for store in (straight, broken))
    assert one.metrics == other.metrics
    assert all(torch.equal(one.values[name], other.values[name]) for name in ("errors", "to_ggn"))


def l1(one, other):
    """Distances of diagonals, by layer."""
    return torch.stack([(a - b).abs().sum() for a, b in zip(one, other, strict=True)]).view(-1, 2).sum(1)


@pytest.mark.parametrize("standardize", [True, False])
def test_errors_are_those_of_training_with_the_library(tiny, standardize):
    """A run, followed with modules, estimators and SGD."""
    task = dataclasses.replace(SMALL, first=2, count=1, standardize=standardize)
    run = Recorder()
    values = quality.run(task, run, None)
    inputs = tiny.inputs("train").double()
    if standardize:
        inputs = (inputs - inputs.mean()) / inputs.std(correction=0)
    order = quality.generators(task, quality.ORDER)[0].permutation(len(inputs))[: task.examples]
    net = module(methods.initial([16, 5, 4, 6, 3], quality.generators(task, quality.INITIAL)), 0)
    parameters, optimizer = list(net.parameters()), torch.optim.SGD(net.parameters(), lr=task.step_size)
    known = {"HesScale": "hesscale", "HesScaleGN": "hesscale_gn", "BL89": "bl89", "diag(G)": "ggn", "g²": "squared_gradient"}
    errors, to_ggn = (torch.zeros(4, count, dtype=torch.float64) for count in (6, 2))
    for step, index in enumerate(order.tolist()):
        loss = F.cross_entropy(net(inputs[index : index + 1]), tiny.labels("train")[index : index + 1])
        assert run.logged[step + 1]["loss"] == pytest.approx(loss.item(), rel=1e-6)
        truth = estimate("exact", loss, parameters, retain_graph=True)
        found = {name: estimate(method, loss, parameters, retain_graph=True) for name, method in known.items()}
        zero = [torch.zeros_like(p) for p in parameters]
        errors += torch.stack([l1(diagonal, truth) for diagonal in [*found.values(), zero]], 1)
        to_ggn += torch.stack([l1(diagonal, found["diag(G)"]) for diagonal in (found["HesScaleGN"], zero)], 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    places = [methods.METHODS.index(name) for name in [*known, "|diag(H)|"]]
    torch.testing.assert_close(values["errors"][0, :, places], errors / task.examples, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(values["to_ggn"][0, :, [0, -1]], to_ggn / task.examples, rtol=1e-6, atol=1e-12)


def test_each_step_and_network_has_new_random_draws(monkeypatch):
    seen = []
    draw = methods.draw_labels
    monkeypatch.setattr(methods, "draw_labels", lambda at, random: seen.extend(map(state_of, random)) or draw(at, random))
    quality.run(SMALL, Recorder(), None)
    assert len(seen) == len({*seen}) == SMALL.count * SMALL.examples


def state_of(random):
    return tuple(random.bit_generator.state["state"]["state"].tolist())


def test_authors_bl89_belongs_to_another_network():
    """A network with other weights that is trained on the same examples."""
    task = dataclasses.replace(SMALL, quirks="authors")
    ours, theirs = (quality.run(given, Recorder(), None)["errors"] for given in (SMALL, task))
    changed = [i for i, name in enumerate(methods.METHODS) if not torch.equal(ours[:, :, i], theirs[:, :, i])]
    assert [methods.METHODS[i] for i in changed] == ["BL89", *methods.HUTCHINSON]
    inputs, labels, sizes = quality.examples_of(task, quality.load("digits", None))
    mine, other = (methods.initial(sizes, quality.generators(task, purpose)) for purpose in (quality.INITIAL, quality.ANOTHER))
    assert not torch.equal(mine[0][0], other[0][0])
    expected = torch.zeros(task.count, 4, 1, dtype=torch.float64)
    for step in range(task.examples):
        at, another = (methods.propagate(layers, inputs[:, step : step + 1], labels[:, step]) for layers in (mine, other))
        expected += methods.distances(at, methods.bl89(another, "authors"), methods.exact(at))
        mine, other = methods.descend(at, task.step_size), methods.descend(another, task.step_size)
    torch.testing.assert_close(theirs[:, :, [methods.METHODS.index("BL89")]], expected / task.examples)


def test_tasks_cover_the_networks():
    asked = quality.tasks(quality.Settings(seeds=12))
    assert [(task.first, task.count) for task in asked] == [(0, 5), (5, 5), (10, 2)]
    assert "12 networks" in quality.work(quality.Settings(seeds=12))


@pytest.mark.parametrize(
    "wrong",
    [
        {"seeds": 0},
        {"examples": 0},
        {"dataset": "letters"},
        {"step_size": 0.0},
        {"step_size": math.inf},
        {"step_size": math.nan},
        {"quirks": "mine"},
        {"seed": -1},
    ],
)
def test_bad_settings_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        quality.tasks(quality.Settings(**wrong))


def test_too_few_examples_are_refused():
    with pytest.raises(ValueError, match="tiny has 30 training examples"):
        quality.run(dataclasses.replace(SMALL, examples=31), Recorder(), None)


def test_divergence_is_an_error():
    with pytest.raises(ValueError, match="diverged at example 2 with step size 1e\\+308"):
        quality.run(dataclasses.replace(SMALL, step_size=1e308), Recorder(), None)


@dataclasses.dataclass
class Done:
    task: quality.Task
    values: dict


def made_up(task, best=1.0):
    """Errors of (network + 1) × (layer + 1) × a factor of the method."""
    factors = torch.full((len(methods.METHODS),), 5.0, dtype=torch.float64)
    factors[methods.METHODS.index("HesScale")] = best
    factors[[methods.METHODS.index(name) for name in methods.HUTCHINSON]] = torch.tensor([100.0, 50.0], dtype=torch.float64)
    numbers = torch.arange(task.first, task.first + task.count, dtype=torch.float64) + 1
    errors = numbers[:, None, None] * torch.arange(1, 5, dtype=torch.float64)[:, None] * factors
    errors[:, 3, :2] = torch.tensor([0, 1e-16])  # one as it rounds
    to_ggn = numbers[:, None, None] * torch.tensor([0.2, 0.8, 0.1, 2.0], dtype=torch.float64).expand(4, 4)
    return Done(task, {"errors": errors, "to_ggn": to_ggn, "sizes": [16, 5, 4, 6, 3]})


def items(section):
    return {item.name.removeprefix("digits-"): item for item in section.items}


def test_sections_join_blocks():
    (section,) = figures.sections([made_up(dataclasses.replace(SMALL, first=2)), made_up(dataclasses.replace(SMALL, count=2))])
    assert "6 tanh networks 16-5-4-6-3" in section.text
    found = items(section)
    for item in found.values():
        check(item)
    bars, dots = found["relative"].series[2:4]
    assert (bars.label, bars.kind, dots.kind, len(dots.y)) == ("BL89", "bars", "dots", 6)
    assert dots.y == pytest.approx([50 / 6] * 6)
    assert dots.y[0] == pytest.approx(bars.y[0])
    by_layer = {series.label: series for series in found["layers"].series}
    assert by_layer["BL89"].y == pytest.approx([17.5, 35, 52.5, 70])
    assert by_layer["HesScale"].y == pytest.approx([3.5, 7, 10.5, 0])
    assert found["ggn"].series[0].y == pytest.approx([0.1])
    assert [row[4] for row in found["errors-by-layer"].rows[:3]] == ["0 ± 0", "70 ± 15", "0 ± 0"]
    assert ("BL89", "175 ± 38", "8.33 ± 0", "1 ± 0") in found["errors"].rows


def test_overlapping_blocks_count_once():
    (section,) = figures.sections([made_up(SMALL), made_up(dataclasses.replace(SMALL, first=2, count=3))])
    assert section.text.startswith("5 tanh networks")


def test_findings_have_the_numbers_of_the_tables():
    """BL89 and others have 5 times the error of HesScale, whose error is a fifth of the norm; in the last layer, it is zero."""
    (section,) = figures.sections([made_up(SMALL)])
    first, draws, bl89, last = [finding.text for finding in section.findings]
    assert first.startswith("On digits, HesScale has the smallest error of all methods in 4 of 4 networks: 12 % of the norm")
    assert draws == "With one draw, AdaHessian has 167 times the error of HesScale. With 50 draws, it has 83.3 times the error."
    assert bl89 == "BL89, whose diagonal at the outputs is not exact, has 8.33 times the error of HesScale."
    assert last == "In the last layer, HesScale and HesScaleGN are exact."
    assert {finding.figure for finding in section.findings} == {"digits-relative"}
    (section,) = figures.sections([made_up(SMALL, best=9.0)])
    assert section.findings[0].text.endswith("times the error of HesScale, which is not the smallest here.")
    (section,) = figures.sections([made_up(dataclasses.replace(SMALL, quirks="authors"))])
    assert section.findings == []


def test_claims_are_counted():
    (section,) = figures.sections([made_up(SMALL)])
    claims = {claim: holds for claim, holds, _ in items(section)["claims"].rows}
    assert claims["HesScale has the smallest error"] == "4 of 4 networks"
    assert claims["HesScale has the smallest error in every layer"] == "4 of 4 networks"
    assert claims["HesScale and HesScaleGN are exact in the last layer"] == "4 of 4 networks"
    assert claims["Methods for diag(G) are better than AdaHessian"] == "4 of 4 networks"
    assert claims["HesScaleGN is closer to diag(G) than GGN-MC1 is"] == "4 of 4 networks"
    assert claims["HesScaleGN is closer to diag(G) than GGN-MC50 is"] == "0 of 4 networks"
    (section,) = figures.sections([made_up(SMALL, best=9.0)])
    claims = {claim: holds for claim, holds, _ in items(section)["claims"].rows}
    assert claims["HesScale has the smallest error"] == "0 of 4 networks"
    assert claims["The exact head makes HesScale better than BL89"] == "0 of 4 networks"


def test_sections_by_what_differs():
    several = figures.sections([made_up(SMALL), made_up(dataclasses.replace(SMALL, quirks="authors", step_size=0.1))])
    assert [section.title for section in several] == [
        "Approximation quality (step size 0.05, quirks none)",
        "Approximation quality (step size 0.1, quirks authors)",
    ]
    assert "authors' code" in several[1].text
    assert "authors' code" not in several[0].text
    assert len({item.name for section in several for item in section.items}) == 12
    assert figures.sections([]) == []


def test_one_network_has_no_standard_error():
    (section,) = figures.sections([made_up(dataclasses.replace(SMALL, count=1))])
    assert all("±" not in cell for row in items(section)["errors"].rows for cell in row)
    assert len(figures.SHOWN) == len({*figures.SHOWN} & {*methods.METHODS}) == len(methods.METHODS)
