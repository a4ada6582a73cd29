"""Conversion and export: identity byte for byte, refusal of bad input, resumption."""

import filecmp
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from k3jax.convert import files, orbax_tree, to_orbax, to_safetensors
from k3jax.convert.binding import flatten
from k3jax.convert.converted import load_params, read_conversion
from k3jax.convert.files import ConversionError
from k3jax.convert.to_orbax import convert
from k3jax.convert.to_safetensors import export, export_params
from k3jax.model.layout import model_leaves
from tests import release

CONFIGS = {
    'k3_mxfp4': release.k3_mxfp4,
    'k3_bf16': release.k3_bf16,
    'kimi_linear': release.kimi_linear,
}
INDEX = 'model.safetensors.index.json'
SHARDS = ('model-00001-of-000002.safetensors', 'model-00002-of-000002.safetensors')


@pytest.fixture(scope='session')
def sources(tmp_path_factory):
    """Release folders by name, with the small files a release has; not to be changed."""
    folder = tmp_path_factory.mktemp('releases')
    for name, config in CONFIGS.items():
        source = release.write_release(folder / name, config())
        (source / 'tiktoken.model').write_bytes(bytes(range(256)))
        (source / 'modeling_kimi.py').write_text('# remote code\n')
        (source / 'chat_template.jinja').write_text('{{ messages }}')
        (source / 'assets').mkdir()
        (source / 'assets' / 'logo.svg').write_text('<svg/>')
        (source / '.cache').mkdir()
        (source / '.cache' / 'lock').write_text('')
    return folder


@pytest.fixture
def tiny(tmp_path):
    """A two-layer MXFP4 release that a test may damage."""
    config = release.k3_mxfp4()
    config['text_config'] |= {'num_hidden_layers': 2, 'num_experts': 3, 'vocab_size': 64}
    config['text_config']['linear_attn_config'] |= {'kda_layers': [1], 'full_attn_layers': [2]}
    config['vision_config'] |= {'vt_num_hidden_layers': 1}
    return release.write_release(tmp_path / 'tiny', config)


def _files(folder):
    folder = pathlib.Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def _assert_same_folder(got, wanted):
    got, wanted = _files(got), _files(wanted)
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if got[name] != wanted[name]] == []


def _arrays(folder):
    """The arrays' files of an Orbax checkpoint, without its metadata, which hold times."""
    return {name: data for name, data in _files(folder).items() if '/' in name}


def _assert_not_whole(target):
    """Neither we nor plain Orbax take the folder for a checkpoint."""
    with pytest.raises(ConversionError):
        read_conversion(target)
    with ocp.PyTreeCheckpointer() as checkpointer, pytest.raises((ValueError, FileNotFoundError)):
        checkpointer.restore(pathlib.Path(target) / 'params')


@pytest.mark.parametrize('name', CONFIGS)
def test_convert_then_export_is_the_identity(sources, tmp_path, name):
    convert(sources / name, tmp_path / 'orbax')
    export(tmp_path / 'orbax', tmp_path / 'back')
    wanted = tmp_path / 'wanted'
    shutil.copytree(sources / name, wanted, ignore=shutil.ignore_patterns('.cache'))
    _assert_same_folder(tmp_path / 'back', wanted)


def test_single_file_without_index_travels_both_ways(tiny, tmp_path):
    config = json.loads((tiny / 'config.json').read_text())
    single = release.write_release(tmp_path / 'single', config, num_shards=1)
    (single / INDEX).unlink()
    (single / 'model-00001-of-000001.safetensors').rename(single / 'model.safetensors')
    convert(single, tmp_path / 'orbax')
    export(tmp_path / 'orbax', tmp_path / 'back')
    _assert_same_folder(tmp_path / 'back', single)


def test_header_of_another_order_survives(tiny, tmp_path):
    shard = tiny / SHARDS[0]
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], 'little')
    fields = json.loads(data[8 : 8 + length])
    header = json.dumps(dict(reversed(fields.items())), indent=1).encode() + b'   '
    shard.write_bytes(len(header).to_bytes(8, 'little') + header + data[8 + length :])
    convert(tiny, tmp_path / 'orbax')
    export(tmp_path / 'orbax', tmp_path / 'back')
    _assert_same_folder(tmp_path / 'back', tiny)


def test_chunks_smaller_than_an_array_change_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_tree, 'CHUNK_BYTES', 1000)
    convert(tiny, tmp_path / 'orbax')
    assert len(list((tmp_path / 'orbax/params/embed_tokens').iterdir())) > 5
    export(tmp_path / 'orbax', tmp_path / 'back')
    _assert_same_folder(tmp_path / 'back', tiny)


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


def test_carried_tensors_are_an_orbax_item(sources, tmp_path):
    conversion = convert(sources / 'k3_bf16', tmp_path / 'orbax')
    assert len(conversion.carried) == 18
    with ocp.PyTreeCheckpointer() as checkpointer:
        carried = checkpointer.restore(conversion.carried_path)
    assert set(carried) == set(conversion.carried)
    assert carried['vision_tower.patch_embed.pos_emb.weight'].shape == (8, 8, 32)


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
    assert _arrays(tmp_path / 'again/params') == _arrays(tmp_path / 'orbax/params')


def test_float32_masters_are_rounded_to_the_released_dtypes(sources, tmp_path):
    conversion = convert(sources / 'kimi_linear', tmp_path / 'orbax')
    params = load_params(tmp_path / 'orbax', dtype=np.float32)
    export_params(params, conversion.model_config, tmp_path / 'out')
    convert(tmp_path / 'out', tmp_path / 'again')
    assert _arrays(tmp_path / 'again/params') == _arrays(tmp_path / 'orbax/params')


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


def _edit_json(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def _rewrite(folder, edit):
    """Writes the release again with an edited set of tensors, index included."""
    config = json.loads((folder / 'config.json').read_text())
    tensors = {t.name: t for t in release.release_tensors(config)}
    values = {t.name: release.random_values(t, 0) for t in tensors.values()}
    edit(tensors, values)
    parts, weight_map = np.array_split(list(tensors), 2), {}
    for shard, names in zip(SHARDS, parts, strict=True):
        part = [tensors[name] for name in names]
        release.write_shard(folder / shard, part, lambda t: values[t.name])
        weight_map |= {t.name: shard for t in part}
    _edit_json(folder / INDEX, lambda index: index.update(weight_map=weight_map))


def _spoil_a_log(tensors, values):
    values['language_model.model.layers.0.self_attn.A_log'][3] = 1e-30


def _drop_scale(tensors, values):
    del tensors['language_model.model.layers.1.block_sparse_moe.experts.1.w1.weight_scale']


def _drop_codes(tensors, values):
    del tensors['language_model.model.layers.1.block_sparse_moe.experts.1.w1.weight_packed']


def _mix_experts(tensors, values):
    name = 'language_model.model.layers.1.block_sparse_moe.experts.1.w1.weight'
    tensors[name] = release.Tensor(name, (32, 32), release.BF16)
    values[name] = np.zeros((32, 32), ml_dtypes.bfloat16)


BAD_RELEASES = {
    'missing folder': (lambda f: shutil.rmtree(f), 'tiny: no such folder'),
    'missing config': (lambda f: (f / 'config.json').unlink(), 'config.json: no such file'),
    'damaged config': (lambda f: (f / 'config.json').write_text('{'), 'config.json: not valid'),
    'missing shard': (lambda f: (f / SHARDS[1]).unlink(), f'{SHARDS[1]}: no such file'),
    'truncated shard': (lambda f: os.truncate(f / SHARDS[1], 5000), f'{SHARDS[1]}: .*truncated'),
    'no weights': (
        lambda f: [p.unlink() for p in f.glob('model*')],
        'neither model.safetensors.index.json nor model.safetensors',
    ),
    'extra shard': (
        lambda f: shutil.copy(f / SHARDS[0], f / 'extra.safetensors'),
        'extra.safetensors: the index does not name this shard',
    ),
    'duplicate tensor': (
        lambda f: shutil.copy(f / SHARDS[0], f / SHARDS[1]),
        r': in both model-00001.* and model-00002.*, wanted in one shard',
    ),
    'tensor not in index': (
        lambda f: _edit_json(f / INDEX, lambda i: i['weight_map'].popitem()),
        f'mm_projector.*: in {SHARDS[1]} but not in {INDEX}',
    ),
    'index names a tensor of no shard': (
        lambda f: _edit_json(f / INDEX, lambda i: i['weight_map'].update(x=SHARDS[0])),
        f'x: the index says {SHARDS[0]}, which does not hold it',
    ),
    'index names the wrong shard': (
        lambda f: _edit_json(
            f / INDEX,
            lambda i: i['weight_map'].update({'mm_projector.post_norm.weight': SHARDS[0]}),
        ),
        f'post_norm.weight: the index says {SHARDS[0]}, but it is in {SHARDS[1]}',
    ),
    'no weight map': (lambda f: (f / INDEX).write_text('{}'), 'got weight_map None'),
    'non-zero A_log padding': (
        lambda f: _rewrite(f, _spoil_a_log),
        r'layers.0.self_attn.A_log: got .* at index 3, wanted 0',
    ),
    'codes without scale': (
        lambda f: _rewrite(f, _drop_scale),
        'experts.1.w1.weight_packed: an MXFP4 tensor without its scale',
    ),
    'scale without codes': (
        lambda f: _rewrite(f, _drop_codes),
        'experts.1.w1.weight_scale: an MXFP4 tensor without its packed codes',
    ),
    'experts of two forms': (
        lambda f: _rewrite(f, _mix_experts),
        'experts.1.w1.weight is bf16 but .*weight_packed is MXFP4',
    ),
    'another architecture': (
        lambda f: (f / 'config.json').write_text('{"model_type": "llama"}'),
        "model_type: got 'llama', wanted 'kimi_k3' or 'kimi_linear'",
    ),
    'config of another size': (
        lambda f: _edit_json(f / 'config.json', lambda c: c['text_config'].update(vocab_size=65)),
        r'embed_tokens.weight: got BF16 \[64, 64\], wanted BF16 \[65, 64\]',
    ),
    'config of another depth': (
        lambda f: _edit_json(
            f / 'config.json',
            lambda c: c['text_config'].update(
                num_hidden_layers=1,
                linear_attn_config=c['text_config']['linear_attn_config']
                | {'kda_layers': [1], 'full_attn_layers': []},
            ),
        ),
        r'unknown tensors, \d+ in all: language_model.model.layers.1.',
    ),
}


@pytest.mark.parametrize('case', BAD_RELEASES)
def test_bad_release_is_refused_and_leaves_nothing(tiny, tmp_path, case):
    damage, message = BAD_RELEASES[case]
    damage(tiny)
    with pytest.raises(ValueError, match=message) as error:
        convert(tiny, tmp_path / 'orbax')
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'orbax').exists()


def test_quantising_is_refused_with_what_to_do(sources, tmp_path):
    with pytest.raises(ConversionError, match='quantising is not part.*leave --experts out'):
        convert(sources / 'k3_bf16', tmp_path / 'orbax', 'mxfp4')
    assert not (tmp_path / 'orbax').exists()


def test_target_with_other_files_is_refused(tiny, tmp_path):
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis.tex').write_text('x')
    with pytest.raises(ConversionError, match='mine: not empty'):
        convert(tiny, tmp_path / 'mine')
    convert(tiny, tmp_path / 'orbax')
    with pytest.raises(ConversionError, match='mine: not empty'):
        export(tmp_path / 'orbax', tmp_path / 'mine')
    assert _files(tmp_path / 'mine') == {'thesis.tex': b'x'}


@pytest.mark.parametrize('target', ['.', 'below'])
def test_target_within_the_source_is_refused(tiny, target):
    before = _files(tiny)
    with pytest.raises(ConversionError, match='within the source'):
        convert(tiny, tiny / target)
    assert _files(tiny) == before


def test_complete_conversion_is_kept_and_not_overwritten_by_another(tiny, sources, tmp_path):
    convert(tiny, tmp_path / 'orbax')
    before = _files(tmp_path / 'orbax')
    convert(tiny, tmp_path / 'orbax')
    for source, experts in ((tiny, 'bf16'), (sources / 'k3_mxfp4', None)):
        with pytest.raises(ConversionError, match='already holds another conversion'):
            convert(source, tmp_path / 'orbax', experts)
    assert _files(tmp_path / 'orbax') == before


class Interrupted(Exception):
    pass


def _interrupt(monkeypatch, module, name, at_call, error=None):
    """Makes the `at_call`-th call of module.name fail after its work is half done or not begun."""
    original, calls = getattr(module, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) == at_call:
            raise error or Interrupted(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, failing)
    return calls


@pytest.mark.parametrize(
    ('module', 'name', 'at_call'),
    [
        (to_orbax, 'copy_whole', 2),
        (to_orbax, 'write_whole', 2),
        (to_orbax, '_write_chunk', 1),
        (to_orbax, '_write_chunk', 40),
        (orbax_tree, 'copy_whole', 1),
        (orbax_tree, 'copy_whole', 2),
        (to_orbax, 'write_json', 2),
    ],
)
def test_interrupted_conversion_goes_on(tiny, tmp_path, monkeypatch, module, name, at_call):
    target = tmp_path / 'orbax'
    with monkeypatch.context() as patch:
        _interrupt(patch, module, name, at_call)
        with pytest.raises(Interrupted):
            convert(tiny, target)
    with pytest.raises(ConversionError, match='not complete; run it again'):
        read_conversion(target)
    with pytest.raises(ConversionError, match='not complete'):
        export(target, tmp_path / 'never')
    if name != 'write_json':
        _assert_not_whole(target)
    convert(tiny, target)
    export(target, tmp_path / 'back')
    _assert_same_folder(tmp_path / 'back', tiny)
    assert not list(target.glob('*skeleton*')) and not (target / 'conversion.partial.json').exists()


def test_finished_chunks_are_not_written_again(tiny, tmp_path, monkeypatch):
    calls = _interrupt(monkeypatch, to_orbax, '_write_chunk', 40)
    with pytest.raises(Interrupted):
        convert(tiny, tmp_path / 'orbax')
    there = len(list((tmp_path / 'orbax').glob('*/*/.zarray')))
    calls.clear()
    calls += ['past the fault'] * 40
    convert(tiny, tmp_path / 'orbax')
    total = len(list((tmp_path / 'orbax').glob('*/*/.zarray')))
    assert there >= 39
    assert len(calls) - 40 <= total - 39


@pytest.mark.parametrize(('other', 'message'), [('source', '--source'), ('experts', '--experts')])
def test_half_done_conversion_of_another_kind_is_refused(
    tiny, sources, tmp_path, monkeypatch, other, message
):
    with monkeypatch.context() as patch:
        _interrupt(patch, to_orbax, '_write_chunk', 5)
        with pytest.raises(Interrupted):
            convert(tiny, tmp_path / 'orbax')
    source = sources / 'k3_mxfp4' if other == 'source' else tiny
    with pytest.raises(ConversionError, match=f'unfinished conversion with another {message}'):
        convert(source, tmp_path / 'orbax', 'bf16' if other == 'experts' else None)
    convert(tiny, tmp_path / 'orbax')


def test_weights_of_another_training_are_another_source(tiny, tmp_path, monkeypatch):
    config = json.loads((tiny / 'config.json').read_text())
    other = release.write_release(tmp_path / 'other', config, seed=1)
    with monkeypatch.context() as patch:
        _interrupt(patch, to_orbax, '_write_chunk', 5)
        with pytest.raises(Interrupted):
            convert(tiny, tmp_path / 'orbax')
    with pytest.raises(ConversionError, match='another --source'):
        convert(other, tmp_path / 'orbax')


KILLED = """
import os, signal, sys
from k3jax.convert import orbax_tree, to_orbax
module = {{'to_orbax': to_orbax, 'orbax_tree': orbax_tree}}['{module}']
original, calls = getattr(module, '{name}'), []
def killing(*args, **kwargs):
    calls.append(0)
    if len(calls) == {at_call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
setattr(module, '{name}', killing)
to_orbax.convert(*sys.argv[1:])
"""


@pytest.mark.parametrize(
    ('module', 'name', 'at_call'),
    [('to_orbax', '_write_chunk', 60), ('orbax_tree', 'copy_whole', 2)],
)
def test_killed_conversion_goes_on(tiny, tmp_path, module, name, at_call):
    target = tmp_path / 'orbax'
    code = KILLED.format(module=module, name=name, at_call=at_call)
    done = subprocess.run([sys.executable, '-c', code, tiny, target], check=False)
    assert done.returncode == -signal.SIGKILL
    _assert_not_whole(target)
    convert(tiny, target)
    export(target, tmp_path / 'back')
    _assert_same_folder(tmp_path / 'back', tiny)
    assert not list(target.rglob('*.__lock')) and not list(target.rglob('*.partial'))


def test_full_disk_leaves_nothing_that_looks_whole(tiny, tmp_path, monkeypatch):
    error = ConversionError('params/x: could not be written: No space left on device')
    with monkeypatch.context() as patch:
        _interrupt(patch, to_orbax, '_write_chunk', 30, error)
        with pytest.raises(ConversionError, match='No space left'):
            convert(tiny, tmp_path / 'orbax')
    _assert_not_whole(tmp_path / 'orbax')


def test_failed_chunk_is_named(tiny, tmp_path):
    class FullDisk:
        def __getitem__(self, rows):
            return self

        def write(self, rows):
            raise ValueError('RESOURCE_EXHAUSTED: No space left on device')

    array = to_orbax._Array(
        tmp_path / 'params', 'norm', (4,), np.dtype('f4'), lambda a, b: np.zeros(b - a)
    )
    with pytest.raises(ConversionError, match='params/norm: rows 0..4 could not .*No space left'):
        to_orbax._write_chunk(array, FullDisk(), 0, 4)


@pytest.mark.parametrize(('name', 'at_call'), [('write_shard', 2), ('write_whole', 1)])
def test_interrupted_export_has_no_config_and_goes_on(tiny, tmp_path, monkeypatch, name, at_call):
    convert(tiny, tmp_path / 'orbax')
    with monkeypatch.context() as patch:
        error = OSError('No space left on device')
        _interrupt(patch, to_safetensors, name, at_call, error)
        with pytest.raises((ConversionError, OSError), match='No space left'):
            export(tmp_path / 'orbax', tmp_path / 'back')
    assert not (tmp_path / 'back/config.json').exists()
    assert not (tmp_path / 'back' / INDEX).exists()
    calls = _interrupt(monkeypatch, to_safetensors, 'write_shard', 0)
    export(tmp_path / 'orbax', tmp_path / 'back')
    assert len(calls) <= 1 if name == 'write_shard' else not calls
    _assert_same_folder(tmp_path / 'back', tiny)


def test_unfinished_export_of_something_else_is_refused(tiny, sources, tmp_path, monkeypatch):
    convert(tiny, tmp_path / 'orbax')
    convert(sources / 'kimi_linear', tmp_path / 'other')
    with monkeypatch.context() as patch:
        _interrupt(patch, to_safetensors, 'write_shard', 1)
        with pytest.raises(Interrupted):
            export(tmp_path / 'orbax', tmp_path / 'back')
    with pytest.raises(ConversionError, match='unfinished export of something else'):
        export(tmp_path / 'other', tmp_path / 'back')


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda p: shutil.rmtree(p / 'params/norm'), 'norm'),
        (lambda p: shutil.rmtree(p), 'no conversion.json, so not a converted checkpoint'),
        (
            lambda p: _edit_json(p / 'conversion.json', lambda c: c.update(version=99)),
            'version 99, wanted',
        ),
    ],
)
def test_damaged_converted_folder_is_refused(tiny, tmp_path, damage, message):
    convert(tiny, tmp_path / 'orbax')
    damage(tmp_path / 'orbax')
    with pytest.raises(ConversionError, match=message):
        export(tmp_path / 'orbax', tmp_path / 'back')
    assert not (tmp_path / 'back/config.json').exists()


def test_whole_files_replace_and_vanish_as_one(tmp_path):
    path = files.epath.Path(tmp_path / 'x')
    files.write_whole(path, b'old')
    with pytest.raises(Interrupted), files.open_whole(path) as file:
        file.write(b'new')
        raise Interrupted
    assert path.read_bytes() == b'old'
    assert filecmp.os.listdir(tmp_path) == ['x']
