"""A whole training step as code over tensors: forward pass, gradients, Hessian diagonals and update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .cuda_graph import CudaGraph
from .inductor import compile_graph

Code = Callable[..., Sequence[Any]]


class Mode(Enum):
    """How a step runs."""

    EAGER = "eager"
    TRACED = "traced"
    COMPILED = "compiled"
    TRACED_CUDA_GRAPH = "traced + CUDA graph"
    CUDA_GRAPH = "compiled + CUDA graph"


class Program(ABC):
    """A step as a flat graph, as TorchInductor's code for that graph, or as a CUDA graph of the code.

    Args:
        graph: takes all tensors that a step reads or changes, and changes them in place.
        arguments: the tensors to call the graph with at the next step.
    """

    def __init__(self, graph: GraphModule, arguments: list[Tensor]) -> None:
        self.graph, self.arguments = graph, arguments
        self.code: Code = self.arrange(graph.forward)  # __call__ would run global module hooks
        self.is_compiled = self.has_run = False
        self.cuda_graph: CudaGraph | None = None

    @property
    def mode(self) -> Mode:
        if self.cuda_graph is None:
            return Mode.COMPILED if self.is_compiled else Mode.TRACED
        return Mode.CUDA_GRAPH if self.is_compiled else Mode.TRACED_CUDA_GRAPH

    @abstractmethod
    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether it can make a step with these inputs. If so, set ``arguments`` for that step."""

    @abstractmethod
    def finish(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """Record a step with the optimizer, and return the results that the caller gets."""

    @abstractmethod
    def example(self) -> Sequence[Tensor]:
        """Arguments with which a step changes the weights, to compare compiled code with the graph."""

    @abstractmethod
    def shares_memory(self) -> bool:
        """Whether an argument that the graph changes overlaps with another one. A compiler must then not reorder operators."""

    @abstractmethod
    def copied_arguments(self, moved: set[int]) -> set[int]:
        """The indices of the arguments that a CUDA graph copies at every step; ``moved`` are those whose address has changed."""

    @abstractmethod
    def repetition(self, batch: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor] | None:
        """The last step, which had this batch, as a function of the batch; None if a step does more than run the code."""

    def arrange(self, code: Code) -> Code:
        """Code for the whole step, made from code for the graph."""
        return code

    def __call__(self, arguments: Sequence[Tensor]) -> tuple[Any, ...]:
        """Make a step."""
        is_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad does, in less time
        try:
            with torch._C._DisableAutocast():  # the graph contains the casts
                results = self.code(*arguments) if self.cuda_graph is None else self.cuda_graph.replay(arguments)
        finally:
            torch._C._set_grad_enabled(is_enabled)
        self.has_run = True
        return self.finish(results)

    def compile(self) -> None:
        """Compile the graph with TorchInductor. If that fails, the program does not change."""
        if self.shares_memory():
            raise RuntimeError("tensors that it changes share memory with others, which its code would change in another order")
        self.code = self.arrange(compile_graph(self.graph, [tensor.detach() for tensor in self.example()]))
        self.is_compiled = True

    def capture(self) -> None:
        """Capture the code in a CUDA graph. Capture it again if a tensor that the graph reads in place has moved."""
        moved: set[int] = set()
        copied: set[int] = set()
        if self.cuda_graph is not None:
            moved, copied = self.cuda_graph.moved(self.arguments), {*self.cuda_graph.copied}
            if not moved:
                return
        self.cuda_graph = None  # frees its memory before the new graph takes any
        self.cuda_graph = CudaGraph(self.code, self.arguments, copied | self.copied_arguments(moved))
