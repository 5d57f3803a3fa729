"""Numbers as short text."""

from __future__ import annotations

import re


def compact(number: float) -> str:
    """Six digits at most, and an exponent without zeros in front.

    >>> compact(1e-7), compact(0.0003), compact(2_000_000)
    ('1e-7', '0.0003', '2e6')
    """
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{number:g}")
