"""Cases: linear maps."""

from __future__ import annotations


from .table import case

case("view", lambda x: x.view(12), (3, 4))
case("t", lambda x: x.t(), (3, 4))
case("transpose", lambda x: x.transpose(0, 1), (3, 4, 2))
case("expand", lambda x: x.expand(5, 3), (1, 3))
case("sum", lambda x: x.sum(), (3, 4))
