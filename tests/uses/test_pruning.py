"""Saliencies are exact for quadratic separable losses, and the masks are those of torch.nn.utils.prune."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import hesscale
from hesscale.uses.pruning import prune_channels, prune_weights, saliency, weights_of


def squares(model, x, y):
    return F.mse_loss(model(x), y)


def network(width=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)).double()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return [(x[:4], x[:4, :2]), (x[4:], x[4:, :2])]


def conv_network():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    return nn.Sequential(*layers).double()


def images():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64))]


def test_saliency_is_the_true_rise_of_a_quadratic_loss():
    """Squared error of a linear layer: exact for each weight with the gradient term, and in the minimum without it."""
    x = data()[0][0]
    layer = nn.Linear(4, 2, bias=False).double()
    for gradient in (True, False):
        target = x[:, :2] if gradient else layer(x).detach()  # the second puts the layer in its minimum
        scores = saliency(layer, [(x, target)], squares, gradient=gradient)[layer, "weight"]
        before = float(squares(layer, x, target).detach())
        for i, j in itertools.product(range(2), range(4)):
            value = float(layer.weight.detach()[i, j])
            with torch.no_grad():
                layer.weight[i, j] = 0
            assert float(scores[i, j]) == pytest.approx(float(squares(layer, x, target).detach()) - before, abs=1e-12)
            with torch.no_grad():
                layer.weight[i, j] = value


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "exact"])
def test_saliency_is_that_of_the_mean_loss(method):
    model = network()
    scores = saliency(model, data(), squares, method=method, gradient=True)
    for x, y in data():
        loss = squares(model, x, y) / 2
        for module, name in scores:
            w = getattr(module, name)
            (g,) = torch.autograd.grad(loss, w, retain_graph=True)
            (h,) = hesscale.estimators.estimate(method, loss, w, retain_graph=True)
            scores[module, name] = scores[module, name] - (h * w * w / 2 - g * w).detach()
    for rest in scores.values():
        torch.testing.assert_close(rest, torch.zeros_like(rest), atol=1e-12, rtol=0)


@pytest.mark.parametrize("sparsity", [0.3, 0.75])
def test_masks_are_those_of_global_unstructured(sparsity):
    masks = []
    for is_ours in (True, False):
        model = network()
        scores = saliency(model, data(), squares)
        if is_ours:
            prune_weights(scores, sparsity)
        else:
            prune.global_unstructured(list(scores), prune.L1Unstructured, scores, amount=sparsity)
        masks.append([module.weight_mask for module, _ in scores])
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))
    assert sum(int(mask.sum()) for mask in masks[0]) == round((1 - sparsity) * 72)


def test_masks_are_those_of_ln_structured():
    """Sums over channels of saliencies that are not negative are their L1 norms."""
    ours, theirs = conv_network(), conv_network()
    prune_channels(dict(itertools.islice(saliency(ours, images(), squares).items(), 2)), 0.4, scope="layer")
    for (module, name), scores in itertools.islice(saliency(theirs, images(), squares).items(), 2):
        prune.ln_structured(module, name, amount=0.4, n=1, dim=0, importance_scores=scores)
    for k in (0, 2):
        assert torch.equal(ours[k].weight_mask, theirs[k].weight_mask)
        assert ours[k].weight_mask.flatten(1).any(1).sum() == (3 if k == 0 else 2)


def test_the_share_of_each_layer():
    model = network()
    prune_weights(saliency(model, data(), squares, gradient=True), 0.5, scope="layer")
    assert [int(module.weight_mask.sum()) for module, _ in weights_of(model)] == [12, 18, 6]


def test_channels_of_all_layers_and_inputs():
    model = conv_network()
    scores = dict(list(saliency(model, images(), squares).items())[:2])
    sums = torch.cat([score.flatten(1).sum(1) for score in scores.values()])
    prune_channels(scores, 4 / 9)
    kept = torch.cat([model[k].weight_mask.flatten(1).any(1) for k in (0, 2)])
    assert kept.sum() == 5
    assert sums[kept].min() > sums[~kept].max()
    prune_channels({(model[5], "weight"): torch.arange(32.0).view(2, 16)}, 0.25, dim=-1)
    assert model[5].weight_mask[0].tolist() == [0] * 4 + [1] * 12
    layers = [nn.Linear(2, 3), nn.Linear(2, 3)]
    prune_channels({(layers[0], "weight"): torch.ones(3, 2), (layers[1], "weight"): torch.zeros(3, 2)}, 0.5)
    assert [int(layer.weight_mask[:, 0].sum()) for layer in layers] == [2, 1]  # the best channel of each layer stays


def test_channels_of_transposed_convolutions_are_outputs():
    layer = nn.ConvTranspose2d(4, 2, 3)
    scores = torch.ones(4, 2, 3, 3)
    scores[:, 0] = 2
    prune_channels({(layer, "weight"): scores}, 0.5)
    assert layer.weight_mask.flatten(2).all(2).tolist() == [[True, False]] * 4
    assert not layer.weight_mask[:, 1].any()
    grouped = nn.ConvTranspose2d(4, 4, 3, groups=2)
    with pytest.raises(ValueError, match="groups; pass dim=0 or dim=1"):
        prune_channels({(grouped, "weight"): torch.ones(4, 2, 3, 3)}, 0.5)
    prune_channels({(grouped, "weight"): scores}, 0.5, dim=1)
    assert not grouped.weight_mask[:, 1].any()


def test_channels_of_other_layers_need_a_dimension():
    """The Conv1D of transformers has its outputs in the second dimension."""
    layer = nn.Bilinear(2, 2, 3)
    with pytest.raises(ValueError, match="weight of Bilinear is the output; pass dim="):
        prune_channels({(layer, "weight"): torch.ones(3, 2, 2)}, 0.5)
    prune_channels({(layer, "weight"): torch.arange(12.0).view(3, 2, 2)}, 1 / 3, dim=0)
    assert layer.weight_mask.flatten(1).any(1).tolist() == [False, True, True]


def test_masked_channels_count_towards_sparsity():
    layers = [nn.Linear(2, 3), nn.Linear(2, 3)]
    prune.custom_from_mask(layers[0], "weight", torch.zeros(3, 2))
    prune_channels({(layer, "weight"): torch.rand(3, 2) for layer in layers}, 0.5)
    assert [int(layer.weight_mask[:, 0].sum()) for layer in layers if hasattr(layer, "weight_mask")] == [0, 3]


def test_infinite_scores_and_the_best_channel_are_never_masked():
    layers = [nn.Linear(2, 3), nn.Linear(2, 3)]
    prune_channels({(layer, "weight"): torch.rand(3, 2) for layer in layers}, 1.0)
    assert [int(layer.weight_mask[:, 0].sum()) for layer in layers] == [1, 1]
    layer = nn.Linear(4, 1)
    prune_weights({(layer, "weight"): torch.tensor([[torch.inf, 1, 2, torch.inf]])}, 0.75)
    assert layer.weight_mask.tolist() == [[1, 0, 0, 1]]


def test_pruning_again_after_retraining():
    """Masked weights stay masked, whatever their scores, and the shares are those of all weights."""
    model = network()
    masked = torch.zeros(72, dtype=torch.bool)
    for sparsity in (0.25, 0.5, 0.75):
        prune_weights(saliency(model, data(), squares), sparsity)
        now = torch.cat([module.weight_mask.flatten() == 0 for module, _ in weights_of(model)])
        assert int(now.sum()) == sparsity * 72
        assert now[masked].all()
        masked = now
        for x, y in data():
            gradients = torch.autograd.grad(squares(model, x, y), list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= 0.1 * g
    loss = squares(model, *data()[0])
    for module, name in weights_of(model):
        prune.remove(module, name)
        assert (module.weight == 0).any()
    assert squares(model, *data()[0]) == loss


def test_attention_is_left_out_and_trains_on():
    """nn.MultiheadAttention reads the weight of its output projection without a call, so a mask there would break training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 6, dropout=0, batch_first=True), nn.Linear(4, 2)).double()
    batches = [(x[:, None], y[:, None]) for x, y in data()]
    assert [module for module, _ in weights_of(model)] == [model[0].linear1, model[0].linear2, model[1]]
    for sparsity in (0.25, 0.5):
        prune_weights(saliency(model, batches, squares), sparsity)
        for batch in batches:
            squares(model, *batch).backward()


def test_masked_weights_do_not_count_for_channels():
    layer = nn.Linear(3, 2)
    prune.custom_from_mask(layer, "weight", torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]))
    prune_channels({(layer, "weight"): torch.tensor([[torch.inf, 1.0, 1.0], [2.0, 2.0, 2.0]])}, 0.5)
    assert layer.weight_mask.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_a_frozen_weight_is_named():
    model = network()
    model[2].requires_grad_(False)
    with pytest.raises(ValueError, match=r"2\.weight is not a parameter of the model that requires gradients"):
        saliency(model, data(), squares)
    assert len(saliency(model, data(), squares, places=[weights_of(model)[0]])) == 1


def test_refusals():
    model = network()
    scores = saliency(model, data(), squares)
    place = weights_of(model)[0]
    for given, sparsity, scope, words in (
        ({}, 0.5, "global", "nothing to prune"),
        (scores, 1.5, "global", "from 0 to 1"),
        (scores, 0.5, "module", "'module' is not one of 'global', 'layer'"),
        ({place: torch.ones(2)}, 0.5, "global", "shape"),
        ({place: torch.full((6, 4), torch.nan)}, 0.5, "global", "without NaN"),
        ({place: torch.ones(6, 4, dtype=torch.int64)}, 0.5, "global", "floating-point numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            prune_weights(given, sparsity, scope=scope)
    for dim in (2, -3):
        with pytest.raises(ValueError, match=f"dim={dim} is not a dimension"):
            prune_channels({place: scores[place]}, 0.5, dim=dim)
    tied = nn.Linear(4, 6)
    tied.weight = model[0].weight
    with pytest.raises(ValueError, match="share a parameter"):
        prune_channels({place: scores[place], (tied, "weight"): scores[place]}, 0.5)
    with pytest.raises(ValueError, match="not a parameter of the model"):
        saliency(model, data(), squares, places=[(nn.Linear(2, 2), "weight")])
