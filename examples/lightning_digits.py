"""AdaHesScale in PyTorch Lightning with automatic optimization: a callback enters the ``capture`` block when training starts.

pip install -c constraints.txt -e ".[integrations]"
python examples/lightning_digits.py --epochs 5
"""

from __future__ import annotations

import argparse
import contextlib

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hesscale


class CaptureCurvature(lightning.Callback):
    """Captures the optimizers that ``configure_optimizers`` made, from the start of training to its end or an error."""

    def __init__(self) -> None:
        self.block = contextlib.ExitStack()

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of precision="16-mixed"
        self.block.enter_context(hesscale.capture(*trainer.optimizers, scaler=scaler))

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.block.close()

    def on_exception(self, trainer: lightning.Trainer, module: lightning.LightningModule, exception: BaseException) -> None:
        self.block.close()


class Digits(lightning.LightningModule):
    """Nothing here knows of curvature but the name of the optimizer."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return hesscale.AdaHesScale(self.parameters(), lr=self.lr, eps=1e-4)


def digits() -> TensorDataset:
    data = load_digits()
    return TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))


def main(epochs: int, seed: int) -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(seed, verbose=False)
    module, dataset = Digits(), digits()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[CaptureCurvature()],
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(dataset, batch_size=64, shuffle=True))
    images, labels = dataset.tensors
    with torch.no_grad():
        logits = module.network(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    print(f"after {epochs} epochs: training loss {F.cross_entropy(logits, labels):.3f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
