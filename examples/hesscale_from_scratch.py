"""HesScale from scratch: gradients and Hessian diagonals of a tanh network in one backward pass, without autograd.

Backpropagation carries g = ∂L/∂a from layer to layer. HesScale carries s = ∂²L/∂a² along with it, in the same backward pass:

    gradients    Eq. 1   ∂L/∂W   = g h            Eq. 2   g ← σ' Wᵀg
    diagonals    Eq. 3   ∂²L/∂W² = s h²           Eq. 4   s ← σ'² (W²)ᵀs + σ'' Wᵀg

The equations are those of the paper (Elsayed, Farrahi, Dangel and Mahmood, ICML 2024). ``hesscale.backward`` does the same for
every operator of PyTorch. Run this file to see that the two agree:

    python examples/hesscale_from_scratch.py
"""

from __future__ import annotations

import torch
from torch import Tensor

Layer = tuple[Tensor, Tensor]  # the weight W, of shape (outputs, inputs), and the bias b


def forward(layers: list[Layer], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """a = W h + b and h = tanh(a), layer by layer. Returns the input h of every layer, and the outputs a of the last one."""
    inputs = [x]
    for W, b in layers[:-1]:
        inputs.append(torch.tanh(inputs[-1] @ W.T + b))
    W, b = layers[-1]
    return inputs, inputs[-1] @ W.T + b


def cross_entropy(a: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(g, s) of the mean of −log q_label at the outputs, with q = softmax(a): g = q − p, and exactly s = q − q²."""
    q = a.softmax(1)
    p = torch.eye(a.shape[1], dtype=a.dtype)[labels]
    return (q - p) / len(a), (q - q**2) / len(a)


def squared_error(a: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(g, s) of the mean of (a − t)² at the outputs: g = 2 (a − t), and exactly s = 2."""
    return 2 * (a - targets) / a.numel(), torch.full_like(a, 2) / a.numel()


def backward(layers: list[Layer], inputs: list[Tensor], g: Tensor, s: Tensor) -> tuple[list[Layer], list[Layer]]:
    """Gradients and Hessian diagonals of every (W, b), from (g, s) at the outputs. Both are sums over the batch."""
    gradients: list[Layer] = []
    diagonals: list[Layer] = []
    for l in reversed(range(len(layers))):
        (W, _), h = layers[l], inputs[l]
        gradients.insert(0, (g.T @ h, g.sum(0)))  # Eq. 1; a bias is a weight whose input is 1
        diagonals.insert(0, (s.T @ h**2, s.sum(0)))  # Eq. 3
        if l > 0:  # h is tanh(a) of the layer below, so both derivatives of tanh follow from h
            first = 1 - h**2
            second = -2 * h * first
            g, s = (
                first * (g @ W),  # Eq. 2
                first**2 * (s @ W**2) + second * (g @ W),  # Eq. 4
            )
    return gradients, diagonals


def main() -> None:
    import hesscale

    torch.manual_seed(0)
    layers = [(torch.randn(n, m) / m**0.5, torch.zeros(n)) for m, n in ((8, 16), (16, 16), (16, 5))]
    x, labels = torch.randn(32, 8), torch.randint(5, (32,))

    inputs, a = forward(layers, x)
    gradients, diagonals = backward(layers, inputs, *cross_entropy(a, labels))

    for W, b in layers:
        W.requires_grad_()
        b.requires_grad_()
    hesscale.backward(torch.nn.functional.cross_entropy(forward(layers, x)[1], labels))

    print("largest difference between this file and hesscale.backward\n")
    print("layer   gradient of W   diagonal of W")
    for l, (W, _) in enumerate(layers):
        g, s = (gradients[l][0] - W.grad).abs().max(), (diagonals[l][0] - W.hess_diag).abs().max()
        print(f"{l + 1:5}   {g:13.1e}   {s:13.1e}")


if __name__ == "__main__":
    main()
