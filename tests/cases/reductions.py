"""Cases: reductions and running reductions."""

from __future__ import annotations

import math

import torch

from .table import case, exactly, normal, positive

aten = torch.ops.aten
INF = math.inf
WITH_TIES = exactly([[1.0, 3.0, 3.0, -2.0], [-2.0, 0.5, -2.0, -2.0], [4.0, 4.0, 4.0, 4.0]])
WITH_ZEROS = exactly([[1.5, 0.0, -2.0, 0.7], [0.0, 0.8, 0.0, 1.2], [0.9, -1.1, 2.0, 0.4], [0.0, 0.0, 0.0, 0.0]])
ONE_ZERO = exactly([1.5, 0.0, -2.0, 0.7])
WITH_NANS = exactly([[1.0, math.nan, 2.0], [math.nan, math.nan, 0.5]])

case("sum all", lambda x: x.sum(), (3, 4))
case("sum", lambda x: x.sum(1), (3, 4, 2))
case("sum keepdim", lambda x: x.sum(-2, keepdim=True), (3, 4, 2))
case("sum several dims", lambda x: x.sum((-1, 0)), (3, 4, 2))
case("sum no dims", lambda x: x.sum(()), (3, 4))
case("sum all keepdim", lambda x: torch.sum(x, dim=None, keepdim=True), (3, 4))
case("sum scalar", lambda x: x.sum(-1), ())
case("sum empty", lambda x: x.sum(1), (3, 0))
case("sum not contiguous", lambda x: x.transpose(0, 2)[::2].sum((0, -1)), (3, 4, 5))
case("nansum", lambda x: x.nansum(), WITH_NANS)
case("nansum dim", lambda x: x.nansum(-1, keepdim=True), WITH_NANS)
case("nansum dims", lambda x: x.nansum((0, 1)), WITH_NANS)
case("mean all", lambda x: x.mean(), (3, 4))
case("mean", lambda x: x.mean(-1), (3, 4, 2))
case("mean keepdim", lambda x: x.mean((0, -1), keepdim=True), (3, 4, 2))
case("mean no dims", lambda x: x.mean(()), (3, 4))
case("mean scalar", lambda x: x.mean(0), ())
case("cumsum", lambda x: x.cumsum(-2), (3, 4, 2))
case("cumsum scalar", lambda x: x.cumsum(0), ())

case("prod all", lambda x: x.prod(), (3, 2))
case("prod all zero", lambda x: x.prod(), ONE_ZERO)
case("prod all zeros", lambda x: x.prod(), WITH_ZEROS)
case("prod scalar", lambda x: x.prod(), ())
case("prod", lambda x: x.prod(-2), (3, 4, 2))
case("prod keepdim", lambda x: x.prod(0, keepdim=True), (3, 4))
case("prod zeros", lambda x: x.prod(1), WITH_ZEROS)
case("prod dim scalar", lambda x: x.prod(0), ())
case("prod one", lambda x: x.prod(1), (3, 1))
case("prod empty", lambda x: x.prod(1), (3, 0))
case("cumprod", lambda x: x.cumprod(1), (3, 7, 2))
case("cumprod zeros", lambda x: x.cumprod(-1), WITH_ZEROS)
case("cumprod zeros down", lambda x: x.cumprod(0), WITH_ZEROS)
case("cumprod scalar", lambda x: x.cumprod(0), ())

case("logsumexp", lambda x: x.logsumexp(-1), (3, 4, 2))
case("logsumexp keepdim", lambda x: x.logsumexp((0, -1), keepdim=True), (3, 4, 2))
case("logsumexp scalar", lambda x: x.logsumexp(0), ())
case("logsumexp masked", lambda x: x.logsumexp(-1), exactly([[1.0, -INF, 2.0], [-INF, 0.5, -0.3]]))
case("logaddexp by logsumexp", lambda x: torch.logsumexp(x, 0), exactly([[1e3, -1e3], [1e3 + 1, -1e3 - 2]]), low_precision=False)
case("logcumsumexp scalar", lambda x: x.logcumsumexp(0), ())  # else in test_written_out.py: its double backward is wrong at g = 0

case("var all", lambda x: x.var(), (3, 4))
case("var", lambda x: x.var(-1), (3, 4))
case("var population", lambda x: x.var((0, -1), correction=0, keepdim=True), (3, 4, 2))
case("var correction", lambda x: x.var(1, correction=2), (3, 4))
case("var all correction", lambda x: x.var(correction=2.5), (3, 4))
case("std all", lambda x: x.std(), (3, 4))
case("std", lambda x: x.std(-2), (3, 4, 2))
case("std population", lambda x: x.std((0, -1), correction=0, keepdim=True), (3, 4, 2))
case("var_mean", lambda x: torch.var_mean(x, -1), (3, 4))
case("var_mean all", lambda x: torch.var_mean(x, correction=0), (3, 4))
case("var_mean mean only", lambda x: torch.var_mean(x, 0)[1], (3, 4))
case("var_mean var only", lambda x: torch.var_mean(x, 0)[0], (3, 4))
case("std_mean", lambda x: torch.std_mean(x, (0, -1), keepdim=True), (3, 4, 2))
case("std_mean all", lambda x: torch.std_mean(x, correction=3), (3, 4))

case("norm", lambda x: x.norm(), (3, 4))
case("norm dim", lambda x: x.norm(dim=-1, keepdim=True), (3, 4))
case("norm with zero entries", lambda x: x[:3].norm(dim=-1), WITH_ZEROS)
case("norm one entry", lambda x: x.norm(dim=-1), (3, 1))
case("norm scalar", lambda x: torch.linalg.vector_norm(x), ())
for order in (0, 1, 2, 3, 2.5, 1.5, 0.5, -1, -2.5, INF, -INF):
    entries = positive(3, 4, 2) if order < 0 else normal(3, 4, 2)  # tiny entries are all that a negative order sees
    case(f"vector_norm {order}", lambda x, p=order: torch.linalg.vector_norm(x, p, (0, -1)), entries)
case("vector_norm 3 with zero entries", lambda x: torch.linalg.vector_norm(x[:3], 3, -1), WITH_ZEROS)
case("vector_norm 1 with zero entries", lambda x: torch.linalg.vector_norm(x, 1, -1), WITH_ZEROS)
case("vector_norm inf with ties", lambda x: torch.linalg.vector_norm(x, INF, -1, keepdim=True), WITH_TIES)
case("vector_norm -inf with ties", lambda x: torch.linalg.vector_norm(x, -INF), WITH_TIES)
case("vector_norm other dtype", lambda x: torch.linalg.vector_norm(x, 2, -1, dtype=torch.float64), (3, 4))
case("aten norm", lambda x: aten.norm.Scalar(x, 3), (3, 4))
case("aten norm dim", lambda x: aten.norm.ScalarOpt_dim(x, None, [-1]), (3, 4))
case("aten norm dtype", lambda x: aten.norm.ScalarOpt_dtype(x, 3, dtype=torch.float64), (3, 4))
case("aten norm dim dtype", lambda x: aten.norm.ScalarOpt_dim_dtype(x, 1.5, [-2], True, dtype=torch.float64), (3, 4))
case("dist", lambda x, y: torch.dist(x, y), (3, 4), (3, 4))
case("dist broadcast", lambda x, y: torch.dist(x, y, 3), (3, 1, 4), (2, 1))
for order in (1, 1.5, INF):
    case(f"dist {order} broadcast", lambda x, y, p=order: torch.dist(x, y, p), (3, 4), (4,))
case("dist to a constant", lambda x: torch.dist(torch.ones_like(x).detach(), x), (3, 4))
case("renorm", lambda x: torch.renorm(x, 2, 0, 1.9), (4, 3, 2))
for order in (1, 3, INF):
    case(f"renorm {order}", lambda x, p=order: torch.renorm(x, p, -1, 1.5), (3, 4))

case("max all", lambda x: x.max(), (3, 4))
case("max all ties", lambda x: x.max(), WITH_TIES)
case("min all ties", lambda x: x.min(), WITH_TIES)
case("max dim", lambda x: x.max(-1), (3, 4))
case("max dim ties", lambda x: x.max(-1, keepdim=True), WITH_TIES)
case("min dim", lambda x: x.min(1), (3, 4, 2))
case("max scalar", lambda x: x.max(0), ())
case("amax", lambda x: x.amax(-2), (3, 4, 2))
case("amax all ties", lambda x: x.amax(), WITH_TIES)
case("amax dims ties", lambda x: x.view(3, 2, 2).amax((0, -1), keepdim=True), WITH_TIES)
case("amin ties", lambda x: x.amin(-1), WITH_TIES)
case("amin scalar", lambda x: x.amin(0), ())
if torch.__version__ >= "2.12":  # aminmax has no derivative before
    case("aminmax", lambda x: torch.aminmax(x), (3, 4))
    case("aminmax all equal", lambda x: torch.aminmax(x.flatten()), exactly([2.0, 2.0, 2.0]))
    case("aminmax dim ties", lambda x: torch.aminmax(x, dim=-1, keepdim=True), WITH_TIES)
    case("aminmax dim", lambda x: torch.aminmax(x, dim=0), (3, 4))
    case("aminmax min only", lambda x: torch.aminmax(x, dim=-1)[0], (3, 4))
case("cummax", lambda x: x.cummax(-1), (3, 5))
case("cummax ties", lambda x: x.cummax(-1), WITH_TIES)
case("cummin", lambda x: x.cummin(0), (5, 3))
case("cummin scalar", lambda x: x.cummin(0), ())
