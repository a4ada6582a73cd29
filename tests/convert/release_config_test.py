"""config.json: read field by field; what could change the maths is never passed over."""

import copy

import pytest

from k3jax.config import ConfigError, ModelConfig
from k3jax.convert.release_config import (
    model_config_from_release,
    release_config_from_model,
    without_quantization,
)
from tests import release


def _read(config, experts_format='bf16'):
    return model_config_from_release(config, experts_format=experts_format, name='x')


def test_k3_fields_are_those_of_the_release():
    config = _read(release.k3_full(), 'mxfp4')
    assert isinstance(config, ModelConfig)
    assert (config.family, config.name, config.experts_format) == ('kimi_k3', 'x', 'mxfp4')
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (93, 7168, 163840)
    assert (config.num_experts, config.num_experts_per_token) == (896, 16)
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_head_dim) == (1536, 512, 192)
    assert (config.routed_expert_hidden_size, config.attn_res_block_size) == (3584, 12)
    assert (config.hidden_act, config.activation_situ_linear_beta) == ('situ', 25.0)
    assert config.latent_moe_use_norm and config.mla_use_output_gate
    assert config.linear_attn_config.gate_lower_bound == -5.0
    assert config.linear_attn_config.use_full_rank_gate
    assert (config.bos_token_id, config.eos_token_id) == (163584, 163586)
    assert config.max_position_embeddings == 1048576
    assert not config.is_kda(91) and not config.is_kda(92) and config.is_kda(90)


def test_kimi_linear_fields_are_those_of_the_release():
    config = _read(release.kimi_linear_48b())
    assert config.family == 'kimi_linear'
    assert (config.q_lora_rank, config.attn_res_block_size) == (None, None)
    assert (config.hidden_act, config.routed_scaling_factor) == ('silu', 2.446)
    assert not config.mla_use_output_gate and not config.linear_attn_config.use_full_rank_gate
    assert config.linear_attn_config.gate_lower_bound is None
    assert config.max_position_embeddings == 1048576
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (
        163839,
        163584,
        163586,
    )


def test_list_of_end_tokens_counts_by_its_first():
    assert _read(release.k3_bf16()).eos_token_id == 2


@pytest.mark.parametrize(
    'fields',
    [
        {
            'rope_theta': 10000.0,
            'head_dim': 74,
            'use_cache': True,
            'transformers_version': '4.56.2',
        },
        {'num_beams': 1, 'max_length': 20, 'top_k': 50, 'auto_map': {}, 'torch_dtype': 'bfloat16'},
        {'topk_method': 'noaux_tc', 'num_nextn_predict_layers': 0, 'rope_scaling': None},
    ],
)
def test_boilerplate_is_passed_over(fields):
    wanted = _read(release.k3_bf16())
    config = release.k3_bf16()
    config['text_config'] |= fields
    assert _read(config) == wanted


@pytest.mark.parametrize(
    ('field', 'value', 'message'),
    [
        ('mla_use_nope', False, 'mla_use_nope: got False, wanted True'),
        ('moe_router_activation_func', 'softmax', "'softmax', wanted 'sigmoid'"),
        ('num_expert_group', 8, 'num_expert_group: got 8, wanted 1'),
        ('topk_group', 4, 'topk_group: got 4'),
        ('topk_method', 'greedy', "topk_method: got 'greedy', wanted 'noaux_tc'"),
        ('tie_word_embeddings', True, 'tie_word_embeddings: got True, wanted False'),
        ('num_nextn_predict_layers', 1, 'num_nextn_predict_layers: got 1, wanted 0'),
        ('rope_scaling', {'type': 'yarn'}, 'rope_scaling: got .*yarn'),
        ('num_key_value_heads', 2, r'num_key_value_heads: got 2, wanted num_attention_heads \(4\)'),
        ('hidden_act', 'gelu', "hidden_act: got 'gelu'"),
        ('hidden_size', '64', "hidden_size: got '64', wanted a whole number"),
        ('moe_renormalize', 1, 'moe_renormalize: got 1, wanted true or false'),
        ('rms_norm_eps', True, 'rms_norm_eps: got True, wanted a number'),
        ('num_experts_per_token', 9, 'num_experts_per_token: got 9'),
        ('sliding_window', 4096, 'sliding_window: got 4096, wanted a field that this code knows'),
        ('model_max_length', 1, 'model_max_length: got 1'),
        ('eos_token_id', 7, 'eos_token_id: got 7, wanted 2'),
        ('linear_attn_config', None, 'linear_attn_config: got None'),
        ('model_type', 'llama', "text_config.model_type: got 'llama'"),
        ('quantization_config', {'quant_method': 'fp8'}, "quant_method: got 'fp8'"),
        ('quantization_config', {'format': 'nvfp4'}, "format: got 'nvfp4'"),
    ],
)
def test_what_could_change_the_maths_is_refused_by_name(field, value, message):
    config = release.k3_bf16()
    config['text_config'][field] = value
    with pytest.raises(ConfigError, match=message):
        _read(config)


@pytest.mark.parametrize('field', ['hidden_size', 'mla_use_nope', 'num_shared_experts'])
def test_missing_field_is_refused_by_name(field):
    config = release.k3_bf16()
    del config['text_config'][field]
    with pytest.raises(ConfigError, match=f'text_config.{field}: got nothing'):
        _read(config)


@pytest.mark.parametrize(
    ('field', 'value', 'message'),
    [
        ('num_heads', None, 'num_heads: got None'),
        ('kda_layers', [1, 2], r'kda_layers \+ full_attn_layers'),
        ('kda_layers', 3, 'kda_layers: got 3, wanted a list'),
        ('gate_lower_bound', 5.0, 'gate_lower_bound: got 5.0'),
        ('allow_neg_eigval', True, 'allow_neg_eigval: got True, wanted a field'),
    ],
)
def test_kda_geometry_is_checked(field, value, message):
    config = release.k3_bf16()
    config['text_config']['linear_attn_config'][field] = value
    with pytest.raises(ConfigError, match=message):
        _read(config)


@pytest.mark.parametrize('model_type', ['llama', 'kimi_k25', None])
def test_other_architectures_get_one_line(model_type):
    config = {'model_type': model_type, 'hidden_size': 4096, 'rope_theta': 5e5}
    with pytest.raises(ConfigError, match=f'model_type: got {model_type!r}') as error:
        _read(config)
    assert '\n' not in str(error.value)


def test_top_level_copy_of_a_field_must_agree():
    config = release.k3_bf16() | {'hidden_size': 64}
    assert _read(config).hidden_size == 64
    with pytest.raises(ConfigError, match='hidden_size: got 65'):
        _read(config | {'hidden_size': 65})


def test_quantization_is_accepted_at_either_level_or_both_when_equal():
    nested = release.k3_mxfp4()
    quantization = nested['text_config']['quantization_config']
    top = release.k3_bf16() | {'quantization_config': quantization}
    both = nested | {'quantization_config': copy.deepcopy(quantization)}
    assert _read(nested, 'mxfp4') == _read(top, 'mxfp4') == _read(both, 'mxfp4')


def test_contradictory_quantization_is_refused():
    config = release.k3_mxfp4()
    config['quantization_config'] = release.mxfp4_quantization() | {'ignore': []}
    with pytest.raises(ConfigError, match='quantization_config: got .*differ'):
        _read(config)


@pytest.mark.parametrize(('field', 'value'), [('num_bits', 8), ('group_size', 16), ('type', 'int')])
def test_other_quantization_is_refused_by_name(field, value):
    config = release.k3_mxfp4()
    weights = config['text_config']['quantization_config']['config_groups']['group_0']['weights']
    weights[field] = value
    with pytest.raises(ConfigError, match=f'weights.{field}: got {value!r}'):
        _read(config, 'mxfp4')


@pytest.mark.parametrize(
    'config',
    [release.k3_full(), release.k3_bf16(), release.kimi_linear(), release.kimi_linear_48b()],
)
@pytest.mark.parametrize('experts_format', ['bf16', 'mxfp4'])
def test_written_config_reads_back_as_the_same_model(config, experts_format):
    model = _read(config, experts_format)
    written = release_config_from_model(model)
    assert _read(written, experts_format) == model
    has_quantization = 'quantization_config' in written.get('text_config', written)
    assert has_quantization == (experts_format == 'mxfp4')


def test_quantization_is_removed_at_both_levels():
    config = release.k3_mxfp4() | {'quantization_config': {}}
    assert without_quantization(config) == release.k3_bf16()
