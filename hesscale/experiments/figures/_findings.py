"""Findings: sentences about results, with numbers. A finding is left out if the runs do not support it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..lab.plots import Finding
from ..lab.statistics import Summary

ERRORS = 2  # a result is better than another one if they differ by more than this number of standard errors


def highest(
    what: str, results: Mapping[str, Summary], text: Callable[[str, Summary], str], figure: str, start: str = ""
) -> list[Finding]:
    """The best of several methods, and how much it differs from Adam, or from the next best one if it is Adam.

    Args:
        what: a quantity of which more is better.
        results: means over seeds. Methods with a single seed are left out, since their differences may be noise.
        text: formats the result of a method.
        start: the beginning of the sentence.
    """
    known = {label: at for label, at in results.items() if at.error is not None}
    if len(known) < 2:
        return []
    best, *others = sorted(known, key=lambda label: -known[label].mean)
    other = next((label for label in others if label == "Adam"), others[0])
    differ = is_better(known[best], known[other])
    end = "" if differ else f" The difference is within {ERRORS} standard errors."
    sentence = f"{best} has the highest {what}, {text(best, known[best])}; {other} has {text(other, known[other])}."
    return [Finding(f"{start}{sentence}{end}", figure)]


def is_better(one: Summary, other: Summary) -> bool:
    return one.mean - other.mean > ERRORS * math.hypot(one.error or 0, other.error or 0)


def divergence_findings(counts: Mapping[str, tuple[int, int]], start: str = "") -> list[Finding]:
    """How many runs diverged. ``counts`` has the number of diverged runs and of all runs, for each method."""
    bad = {label: found for label, found in counts.items() if found[0]}
    if not bad:
        return []
    total = sum(runs for _, runs in counts.values())
    where = listed([f"{count} of {runs} with {label}" for label, (count, runs) in bad.items()])
    return [Finding(f"{start}{sum(count for count, _ in bad.values())} of {total} runs diverged: {where}.")]


def listed(parts: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
