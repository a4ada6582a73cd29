"""Which parameters a model has: every leaf's path, shape and stored dtype, per layer, as on disk.

Shapes are the release's own ([out, in] matrices, head-major rows); the routed experts of a layer
are stacked on a leading axis E. The model, the converter and the parameter counter read this table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

from k3jax.config import ModelConfig, VisionConfig
from pallas_kernels.grouped_mlp.mxfp4 import GROUP
from pallas_kernels.grouped_mlp.mxfp4_tiles import CHUNK


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter array: shape, logical axes (one a dimension), the dtype the release stores."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str = 'bfloat16'
    init: str = 'normal'  # normal | ones | zeros | A_log | dt_bias | conv
    quantisable: bool = False  # to MXFP4: 32 along the last axis share a scale
    exact: bool = False  # used in float32, or its gradient is a sum of many: never rounded to move
    packs: Literal['codes', 'scales'] | None = None  # what a leaf of an MXFP4 weight holds

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Tree = dict[str, Any]

VISION = ('vision_tower', 'mm_projector')
CORNERS = 4  # patches that become one row for the text


def _norm(size: int, axis: str | None = None, dtype: str = 'bfloat16') -> Leaf:
    return Leaf((size,), (axis,), dtype, 'ones')


def _wide_dtype(config: ModelConfig) -> str:
    """K3 stores conv, o_norm and the correction bias as F32, Kimi Linear as BF16."""
    return 'float32' if config.family == 'kimi_k3' else 'bfloat16'


def kda_leaves(config: ModelConfig) -> Tree:
    """The `self_attn` leaves of a KDA layer. P = heads x head_dim."""
    c, d = config.linear_attn_config, config.hidden_size
    p, rank = c.num_heads * c.head_dim, c.head_dim
    wide = _wide_dtype(config)
    conv = Leaf((p, c.short_conv_kernel_size), ('kda_heads', None), wide, 'conv')
    leaves = {
        'q_proj': Leaf((p, d), ('kda_heads', 'embed')),
        'k_proj': Leaf((p, d), ('kda_heads', 'embed')),
        'v_proj': Leaf((p, d), ('kda_heads', 'embed')),
        'q_conv1d': conv,
        'k_conv1d': conv,
        'v_conv1d': conv,
        'f_a_proj': Leaf((rank, d), ('rank', 'embed')),
        'f_b_proj': Leaf((p, rank), ('kda_heads', None)),
        'b_proj': Leaf((c.num_heads, d), ('kda_heads', 'embed')),
        'A_log': Leaf((c.num_heads,), ('kda_heads',), 'float32', 'A_log'),
        'dt_bias': Leaf((p,), ('kda_heads',), 'float32', 'dt_bias'),
        'o_norm': _norm(c.head_dim, dtype=wide),
        'o_proj': Leaf((d, p), ('embed', 'kda_heads')),
    }
    if c.use_full_rank_gate:
        leaves['g_proj'] = Leaf((p, d), ('kda_heads', 'embed'))
    else:
        leaves['g_a_proj'] = Leaf((rank, d), ('rank', 'embed'))
        leaves['g_b_proj'] = Leaf((p, rank), ('kda_heads', None))
    return leaves


def mla_leaves(config: ModelConfig) -> Tree:
    """The `self_attn` leaves of an MLA layer."""
    d, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * config.qk_head_dim
    leaves = {
        'kv_a_proj_with_mqa': Leaf((latent + config.qk_rope_head_dim, d), ('rank', 'embed')),
        'kv_a_layernorm': _norm(latent),
        'kv_b_proj': Leaf(
            (heads * (config.qk_nope_head_dim + config.v_head_dim), latent), ('heads', None)
        ),
        'o_proj': Leaf((d, heads * config.v_head_dim), ('embed', 'heads')),
    }
    if config.q_lora_rank is None:
        leaves['q_proj'] = Leaf((queries, d), ('heads', 'embed'))
    else:
        leaves['q_a_proj'] = Leaf((config.q_lora_rank, d), ('rank', 'embed'))
        leaves['q_a_layernorm'] = _norm(config.q_lora_rank)
        leaves['q_b_proj'] = Leaf((queries, config.q_lora_rank), ('heads', None))
    if config.mla_use_output_gate:
        leaves['g_proj'] = Leaf((heads * config.v_head_dim, d), ('heads', 'embed'))
    return leaves


def mlp_leaves(hidden: int, inner: int) -> Tree:
    """A gated MLP of width `inner`."""
    return {
        'gate_proj': Leaf((inner, hidden), ('mlp', 'embed')),
        'up_proj': Leaf((inner, hidden), ('mlp', 'embed')),
        'down_proj': Leaf((hidden, inner), ('embed', 'mlp')),
    }


def expert_leaves(config: ModelConfig) -> Tree:
    """The routed experts of one layer: w1 gate, w3 up, w2 down; bf16, or MXFP4 codes and scales,
    as released or as `Mxfp4Tiles`."""
    e, f, width = config.num_experts, config.moe_intermediate_size, config.expert_input_size
    leaves = {}
    axes = ('expert', 'expert_rows' if config.experts_format != 'mxfp4_tiles' else None, None)
    for name, out, inp in (('w1', f, width), ('w3', f, width), ('w2', width, f)):
        if config.experts_format == 'bf16':
            leaves[name] = Leaf((e, out, inp), axes, quantisable=True)
            continue
        shapes = (e, out, inp // 2), (e, out, inp // GROUP)
        dtype = 'uint8'
        if config.experts_format == 'mxfp4_tiles':
            shapes, dtype = ((e, inp // 8, out), (e, inp // CHUNK, out)), 'int32'
        packed = functools.partial(Leaf, axes=axes, dtype=dtype, init='zeros')
        leaves[f'{name}_packed'] = packed(shapes[0], packs='codes')
        leaves[f'{name}_scale'] = packed(shapes[1], packs='scales')
    return leaves


def moe_leaves(config: ModelConfig) -> Tree:
    """The `block_sparse_moe` leaves."""
    d, e = config.hidden_size, config.num_experts
    leaves: Tree = {
        'gate': Leaf((e, d), ('router', 'embed'), exact=True),
        'e_score_correction_bias': Leaf((e,), ('router',), _wide_dtype(config), 'zeros'),
        'experts': expert_leaves(config),
    }
    latent = config.routed_expert_hidden_size
    if latent is not None:
        leaves['routed_expert_down_proj'] = Leaf((latent, d), ('latent', 'embed'))
        leaves['routed_expert_up_proj'] = Leaf((d, latent), ('embed', 'latent'))
        if config.latent_moe_use_norm:
            leaves['routed_expert_norm'] = _norm(latent)
    if config.num_shared_experts:
        leaves['shared_experts'] = mlp_leaves(d, config.shared_intermediate_size)
    return leaves


def _attn_res(config: ModelConfig, prefix: str) -> Tree:
    d = config.hidden_size
    return {f'{prefix}_norm': _norm(d), f'{prefix}_proj': Leaf((d,), (None,))}


def layer_leaves(config: ModelConfig, layer: int) -> Tree:
    """All leaves of 0-based `layer`."""
    d = config.hidden_size
    leaves: Tree = {
        'input_layernorm': _norm(d),
        'post_attention_layernorm': _norm(d),
        'self_attn': kda_leaves(config) if config.is_kda(layer) else mla_leaves(config),
    }
    if config.attn_res_block_size is not None:
        leaves |= _attn_res(config, 'self_attention_res') | _attn_res(config, 'mlp_res')
    if config.is_moe(layer):
        leaves['block_sparse_moe'] = moe_leaves(config)
    else:
        leaves['mlp'] = mlp_leaves(d, config.intermediate_size)
    return leaves


def global_leaves(config: ModelConfig) -> Tree:
    """Embedding, final norm, readout and head."""
    d, z = config.hidden_size, config.vocab_size
    leaves: Tree = {
        'embed_tokens': Leaf((z, d), ('vocab', 'embed'), exact=True),
        'norm': _norm(d),
        'lm_head': Leaf((z, d), ('vocab', 'embed'), exact=True),
    }
    if config.attn_res_block_size is not None:
        leaves |= _attn_res(config, 'output_attn_res')
    return leaves


@functools.cache
def mtp_block(config: ModelConfig) -> ModelConfig:
    """The decoder layer of multi-token prediction, as a model of that one layer.

    It has experts as the model's own layers do, but never packed, and plain residuals.
    """
    layers = {'kda_layers': (), 'full_attn_layers': ()}
    layers['kda_layers' if config.mtp_mixer == 'kda' else 'full_attn_layers'] = (1,)
    return dataclasses.replace(
        config,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        attn_res_block_size=None,
        num_nextn_predict_layers=0,
        vision=None,
        experts_format='bf16',
        linear_attn_config=dataclasses.replace(config.linear_attn_config, **layers),
    )


def mtp_input_leaves(config: ModelConfig) -> Tree:
    """What joins a hidden state and the embedding of the next token to the layer's input."""
    d = config.hidden_size
    return {
        'enorm': _norm(d),
        'hnorm': _norm(d),
        'eh_proj': Leaf((d, 2 * d), ('embed', 'features')),
    }


def mtp_leaves(config: ModelConfig) -> Tree:
    """The `mtp` leaves. Names are those of loaders for K3; a release of them is UNCONFIRMED."""
    leaves = mtp_input_leaves(config) | {'norm': _norm(config.hidden_size)}
    return leaves | {'layer': layer_leaves(mtp_block(config), 0)}


def _vision_norm(config: VisionConfig, size: int) -> Tree:
    leaves: Tree = {'weight': Leaf((size,), (None,), init='ones')}
    if config.norm == 'layer':
        leaves['bias'] = Leaf((size,), (None,), init='zeros')
    return leaves


def _vision_linear(config: VisionConfig, outputs: int, inputs: int, axes: tuple[str, str]) -> Tree:
    leaves: Tree = {'weight': Leaf((outputs, inputs), axes)}
    if config.bias:
        leaves['bias'] = Leaf((outputs,), (None,), init='zeros')
    return leaves


def vision_leaves(config: VisionConfig, text_width: int) -> Tree:
    """The `vision_tower` and `mm_projector` leaves; blocks are stacked on a leading axis.

    text_width: D of the text model.
    """
    d, wide, inner = config.hidden_size, config.qkv_hidden_size, config.intermediate_size
    joined = CORNERS * d
    block: Tree = {
        'norm0': _vision_norm(config, d),
        'norm1': _vision_norm(config, d),
        'wqkv': _vision_linear(config, 3 * wide, d, ('features', 'embed')),
        'wo': _vision_linear(config, d, wide, ('embed', 'features')),
        'mlp': {
            'fc0': _vision_linear(config, inner, d, ('features', 'embed')),
            'fc1': _vision_linear(config, d, inner, ('embed', 'features')),
        },
    }

    def stacked(entry: Leaf | Tree) -> Any:
        if isinstance(entry, Leaf):
            shape = (config.num_hidden_layers, *entry.shape)
            return dataclasses.replace(entry, shape=shape, axes=(None, *entry.axes))
        return {name: stacked(child) for name, child in entry.items()}

    size, table = config.patch_size, (config.pos_emb_height, config.pos_emb_width, d)
    pos_emb = Leaf(table, (None, None, 'embed'), exact=True)
    projector: Tree = {
        'proj_0': _vision_linear(config, joined, joined, ('features', 'embed')),
        'proj_2': _vision_linear(config, text_width, joined, ('embed', 'features')),
    }
    if config.norm == 'layer':
        projector['pre_norm'] = _vision_norm(config, d)
    else:
        projector['post_norm'] = _vision_norm(config, text_width)
    patch = _vision_linear(config, d, 3 * size * size, ('embed', None))
    return {
        'vision_tower': {
            'patch_embed': {'proj': patch, 'pos_emb': pos_emb},
            'blocks': stacked(block),
            'final_layernorm': _vision_norm(config, d),
        },
        'mm_projector': projector,
    }


def model_leaves(config: ModelConfig) -> Tree:
    """The whole on-disk tree: global leaves, `layers_0` ..; `mtp` and those of vision, if any."""
    leaves = global_leaves(config)
    if config.vision is not None:
        leaves |= vision_leaves(config.vision, config.hidden_size)
    if config.num_nextn_predict_layers:
        leaves['mtp'] = mtp_leaves(config)
    for layer in range(config.num_hidden_layers):
        leaves[f'layers_{layer}'] = layer_leaves(config, layer)
    return leaves
