"""What a model is."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from k3jax.config.checks import positive, require

HiddenAct = Literal['situ', 'silu']
# 'mxfp4_tiles': MXFP4 in the order that TPU kernels read; a server's own, never stored.
ExpertsFormat = Literal['bf16', 'mxfp4', 'mxfp4_tiles']
Family = Literal['kimi_k3', 'kimi_linear']
Mixer = Literal['kda', 'mla']


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttnConfig:
    """KDA geometry. Source: the release's `linear_attn_config`."""

    num_heads: int
    head_dim: int  # of q, k and v alike
    kda_layers: tuple[int, ...]  # 1-based, as in the release
    full_attn_layers: tuple[int, ...]  # 1-based: the MLA layers
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None  # None: the unbounded softplus gate of Kimi Linear
    use_full_rank_gate: bool = False  # the OUTPUT gate; the decay projection is always low rank

    def __post_init__(self) -> None:
        where = 'model.linear_attn_config'
        positive(where, num_heads=self.num_heads, head_dim=self.head_dim)
        require(
            self.short_conv_kernel_size >= 2,
            f'{where}.short_conv_kernel_size',
            self.short_conv_kernel_size,
            'at least 2',
        )
        require(
            self.gate_lower_bound is None or self.gate_lower_bound < 0,
            f'{where}.gate_lower_bound',
            self.gate_lower_bound,
            'a negative number, or None for the softplus gate',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and its projector. Source: K3's `vision_config`."""

    hidden_size: int = 1024
    num_hidden_layers: int = 27
    num_attention_heads: int = 12
    qkv_hidden_size: int = 1536  # of all heads, unlike hidden_size
    intermediate_size: int = 4096
    patch_size: int = 14
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    pos_emb_interpolation_mode: Literal['bilinear', 'bicubic'] = 'bilinear'
    norm: Literal['rms', 'layer'] = 'rms'  # 'layer': of K2.5, with a norm before the projector
    # UNCONFIRMED: the reference leaves it to PyTorch, for which two values are told.
    norm_eps: float = 1.1920929e-07
    projector_eps: float = 1e-5
    bias: bool = False  # of every linear map

    def __post_init__(self) -> None:
        where = 'model.vision'
        values = dataclasses.asdict(self)
        positive(where, **{k: v for k, v in values.items() if type(v) in (int, float)})
        require(self.norm in ('rms', 'layer'), f'{where}.norm', self.norm, "'rms' or 'layer'")
        require(
            self.pos_emb_interpolation_mode in ('bilinear', 'bicubic'),
            f'{where}.pos_emb_interpolation_mode',
            self.pos_emb_interpolation_mode,
            "'bilinear' or 'bicubic'",
        )
        require(
            self.qkv_hidden_size % (4 * self.num_attention_heads) == 0,
            f'{where}.qkv_hidden_size',
            self.qkv_hidden_size,
            f'a multiple of 4 x {self.num_attention_heads} heads, whose channels turn in two '
            'directions',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text model, and what sees for it. Field names are the release's own (`text_config`)."""

    name: str
    family: Family  # whose release layout: tensor names, prefixes and stored dtypes
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int  # of the dense layers
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096

    hidden_act: HiddenAct = 'situ'
    activation_situ_beta: float | None = 4.0  # None: 1.0
    activation_situ_linear_beta: float | None = 25.0  # None: the up branch is the identity
    attn_res_block_size: int | None = None  # in layers; None: plain residual adds

    # Multi-head latent attention without positions.
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # present but never rotated
    v_head_dim: int
    mla_use_output_gate: bool = False
    # UNCONFIRMED: the reference uses its norm class's default here, some ports 1e-5.
    mla_latent_norm_eps: float = 1e-6

    linear_attn_config: LinearAttnConfig

    # Mixture of experts.
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None = None  # None: experts at full width (no latent)
    latent_moe_use_norm: bool = False
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    experts_format: ExpertsFormat = 'bf16'  # how the routed experts' weights are held

    # Multi-token prediction, in training only: 1 adds a layer that predicts the token after next.
    # K3's release has 0 (the layer became its draft). Which mixer that had is UNCONFIRMED.
    num_nextn_predict_layers: int = 0
    mtp_mixer: Mixer = 'mla'

    vision: VisionConfig | None = None  # None: a model of text alone

    bos_token_id: int = 163584
    eos_token_id: int = 163586
    pad_token_id: int = 163839
    media_placeholder_token_id: int = 163605  # where rows of the vision tower take their place

    def __post_init__(self) -> None:
        positive(
            'model',
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            intermediate_size=self.intermediate_size,
            rms_norm_eps=self.rms_norm_eps,
            num_attention_heads=self.num_attention_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            num_experts=self.num_experts,
            moe_intermediate_size=self.moe_intermediate_size,
            moe_layer_freq=self.moe_layer_freq,
        )
        require(
            self.family in ('kimi_k3', 'kimi_linear'),
            'model.family',
            self.family,
            "'kimi_k3' or 'kimi_linear'",
        )
        kda, mla = self.linear_attn_config.kda_layers, self.linear_attn_config.full_attn_layers
        layers = list(range(1, self.num_hidden_layers + 1))
        require(
            sorted(kda + mla) == layers,
            'model.linear_attn_config.kda_layers + full_attn_layers',
            sorted(kda + mla),
            f'each layer 1..{self.num_hidden_layers} exactly once',
        )
        require(
            1 <= self.num_experts_per_token <= self.num_experts,
            'model.num_experts_per_token',
            self.num_experts_per_token,
            f'1..num_experts ({self.num_experts})',
        )
        require(
            self.num_shared_experts >= 0,
            'model.num_shared_experts',
            self.num_shared_experts,
            '0 or more',
        )
        require(
            self.hidden_act in ('situ', 'silu'),
            'model.hidden_act',
            self.hidden_act,
            "'situ' or 'silu'",
        )
        require(
            self.experts_format in get_args(ExpertsFormat),
            'model.experts_format',
            self.experts_format,
            "'bf16' or 'mxfp4'",
        )
        require(
            self.attn_res_block_size is None or self.attn_res_block_size > 0,
            'model.attn_res_block_size',
            self.attn_res_block_size,
            'a positive number of layers, or None for plain residual adds',
        )
        require(
            self.num_nextn_predict_layers in (0, 1),
            'model.num_nextn_predict_layers',
            self.num_nextn_predict_layers,
            '0 or 1',
        )
        require(
            self.mtp_mixer in get_args(Mixer), 'model.mtp_mixer', self.mtp_mixer, "'kda' or 'mla'"
        )
        require(
            not (self.latent_moe_use_norm and self.routed_expert_hidden_size is None),
            'model.latent_moe_use_norm',
            self.latent_moe_use_norm,
            'False when routed_expert_hidden_size is None',
        )
        require(
            self.vision is None or 0 <= self.media_placeholder_token_id < self.vocab_size,
            'model.media_placeholder_token_id',
            self.media_placeholder_token_id,
            f'an id of the vocabulary, 0..{self.vocab_size - 1}',
        )
        if self.experts_format != 'bf16':
            check_whole_groups(self, 'the MXFP4 group size')

    @property
    def expert_input_size(self) -> int:
        """L: the width at which the routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """F of the fused shared-expert MLP."""
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_kda(self, layer: int) -> bool:
        """Whether 0-based `layer` mixes tokens by KDA (otherwise by MLA)."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has experts (otherwise a dense MLP)."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def check_whole_groups(model: ModelConfig, why: str) -> None:
    latent = model.routed_expert_hidden_size is not None
    for field, width in (
        ('routed_expert_hidden_size' if latent else 'hidden_size', model.expert_input_size),
        ('moe_intermediate_size', model.moe_intermediate_size),
    ):
        require(width % 32 == 0, f'model.{field}', width, f'a multiple of 32, {why}')
