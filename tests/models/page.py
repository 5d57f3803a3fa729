"""Write docs/models.md: what happens to every model of the tables in this folder. `make models` runs it, in some minutes.

With names of libraries as arguments, their rows alone are made anew.
"""

from __future__ import annotations

import itertools
import re
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

import diffusers_models
import peft_models
import rl_models
import timm_models
import torch
import torch_geometric_models
import torch_models
import transformers_models
from model_runner import LOW_PRECISION, TOLERANCE, Case, Outcome, examine

PAGE = Path(__file__).parent.parent.parent / "docs/models.md"
TABLES = (
    *(torch_models, transformers_models, timm_models, torch_geometric_models),
    *(diffusers_models, peft_models, rl_models),
)
CASES: list[Case] = [case for table in TABLES for case in table.CASES]
ROUNDS = 9
ROW = re.compile(r"^\|" + 7 * r" ([^|]*) \|" + "$", re.MULTILINE)
Row = tuple[str, ...]  # model, runs, gradients, diagonals, nodes, cost, rules

TOP = """# Models

This page shows what `hesscale.backward(loss)` does with unchanged models of other libraries: {models} models of {libraries}
libraries, each in a small configuration with random parameters.

{runs} run and {raises} raise an error. The diagonals of {compared} were compared with an independent implementation, and are
equal. `make models` writes this page (torch {torch}, CPU, one thread). `make test-all` checks every column except the costs.

- **runs**: *yes* means that the model runs in float32 and in float64, in train and in eval mode. Otherwise the page shows the
  first sentence of the error; the full message also says what to do. Some models do not support float64 themselves and are
  changed for that run: mixtures of experts in transformers use eager experts, and stable-baselines3 and FourierFT do not cast
  to float32. Gated delta rules (`qwen3_next`, `olmo_hybrid`) use chunks of 4 instead of 64 in every run, to keep the comparison
  small.
- **gradients**: *identical* means bit for bit those of `loss.backward()` on the same model with the same seed.
- **diagonals**: *equal* means that every entry, in float64 and in both modes, agrees with the brute-force recursion in
  [graph_recursion.py](../tests/models/graph_recursion.py). The relative tolerance is {tolerance:.0e}. For small entries, the
  tolerance is 1e-10 of the largest entry in their tensor plus 1e-13 of the largest in the model. *With fallback* means that
  `hesscale.backward(loss, fallback="exact")` was compared.
- **nodes**: the number of nodes in autograd's graph.
- **cost**: the time of `hesscale.backward(loss)` divided by that of `loss.backward()`, in float32 and train mode, as the median
  of {rounds} interleaved rounds. The column **rules** has the same ratio with `head="rules"`. The medians over all models
  are {cost:.1f} and {rules:.1f}. The times are noisy. For models as small as these, they are mostly overhead per node.
  [Benchmarks](../benchmarks/README.md#step-cost) has networks of a realistic size. If the two numbers are far apart, nonlinear
  operators follow the model's last linear layer, and the exact diagonal at the outputs takes most of the time.

Details of the comparison of diagonals:

- The brute-force recursion traverses the graph of the loss. It gets each node's Jacobian and second derivatives from PyTorch's
  backward of that node alone, entry by entry, and shares no code with hesscale.
- It has separate formulas for two operators: weight norm, whose second derivative in PyTorch is wrong, and hardsigmoid,
  which PyTorch cannot differentiate twice and whose second derivative is taken as zero.
- Its attention and recurrent layers are not fused. Both sides leave out casts to float32.
- Both sides use `head="rules"`, since the recursion does not include the exact diagonal at the model's outputs. So the
  default `head="auto"` is run here, but not compared.
- Grouped matrix products of experts and fused LSTMs exist in float32 only. Their check is looser: the diagonal of the whole
  model in float32 and eval mode is within {low:.1%} of that in float64.
"""


def page(rows: dict[Case, Row]) -> str:
    lines = [
        TOP.format(
            models=len(rows),
            libraries=len({case.library for case in rows}),
            runs=sum(row[1] == "yes" for row in rows.values()),
            raises=sum(row[1] != "yes" for row in rows.values()),
            compared=sum(row[3].endswith("equal") for row in rows.values()),
            torch=torch.__version__.partition("+")[0],
            tolerance=TOLERANCE,
            low=LOW_PRECISION,
            rounds=ROUNDS,
            cost=statistics.median(float(row[5]) for row in rows.values() if row[5]),
            rules=statistics.median(float(row[6]) for row in rows.values() if row[6]),
        )
    ]
    for library, cases in itertools.groupby(rows, key=lambda case: case.library):
        lines += [f"## {library} {version(library).partition('+')[0]}", ""]
        lines += ["| model | runs | gradients | diagonals | nodes | cost | rules |", "|" + 7 * " --- |"]
        lines += [f"| {' | '.join(rows[case])} |" for case in cases]
        lines.append("")
    return "\n".join(lines)


def row(case: Case, outcome: Outcome) -> Row:
    costs = ("", "") if outcome.costs is None else tuple(f"{cost:.1f}" for cost in outcome.costs)
    return title(case), outcome.runs, outcome.gradients, outcome.diagonals, str(outcome.nodes), *costs


def title(case: Case) -> str:
    return f"`{case.name}`" + (f" ({case.what})" if case.what else "")


def rows_on_page() -> dict[tuple[str, str], Row]:
    """What the page says, by library and model."""
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    found = [(section.split()[0], row) for section in sections for row in ROW.findall(section)]
    return {(library, row[0]): row for library, row in found if row[0].startswith("`")}


def main(*libraries: str) -> None:
    torch.set_num_threads(1)
    rows = {}
    for case in CASES:
        if libraries and case.library not in libraries:
            rows[case] = rows_on_page()[case.library, title(case)]
        else:
            rows[case] = row(case, examine(case, rounds=ROUNDS))
            print(case.library, *rows[case], sep=" | ", flush=True)
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
