"""Training steps with one forward graph that TorchDynamo has captured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError
from .aliasing import overlaps
from .dynamo import ForwardGraph
from .fx_graphs import mutated_arguments
from .make_fx import CannotTrace, trace
from .optimizer import FunctionalOptimizer
from .program import Mode, Program
from .signature import UNUSUAL, tensor_signature
from .staged import StagedStep

MAX_STEPS = 16  # cached for one forward graph, one for each set of the optimizer's options


@dataclass
class Training:
    """Settings and results that all graphs of a compiled step share.

    Attributes:
        backend: ``"inductor"``, ``"traced"`` or ``"eager"``.
        cuda_graph: whether to capture compiled steps in a CUDA graph.
        compilations: how many programs were made.
        last: the object that made the last step; None if the model's own code ran in eager mode.
        error: the error of a skipped step. It is raised once the model's attributes are set.
    """

    backend: str
    cuda_graph: bool
    compilations: int = 0
    last: StagedStep | None = None
    error: NonFiniteError | None = None

    @property
    def mode(self) -> Mode:
        """How the last step ran."""
        return Mode.EAGER if self.last is None else self.last.mode

    def raise_error(self) -> None:
        if error := self.error:
            self.error = None
            raise error


class GraphStep(ABC):
    """Steps with one forward graph.

    Args:
        forward: the graph.
        training: shared with the steps of other graphs.
        optimizer: that of the model, or of the first of several models.
    """

    def __init__(self, forward: ForwardGraph, training: Training, optimizer: FunctionalOptimizer) -> None:
        self.forward, self.training, self.optimizer = forward, training, optimizer
        self.steps: dict[object, StagedStep] = {}
        self.signature: object = None
        self.step: StagedStep | None = None

    def run(self, signature: object, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Make a step and return the outputs of the forward graph.

        Args:
            signature: the options of the optimizer.
            inputs: the inputs of the forward graph.
        """
        if self.step is None or signature != self.signature:
            self.signature, self.step = signature, self.step_for(signature)
        self.training.last = self.step
        return self.step(inputs)

    def step_for(self, signature: object) -> StagedStep:
        """The step for these options of the optimizer. If there are too many steps, a new one replaces the oldest."""
        try:
            found = self.steps.get(signature)
        except TypeError:  # an option is not hashable
            return StagedStep(self, "an option of the optimizer is neither a number nor hashable")
        if found is None:
            if len(self.steps) >= MAX_STEPS:
                self.steps.pop(next(iter(self.steps)))
            found = self.steps[signature] = StagedStep(self, self.optimizer.obstacle())
        return found

    @abstractmethod
    def eager(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A step in eager mode."""

    def obstacle(self, inputs: Sequence[Any]) -> str:
        """Why no program can take these inputs; empty if one can."""
        if not all(isinstance(x, Tensor) for x in inputs):
            return "it reads a value of Python that changes at every step; pass that as a tensor"
        if any(tensor_signature(x.detach()) is None or (x.requires_grad and type(x) is not nn.Parameter) for x in inputs):
            return UNUSUAL
        return ""

    @abstractmethod
    def program(self, inputs: Sequence[Any]) -> Program:
        """The step as a program.

        Raises:
            CannotTrace: the step does something that no flat graph of operators can hold.
            NeedsEagerPass: a step in eager mode has to find something out first.
        """


class ModelStep(GraphStep):
    """Steps of one model. Dynamo calls it in place of the forward graph, with the graph's inputs, when its guards hold."""

    def __init__(self, forward: ForwardGraph, training: Training, model: nn.Module, optimizer: FunctionalOptimizer) -> None:
        super().__init__(forward, training, optimizer)
        self.model = model

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.run(self.optimizer.signature(), inputs)

    def eager(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A step in eager mode, which runs the operators of the forward graph."""
        with torch.enable_grad():
            outputs = self.forward.run(*inputs)
        own = {id(p) for p in self.optimizer.parameters()}
        others = [x for x in inputs if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in own]
        results = tuple([output.detach() for output in outputs])
        try:
            self.optimizer.train(outputs[self.forward.loss], others)
        except NonFiniteError as error:
            self.training.error = error
        return results

    def program(self, inputs: Sequence[Any]) -> Program:
        return ModelProgram(FunctionalStep(self.forward, self.optimizer, inputs), self.model, self.training)


class FunctionalStep:
    """A step with a forward graph as a function of tensors, for the parameters and the state that the optimizer has now.

    Args:
        forward: the graph.
        optimizer: trains the graph's parameters.
        inputs: the inputs of the graph: parameters, buffers, the batch and all other tensors that it reads.

    Attributes:
        arguments: the tensors of the next call: the inputs, the optimizer's state and counters, and its options that change.
        count: how many of the arguments are inputs.
        roles: for each input, its index among the optimizer's parameters; None if it is not trained.
    """

    def __init__(self, forward: ForwardGraph, optimizer: FunctionalOptimizer, inputs: Sequence[Tensor]) -> None:
        optimizer.prepare()
        self.forward, self.optimizer, self.count = forward, optimizer, len(inputs)
        self.known = optimizer.parameters()
        self.index = {id(p): k for k, p in enumerate(self.known)}
        self.roles = [self.index.get(id(x)) for x in inputs]
        self.trained = [k is not None for k in self.roles]
        self.parameters = list(compress(inputs, self.trained))
        if not self.parameters:
            raise CannotTrace("the loss depends on none of the optimizer's parameters")
        self.requires_grad = [x.requires_grad for x in inputs]
        self.are_frozen = [isinstance(x, nn.Parameter) and not x.requires_grad for x in inputs]
        self.options: object = None  # for which these hold
        self.numbers: list[Tensor] = []
        self.layout = optimizer.layout(self.parameters)
        self.state = optimizer.tensors(self.layout, self.parameters)
        self.state_signatures, self.held = signatures(self.state), optimizer.held()
        self.arguments = [*inputs, *self.state, *self.current_numbers()]

    def current_numbers(self) -> list[Tensor]:
        """The optimizer's numbers that change; they are read anew if one of them may have changed."""
        hyperparameters = self.optimizer.hyperparameters
        if hyperparameters.has_tensors or self.options is not hyperparameters.arguments:
            self.options, self.numbers = hyperparameters.arguments, hyperparameters.argument_tensors(self.parameters[0])
        return self.numbers

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """Make one step with tensors that stand in for the arguments. Returns the outputs of the forward graph, and η."""
        state, numbers = given[self.count : self.count + len(self.state)], given[self.count + len(self.state) :]
        pairs = zip(given[: self.count], self.requires_grad, strict=True)
        inputs = [x.detach().requires_grad_() if requires_grad else x for x, requires_grad in pairs]
        for x in compress(inputs, self.are_frozen):
            x._is_param = True  # makes it an nn.Parameter, which decides where the head ends
        stand_ins = dict(zip(self.parameters, compress(inputs, self.trained), strict=True))
        with self.optimizer.holding(stand_ins, self.layout, iter(state), numbers):
            with torch.enable_grad():
                outputs = self.forward.run(*inputs)
            loss = outputs[self.forward.loss]
            known = {id(loss), *map(id, inputs)}  # an output may be an input that was changed in place
            if {*map(storage_of, inputs)} & {storage_of(output) for output in outputs if id(output) not in known}:
                raise CannotTrace("the model keeps a view of one of its tensors or of the batch, which would become a copy")
            results = [output.detach() if output is loss else output.detach().clone() for output in outputs]
            etas = self.optimizer.train(loss)
            return [*results, *[loss.new_ones(()) if eta is None else eta.detach() for eta in etas]]

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether it can take these inputs. If so, put them in ``arguments``."""
        optimizer = self.optimizer
        if [*map(self.index.get, map(id, inputs))] != self.roles:
            return False
        if not are_same(optimizer.held(), self.held):
            if not are_same(optimizer.parameters(), self.known):
                return False
            optimizer.prepare()
            try:
                state = optimizer.tensors(self.layout, self.parameters)
            except KeyError:  # the optimizer no longer has some of the state
                return False
            if signatures(state) != self.state_signatures:
                return False
            self.state, self.held = state, optimizer.held()
        self.arguments = [*inputs, *self.state, *self.current_numbers()]
        return True

    @property
    def repeats_itself(self) -> bool:
        """Whether all steps do the same: Dynamo's code has no side effects, and every step computes curvature."""
        return self.forward.is_pure and self.optimizer.repeats_itself

    def warmed_up(self, arguments: Sequence[Tensor], steps: float) -> list[Tensor]:
        """The arguments as if that many more steps with curvature had been made: weights move only after ``curvature_warmup``."""
        names = [""] * self.count + [name for _, names in self.layout.state for name in names]
        names += [""] * (len(arguments) - len(names))
        pairs = zip(names, arguments, strict=True)
        return [x + steps if steps and name == "curvature_step" else x for name, x in pairs]


def are_same(found: Sequence[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def signatures(tensors: Sequence[Tensor]) -> list[object]:
    return [tensor_signature(tensor.detach()) for tensor in tensors]


class ModelProgram(Program):
    """The step of one model."""

    def __init__(self, step: FunctionalStep, model: nn.Module, training: Training) -> None:
        self.step, self.model, self.training = step, model, training
        super().__init__(trace(step, step.arguments, constants=True), step.arguments)
        mutated = mutated_arguments(self.graph)
        self.mutated = sorted(mutated)
        self.read_only = [i for i in range(step.count) if i not in mutated]
        self.mutated_inputs = [i for i in self.mutated if i < step.count]
        self.addresses: list[int] = []  # of the inputs that it changes
        self.storages: set[int] = set()  # of all arguments that it changes
        self.state: list[Tensor] = []  # the optimizer's tensors for which addresses and storages are valid

    def fits(self, inputs: Sequence[Any]) -> bool:
        if not self.step.fits(inputs):
            return False
        self.arguments = self.step.arguments
        return self.mode is Mode.TRACED or not self.has_new_overlap()

    def has_new_overlap(self) -> bool:
        """Whether an argument that it changes now shares memory with another one; quick if no tensor has moved."""
        arguments = self.arguments
        addresses = [*map(Tensor.data_ptr, map(arguments.__getitem__, self.mutated_inputs))]
        if addresses != self.addresses or self.state is not self.step.state:
            self.addresses, self.state = addresses, self.step.state
            self.storages = {arguments[i].untyped_storage().data_ptr() for i in self.mutated}
        elif not any(arguments[i].untyped_storage().data_ptr() in self.storages for i in self.read_only):
            return False
        return self.shares_memory()

    def shares_memory(self) -> bool:
        found = overlaps(self.arguments)
        return any(found.count(found[i]) > 1 for i in self.mutated)

    def example(self) -> Sequence[Tensor]:
        return self.step.warmed_up(self.arguments, self.step.optimizer.curvature_warmup)

    def copied_arguments(self, moved: set[int]) -> set[int]:
        """All arguments except parameters, tensors that the step changes, and buffers that have not moved."""
        stay = {id(buffer) for buffer in self.model.buffers()}
        stay -= {id(self.arguments[i]) for i in moved}
        inputs = [(i, self.arguments[i]) for i in self.read_only]
        return {i for i, x in inputs if id(x) not in stay and not isinstance(x, nn.Parameter)}

    def finish(self, results: Sequence[Any]) -> tuple[Any, ...]:
        count = self.step.forward.outputs
        try:
            self.step.optimizer.record_step(results[count:])
        except NonFiniteError as error:
            self.training.error = error
        return tuple(results[:count])

    def repetition(self, batch: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor] | None:
        step, loss = self.step, self.step.forward.loss
        inputs, rest = self.arguments[: step.count], self.arguments[step.count :]
        place = {id(x): i for i, x in enumerate(inputs)}
        if not step.repeats_itself or len(place) < step.count:  # a tensor of the batch may also be another input
            return None
        places = [place.get(id(tensor)) for tensor in batch]
        addresses = {x.data_ptr() for x in inputs}
        if any(i is None and tensor.data_ptr() in addresses for i, tensor in zip(places, batch, strict=True)):
            return None  # the graph reads it through another tensor object

        def repeat(given: Sequence[Tensor]) -> Tensor:
            arguments = [*inputs, *rest]
            for i, tensor in zip(places, given, strict=True):
                if i is not None:
                    arguments[i] = tensor
            found: Tensor = self(arguments)[loss]
            self.training.raise_error()
            return found

        return repeat
