"""When Hessian diagonals are sent under DistributedDataParallel: while the backward pass goes on, or after it.

Two processes on one machine train a tanh network and talk over gloo. For each bucket of gradients and of diagonals, the script
notes when it is sent and when its mean is there. The processes and gloo's threads share the cores. So the milliseconds say
nothing about a cluster, but the order of events does.

    python benchmarks/ddp_overlap.py --out results/ddp_overlap
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
import torch.multiprocessing as mp
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from records import header, made_by, save
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hesscale
from hesscale.distributed import overlap
from hesscale.experiments.lab.files import write_whole
from hesscale.experiments.lab.markdown import markdown_table

SETTINGS = {"sent during the pass": True, "sent after the pass": False}
queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback  # to call when the last gradient is computed
KINDS = {"gradients": "tab:blue", "diagonals": "tab:orange"}


class Clock:
    """Notes the events of a backward pass, in milliseconds since it began."""

    def restart(self) -> None:
        self.begun = time.perf_counter()
        self.spans: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}

    def now(self) -> float:
        return 1e3 * (time.perf_counter() - self.begun)

    def note_end(self) -> None:
        self.end = self.now()

    def note(self, kind: str, work: Any) -> Any:
        """A future like that of the all-reduce, which notes its end."""
        span = [self.now(), 0.0]
        self.spans[kind].append(span)

        def end(future: Any) -> Any:
            span[1] = self.now()
            return future.value()

        return work.get_future().then(end)


def train(rank: int, folder: str, overlaps: bool, layers: int, width: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{overlaps:d}", rank=rank, world_size=2)
    if not overlaps:
        overlap.BACKENDS.clear()
    torch.manual_seed(0)
    network = nn.Sequential(*[module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh())])
    model, clock, send, passes = DistributedDataParallel(network, bucket_cap_mb=4), Clock(), dist.all_reduce, []

    def send_gradients(state, bucket):  # DDP checks annotations, and does not know them as strings
        flat = bucket.buffer().div_(dist.get_world_size())
        return clock.note("gradients", send(flat, async_op=True)).then(lambda future: future.value()[0])

    def send_diagonals(flat: Tensor, **options: Any) -> Any:
        work = send(flat, **options)
        clock.note("diagonals", work)
        return work

    model.register_comm_hook(None, send_gradients)
    dist.all_reduce = send_diagonals
    for step in range(steps + 2):
        generator = torch.Generator().manual_seed(2 * step + rank)
        loss = model(torch.randn(64, width, generator=generator)).square().mean()
        loss.register_hook(lambda gradient: queue_callback(clock.note_end))
        dist.barrier()
        clock.restart()
        hesscale.backward(loss)
        if step >= 2:  # in the first two, DDP and hesscale plan their buckets
            passes.append({**clock.spans, "computed": clock.end, "whole": clock.now()})
        model.zero_grad()
    dist.barrier()
    if rank == 0:
        torch.save(passes, Path(folder) / f"passes{overlaps:d}")
    dist.destroy_process_group()


def measured(settings: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, overlaps in SETTINGS.items():
            mp.spawn(train, (folder, overlaps, *settings), nprocs=2)
            found[name] = torch.load(Path(folder) / f"passes{overlaps:d}")
    return found


def row(name: str, passes: Sequence[dict[str, Any]]) -> list[str]:
    def middle(value: Any) -> str:
        return f"{median(map(value, passes)):.1f}"

    sent = [sum(begun < found["computed"] for begun, _ in found["diagonals"]) for found in passes]
    count = len(passes[0]["diagonals"])
    return [
        name,
        f"{median(sent):.0f} of {count}",
        middle(lambda found: found["diagonals"][0][0]),
        middle(lambda found: found["computed"]),
        middle(lambda found: found["whole"]),
    ]


def page(found: dict[str, Any]) -> str:
    columns = [
        "diagonals",
        "buckets sent before the last gradient is computed",
        "first bucket sent, ms",
        "last gradient computed, ms",
    ]
    rows = [row(name, passes) for name, passes in found["passes"].items()]
    network = f"{found['layers']} layers of width {found['width']}"
    return f"""# Hessian diagonals under DistributedDataParallel

{made_by(found)}
Two processes train {network}, in buckets of 4 MB. Medians over {found["steps"]} backward passes of the first process.
Both processes and gloo share the cores of one machine, so the milliseconds say nothing about a cluster.

{markdown_table([*columns, "all means there, ms"], rows)}
![One pass with each setting: when buckets of gradients and diagonals are on their way](ddp_overlap.png)
"""


def figure(passes: dict[str, list[dict[str, Any]]]) -> Figure:
    """The pass of median length with each setting."""
    drawn = Figure(figsize=(7, 3), layout="constrained")
    axes = drawn.subplots()
    labels = []
    for name, found in passes.items():
        one = sorted(found, key=lambda one: one["whole"])[len(found) // 2]
        axes.barh(len(labels), one["computed"], color="tab:gray", height=0.6)
        labels.append(f"{name}:\nbackward pass")
        for kind, colour in KINDS.items():
            for begun, end in one[kind]:
                axes.barh(len(labels), end - begun, left=begun, color=colour, height=0.6, alpha=0.5, edgecolor="white")
            labels.append(kind)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the pass began")
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results/ddp_overlap"))
    options = parser.parse_args(arguments)
    settings = {"layers": options.layers, "width": options.width, "steps": options.steps}
    found = header("ddp_overlap.py", arguments) | settings | {"passes": measured(list(settings.values()))}
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / "ddp_overlap.png", lambda path: FigureCanvasAgg(figure(found["passes"])).print_png(path))
    save(options.out / "ddp_overlap", found, page(found))


if __name__ == "__main__":
    main()
