"""GGN-MC sample by sample, against a loop over the samples with the same draws, in float64; and what it refuses."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale import estimators
from hesscale.estimators import estimate
from hesscale.optim import GGNMC

pytestmark = pytest.mark.usefixtures("double_precision")

NAME = "ggn_mc_per_sample"


def reference(loss: Tensor, params: list[Tensor], outputs: list[Tensor], draws: int, seed: int) -> list[Tensor]:
    """Σ_n J_nᵀa_n ∘ J_nᵀb_n, by a backward pass for each sample from its own outputs."""
    generator = torch.Generator().manual_seed(seed)
    request = estimators.Request(loss, tuple(params), draws, outputs, generator, True)
    with torch.no_grad():
        found = request.model_outputs
        a, b, _ = found.draw(draws)
        vectors = [found.split(a), found.split(b)]
    tensors = [next(z for z in outputs if z.grad_fn is node) for node, _ in found.edges]
    total = [torch.zeros_like(p) for p in params]
    for r, n in itertools.product(range(draws), range(len(outputs[0]))):
        left, right = (
            torch.autograd.grad([z[n] for z in tensors], params, [v[r, n] for v in of], retain_graph=True) for of in vectors
        )
        total = [t + x * y / draws for t, x, y in zip(total, left, right, strict=True)]
    return total


def check(model: nn.Module, x: Tensor, head, draws: int = 3) -> None:
    z = model(x)
    outputs = [z] if isinstance(z, Tensor) else list(z)
    loss, params = head(z), [*model.parameters()]
    expected = reference(loss, params, outputs, draws, 1)
    generator = torch.Generator().manual_seed(1)
    found = estimate(NAME, loss, params, outputs=outputs, num_samples=draws, generator=generator, retain_graph=True)
    torch.testing.assert_close([*found], expected, rtol=1e-9, atol=1e-14)
    assert all(p.any() for p in found)


def image(*shape: int) -> Tensor:
    return torch.randn(4, *shape)


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


class Functional(nn.Module):
    """A model written as a function of its layers."""

    def __init__(self, function, **layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layers, x)


def residual(m, x):
    h = m["first"](x)
    return m["last"](torch.cat([h + m["second"](h.tanh()), h.softmax(1)], 1))


def attention(m, x):
    """Over (sample, time, feature), by hand."""
    q, k, v = (m[name](x) for name in "qkv")
    return m["last"](((q @ k.mT).softmax(2) @ v).mean(1))


def without_affine() -> list[nn.Module]:
    norms = nn.GroupNorm(2, 4, affine=False), nn.BatchNorm2d(4, affine=False).eval(), nn.Flatten(), nn.Linear(16, 4)
    return [nn.Conv2d(1, 4, 2), *norms, nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 3)]


def of_frames(samples: int) -> list[nn.Module]:
    below = nn.Flatten(0, 1), nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Unflatten(0, (samples, 3))
    return [*below, nn.Linear(12, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)]


MODELS = {
    "mlp": lambda: (net(nn.Linear(3, 4), nn.ELU(), nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)), image(3)),
    "convolutions": lambda: (
        net(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.ELU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)),
        ),
        image(2, 6, 6),
    ),
    "strides, dilations, groups": lambda: (
        net(
            *(nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2), nn.Tanh()),
            *(nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
        ),
        image(2, 6, 7),
    ),
    "one dimension": lambda: (net(nn.Conv1d(2, 3, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)), image(2, 8)),
    "three dimensions": lambda: (
        net(nn.Conv3d(1, 2, 2, padding=1), nn.Tanh(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 3)),
        image(1, 3, 4, 3),
    ),
    "transposed": lambda: (
        net(nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2, dilation=2), nn.Tanh(), nn.Flatten(), nn.Linear(288, 3)),
        image(4, 3, 2),
    ),
    "many channels": lambda: (net(nn.Conv2d(40, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)), image(40, 3, 3)),
    "norms": lambda: (net(*without_affine()), image(1, 3, 3)),
    "frames": lambda: (net(*of_frames(4)), image(3, 2, 3, 3)),
    "residual": lambda: (Functional(residual, first=nn.Linear(3, 4), second=nn.Linear(4, 4), last=nn.Linear(8, 3)), image(3)),
    "attention": lambda: (
        Functional(attention, **{name: nn.Linear(3, 4) for name in "qkv"}, last=nn.Linear(4, 3)),
        image(5, 3),
    ),
    "positions": lambda: (net(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), image(5, 2)),
    "positions, not contiguous": lambda: (net(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), image(2, 5).mT),
}


KEEPING = {
    "elementwise": lambda h: F.logsigmoid(h) * h[:, :1].exp() + torch.where(h > 0, h, h**2).masked_fill(h > 1, 0.0),
    "expanded": lambda h: h[..., :1].expand(4, 4, 6).clone(),
    "views": lambda h: h.flatten().view(8, 2, 1, 6).squeeze(2).reshape(4, 4, 6).unsqueeze(1).squeeze(),
    "permuted": lambda h: h.transpose(1, 2).reshape(4, 3, 2, 4).permute(0, 3, 1, 2).sin(),
    "reductions": lambda h: torch.cat([h.amax(1), h.amin(1), h.logsumexp(-1), h.mean((1, -1))[:, None], h.sum(1)], 1),
    "parts": lambda h: torch.cat([*h.split(2, 1), F.glu(h, 1), h[:, 1::2]], 1).log_softmax(1)[:, 1],
    "padded": lambda h: F.pad(h, (1, 2, -1, 1)),
    "resized": lambda h: F.interpolate(F.pad(h, (1, 1), mode="reflect"), size=3),
    "images": lambda h: F.max_unpool2d(*F.max_pool2d(h.view(4, 2, 2, 6), 2, return_indices=True), 2),
    "normalized": lambda h: F.group_norm(F.layer_norm(F.rms_norm(h, (6,)), (4, 6)), 2),
    "products": lambda h: torch.bmm(h, h.mT.softmax(1)) @ torch.ones(4, 2),
    "more rows": lambda h: h.view(8, 2, 6).softmax(1).sum(2),
}


@pytest.mark.parametrize("name", KEEPING)
def test_operators_that_keep_samples_separate(name):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 24)
            self.last = nn.Linear(KEEPING[name](torch.zeros(4, 4, 6)).numel() // 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(KEEPING[name](self.first(x).view(4, 4, 6)).reshape(4, -1))

    check(Net(), image(3), cross_entropy)


def cross_entropy(z: Tensor) -> Tensor:
    z = z.reshape(-1, 3)
    return F.cross_entropy(z, torch.arange(len(z)) % 3)


def squared_error(z: Tensor) -> Tensor:
    return F.mse_loss(z, torch.linspace(-1, 1, z.numel()).view_as(z))


def coupled_classes(z: Tensor) -> Tensor:
    """Neither softmax nor diagonal: a and b differ."""
    return (z.sin() * z.roll(1, -1)).mean()


HEADS = [cross_entropy, squared_error, coupled_classes]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_sum_over_samples(name, head):
    model, x = MODELS[name]()
    check(model, x, head)


@pytest.mark.parametrize("most", [1, 100])
def test_how_many_samples_are_taken_at_once_does_not_matter(most, monkeypatch):
    monkeypatch.setattr(estimators.per_sample, "MAX_NUMBERS", most)
    for name in ("convolutions", "positions"):
        check(*MODELS[name](), coupled_classes)


def test_weights_of_both_signs():
    """A policy gradient: b is a with the sign of the advantage."""
    advantage = torch.tensor([1.0, -2.0, 0.5, -1.0])
    check(*MODELS["convolutions"](), lambda z: (F.cross_entropy(z, torch.arange(4) % 3, reduction="none") * advantage).mean())


def test_two_outputs():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.mean, self.deviation = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.trunk(x).tanh()
            return self.mean(h), self.deviation(h)

    check(Two(), image(3), lambda z: F.gaussian_nll_loss(z[0], torch.ones(4, 2), F.softplus(z[1])))


def test_products_with_factors_and_biases_added_apart():
    weight, bias, other = (torch.randn(shape, requires_grad=True) for shape in ((3, 4), (1,), (4,)))
    last, x = nn.Linear(4, 3), image(5, 3)

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias, self.other, self.last = nn.Parameter(weight), nn.Parameter(bias), nn.Parameter(other), last

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, 3)
            h = torch.addmm(self.bias, flat, self.weight, beta=3, alpha=0.5).view(4, 5, 4)
            return self.last(torch.add(h @ torch.eye(4), self.other, alpha=2).tanh()).mean(1)

    check(Written(), x, squared_error)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_ggn_mc_for_one_sample(name, head):
    model, x = (net(*of_frames(1)), image(3, 2, 3, 3)) if name == "frames" else MODELS[name]()
    z = model(x[:1])
    loss, params = head(z), [*model.parameters()]
    found, expected = (
        estimate(of, loss, params, num_samples=3, outputs=z, generator=torch.Generator().manual_seed(1), retain_graph=True)
        for of in (NAME, "ggn_mc")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("head", HEADS)
def test_its_mean_is_the_ggn_and_its_noise_less_than_that_of_ggn_mc(head):
    model, x = MODELS["convolutions"]()
    loss, params = head(model(x)), [*model.parameters()]
    truth = torch.cat([d.flatten() for d in estimate("ggn", loss, params, retain_graph=True)])
    noise = {}
    for name in (NAME, "ggn_mc"):
        generator = torch.Generator().manual_seed(0)
        calls = [estimate(name, loss, params, num_samples=40, generator=generator, retain_graph=True) for _ in range(40)]
        draws = torch.stack([torch.cat([d.flatten() for d in call]) for call in calls])
        error, standard_error = (draws.mean(0) - truth).abs(), draws.std(0) / len(draws) ** 0.5
        assert (error <= 5 * standard_error + 1e-9 * truth.abs().max()).all()
        noise[name] = float(standard_error.norm() / truth.norm())
    assert noise[NAME] < 0.8 * noise["ggn_mc"] < 0.2


def test_rows_are_the_samples_where_no_outputs_are_named():
    """A Linear over (batch, time, feature) gives (batch · time, feature)."""
    model, x = net(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), image(5, 2)
    params = [*model.parameters()]
    found, expected = (
        estimate(NAME, cross_entropy(model(of)), params, generator=torch.Generator().manual_seed(1))
        for of in (x, x.flatten(0, 1))
    )
    torch.testing.assert_close(found, expected)


def test_an_empty_batch():
    layer = nn.Linear(3, 2)
    assert not any(d.any() for d in estimate(NAME, layer(torch.empty(0, 3)).square().sum(), [*layer.parameters()]))


# --------------------------------------------------------------------------------------------------------------- what it refuses


def refused(loss: Tensor, params: list[Tensor], match: str, **options) -> None:
    with pytest.raises(ValueError, match=match):
        estimate(NAME, loss, params, **options)


def test_other_parameters():
    norm, last, x = nn.LayerNorm(3), nn.Linear(3, 2), image(3)
    params = [*last.parameters(), *norm.parameters()]
    refused(last(norm(x)).exp().sum(), params, r"params\[2\], of shape \(3,\), is input 1 of NativeLayerNorm.* use 'ggn_mc'")
    vector = torch.randn(3, requires_grad=True)
    refused(last(x * vector).exp().sum(), [vector], r"params\[0\], of shape \(3,\), is input 1 of MulBackward0")


def test_several_uses():
    layer, x = nn.Linear(3, 3), image(3)
    refused(layer(layer(x).tanh()).exp().sum(), [*layer.parameters()], r"params\[0\], of shape \(3, 3\), has 2 uses")
    other = nn.Linear(3, 3, bias=False)
    refused(F.linear(layer(x), layer.weight.T).exp().sum(), [other.weight, layer.weight], r"params\[1\], .* has 2 uses")


def test_leaves_of_the_head():
    layer, deviation = nn.Linear(3, 3), torch.zeros(3, requires_grad=True)
    loss = F.gaussian_nll_loss(layer(image(3)), image(3), deviation.exp().expand(4, 3))
    refused(loss, [*layer.parameters(), deviation], r"params\[2\], of shape \(3,\), is input 0 of ExpBackward0")
    h = torch.randn(2, 3, requires_grad=True) * 2
    refused(layer(h).exp().sum(), [layer.weight], "other than through the model's outputs, and its gradient", outputs=h)


MIXING = {
    "BatchNorm": lambda h: F.batch_norm(h, None, None, training=True),
    "MeanBackward1": lambda h: h[:, None].expand(4, 4, 4).mean(0),
    "SubBackward0": lambda h: h - h.mean(0),
    "SoftmaxBackward0": lambda h: h.softmax(0),
    "FlipBackward0": lambda h: h.flip(0),
    "RollBackward0": lambda h: h.roll(1, 0),
    "IndexBackward0": lambda h: h[torch.tensor([1, 0, 3, 2])],
    "TBackward0": lambda h: h.t(),
    "TransposeBackward0": lambda h: h.transpose(0, 1),
    "PermuteBackward0": lambda h: h.permute(1, 0).contiguous(),
    "CatBackward0": lambda h: torch.cat([h[2:], h[:2]]),
    "MmBackward0": lambda h: torch.eye(4) @ h,
    "ConstantPadNdBackward0": lambda h: F.pad(h, (0, 0, 1, -1)),
    "CumsumBackward0": lambda h: h.cumsum(0),
    "MaskedScatterBackward0": lambda h: torch.zeros(4, 4).masked_scatter(torch.eye(4).bool(), h),
    "AddBackward0": lambda h: h + h[:, 0],
    "NativeLayerNorm": lambda h: F.layer_norm(h, (4, 4)),
    "SliceBackward0": lambda h: torch.cat([h, h])[2:6],
    "AddmmBackward0": lambda h: F.linear(torch.eye(4), h, torch.ones(4)),
    "CumprodBackward0": lambda h: h.cumprod(1),  # apart, but not known to be
}


@pytest.mark.parametrize("name", MIXING)
def test_operators_that_may_mix_samples_are_refused(name):
    first, last = nn.Linear(3, 4), nn.Linear(4, 3)
    loss = cross_entropy(last(MIXING[name](first(image(3)))))
    refused(loss, [*first.parameters()], rf"{name}\w* lies between a layer and the outputs.* Use 'ggn_mc'")


def test_parameters_after_an_operator_that_mixes_samples():
    first, last = nn.Linear(3, 4), nn.Linear(4, 3)
    loss = cross_entropy(last(first(image(3)).softmax(0)))
    assert all(d.any() for d in estimate(NAME, loss, [*last.parameters()]))


def test_samples_in_another_dimension():
    """(feature, sample) and a convolution over fewer rows than there are outputs."""
    first, last = nn.Linear(3, 4), nn.Linear(4, 3)
    z = last(first(image(3)).tanh()).t()
    refused(F.cross_entropy(z.t(), torch.arange(4) % 3), [*first.parameters()], r"does not divide into 3 samples", outputs=z)
    conv, last = nn.Conv1d(2, 3, 2), nn.Linear(2, 3)
    z = last(conv(image(2, 3)))
    refused(cross_entropy(z), [conv.weight], r"params\[0\], .* output, of shape \(4, 3, 2\), does not divide into 12 samples")


@pytest.mark.parametrize(
    "head",
    [
        lambda z: (z - 1).square().mean().sqrt(),
        lambda z: F.cross_entropy(z.t(), torch.tensor([0, 1, 2])),
        lambda z: F.nll_loss(z.log_softmax(0), torch.arange(4) % 3),
        lambda z: F.cross_entropy(z - z.mean(0), torch.arange(4) % 3),
    ],
    ids=["root", "transposed", "softmax over samples", "centred"],
)
def test_losses_that_couple_samples(head):
    layer = nn.Linear(3, 3)
    refused(head(layer(image(3))), [*layer.parameters()], "couples the outputs of different samples|may mix the samples")


# ---------------------------------------------------------------------------------------------------------- precision, optimizer


def test_autocast():
    """Weights are cast on the way to their layer."""
    torch.set_default_dtype(torch.float32)
    model, x = MODELS["convolutions"]()
    params, found = [*model.parameters()], {}
    for name in (NAME, "ggn"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x))
        found[name] = estimate(name, loss, params, num_samples=200, generator=torch.Generator().manual_seed(0))
    for drawn, exact in zip(*found.values(), strict=True):
        assert drawn.dtype == torch.float32
        assert (drawn - exact).norm() < 0.1 * exact.norm()


def small() -> tuple[nn.Sequential, Tensor, Tensor]:
    layers = nn.Conv2d(2, 4, 3), nn.ELU(), nn.MaxPool2d(2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers), torch.randn(8, 2, 6, 6), torch.arange(8) % 3


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_the_optimizer_takes_it():
    model, x, y = small()
    model.eval()
    params, generator = [*model.parameters()], torch.Generator().manual_seed(3)
    optimizer = GGNMC(params, lr=0.01, per_sample=True, num_samples=2, generator=generator)
    loss = loss_of(model, x, y)
    expected = estimate(NAME, loss, params, num_samples=2, generator=torch.Generator().manual_seed(3), retain_graph=True)
    optimizer.backward(loss)
    torch.testing.assert_close([p.hess_diag for p in params], [*expected])
    optimizer.step()
    generator.manual_seed(3)
    with hesscale.capture(optimizer):
        loss_of(model, x, y).backward()
    expected = estimate(NAME, loss_of(model, x, y), params, num_samples=2, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close([p.hess_diag for p in params], [*expected])
    assert copy.deepcopy(optimizer).per_sample
    assert not GGNMC(params).per_sample


@pytest.mark.parametrize("low", [False, True], ids=["", "autocast"])
def test_a_traced_step_is_the_eager_one(low):
    torch.set_default_dtype(torch.float32 if low else torch.float64)
    model, x, y = small()
    models = [model, copy.deepcopy(model)]
    losses = []
    for each, backend in zip(models, ("eager", "traced"), strict=True):
        step = hesscale.compile_step(each, loss_of, GGNMC(each.parameters(), lr=1e-3, per_sample=True), backend=backend)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=low, cache_enabled=False):
            losses.append([float(step(x, y)) for _ in range(6)])
        assert step.mode == backend
    assert losses[0] == pytest.approx(losses[1])
    torch.testing.assert_close(*[[*each.parameters()] for each in models])
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("how", ["vmap", "abreast"])
def test_members_of_an_ensemble_equal_single_runs(how, monkeypatch):
    """With labels that leave nothing to chance."""

    def labels(self, count: int, q: Tensor, dim: int) -> Tensor:
        return F.one_hot(q.argmin(dim), q.shape[dim]).to(q).expand(count, *q.shape)

    monkeypatch.setattr(estimators.Request, "labels", labels)
    models = [small()[0].eval() for _ in range(3)]
    x, y = torch.randn(5, 3, 8, 2, 6, 6), torch.randint(3, (5, 3, 8))
    alone = copy.deepcopy(models)

    def optimizer_of(model: nn.Module, k: int) -> GGNMC:
        return GGNMC(model.parameters(), lr=1e-3 * (k + 1), per_sample=True)

    optimizers = [optimizer_of(model, k) for k, model in enumerate(models)]
    step = hesscale.func.ensemble(models, loss_of, optimizers, how=how, backend="traced")
    found = torch.stack([step(*batch) for batch in zip(x, y, strict=True)], 1)
    assert step.mode == "traced"
    for k, model in enumerate(alone):
        single = hesscale.compile_step(model, loss_of, optimizer_of(model, k), backend="eager")
        torch.testing.assert_close(found[k], torch.stack([single(*batch) for batch in zip(x[:, k], y[:, k], strict=True)]))
        torch.testing.assert_close([*models[k].parameters()], [*model.parameters()])
