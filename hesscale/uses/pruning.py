"""Pruning by saliency: the estimated increase of the loss when a weight is set to zero.

To second order, with a diagonal Hessian, w → 0 changes the loss by −g w + ½ h w². Optimal Brain Damage (LeCun, Denker & Solla
1989) leaves out the first term, since g vanishes at a minimum. The weights with the lowest saliency are pruned with
:mod:`torch.nn.utils.prune`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from .derivatives import TRANSPOSED, LossFunction, mean_derivatives

Place = tuple[nn.Module, str]  # a module and the name of its parameter, as in torch.nn.utils.prune
SCOPES = ("global", "layer")
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


def weights_of(model: nn.Module) -> list[Place]:
    """The weights of linear layers and convolutions.

    The output projection of ``nn.MultiheadAttention`` is left out. The attention reads its weight without calling the layer, so
    :mod:`torch.nn.utils.prune` would not apply its mask to the trained weight. Layers of other types, such as ``Conv1D`` of
    transformers, are left out too. Pass them to :func:`saliency` as ``places``.

    Example:
        >>> from torch import nn
        >>> from hesscale.uses.pruning import weights_of
        >>> weights_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
        [(Linear(in_features=2, out_features=3, bias=True), 'weight')]
    """
    uncalled = {module.out_proj for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    return [(module, "weight") for module in model.modules() if isinstance(module, LAYERS) and module not in uncalled]


def saliency(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: LossFunction,
    *,
    places: Sequence[Place] | None = None,
    gradient: bool = False,
    **options: Any,
) -> dict[Place, Tensor]:
    """½ h w² for every weight w, or −g w + ½ h w² with ``gradient=True``; g and h belong to the mean loss.

    The result can be passed to :func:`torch.nn.utils.prune.global_unstructured` as ``importance_scores``. That function ranks by
    magnitude, so it needs nonnegative scores, such as those of HesScaleGN without the gradient term.

    If several modules share a weight, its score is for setting it to zero in all of them. But :mod:`torch.nn.utils.prune` masks
    it only in the module that ``places`` names.

    Args:
        places: modules with the names of their parameters; :func:`weights_of` the model by default.
        gradient: add the first-order term.
        options: of :func:`hesscale.uses.mean_derivatives`, such as ``method`` and ``max_batches``. By default, h is HesScaleGN,
            whose error differs between layers. With ``num_samples=1, calibrate=True``, the sum over each layer is unbiased.

    Example:
        >>> import torch
        >>> from hesscale.uses.pruning import saliency
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> scores = saliency(model, [torch.tensor([[1.0, 2.0]])], lambda model, x: model(x).square().mean())
        >>> scores[model, "weight"]
        tensor([[ 9., 36.]])
    """
    found = mean_derivatives(model, loader, loss_fn, **options).of
    names = {id(p): name for name, p in model.named_parameters()}
    scores = {}
    for module, name in weights_of(model) if places is None else places:
        parameter = original(module, name)
        if names.get(id(parameter)) not in found:
            path = next((path for path, other in model.named_modules() if other is module), type(module).__name__)
            raise ValueError(
                f"{f'{path}.{name}'.lstrip('.')} is not a parameter of the model that requires gradients, so it has no score; "
                "pass places= without it"
            )
        derivatives = found[names[id(parameter)]]
        w = getattr(module, name).detach()
        score = derivatives.diagonal * w * w / 2
        scores[module, name] = score - derivatives.gradient * w if gradient else score
    return scores


def prune_weights(scores: Mapping[Place, Tensor], sparsity: float, *, scope: str = "global") -> None:
    """Mask the weights with the lowest scores, until the fraction ``sparsity`` of all weights is zero.

    Weights that are already masked stay masked, and count towards this fraction. The masks are those of
    :mod:`torch.nn.utils.prune`, whose ``remove`` makes them permanent.

    Args:
        scores: as :func:`saliency` returns them. Weights with an infinite score are never masked.
        sparsity: from 0 to 1.
        scope: ``"global"`` to rank the weights of all layers together, ``"layer"`` to prune the same fraction of each.

    Example:
        >>> import torch
        >>> from hesscale.uses.pruning import prune_weights
        >>> layer = torch.nn.Linear(4, 1)
        >>> prune_weights({(layer, "weight"): torch.tensor([[3.0, 1.0, -2.0, 4.0]])}, 0.5)
        >>> layer.weight_mask
        tensor([[1., 0., 0., 1.]])
    """
    check(scores, sparsity, scope)
    masks = [mask_of(place) for place in scores]
    ranked = [score.masked_fill(mask == 0, -torch.inf).flatten() for score, mask in zip(scores.values(), masks, strict=True)]
    apply(scores, [kept.view_as(mask) for kept, mask in zip(keep(ranked, sparsity, scope), masks, strict=True)])


def prune_channels(scores: Mapping[Place, Tensor], sparsity: float, *, scope: str = "global", dim: int | None = None) -> None:
    """Mask the channels with the lowest sum of scores, until the fraction ``sparsity`` of all channels is zero.

    With ``scope="global"``, channels of all layers are ranked together, and the best channel of each layer is never masked.

    Args:
        scores: as :func:`saliency` returns them. Leave out the output layer.
        sparsity: from 0 to 1.
        scope: ``"global"`` or ``"layer"``, as in :func:`prune_weights`.
        dim: the dimension of the channels. None means the outputs of linear layers and convolutions: 1 for transposed
            convolutions, and 0 for all others.

    Example:
        >>> import torch
        >>> from hesscale.uses.pruning import prune_channels
        >>> layer = torch.nn.Linear(2, 2)
        >>> prune_channels({(layer, "weight"): torch.tensor([[3.0, 3.0], [1.0, 4.0]])}, 0.5)
        >>> layer.weight_mask
        tensor([[1., 1.],
                [0., 0.]])
    """
    check(scores, sparsity, scope)
    masks = [mask_of(place) for place in scores]
    dims = [output_dim(module) if dim is None else dim for module, _ in scores]
    if any(not -mask.dim() <= d < mask.dim() for mask, d in zip(masks, dims, strict=True)):
        raise ValueError(f"dim={dim} is not a dimension of all of the weights, which have {[mask.dim() for mask in masks]}")
    rows = [
        score.masked_fill(mask == 0, 0).movedim(d, 0).flatten(1)
        for score, mask, d in zip(scores.values(), masks, dims, strict=True)
    ]
    alive = [mask.movedim(d, 0).flatten(1).any(1) for mask, d in zip(masks, dims, strict=True)]
    ranked = [row.sum(1).masked_fill(~is_alive, -torch.inf) for row, is_alive in zip(rows, alive, strict=True)]
    if scope == "global":
        for total, is_alive in zip(ranked, alive, strict=True):
            if is_alive.any():
                total[total.argmax()] = torch.inf
    kept = keep(ranked, sparsity, scope)
    shapes = [[-1 if k == d % mask.dim() else 1 for k in range(mask.dim())] for mask, d in zip(masks, dims, strict=True)]
    apply(scores, [mask * k.view(shape) for mask, k, shape in zip(masks, kept, shapes, strict=True)])


def output_dim(module: nn.Module) -> int:
    """The dimension of a weight that indexes the layer's outputs."""
    if not isinstance(module, LAYERS):
        raise ValueError(f"it is not known which dimension of the weight of {type(module).__name__} is the output; pass dim=")
    if not isinstance(module, TRANSPOSED):
        return 0
    if module.groups > 1:
        raise ValueError(f"no dimension of the weight of {module} is the output, since it has groups; pass dim=0 or dim=1")
    return 1


def original(module: nn.Module, name: str) -> Any:
    """The parameter itself, which torch.nn.utils.prune renames from ``weight`` to ``weight_orig``."""
    found = getattr(module, f"{name}_orig", None)
    return getattr(module, name) if found is None else found


def mask_of(place: Place) -> Tensor:
    module, name = place
    mask = getattr(module, f"{name}_mask", None)
    return torch.ones_like(getattr(module, name)) if mask is None else mask


def check(scores: Mapping[Place, Tensor], sparsity: float, scope: str) -> None:
    if not scores:
        raise ValueError("there are no scores, so there is nothing to prune")
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be from 0 to 1, not {sparsity}")
    if scope not in SCOPES:
        raise ValueError(f"scope={scope!r} is not one of {', '.join(map(repr, SCOPES))}")
    for (module, name), score in scores.items():
        if score.shape != getattr(module, name).shape:
            shape = tuple(getattr(module, name).shape)
            raise ValueError(f"the scores of {name} have shape {tuple(score.shape)}, but {name} has {shape}")
        if score.isnan().any() or not score.is_floating_point():
            raise ValueError(f"the scores of {name} of {module} must be floating-point numbers without NaN")
    if len({id(original(*place)) for place in scores}) < len(scores):
        raise ValueError("two places share a parameter, which torch.nn.utils.prune would separate; pass only one of them")


def keep(ranked: Sequence[Tensor], sparsity: float, scope: str) -> list[Tensor]:
    """Masks: 0 for the fraction ``sparsity`` of lowest entries, overall or in each tensor, and 1 for others and infinite ones."""
    if scope == "layer":
        return [keep([scores], sparsity, "global")[0] for scores in ranked]
    together = torch.cat(list(ranked))
    kept = torch.ones_like(together)
    count = min(round(sparsity * len(together)), int((together < torch.inf).sum()))
    kept[together.argsort(stable=True)[:count]] = 0
    return list(kept.split([len(scores) for scores in ranked]))


def apply(scores: Mapping[Place, Tensor], masks: Sequence[Tensor]) -> None:
    for (module, name), mask in zip(scores, masks, strict=True):
        prune.custom_from_mask(module, name, mask)
