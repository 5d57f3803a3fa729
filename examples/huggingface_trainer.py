"""Train a small BERT by Hugging Face's Trainer with AdaHesScale.

    pip install -c constraints.txt -e ".[integrations]"
    python examples/huggingface_trainer.py --steps 200

Nothing is downloaded: the model is built from a config, the sentences are random token ids, and the task is to tell whether the
id of the first token is odd.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import hesscale

VOCABULARY = 20


def make_model(attention: str = "sdpa", dropout: float = 0.0) -> BertForSequenceClassification:
    """Fused attention (``"sdpa"``) has a rule, with the diagonals of ``"eager"``, which is made of single operators."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
        attn_implementation=attention,
    )
    return BertForSequenceClassification(config)


def sentences(count: int, length: int = 8, seed: int = 0) -> list[dict[str, Tensor]]:
    ids = torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row[0] % 2} for row in ids]


def train(steps: int, folder: str) -> float:
    """Trains as usual; the only line that is not Hugging Face's own is the ``with``."""
    trainer = Trainer(
        model=make_model(),
        args=TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            weight_decay=0.01,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=sentences(512),
        optimizer_cls_and_kwargs=(
            hesscale.AdaHesScale,
            {"lr": 1e-3, "decoupled_weight_decay": True, "trust_radius": 1e-2},
        ),
    )
    trainer.create_optimizer()
    with hesscale.capture(trainer.optimizer):
        trainer.train()
    return accuracy(trainer.model)


@torch.no_grad()
def accuracy(model: torch.nn.Module) -> float:
    model.eval()
    held_out = sentences(256, seed=1)
    ids, labels = (torch.stack([s[key] for s in held_out]) for key in ("input_ids", "labels"))
    return float((model(input_ids=ids).logits.argmax(1) == labels).float().mean())


def main(steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        print(f"after {steps} steps: accuracy {train(steps, folder):.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
