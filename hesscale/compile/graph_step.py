"""Training by one forward graph that TorchDynamo captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from .aliasing import overlaps
from .dynamo import ForwardGraph
from .fx_graphs import mutated_arguments
from .make_fx import CannotTrace, trace
from .optimizer import FunctionalOptimizer
from .program import Mode, Program
from .signature import UNUSUAL, tensor_signature
from .staged import StagedStep

MAX_STEPS = 16  # of one forward graph, by options of the optimizer


@dataclass
class Training:
    """What all graphs of a compiled step share.

    Attributes:
        model: the model.
        optimizer: trains.
        backend: ``"inductor"``, ``"traced"`` or ``"eager"``.
        cuda_graph: whether to capture compiled steps in a CUDA graph.
        mode, reason: how the last step ran, and why in no better way.
        compilations: how many programs were made.
        last: made the last step, unless that was in eager mode by the model's own code.
    """

    model: nn.Module
    optimizer: FunctionalOptimizer
    backend: str
    cuda_graph: bool
    mode: Mode = Mode.EAGER
    reason: str = ""
    compilations: int = 0
    last: StagedStep | None = None


class GraphStep:
    """Steps by one forward graph; Dynamo calls it with the inputs of that graph while its guards hold."""

    def __init__(self, forward: ForwardGraph, training: Training) -> None:
        self.forward, self.training, self.optimizer = forward, training, training.optimizer
        self.steps: dict[object, StagedStep] = {}
        self.signature: object = None
        self.step: StagedStep | None = None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        training = self.training
        signature = self.optimizer.signature()
        if self.step is None or signature != self.signature:
            self.signature, self.step = signature, self.step_for(signature)
        step = training.last = self.step
        outputs = step(inputs)
        training.mode, training.reason = step.mode, step.reason
        return outputs

    def step_for(self, signature: object) -> StagedStep:
        """The step for such options of the optimizer; a new one takes the place of the oldest where there are too many."""
        try:
            found = self.steps.get(signature)
        except TypeError:  # an option that cannot be a key
            return self.new_step("an option of the optimizer is neither a number nor hashable")
        if found is None:
            if len(self.steps) >= MAX_STEPS:
                self.steps.pop(next(iter(self.steps)))
            found = self.steps[signature] = self.new_step(self.optimizer.obstacle())
        return found

    def new_step(self, obstacle: str) -> StagedStep:
        captures = self.training.cuda_graph and self.optimizer.parameters()[0].is_cuda
        return StagedStep(self, compiles=self.training.backend == "inductor", captures=captures, obstacle=obstacle)

    def eager(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A step in eager mode, by the operators of the forward graph."""
        with torch.enable_grad():
            outputs = self.forward.run(*inputs)
        own = {id(p) for p in self.optimizer.parameters()}
        others = [x for x in inputs if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in own]
        self.optimizer.train(outputs[self.forward.loss], others)
        return tuple([output.detach() for output in outputs])

    def obstacle(self, inputs: Sequence[Any]) -> str:
        if not all(isinstance(x, Tensor) for x in inputs):
            return "it reads a value of Python that changes at every step; pass that as a tensor"
        if any(tensor_signature(x.detach()) is None or (x.requires_grad and type(x) is not nn.Parameter) for x in inputs):
            return UNUSUAL
        return ""

    def program(self, inputs: Sequence[Any]) -> Program:
        self.optimizer.prepare()
        try:
            program = GraphProgram(self.forward, self.training, inputs)
        except CannotTrace as error:
            changed = sorted({name for _, name, _ in self.optimizer.hyperparameters.arguments} - {"lr"})
            if not changed:
                raise
            raise CannotTrace(f"{error} (perhaps because {', '.join(changed)} changed)") from None
        self.training.compilations += 1
        return program


class GraphProgram(Program):
    """A step by a forward graph, for the parameters and the state that the optimizer has now.

    Its arguments are the inputs of the forward graph, the optimizer's state and counters, and those of its numbers that change.
    """

    def __init__(self, forward: ForwardGraph, training: Training, inputs: Sequence[Tensor]) -> None:
        self.forward, self.model, self.optimizer, self.count = forward, training.model, training.optimizer, len(inputs)
        self.known = self.optimizer.parameters()
        self.ids = [*map(id, self.known)]
        self.index = {own: k for k, own in enumerate(self.ids)}
        self.roles = [self.index.get(id(x)) for x in inputs]  # which parameter an input is; None if it is not trained
        self.trained = [k is not None for k in self.roles]
        self.parameters = list(compress(inputs, self.trained))
        if not self.parameters:
            raise CannotTrace("the loss depends on none of the optimizer's parameters")
        self.requires_grad = [x.requires_grad for x in inputs]
        self.layout = self.optimizer.layout(self.parameters)
        self.state = self.optimizer.tensors(self.layout, self.parameters)
        self.state_signatures, self.state_ids = signatures(self.state), self.optimizer.state_identities()
        arguments = [*inputs, *self.state, *self.numbers()]
        super().__init__(trace(self.step, arguments, constants=True), arguments)
        mutated = mutated_arguments(self.graph)
        self.mutated = sorted(mutated)
        self.is_mutated = [i in mutated for i in range(self.count)]  # the state is checked when it is replaced
        self.read_only = [i for i in range(self.count) if i not in mutated]
        self.addresses: list[int] = []  # of what it changes
        self.storages: set[int] = set()

    def numbers(self) -> list[Tensor]:
        return self.optimizer.hyperparameters.argument_tensors(self.parameters[0])

    def step(self, *given: Tensor) -> list[Tensor]:
        """One step on stand-ins for the arguments; returns the outputs of the forward graph, and η."""
        state, numbers = given[self.count : self.count + len(self.state)], given[self.count + len(self.state) :]
        pairs = zip(given[: self.count], self.requires_grad, strict=True)
        inputs = [x.detach().requires_grad_() if requires_grad else x for x, requires_grad in pairs]
        stand_ins = dict(zip(self.parameters, compress(inputs, self.trained), strict=True))
        with self.optimizer.holding(stand_ins, self.layout, iter(state), numbers):
            with torch.enable_grad():
                outputs = self.forward.run(*inputs)
            loss = outputs[self.forward.loss]
            results = [output.detach() if output is loss else output.detach().clone() for output in outputs]
            etas = self.optimizer.train(loss)
            return [*results, *[loss.new_ones(()) if eta is None else eta.detach() for eta in etas]]

    def fits(self, inputs: Sequence[Any]) -> bool:
        optimizer, number = self.optimizer, self.index.get
        if [*map(id, optimizer.parameters())] != self.ids or [number(id(x)) for x in inputs] != self.roles:
            return False
        if optimizer.state_identities() != self.state_ids:
            optimizer.prepare()
            try:
                state = optimizer.tensors(self.layout, self.parameters)
            except KeyError:  # some are gone
                return False
            if signatures(state) != self.state_signatures:
                return False
            self.state, self.state_ids, self.addresses = state, optimizer.state_identities(), []
        self.arguments = [*inputs, *self.state, *self.numbers()]
        return self.mode is Mode.TRACED or not self.has_new_overlap()

    def has_new_overlap(self) -> bool:
        """Whether what it changes has come to share memory with another argument; quick where nothing has moved."""
        arguments = self.arguments
        addresses = [tensor.data_ptr() for tensor in compress(arguments, self.is_mutated)]
        if addresses != self.addresses:
            self.addresses = addresses
            self.storages = {arguments[i].untyped_storage().data_ptr() for i in self.mutated}
        else:
            batch = [arguments[i] for i in self.read_only]
            if not any(tensor.untyped_storage().data_ptr() in self.storages for tensor in batch):
                return False
        return self.shares_memory()

    def shares_memory(self) -> bool:
        found = overlaps(self.arguments)
        return any(found.count(found[i]) > 1 for i in self.mutated)

    def example(self) -> Sequence[Tensor]:
        state = slice(self.count, self.count + len(self.state))
        example = list(self.arguments)
        example[state] = self.optimizer.with_enough_curvature(self.layout, example[state])
        return example

    def copied_arguments(self, moved: set[int]) -> set[int]:
        """Parameters, and what it changes, are taken from where they are; so are buffers, unless one has moved."""
        stay = {id(buffer) for buffer in self.model.buffers()}
        stay -= {id(self.arguments[i]) for i in moved}
        inputs = [(i, self.arguments[i]) for i in self.read_only]
        return {i for i, x in inputs if id(x) not in stay and not isinstance(x, nn.Parameter)}

    def finish(self, results: Sequence[Any]) -> tuple[Any, ...]:
        self.optimizer.record_step(results[self.forward.outputs :])
        return tuple(results[: self.forward.outputs])


def signatures(tensors: Sequence[Tensor]) -> list[object]:
    return [tensor_signature(tensor.detach()) for tensor in tensors]
