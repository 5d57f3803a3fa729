"""Cases: pooling, interpolation, padding, dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .table import NEW_TORCH, between, case, exactly, normal

case("max_pool1d", lambda x: F.max_pool1d(x, 3), (2, 3, 9))
case("max_pool1d overlapping", lambda x: F.max_pool1d(x, 3, stride=1, padding=1, dilation=2, ceil_mode=True), (2, 3, 9))
case("max_pool1d unbatched", lambda x: F.max_pool1d(x, 2), (3, 8))
case("max_pool2d", lambda x: F.max_pool2d(x, 2), (2, 3, 6, 8))
case("max_pool2d overlapping", lambda x: F.max_pool2d(x, 3, stride=(1, 2), padding=1, ceil_mode=True), (2, 2, 5, 6))
case("max_pool2d dilated", lambda x: F.max_pool2d(x, (2, 3), stride=1, dilation=2), (1, 2, 5, 6))
case("max_pool2d indices", lambda x: F.max_pool2d(x, 2, return_indices=True), (1, 2, 4, 4))
case("max_pool2d unbatched", lambda x: F.max_pool2d(x, 2), (2, 4, 5))
case("max_pool2d transposed", lambda x: F.max_pool2d(x.transpose(2, 3), 2), (2, 2, 4, 6))
case("max_pool2d channels last", lambda x: F.max_pool2d(x.permute(0, 3, 1, 2), 2), (2, 4, 6, 3))
case("max_pool2d tie", lambda x: F.max_pool2d(x, 2, stride=1), exactly([[[[1, 1, 0], [0, 1, 1], [1, 1, 1]]]]))
case("max_pool3d", lambda x: F.max_pool3d(x, 2), (2, 2, 4, 4, 5))
case("max_pool3d overlapping", lambda x: F.max_pool3d(x, 3, stride=2, padding=1, ceil_mode=True), (1, 2, 4, 5, 4))
case("max_pool3d dilated", lambda x: F.max_pool3d(x, 2, stride=1, dilation=(1, 2, 1)), (1, 1, 3, 4, 3))
case("max_pool3d tie", lambda x: F.max_pool3d(x, 2, stride=1), exactly([[[[[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 1]]]]]))

case("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 4), (2, 3, 7))
case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (3, 2)), (2, 2, 5, 7))
case("adaptive_max_pool2d upward", lambda x: F.adaptive_max_pool2d(x, (7, None)), (1, 2, 4, 3))
case("adaptive_max_pool2d global", lambda x: F.adaptive_max_pool2d(x, 1), (2, 2, 3, 4))
case("adaptive_max_pool2d tie", lambda x: F.adaptive_max_pool2d(x, 2), exactly([[[[1, 1, 1], [1, 1, 1], [1, 1, 0]]]]))
case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, (2, 3, 1)), (1, 2, 3, 5, 4))
# the windows are drawn in the dtype of the input
case("fractional_max_pool2d", lambda x: F.fractional_max_pool2d(x, 2, output_size=4), (2, 2, 7, 6), low_precision=False)
case(
    "fractional_max_pool2d ratio",
    lambda x: F.fractional_max_pool2d(x, 3, output_ratio=(0.7, 0.6), return_indices=True),
    (1, 2, 8, 7),
    low_precision=False,
)
case(
    "fractional_max_pool3d", lambda x: F.fractional_max_pool3d(x, 2, output_size=(3, 2, 3)), (1, 2, 5, 4, 5), low_precision=False
)


def unpool(pool, unpool, kernel, *shape, stride=None):
    """Unpooling with the indices of a max-pooling; overlapping windows repeat some."""
    source = normal(*shape)(torch.Generator("cpu").manual_seed(0)).to(torch.get_default_device())
    values, indices = pool(source, kernel, stride, return_indices=True)
    return lambda x: unpool(x, indices, kernel, stride, output_size=shape), tuple(values.shape)


case("max_unpool1d", *unpool(F.max_pool1d, F.max_unpool1d, 2, 2, 3, 7))
case("max_unpool2d", *unpool(F.max_pool2d, F.max_unpool2d, 2, 2, 2, 4, 5))
case("max_unpool3d", *unpool(F.max_pool3d, F.max_unpool3d, 2, 1, 2, 4, 5, 4))

case("avg_pool1d", lambda x: F.avg_pool1d(x, 3), (2, 3, 9))
case("avg_pool1d padded", lambda x: F.avg_pool1d(x, 3, stride=2, padding=1, ceil_mode=True), (2, 2, 8))
case("avg_pool1d uncounted", lambda x: F.avg_pool1d(x, 3, stride=2, padding=1, count_include_pad=False), (3, 8))
case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), (2, 3, 6, 8))
case("avg_pool2d one size", lambda x: torch.ops.aten.avg_pool2d(x, [2], [1]), (1, 2, 4, 5))
case("avg_pool2d unbatched", lambda x: F.avg_pool2d(x, (2, 3)), (2, 4, 6))
case("avg_pool2d transposed", lambda x: F.avg_pool2d(x.transpose(2, 3), (2, 3)), (2, 2, 6, 4))
case("avg_pool2d channels last", lambda x: F.avg_pool2d(x.permute(0, 3, 1, 2), 3, 2, padding=1), (2, 4, 6, 3))
for counted in (True, False):
    for partial in (True, False):
        options = {"count_include_pad": counted, "ceil_mode": partial}
        name = f"counted={counted} ceil_mode={partial}"
        case(f"avg_pool2d {name}", lambda x, o=options: F.avg_pool2d(x, (3, 2), (2, 3), padding=(1, 0), **o), (2, 2, 6, 6))
        case(f"avg_pool2d padded {name}", lambda x, o=options: F.avg_pool2d(x, 3, 2, padding=1, **o), (1, 2, 6, 5))
        case(f"avg_pool2d override {name}", lambda x, o=options: F.avg_pool2d(x, 3, 2, 1, divisor_override=5, **o), (1, 2, 6, 5))
        case(
            f"avg_pool3d padded {name}",
            lambda x, o=options: F.avg_pool3d(x, (2, 3, 2), 2, padding=1, **o),
            (1, 2, 3, 4, 4),
            low_precision=False,
        )
case("avg_pool2d overhanging", lambda x: F.avg_pool2d(x, 2, ceil_mode=True), (1, 2, 5, 7))
case("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (2, 2, 4, 4, 5), low_precision=False)
case("avg_pool2d negative override", lambda x: F.avg_pool2d(x, 2, 1, divisor_override=-3), (1, 2, 4, 3))
case("avg_pool3d negative override", lambda x: F.avg_pool3d(x, 2, 1, divisor_override=-3), (1, 2, 3, 4, 3), low_precision=False)
case("avg_pool3d override", lambda x: F.avg_pool3d(x, 2, 1, divisor_override=3), (1, 2, 3, 4, 3), low_precision=False)

case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 4), (2, 3, 7))
case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (2, 2, 5, 7))
case("adaptive_avg_pool2d even", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (2, 2, 6, 4))
case("adaptive_avg_pool2d mixed", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (2, 6, 5))
case("adaptive_avg_pool2d upward", lambda x: F.adaptive_avg_pool2d(x, (7, None)), (1, 2, 4, 3))
case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)), (1, 2, 3, 5, 4))
case("adaptive_avg_pool3d even", lambda x: F.adaptive_avg_pool3d(x, 2), (1, 2, 4, 2, 6))
case("interpolate area", lambda x: F.interpolate(x, size=(3, 4), mode="area"), (1, 2, 5, 6))

SHAPES = {1: (2, 2, 5), 2: (1, 2, 4, 5), 3: (1, 2, 3, 2, 4)}
TARGETS = {
    "up": {"scale_factor": 2},
    "down": {"scale_factor": 0.6},
    "up by 1.7": {"scale_factor": 1.7},
    "recomputed": {"scale_factor": 1.7, "recompute_scale_factor": True},
    "to 7": {"size": 7},
    "to 2": {"size": 2},
}
for rank, shape in SHAPES.items():
    for target, options in TARGETS.items():
        for mode in ("nearest", "nearest-exact"):
            options = {**options, "mode": mode}
            case(f"interpolate {mode} {rank}d {target}", lambda x, o=options: F.interpolate(x, **o), shape)
for mode, rank, antialias in (
    ("linear", 1, False),
    ("bilinear", 2, False),
    ("trilinear", 3, False),
    ("bicubic", 2, False),
    ("bilinear", 2, True),
    ("bicubic", 2, True),
    ("lanczos", 2, True),
):
    if mode == "lanczos" and not NEW_TORCH:
        continue
    for target, options in TARGETS.items():
        for aligned in (False,) if mode == "lanczos" else (False, True):
            options = {**options, "mode": mode, "align_corners": aligned, "antialias": antialias}
            name = f"interpolate {mode} {target}" + " antialias" * antialias + " aligned" * aligned
            case(name, lambda x, o=options: F.interpolate(x, **o), SHAPES[rank], low_precision=not antialias)
case("interpolate bilinear same size", lambda x: F.interpolate(x, size=(4, 5), mode="bilinear"), (1, 2, 4, 5))
case("interpolate bilinear one way", lambda x: F.interpolate(x, size=(4, 8), mode="bilinear"), (1, 2, 4, 5))
case("interpolate bilinear from one", lambda x: F.interpolate(x, size=(3, 6), mode="bilinear"), (2, 2, 1, 4))
case("interpolate bicubic one way", lambda x: F.interpolate(x, size=(7, 5), mode="bicubic"), (1, 2, 4, 5))
case("interpolate bicubic one way by 1.7", lambda x: F.interpolate(x, scale_factor=(1.2, 1.7), mode="bicubic"), (1, 2, 4, 5))
case("interpolate bicubic transposed", lambda x: F.interpolate(x.mT, size=(7, 3), mode="bicubic"), (1, 2, 4, 5))

case("reflection pad 1d", lambda x: F.pad(x, (2, 1), mode="reflect"), (2, 3, 5))
case("reflection pad 2d", lambda x: F.pad(x, (2, 1, 0, 3), mode="reflect"), (2, 2, 4, 3))
case("reflection pad 2d negative", lambda x: F.pad(x, (-1, 2, 1, -1), mode="reflect"), (2, 2, 4, 5))
case("reflection pad 3d", lambda x: F.pad(x, (1, 1, 0, 1, 2, 1), mode="reflect"), (1, 2, 3, 2, 3))
case("replication pad 1d", lambda x: F.pad(x, (2, 3), mode="replicate"), (2, 3, 4))
case("replication pad 2d", lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate"), (2, 2, 2, 3))
case("replication pad 2d unbatched", lambda x: F.pad(x, (-1, 2, 1, 1), mode="replicate"), (2, 2, 3))
case("replication pad 3d", lambda x: F.pad(x, (1, 1, 0, 1, 2, 1), mode="replicate"), (1, 2, 3, 2, 3))

case("dropout", lambda x: F.dropout(x, 0.3), (4, 5))
case("dropout everything", lambda x: F.dropout(x, 1.0), (4, 5))
case("dropout inplace", lambda x: F.dropout(x.clone(), 0.3, inplace=True), (4, 5))
case("dropout1d", lambda x: F.dropout1d(x, 0.3), (3, 4, 2))
case("dropout2d", lambda x: F.dropout2d(x, 0.3), (3, 4, 2, 2))
case("dropout3d", lambda x: F.dropout3d(x, 0.3), (3, 4, 2, 1, 2))
case("alpha_dropout", lambda x: F.alpha_dropout(x, 0.3, training=True), (4, 5))
case("feature_alpha_dropout", lambda x: F.feature_alpha_dropout(x, 0.3, training=True), (3, 4, 2))
case("native_dropout", lambda x: torch.native_dropout(x, 0.3, True), (4, 5))
case("native_dropout everything", lambda x: torch.native_dropout(x, 1.0, True), (4, 5))
case("native_dropout evaluating", lambda x: torch.native_dropout(x, 0.3, False), (4, 5))

for aligned in (False, True):
    name = "aligned" if aligned else "centred"
    case(f"affine_grid 2d {name}", lambda theta, a=aligned: F.affine_grid(theta, [2, 3, 3, 4], align_corners=a), (2, 2, 3))
    case(f"affine_grid 3d {name}", lambda theta, a=aligned: F.affine_grid(theta, [2, 1, 3, 2, 4], align_corners=a), (2, 3, 4))


def sample(mode="bilinear", padding="zeros", aligned=False):
    return lambda x, grid: F.grid_sample(x, grid, mode, padding, aligned)


if NEW_TORCH:
    for mode in ("bilinear", "nearest"):
        for padding in ("zeros", "border", "reflection"):
            for aligned in (False, True):
                name = f"{mode} {padding}" + " aligned" * aligned
                function = sample(mode, padding, aligned)
                case(f"grid_sample 2d {name}", function, (2, 3, 4, 5), between(-1.6, 1.6, 2, 4, 3, 2))
                case(f"grid_sample 3d {name}", function, (1, 2, 3, 2, 4), between(-1.6, 1.6, 1, 2, 3, 2, 3))
    case("grid_sample far away", sample(), (1, 2, 3, 4), between(-4, 4, 1, 5, 5, 2))
    case("grid_sample corners", sample(aligned=True), (1, 2, 3, 4), exactly([[[[-1, -1], [1, 1], [-1, 1], [1, -1]]]]))
    case("grid_sample one pixel", sample(padding="reflection", aligned=True), (1, 2, 1, 4), (1, 5, 5, 2))
    case("grid_sample constant grid", lambda x: sample()(x, torch.linspace(-1, 1, 12).view(1, 3, 2, 2).to(x)), (1, 2, 3, 4))
    case("grid_sample constant input", lambda grid: sample()(torch.arange(24).view(1, 2, 3, 4).to(grid), grid), (1, 3, 2, 2))
