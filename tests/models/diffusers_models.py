"""Diffusion models of diffusers, from their smallest configurations; the loss is the squared error of the predicted noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model_runner import Case, draw
from torch import Tensor, nn
from torch.nn import functional as F

STEP = torch.tensor([3, 7])
HEADS = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1}
BLOCKS = {"block_out_channels": (4, 8), "layers_per_block": 1, "norm_num_groups": 2}
CODER = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}


def case(name: str, inputs: Callable[[], dict[str, Any]], /, **config: Any) -> Case:
    def make() -> nn.Module:
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
        return getattr(diffusers, name)(**config)

    def loss(model: nn.Module) -> Tensor:
        y = model(**inputs())
        while not isinstance(y, Tensor):
            y = y[0]
        return F.mse_loss(y, draw(*y.shape, seed=3))

    return Case("diffusers", name, make, loss)


def pixels(channels: int = 3, size: int = 4) -> Callable[[], dict[str, Any]]:
    return lambda: {"sample": draw(2, channels, size, size)}


def noisy(channels: int, size: int = 4, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"sample": draw(2, channels, size, size), "timestep": STEP, **drawn(more)}


def latents(*shape: int, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"hidden_states": draw(2, *shape), "timestep": STEP, **drawn(more)}


def drawn(more: dict[str, Any]) -> dict[str, Any]:
    """A shape becomes random numbers of that shape."""
    return {key: draw(2, *value, seed=2) if isinstance(value, tuple) else value for key, value in more.items()}


def flux_ids(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "hidden_states": draw(1, 4, 4),
        "encoder_hidden_states": draw(1, 3, 8, seed=2),
        "timestep": torch.tensor([0.3]),
        "img_ids": torch.arange(12).view(4, 3) % 4,
        "txt_ids": torch.zeros(3, 3),
        **{key: draw(1, *value, seed=4) for key, value in more.items()},
    }


def masked(**more: Any) -> Callable[[], dict[str, Any]]:
    return latents(4, 8, encoder_hidden_states=(3, 8), encoder_attention_mask=torch.ones(2, 3), **more)


CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 6,
    "attention_head_dim": 2,
    "sample_size": 4,
}
VIDEO = {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": 6,
    "attention_head_dim": 2,
    "sample_size": 4,
}
AURA = {
    "sample_size": 4,
    "num_mmdit_layers": 1,
    "num_single_dit_layers": 1,
    "attention_head_dim": 4,
    "num_attention_heads": 2,
    "joint_attention_dim": 6,
    "caption_projection_dim": 8,
    "pos_embed_max_size": 4,
}
DEEP = {
    "latent_channels": 4,
    "attention_head_dim": 2,
    "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
    "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
    "encoder_block_out_channels": (4, 8),
    "decoder_block_out_channels": (4, 8),
    "encoder_layers_per_block": (1, 1),
    "decoder_layers_per_block": (1, 1),
    "encoder_qkv_multiscales": ((), (5,)),
    "decoder_qkv_multiscales": ((), (5,)),
}
TINY = {
    "encoder_block_out_channels": (4, 4),
    "decoder_block_out_channels": (4, 4),
    "num_encoder_blocks": (1, 1),
    "num_decoder_blocks": (1, 1),
}
FLUX = {**HEADS, "in_channels": 4, "num_single_layers": 1, "joint_attention_dim": 8, "axes_dims_rope": (2, 2, 0)}
APPROXIMATOR = {"approximator_num_channels": 8, "approximator_hidden_dim": 8, "approximator_layers": 1}
SD3 = {
    "sample_size": 4,
    "in_channels": 4,
    "out_channels": 4,
    "joint_attention_dim": 6,
    "caption_projection_dim": 8,
    "pooled_projection_dim": 5,
    "pos_embed_max_size": 4,
    "qk_norm": "rms_norm",
}
SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 8,
    "caption_channels": 6,
    "sample_size": 4,
}
PIXART = {
    "sample_size": 4,
    "cross_attention_dim": 8,
    "caption_channels": 6,
    "norm_num_groups": 2,
    "use_additional_conditions": False,
}
COG = {
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 4,
    "text_embed_dim": 6,
    "sample_width": 4,
    "sample_height": 4,
    "sample_frames": 1,
    "max_text_seq_length": 3,
}
AUDIO = {
    "sample_size": 4,
    "in_channels": 4,
    "out_channels": 4,
    "num_key_value_attention_heads": 1,
    "cross_attention_dim": 8,
    "time_proj_dim": 4,
    "global_states_input_dim": 5,
    "cross_attention_input_dim": 6,
}

CONTROL = {
    "in_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    **BLOCKS,
    "cross_attention_dim": 6,
    "attention_head_dim": 2,
    "conditioning_embedding_out_channels": (4, 4),
}
LTX = {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 8, "caption_channels": 8}
PLAIN = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 2,
    "sample_size": 4,
}
UVIT = {
    "hidden_size": 8,
    "cond_embed_dim": 5,
    "micro_cond_encode_dim": 2,
    "micro_cond_embed_dim": 10,
    "encoder_hidden_size": 6,
    "vocab_size": 9,
    "codebook_size": 8,
    "in_channels": 8,
    "block_out_channels": 8,
    "num_res_blocks": 1,
    "block_num_heads": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "sample_size": 4,
}
WAN = {"in_channels": 4, "out_channels": 4, "text_dim": 6, "freq_dim": 4, "ffn_dim": 12, "rope_max_seq_len": 8}


def prior() -> dict[str, Any]:
    return {**latents(6)(), "proj_embedding": draw(2, 6, seed=2), "encoder_hidden_states": draw(2, 3, 6, seed=4)}


def audio() -> dict[str, Any]:
    turned = draw(5, 2, seed=5)
    more = {"encoder_hidden_states": draw(2, 3, 6, seed=2), "global_hidden_states": draw(2, 1, 5, seed=4)}
    return {**latents(4, 4)(), **more, "rotary_embedding": (turned.cos(), turned.sin())}


def masked_image() -> dict[str, Any]:
    more = {"pooled_text_emb": draw(2, 5, seed=2), "micro_conds": draw(2, 5, seed=4)}
    return {"input_ids": torch.arange(32).view(2, 4, 4) % 9, "encoder_hidden_states": draw(2, 3, 6, seed=5), **more}


CASES = [
    case("AsymmetricAutoencoderKL", pixels(), norm_num_groups=2, down_block_out_channels=(4,), up_block_out_channels=(4,)),
    case("AuraFlowTransformer2DModel", latents(4, 4, 4, encoder_hidden_states=(3, 6)), **AURA),
    case("AutoencoderDC", pixels(), **DEEP),
    case("AutoencoderKL", pixels(), **CODER, block_out_channels=(4,), norm_num_groups=2, latent_channels=2),
    case("AutoencoderTiny", pixels(), **TINY),
    case("ChromaTransformer2DModel", flux_ids(), **FLUX, **APPROXIMATOR),
    case(
        "CogVideoXTransformer3DModel",
        latents(1, 4, 4, 4, encoder_hidden_states=(3, 6)),
        **{**HEADS, "attention_head_dim": 8},
        **COG,
    ),
    case("ControlNetModel", noisy(4, encoder_hidden_states=(3, 6), controlnet_cond=(3, 8, 8)), **CONTROL),
    case("DiTTransformer2DModel", latents(4, 4, 4, class_labels=torch.tensor([0, 2])), **HEADS, sample_size=4, norm_num_groups=2),
    case("FluxTransformer2DModel", flux_ids(pooled_projections=(5,)), **FLUX, pooled_projection_dim=5),
    case("LTXVideoTransformer3DModel", masked(num_frames=1, height=2, width=2), **HEADS, **LTX),
    case("PixArtTransformer2DModel", latents(4, 4, 4, encoder_hidden_states=(3, 6)), **HEADS, **PIXART),
    case("PriorTransformer", prior, **HEADS, embedding_dim=6, num_embeddings=3),
    case("SD3Transformer2DModel", latents(4, 4, 4, encoder_hidden_states=(3, 6), pooled_projections=(5,)), **HEADS, **SD3),
    case("SanaTransformer2DModel", latents(4, 4, 4, encoder_hidden_states=(3, 6)), **HEADS, **SANA),
    case("StableAudioDiTModel", audio, **HEADS, **AUDIO),
    case("Transformer2DModel", lambda: {"hidden_states": draw(2, 4, 4, 4)}, **HEADS, in_channels=4, norm_num_groups=2),
    case("TransformerTemporalModel", lambda: {"hidden_states": draw(2, 4, 2, 2)}, **HEADS, in_channels=4, norm_num_groups=2),
    case("UNet2DConditionModel", noisy(4, encoder_hidden_states=(3, 6)), **BLOCKS, **CROSS),
    case("UNet2DModel", noisy(3), **BLOCKS, **PLAIN),
    case(
        "UNet3DConditionModel",
        lambda: {**noisy(4, encoder_hidden_states=(3, 6))(), "sample": draw(2, 4, 2, 4, 4)},
        **BLOCKS,
        **VIDEO,
    ),
    case("UVit2DModel", masked_image, **UVIT),
    case("VQModel", pixels(), **CODER, block_out_channels=(4,), norm_num_groups=2, latent_channels=2, num_vq_embeddings=5),
    case("WanTransformer3DModel", latents(4, 1, 4, 4, encoder_hidden_states=(3, 6)), **HEADS, **WAN),
]
