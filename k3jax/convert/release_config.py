"""What a released config.json says of the model, field by field, and the same in reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3jax.config import ConfigError, LinearAttnConfig, ModelConfig
from k3jax.convert.vision_config import release_vision_config, vision_config_from_release
from k3jax.model.layout import GROUP

# Fields with a ModelConfig field of the same name: those that must be there, and those that may
# be absent, with the default of the release's own config class.
REQUIRED = (
    'vocab_size',
    'hidden_size',
    'num_hidden_layers',
    'intermediate_size',
    'rms_norm_eps',
    'num_attention_heads',
    'kv_lora_rank',
    'qk_nope_head_dim',
    'qk_rope_head_dim',
    'v_head_dim',
    'num_experts',
    'num_experts_per_token',
    'num_shared_experts',
    'moe_intermediate_size',
    'routed_scaling_factor',
    'first_k_dense_replace',
)
OPTIONAL: dict[str, Any] = {
    'hidden_act': 'silu',
    'activation_situ_beta': None,
    'activation_situ_linear_beta': None,
    'attn_res_block_size': None,
    'q_lora_rank': None,
    'mla_use_output_gate': False,
    'mla_latent_norm_eps': 1e-6,
    'routed_expert_hidden_size': None,
    'latent_moe_use_norm': False,
    'moe_renormalize': True,
    'moe_layer_freq': 1,
    'initializer_range': 0.02,
}
LINEAR_REQUIRED = ('num_heads', 'head_dim', 'kda_layers', 'full_attn_layers')
LINEAR_OPTIONAL: dict[str, Any] = {
    'short_conv_kernel_size': 4,
    'gate_lower_bound': None,
    'use_full_rank_gate': False,
}
CONTEXT_LENGTH = ('max_position_embeddings', 'model_max_length')  # two names for one thing
TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
MEDIA_ID = 'media_placeholder_token_id'

# Fields that the code implements for these values only. `mla_use_nope` must be there: its absence
# means rotary positions in the release's class.
FIXED: dict[str, tuple[Any, ...]] = {
    'mla_use_nope': (True,),
    'moe_router_activation_func': ('sigmoid', None),
    'topk_method': ('noaux_tc', None),
    'num_expert_group': (1, None),
    'topk_group': (1, None),
    'use_grouped_topk': (True, False, None),  # with one group both mean the same
    'tie_word_embeddings': (False, None),
    'num_nextn_predict_layers': (0, None),
    'rope_scaling': (None,),
    'attention_bias': (False, None),
    'attention_dropout': (0, None),
    'is_decoder': (False, True, None),
    'is_encoder_decoder': (False, None),
    'add_cross_attention': (False, None),
    'tie_encoder_decoder': (False, None),
    'cross_attention_hidden_size': (None,),
    'pruned_heads': ({}, None),
}

# Fields that do not touch the text model's maths.
HARMLESS = frozenset(
    """
    model_type architectures auto_map dtype torch_dtype transformers_version use_cache head_dim
    rope_theta rope_parameters _name_or_path _attn_implementation _attn_implementation_autoset
    attn_implementation _commit_hash name_or_path vision_config image_placeholder ignore_index
    sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens
    begin_suppress_tokens bad_words_ids output_attentions output_hidden_states output_router_logits
    return_dict return_dict_in_generate output_scores use_return_dict torchscript use_bfloat16
    tf_legacy_loss chunk_size_feed_forward id2label label2id num_labels problem_type
    finetuning_task task_specific_params tokenizer_class prefix do_sample early_stopping num_beams
    num_beam_groups num_return_sequences diversity_penalty length_penalty repetition_penalty
    encoder_no_repeat_ngram_size no_repeat_ngram_size exponential_decay_length_penalty max_length
    min_length remove_invalid_values temperature top_k top_p typical_p pretraining_tp
    router_aux_loss_coef aux_loss_alpha seq_aux
    """.split()  # noqa: SIM905
)

_KNOWN = {*REQUIRED, *OPTIONAL, *CONTEXT_LENGTH, *TOKEN_IDS, MEDIA_ID, *FIXED, *HARMLESS}
_KNOWN |= {'num_key_value_heads', 'linear_attn_config', 'quantization_config'}
_KNOWN_LINEAR = {*LINEAR_REQUIRED, *LINEAR_OPTIONAL}

MXFP4_FORMAT = 'mxfp4-pack-quantized'
MISSING = object()


def _error(where: str, got: Any, wanted: str) -> ConfigError:
    came = 'nothing' if got is MISSING else repr(got)
    return ConfigError(f'config.json: {where}: got {came}, wanted {wanted}')


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    'whole': (lambda v: isinstance(v, int) and not isinstance(v, bool), 'a whole number'),
    'number': (_is_number, 'a number'),
    'flag': (lambda v: isinstance(v, bool), 'true or false'),
    'text': (lambda v: isinstance(v, str), 'a string'),
    'layers': (
        lambda v: isinstance(v, list) and all(isinstance(n, int) for n in v),
        'a list of 1-based layer numbers',
    ),
}
_NUMBERS = {
    'rms_norm_eps',
    'routed_scaling_factor',
    'activation_situ_beta',
    'activation_situ_linear_beta',
    'mla_latent_norm_eps',
    'initializer_range',
    'gate_lower_bound',
}


def _kind(field: str, defaults: dict[str, Any]) -> str:
    if field in _NUMBERS:
        return 'number'
    if field.endswith('_layers') and field != 'num_hidden_layers':
        return 'layers'
    default = defaults.get(field)
    return 'flag' if isinstance(default, bool) else 'text' if isinstance(default, str) else 'whole'


def _take(
    fields: dict[str, Any], required: tuple[str, ...], optional: dict[str, Any], where: str
) -> dict[str, Any]:
    """The named fields with their defaults; every value checked for its type."""
    taken = {}
    for field in (*required, *optional):
        value = fields.get(field, optional.get(field, MISSING))
        is_right, wanted = _KINDS[_kind(field, optional)]
        if value is MISSING:
            raise _error(where + field, value, f'{wanted}; add the field from the release')
        if not is_right(value) and not (value is None and optional.get(field, 0) is None):
            raise _error(where + field, value, wanted)
        taken[field] = value
    return taken


def _check_known(fields: dict[str, Any], known: set[str], where: str) -> None:
    for field, value in fields.items():
        if field not in known:
            raise _error(
                where + field,
                value,
                'a field that this code knows; it could change the maths. If it does not, add it '
                'to HARMLESS in k3jax/convert/release_config.py, else remove it from config.json',
            )


def _first(token_id: Any) -> Any:
    return token_id[0] if isinstance(token_id, list) and token_id else token_id


def _token_ids(top: dict[str, Any], text: dict[str, Any], where: str) -> dict[str, int]:
    """Special token ids; a list (several ends of sequence) counts by its first."""
    taken = {}
    for field in (*TOKEN_IDS, MEDIA_ID):
        values = [_first(fields[field]) for fields in (text, top) if fields.get(field) is not None]
        if len(set(values)) > 1:
            raise _error(f'{where}{field}', values[0], f'{values[1]}, the top level value')
        if values:
            if not _KINDS['whole'][0](values[0]):
                raise _error(where + field, values[0], 'a whole number')
            taken[field] = values[0]
    return taken


def _check_quantization(quantization: dict[str, Any], where: str) -> None:
    """Accepts the released MXFP4 form only; what is quantised is read off the tensors' names."""
    wanted = f'{MXFP4_FORMAT} with num_bits 4 and group_size {GROUP}'
    if not isinstance(quantization, dict):
        raise _error(where, quantization, f'an object describing {wanted}')
    if quantization.get('quant_method', 'compressed-tensors') != 'compressed-tensors':
        raise _error(f'{where}.quant_method', quantization['quant_method'], "'compressed-tensors'")
    if quantization.get('format') != MXFP4_FORMAT:
        raise _error(f'{where}.format', quantization.get('format', MISSING), repr(MXFP4_FORMAT))
    groups = quantization.get('config_groups')
    if not isinstance(groups, dict) or not groups:
        raise _error(f'{where}.config_groups', groups, 'at least one group')
    for name, group in groups.items():
        at = f'{where}.config_groups.{name}'
        if not isinstance(group, dict) or not isinstance(group.get('weights'), dict):
            raise _error(at, group, 'an object with weights')
        if group.get('format', MXFP4_FORMAT) != MXFP4_FORMAT:
            raise _error(f'{at}.format', group['format'], repr(MXFP4_FORMAT))
        for field, value in (('num_bits', 4), ('group_size', GROUP), ('type', 'float')):
            if group['weights'].get(field, MISSING) != value:
                raise _error(
                    f'{at}.weights.{field}', group['weights'].get(field, MISSING), repr(value)
                )
        for field in ('input_activations', 'output_activations'):
            if group.get(field) is not None:
                raise _error(f'{at}.{field}', group[field], 'null: weights only')


def _quantization(top: dict[str, Any], text: dict[str, Any], where: str) -> dict[str, Any] | None:
    copies = [c.get('quantization_config') for c in (top, text)]
    copies = [c for c in copies if c is not None]
    if not copies:
        return None
    if copies[0] != copies[-1]:
        raise _error(
            'quantization_config',
            'two that differ',
            f'the copies at the top level and in {where.rstrip(".")} to be equal; keep one',
        )
    _check_quantization(copies[0], 'quantization_config')
    return copies[0]


def _text_fields(config: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    """Family, the fields of the text model, and the prefix that names them."""
    if not isinstance(config, dict):
        raise _error('the file', type(config).__name__, 'an object')
    model_type = config.get('model_type', MISSING)
    if model_type == 'kimi_linear':
        return 'kimi_linear', config, ''
    if model_type != 'kimi_k3':
        raise _error(
            'model_type',
            model_type,
            "'kimi_k3' or 'kimi_linear'; other architectures are not supported",
        )
    text = config.get('text_config', MISSING)
    if not isinstance(text, dict):
        raise _error('text_config', text, 'an object with the fields of the text model')
    if text.get('model_type', 'kimi_linear') != 'kimi_linear':
        raise _error('text_config.model_type', text['model_type'], "'kimi_linear'")
    return 'kimi_k3', text, 'text_config.'


def model_config_from_release(
    config_json: dict[str, Any],
    *,
    experts_format: str,
    name: str,
    stored_experts_format: str | None = None,
) -> ModelConfig:
    """The ModelConfig of a released config.json.

    Args:
      config_json: the parsed file, of Kimi K3 or Kimi Linear.
      experts_format: 'bf16' or 'mxfp4', how the routed experts will be held.
      name: for `ModelConfig.name`.
      stored_experts_format: how the release's tensors hold them, by their names; the file must
        say the same. None: the tensors are not known.

    Raises:
      ConfigError: another architecture; a field that is missing, unknown, contradictory, or has a
        value that the model does not implement. The message names it.
    """
    family, text, where = _text_fields(config_json)
    is_nested = text is not config_json
    if is_nested:
        top = dict(config_json)
        _check_known(top, _KNOWN | {'text_config'}, '')
        for field in top.keys() & {*REQUIRED, *OPTIONAL, *CONTEXT_LENGTH, 'linear_attn_config'}:
            if top[field] != text.get(field, MISSING):
                raise _error(field, top[field], f'the value of text_config.{field}, or nothing')
    else:
        top = {}
    _check_known(text, _KNOWN, where)
    for field, allowed in FIXED.items():
        value = text.get(field, None if None in allowed else MISSING)
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            choices = ' or '.join('nothing' if a is None else repr(a) for a in allowed)
            raise _error(where + field, value, f'{choices}, which is all this code implements')
        if field in top and top[field] not in allowed:
            raise _error(field, top[field], ' or '.join(map(repr, allowed)))

    fields = _take(text, REQUIRED, OPTIONAL, where)
    heads = text.get('num_key_value_heads')
    if heads is not None and heads != fields['num_attention_heads']:
        raise _error(
            f'{where}num_key_value_heads',
            heads,
            f'num_attention_heads ({fields["num_attention_heads"]}): MLA has one key a query head',
        )
    lengths = {field: text[field] for field in CONTEXT_LENGTH if text.get(field) is not None}
    if len(set(lengths.values())) > 1:
        raise _error(
            f'{where}model_max_length',
            lengths['model_max_length'],
            f'{lengths[CONTEXT_LENGTH[0]]}, max_position_embeddings',
        )
    if lengths:
        _take(lengths, tuple(lengths), {}, where)
        fields['max_position_embeddings'] = next(iter(lengths.values()))

    linear = text.get('linear_attn_config', MISSING)
    linear_where = f'{where}linear_attn_config'
    if not isinstance(linear, dict):
        raise _error(linear_where, linear, 'an object with the KDA geometry')
    _check_known(linear, _KNOWN_LINEAR, f'{linear_where}.')
    linear = _take(linear, LINEAR_REQUIRED, LINEAR_OPTIONAL, f'{linear_where}.')
    for field in ('kda_layers', 'full_attn_layers'):
        linear[field] = tuple(linear[field])

    quantization = _quantization(top, text, where)
    if stored_experts_format == 'mxfp4' and quantization is None:
        raise _error(
            f'{where}quantization_config',
            MISSING,
            f'the description of {MXFP4_FORMAT}: the routed experts are stored packed '
            '(.weight_packed, .weight_scale); get the config.json that belongs to the weights',
        )
    if stored_experts_format == 'bf16' and quantization is not None:
        raise _error(
            'quantization_config',
            quantization['format'],
            'nothing: the routed experts are stored in bf16 (.weight); remove the field, or get '
            'the config.json that belongs to the weights',
        )
    vision = config_json.get('vision_config') if family == 'kimi_k3' else None
    if vision is not None:
        vision = vision_config_from_release(vision, fields['hidden_size'])
    return ModelConfig(
        name=name,
        family=family,
        vision=vision,
        linear_attn_config=LinearAttnConfig(**linear),
        experts_format=experts_format,
        **_token_ids(top, text, where),
        **fields,
    )


def quantization_config() -> dict[str, Any]:
    """The release's description of MXFP4 routed experts."""
    weights = {
        'num_bits': 4,
        'group_size': GROUP,
        'type': 'float',
        'strategy': 'group',
        'symmetric': True,
        'dynamic': False,
        'scale_dtype': 'torch.uint8',
    }
    group = {
        'format': MXFP4_FORMAT,
        'targets': ['Linear'],
        'weights': weights,
        'input_activations': None,
        'output_activations': None,
    }
    kept = ('self_attn', 'shared_experts', 'routed_expert', r'mlp\.', 'gate', 'res_proj', 'lm_head')
    return {
        'quant_method': 'compressed-tensors',
        'format': MXFP4_FORMAT,
        'quantization_status': 'compressed',
        'config_groups': {'group_0': group},
        'ignore': [f're:.*{part}.*' for part in kept],
    }


def without_quantization(config_json: dict[str, Any]) -> dict[str, Any]:
    """A config.json for the same model with its experts in bf16."""
    config = {k: v for k, v in config_json.items() if k != 'quantization_config'}
    if isinstance(config.get('text_config'), dict):
        config['text_config'] = without_quantization(config['text_config'])
    return config


def release_config_from_model(config: ModelConfig) -> dict[str, Any]:
    """A config.json in the released form, the inverse of `model_config_from_release`."""
    linear = config.linear_attn_config
    text: dict[str, Any] = {'model_type': 'kimi_linear', 'architectures': ['KimiLinearForCausalLM']}
    text |= {field: getattr(config, field) for field in REQUIRED}
    text |= {
        field: getattr(config, field)
        for field, default in OPTIONAL.items()
        if getattr(config, field) != default
    }
    text |= {
        'num_key_value_heads': config.num_attention_heads,
        'head_dim': config.qk_head_dim,
        'hidden_act': config.hidden_act,
        'q_lora_rank': config.q_lora_rank,
        'rope_theta': 10000.0,
        'mla_use_nope': True,
        'moe_renormalize': config.moe_renormalize,
        'moe_layer_freq': config.moe_layer_freq,
        'moe_router_activation_func': 'sigmoid',
        'topk_method': 'noaux_tc',
        'use_grouped_topk': True,
        'num_expert_group': 1,
        'topk_group': 1,
        'num_nextn_predict_layers': 0,
        'max_position_embeddings': config.max_position_embeddings,
        'model_max_length': config.max_position_embeddings,
        'initializer_range': config.initializer_range,
        'tie_word_embeddings': False,
        'dtype': 'bfloat16',
    }
    text['linear_attn_config'] = {
        'num_heads': linear.num_heads,
        'head_dim': linear.head_dim,
        'kda_layers': list(linear.kda_layers),
        'full_attn_layers': list(linear.full_attn_layers),
        'short_conv_kernel_size': linear.short_conv_kernel_size,
    }
    text['linear_attn_config'] |= {
        field: getattr(linear, field)
        for field in ('gate_lower_bound', 'use_full_rank_gate')
        if getattr(linear, field) != LINEAR_OPTIONAL[field]
    }
    if config.experts_format == 'mxfp4':
        text['quantization_config'] = quantization_config()
    tokens = {field: getattr(config, field) for field in TOKEN_IDS}
    if config.family == 'kimi_linear':
        return text | tokens
    release = {
        'model_type': 'kimi_k3',
        'architectures': ['KimiK3ForConditionalGeneration'],
        'dtype': 'bfloat16',
        'tie_word_embeddings': False,
        **tokens,
        'text_config': text | tokens,
    }
    if config.vision is not None:
        release[MEDIA_ID] = config.media_placeholder_token_id
        release['vision_config'] = release_vision_config(config.vision, config.hidden_size)
    return release
