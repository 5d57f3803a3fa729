"""Other people's loops, in float64 and in any number of processes that torchrun starts: what each process ends with.

Usage: ddp_loops.py NAME FOLDER

All batches of a step together have the same samples in any number of processes, and so has each of the two parts of which a step
accumulates the gradients. Keys have no bias that is trained, since its gradient would be rounding alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import hesscale

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

STEPS, PARTS = 10, 2
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
SIZE = 16 // WORLD_SIZE  # of a process's batch in one part of a step


class Record:
    """The diagonals of every step, and at the end weights and averages."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.diagonals: list[list[torch.Tensor]] = []

    def note_diagonals(self, *_: Any) -> None:
        self.diagonals.append([p.hess_diag.clone() for p in self.optimizer.parameters()])

    def end(self) -> dict[str, Any]:
        params = self.optimizer.parameters()
        averages = [dict(self.optimizer.state[p]) for p in params]
        return {"weights": [p.detach() for p in params], "averages": averages, "diagonals": self.diagonals}


def bert() -> torch.nn.Module:
    from huggingface_trainer import make_model

    model = make_model().double()
    for name, p in model.named_parameters():
        p.requires_grad_("key.bias" not in name)
    return model


def accelerate() -> Record:
    from accelerate import Accelerator
    from huggingface_trainer import sentences
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model = bert()
    optimizer = hesscale.AdaHesScale([p for p in model.parameters() if p.requires_grad], lr=1e-3, trust_radius=1e-2)
    record = Record(optimizer)
    optimizer.register_step_pre_hook(record.note_diagonals)
    loader = DataLoader(sentences(16 * PARTS * STEPS), batch_size=SIZE)
    model, wrapped, loader = accelerator.prepare(model, optimizer, loader)
    with hesscale.capture(optimizer):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                wrapped.step()
                wrapped.zero_grad()
    return record


def mean_over_processes(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """The Trainer multiplies losses by the number of processes, for losses that are divided by the samples of all of them.

    It does so even with BERT's own loss, which is a mean over the process's samples alone.
    """
    return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def trainer() -> Record:
    from huggingface_trainer import sentences
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=SIZE,
            gradient_accumulation_steps=PARTS,
            learning_rate=1e-3,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        chosen = hesscale.AdaHesScale, {"trust_radius": 1e-2}
        data = sentences(16 * PARTS * STEPS)
        made = Trainer(
            model=bert(),
            args=arguments,
            train_dataset=data,
            compute_loss_func=mean_over_processes,
            optimizer_cls_and_kwargs=chosen,
        )
        made.create_optimizer()
        record = Record(made.optimizer)
        made.optimizer.register_step_pre_hook(record.note_diagonals)
        with hesscale.capture(made.optimizer):
            made.train()
    return record


def lightning() -> Record:
    import lightning
    from lightning_digits import CaptureCurvature, Digits, digits
    from torch.utils.data import DataLoader

    class Recording(lightning.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:  # Lightning's step runs the passes
            record.note_diagonals()

    class Recorded(Digits):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            nonlocal record
            record = Record(super().configure_optimizers())
            return record.optimizer

    record: Any = None
    lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=PARTS,
        precision="64-true",
        strategy="ddp",
        devices=WORLD_SIZE,
        accelerator="cpu",
        callbacks=[CaptureCurvature(), Recording()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Recorded(), DataLoader(digits(), batch_size=SIZE))
    return record


def main(name: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record = {"accelerate": accelerate, "trainer": trainer, "lightning": lightning}[name]()
    torch.save(record.end(), Path(folder) / f"{WORLD_SIZE}_{os.environ.get('RANK', '0')}")
    if dist.is_initialized():
        assert dist.get_world_size() == WORLD_SIZE
        dist.barrier()  # gloo's threads may abort a process that ends first
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
