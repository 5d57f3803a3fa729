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

`hesscale.backward(loss)` on other people's models as they come: {models} models of {libraries} libraries, each small and with
random parameters.

{runs} run and {raises} raise an error; the diagonals of {compared} were compared with an independent recursion, and are equal.
`make models` writes this page (torch {torch}, CPU, one thread). `make test-all` checks every row up to its costs.

- **runs**: in float32 and in float64, in train and in eval mode. Of an error the page shows the first sentence; the message goes
  on with ways out. Some models do not run in float64 by themselves, so for that they are changed: mixtures of experts in
  transformers get eager experts, and stable-baselines3 and FourierFT lose their casts to float32. Gated delta rules
  (`qwen3_next`, `olmo_hybrid`) have chunks of 4 instead of 64 throughout, to keep the comparison small.
- **gradients**: *identical* means: to the last bit those of `loss.backward()` on the same model with the same seed.
- **diagonals**: *equal* means that every entry agrees, in float64 and in both modes, to a relative {tolerance:.0e} (or, of small
  entries, to 1e-10 of the largest in their tensor plus 1e-13 of the largest in the model), with the recursion by brute force in
  [graph_recursion.py](../tests/models/graph_recursion.py). That walks the graph of the loss. It takes each node's Jacobian and
  second derivatives from PyTorch's backward of that node alone, entry by entry, and shares no code with hesscale. Two operators
  are stated instead of asked for: weight norm, whose second derivative in PyTorch is wrong, and hardsigmoid, which PyTorch does
  not differentiate twice and whose second derivative is taken as zero. In this graph attention and recurrent layers are not
  fused. In both graphs casts to float32 are left out, and `head="rules"` is set, since the exact head is no part of the
  recursion; so the default head is run here, but not compared. Products by groups of experts and fused LSTMs exist in float32
  only: they are held by one looser check, that the diagonal of the whole model in float32 and eval mode is within {low:.1%} of
  that in float64. *With fallback* means that `hesscale.backward(loss, fallback="exact")` was compared.
- **nodes**: how many autograd's graph has.
- **cost**: the time of `hesscale.backward(loss)` over that of `loss.backward()`, in float32 and train mode, the median of
  {rounds} interleaved rounds; in the column **rules**, the same with `head="rules"`. It is noisy, and of models as small as these
  it is mostly overhead per node: [benchmarks](../benchmarks/README.md#step-cost) has networks of a useful size. Where the two
  numbers are far apart, the model ends in more than a linear layer, and the exact head takes the time. Their medians over all
  models are {cost:.1f} and {rules:.1f}.
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
