"""Other people's loops in two processes, started by torchrun with the name of one: do all processes end with the same weights?"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist

import hesscale

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def accelerate() -> torch.nn.Module:
    from accelerate import Accelerator
    from huggingface_trainer import make_model, sentences
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model(attention="sdpa")
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3, trust_radius=1e-2)
    model, wrapped, loader = accelerator.prepare(model, optimizer, DataLoader(sentences(128), batch_size=8))
    with hesscale.capture(optimizer):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                wrapped.step()
                wrapped.zero_grad()
    return model


def trainer() -> torch.nn.Module:
    from huggingface_trainer import make_model, sentences
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=5,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        chosen = hesscale.AdaHesScale, {"trust_radius": 1e-2}
        made = Trainer(model=make_model(), args=arguments, train_dataset=sentences(256), optimizer_cls_and_kwargs=chosen)
        made.create_optimizer()
        with hesscale.capture(made.optimizer):
            made.train()
    return made.model


def lightning() -> torch.nn.Module:
    import lightning
    from lightning_digits import CaptureCurvature, Digits, digits
    from torch.utils.data import DataLoader

    module = Digits()
    lightning.Trainer(
        max_steps=6,
        accumulate_grad_batches=2,
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        callbacks=[CaptureCurvature()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(digits(), batch_size=16))
    return module


def main(name: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = {"accelerate": accelerate, "trainer": trainer, "lightning": lightning}[name]()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = weights.clone()
    dist.broadcast(first, 0)
    assert torch.equal(weights, first), f"the processes differ by {(weights - first).abs().max()}"
    if dist.get_rank() == 0:
        print(f"{name}: {dist.get_world_size()} processes, {len(weights)} equal weights")
    dist.barrier()  # gloo's threads may abort a process that ends first
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
