"""The safetensors format: whole files read back; damaged ones are refused by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from etils import epath

from k3jax.convert.files import ConversionError
from k3jax.convert.safetensors_io import (
    DTYPES,
    TensorInfo,
    build_header,
    library_order,
    open_shard,
    parse_header,
    read_raw_header,
    read_rows,
    write_shard,
)
from tests import release

TENSORS = [
    release.Tensor('b.weight', (6, 4), release.BF16),
    release.Tensor('a.bias', (5,), release.F32, 'bias'),
    release.Tensor('c.weight', (2, 3), release.BF16),
]


@pytest.fixture
def shard_path(tmp_path):
    path = tmp_path / 'x.safetensors'
    release.write_shard(path, TENSORS, lambda t: release.random_values(t, 0))
    return epath.Path(path)


def _file(path, fields, data=b''):
    header = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(len(header).to_bytes(8, 'little') + header + data)
    return epath.Path(path)


def _entry(start, end, shape=(2,), dtype='F32'):
    return {'dtype': dtype, 'shape': list(shape), 'data_offsets': [start, end]}


def test_every_tensor_reads_back_whole_and_by_rows(shard_path):
    shard = open_shard(shard_path)
    for t in TENSORS:
        wanted = release.random_values(t, 0)
        assert read_rows(shard, t.name).tobytes() == wanted.tobytes()
        assert read_rows(shard, t.name, 1, 2).tobytes() == wanted[1:2].tobytes()


def test_header_bytes_equal_those_of_another_writer(shard_path):
    infos = [TensorInfo(t.name, t.dtype, t.shape) for t in TENSORS]
    raw = build_header(library_order(infos), {'format': 'pt'})
    assert raw == read_raw_header(open_shard(shard_path))


def test_file_equals_that_of_the_safetensors_library(tmp_path):
    library = pytest.importorskip('safetensors.numpy')
    arrays = {
        'w': np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        'z': np.arange(4, dtype=np.float32),
        'ä': np.arange(3, dtype=np.uint8),
        'n': np.arange(3, dtype=np.int64),
        's': np.array(1.5, np.float32),
        'h': np.ones((2, 0), np.float16),
        'm': np.array([True, False]),
    }
    library.save_file(arrays, tmp_path / 'theirs', metadata={'format': 'pt'})
    names = {dtype: name for name, dtype in DTYPES.items()}
    infos = library_order(TensorInfo(n, names[a.dtype], a.shape) for n, a in arrays.items())
    raw = build_header(infos, {'format': 'pt'})
    write_shard(epath.Path(tmp_path / 'ours'), raw, (arrays[info.name] for info in infos))
    assert (tmp_path / 'ours').read_bytes() == (tmp_path / 'theirs').read_bytes()
    shard = open_shard(epath.Path(tmp_path / 'theirs'))
    for name, array in arrays.items():
        got = read_rows(shard, name)
        assert got.shape == array.shape and got.tobytes() == array.tobytes()


@pytest.mark.parametrize('keep', [0, 4, 8, 100, -1])
def test_truncated_file_is_refused(shard_path, keep):
    shard_path.write_bytes(shard_path.read_bytes()[:keep])
    with pytest.raises(ConversionError, match='x.safetensors.*truncated'):
        open_shard(shard_path)


def test_file_longer_than_its_header_says_is_refused(shard_path):
    shard_path.write_bytes(shard_path.read_bytes() + b'x')
    with pytest.raises(ConversionError, match='longer than its header says'):
        open_shard(shard_path)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'t': _entry(0, 8), 'u': _entry(4, 12)}, 'u: .*overlap.* t'),
        ({'t': _entry(0, 8), 'u': _entry(12, 20)}, 'u: .*gap.* t'),
        ({'t': _entry(0, 4)}, 't: F32 .*takes 8 bytes'),
        ({'t': _entry(8, 0)}, 't: .*start before end'),
        ({'t': _entry(0, 8, (-2,))}, 't: .*whole numbers'),
        ({'t': _entry(0, 8, dtype='F128')}, "t: got dtype 'F128'"),
        ({'t': {'dtype': 'F32'}}, 't: got .*wanted dtype, shape'),
        (b'{"t": 1', 'not valid JSON'),
        (b'[]', 'got a JSON list'),
        (b'{"t": 1, "t": 2}', "'t' is given twice"),
    ],
)
def test_damaged_header_is_refused_by_name(tmp_path, fields, message):
    path = _file(tmp_path / 'x.safetensors', fields, bytes(20))
    with pytest.raises(ConversionError, match=f'x.safetensors.*{message}'):
        open_shard(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ConversionError, match='gone.safetensors: no such file'):
        open_shard(epath.Path(tmp_path / 'gone.safetensors'))


def test_failed_write_leaves_no_file(tmp_path):
    path = epath.Path(tmp_path / 'out.safetensors')
    raw = build_header([TensorInfo('t', 'F32', (4,))], None)

    def blocks():
        yield np.zeros(2, np.float32)
        raise OSError('no space left')

    with pytest.raises(OSError, match='no space left'):
        write_shard(path, raw, blocks())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('count', [3, 5])
def test_too_few_or_too_many_bytes_are_an_error(tmp_path, count):
    raw = build_header([TensorInfo('t', 'F32', (4,))], None)
    with pytest.raises(ConversionError, match='wanted 16'):
        write_shard(epath.Path(tmp_path / 'o'), raw, [np.zeros(count, np.float32)])
    assert not list(tmp_path.iterdir())


def test_empty_header_holds_no_tensors():
    header = parse_header(b'{}', 'x')
    assert header.tensors == {} and header.data_bytes == 0
