"""A step that gets faster in stages: it runs in eager mode first, then traced, compiled, and captured in a CUDA graph."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CompileWarning, NeedsEagerPass
from .make_fx import TRACING, CannotTrace, first_line
from .program import Mode, Program

if TYPE_CHECKING:
    from .graph_step import GraphStep

MAX_BUILDS = 4  # programs of one step; a new one is built when the step's tensors no longer fit
MAX_EAGER_STEPS = 64  # if tracing still needs an eager pass after this many, the step stays in eager mode
logger = logging.getLogger("hesscale.compile")


class StagedStep:
    """The step for inputs of one kind.

    Args:
        source: makes the steps.
        obstacle: why the step has to stay in eager mode; empty if it does not.
    """

    def __init__(self, source: GraphStep, obstacle: str) -> None:
        self.source = source
        self.captures = source.training.cuda_graph and source.optimizer.parameters()[0].is_cuda
        self.program: Program | None = None
        self.builds = 0
        self.eager_steps = 0
        self.next_build: int | None = 1  # the number of eager steps after which to trace; None for never
        self.reason = ""
        if obstacle:
            self.give_up(obstacle)

    @property
    def mode(self) -> Mode:
        return Mode.EAGER if self.program is None else self.program.mode

    @property
    def is_settled(self) -> bool:
        """Whether all later steps will run as the last one did."""
        if self.program is None:
            return self.next_build is None
        return self.program.has_run and (self.program.cuda_graph is not None or not self.captures)

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if self.program is not None and not self.program.fits(inputs):
            self.program = None
            self.eager_steps, self.next_build = 0, 1
        if self.program is None and self.eager_steps == self.next_build:
            with TRACING:
                self.build(inputs)
        if self.program is None:
            outputs = self.source.eager(inputs)
            self.eager_steps += 1
            return outputs
        if self.captures and self.program.has_run:
            self.capture(self.program)
        return self.program(self.program.arguments)

    def build(self, inputs: Sequence[Any]) -> None:
        """Trace the step, and compile and capture it if possible."""
        if self.builds >= MAX_BUILDS:
            self.give_up("the model's tensors or the optimizer's state change their shapes or types again and again")
            return
        if reason := self.source.obstacle(inputs):
            self.give_up(reason)
            return
        try:
            self.program = self.source.program(inputs)
        except NeedsEagerPass as error:
            self.next_build = 2 * self.eager_steps
            if self.next_build > MAX_EAGER_STEPS:
                self.give_up(str(error))
            return
        except CannotTrace as error:
            changed = sorted({name for _, name, _ in self.source.optimizer.hyperparameters.arguments} - {"lr"})
            cause = f" (perhaps because {', '.join(changed)} changed)" if changed else ""
            self.give_up(f"it cannot be traced: {error}{cause}")
            return
        self.builds += 1
        self.source.training.compilations += 1
        self.reason = ""
        if self.source.training.backend == "inductor":
            self.compile(self.program)

    def compile(self, program: Program) -> None:
        logger.info("compiling a training step of %d operators", len(program.graph.graph.nodes))
        started = time.perf_counter()
        try:
            program.compile()
        except Exception as error:  # of any kind: the graph can still run without the compiler
            self.reason = f"TorchInductor cannot compile it: {first_line(error)}"
            warn(f"the step runs as a graph that is not compiled; {self.reason}")
        logger.info("compiling took %.1f s", time.perf_counter() - started)

    def capture(self, program: Program) -> None:
        try:
            program.capture()
        except RuntimeError as error:
            self.captures, self.reason = False, f"it cannot be captured in a CUDA graph: {first_line(error)}"
            warn(f"the step runs without a CUDA graph; {self.reason}")

    def give_up(self, reason: str) -> None:
        self.next_build, self.reason = None, reason
        warn(f"the step runs in eager mode; {reason}")


def warn(message: str) -> None:
    """Warn at the innermost calling line that is neither in this package nor in torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("hesscale", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, CompileWarning, stacklevel=level)
