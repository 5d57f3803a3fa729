"""Cases: linear maps."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.nn.parallel.distributed import _DDPSink

from .table import NEW_TORCH, case

aten = torch.ops.aten

# the same entries in other positions
case("view", lambda x: x.view(12), (3, 4))
case("view copy", lambda x: torch.view_copy(x, (2, 6)), (3, 4))
case("reshape", lambda x: x.t().reshape(2, 6), (3, 4))
case("unsafe view", lambda x: aten._unsafe_view(x, [2, 6]), (3, 4))
case("reshape alias", lambda x: aten._reshape_alias(x, [2, 6], [6, 1]), (3, 4))
case("reshape alias copy", lambda x: torch._reshape_alias_copy(x, [2, 6], [6, 1]), (3, 4))
case("reshape copy", lambda x: aten._reshape_copy(x, [2, 6]), (3, 4))
case("flatten", lambda x: torch.flatten(x, 1), (3, 4, 2))
case("t", lambda x: x.t(), (3, 4))
case("t copy", torch.t_copy, (3, 4))
case("t inplace", lambda x: x.clone().t_(), (3, 4))
case("transpose", lambda x: x.transpose(0, 1), (3, 4, 2))
case("transpose negative", lambda x: x.transpose(-1, 0), (3, 4, 2))
case("transpose copy", lambda x: torch.transpose_copy(x, 0, 2), (3, 4, 2))
case("transpose inplace", lambda x: x.clone().transpose_(0, -1), (3, 4, 2))
case("permute", lambda x: x.permute(2, 0, 1), (3, 4, 2))
case("permute negative", lambda x: x.permute(-1, 0, -2), (3, 4, 2))
case("permute copy", lambda x: torch.permute_copy(x, (2, 0, 1)), (3, 4, 2))
case("movedim", lambda x: x.movedim(0, -1), (3, 4, 2))
case("swapaxes", lambda x: x.swapaxes(0, 1), (3, 4, 2))
case("squeeze", lambda x: x.squeeze(), (1, 3, 1))
case("squeeze dim", lambda x: x.squeeze(-1), (1, 3, 1))
case("squeeze dim without effect", lambda x: x.squeeze(1), (1, 3, 1))
case("squeeze dims", lambda x: x.squeeze((0, -1)), (1, 3, 1))
case("squeeze copy", torch.squeeze_copy, (1, 3, 1))
case("squeeze dim copy", lambda x: torch.squeeze_copy(x, 0), (1, 3, 1))
case("squeeze dims copy", lambda x: torch.squeeze_copy(x, (0, 2)), (1, 3, 1))
case("squeeze inplace", lambda x: x.clone().squeeze_(), (1, 3, 1))
case("squeeze dim inplace", lambda x: x.clone().squeeze_(-1), (1, 3, 1))
case("squeeze dims inplace", lambda x: x.clone().squeeze_((0, 2)), (1, 3, 1))
case("unsqueeze", lambda x: x.unsqueeze(-1), (3, 4))
case("unsqueeze copy", lambda x: torch.unsqueeze_copy(x, 0), (3, 4))
case("unsqueeze inplace", lambda x: x.clone().unsqueeze_(-2), (3, 4))
case("alias", aten.alias, (3, 4))
case("alias copy", torch.alias_copy, (3, 4))
case("clone", torch.clone, (3, 4))
case("contiguous", lambda x: x.t().contiguous(), (3, 4))
case("lazy clone", torch._lazy_clone, (3, 4))
case("lift", aten.lift, (3, 4))
case("lift fresh", aten.lift_fresh, (3, 4))
case("lift fresh copy", aten.lift_fresh_copy, (3, 4))
case("negative view", torch._neg_view, (3, 4))
case("negative view copy", torch._neg_view_copy, (3, 4))
case("to float32", lambda x: x.to(torch.float32).to(torch.float64), (3, 4))
case("flip", lambda x: x.flip(0, -1), (3, 4))
case("roll", lambda x: x.roll((1, 5), (0, -1)), (3, 4))
case("roll flat", lambda x: x.roll(5), (3, 4))
case("rot90", lambda x: x.rot90(3, (0, -1)), (3, 4))
case("pixel shuffle", lambda x: F.pixel_shuffle(x, 2), (1, 8, 2, 3))
case("pixel unshuffle", lambda x: F.pixel_unshuffle(x, 2), (1, 2, 4, 6))
case("channel shuffle", lambda x: F.channel_shuffle(x, 3), (1, 6, 2, 2))

# some of the entries
case("diagonal", lambda x: x.diagonal(1, -1, 0), (3, 4, 2))
case("diagonal copy", lambda x: torch.diagonal_copy(x, -1), (3, 4))
case("tril", lambda x: x.tril(-1), (2, 3, 4))
case("triu", lambda x: x.triu(1), (2, 3, 4))
case("slice", lambda x: x[1:, ::2], (3, 5))
case("slice copy", lambda x: torch.slice_copy(x, 1, 1, 4, 2), (3, 5))
case("select", lambda x: x[:, -1], (3, 5))
case("select copy", lambda x: torch.select_copy(x, -1, 2), (3, 5))
case("narrow", lambda x: x.narrow(1, -3, 2), (3, 5))
if NEW_TORCH:
    case("narrow copy", lambda x: torch.narrow_copy(x, 1, 2, 2), (3, 5))
case("pack padded sequence", lambda x: nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 1])).data, (3, 2, 4))
case("pack batch first", lambda x: nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 1]), batch_first=True).data, (2, 3, 4))

# parts
case("split", lambda x: x.split(2, -1), (3, 5))
case("split one part", lambda x: x.split(2)[1], (5, 3))
case("split copy", lambda x: torch.split_copy(x, 2)[0], (5, 3))
case("split sizes", lambda x: x.split((1, 4), 1), (3, 5))
case("split sizes copy", lambda x: torch.split_with_sizes_copy(x, (1, 4), 1), (3, 5))
case("unsafe split", lambda x: torch.unsafe_split(x, 2)[::2], (5, 3))
case("unsafe split sizes", lambda x: torch.unsafe_split_with_sizes(x, (1, 4), -1)[1], (3, 5))
case("chunk", lambda x: x.chunk(2, 1)[0], (3, 5))
case("tensor split", lambda x: x.tensor_split(2), (5, 3))
case("unbind", lambda x: x.unbind(-1)[1:], (3, 4))
case("unbind copy", lambda x: torch.unbind_copy(x)[1], (3, 4))

# side by side
case("cat", lambda x, y: torch.cat([x, torch.ones(3, 1, dtype=x.dtype), y], -1), (3, 2), (3, 4))
case("cat same", lambda x: torch.cat([x, x]), (3, 2))
case("cat of two dtypes", lambda x, y: torch.cat([x, y.to(torch.float32)]), (3, 2), (1, 2))
case("stack", lambda x, y: torch.stack([x, y], -1), (3, 2), (3, 2))
case("stack same", lambda x, y: torch.stack([x, y, x], 1), (3, 2), (3, 2))
case("block diag", lambda x, y: torch.block_diag(x, y), (3, 2), (1, 2))
case("block diag same", lambda x: torch.block_diag(x, x), (3, 2))
case("pad", lambda x: F.pad(x, (1, 2, 0, 1), value=3), (3, 4))
case("pad negative", lambda x: F.pad(x, (-1, 2)), (3, 4))
case("pad circular", lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"), (1, 3, 4))
case("pad circular 2d", lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"), (1, 1, 3, 4))
case("diag embed", lambda x: x.diag_embed(1, 0, -1), (3, 4))
case("diag of a vector", torch.diag, (3,))
case("diag of a matrix", lambda x: torch.diag(x, 1), (3, 4))

# one written over the other
case("slice scatter", lambda x, y: x.slice_scatter(y, 1, 1, 5, 2), (3, 5), (3, 2))
case("slice scatter same", lambda x: x.slice_scatter(x, 0), (3, 5))
case("select scatter", lambda x, y: x.select_scatter(y, -1, 2), (3, 5), (3,))
case("diagonal scatter", lambda x, y: x.diagonal_scatter(y, 1), (3, 4), (3,))
case("as strided scatter", lambda y: torch.ones(3, 4, dtype=y.dtype).as_strided_scatter(y, (2, 2), (1, 5), 2), (2, 2))

# memory
case("as strided", lambda x: x.as_strided((2, 2), (5, 1), 1), (3, 4))
case("as strided inplace", lambda x: x.clone().as_strided_((2, 2), (5, 1), 1), (3, 4))
case("as strided copy", lambda x: torch.as_strided_copy(x, (2, 2), (5, 1), 1), (3, 4))
case("as strided overlapping", lambda x: x.as_strided((3, 3), (1, 1)), (3, 4))
case("as strided of strided", lambda x: x.t().as_strided((2, 3), (1, 4), 1), (3, 4))
case(
    "as strided of shared memory",
    lambda x: x.as_strided((2, 3), (1, 1)),
    lambda generator: torch.randn(4, generator=generator, dtype=torch.float64).expand(3, 4),
    low_precision=False,  # a cast gives each entry its own memory
)

# entries repeated, entries added up
case("expand", lambda x: x.expand(5, 3), (1, 3))
case("expand copy", lambda x: torch.expand_copy(x, (5, 3)), (1, 3))
case("expand scalar", lambda x: x.expand(2, 3), ())
case("repeat", lambda x: x.repeat(2, 1, 3), (3, 2))
case("repeat zero times", lambda x: x.repeat(2, 0), (3, 2))
case("tile", lambda x: x.tile(2, 2), (3,))
case("unfold", lambda x: x.unfold(-1, 3, 1), (2, 5))
case("unfold copy", lambda x: torch.unfold_copy(x, 0, 2, 1), (5, 2))
case("im2col", lambda x: F.unfold(x, 2, dilation=2, padding=1, stride=1), (1, 2, 4, 3))
case("col2im", lambda x: F.fold(x, (4, 3), 2, stride=1), (1, 4, 6))
case("trace", torch.trace, (3, 4))

# what was there before is gone
case("copy", lambda x, y: x.clone().copy_(y), (3, 4), (4,))
case("copy into a constant", lambda x: torch.zeros(3, 4, dtype=torch.float64).copy_(x), (3, 4))
case("fill", lambda x: torch.fill(x, 2.0), (3, 4))
case("fill inplace", lambda x: x.clone().fill_(2.0), (3, 4))
case("fill with a tensor", lambda x, y: torch.fill(x, y), (3, 4), ())
case("fill with a tensor inplace", lambda x, y: x.clone().fill_(y), (3, 4), ())
case("zero", lambda x: x.clone().zero_(), (3, 4))


class Scale(nn.Module):
    """A module whose backward hook sees two outputs, one of which has no gradient."""

    def forward(self, x, y):
        return x.view_as(x), y, torch.ones(3)


def hooked(x, y):
    module = Scale()
    module.register_full_backward_hook(lambda *_: None)
    return module(x, y)


wrapper = SimpleNamespace(_ddp_sink_clone=True, reducer=None, static_graph=False, post_backward=lambda: None)

case("module hook", hooked, (3, 4), (2,))
case("ddp sink", lambda x, y: _DDPSink.apply(lambda: wrapper, x, y), (3, 4), (2,))
case("fsdp hook", lambda x, y: RegisterPostBackwardFunction.apply(wrapper, x, y), (3, 4), (2,))
