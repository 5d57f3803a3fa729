"""What a training step costs, as a ratio to torch's Adam in the same run: time and peak memory of every method, in every mode.

In each round every method runs a block of steps (zero_grad, forward, backward with curvature, update), in an order drawn anew;
a ratio is the median over rounds of the method's time by Adam's. Needs torch, and matplotlib for the figures.

    python benchmarks/step_cost.py --device cpu --out results/step_cost/cpu
    python benchmarks/step_cost.py --sweep layers --out results/step_cost/cpu
    python benchmarks/step_cost.py --report results/step_cost --into benchmarks/README.md
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

from hesscale.experiments.bench import main

if __name__ == "__main__":
    main()
