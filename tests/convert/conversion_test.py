"""Conversion and export: identity byte for byte, and the values in between."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from k3jax.convert import orbax_tree
from k3jax.convert.binding import flatten
from k3jax.convert.converted import load_params
from k3jax.convert.files import ConversionError
from k3jax.convert.to_orbax import convert
from k3jax.convert.to_safetensors import export, export_params
from k3jax.model.layout import model_leaves
from tests import release
from tests.convert.folders import (
    CONFIGS,
    INDEX,
    SHARDS,
    arrays_of,
    assert_same_folder,
    edit_json,
)


@pytest.mark.parametrize('name', CONFIGS)
def test_convert_then_export_is_the_identity(sources, tmp_path, name):
    convert(sources / name, tmp_path / 'orbax')
    export(tmp_path / 'orbax', tmp_path / 'back')
    wanted = tmp_path / 'wanted'
    shutil.copytree(sources / name, wanted, ignore=shutil.ignore_patterns('.cache'))
    assert_same_folder(tmp_path / 'back', wanted)


def test_single_file_without_index_travels_both_ways(tiny, tmp_path):
    config = json.loads((tiny / 'config.json').read_text())
    single = release.write_release(tmp_path / 'single', config, num_shards=1)
    (single / INDEX).unlink()
    (single / 'model-00001-of-000001.safetensors').rename(single / 'model.safetensors')
    convert(single, tmp_path / 'orbax')
    export(tmp_path / 'orbax', tmp_path / 'back')
    assert_same_folder(tmp_path / 'back', single)


def test_header_of_another_order_survives(tiny, tmp_path):
    shard = tiny / SHARDS[0]
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], 'little')
    fields = json.loads(data[8 : 8 + length])
    header = json.dumps(dict(reversed(fields.items())), indent=1).encode() + b'   '
    shard.write_bytes(len(header).to_bytes(8, 'little') + header + data[8 + length :])
    convert(tiny, tmp_path / 'orbax')
    export(tmp_path / 'orbax', tmp_path / 'back')
    assert_same_folder(tmp_path / 'back', tiny)


def test_chunks_smaller_than_an_array_change_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_tree, 'CHUNK_BYTES', 1000)
    convert(tiny, tmp_path / 'orbax')
    assert len(list((tmp_path / 'orbax/params/embed_tokens').iterdir())) > 5
    export(tmp_path / 'orbax', tmp_path / 'back')
    assert_same_folder(tmp_path / 'back', tiny)


def test_chunks_split_evenly_where_that_costs_little():
    assert orbax_tree.chunk_rows((896, 3072, 1792), 1) == 2
    assert orbax_tree.chunk_rows((163840, 7168), 2) == 1024
    assert orbax_tree.chunk_rows((163847, 7168), 2) == 1170
    assert orbax_tree.chunk_rows((7,), 4) == 7
    assert orbax_tree.chunk_rows((), 4) == 1
    assert orbax_tree.row_ranges((7, 4 << 20), 1) == [(0, 4), (4, 7)]


@pytest.mark.parametrize('name', CONFIGS)
def test_plain_orbax_restores_the_layout(sources, tmp_path, name):
    conversion = convert(sources / name, tmp_path / 'orbax')
    wanted = flatten(model_leaves(conversion.model_config))
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = flatten(checkpointer.restore(tmp_path / 'orbax/params'))
    with ocp.StandardCheckpointer() as checkpointer:
        standard = flatten(checkpointer.restore(tmp_path / 'orbax/params'))
    assert restored.keys() == standard.keys() == wanted.keys()
    for path, leaf in wanted.items():
        assert (restored[path].shape, restored[path].dtype.name) == (leaf.shape, leaf.dtype), path
        assert restored[path].tobytes() == standard[path].tobytes()


def test_leaves_hold_the_values_of_the_release(sources, tmp_path):
    config = release.k3_mxfp4()
    values = {t.name: release.random_values(t, 0) for t in release.release_tensors(config)}
    convert(sources / 'k3_mxfp4', tmp_path / 'orbax')
    params = load_params(tmp_path / 'orbax')
    layer, prefix = params['layers_4'], 'language_model.model.layers.4.'
    attn = layer['self_attn']
    np.testing.assert_array_equal(attn['A_log'], values[f'{prefix}self_attn.A_log'][:3])
    conv = values[f'{prefix}self_attn.q_conv1d.weight']
    np.testing.assert_array_equal(attn['q_conv1d'], conv[:, 0])
    res = values[f'{prefix}mlp_res_proj.weight']
    np.testing.assert_array_equal(layer['mlp_res_proj'], res[0])
    for e in range(8):
        name = f'{prefix}block_sparse_moe.experts.{e}.w2.weight_packed'
        packed = layer['block_sparse_moe']['experts']['w2_packed'][e]
        np.testing.assert_array_equal(packed, values[name])


def test_load_params_casts_weights_but_not_packed_bytes(sources, tmp_path):
    convert(sources / 'k3_mxfp4', tmp_path / 'orbax')
    params = load_params(tmp_path / 'orbax', dtype=np.float32)
    assert params['norm'].dtype == np.float32
    assert params['layers_1']['block_sparse_moe']['experts']['w1_packed'].dtype == np.uint8


def test_vision_that_the_config_says_nothing_of_is_carried(sources, tmp_path):
    ignored = shutil.ignore_patterns('.cache')
    shutil.copytree(sources / 'k3_bf16', tmp_path / 'source', ignore=ignored)
    edit_json(tmp_path / 'source/config.json', lambda config: config.pop('vision_config'))
    conversion = convert(tmp_path / 'source', tmp_path / 'orbax')
    assert conversion.model_config.vision is None and len(conversion.carried) == 18
    with ocp.PyTreeCheckpointer() as checkpointer:
        carried = checkpointer.restore(conversion.carried_path)
    assert set(carried) == set(conversion.carried)
    assert carried['vision_tower.patch_embed.pos_emb.weight'].shape == (8, 8, 32)
    export(tmp_path / 'orbax', tmp_path / 'back')
    assert_same_folder(tmp_path / 'back', tmp_path / 'source')


def _expanded(config):
    """Values of the release with its experts expanded by the definition of MXFP4."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.concatenate([magnitudes, -magnitudes])
    values = {t.name: release.random_values(t, 0) for t in release.release_tensors(config)}
    for name in [n for n in values if n.endswith('_packed')]:
        packed, stem = values.pop(name), name.removesuffix('_packed')
        scale = values.pop(f'{stem}_scale').astype(np.float64)
        weights = np.stack([codes[packed & 15], codes[packed >> 4]], -1).reshape(len(packed), -1)
        weights *= np.exp2(scale - 127).repeat(32, axis=1)
        values[stem] = weights.astype(ml_dtypes.bfloat16)
    return values


def test_expanded_experts_export_as_a_bf16_release(sources, tmp_path, monkeypatch):
    convert(sources / 'k3_mxfp4', tmp_path / 'orbax', 'bf16')
    export(tmp_path / 'orbax', tmp_path / 'back')
    assert json.loads((tmp_path / 'back/config.json').read_text()) == release.k3_bf16()
    values = _expanded(release.k3_mxfp4())
    wanted = release.write_release(
        tmp_path / 'wanted', release.k3_bf16(), num_shards=1, values=lambda t, seed: values[t.name]
    )
    convert(tmp_path / 'back', tmp_path / 'again')
    convert(wanted, tmp_path / 'wanted_orbax')
    got, expected = load_params(tmp_path / 'again'), load_params(tmp_path / 'wanted_orbax')
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes(), got, expected)
    )
    index = json.loads((tmp_path / 'back' / INDEX).read_text())
    shards = [tmp_path / 'back' / name for name in SHARDS]
    header_bytes = sum(8 + int.from_bytes(p.read_bytes()[:8], 'little') for p in shards)
    payload = sum(p.stat().st_size for p in shards) - header_bytes
    assert index['metadata']['total_size'] == payload
    assert not any('_packed' in name or '_scale' in name for name in index['weight_map'])


@pytest.mark.parametrize('name', CONFIGS)
def test_tree_of_parameters_exports_as_one_shard_a_layer(sources, tmp_path, name):
    conversion = convert(sources / name, tmp_path / 'orbax')
    params = jax.tree.map(jax.numpy.asarray, load_params(tmp_path / 'orbax'))
    export_params(params, conversion.model_config, tmp_path / 'out', release=tmp_path / 'orbax')
    layers = conversion.model_config.num_hidden_layers
    names = [f'model-{n:05d}-of-{layers + 1:06d}.safetensors' for n in range(1, layers + 2)]
    assert sorted(p.name for p in (tmp_path / 'out').glob('*.safetensors')) == names
    assert (tmp_path / 'out/tiktoken.model').read_bytes() == bytes(range(256))
    weight_map = json.loads((tmp_path / 'out' / INDEX).read_text())['weight_map']
    prefix = '' if name == 'kimi_linear' else 'language_model.'
    assert weight_map[f'{prefix}model.layers.2.input_layernorm.weight'] == names[2]
    assert weight_map[f'{prefix}lm_head.weight'] == names[-1]
    again = convert(tmp_path / 'out', tmp_path / 'again')
    for field in ('num_hidden_layers', 'experts_format', 'linear_attn_config', 'eos_token_id'):
        assert getattr(again.model_config, field) == getattr(conversion.model_config, field)
    assert arrays_of(tmp_path / 'again/params') == arrays_of(tmp_path / 'orbax/params')


def test_float32_masters_are_rounded_to_the_released_dtypes(sources, tmp_path):
    conversion = convert(sources / 'kimi_linear', tmp_path / 'orbax')
    params = load_params(tmp_path / 'orbax', dtype=np.float32)
    export_params(params, conversion.model_config, tmp_path / 'out')
    convert(tmp_path / 'out', tmp_path / 'again')
    assert arrays_of(tmp_path / 'again/params') == arrays_of(tmp_path / 'orbax/params')


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda p: p.pop('norm'), 'norm: missing'),
        (lambda p: p.update(norms=p['norm']), 'norms: the model .* has no such leaf'),
        (lambda p: p.update(norm=p['norm'][:3]), r'norm: got \(3,\), wanted \(64,\)'),
        (lambda p: p.update(norm=p['norm'].astype(np.uint8)), 'norm: got uint8, wanted bfloat16'),
    ],
)
def test_tree_that_does_not_fit_the_model_is_refused(sources, tmp_path, change, message):
    conversion = convert(sources / 'kimi_linear', tmp_path / 'orbax')
    params = load_params(tmp_path / 'orbax')
    change(params)
    with pytest.raises(ConversionError, match=message):
        export_params(params, conversion.model_config, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()
