"""Progress of a sweep, as bars in a terminal or as occasional lines elsewhere, with a performance metric and the time left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from .experiment import Experiment
from .sweep import SweepProgress
from .terminal import count, duration

SHOWN = 8  # the maximum number of runs with their own bar
FIRST_LINE, SECONDS_BETWEEN_LINES = 5.0, 20.0


class Pace:
    """The speed of a command and the time left, from the work that it has done so far."""

    def __init__(self, experiment: Experiment, total: int) -> None:
        self.experiment, self.total, self.began = experiment, total, time.monotonic()
        self.first: dict[str, int] = {}  # by run: the work that was done when it was first seen, and when it was last seen
        self.last: dict[str, tuple[int, int]] = {}
        self.finished_before: int | None = None
        self.share = 0.0  # the fraction of all work that is done
        self.share_before = 0.0  # the fraction of all work that earlier commands did

    def update(self, watched: SweepProgress) -> None:
        if self.finished_before is None:
            self.finished_before = watched.finished
        for key, (_, done, total) in watched.running.items():
            self.first.setdefault(key, done if total else 0)
            self.last[key] = done, total
        for key in [key for key in self.last if key not in watched.running]:
            self.last[key] = self.last[key][1], self.last[key][1]
        running = sum(done / total for _, done, total in watched.running.values() if total)
        resumed = sum(self.first[key] / total for key, (_, total) in self.last.items() if total)
        self.share = (watched.finished + watched.failed + running) / self.total
        self.share_before = (self.finished_before + resumed) / self.total

    @property
    def text(self) -> str:
        """The speed and the time left, as text."""
        seconds, done = time.monotonic() - self.began, sum(self.last[key][0] - self.first[key] for key in self.last)
        gained = self.share - self.share_before
        if seconds <= 0 or done <= 0 or gained <= 0:
            return ""
        speed = done / seconds
        written = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        left = f", {duration(seconds * (1 - self.share) / gained)} left" if self.share < 1 else ""
        return f"{written} {self.experiment.unit}/s{left}"


def learned(experiment: Experiment, watched: SweepProgress) -> str:
    """The last value of the watched metric. For several runs in progress, it is the median, since some may diverge."""
    values = [*watched.learned.values()]
    if not values:
        return ""
    return f"{'median ' if len(values) > 1 else ''}{experiment.watched.name} {statistics.median(values):.4g}"


def progress_lines(console: Console, experiment: Experiment, total: int) -> Callable[[SweepProgress], None]:
    """Print occasional lines, if the output is not a terminal."""
    pace = Pace(experiment, total)
    next_line = time.monotonic() + FIRST_LINE

    def say(watched: SweepProgress) -> None:
        nonlocal next_line
        pace.update(watched)
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            failed = f", {watched.failed} failed" if watched.failed else ""
            parts = [f"{watched.finished} of {count(total, 'run')}{failed}", f"{pace.share:.0%}"]
            console.print(", ".join(filter(None, [*parts, learned(experiment, watched), pace.text])), highlight=False)

    return say


def progress_bars(progress: Progress, experiment: Experiment, total: int) -> Callable[[SweepProgress], None]:
    """Draw a bar for all runs, and one for each of the first that are running."""
    pace, each = Pace(experiment, total), dict[str, TaskID]()
    whole = progress.add_task("", total=total, text="")

    def draw(watched: SweepProgress) -> None:
        pace.update(watched)
        more = len(watched.running) - SHOWN
        label = f"{watched.finished} of {count(total, 'run')}" + (f", {watched.failed} failed" if watched.failed else "")
        label += f", {more} more running" if more > 0 else ""
        progress.update(whole, description=label, completed=pace.share * total, text=pace.text)
        for key in [key for key in each if key not in watched.running]:
            progress.remove_task(each.pop(key))
        for key, (label, done, all_of_it) in watched.running.items():
            if key not in each and len(each) < SHOWN:
                each[key] = progress.add_task("", total=None, text="")
            if key in each:
                value = watched.learned.get(key)
                text = "" if value is None else f"{experiment.watched.name} {value:.4g}"
                progress.update(each[key], description=f"  {label}", completed=done, total=all_of_it or None, text=text)

    return draw


def bars(console: Console) -> Progress:
    label = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1), markup=False)
    share = TextColumn("{task.percentage:>3.0f}%")
    text: Any = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True), markup=False)
    return Progress(label, BarColumn(bar_width=12), share, text, console=console, expand=True)
