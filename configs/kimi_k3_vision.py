"""Kimi K3 with its vision tower. Numbers: the release's config.json (`vision_config`)."""

import dataclasses

from configs import kimi_k3
from k3jax.config import Config, VisionConfig


def get_config() -> Config:
    config = kimi_k3.get_config()
    vision = VisionConfig(
        hidden_size=1024,  # config.json: vt_hidden_size
        num_hidden_layers=27,  # config.json: vt_num_hidden_layers
        num_attention_heads=12,  # config.json: vt_num_attention_heads
        qkv_hidden_size=1536,  # config.json: qkv_hidden_size
        intermediate_size=4096,  # config.json: vt_intermediate_size
        patch_size=14,  # config.json: patch_size
        pos_emb_height=64,  # config.json: init_pos_emb_height
        pos_emb_width=64,  # config.json: init_pos_emb_width
        pos_emb_interpolation_mode='bilinear',  # config.json: pos_emb_interpolation_mode
        norm='rms',  # config.json: norm_type
        bias=False,  # config.json: attn_bias, linear_bias, patch_embed_proj_bias
        projector_eps=1e-5,  # config.json: projector_ln_eps
    )
    model = dataclasses.replace(
        config.model,
        name='kimi_k3_vision',
        vision=vision,
        media_placeholder_token_id=163605,  # config.json: media_placeholder_token_id
    )
    return dataclasses.replace(config, model=model)
