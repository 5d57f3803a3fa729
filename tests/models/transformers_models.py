"""Models of transformers, by the name of their configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from model_runner import Case, draw
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = {
    "vocab_size": 13,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER = {
    "vocab_size": 13,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 16,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": 13,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
STAGES = {"image_size": 16, "num_labels": 3, "hidden_sizes": [4, 6, 8, 8], "depths": [1, 1, 1, 1]}
SPEECH = {
    "vocab_size": 5,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "conv_dim": [4, 4],
    "conv_kernel": [4, 3],
    "conv_stride": [2, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
WHISPER = {
    "num_mel_bins": 4,
    "max_source_positions": 4,
    "max_target_positions": 8,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}
TEXT = {
    "vocab_size": 13,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "eos_token_id": 12,
    "projection_size": 8,
}
SERIES = {
    "prediction_length": 3,
    "context_length": 4,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 8,
    "label_length": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "moving_average": 3,
}
DECISIONS = {"state_dim": 4, "act_dim": 2, "hidden_size": 8, "n_layer": 1, "n_head": 2, "max_ep_len": 4}
PERCEIVER = {
    "num_latents": 3,
    "d_latents": 8,
    "d_model": 6,
    "num_blocks": 1,
    "num_self_attends_per_block": 1,
    "num_self_attention_heads": 2,
    "num_cross_attention_heads": 2,
    "qk_channels": 8,
    "v_channels": 8,
}
TOKENS = torch.tensor([[1, 4, 5, 3], [3, 7, 9, 12]])
CLASSES = torch.tensor([0, 2])


def case(auto: str, name: str, loss: Callable[[nn.Module], Tensor], config: dict[str, Any], changes: dict[str, Any]) -> Case:
    def make() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
        settings = {**config, **changes}
        parts = {key: settings.pop(key) for key in list(settings) if key.endswith("_config")}
        return getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(name, **settings, **parts))

    return Case("transformers", name, make, loss, auto.removeprefix("AutoModel").removeprefix("For"))


def causal(name: str, **changes: Any) -> Case:
    return case("AutoModelForCausalLM", name, next_token, SMALL, changes)


def masked(name: str, **changes: Any) -> Case:
    return case("AutoModelForMaskedLM", name, next_token, SMALL, changes)


def classifier(name: str, **changes: Any) -> Case:
    return case("AutoModelForSequenceClassification", name, text_class, {**SMALL, "num_labels": 3}, changes)


def translator(name: str, **changes: Any) -> Case:
    return case("AutoModelForSeq2SeqLM", name, next_token, ENCODER_DECODER, changes)


def t5(name: str, **changes: Any) -> Case:
    return case("AutoModelForSeq2SeqLM", name, next_token, T5, changes)


def vision(name: str, **changes: Any) -> Case:
    return case("AutoModelForImageClassification", name, image_class(8), VISION, changes)


def stages(name: str, **changes: Any) -> Case:
    return case("AutoModelForImageClassification", name, image_class(changes.get("image_size", 16)), STAGES, changes)


def speech(name: str, **changes: Any) -> Case:
    return case(
        "AutoModelForAudioClassification", name, sound_class, {**SPEECH, "num_labels": 3, "classifier_proj_size": 4}, changes
    )


def next_token(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


def text_class(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, labels=CLASSES).loss


def image_class(size: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(pixel_values=draw(2, 3, size, size), labels=CLASSES).loss


def sound_class(model: nn.Module) -> Tensor:
    return model(input_values=draw(2, 80), labels=CLASSES).loss


def transcript(model: nn.Module) -> Tensor:
    return model(input_values=draw(2, 80), labels=torch.tensor([[1, 2], [3, 1]])).loss


def spoken(model: nn.Module) -> Tensor:
    return model(input_features=draw(2, 4, 8), labels=TOKENS).loss


def contrastive(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, pixel_values=draw(2, 3, 8, 8), return_loss=True).loss


def forecast(model: nn.Module) -> Tensor:
    series = {"past_values": draw(2, 6), "future_values": draw(2, 3, seed=1)}
    features = {"past_time_features": draw(2, 6, 1, seed=2), "future_time_features": draw(2, 3, 1, seed=3)}
    y = model(**series, **features, past_observed_mask=torch.ones(2, 6)).last_hidden_state
    return F.mse_loss(y, draw(*y.shape, seed=4))


def decisions(model: nn.Module) -> Tensor:
    history = {"states": draw(2, 3, 4), "actions": draw(2, 3, 2, seed=1), "rewards": draw(2, 3, 1, seed=2)}
    found = model(**history, returns_to_go=draw(2, 3, 1, seed=3), timesteps=torch.arange(6).view(2, 3) % 3)
    return F.mse_loss(found.action_preds, history["actions"])


def latent(model: nn.Module) -> Tensor:
    y = model(inputs=draw(2, 5, 6)).last_hidden_state
    return F.mse_loss(y, draw(*y.shape, seed=3))


def in_short_chunks(case: Case) -> Case:
    """Linear attention pads its sequences to chunks of 64, which makes 4096 entries of 16."""

    def loss(model: nn.Module) -> Tensor:
        module = sys.modules[type(model).__module__]
        rule = "torch_chunk_gated_delta_rule"
        with mock.patch.object(module, rule, partial(getattr(module, rule), chunk_size=4)):
            return case.loss(model)

    return case._replace(loss=loss)


LATENT = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 4}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
LINEAR = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

CASES = [
    causal("apertus"),
    causal("arcee"),
    causal("aria_text"),
    causal("biogpt"),
    causal("bitnet"),
    causal("bloom"),
    causal("codegen", rotary_dim=4, num_attention_heads=4, hidden_size=16),
    causal("cohere"),
    causal("cohere2"),
    causal("cohere2_moe"),
    causal("ctrl", n_embd=8, dff=12, n_head=2, n_layer=2),
    causal("cwm"),
    causal("deepseek_v2", **LATENT, **ROUTED),
    causal("deepseek_v3", **LATENT, **ROUTED, num_key_value_heads=2, head_dim=2, first_k_dense_replace=1),
    causal("diffllama", num_key_value_heads=2),
    causal("doge"),
    causal("dots1", **ROUTED, n_shared_experts=1),
    causal("ernie4_5"),
    causal("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=8),
    causal("exaone4"),
    causal("falcon_mamba"),
    causal("flex_olmo"),
    causal("gemma"),
    causal("gemma2"),
    causal("gemma3_text"),
    causal("glm"),
    causal("glm4"),
    causal("glm4_moe", **ROUTED, num_key_value_heads=2),
    causal("gpt2"),
    causal("gpt_bigcode"),
    causal("gpt_neo", attention_types=[[["global", "local"], 1]], num_layers=2),
    causal("gpt_neox"),
    causal("gpt_oss", num_local_experts=4, num_experts_per_tok=2),
    causal("gptj", rotary_dim=4),
    causal("granite"),
    causal("granitemoe"),
    causal("helium"),
    causal("hunyuan_v1_dense"),
    causal(
        "jamba", num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4, mamba_dt_rank=2
    ),
    causal("jetmoe"),
    causal("lfm2"),
    causal("llama"),
    causal("llama4_text"),
    causal("mamba"),
    causal("mamba2", num_heads=2, head_dim=8, state_size=4, n_groups=1, chunk_size=4),
    causal("minimax"),
    causal("mistral"),
    causal("mixtral"),
    causal("modernbert-decoder"),
    causal("mpt"),
    causal("nemotron"),
    causal("olmo"),
    causal("olmo2"),
    causal("olmo3"),
    in_short_chunks(causal("olmo_hybrid", layer_types=["linear_attention", "full_attention"])),
    causal("olmoe", num_experts=4, num_experts_per_tok=2),
    causal("openai-gpt"),
    causal("opt", ffn_dim=12, word_embed_proj_dim=8),
    causal("persimmon"),
    causal("phi"),
    causal("phi3"),
    causal("phimoe"),
    causal("qwen2"),
    causal("qwen2_moe", **MOE, shared_expert_intermediate_size=8),
    causal("qwen3"),
    causal("qwen3_moe", **MOE),
    in_short_chunks(causal("qwen3_next", **MOE, **LINEAR, shared_expert_intermediate_size=8)),
    causal("recurrent_gemma"),
    causal("rwkv"),
    causal("seed_oss"),
    causal("smollm3"),
    causal("stablelm"),
    causal("starcoder2"),
    causal("xglm", ffn_dim=12, attention_heads=2, num_layers=2, d_model=8),
    causal("xlstm", num_heads=2, embedding_dim=8, chunk_size=4, qk_dim_factor=1.0, v_dim_factor=1.0),
    masked("albert", embedding_size=6),
    masked("bert"),
    masked("big_bird", attention_type="original_full"),
    masked("convbert", embedding_size=8, conv_kernel_size=3, head_ratio=1),
    masked("deberta", pos_att_type="c2p|p2c", relative_attention=True, max_relative_positions=4),
    masked("deberta-v2", pos_att_type="c2p|p2c", relative_attention=True, max_relative_positions=4, conv_kernel_size=0),
    masked("distilbert", dim=8, hidden_dim=12, n_heads=2, n_layers=2),
    masked("electra", embedding_size=6),
    masked("ernie"),
    masked("esm", mask_token_id=3, position_embedding_type="rotary"),
    masked("flaubert", emb_dim=8, n_heads=2, n_layers=2),
    masked("fnet"),
    masked("ibert", quant_mode=False),
    masked("longformer", attention_window=4),
    masked("mobilebert", embedding_size=6, intra_bottleneck_size=4, true_hidden_size=4),
    masked("modernbert"),
    masked("mpnet"),
    masked("nystromformer", segment_means_seq_len=4, num_landmarks=2),
    masked("roberta"),
    masked("roformer"),
    masked("squeezebert", embedding_size=8, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2),
    masked("xlm-roberta"),
    masked("yoso", use_expectation=True),
    classifier("gpt2"),
    translator("bart"),
    translator("bigbird_pegasus", attention_type="original_full"),
    translator("blenderbot"),
    translator("m2m_100"),
    translator("marian"),
    translator("mbart"),
    translator("pegasus"),
    t5("longt5", local_radius=2, encoder_attention_type="local"),
    t5("mt5"),
    t5("switch_transformers", num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    t5("t5"),
    t5("umt5"),
    vision("beit"),
    vision("dinov2", mlp_ratio=2),
    vision("dinov2_with_registers", mlp_ratio=2),
    vision("ijepa"),
    vision("vit"),
    vision("vit_msn"),
    stages("bit", embedding_size=4, num_groups=2),
    stages("convnext", image_size=32),
    stages("convnextv2", image_size=32),
    stages("focalnet", embed_dim=4, patch_size=2, focal_levels=[1, 1, 1, 1], focal_windows=[3, 3, 3, 3]),
    stages("poolformer", image_size=32),
    stages("regnet", embedding_size=4, groups_width=2),
    stages("resnet", embedding_size=4, layer_type="basic"),
    stages("segformer", image_size=32, hidden_sizes=[4, 4, 4, 4], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=4),
    stages("swin", embed_dim=4, num_heads=[1, 2], depths=[1, 1], patch_size=2, window_size=2),
    stages("swinv2", embed_dim=4, num_heads=[1, 2], depths=[1, 1], patch_size=2, window_size=2),
    speech("hubert"),
    speech("sew", squeeze_factor=1),
    speech("unispeech"),
    speech("wav2vec2"),
    speech("wavlm"),
    case("AutoModelForCTC", "wav2vec2", transcript, SPEECH, {}),
    case("AutoModelForSpeechSeq2Seq", "whisper", spoken, {**ENCODER_DECODER, **WHISPER}, {}),
    case("AutoModel", "clip", contrastive, {}, {"text_config": TEXT, "vision_config": VISION, "projection_dim": 6}),
    case("AutoModel", "siglip", contrastive, {}, {"text_config": TEXT, "vision_config": VISION}),
    case("AutoModel", "informer", forecast, SERIES, {}),
    case("AutoModel", "time_series_transformer", forecast, SERIES, {}),
    case("AutoModel", "decision_transformer", decisions, DECISIONS, {}),
    case("AutoModel", "perceiver", latent, PERCEIVER, {}),
]
