"""Numbers as short text, and rounded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

DIGITS = 5


def compact(number: float) -> str:
    """Six digits at most, and an exponent without zeros in front.

    >>> compact(1e-7), compact(0.0003), compact(2_000_000)
    ('1e-7', '0.0003', '2e6')
    """
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{number:g}")


def rounded(values: Iterable[float]) -> list[float | None]:
    """Numbers with few digits, to keep files small; None for those that are not finite, which JSON does not have.

    >>> rounded([1 / 3, float("nan")])
    [0.33333, None]
    """
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values]


def tick(value: float) -> str:
    """A number along an axis.

    >>> tick(20_000), tick(-1_500_000), tick(0.25), tick(500), tick(1e-7), tick(1e12)
    ('20k', '−1.5M', '0.25', '500', '1e−7', '1e12')
    """
    for power, unit in ((1e6, "M"), (1e3, "k")):
        if power <= abs(value) < 1000 * power:
            return f"{value / power:g}{unit}".replace("-", "−")
    return compact(value).replace("-", "−")
