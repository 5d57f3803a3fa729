"""Cases: Fourier transforms."""

from __future__ import annotations

import torch

from .table import case

fft, as_real, as_complex = torch.fft, torch.view_as_real, torch.view_as_complex

for norm in ("backward", "ortho", "forward"):
    for n in (4, 5):
        case(f"fft {norm}, {n}", lambda x, norm=norm: as_real(fft.fft(x, norm=norm)), (2, n), low_precision=False)
        case(f"rfft {norm}, {n}", lambda x, norm=norm: as_real(fft.rfft(x, norm=norm)), (2, n), low_precision=False)
        complex_input = (n // 2 + 1, 2)
        case(
            f"irfft {norm}, {n}",
            lambda x, norm=norm, n=n: fft.irfft(as_complex(x), n=n, norm=norm),
            (2, *complex_input),
            low_precision=False,
        )
        for name in ("fft", "ifft"):
            case(
                f"{name} of complex numbers {norm}, {n}",
                lambda x, norm=norm, name=name: as_real(getattr(fft, name)(as_complex(x), norm=norm)),
                (2, n, 2),
                low_precision=False,
            )
case("fft dim", lambda x: as_real(fft.fft(x, dim=0)), (4, 3), low_precision=False)
case("fft real part", lambda x: fft.fft(x).real, (3, 4), low_precision=False)
case("fft imaginary part", lambda x: fft.fft(x).imag, (3, 5), low_precision=False)
case("fft padded", lambda x: fft.fft(x, n=6).real, (3, 4), low_precision=False)
case("fft cut", lambda x: fft.fft(x, n=3).real, (3, 4), low_precision=False)
case("fft transposed", lambda x: fft.fft(x.mT).real, (3, 4), low_precision=False)
case("fft2", lambda x: as_real(fft.fft2(x)), (2, 3, 4), low_precision=False)
case("fft2 real part", lambda x: fft.fft2(x).real, (2, 3, 4), low_precision=False)
case("ifft2 of complex numbers", lambda x: as_real(fft.ifft2(as_complex(x))), (3, 4, 2), low_precision=False)
case("rfft2", lambda x: as_real(fft.rfft2(x)), (3, 5), low_precision=False)
case("irfft2", lambda x: fft.irfft2(as_complex(x), s=(3, 4)), (3, 3, 2), low_precision=False)
case("irfft2 odd", lambda x: fft.irfft2(as_complex(x), s=(4, 5), norm="ortho"), (4, 3, 2), low_precision=False)
case("hfft", lambda x: fft.hfft(as_complex(x), n=5), (3, 2), low_precision=False)
case("ihfft", lambda x: as_real(fft.ihfft(x).resolve_conj()), (2, 5), low_precision=False)
# Of a whole chain the rules are exact where the transforms go along different dimensions, as in FNet.
case("fnet", lambda x: fft.fft(fft.fft(x, dim=-1), dim=-2).real, (2, 4, 3), low_precision=False)
case("fft and rfft", lambda x: as_real(fft.fft(fft.rfft(x, dim=-1), dim=-2)), (4, 5), low_precision=False)
case("fftshift", lambda x: fft.fftshift(fft.fft(x)).real, (2, 4), low_precision=False)
case(
    "stft",
    lambda x: as_real(torch.stft(x, 8, hop_length=8, center=False, window=torch.ones_like(x[:8]).detach(), return_complex=True)),
    (16,),
    low_precision=False,
)
