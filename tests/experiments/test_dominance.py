"""`hesscale dominance`: Hessians and gradients against autograd, blocks and resumed runs against whole ones, and Appendix E."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from hesscale.experiments.figures import _dominance_figures as figures
from hesscale.experiments.figures import dominance
from hesscale.experiments.figures.dominance import EXPERIMENT, Networks, Settings, Task, rho
from hesscale.experiments.lab.data import Dataset
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.plots import Heat, Plot, Table
from hesscale.experiments.lab.series_layout import check
from hesscale.experiments.lab.store import Result, Store

TASK = Task("digits", first=3, count=2, iterations=25, batch=8, step_size=1e-3, activation="tanh", samples=2, seed=0)


@pytest.fixture(autouse=True)
def on_the_cpu():
    torch.manual_seed(0)
    with torch.device("cpu"):
        yield


@pytest.fixture
def data(monkeypatch):
    """A data set of 60 small images in three classes; 25 steps of 8 are three epochs and a part of a fourth."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    images = torch.randint(0, 17, (60, 4, 4), generator=random) // 2 + (4 * labels).view(-1, 1, 1)
    split = images.to(torch.uint8), labels
    dataset = Dataset("digits", *split, *split, classes=3, title="made-up images", scale=16)
    monkeypatch.setattr(dominance, "load", lambda name, root: dataset)
    return dataset


def networks(activation: str, *sizes: int) -> Networks:
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    pairs = list(itertools.pairwise(sizes))
    return Networks([draw(2, m, n) / n**0.5 for n, m in pairs], [draw(2, 1, m) for _, m in pairs], activation)


def loss_of(found: Networks, k: int, x: torch.Tensor, y: torch.Tensor, shifts: dict[int, torch.Tensor]) -> torch.Tensor:
    """The cross-entropy of network k, with its pre-activations shifted; written apart from the code that is tested."""
    h = x
    for l, (W, b) in enumerate(zip(found.weights, found.biases, strict=True)):
        a = h @ W[k].T + b[k, 0] + shifts.get(l, 0.0)
        h = getattr(torch, found.activation)(a)
    return F.cross_entropy(a, y)


@pytest.mark.parametrize("activation", dominance.ACTIVATIONS)
def test_hessians_are_those_of_double_backward(activation):
    found = networks(activation, 5, 4, 6, 3, 4)
    x, y = torch.randn(2, 5, dtype=torch.float64), torch.tensor([2, 0])
    hessians = list(found.hessians(x, y))[::-1]
    assert [H.shape for H in hessians] == [(2, n, n) for n in (4, 6, 3)]
    for l, H in enumerate(hessians):
        for k in range(2):
            shift = torch.zeros(H.shape[1], dtype=torch.float64)
            loss = lambda shift, k=k, l=l: loss_of(found, k, x[k : k + 1], y[k : k + 1], {l: shift})  # noqa: E731
            torch.testing.assert_close(H[k], torch.autograd.functional.hessian(loss, shift))
            assert H[k].abs().max() > 0


@pytest.mark.parametrize("activation", dominance.ACTIVATIONS)
def test_gradients_are_those_of_each_network_alone(activation):
    found = networks(activation, 5, 4, 6, 4)
    x, y = torch.randn(2, 7, 5, dtype=torch.float64), torch.randint(0, 4, (2, 7))
    leaves = Networks(*[[p.clone().requires_grad_() for p in some] for some in (found.weights, found.biases)], activation)
    logits = found.backward(x, y)
    losses = torch.stack([loss_of(leaves, k, x[k], y[k], {}) for k in range(2)])
    torch.testing.assert_close(torch.stack([F.cross_entropy(logits[k], y[k]) for k in range(2)]), losses)
    losses.sum().backward()
    for mine, truth in zip(found.parameters, leaves.parameters, strict=True):
        torch.testing.assert_close(mine.grad, truth.grad)


def test_an_almost_certain_class_keeps_its_curvature():
    """q (1 − q) loses every digit where 1 − q is 1e-30."""
    H = dominance.softmax_hessian(torch.tensor([[[0.0, 70.0]]], dtype=torch.float64))
    expected = math.exp(-70) * torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]], dtype=torch.float64)
    torch.testing.assert_close(H, expected, rtol=1e-12, atol=0)


def test_rho():
    matrices = torch.stack([torch.diag(torch.tensor([1.0, -2.0])), torch.tensor([[0.0, 3.0], [1.0, 0.0]]), torch.ones(2, 2)])
    torch.testing.assert_close(rho(matrices), torch.tensor([1.0, 0.0, 0.5**0.5]))
    assert rho(torch.zeros(2, 2)).isnan()


def test_networks_begin_as_linear_layers_do():
    found, chosen = dominance.new_networks(dataclasses.replace(TASK, samples=20), inputs=16, outputs=3, examples=20)
    for W, b in zip(found.weights, found.biases, strict=True):
        bound = W.shape[2] ** -0.5
        assert 0.99 * bound < W.abs().max() <= bound
        assert b.abs().max() <= bound
        assert not torch.equal(W[0], W[1])
    assert chosen.sort(1).values.tolist() == [list(range(20))] * 2  # none twice
    assert not torch.equal(chosen[0], chosen[1])


def test_each_epoch_has_every_example_once_in_a_new_order():
    first, second = (dominance.epoch_order(TASK, epoch, 60) for epoch in (1, 2))
    assert first.sort(1).values.tolist() == second.sort(1).values.tolist() == [list(range(60))] * 2
    assert len({tuple(order.tolist()) for order in (*first, *second)}) == 4


def done(tmp_path, name: str, task: Task) -> Result:
    store = Store(tmp_path / name)
    EXPERIMENT.do(store, as_task(task), None)
    (result,) = EXPERIMENT.results(store, [as_task(task)])
    return result


def test_a_network_is_the_same_in_any_block(tmp_path, data):
    both = done(tmp_path, "both", TASK).values
    alone = [done(tmp_path, "alone", dataclasses.replace(TASK, first=first, count=1)).values for first in (3, 4)]
    for name, value in both.items():
        if name.startswith(("rho", "accuracy")):
            torch.testing.assert_close(value, torch.cat([values[name] for values in alone]), rtol=1e-4, atol=1e-5)
        elif name.startswith("magnitude"):
            torch.testing.assert_close(value, sum(values[name] for values in alone) / 2, rtol=1e-3, atol=1e-5)
    assert both["rho_before"].shape == (2, dominance.LAYERS)
    assert (both["rho_before"] - both["rho_after"]).abs().min() > 1e-3  # it did learn
    assert both["accuracy_after"].min() > both["accuracy_before"].max()
    assert (both["rho_after"][0] - both["rho_after"][1]).abs().min() > 1e-4


def test_values_are_of_the_hessians_of_the_chosen_examples(tmp_path, data):
    values = done(tmp_path, "runs", TASK).values
    found, chosen = dominance.new_networks(TASK, 16, 3, 60)
    x = data.inputs("train").double() * 2 - 1
    H = torch.stack(
        [torch.stack(list(found.double().hessians(x[chosen[:, s]], data.train_labels[chosen[:, s]]))[::-1], 1) for s in range(2)]
    )  # (sample, network, layer, unit, unit)
    torch.testing.assert_close(values["rho_before"], rho(H).mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(values["magnitude_before"], H.abs().mean((0, 1)).float(), rtol=1e-5, atol=1e-9)


def interrupted(store: Store, last: int) -> None:
    """A run that is killed between two steps, and whose last checkpoint is that after step ``last``."""
    with store.open("dominance", as_task(TASK)) as run:
        save = run.checkpoint

        def checkpoint(state):
            if state["step"] > last + 1 or state["step"] == TASK.iterations:
                raise KeyboardInterrupt
            if state["step"] <= last:
                save(state)

        run.checkpoint = checkpoint
        dominance.run(TASK, run, None)


@pytest.mark.parametrize("last", [7, 10, 24])  # the end of an epoch, within one, before the last step
def test_a_resumed_run_is_an_uninterrupted_one(tmp_path, data, monkeypatch, last):
    whole, store = done(tmp_path, "whole", TASK), Store(tmp_path / "broken")
    monkeypatch.setattr(dominance, "CHECKPOINT_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        interrupted(store, last)
    with store.open("dominance", as_task(TASK)) as run:
        assert run.state["step"] == last
    resumed = done(tmp_path, "broken", TASK)
    assert resumed.metrics == whole.metrics
    assert resumed.values.keys() == whole.values.keys()
    for name, value in whole.values.items():
        assert torch.equal(resumed.values[name], value) if isinstance(value, torch.Tensor) else resumed.values[name] == value


def test_a_step_is_one_of_adam(tmp_path, data):
    """The weights after two steps are those of torch's own loop on a module."""
    task = dataclasses.replace(TASK, count=1, iterations=2)
    found, _ = dominance.new_networks(task, 16, 3, 60)
    leaves = Networks(*[[p.clone().requires_grad_() for p in some] for some in (found.weights, found.biases)], task.activation)
    adam = torch.optim.Adam(leaves.parameters, lr=task.step_size)
    x, y = data.inputs("train") * 2 - 1, data.train_labels
    order = dominance.epoch_order(task, 1, 60)[0]
    for batch in (order[:8], order[8:16]):
        adam.zero_grad()
        loss_of(leaves, 0, x[batch], y[batch], {}).backward()
        adam.step()
    with Store(tmp_path).open("dominance", as_task(task)) as run:
        dominance.train(task, run, found, lambda batch: (x[batch], y[batch]), 60)
    for mine, truth in zip(found.parameters, leaves.parameters, strict=True):
        torch.testing.assert_close(mine, truth.detach(), rtol=1e-4, atol=1e-6)


def test_tasks_are_blocks_that_more_seeds_share():
    few, many = EXPERIMENT.tasks(Settings(seeds=11)), EXPERIMENT.tasks(Settings(seeds=20))
    assert [(task.first, task.count) for task in few] == [(0, 5), (5, 5), (10, 1)]
    assert few[:2] == many[:2]
    assert sum(task.count for task in many) == 20
    paper = EXPERIMENT.presets["paper"]
    assert (paper.dataset, paper.seeds, paper.iterations, paper.batch) == ("emnist", 300, 10_000, 32)
    assert "300 networks" in EXPERIMENT.work(paper)


@pytest.mark.parametrize(
    "wrong",
    [
        *[{"seeds": 0}, {"iterations": 0}, {"batch": 0}, {"samples": 0}, {"seed": -1}],
        *[{"step_size": 0.0}, {"step_size": math.nan}, {"activation": "elu"}, {"dataset": "letters"}],
    ],
)
def test_invalid_settings_are_named(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
        EXPERIMENT.tasks(Settings(**wrong))


def test_too_few_examples_and_diverged_networks_are_refused(tmp_path, data):
    with pytest.raises(ValueError, match="60 training examples"):
        done(tmp_path, "runs", dataclasses.replace(TASK, batch=61))
    with pytest.raises(ArithmeticError, match="diverged"):
        done(tmp_path, "runs", dataclasses.replace(TASK, step_size=1e38, activation="relu"))


def result(ratio: float, magnitude: float, **changed: object) -> Result:
    """A block whose networks have this ρ, and |H| of this size with ones beside its diagonal."""
    task = dataclasses.replace(TASK, **changed)
    values = {"title": "EMNIST-47 subset"}
    for when in ("before", "after"):
        values[f"rho_{when}"] = torch.full((task.count, dominance.LAYERS), ratio)
        values[f"accuracy_{when}"] = torch.full((task.count,), 0.25)
        matrix = torch.eye(dominance.WIDTH) * magnitude + torch.eye(dominance.WIDTH).roll(1, 0)
        values[f"magnitude_{when}"] = matrix.repeat(dominance.LAYERS, 1, 1)
    return Result(task, values, {}, {})


def test_sections_weigh_blocks_by_their_networks():
    blocks = [result(0.5, 1.0, first=0, count=5), result(0.8, 7.0, first=5, count=1), result(0.1, 9.0, first=0, count=2)]
    section, _ = EXPERIMENT.sections(blocks)
    table, plot, before, after = section.items
    assert isinstance(table, Table)
    assert isinstance(plot, Plot)
    assert isinstance(before, Heat)
    assert isinstance(after, Heat)
    diagonal = (5 * 1.0 + 1 * 7.0) / 6
    assert table.rows[0][:4] == ["1", "0.550 ± 0.050", f"{diagonal / math.hypot(diagonal, 1):.3f}", "0.94"]
    assert [row[6] for row in table.rows[:4]] == ["0.75", "0.54", "0.81", "0.98"]
    mean, _, error = table.rows[4][1].split()
    assert abs(float(mean) - 0.0884) < 5 * float(error) < 0.01
    assert before.panels[2][1][0][0] == pytest.approx(diagonal)
    dots, mean, averaged, published, *_ = plot.series
    assert (dots.kind, dots.x) == ("dots", [0, 1, 2, 3] * 6)
    assert dots.y == pytest.approx([0.5] * 20 + [0.8] * 4)
    assert mean.y == pytest.approx([0.55] * 4)
    assert mean.high[0] - mean.low[0] == pytest.approx(0.1)
    assert averaged.y[0] == pytest.approx(diagonal / math.hypot(diagonal, 1))
    assert published.y == figures.PUBLISHED["before"]
    assert "6 networks" in section.text
    (finding,) = section.findings  # ρ is the same before and after
    assert "is 0.55 to 0.55 before training and 0.55 to 0.55 after training" in finding.text
    assert finding.text.endswith("A random Gaussian matrix has 0.09.")
    assert "EMNIST-47 subset" in section.title
    assert all("EMNIST-47 subset" in item.title + item.caption for item in section.items)
    assert "zero" not in section.text
    for item in section.items:
        check(item)


def test_sections_separate_settings_and_leave_out_zero_hessians():
    results = [result(0.5, 1.0), result(math.nan, 1.0, step_size=0.5), result(0.7, 1.0, step_size=0.5, first=5)]
    *found, _ = EXPERIMENT.sections(results)
    names = [item.name for section in found for item in section.items]
    assert len({*names}) == len(names) == 8
    assert found[1].items[0].rows[0][1] == "0.700 ± 0.000"
    assert "In 16 cases" in found[1].text
    assert EXPERIMENT.sections([])[0].title.startswith("Weights")


def test_one_network_has_a_mean_and_no_standard_error():
    assert EXPERIMENT.sections([result(0.5, 1.0, count=1)])[0].items[0].rows[0][1] == "0.500"


def off_diagonal_squares(W: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    A = W.T @ torch.diag(h) @ W
    return (A - torch.diag(A.diagonal())).square().sum()


def test_appendix_e_gradient(double_precision):
    W, h = torch.randn(5, 4, requires_grad=True), torch.randn(5)
    (truth,) = torch.autograd.grad(off_diagonal_squares(W, h), W)
    torch.testing.assert_close(figures.off_diagonal_gradient(W.detach(), h), truth)


def test_appendix_e_diagonal_weights(double_precision):
    """J is at its minimum, 0, also where H depends on W."""
    W, x = torch.diag(torch.randn(4)).requires_grad_(), torch.randn(4)
    (gradient,) = torch.autograd.grad(off_diagonal_squares(W, torch.tanh(W @ x)), W)
    assert gradient.abs().max() == 0
    A = W.detach().T @ torch.diag(torch.tanh(W @ x)).detach() @ W.detach()
    assert rho(A) == 1


def test_appendix_e_gaussian_weights(double_precision):
    """The mean is zero because ∇J(−W) = −∇J(W)."""
    W, h = torch.randn(20_000, 5, 4), torch.full((5,), 0.7)
    gradients = figures.off_diagonal_gradient(W, h)
    torch.testing.assert_close(figures.off_diagonal_gradient(-W, h), -gradients)
    z = gradients.mean(0) / (gradients.std(0) / len(W) ** 0.5)
    assert z.abs().max() < 4
    biased = figures.off_diagonal_gradient(W + 0.3, h)
    assert (biased.mean(0) / (biased.std(0) / len(W) ** 0.5)).abs().min() > 10


def test_appendix_e_is_shown():
    (table,) = EXPERIMENT.sections([])[0].items
    diagonal, gaussian, contrast = table.rows
    assert diagonal[1:4] == ["1.000", "0", "0"]
    assert float(gaussian[1]) == pytest.approx(((128 + 2) / (2 * 128 + 1)) ** 0.5, abs=2e-3)
    assert float(gaussian[3]) == pytest.approx(float(gaussian[4]), rel=0.1)
    assert float(contrast[3]) > 5 * float(contrast[4])
