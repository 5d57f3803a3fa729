"""One backward pass that carries (g, s): PyTorch's gradient, and beside it the Hessian diagonal of every tensor.

The recursion runs on autograd's own graph. A pre-hook on a node receives the gradient g at the node's output from PyTorch's
engine. The node's consumers have already added up the diagonal s at that output. From g and s, the operator's rule computes a
contribution to the diagonal at each input, called a share. At a leaf, the sum of the shares is the parameter's ``hess_diag``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.averaging import averaged_with_gradients
from ..distributed.sharding import check_unsharded
from .arguments import as_tensors, check_loss
from .nodes import leaves_of
from .propagate import Propagation, accumulate, dense_copy


def hess_diags(model: nn.Module) -> dict[str, Tensor | None]:
    """Return ``p.hess_diag`` of every parameter of a model, by name.

    It is None before the first pass, and after an optimizer has used it.

    Example:
        >>> import torch, hesscale
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> hesscale.hess_diags(model)
        {'weight': None}
        >>> hesscale.backward(model(torch.tensor([[1.0, 3.0]])).square().sum())
        >>> hesscale.hess_diags(model)
        {'weight': tensor([[ 2., 18.]])}
    """
    return {name: getattr(p, "hess_diag", None) for name, p in model.named_parameters()}


def backward(
    loss: Tensor,
    *,
    method: str = "hesscale",
    outputs: Tensor | Sequence[Tensor] | None = None,
    inputs: Tensor | Sequence[Tensor] | None = None,
    retain_graph: bool = False,
    head: str = "auto",
    fallback: str = "error",
    curvature_dtype: torch.dtype | None = None,
) -> None:
    """Compute gradients and Hessian diagonals, and accumulate them in ``p.grad`` and ``p.hess_diag`` of every leaf.

    Gradients are bit for bit those of ``loss.backward()``. Diagonals start with the exact diagonal at the model's outputs and
    follow the recursion of the paper's Eq. 3 and 4 back to the leaves. If ``p.grad`` is None when the pass reaches p,
    ``p.hess_diag`` starts from zero. Before its first pass, a parameter has no attribute ``hess_diag``, and :func:`hess_diags`
    returns None for it.

    Args:
        loss: a real scalar with a graph.
        method: ``"hesscale"``; ``"hesscale_gn"``, which leaves out the second derivatives of the model (but not of the loss); or
            ``"bl89"``, the method of Becker and LeCun, which treats softmax as if it were elementwise.
        outputs: the model's outputs, where the exact treatment of the loss ends. By default, they are the results of the first
            matrix product, convolution, embedding or similar operator on each path back from the loss.
        inputs: fill only these tensors, as in ``Tensor.backward``.
        retain_graph: keep the graph for another pass.
        head: what to do if the rules are not exact between loss and outputs. ``"auto"`` uses double backward unless that would
            cost much more than a backward pass. ``"exact"`` uses it for up to 1,024 products. ``"rules"`` never uses it.
        fallback: what to do at an operator without a rule: ``"error"``, or ``"exact"`` to differentiate it twice by brute force.
        curvature_dtype: compute the curvature's matrix products and convolutions in this dtype. ``torch.bfloat16`` saves time.
            Gradients do not change.

    Raises:
        UnsupportedOperator: if an operator has no rule. No ``.grad`` or ``.hess_diag`` has changed then.

    Example:
        >>> import torch, hesscale
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hesscale.backward((w ** 3).sum())
        >>> w.grad, w.hess_diag
        (tensor([ 3., 12.]), tensor([ 6., 12.]))
    """
    check_loss(loss)
    requested = None if inputs is None else as_tensors(inputs, "inputs")
    if requested is not None:
        check_unsharded(leaves_of(loss))
    options = {"method": method, "outputs": outputs, "head": head, "fallback": fallback, "curvature_dtype": curvature_dtype}
    fill_hess_diags(
        lambda: torch.autograd.backward(loss, inputs=requested, retain_graph=retain_graph), loss, requested, **options
    )


def fill_hess_diags(run_backward: Callable[[], None], loss: Tensor, tensors: Sequence[Tensor] | None, **options: Any) -> None:
    """Call ``run_backward``, which fills ``.grad``, and fill ``hess_diag`` of the tensors (None: all leaves) in the same pass."""
    propagation = Propagation(loss, requested=tensors, fills_leaves=True, **options)
    requested = propagation.requested
    overwrite = {key: not (t.is_leaf or t.retains_grad) or t.grad is None for key, t in requested.items()}
    with averaged_with_gradients(partial(leaves_of, loss), options.get("curvature_dtype")) as averaged:
        if averaged is not None and not requested:
            propagation.replica = averaged.replica_to_tell()
        if propagation.shards is not None:
            propagation.shards.begin(options.get("curvature_dtype"))
        with own_pass():
            propagation.run(run_backward)
        propagation.fill_uncurved_leaves()
        if propagation.shards is not None:
            propagation.shards.finish()
        for key, tensor in requested.items():
            if tensor.grad is not None:
                accumulate(tensor, propagation.diagonals.get(key), overwrite[key], key in propagation.owned)


_thread = threading.local()


class own_pass:
    """Marks a backward pass that already fills ``hess_diag``, so that :func:`hesscale.capture` does not do it again."""

    def __enter__(self) -> None:
        self.before, _thread.busy = is_own_pass(), True

    def __exit__(self, *_: object) -> None:
        _thread.busy = self.before


def is_own_pass() -> bool:
    return getattr(_thread, "busy", False)


def grad(
    loss: Tensor,
    tensors: Tensor | Sequence[Tensor],
    *,
    method: str = "hesscale",
    outputs: Tensor | Sequence[Tensor] | None = None,
    retain_graph: bool = False,
    head: str = "auto",
    fallback: str = "error",
    curvature_dtype: torch.dtype | None = None,
    allow_unused: bool = False,
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Return ``(gradients, Hessian diagonals)`` of the loss with respect to ``tensors``, without changing any ``.grad``.

    The tensors may be any tensors of the graph, including pre-activations. The options are those of :func:`backward`. If the loss
    does not depend on a tensor, the call raises an error, or with ``allow_unused=True`` returns None for that tensor.

    Example:
        >>> import torch, hesscale
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> h = x * x
        >>> hesscale.grad((h ** 2).sum(), [h, x])[1]
        (tensor([2., 2.]), tensor([12., 48.]))
    """
    check_loss(loss)
    requested = as_tensors(tensors, "tensors")
    propagation = Propagation(
        loss, method=method, outputs=outputs, requested=requested, head=head, fallback=fallback, curvature_dtype=curvature_dtype
    )
    gradients = propagation.run(
        lambda: torch.autograd.grad(loss, requested, retain_graph=retain_graph, allow_unused=allow_unused)
    )
    found = {id(tensor): propagation.diagonals.get(key) for key, tensor in propagation.requested.items()}
    pairs = zip(gradients, requested, strict=True)
    return gradients, tuple([None if g is None else dense_copy(found[id(t)], t) for g, t in pairs])
