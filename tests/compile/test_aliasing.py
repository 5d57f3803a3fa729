"""Which tensors share memory."""

from __future__ import annotations

import torch

from hesscale.compile.aliasing import overlapping_group, overlaps


def test_which_tensors_overlap():
    whole = torch.ones(4)
    first, a, other, b, empty = overlaps([torch.ones(2), whole, torch.ones(3), whole[1:], torch.ones(0)])
    assert (first, a, other, empty) == (0, b, 2, 4)


def test_which_groups_overlap():
    whole = torch.zeros(10)
    assert overlapping_group([[whole[:5]], [whole[5:]], [torch.zeros(0)]]) is None
    assert overlapping_group([[whole[:6]], [whole[5:]]]) == 1
    assert overlapping_group([[whole, whole[:2]], [torch.zeros(3)]]) is None  # of one group
    assert overlapping_group([[torch.zeros(3)], [whole], [whole[3:4]]]) == 2
    assert overlapping_group([[whole], [whole[2:3]], [whole[8:]]]) in (1, 2)
