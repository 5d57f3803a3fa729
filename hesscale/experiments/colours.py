"""The colours of methods: each family of methods has the same colour in all figures.

Variants of a method share its colour. If a figure shows several variants, their lines have different dashes.
"""

from __future__ import annotations

COLOURS = {
    # optimizers, by the name of their family
    "adam": "#c0392b",
    "sgd": "#e59866",
    "our-adam": "#a93226",
    "adahesscale": "#1f5a96",
    "adahesscale-gn": "#6fb1a0",
    "adahessian": "#8e6bb0",
    "ggnmc": "#7a7a7a",
    "bl89": "#e0a33e",
    "adamw": "#d98880",
    "muon": "#2e7d32",
    "sophia-g": "#4e342e",
    "prodigy": "#7cb342",
    "dog": "#8d6e63",
    "schedule-free": "#00838f",
    "untrained": "#b0b0b0",
    # Hessian diagonals; an estimate has the colour of the optimizer that uses it
    "HesScale": "#1f5a96",
    "HesScaleGN": "#6fb1a0",
    "BL89": "#e0a33e",
    "AdaHessian-MC1": "#8e6bb0",
    "AdaHessian-MC50": "#8e6bb0",
    "GGN-MC1": "#7a7a7a",
    "GGN-MC50": "#7a7a7a",
    "diag(G)": "#20603d",
    "g²": "#d16ba5",
    "|diag(H)|": "#b0b0b0",
    "exact-ggn": "#20603d",
    "exact-h": "#0b7a75",
    "backpack-ggn-mc": "#a8a13c",
    "backpack-ggn": "#b5651d",
    "backpack-h": "#7b3f00",
}
