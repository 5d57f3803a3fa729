"""The optimizers that experiments offer by name."""

from __future__ import annotations

import pytest
import torch

import hesscale
from hesscale.experiments.bench.methods import METHODS
from hesscale.experiments.colours import COLOURS
from hesscale.experiments.optimizers import AGENT_OPTIMIZERS, IMAGE_OPTIMIZERS, OPTIMIZERS, with_step_sizes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_can_be_made_and_has_a_colour(name):
    spec, weight = OPTIMIZERS[name], torch.zeros(2, requires_grad=True)
    options = {"trust_radius": 1e-4} if spec.is_scaled else {}
    optimizer = spec.make([weight], 0.1, **options)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert spec.colour.startswith("#")
    if spec.is_variant:
        assert OPTIMIZERS[spec.family].colour == spec.colour


def test_a_method_has_one_colour_in_all_figures():
    for name, spec in OPTIMIZERS.items():
        assert spec.colour == COLOURS[spec.family or name]
        assert all(spec.colour == table[name].colour for table in (METHODS, IMAGE_OPTIMIZERS) if name in list(table))
    assert all(method.colour for method in METHODS.values())
    for estimate, name in {"HesScale": "adahesscale", "HesScaleGN": "adahesscale-gn", "BL89": "bl89", "GGN-MC1": "ggnmc"}.items():
        assert COLOURS[estimate] == COLOURS[name]


def test_labels_are_those_of_one_optimizer_each():
    for table in (OPTIMIZERS, AGENT_OPTIMIZERS, IMAGE_OPTIMIZERS, METHODS):
        labels = [entry.label for entry in table.values()]
        assert len(labels) == len(set(labels))


def test_old_names_are_read_as_aliases():
    assert IMAGE_OPTIMIZERS["adahesscale-10th"] is OPTIMIZERS["adahesscale-every10"]
    assert METHODS["adahesscale-trust"].label == "Scaled AdaHesScale"
    assert with_step_sizes("adahesscale-10th", "0.1", IMAGE_OPTIMIZERS) == [("adahesscale-10th", 0.1)]
    assert "adahesscale-10th" not in list(IMAGE_OPTIMIZERS)
    with pytest.raises(KeyError, match="nothing"):
        IMAGE_OPTIMIZERS["nothing"]


def test_agents_use_our_adam_and_images_use_that_of_torch():
    weight = torch.zeros(2, requires_grad=True)
    assert type(AGENT_OPTIMIZERS["adam"].make([weight], 0.1)) is hesscale.Adam
    assert type(IMAGE_OPTIMIZERS["adam"].make([weight], 0.1)) is torch.optim.Adam
    assert type(METHODS["adam"].optimizer([weight])) is torch.optim.Adam
