"""Cases: complex tensors between real ones. Operators that keep entries apart stay exact one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .table import case, exactly

as_real, as_complex = torch.view_as_real, torch.view_as_complex


def between_reals(name: str, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
    """``function`` of complex tensors with these shapes."""

    def run(*inputs: Tensor) -> Tensor:
        y = function(*[as_complex(x) for x in inputs])
        return as_real(y) if y.is_complex() else y

    case(f"complex {name}", run, *[(*shape, 2) for shape in shapes], low_precision=False)


def unit(*shape: int) -> Tensor:
    """Complex numbers off both axes."""
    n = torch.Size(shape).numel()
    return torch.polar(torch.linspace(0.5, 1.5, n), torch.linspace(0.3, 2.8, n)).reshape(shape)


def turned(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Between two rotations, so that the real and imaginary parts share second derivatives."""
    return lambda z: (function(z * unit(*z.shape)) * (0.6 + 0.8j)).resolve_conj()


case("complex from parts", lambda a, b: as_real(torch.complex(a, b)), (2, 3), (2, 3), low_precision=False)
case("complex from parts, turned", lambda a, b: as_real(torch.complex(a, b) * unit(3)), (2, 3), (2, 3), low_precision=False)
case("complex from one part", lambda a: as_real(torch.complex(a, torch.ones_like(a))), (2, 3), low_precision=False)
case("complex times real", lambda x: as_real(x * unit(2, 3)), (2, 3), low_precision=False)
case("complex times real row", lambda x: as_real(x * unit(2, 3)), (3,), low_precision=False)
case("complex plus real", lambda x: as_real(x + unit(2, 3)), (3,), low_precision=False)
case("complex minus scaled real", lambda x: as_real(torch.sub(unit(2, 3), x, alpha=3)), (2, 3), low_precision=False)
case("complex abs at 0", lambda x: as_complex(x).abs(), exactly([[0.0, 0.0], [3.0, -4.0]]), low_precision=False)
case("complex from real", lambda x: as_real(x.to(x.dtype.to_complex())), (2, 3), low_precision=False)
case("complex from real, turned", lambda x: as_real(x.to(x.dtype.to_complex()) * unit(2, 3)), (2, 3), low_precision=False)
between_reals("real part", lambda z: z.real, (2, 3))
between_reals("imaginary part", lambda z: z.imag, (2, 3))
between_reals("abs", torch.abs, (2, 3))
between_reals("abs, turned", lambda z: (z * unit(2, 3)).abs(), (2, 3))
between_reals("mul", torch.mul, (2, 3), (3,))
between_reals("mul by a number", lambda z: z * (2 - 1j), (2, 3))
between_reals("mul by a real tensor", lambda z: z * unit(2, 3).abs(), (2, 3))
between_reals("add", lambda a, b: torch.add(a, b, alpha=2), (2, 3), (3,))
between_reals("add, complex scale", lambda a, b: torch.add(a, b, alpha=2 - 1j), (2, 3), (3,))
between_reals("sub", lambda a, b: (a - b) * unit(2, 3), (2, 3), (2, 1))
between_reals("sum", lambda z: z.sum(), (2, 3))
between_reals("sum dim", lambda z: z.sum(1, keepdim=True) * (1 + 2j), (2, 3))
between_reals("mm", torch.mm, (2, 3), (3, 2))
between_reals("mm of conjugates", lambda a, b: a.mH @ b.conj(), (3, 2), (3, 2))
between_reals("mm left only", lambda a: torch.mm(a, unit(3, 2).to(a.dtype)), (2, 3))
between_reals("bmm", torch.bmm, (2, 2, 3), (2, 3, 2))
between_reals("einsum", lambda a, b: torch.einsum("bix,iox->box", a, b), (2, 3, 2), (3, 2, 2))
between_reals("cat", lambda a, b: torch.cat([a, b * unit(1, 3)]) * unit(3, 3), (2, 3), (1, 3))
between_reals("stack", lambda a, b: torch.stack([a, b]) * (1 + 2j), (2, 3), (2, 3))
between_reals("rotary embedding", lambda q: q.reshape(2, 3, 2) * unit(3, 1), (2, 6))
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": torch.clone,
    "conj": torch.conj,
    "conj_physical": torch.conj_physical,
    "expand": lambda z: z.unsqueeze(0).expand(2, 2, 4),
    "flip": lambda z: z.flip(1),
    "neg": torch.neg,
    "pad": lambda z: torch.nn.functional.pad(z, (1, 2)),
    "permute": lambda z: z.permute(1, 0),
    "repeat": lambda z: z.repeat(2, 1),
    "reshape": lambda z: z.reshape(4, 2),
    "reshape strided": lambda z: z.mT.reshape(2, 4),
    "roll": lambda z: z.roll(1, 1),
    "select": lambda z: z[1],
    "slice": lambda z: z[:, 1::2],
    "split": lambda z: z.split(2, 1)[1],
    "split sizes": lambda z: z.split([1, 3], 1)[1],
    "squeeze": lambda z: z.unsqueeze(1).squeeze(),
    "squeeze dim": lambda z: z.unsqueeze(1).squeeze(1),
    "squeeze dims": lambda z: z.unsqueeze(1).squeeze((1,)),
    "t": torch.t,
    "transpose": lambda z: z.transpose(0, 1),
    "unbind": lambda z: z.unbind(0)[1],
    "view": lambda z: z.view(8),
}
for name, move in MOVES.items():
    between_reals(name, turned(move), (2, 4))
