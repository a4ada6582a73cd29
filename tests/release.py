"""Small checkpoints in the released layout, with random weights: the tests' own writer.

Written from the list of the release's tensors and the safetensors format, and sharing no code with
the library, so that an error in the converter cannot hide here. `release_tensors` is that list, for
a config of any size; `write_release` fills a folder that mlx-lm loads as it is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

BF16, F32, U8 = 'BF16', 'F32', 'U8'
NUMPY = {BF16: np.dtype(ml_dtypes.bfloat16), F32: np.dtype('<f4'), U8: np.dtype('u1')}
STORED_FIRST = (F32, BF16, U8)  # the safetensors library's order within a file


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a release: how it is stored, and what its random values are like."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = 'matrix'
    gain: float = 1.0  # of a matrix: standard deviation is gain / sqrt(inputs)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NUMPY[self.dtype].itemsize


def k3_bf16() -> dict[str, Any]:
    """A small K3 with every mechanism: two trailing MLA layers, a partial last block, vision."""
    text = {
        'model_type': 'kimi_linear',
        'vocab_size': 256,
        'hidden_size': 64,
        'num_hidden_layers': 9,
        'num_attention_heads': 4,
        'num_key_value_heads': 4,
        'intermediate_size': 96,
        'rms_norm_eps': 1e-05,
        'max_position_embeddings': 4096,
        'hidden_act': 'situ',
        'activation_situ_beta': 4.0,
        'activation_situ_linear_beta': 25.0,
        'attn_res_block_size': 4,
        'q_lora_rank': 24,
        'kv_lora_rank': 16,
        'qk_nope_head_dim': 16,
        'qk_rope_head_dim': 8,
        'v_head_dim': 16,
        'mla_use_nope': True,
        'mla_use_output_gate': True,
        'num_experts': 8,
        'num_experts_per_token': 2,
        'num_shared_experts': 2,
        'moe_intermediate_size': 32,
        'moe_router_activation_func': 'sigmoid',
        'moe_renormalize': True,
        'routed_scaling_factor': 1.0,
        'first_k_dense_replace': 1,
        'moe_layer_freq': 1,
        'use_grouped_topk': True,
        'num_expert_group': 1,
        'topk_group': 1,
        'routed_expert_hidden_size': 32,
        'latent_moe_use_norm': True,
        'tie_word_embeddings': False,
        'linear_attn_config': {
            'kda_layers': [1, 2, 3, 5, 6, 7],
            'full_attn_layers': [4, 8, 9],
            'num_heads': 3,
            'head_dim': 32,
            'short_conv_kernel_size': 4,
            'gate_lower_bound': -5.0,
            'use_full_rank_gate': True,
        },
    }
    vision = {
        'model_type': 'moonvit3d',
        'patch_size': 14,
        'init_pos_emb_height': 8,
        'init_pos_emb_width': 8,
        'init_pos_emb_time': 4,
        'pos_emb_type': 'divided_fixed',
        'vt_num_attention_heads': 2,
        'vt_num_hidden_layers': 2,
        'vt_hidden_size': 32,
        'vt_intermediate_size': 64,
        'qkv_hidden_size': 48,
        'merge_kernel_size': [2, 2],
        'merge_type': 'sd2_tpool',
        'mm_projector_type': 'patchmergerv2',
        'mm_hidden_size': 32,
        'projector_ln_eps': 1e-05,
        'norm_type': 'rmsnorm',
        'attn_bias': False,
        'linear_bias': False,
        'patch_embed_proj_bias': False,
    }
    return {
        'model_type': 'kimi_k3',
        'architectures': ['KimiK3ForConditionalGeneration'],
        'media_placeholder_token_id': 250,
        'eos_token_id': [2],
        'text_config': text,
        'vision_config': vision,
    }


def k25_vision() -> dict[str, Any]:
    """`k3_bf16`, with the vision part of K2.5: LayerNorm, biases, a norm before the projector."""
    config = k3_bf16()
    vision = config['vision_config']
    for name in ('norm_type', 'attn_bias', 'linear_bias', 'patch_embed_proj_bias'):
        del vision[name]
    del vision['qkv_hidden_size']
    vision['mm_projector_type'] = 'patchmerger'
    return config


def mxfp4_quantization() -> dict[str, Any]:
    """`quantization_config` of a release with MXFP4 routed experts."""
    weights = {'num_bits': 4, 'group_size': 32, 'type': 'float'}
    group = {'format': 'mxfp4-pack-quantized', 'targets': ['Linear'], 'weights': weights}
    return {
        'quant_method': 'compressed-tensors',
        'format': 'mxfp4-pack-quantized',
        'ignore': ['re:.*shared_experts.*'],
        'config_groups': {'group_0': group},
    }


def k3_mxfp4() -> dict[str, Any]:
    """`k3_bf16` with packed routed experts."""
    config = k3_bf16()
    config['text_config']['quantization_config'] = mxfp4_quantization()
    return config


def kimi_linear() -> dict[str, Any]:
    """A small Kimi Linear."""
    return {
        'model_type': 'kimi_linear',
        'architectures': ['KimiLinearForCausalLM'],
        'vocab_size': 256,
        'hidden_size': 64,
        'num_hidden_layers': 8,
        'num_attention_heads': 4,
        'num_key_value_heads': 4,
        'head_dim': 24,
        'intermediate_size': 96,
        'rms_norm_eps': 1e-05,
        'hidden_act': 'silu',
        'q_lora_rank': None,
        'kv_lora_rank': 16,
        'qk_nope_head_dim': 16,
        'qk_rope_head_dim': 8,
        'v_head_dim': 16,
        'mla_use_nope': True,
        'num_experts': 8,
        'num_experts_per_token': 2,
        'num_shared_experts': 1,
        'moe_intermediate_size': 32,
        'moe_router_activation_func': 'sigmoid',
        'moe_renormalize': True,
        'routed_scaling_factor': 2.446,
        'first_k_dense_replace': 1,
        'moe_layer_freq': 1,
        'use_grouped_topk': True,
        'num_expert_group': 1,
        'topk_group': 1,
        'tie_word_embeddings': False,
        'rope_theta': 10000.0,
        'model_max_length': 4096,
        'linear_attn_config': {
            'kda_layers': [1, 2, 3, 5, 6, 7],
            'full_attn_layers': [4, 8],
            'num_heads': 3,
            'head_dim': 32,
            'short_conv_kernel_size': 4,
        },
        'pad_token_id': 0,
        'bos_token_id': 1,
        'eos_token_id': 2,
    }


def k3_full() -> dict[str, Any]:
    """The released K3: 2.78T parameters."""
    config = k3_mxfp4()
    mla = [*range(4, 93, 4), 93]
    config['text_config'] |= {
        'vocab_size': 163840,
        'hidden_size': 7168,
        'num_hidden_layers': 93,
        'num_attention_heads': 96,
        'num_key_value_heads': 96,
        'intermediate_size': 33792,
        'max_position_embeddings': 1048576,
        'attn_res_block_size': 12,
        'q_lora_rank': 1536,
        'kv_lora_rank': 512,
        'qk_nope_head_dim': 128,
        'qk_rope_head_dim': 64,
        'v_head_dim': 128,
        'num_experts': 896,
        'num_experts_per_token': 16,
        'moe_intermediate_size': 3072,
        'routed_expert_hidden_size': 3584,
        'topk_method': 'noaux_tc',
        'num_nextn_predict_layers': 0,
        'linear_attn_config': {
            'kda_layers': [n for n in range(1, 94) if n not in mla],
            'full_attn_layers': mla,
            'num_heads': 96,
            'head_dim': 128,
            'short_conv_kernel_size': 4,
            'gate_lower_bound': -5.0,
            'use_full_rank_gate': True,
        },
    }
    config['vision_config'] |= {
        'init_pos_emb_height': 64,
        'init_pos_emb_width': 64,
        'vt_num_attention_heads': 12,
        'vt_num_hidden_layers': 27,
        'vt_hidden_size': 1024,
        'vt_intermediate_size': 4096,
        'qkv_hidden_size': 1536,
        'mm_hidden_size': 1024,
    }
    ids = {'bos_token_id': 163584, 'eos_token_id': 163586, 'pad_token_id': 163839}
    config['text_config'] |= ids
    return config | ids | {'media_placeholder_token_id': 163605}


def kimi_linear_48b() -> dict[str, Any]:
    """The released Kimi-Linear-48B-A3B."""
    mla = [4, 8, 12, 16, 20, 24, 27]
    return kimi_linear() | {
        'vocab_size': 163840,
        'hidden_size': 2304,
        'num_hidden_layers': 27,
        'num_attention_heads': 32,
        'num_key_value_heads': 32,
        'head_dim': 72,
        'intermediate_size': 9216,
        'kv_lora_rank': 512,
        'qk_nope_head_dim': 128,
        'qk_rope_head_dim': 64,
        'v_head_dim': 128,
        'num_experts': 256,
        'num_experts_per_token': 8,
        'moe_intermediate_size': 1024,
        'model_max_length': 1048576,
        'num_nextn_predict_layers': 0,
        'linear_attn_config': {
            'kda_layers': [n for n in range(1, 28) if n not in mla],
            'full_attn_layers': mla,
            'num_heads': 32,
            'head_dim': 128,
            'short_conv_kernel_size': 4,
        },
        'pad_token_id': 163839,
        'bos_token_id': 163584,
        'eos_token_id': 163586,
    }


def _is_k3(config: dict[str, Any]) -> bool:
    return config['model_type'] == 'kimi_k3'


def _matrix(name: str, out: int, inputs: int, gain: float = 1.0) -> Tensor:
    return Tensor(f'{name}.weight', (out, inputs), BF16, 'matrix', gain)


def _norm(name: str, size: int, dtype: str = BF16) -> Tensor:
    return Tensor(f'{name}.weight', (size,), dtype, 'norm')


def _kda(text: dict[str, Any], p: str, k3: bool, a_log_size: int | None) -> Iterator[Tensor]:
    c, d = text['linear_attn_config'], text['hidden_size']
    heads, dim, kernel = c['num_heads'], c['head_dim'], c['short_conv_kernel_size']
    width, wide = heads * dim, F32 if k3 else BF16
    for x in 'qkv':
        yield _matrix(f'{p}{x}_proj', width, d)
        yield Tensor(f'{p}{x}_conv1d.weight', (width, 1, kernel), wide, 'conv')
    yield _matrix(f'{p}f_a_proj', dim, d)
    yield _matrix(f'{p}f_b_proj', width, dim)
    yield _matrix(f'{p}b_proj', heads, d)
    if c.get('use_full_rank_gate'):
        yield _matrix(f'{p}g_proj', width, d)
    else:
        yield _matrix(f'{p}g_a_proj', dim, d)
        yield _matrix(f'{p}g_b_proj', width, dim)
    padded = a_log_size or heads + -heads % (128 if heads > 32 else 4)
    yield Tensor(f'{p}A_log', (padded,) if k3 else (1, 1, heads, 1), F32, f'A_log:{heads}')
    yield Tensor(f'{p}dt_bias', (width,), F32, 'dt_bias')
    yield _norm(f'{p}o_norm', dim, wide)
    yield _matrix(f'{p}o_proj', d, width)


def _mla(text: dict[str, Any], p: str) -> Iterator[Tensor]:
    d, heads, latent = text['hidden_size'], text['num_attention_heads'], text['kv_lora_rank']
    nope, rope, v = text['qk_nope_head_dim'], text['qk_rope_head_dim'], text['v_head_dim']
    if text.get('q_lora_rank'):
        yield _matrix(f'{p}q_a_proj', text['q_lora_rank'], d)
        yield _norm(f'{p}q_a_layernorm', text['q_lora_rank'])
        yield _matrix(f'{p}q_b_proj', heads * (nope + rope), text['q_lora_rank'], 2)
    else:
        yield _matrix(f'{p}q_proj', heads * (nope + rope), d, 2)
    yield _matrix(f'{p}kv_a_proj_with_mqa', latent + rope, d)
    yield _norm(f'{p}kv_a_layernorm', latent)
    yield _matrix(f'{p}kv_b_proj', heads * (nope + v), latent, 2)
    if text.get('mla_use_output_gate'):
        yield _matrix(f'{p}g_proj', heads * v, d)
    yield _matrix(f'{p}o_proj', d, heads * v)


def _mlp(p: str, d: int, inner: int) -> Iterator[Tensor]:
    yield _matrix(f'{p}gate_proj', inner, d, 2)
    yield _matrix(f'{p}up_proj', inner, d, 2)
    yield _matrix(f'{p}down_proj', d, inner)


def _moe(text: dict[str, Any], p: str, k3: bool, packed: bool) -> Iterator[Tensor]:
    d, inner, experts = text['hidden_size'], text['moe_intermediate_size'], text['num_experts']
    latent = text.get('routed_expert_hidden_size')
    width = latent or d
    yield _matrix(f'{p}gate', experts, d)
    bias_dtype = F32 if k3 else BF16
    yield Tensor(f'{p}gate.e_score_correction_bias', (experts,), bias_dtype, 'bias')
    for e in range(experts):
        for w, out, inputs in (('w1', inner, width), ('w3', inner, width), ('w2', width, inner)):
            name = f'{p}experts.{e}.{w}'
            if packed:
                yield Tensor(f'{name}.weight_packed', (out, inputs // 2), U8, 'packed', 2)
                yield Tensor(f'{name}.weight_scale', (out, inputs // 32), U8, 'scale', 2)
            else:
                yield _matrix(name, out, inputs, 2)
    if latent:
        yield _matrix(f'{p}routed_expert_down_proj', latent, d)
        yield _matrix(f'{p}routed_expert_up_proj', d, latent)
        if text.get('latent_moe_use_norm'):
            yield _norm(f'{p}routed_expert_norm', latent)
    if text['num_shared_experts']:
        yield from _mlp(f'{p}shared_experts.', d, inner * text['num_shared_experts'])


def _biased(matrix: Tensor, has_bias: bool) -> Iterator[Tensor]:
    yield matrix
    if has_bias:
        name = matrix.name.removesuffix('weight') + 'bias'
        yield Tensor(name, matrix.shape[:1], BF16, 'bias')


def _vision_norm(name: str, size: int, has_bias: bool) -> Iterator[Tensor]:
    yield from _biased(_norm(name, size), has_bias)


def _vision(vision: dict[str, Any], d: int) -> Iterator[Tensor]:
    h, inner = vision['vt_hidden_size'], vision['vt_intermediate_size']
    qkv, bias = vision.get('qkv_hidden_size', h), vision.get('attn_bias', True)
    old = vision['mm_projector_type'] == 'patchmerger'
    patch, p = vision['patch_size'], 'vision_tower.'
    proj = Tensor(f'{p}patch_embed.proj.weight', (h, 3, patch, patch), BF16, 'matrix')
    yield from _biased(proj, bias)
    grid = vision['init_pos_emb_height'], vision['init_pos_emb_width']
    yield Tensor(f'{p}patch_embed.pos_emb.weight', (*grid, h), BF16, 'position')
    for n in range(vision['vt_num_hidden_layers']):
        b = f'{p}encoder.blocks.{n}.'
        yield from _vision_norm(f'{b}norm0', h, old)
        yield from _vision_norm(f'{b}norm1', h, old)
        yield from _biased(_matrix(f'{b}wqkv', 3 * qkv, h, 2), bias)
        yield from _biased(_matrix(f'{b}wo', h, qkv), bias)
        yield from _biased(_matrix(f'{b}mlp.fc0', inner, h), bias)
        yield from _biased(_matrix(f'{b}mlp.fc1', h, inner), bias)
    yield from _vision_norm(f'{p}encoder.final_layernorm', h, old)
    merged = vision['mm_hidden_size'] * math.prod(vision['merge_kernel_size'])
    yield from _biased(_matrix('mm_projector.proj.0', merged, merged), bias)
    yield from _biased(_matrix('mm_projector.proj.2', d, merged), bias)
    if old:
        yield from _vision_norm('mm_projector.pre_norm', h, True)
    else:
        yield _norm('mm_projector.post_norm', d)


def release_tensors(config: dict[str, Any], a_log_size: int | None = None) -> Iterator[Tensor]:
    """Every tensor of the release that `config` (a config.json) describes.

    Args:
      config: of Kimi K3 (vision tensors where it has a vision_config) or Kimi Linear.
      a_log_size: stored length of K3's A_log; by default the heads rounded up.
    """
    k3 = _is_k3(config)
    text = config['text_config'] if k3 else config
    d, prefix = text['hidden_size'], 'language_model.' if k3 else ''
    has_residuals = bool(text.get('attn_res_block_size'))
    yield Tensor(f'{prefix}model.embed_tokens.weight', (text['vocab_size'], d), BF16, 'embedding')
    for n in range(text['num_hidden_layers']):
        p = f'{prefix}model.layers.{n}.'
        yield _norm(f'{p}input_layernorm', d)
        yield _norm(f'{p}post_attention_layernorm', d)
        if has_residuals:
            for name in ('self_attention_res', 'mlp_res'):
                yield _norm(f'{p}{name}_norm', d)
                yield _matrix(f'{p}{name}_proj', 1, d, 4)
        if n + 1 in text['linear_attn_config']['kda_layers']:
            yield from _kda(text, f'{p}self_attn.', k3, a_log_size)
        else:
            yield from _mla(text, f'{p}self_attn.')
        if n >= text['first_k_dense_replace']:
            packed = 'quantization_config' in text
            yield from _moe(text, f'{p}block_sparse_moe.', k3, packed)
        else:
            yield from _mlp(f'{p}mlp.', d, text['intermediate_size'])
    yield _norm(f'{prefix}model.norm', d)
    if has_residuals:
        yield _norm(f'{prefix}model.output_attn_res_norm', d)
        yield _matrix(f'{prefix}model.output_attn_res_proj', 1, d, 4)
    yield _matrix(f'{prefix}lm_head', text['vocab_size'], d, 2)
    if config.get('vision_config'):
        yield from _vision(config['vision_config'], d)


def quantise_mxfp4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[out, in] float -> codes [out, in / 2] and E8M0 scales [out, in / 32], both uint8."""
    out, inputs = weights.shape
    groups = weights.reshape(out, inputs // 32, 32)
    largest = np.abs(groups).max(-1)
    exponent = np.frexp(np.maximum(largest, 1e-30))[1] - 1 - 2  # the largest code is 1.5 * 2^2
    scaled = groups / np.exp2(exponent)[..., None]
    midpoints = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    codes = np.searchsorted(midpoints, np.abs(scaled)) + 8 * np.signbit(scaled)
    codes = codes.reshape(out, inputs).astype(np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, (exponent + 127).astype(np.uint8)


def random_values(tensor: Tensor, seed: int) -> np.ndarray:
    """Values of the tensor's kind, such that logits come out at about 1 to 2."""
    stem = tensor.name.removesuffix('_packed').removesuffix('_scale')
    rng = np.random.default_rng([seed, zlib.crc32(stem.encode())])
    normal, kind, shape = rng.standard_normal, tensor.kind, tensor.shape
    if kind in ('packed', 'scale'):
        out, inputs = shape[0], shape[1] * (2 if kind == 'packed' else 32)
        weights = normal((out, inputs)) * tensor.gain / math.sqrt(inputs)
        return quantise_mxfp4(weights)[kind == 'scale']
    if kind == 'matrix':
        values = normal(shape) * tensor.gain / math.sqrt(math.prod(shape[1:]))
    elif kind == 'norm':
        values = 1 + 0.2 * normal(shape)
    elif kind == 'embedding':
        values = normal(shape)
    elif kind in ('conv', 'position'):
        values = 0.5 * normal(shape)
    elif kind == 'dt_bias':
        values = normal(shape) - 2
    elif kind == 'bias':
        values = 0.1 * normal(shape)
    else:
        heads = int(kind.removeprefix('A_log:'))
        values = np.zeros(math.prod(shape))
        values[:heads] = np.log(rng.uniform(0.5, 12, heads))
        values = values.reshape(shape)
    return values.astype(NUMPY[tensor.dtype])


def write_shard(
    path: pathlib.Path, tensors: list[Tensor], values: Callable[[Tensor], np.ndarray]
) -> None:
    """One safetensors file, as the safetensors library lays it out, written tensor by tensor."""
    tensors = sorted(tensors, key=lambda t: (STORED_FIRST.index(t.dtype), t.name))
    fields: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
    end = 0
    for t in tensors:
        start, end = end, end + t.nbytes
        fields[t.name] = {'dtype': t.dtype, 'shape': t.shape, 'data_offsets': [start, end]}
    header = json.dumps(fields, separators=(',', ':')).encode()
    header += b' ' * (-len(header) % 8)
    with path.open('wb') as file:
        file.write(len(header).to_bytes(8, 'little') + header)
        for t in tensors:
            array = values(t)
            assert array.shape == t.shape and array.dtype == NUMPY[t.dtype], t
            file.write(array.tobytes())


def write_release(
    folder: pathlib.Path | str,
    config: dict[str, Any],
    seed: int = 0,
    num_shards: int = 2,
    *,
    a_log_size: int | None = None,
    values: Callable[[Tensor, int], np.ndarray] = random_values,
) -> pathlib.Path:
    """Writes the release that `config` describes: config.json, index and shards.

    Args:
      folder: made where it is not there.
      config: as for `release_tensors`; experts are MXFP4 where it has a quantization_config.
      seed: of the weights; a tensor's values depend on nothing but this and its name.
      num_shards: over which the tensors are spread evenly.
      a_log_size: as for `release_tensors`.
      values: what a tensor holds, from the tensor and the seed.

    Returns:
      `folder`.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = list(release_tensors(config, a_log_size))
    size, weight_map = -(-len(tensors) // num_shards), {}
    for number in range(num_shards):
        name = f'model-{number + 1:05d}-of-{num_shards:06d}.safetensors'
        part = tensors[number * size : (number + 1) * size]
        write_shard(folder / name, part, lambda t: values(t, seed))
        weight_map |= {t.name: name for t in part}
    index = {'metadata': {'total_size': sum(t.nbytes for t in tensors)}, 'weight_map': weight_map}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index, indent=2) + '\n')
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
    return folder
