"""Image models of timm, by name, made narrow and shallow."""

from __future__ import annotations

from typing import Any

import torch
from model_runner import Case, draw
from torch import nn
from torch.nn import functional as F
from torchvision_stub import torchvision_stub


def image(name: str, size: int = 32, /, **changes: Any) -> Case:
    def make() -> nn.Module:
        with torchvision_stub():
            import timm
        return timm.create_model(name, num_classes=3, **changes)

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(draw(2, 3, size, size))
        parts = logits if isinstance(logits, (list, tuple)) else [logits]
        return sum(F.cross_entropy(part, torch.tensor([0, 2])) for part in parts)

    return Case("timm", name, make, loss)


def part(path: str, size: int, /, *args: Any, **settings: Any) -> Case:
    """A class of timm, or a function that makes one, where the named models fix their widths."""

    def make() -> nn.Module:
        with torchvision_stub():
            import timm
        module, _, name = path.partition(".")
        return getattr(getattr(timm.models, module), name)(*args, num_classes=3, **settings)

    return image(args[0] if args and isinstance(args[0], str) else path.partition(".")[2], size)._replace(make=make)


TOKENS = {"embed_dim": 8, "depth": 1, "num_heads": 2}
PATCHES = {"img_size": 8, "patch_size": 4}
FOUR = {"depths": (1, 1, 1, 1)}

CASES = [
    image("beit_base_patch16_224", 8, **PATCHES, **TOKENS),
    image("cait_xxs24_224", 8, **PATCHES, **TOKENS),
    image("convit_tiny", 8, **PATCHES, **{**TOKENS, "depth": 2}, local_up_to_layer=1),
    part("convmixer.ConvMixer", 8, dim=6, depth=2, kernel_size=3, patch_size=2),
    image("convnext_atto", 32, **FOUR, dims=(4, 4, 6, 8)),
    image("convnextv2_atto", 32, **FOUR, dims=(4, 4, 6, 8)),
    image("deit3_small_patch16_224", 8, **PATCHES, **TOKENS),
    image("deit_tiny_distilled_patch16_224", 8, **PATCHES, **TOKENS),
    image("densenet121", 32, growth_rate=2, block_config=(1, 1), stem_type=""),
    image("edgenext_xx_small", 32, dims=(8, 8, 16, 16), depths=(1, 2, 2, 2), heads=(2, 2, 2, 2)),
    image("efficientformerv2_s0", 32, img_size=32, **FOUR, embed_dims=(4, 4, 8, 8), num_vit=1),
    part("efficientnet._gen_efficientnet", 16, "efficientnet_b0", 0.1, 0.1),
    part("efficientnet._gen_efficientnetv2_s", 16, "efficientnetv2_s", 0.1, 0.1),
    part("efficientnet._gen_mnasnet_a1", 16, "semnasnet_050", 0.1),
    image("efficientvit_b0", 16, widths=(4, 4, 8, 8), depths=(1, 1, 1, 1), head_dim=4, head_widths=(8, 8)),
    image("eva02_tiny_patch14_224", 8, **PATCHES, **TOKENS),
    image("fasternet_t0", 32, **FOUR, embed_dim=4, feature_dim=8),
    image("fastvit_t8", 32, layers=(1, 1, 1, 1), embed_dims=(4, 4, 8, 8)),
    part("focalnet.FocalNet", 32, **FOUR, embed_dim=4),
    part("ghostnet._create_ghostnet", 16, "ghostnet_050", 0.1),
    image(
        "hiera_tiny_224", 32, img_size=(32, 32), embed_dim=4, num_heads=1, stages=(1, 1), q_pool=1, mask_unit_attn=(True, False)
    ),
    image("inception_next_atto", 32, **FOUR, dims=(8, 8, 8, 8)),
    part("mobilenetv3._gen_lcnet", 16, "lcnet_035", 0.1),
    image("levit_128s", 16, img_size=16, embed_dim=(16, 16), key_dim=4, depth=(1, 1), num_heads=(2, 2)),
    image("mambaout_femto", 32, **FOUR, dims=(4, 4, 6, 8)),
    part("mlp_mixer.MlpMixer", 8, **PATCHES, embed_dim=8, num_blocks=1),
    part("efficientnet._gen_mobilenet_v2", 16, "mobilenetv2_050", 0.1),
    part("mobilenetv3._gen_mobilenet_v3", 16, "mobilenetv3_small_050", 0.1),
    part("mobilenetv3._gen_mobilenet_v4", 16, "mobilenetv4_conv_small_035", 0.1),
    part("nest.Nest", 32, img_size=32, num_levels=2, embed_dims=(4, 8), num_heads=(1, 2), depths=(1, 1)),
    image("pit_ti_224", 16, img_size=16, patch_size=4, stride=4, base_dims=(4, 4, 4), depth=(1, 1, 1), heads=(1, 2, 2)),
    part("metaformer.MetaFormer", 32, **FOUR, dims=(4, 4, 6, 8)),
    image("pvt_v2_b0", 32, **FOUR, embed_dims=(4, 4, 8, 8), num_heads=(1, 1, 2, 2)),
    image("repvit_m0_9", 32, embed_dim=(4, 4, 8, 8), depth=(1, 1, 1, 1)),
    image("resnet18", 8, channels=(4, 4, 6, 8), stem_width=4, layers=(1, 1, 1, 1)),
    image("resnet50", 8, channels=(4, 4, 6, 8), stem_width=4, layers=(1, 1, 1, 1)),
    image("resnetv2_50", 32, channels=(8, 8, 16, 16), layers=(1, 1), stem_chs=4),
    image("seresnet18", 8, channels=(8, 8, 8, 8), stem_width=4, layers=(1, 1, 1, 1)),
    image("ecaresnet50t", 8, channels=(4, 4, 6, 8), stem_width=4, layers=(1, 1, 1, 1)),
    image("rexnet_100", 16, width_mult=0.1, depth_mult=0.1, final_chs=40, initial_chs=8),
    image(
        "sequencer2d_s",
        32,
        img_size=32,
        layers=(1, 1, 1, 1),
        patch_sizes=(8, 2, 1, 1),
        embed_dims=(8,) * 4,
        hidden_sizes=(4,) * 4,
    ),
    image("starnet_s050", 16, base_dim=4, depths=(1, 1, 1, 1)),
    image(
        "swin_tiny_patch4_window7_224", 8, img_size=8, patch_size=2, window_size=2, embed_dim=4, depths=(2, 1), num_heads=(1, 2)
    ),
    image("swinv2_tiny_window8_256", 8, img_size=8, patch_size=2, window_size=2, embed_dim=4, depths=(2, 1), num_heads=(1, 2)),
    image("tiny_vit_5m_224", 32, embed_dims=(4, 4, 8, 8), num_heads=(1, 1, 2, 2), window_sizes=(2, 2, 2, 2), **FOUR),
    image("tnt_s_legacy_patch16_224", 8, **PATCHES, embed_dim=8, inner_dim=4, depth=1, num_heads_inner=1, num_heads_outer=2),
    image("twins_pcpvt_small", 32, img_size=32, embed_dims=(4, 4, 8, 8), num_heads=(1, 1, 2, 2), **FOUR),
    image("visformer_tiny", 32, img_size=32, init_channels=4, embed_dim=8, depth=(1, 1, 1), num_heads=2),
    image("vit_relpos_small_patch16_224", 8, **PATCHES, **TOKENS),
    image("vit_tiny_patch16_224", 8, **PATCHES, **TOKENS),
    image("vit_base_patch16_siglip_224", 8, **PATCHES, **TOKENS),
    part("volo.VOLO", 32, (1, 1), img_size=32, embed_dims=(8, 8), num_heads=(2, 2), stem_hidden_dim=4),
    image("xcit_nano_12_p16_224", 16, img_size=16, patch_size=8, **TOKENS),
]
