"""What the converter's tests share: release folders' names, and comparing folders."""

import json
import pathlib

import orbax.checkpoint as ocp
import pytest

from k3jax.convert.converted import read_conversion
from k3jax.convert.files import ConversionError
from tests import release

CONFIGS = {
    'k3_mxfp4': release.k3_mxfp4,
    'k3_bf16': release.k3_bf16,
    'kimi_linear': release.kimi_linear,
    'k25_vision': release.k25_vision,
}
INDEX = 'model.safetensors.index.json'
SHARDS = ('model-00001-of-000002.safetensors', 'model-00002-of-000002.safetensors')


def files_of(folder):
    folder = pathlib.Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def assert_same_folder(got, wanted):
    got, wanted = files_of(got), files_of(wanted)
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if got[name] != wanted[name]] == []


def arrays_of(folder):
    """The arrays' files of an Orbax checkpoint, without its metadata, which hold times."""
    return {name: data for name, data in files_of(folder).items() if '/' in name}


def assert_not_whole(target):
    """Neither we nor plain Orbax take the folder for a checkpoint."""
    with pytest.raises(ConversionError):
        read_conversion(target)
    with ocp.PyTreeCheckpointer() as checkpointer, pytest.raises((ValueError, FileNotFoundError)):
        checkpointer.restore(pathlib.Path(target) / 'params')


def edit_json(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
