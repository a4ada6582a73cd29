"""What a released config.json says of the vision tower, field by field, and the same in reverse.

K2.5's file leaves out what K3's names: the kind of projector tells them apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from k3jax.config import ConfigError, VisionConfig

WHERE = 'vision_config'
# The release's name -> VisionConfig's; of these, K3's class has defaults for the second group.
REQUIRED = {
    'vt_hidden_size': 'hidden_size',
    'vt_num_hidden_layers': 'num_hidden_layers',
    'vt_num_attention_heads': 'num_attention_heads',
    'vt_intermediate_size': 'intermediate_size',
    'patch_size': 'patch_size',
}
OPTIONAL = {
    'qkv_hidden_size': 'qkv_hidden_size',
    'init_pos_emb_height': 'pos_emb_height',
    'init_pos_emb_width': 'pos_emb_width',
    'pos_emb_interpolation_mode': 'pos_emb_interpolation_mode',
    'projector_ln_eps': 'projector_eps',
    'norm_eps': 'norm_eps',  # ours: no release has it
}
NORMS = {'rmsnorm': 'rms', 'layernorm': 'layer'}
PROJECTORS = {'patchmergerv2': 'rmsnorm', 'patchmerger': 'layernorm'}
BIASES = ('attn_bias', 'linear_bias', 'patch_embed_proj_bias')
# What differs between the releases where their files say nothing.
DEFAULTS: dict[str, dict[str, Any]] = {
    'rms': {'norm_eps': 1.1920929e-07, 'pos_emb_interpolation_mode': 'bilinear', 'bias': False},
    'layer': {'norm_eps': 1e-5, 'pos_emb_interpolation_mode': 'bicubic', 'bias': True},
}
# Fields that the code implements for these values only.
FIXED: dict[str, tuple[Any, ...]] = {
    'init_pos_emb_time': (4, None),
    'pos_emb_type': ('divided_fixed', None),
    'merge_kernel_size': ([2, 2], 2, None),
    'merge_type': ('sd2_tpool', None),
    'mlp_type': ('mlp2', None),
    'activation_func': ('gelu_pytorch_tanh', None),
    'projector_hidden_act': ('gelu', None),
    'video_attn_type': ('spatial_temporal', None),
}
HARMLESS = {
    'model_type',
    'architectures',
    'auto_map',
    'dtype',
    'torch_dtype',
    'transformers_version',
    '_attn_implementation',
    'attn_implementation',
    '_name_or_path',
    'use_cache',
    'ignore_index',
    'media_placeholder_token_id',
    'image_placeholder',
    'pad_token_id',
}
_OTHERS = {'norm_type', 'mm_projector_type', 'mm_hidden_size', 'text_hidden_size', *BIASES}
_KNOWN = {*REQUIRED, *OPTIONAL, *FIXED, *_OTHERS, *HARMLESS}


def _error(field: str, got: Any, wanted: str) -> ConfigError:
    return ConfigError(f'config.json: {WHERE}.{field}: got {got!r}, wanted {wanted}')


def _value(name: str, ours: str, got: Any) -> Any:
    """A value of the kind that the field has."""
    kinds = {field.name: field.default for field in dataclasses.fields(VisionConfig)}
    kind = type(kinds[ours])
    wanted = {int: 'a whole number', float: 'a number', str: 'a string'}[kind]
    is_right = isinstance(got, int | float if kind is float else kind)
    if not is_right or isinstance(got, bool):
        raise _error(name, got, wanted)
    return got


def vision_config_from_release(fields: Any, text_width: int) -> VisionConfig:
    """The VisionConfig of a release's `vision_config`, of K3 or of K2.5.

    text_width: D of the text model.

    Raises:
      ConfigError: a field that is missing, unknown, contradictory, or has a value that the tower
        does not implement. The message names it.
    """
    if not isinstance(fields, dict):
        raise ConfigError(f'config.json: {WHERE}: got {fields!r}, wanted an object')
    for name, value in fields.items():
        if name not in _KNOWN:
            wanted = 'a field that this code knows; it could change the maths. If it does not, add '
            raise _error(name, value, wanted + 'it to HARMLESS in k3jax/convert/vision_config.py')
    for name, allowed in FIXED.items():
        if fields.get(name) not in allowed:
            raise _error(name, fields[name], f'{allowed[0]!r}, which is all this code implements')
    projector = fields.get('mm_projector_type')
    if not isinstance(projector, str) or projector not in PROJECTORS:
        raise _error('mm_projector_type', projector, ' or '.join(map(repr, PROJECTORS)))
    norm_type = fields.get('norm_type')
    norm_type = PROJECTORS[projector] if norm_type is None else norm_type
    if norm_type != PROJECTORS[projector]:
        raise _error('norm_type', norm_type, f'{PROJECTORS[projector]!r}, as {projector!r} has')
    norm = NORMS[norm_type]
    values = dict(DEFAULTS[norm])
    for name, ours in (REQUIRED | OPTIONAL).items():
        if fields.get(name) is not None:
            values[ours] = _value(name, ours, fields[name])
        elif name in REQUIRED:
            raise _error(name, None, 'a whole number; add the field from the release')
    values.setdefault('qkv_hidden_size', values['hidden_size'])
    biases = [fields.get(name, values['bias']) for name in BIASES]
    if not all(bias is biases[0] and isinstance(bias, bool) for bias in biases):
        got = {name: fields.get(name) for name in BIASES}
        raise _error(', '.join(BIASES), got, 'all true or all false')
    widths = (('mm_hidden_size', values['hidden_size']), ('text_hidden_size', text_width))
    for name, wanted in widths:
        if fields.get(name) not in (None, wanted):
            raise _error(name, fields[name], f'{wanted}, the width on that side')
    return VisionConfig(**(values | {'norm': norm, 'bias': biases[0]}))


def release_vision_config(config: VisionConfig, text_width: int) -> dict[str, Any]:
    """A `vision_config` in the released form, the inverse of `vision_config_from_release`."""
    norm_type = next(name for name, ours in NORMS.items() if ours == config.norm)
    projector = next(name for name, norm in PROJECTORS.items() if norm == norm_type)
    fields = {
        name: getattr(config, ours)
        for name, ours in (REQUIRED | OPTIONAL).items()
        if name != 'norm_eps' or config.norm_eps != DEFAULTS[config.norm]['norm_eps']
    }
    return {
        'model_type': 'moonvit3d',
        **fields,
        **{name: allowed[0] for name, allowed in FIXED.items()},
        'norm_type': norm_type,
        'mm_projector_type': projector,
        'mm_hidden_size': config.hidden_size,
        'text_hidden_size': text_width,
        **dict.fromkeys(BIASES, config.bias),
    }
