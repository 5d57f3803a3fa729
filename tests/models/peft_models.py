"""Adapters of peft on a small Llama; what is not an adapter is frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_runner import Case, in_full_precision
from torch import nn
from transformers_models import causal, next_token

QKV = ["q_proj", "v_proj"]


def adapter(config: str, *, base: Callable[[], Case] = lambda: causal("llama", num_key_value_heads=2), **settings: Any) -> Case:
    def make() -> nn.Module:
        import peft

        return peft.get_peft_model(base().make(), getattr(peft, config)(**settings))

    return Case("peft", config, make, next_token)


def tuned(config: str, **settings: Any) -> Case:
    return adapter(config, target_modules=QKV, **settings)


def prompted(config: str, **settings: Any) -> Case:
    return adapter(config, task_type="CAUSAL_LM", num_virtual_tokens=2, **settings)


CASES = [
    tuned("AdaLoraConfig", init_r=2, target_r=1, total_step=10),
    tuned("BOFTConfig", boft_block_size=2),
    tuned("C3AConfig", block_size=2),
    tuned("DeloraConfig", r=2),
    in_full_precision(tuned("FourierFTConfig", n_frequency=5)),
    tuned("HRAConfig", r=2),
    adapter("IA3Config", target_modules=[*QKV, "down_proj"], feedforward_modules=["down_proj"]),
    adapter("LNTuningConfig", target_modules=["input_layernorm"]),
    tuned("LoHaConfig", r=2),
    tuned("LoKrConfig", r=2),
    tuned("LoraConfig", r=2, lora_dropout=0.1),
    tuned("LoraConfig", r=2, use_dora=True)._replace(name="LoraConfig, DoRA"),
    tuned("LoraConfig", r=2, use_rslora=True, modules_to_save=["lm_head"])._replace(name="LoraConfig, rsLoRA"),
    tuned("MissConfig", r=2),
    tuned("OFTConfig", oft_block_size=2),
    tuned("RandLoraConfig", r=2),
    tuned("RoadConfig", group_size=2),
    tuned("ShiraConfig", r=1),
    tuned("VBLoRAConfig", r=2, num_vectors=4, vector_length=4, topk=2),
    tuned("VeraConfig", r=2),
    prompted("PrefixTuningConfig"),
    prompted("PromptEncoderConfig", encoder_hidden_size=6),
    prompted("PromptTuningConfig"),
]
