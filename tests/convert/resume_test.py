"""Interruption at any time: nothing looks whole, and the next run goes on."""

import filecmp
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from k3jax import files
from k3jax.convert import orbax_tree, to_orbax, to_safetensors
from k3jax.convert.converted import read_conversion
from k3jax.convert.files import ConversionError
from k3jax.convert.to_orbax import convert
from k3jax.convert.to_safetensors import export
from tests import release
from tests.convert.folders import (
    INDEX,
    assert_not_whole,
    assert_same_folder,
)


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
        assert_not_whole(target)
    convert(tiny, target)
    export(target, tmp_path / 'back')
    assert_same_folder(tmp_path / 'back', tiny)
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
    assert_not_whole(target)
    convert(tiny, target)
    export(target, tmp_path / 'back')
    assert_same_folder(tmp_path / 'back', tiny)
    assert not list(target.rglob('*.__lock')) and not list(target.rglob('*.partial'))


def test_full_disk_leaves_nothing_that_looks_whole(tiny, tmp_path, monkeypatch):
    error = ConversionError('params/x: could not be written: No space left on device')
    with monkeypatch.context() as patch:
        _interrupt(patch, to_orbax, '_write_chunk', 30, error)
        with pytest.raises(ConversionError, match='No space left'):
            convert(tiny, tmp_path / 'orbax')
    assert_not_whole(tmp_path / 'orbax')


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
    assert_same_folder(tmp_path / 'back', tiny)


def test_unfinished_export_of_something_else_is_refused(tiny, sources, tmp_path, monkeypatch):
    convert(tiny, tmp_path / 'orbax')
    convert(sources / 'kimi_linear', tmp_path / 'other')
    with monkeypatch.context() as patch:
        _interrupt(patch, to_safetensors, 'write_shard', 1)
        with pytest.raises(Interrupted):
            export(tmp_path / 'orbax', tmp_path / 'back')
    with pytest.raises(ConversionError, match='unfinished export of something else'):
        export(tmp_path / 'other', tmp_path / 'back')


def test_whole_files_replace_and_vanish_as_one(tmp_path):
    path = files.epath.Path(tmp_path / 'x')
    files.write_whole(path, b'old')
    with pytest.raises(Interrupted), files.open_whole(path) as file:
        file.write(b'new')
        raise Interrupted
    assert path.read_bytes() == b'old'
    assert filecmp.os.listdir(tmp_path) == ['x']
