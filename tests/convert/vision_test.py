"""The vision part of releases: its config both ways, of K3 and K2.5; what stands for what."""

import copy

import numpy as np
import pytest

from configs import kimi_k3_vision
from k3jax.config import ConfigError, VisionConfig
from k3jax.convert.converted import load_params
from k3jax.convert.files import ConversionError
from k3jax.convert.load_vision import load_vision
from k3jax.convert.release_config import model_config_from_release, release_config_from_model
from k3jax.convert.to_orbax import convert
from k3jax.convert.vision_config import release_vision_config, vision_config_from_release
from tests import release
from tests.convert.folders import edit_json

K25 = {  # as its config.json has it
    'vt_hidden_size': 1152,
    'vt_num_hidden_layers': 27,
    'vt_num_attention_heads': 16,
    'vt_intermediate_size': 4304,
    'patch_size': 14,
    'init_pos_emb_height': 64,
    'init_pos_emb_width': 64,
    'init_pos_emb_time': 4,
    'pos_emb_type': 'divided_fixed',
    'merge_kernel_size': [2, 2],
    'merge_type': 'sd2_tpool',
    'video_attn_type': 'spatial_temporal',
    'mm_projector_type': 'patchmerger',
    'mm_hidden_size': 1152,
    'projector_hidden_act': 'gelu',
    'projector_ln_eps': 1e-5,
    'text_hidden_size': 7168,
}


def test_configs_of_the_releases_are_read():
    full = release.k3_full()
    assert vision_config_from_release(full['vision_config'], 7168) == VisionConfig()
    model = model_config_from_release(full, experts_format='bf16', name='kimi_k3_vision')
    # The test's release leaves to the class what the config spells out.
    assert model == kimi_k3_vision.get_config().model
    config = vision_config_from_release(K25, 7168)
    assert config == VisionConfig(
        hidden_size=1152,
        num_attention_heads=16,
        qkv_hidden_size=1152,
        intermediate_size=4304,
        norm='layer',
        norm_eps=1e-5,
        bias=True,
        pos_emb_interpolation_mode='bicubic',
    )


@pytest.mark.parametrize('config', [release.k3_bf16(), release.k25_vision()])
def test_what_is_written_is_read_back(config):
    model = model_config_from_release(config, experts_format='bf16', name='x')
    assert model.vision is not None and model.media_placeholder_token_id == 250
    again = release_config_from_model(model)
    assert model_config_from_release(again, experts_format='bf16', name='x') == model
    other = VisionConfig(norm_eps=2**-7, bias=True)
    assert vision_config_from_release(release_vision_config(other, 8), 8) == other


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'vt_hidden_size': None}, r'vision_config.vt_hidden_size: got None, wanted a whole'),
        ({'patch_size': '14'}, r"vision_config.patch_size: got '14', wanted a whole number"),
        ({'init_pos_emb_time': 8}, r'vision_config.init_pos_emb_time: got 8, wanted 4'),
        ({'merge_type': 'other'}, r"vision_config.merge_type: got 'other', wanted 'sd2_tpool'"),
        ({'mm_projector_type': 'mlp'}, r"vision_config.mm_projector_type: got 'mlp'"),
        ({'norm_type': 'layernorm'}, r"vision_config.norm_type: got 'layernorm', wanted 'rmsnorm'"),
        ({'linear_bias': True}, r'attn_bias, linear_bias, patch_embed_proj_bias: got'),
        ({'mm_hidden_size': 7}, r'vision_config.mm_hidden_size: got 7, wanted 1024'),
        ({'text_hidden_size': 7}, r'vision_config.text_hidden_size: got 7, wanted 7168'),
        ({'mm_projector_type': ['x']}, r"vision_config.mm_projector_type: got \['x'\]"),
        ({'attn_bias': []}, r'attn_bias, linear_bias, patch_embed_proj_bias: got'),
        ({'norm_type': 0}, r"vision_config.norm_type: got 0, wanted 'rmsnorm'"),
        ({'depth': 7}, r'vision_config.depth: got 7, wanted a field that this code knows'),
    ],
)
def test_configs_that_are_not_understood_are_refused(change, message):
    fields = copy.deepcopy(release.k3_full()['vision_config'])
    with pytest.raises(ConfigError, match=message):
        vision_config_from_release(fields | change, 7168)


def test_leaves_hold_the_tensors_of_the_release(sources, tmp_path):
    values = {
        t.name: release.random_values(t, 0) for t in release.release_tensors(release.k25_vision())
    }
    convert(sources / 'k25_vision', tmp_path / 'orbax')
    params = load_params(tmp_path / 'orbax')
    tower = params['vision_tower']
    for block in range(2):
        got = tower['blocks']['wqkv']['bias'][block]
        np.testing.assert_array_equal(got, values[f'vision_tower.encoder.blocks.{block}.wqkv.bias'])
    patch = values['vision_tower.patch_embed.proj.weight']
    got = tower['patch_embed']['proj']['weight']
    np.testing.assert_array_equal(got, patch.reshape(len(patch), -1))
    got = params['mm_projector']['proj_2']['weight']
    np.testing.assert_array_equal(got, values['mm_projector.proj.2.weight'])


def test_vision_alone_comes_from_a_release_of_another_text_model(sources, tmp_path):
    folder = release.write_release(tmp_path / 'k25', release.k25_vision())
    edit_json(folder / 'config.json', lambda config: config.update(model_type='kimi_k25'))
    config, params = load_vision(folder)
    assert config.norm == 'layer' and config.bias
    convert(sources / 'k25_vision', tmp_path / 'orbax')
    want = load_params(tmp_path / 'orbax')
    for name, tree in params.items():
        np.testing.assert_equal(tree, want[name])
    edit_json(folder / 'config.json', lambda config: config['vision_config'].update(patch_size=7))
    with pytest.raises(ConversionError, match='patch_embed.proj.weight: got BF16'):
        load_vision(folder)
