"""A training loop with Accelerate, in bfloat16, for the model and the task of huggingface_trainer.py.

pip install -c constraints.txt -e ".[integrations]"
python examples/accelerate_bert.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from huggingface_trainer import accuracy, make_model, sentences
from torch.utils.data import DataLoader

import hesscale


def train(steps: int) -> float:
    """Accelerate wraps the optimizer; what is captured is the one inside."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = make_model()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3, trust_radius=1e-2)
    model, wrapped, loader = accelerator.prepare(model, optimizer, DataLoader(sentences(32 * steps), batch_size=32))
    with hesscale.capture(optimizer):
        for batch in loader:
            wrapped.zero_grad()
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            wrapped.step()
    return accuracy(model)


def main(steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    print(f"after {steps} steps: accuracy {train(steps):.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
