"""The estimators: each takes a request and returns one diagonal per parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.backward import grad
from ..engine.nodes import edge_of
from ..rules import RULES
from .layers import is_of_layer, mean_over_rows, products_of_weights, through_product, to_parameter, uses_of
from .outputs import describe, refuse_leaves
from .rows import (
    Diagonals,
    add_products,
    add_to,
    chunks,
    entry_by_entry,
    gradients_at,
    hessian_products,
    pull_rows,
    unit_rows,
)

if TYPE_CHECKING:
    from . import Request


def exact(request: Request) -> Diagonals:
    """diag ∂²L/∂θ², by double backward: one Hessian-vector product per entry, in batches.

    A weight matrix that is used once, in a matrix product y = x W, needs only one product per entry of y, which often has fewer
    entries: ∂²L/∂W²_ji = Σ_nm x_nj x_mj ∂²L/∂y_ni∂y_mi.
    """
    layers = products_of_weights(request)
    wanted = [(layers[k], 0) if k in layers else edge for k, edge in enumerate(request.edges)]
    total: list[Tensor | None] = [None] * len(wanted)
    for k, (gradient, edge) in enumerate(zip(gradients_at(request, wanted), wanted, strict=True)):
        if gradient is not None:
            products = hessian_products(gradient, edge)
            if k in layers:
                total[k] = through_product(products, layers[k], request.edges[k], request.at_once)
            else:
                total[k] = entry_by_entry(products, gradient.flatten(), request.at_once).reshape(gradient.shape)
    return total


def recursion(method: str) -> Callable[[Request], Diagonals]:
    """One of the methods of :func:`hesscale.grad`."""

    def estimator(request: Request) -> Diagonals:
        return grad(
            request.loss,
            request.params,
            method=method,
            outputs=request.chosen_outputs,
            retain_graph=request.retain_graph,
            allow_unused=True,
        )[1]

    estimator.__doc__ = f":func:`hesscale.grad` with ``method={method!r}``."
    return estimator


def ggn(request: Request) -> Diagonals:
    """diag(Jᵀ H J) = Σ_i Jᵀe_i ∘ Jᵀ(H e_i), summed over all entries i of the outputs. It is exact for any loss, convex or not.

    It takes two backward passes per entry, in batches. A parameter that enters the loss directly (a log standard deviation, a
    temperature) counts as an output: J is the identity there, so its own second derivative is included.
    """
    outputs = request.model_outputs
    total = outputs.at_leaves()
    for _, rows in unit_rows(outputs.like, request.at_once):
        add_products(total, outputs.vjp(rows), outputs.vjp(*outputs.products(rows)))
    return total


def ggn_mc(request: Request) -> Diagonals:
    """An unbiased estimate of ``ggn``: the mean of Jᵀa ∘ Jᵀb over random a, b with E[a bᵀ] = H.

    A draw takes one or two backward passes. There are three ways to draw. The first that applies is used:

    - Softmax cross entropy (any loss linear in log-softmax outputs that are linear in z): draw a label y for every sample from
      the model's distribution q, and set a = √w (q − e_y), with w the weight of the sample in the loss. The paper does the same.
    - H is diagonal (squared error, …): a = √|h| ∘ z with random signs z. For squared error, this too is the usual draw.
    - Otherwise, a = z and b = H z with random signs z. This is unbiased for every H, but single draws may be negative even if H
      is positive.

    The draws of different samples are independent with mean zero, so their products vanish in expectation, and one pass is
    enough for the whole batch. (The paper's code squares the gradient of each sample instead. This is the same for a batch of
    one, and less noisy for larger batches.) A negative weight or curvature changes the sign of b. For parameters that enter the
    loss directly, the diagonal is exact.
    """
    outputs = request.model_outputs
    total = outputs.at_leaves()
    for count in chunks(request.num_samples if outputs.edges else 0, request.at_once):
        a, b, at_leaves = outputs.draw(count)
        pulled = outputs.vjp(a)
        add_products(total, pulled, pulled if b is a else outputs.vjp(b, at_leaves), 1 / request.num_samples)
    return total


def hutchinson(request: Request) -> Diagonals:
    """The mean of z ∘ ∂²L/∂θ² z over random signs z: the estimate of AdaHessian, without its spatial averaging."""
    total: list[Tensor | None] = [None] * len(request.params)
    gradients = gradients_at(request, request.edges)
    curved = [k for k, gradient in enumerate(gradients) if gradient is not None]
    sources = [edge_of(gradient) for gradient in gradients if gradient is not None]
    for count in chunks(request.num_samples, request.at_once):
        signs = request.signs_for_params(count)
        add_products(total, signs, pull_rows(sources, request.edges, [signs[k] for k in curved]), 1 / request.num_samples)
    return total


def squared_gradient(request: Request) -> Diagonals:
    """(∂L/∂θ)² of the whole loss. If the loss is a mean over samples, this is the square of the mean gradient."""
    gradients = torch.autograd.grad(request.loss, request.params, retain_graph=request.retain_graph, allow_unused=True)
    return [None if gradient is None else gradient.square() for gradient in gradients]


def empirical_fisher(request: Request) -> Diagonals:
    """(1/N) Σ_n (∂ℓ_n/∂θ)², for a loss that is the mean (1/N) Σ_n ℓ_n over N samples.

    The samples are the rows of the outputs: their first dimension, after the flattening that a Linear does. ∂ℓ_n/∂θ is N times
    the gradient from only the n-th row of ∂L/∂z, so the result is N Σ_n (J_nᵀ ∂L/∂z_n)². If the loss is a sum over samples
    instead, divide the result by N² to get that of the mean, or by N to get Σ_n (∂ℓ_n/∂θ)².
    """
    outputs = request.model_outputs
    refuse_leaves(outputs, "its gradient cannot be split by sample")
    count = outputs.sample_count
    total: list[Tensor | None] = [None] * len(request.params)
    gradients = [outputs.gradient(edge) for edge in outputs.edges]
    for _, samples in unit_rows(gradients[0].new_empty(count), request.at_once) if gradients else ():
        pulled = outputs.vjp(outputs.flatten([torch.einsum("rn,n...->rn...", samples.to(g.dtype), g) for g in gradients]))
        add_products(total, pulled, pulled, count)
    return total


def kfac(request: Request) -> Diagonals:
    """diag(A) ⊗ diag(B) of K-FAC: A averages squared layer inputs, B sums squared backpropagated draws of ``ggn_mc``.

    For y = x W + b with rows r (samples and, in a convolution or a Linear with more dimensions, positions),

        W_ji: (1/R) Σ_r x²_rj · Σ_r E[(∂z/∂y_ri)ᵀa (∂z/∂y_ri)ᵀb],      b_i: Σ_r E[(∂z/∂y_ri)ᵀa (∂z/∂y_ri)ᵀb],

    which is Eq. 3 of the paper with the diagonal at y replaced by its mean over rows. For one row, its expectation is ``ggn``.
    The diagonals of several uses of a parameter add up. Parameters that are not weights or biases of linear layers and
    convolutions raise an error.
    """
    outputs = request.model_outputs
    uses = uses_of(request)
    for use in uses:
        if not is_of_layer(use):
            raise ValueError(
                f"{describe(request, use.param)} is input {use.place} of {use.node.name()}, but K-FAC is defined for weights and "
                "biases of linear layers and convolutions. Leave it out of params, or use another estimator"
            )
    refuse_leaves(outputs, "K-FAC is defined for layers below them")
    layers = list(dict.fromkeys([(use.node, 0) for use in uses]))
    squares: list[Tensor | None] = [None] * len(layers)
    for pulled, other in outputs.draws_at(layers):
        add_products(squares, pulled, other, 1 / request.num_samples)
    at = dict(zip(layers, squares, strict=True))
    total: list[Tensor | None] = [None] * len(request.params)
    for use in uses:
        if (square := at[(use.node, 0)]) is not None:
            shares: Any = RULES[use.node.name()].function(use.node, None, mean_over_rows(use.node, square))
            add_to(total, use.param, to_parameter(shares[use.place], use.node, use.place, request.edges[use.param]))
    return total
