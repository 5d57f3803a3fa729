"""The report: its numbers are those of the batches, the Monte-Carlo column has the right mean, and nothing else changes."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscale
from hesscale.estimators import estimate
from hesscale.uses import mean_derivatives


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


class CubeSum(torch.autograd.Function):
    """An operator without a rule."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x**3).sum()

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


def batches_of(sizes, *shape, dtype=torch.float64, classes=3):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, *shape, generator=generator, dtype=dtype),
            torch.randint(0, classes, (size,), generator=generator),
        )
        for size in sizes
    ]


def mlp(activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 5), activation(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "exact", "ggn"])
def test_means_weigh_batches_by_their_examples(method):
    """As if all examples were one batch, for a mean over examples."""
    model, batches = mlp(), batches_of((4, 4, 2), 4)
    found = mean_derivatives(model, iter(batches), cross_entropy, method=method)
    whole = cross_entropy(model, torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    params = list(model.parameters())
    gradients = torch.autograd.grad(whole, params, retain_graph=True)
    for derivatives, g, h in zip(found.of.values(), gradients, estimate(method, whole, params), strict=True):
        torch.testing.assert_close(derivatives.gradient, g)
        torch.testing.assert_close(derivatives.diagonal, h)
    assert (found.examples, found.batches, list(found.of)) == (10, 3, [name for name, _ in model.named_parameters()])


def test_rows_are_statistics_of_the_mean_diagonal():
    model, batches = mlp(), batches_of((4, 4), 4)
    report = hesscale.inspect(model, batches, cross_entropy, num_samples=0)
    for x, y in batches:
        hesscale.backward(cross_entropy(model, x, y) / 2)
    for row, (name, p) in zip(report.rows, model.named_parameters(), strict=True):
        h, g = p.hess_diag, p.grad
        ordered = h.flatten().sort().values
        assert row["parameter"] == name
        assert row["shape"] == tuple(p.shape)
        assert row["mean"] == pytest.approx(float(h.mean()))
        assert row["quantile_0.5"] == pytest.approx(float(ordered[(len(ordered) - 1) // 2]))
        assert row["negative"] == pytest.approx(float((h < 0).double().mean()))
        assert row["gradient_norm"] == pytest.approx(float(g.norm()))
        assert row["long_steps"] == pytest.approx(float((g.abs() > h.abs()).double().mean()))
        entry = next(entry for entry in report.largest if entry["parameter"] == name)
        assert entry["diagonal"] == pytest.approx(float(h.max()))
        assert float(h[entry["index"]]) == pytest.approx(entry["diagonal"])
        assert entry["gradient"] == pytest.approx(float(g[entry["index"]]))
        assert entry["value"] == float(p.detach()[entry["index"]])
    assert {row["module"] for row in report.rows} == {"Linear"}


def test_the_ratio_is_unbiased():
    """Draws of the Gauss-Newton diagonal, many enough for three digits, against its exact sum."""
    model, batches = mlp(), batches_of((8,), 4)
    drawn = hesscale.inspect(model, batches, cross_entropy, num_samples=20_000)
    params = list(model.parameters())
    exact = estimate("ggn", cross_entropy(model, *batches[0]), params)
    approximate = estimate("hesscale_gn", cross_entropy(model, *batches[0]), params)
    ratios = [float(b.sum() / a.sum()) for a, b in zip(approximate, exact, strict=True)]
    assert any(abs(ratio - 1) > 0.05 for ratio in ratios)  # or there is nothing to see
    for row, ratio in zip(drawn.rows, ratios, strict=True):
        assert row["ggn_ratio"] == pytest.approx(ratio, rel=0.03)
        assert row["ggn_ratio_error"] is None  # one batch


def test_calibration_scales_each_tensor_to_the_estimated_sum():
    model, batches = mlp(), batches_of((8, 8), 4)
    plain = mean_derivatives(model, batches, cross_entropy, num_samples=3)
    calibrated = mean_derivatives(model, batches, cross_entropy, num_samples=3, calibrate=True)
    for a, b in zip(plain.of.values(), calibrated.of.values(), strict=True):
        assert a.ratio == b.ratio != 1
        assert b.ratio_error > 0
        torch.testing.assert_close(b.diagonal, a.diagonal * a.ratio)


def test_dead_units_are_found():
    model = mlp(nn.ReLU)
    with torch.no_grad():
        model[0].bias[2] = -100  # its ReLU is off on every example
    report = hesscale.inspect(model, batches_of((6, 6), 4), cross_entropy)
    dead = {row["parameter"]: (row["dead_units"], row["units"]) for row in report.rows}
    assert dead["0.weight"] == dead["0.bias"] == (1, 5)
    assert dead["4.bias"] == (0, 3)
    assert any("0.weight (1 of 5)" in remark for remark in report.remarks)
    transposed = nn.Sequential(nn.ConvTranspose1d(2, 3, 1), nn.ReLU(), nn.Flatten())
    with torch.no_grad():
        transposed[0].bias[1] = -100
    signals = batches_of((4,), 2, 1, dtype=torch.float32)
    assert [row["dead_units"] for row in hesscale.inspect(transposed, signals, cross_entropy).rows] == [1, 1]
    grouped = nn.Sequential(nn.ConvTranspose1d(4, 6, 1, groups=2), nn.ReLU(), nn.Flatten())
    with torch.no_grad():
        grouped[0].bias.fill_(10)[4] = -100
    rows = hesscale.inspect(grouped, batches_of((4,), 4, 1, dtype=torch.float32, classes=6), cross_entropy).rows
    assert [(row["dead_units"], row["units"]) for row in rows] == [(1, 6), (1, 6)]


def test_a_ratio_far_from_one_is_remarked():
    """Before a mean over 64 pixels, HesScaleGN leaves out the mixed derivatives between pixels."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    batches = [(x + 3, y) for x, y in batches_of((16, 16), 1, 8, 8, dtype=torch.float32)]
    report = hesscale.inspect(model, batches, cross_entropy)
    assert report.rows[0]["ggn_ratio"] > 10
    assert any("HesScaleGN" in remark and "0.weight" in remark for remark in report.remarks)


@pytest.mark.parametrize("training", [False, True])
def test_everything_is_restored(training):
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3)).double()
    model[3].eval()
    batches = batches_of((6, 6), 4)
    hesscale.backward(cross_entropy(model, *batches[0]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    derivatives = [(p.grad.clone(), p.hess_diag.clone()) for p in model.parameters()]
    random = torch.get_rng_state()
    reports = [hesscale.inspect(model, batches, cross_entropy, training=training) for _ in range(2)]
    assert reports[0].rows == reports[1].rows
    assert [module.training for module in model] == [True, True, True, False]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for p, (grad, diagonal) in zip(model.parameters(), derivatives, strict=True):
        assert torch.equal(p.grad, grad)
        assert torch.equal(p.hess_diag, diagonal)
    mean = model[1].running_mean.clone()

    def fails(model, x, y):
        raise RuntimeError(f"after the loss {cross_entropy(model, x, y)}")

    with pytest.raises(RuntimeError, match="after the loss"):
        hesscale.inspect(model, batches, fails, training=training)
    assert torch.equal(model[1].running_mean, mean)
    assert model.training


def test_remarks_name_the_worst_first_and_not_all():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)], nn.ReLU()).double()
    with torch.no_grad():
        model[7].bias.fill_(-100)[0] = 100
    report = hesscale.inspect(model, batches_of((6,), 4, classes=4), cross_entropy, num_samples=0, max_step=0)
    dead, long = report.remarks
    assert dead.endswith("7.weight (3 of 4), 7.bias (3 of 4).")
    shares = {row["parameter"]: row["long_steps"] for row in report.rows}
    named = [name.split()[0] for name in long.split(": ")[1].split(", ")]
    assert named == sorted(shares, key=lambda name: -shares[name])[:10]
    assert long.endswith(" and 6 more.")


def test_it_fits_eighty_columns():
    model = nn.Sequential()
    inner = nn.Sequential(nn.Conv2d(1, 200, 3), nn.ReLU(), nn.Flatten(), nn.Linear(200, 3))
    model.add_module("a_long_name_of_a_module_that_nobody_wants_to_read", inner)
    report = hesscale.inspect(model, batches_of((4, 4), 1, 3, 3, dtype=torch.float32), cross_entropy)
    assert max(map(len, str(report).splitlines())) <= 80
    assert "mean loss" in str(report)


def test_single_tensor_batches_and_max_batches():
    model, batches = mlp(), batches_of((4, 4, 4), 4)
    dictionaries = [{"x": x, "y": y} for x, y in batches]
    found = hesscale.inspect(
        model, dictionaries, lambda model, batch: cross_entropy(model, batch["x"], batch["y"]), max_batches=2
    )
    assert (found.examples, found.batches) == (8, 2)
    assert found.rows == hesscale.inspect(model, batches[:2], cross_entropy).rows


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"loss_fn": nn.CrossEntropyLoss()}, TypeError, "module CrossEntropyLoss"),
        ({"method": "diagonal"}, ValueError, "no estimator is called 'diagonal'"),
        ({"num_samples": -1}, ValueError, "at least 0, not -1"),
        ({"loader": []}, ValueError, "no batches"),
        (
            {"loss_fn": lambda model, x, y: cross_entropy(model, x, y) * float("inf")},
            hesscale.NonFiniteError,
            "batch 0 is .* inf",
        ),
        ({"loss_fn": lambda model, x, y: cross_entropy(model, x, 0 * y - 100)}, hesscale.NonFiniteError, "batch 0 is .* nan"),
        (
            {"loss_fn": lambda model, x, y: (0 * model(x)).square().sum().sqrt()},
            hesscale.NonFiniteError,
            "respect to 0.weight are not finite",
        ),
        (
            {"loss_fn": lambda model, x, y: CubeSum.apply(model(x)), "method": "exact"},
            hesscale.UnsupportedOperator,
            "num_samples=0",
        ),
    ],
)
def test_errors_say_what_to_do(options, error, words):
    given = {"loader": batches_of((4,), 4), "loss_fn": cross_entropy, **options}
    with pytest.raises(error, match=words):
        hesscale.inspect(mlp(), **given)


def test_batches_of_any_kind_count_by_their_examples():
    """A mapping that is no dictionary, such as a tokenizer's, counts as one does; without tensors nothing can be counted."""
    model = nn.Linear(1, 1, bias=False)
    batches = [UserDict(x=torch.ones(4, 1)), UserDict(x=3 * torch.ones(1, 1)), UserDict(x=torch.ones(0, 1))]
    found = mean_derivatives(model, batches, lambda model, batch: model(batch["x"]).square().mean())
    assert found.of["weight"].diagonal.item() == pytest.approx(2 * (4 + 9) / 5)
    assert (found.examples, found.batches) == (5, 2)
    assert found.loss == pytest.approx(float((model.weight.detach() ** 2 * (4 + 9) / 5).item()))
    with pytest.raises(ValueError, match="of type tuple has no tensor, so its number of examples is unknown"):
        mean_derivatives(model, [([1.0, 2.0],)], lambda model, x: model(torch.tensor(x)[:, None]).square().mean())


def test_random_methods_average_the_draws():
    model, batches = mlp(), batches_of((8,), 4)
    exact = mean_derivatives(model, batches, cross_entropy, method="ggn").of["0.weight"].diagonal
    drawn = mean_derivatives(model, batches, cross_entropy, method="ggn_mc", num_samples=5000).of["0.weight"].diagonal
    assert (drawn - exact).norm() < 0.1 * exact.norm()


def test_calibration_without_draws_is_refused():
    with pytest.raises(ValueError, match="num_samples=0"):
        mean_derivatives(mlp(), batches_of((4,), 4), cross_entropy, calibrate=True)
