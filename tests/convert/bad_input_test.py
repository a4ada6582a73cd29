"""Bad input: one clear line, and nothing written that looks whole."""

import io
import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.convert.converted import load_params
from k3jax.convert.files import ConversionError
from k3jax.convert.progress import Progress
from k3jax.convert.to_orbax import convert
from k3jax.convert.to_safetensors import export
from tests import release
from tests.convert.folders import (
    INDEX,
    SHARDS,
    edit_json,
    files_of,
)


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
    edit_json(folder / INDEX, lambda index: index.update(weight_map=weight_map))


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
        lambda f: edit_json(f / INDEX, lambda i: i['weight_map'].popitem()),
        f'mm_projector.*: in {SHARDS[1]} but not in {INDEX}',
    ),
    'index names a tensor of no shard': (
        lambda f: edit_json(f / INDEX, lambda i: i['weight_map'].update(x=SHARDS[0])),
        f'x: the index says {SHARDS[0]}, which does not hold it',
    ),
    'index names the wrong shard': (
        lambda f: edit_json(
            f / INDEX,
            lambda i: i['weight_map'].update({'mm_projector.post_norm.weight': SHARDS[0]}),
        ),
        f'post_norm.weight: the index says {SHARDS[0]}, but it is in {SHARDS[1]}',
    ),
    'no weight map': (lambda f: (f / INDEX).write_text('{}'), 'got weight_map None'),
    'weight map with a list': (
        lambda f: edit_json(f / INDEX, lambda i: i['weight_map'].update(x=[SHARDS[0]])),
        f'{INDEX}: weight_map: x: got .*, wanted the file name of a shard',
    ),
    'MXFP4 tensors but a bf16 config': (
        lambda f: edit_json(
            f / 'config.json', lambda c: c['text_config'].pop('quantization_config')
        ),
        'text_config.quantization_config: got nothing, wanted .*are stored packed',
    ),
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
        lambda f: edit_json(f / 'config.json', lambda c: c['text_config'].update(vocab_size=65)),
        r'embed_tokens.weight: got BF16 \[64, 64\], wanted BF16 \[65, 64\]',
    ),
    'config of another depth': (
        lambda f: edit_json(
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


def test_bf16_experts_under_a_quantized_config_are_refused(tmp_path):
    source = release.write_release(tmp_path / 'source', release.k3_bf16())
    quantization = release.mxfp4_quantization()
    edit_json(
        source / 'config.json',
        lambda c: c['text_config'].update(quantization_config=quantization),
    )
    with pytest.raises(ConfigError, match="quantization_config: got 'mxfp4.*are stored in bf16"):
        convert(source, tmp_path / 'orbax')
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
    assert files_of(tmp_path / 'mine') == {'thesis.tex': b'x'}


@pytest.mark.parametrize('target', ['.', 'below'])
def test_target_within_the_source_is_refused(tiny, target):
    before = files_of(tiny)
    with pytest.raises(ConversionError, match='within the source'):
        convert(tiny, tiny / target)
    assert files_of(tiny) == before


def test_complete_conversion_is_kept_and_not_overwritten_by_another(tiny, sources, tmp_path):
    convert(tiny, tmp_path / 'orbax')
    before = files_of(tmp_path / 'orbax')
    convert(tiny, tmp_path / 'orbax')
    for source, experts in ((tiny, 'bf16'), (sources / 'k3_mxfp4', None)):
        with pytest.raises(ConversionError, match='already holds another conversion'):
            convert(source, tmp_path / 'orbax', experts)
    assert files_of(tmp_path / 'orbax') == before


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda p: shutil.rmtree(p / 'params/norm'), 'norm'),
        (lambda p: shutil.rmtree(p), 'no conversion.json, so not a converted checkpoint'),
        (
            lambda p: edit_json(p / 'conversion.json', lambda c: c.update(version=99)),
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


@pytest.mark.parametrize('leaf', ['norm', 'layers_1.block_sparse_moe.experts.w1_packed'])
def test_lost_chunk_is_an_error_and_not_zeros(tiny, tmp_path, leaf):
    convert(tiny, tmp_path / 'orbax')
    chunk = next(p for p in (tmp_path / 'orbax/params' / leaf).iterdir() if p.name[0] == '0')
    chunk.unlink()
    path = leaf.replace('.', '/')
    with pytest.raises(ConversionError, match=f'params: {path}: {chunk.name} is missing'):
        load_params(tmp_path / 'orbax')
    with pytest.raises(ConversionError, match=f'params: {path}: could not be read.*is missing'):
        export(tmp_path / 'orbax', tmp_path / 'back')
    assert not (tmp_path / 'back/config.json').exists()


def test_lost_chunk_of_a_carried_tensor_is_an_error(tiny, tmp_path):
    config = json.loads((tiny / 'config.json').read_text())
    del config['vision_config']  # without it nobody knows what the tower's tensors are
    (tiny / 'config.json').write_text(json.dumps(config))
    convert(tiny, tmp_path / 'orbax')
    folder = tmp_path / 'orbax/carried/mm_projector.post_norm.weight'
    next(p for p in folder.iterdir() if p.name == '0').unlink()
    with pytest.raises(ConversionError, match='mm_projector.post_norm.weight: could not be read'):
        export(tmp_path / 'orbax', tmp_path / 'back')
    assert not (tmp_path / 'back/config.json').exists()


@pytest.mark.parametrize('experts', [None, 'bf16'])
def test_complete_export_is_kept_and_not_overwritten_by_another(tiny, tmp_path, experts):
    convert(tiny, tmp_path / 'orbax', experts)
    export(tmp_path / 'orbax', tmp_path / 'back')
    before = files_of(tmp_path / 'back')
    said = io.StringIO()
    export(tmp_path / 'orbax', tmp_path / 'back', Progress('export', stream=said))
    assert said.getvalue() == f'export: {tmp_path}/back is already exported\n'
    config = json.loads((tiny / 'config.json').read_text())
    convert(release.write_release(tmp_path / 'tuned', config, seed=1), tmp_path / 'other', experts)
    with pytest.raises(ConversionError, match='not empty, and not an export of this source'):
        export(tmp_path / 'other', tmp_path / 'back')
    assert files_of(tmp_path / 'back') == before


@pytest.mark.parametrize(
    'damage',
    [
        lambda f: os.truncate(f / SHARDS[1], 5000),
        lambda f: (f / SHARDS[0]).unlink(),
        lambda f: (f / INDEX).write_text('{}'),
    ],
)
def test_damaged_export_does_not_pass_for_a_complete_one(tiny, tmp_path, damage):
    convert(tiny, tmp_path / 'orbax')
    export(tmp_path / 'orbax', tmp_path / 'back')
    damage(tmp_path / 'back')
    with pytest.raises(ConversionError, match='back: not empty'):
        export(tmp_path / 'orbax', tmp_path / 'back')
