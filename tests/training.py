"""A small classifier, its batches, and loops that train it; and the paper's Algorithms 2 and 3, written out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import hesscale
from hesscale.optim import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam

OURS = [AdaHesScale, AdaHesScaleGN, BL89, Adam, AdaHessian, GGNMC]
DETERMINISTIC = [AdaHesScale, AdaHesScaleGN, BL89]


def paper(optimizer):
    """The optimizer as the paper has it, without bounds on the update."""
    return getattr(optimizer, "paper", optimizer)


def make_model(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batches(count: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(6, 4, generator=generator, dtype=dtype), torch.randint(0, 3, (6,), generator=generator)


def train(model, optimizer, count=20, dtype=torch.float64):
    for x, y in batches(count, dtype):
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x), y))
        optimizer.step()


def assert_same(model, reference, **tolerance):
    for p, q in zip(model.parameters(), reference, strict=True):
        torch.testing.assert_close(p.detach(), q, **(tolerance or {"rtol": 1e-10, "atol": 1e-12}))


def weight(value=1.0, size=1, dtype=torch.float64):
    return torch.full((size,), value, dtype=dtype, requires_grad=True)


def pseudocode(model, method, alpha, beta1=0.9, beta2=0.999, epsilon=1e-8, radius=None, squares="curvature", count=20, warmup=0):
    """Algorithms 2 and 3 written out, one parameter at a time; ``squares`` says what V averages. Returns weights and every η."""
    W = [p.detach().clone() for p in model.parameters()]
    M, V, C = ([torch.zeros_like(w) for w in W] for _ in range(3))
    etas = []
    for t, (x, y) in enumerate(batches(count), start=1):
        with torch.no_grad():
            for p, w in zip(model.parameters(), W, strict=True):
                p.copy_(w)
        gradients, diagonals = hesscale.grad(F.cross_entropy(model(x), y), list(model.parameters()), method=method)
        U, h = [], 0.0
        for l in range(len(W)):
            S = diagonals[l] if squares == "curvature" else gradients[l]
            M[l] = beta1 * M[l] + (1 - beta1) * gradients[l]
            V[l] = beta2 * V[l] + (1 - beta2) * S**2
            C[l] = beta2 * C[l] + (1 - beta2) * diagonals[l] ** 2
            m_hat, v_hat, c_hat = M[l] / (1 - beta1**t), V[l] / (1 - beta2**t), C[l] / (1 - beta2**t)
            U.append(alpha * (t > warmup) * m_hat / (v_hat.sqrt() + epsilon))
            h += float((c_hat.sqrt() * U[l] ** 2).sum())
        eta = 1.0 if radius is None or h == 0 else min(1.0, math.sqrt(2 * radius / h))
        etas.append(eta)
        W = [w - eta * u for w, u in zip(W, U, strict=True)]
    return W, etas
