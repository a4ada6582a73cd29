"""How big is a model and what does a token cost: parameters and FLOPs, by component."""

from __future__ import annotations

from collections.abc import Iterator

from k3jax.config import ModelConfig
from k3jax.model.layout import (
    VISION,
    Leaf,
    Tree,
    global_leaves,
    layer_leaves,
    mtp_block,
    mtp_input_leaves,
    vision_leaves,
)
from pallas_kernels.kda.chunked import CHUNK

COMPONENTS = (
    'embedding',
    'lm_head',
    'kda',
    'mla',
    'routed_experts',
    'shared_experts',
    'latent',
    'router',
    'dense_mlp',
    'layer_norms',
    'attn_res',
    'final',
)

_GLOBAL = {
    'embed_tokens': 'embedding',
    'lm_head': 'lm_head',
    'norm': 'final',
    'output_attn_res_norm': 'final',
    'output_attn_res_proj': 'final',
}
_LAYER = {
    'input_layernorm': 'layer_norms',
    'post_attention_layernorm': 'layer_norms',
    'self_attention_res_norm': 'attn_res',
    'self_attention_res_proj': 'attn_res',
    'mlp_res_norm': 'attn_res',
    'mlp_res_proj': 'attn_res',
    'mlp': 'dense_mlp',
}
_MOE = {
    'gate': 'router',
    'e_score_correction_bias': 'router',
    'experts': 'routed_experts',
    'shared_experts': 'shared_experts',
    'routed_expert_down_proj': 'latent',
    'routed_expert_up_proj': 'latent',
    'routed_expert_norm': 'latent',
}


def _walk(tree: Tree) -> Iterator[Leaf]:
    for entry in tree.values():
        if isinstance(entry, Leaf):
            yield entry
        else:
            yield from _walk(entry)


def _leaves(config: ModelConfig) -> Iterator[tuple[str, Leaf]]:
    """(component, leaf) of every parameter array."""
    for name, leaf in global_leaves(config).items():
        yield _GLOBAL[name], leaf
    for layer in range(config.num_hidden_layers):
        for name, entry in layer_leaves(config, layer).items():
            match name:
                case 'self_attn':
                    component = 'kda' if config.is_kda(layer) else 'mla'
                    parts = {component: entry}
                case 'block_sparse_moe':
                    parts = {}
                    for part, child in entry.items():
                        parts.setdefault(_MOE[part], {})[part] = child
                case _:
                    parts = {_LAYER[name]: {name: entry}}
            for component, tree in parts.items():
                for leaf in _walk(tree):
                    yield component, leaf


def _weights(leaf: Leaf) -> int:
    """Weights that a leaf stands for: two a byte of packed MXFP4, none for its scales."""
    if leaf.packs == 'codes':
        return leaf.size * (2 if leaf.dtype == 'uint8' else 8)
    return 0 if leaf.packs == 'scales' else leaf.size


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by component, in the order of `COMPONENTS`; nothing is allocated.

    MXFP4 experts count as the weights that they stand for. `final` is the last norm and the output
    attention residual; `router` includes the correction bias, `latent` its norm. A model with
    multi-token prediction has `mtp` too, all of it; one that sees, `vision_tower` and
    `mm_projector`.
    """
    counts = dict.fromkeys(COMPONENTS, 0)
    for component, leaf in _leaves(config):
        counts[component] += _weights(leaf)
    if config.num_nextn_predict_layers:
        counts['mtp'] = _of_mtp(config, count_parameters(mtp_block(config))) + sum(
            leaf.size for leaf in _walk(mtp_input_leaves(config))
        )
    if config.vision is not None:
        for name, tree in vision_leaves(config.vision, config.hidden_size).items():
            counts[name] = sum(leaf.size for leaf in _walk(tree))
    return counts


def _of_mtp(config: ModelConfig, block: dict[str, int]) -> int:
    """What the layer of multi-token prediction has, and its final norm."""
    return sum(block.values()) - block['embedding'] - block['lm_head']


def total_parameters(config: ModelConfig) -> int:
    """All parameters."""
    return sum(count_parameters(config).values())


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token meets: no unrouted experts, and no embedding table (a lookup).

    Those of multi-token prediction, which serves training alone, are not among them, nor those
    that only patches of images meet.
    """
    counts = count_parameters(config)
    for name in ('mtp', *VISION):
        counts.pop(name, None)
    routed = counts['routed_experts']
    unrouted = routed - routed * config.num_experts_per_token // config.num_experts
    return sum(counts.values()) - unrouted - counts['embedding']


def flops_by_component(config: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Forward matmul FLOPs of one token, averaged over a document of `sequence_length` tokens T.

    - a component's own name: 2 FLOPs for each weight of its matrices that the token meets
      (k of E experts; no embedding lookup, no depthwise convolution, no norms);
    - mla_attention: scores and values in expanded form, H (2 qk + 2 V) S with the mean causal
      context S = (T + 1) / 2, for each MLA layer;
    - kda_chunks: the chunk form with C = min(64, T) and the mean position c = (C + 1) / 2, for each
      KDA layer and head: decayed scores of q and of k, 4 K c; the inverse of the unit triangle,
      (C^2 - 1) / 3; the inverse and the scores times values, 4 V c; reading the state for v and
      for o, and writing it, 6 K V.

    - mtp: the layer of multi-token prediction, if there is one, what joins its input, and the head
      once more.

    Elementwise work is left out, as is usual for model FLOPs utilisation.
    """
    flops = dict.fromkeys((*COMPONENTS, 'mla_attention', 'kda_chunks'), 0.0)
    share = config.num_experts_per_token / config.num_experts
    for component, leaf in _leaves(config):
        if len(leaf.shape) < 2 or leaf.init == 'conv' or component == 'embedding':
            continue
        met = share if component == 'routed_experts' else 1.0
        flops[component] += 2.0 * met * _weights(leaf)
    context = (sequence_length + 1) / 2
    heads = config.num_attention_heads
    widths = config.qk_head_dim + config.v_head_dim
    num_kda = sum(config.is_kda(layer) for layer in range(config.num_hidden_layers))
    flops['mla_attention'] = (config.num_hidden_layers - num_kda) * heads * 2.0 * widths * context
    linear = config.linear_attn_config
    size = min(CHUNK, sequence_length)
    mean, k, v = (size + 1) / 2, linear.head_dim, linear.head_dim
    one_head = 4 * k * mean + (size**2 - 1) / 3 + 4 * v * mean + 6 * k * v
    flops['kda_chunks'] = num_kda * linear.num_heads * one_head
    if config.num_nextn_predict_layers:
        block = flops_by_component(mtp_block(config), sequence_length)
        matrix = mtp_input_leaves(config)['eh_proj']
        flops['mtp'] = sum(block.values()) + 2.0 * matrix.size
    return flops


def flops_per_token(config: ModelConfig, sequence_length: int, *, backward: bool) -> float:
    """Model FLOPs of one token: the sum of `flops_by_component`, times 3 with the backward pass.

    Recomputation in the backward pass (remat) is not counted.
    """
    forward = sum(flops_by_component(config, sequence_length).values())
    return 3.0 * forward if backward else forward
