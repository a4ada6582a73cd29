"""Peak memory does not grow with the checkpoint: measured on one of more than 6 GiB."""

import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from k3jax.convert.binding import flatten
from k3jax.convert.converted import read_conversion
from k3jax.model.layout import model_leaves
from tests import release

GIB = 1 << 30

MEASURED = """
import sys
from k3jax.convert.progress import Progress
from k3jax.convert.to_orbax import convert
from k3jax.convert.to_safetensors import export
progress = Progress('', stream=sys.stderr)
if sys.argv[1] == 'export':
    export(sys.argv[2], sys.argv[3], progress)
else:
    convert(sys.argv[2], sys.argv[3], sys.argv[1], progress)
# Not getrusage: a new process begins with the peak of the one that started it.
status = open('/proc/self/status').read()
print(int(status.partition('VmHWM:')[2].split()[0]) * 1024)
"""


def large_config():
    """Released widths, three layers (KDA dense, KDA with experts, MLA with experts)."""
    config = release.k3_full()
    del config['vision_config']
    config['text_config'] |= {
        'num_hidden_layers': 3,
        'num_experts': 48,
        'vocab_size': 32768,
        'attn_res_block_size': 2,
    }
    config['text_config']['linear_attn_config'] |= {'kda_layers': [1, 2], 'full_attn_layers': [3]}
    return config


def repeated_values(tensor, seed):
    """Cheap values of any size: one random block, repeated; A_log padded with zeros."""
    dtype = release.NUMPY[tensor.dtype]
    if tensor.kind.startswith('A_log'):
        return release.random_values(tensor, seed)
    high = 120 if tensor.kind == 'scale' else 64
    block = np.random.default_rng(seed).integers(0, high, 1 << 16, np.uint8)
    return np.resize(block, tensor.nbytes).view(dtype).reshape(tensor.shape)


def _largest_array(config):
    leaves = flatten(model_leaves(config)).values()
    itemsize = {'uint8': 1, 'bfloat16': 2, 'float32': 4}
    return max(leaf.size * itemsize[leaf.dtype] for leaf in leaves)


def _peak(mode, source, target):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, '-c', MEASURED, mode, source, target],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    )
    assert done.returncode == 0, done.stderr
    print(mode, re.findall('.*done', done.stderr), f'{time.monotonic() - began:.0f} s in all')
    return int(done.stdout)


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp('large') / 'source'
    release.write_release(folder, large_config(), num_shards=4, values=repeated_values)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='reads Linux /proc')
@pytest.mark.parametrize('experts', ['mxfp4', 'bf16'])
def test_peak_memory_is_bounded(source, tmp_path, experts):
    target, back = tmp_path / 'orbax', tmp_path / 'back'
    try:
        size = sum(p.stat().st_size for p in source.iterdir())
        assert size >= 6 * GIB
        peak = _peak(experts, source, target)
        largest = _largest_array(read_conversion(target).model_config)
        bound = GIB + 3 * largest
        export_peak = _peak('export', target, back)
        print(
            f'experts {experts}: source {size / GIB:.2f} GiB, largest array {largest / GIB:.2f} '
            f'GiB, bound {bound / GIB:.2f} GiB, peak {peak / GIB:.2f} GiB, of the export '
            f'{export_peak / GIB:.2f} GiB'
        )
        assert max(peak, export_peak) <= bound
        if experts == 'mxfp4':
            assert all(_same(path, back / path.name) for path in source.iterdir())
    finally:
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(back, ignore_errors=True)


def _same(one, other, block=16 << 20):
    with one.open('rb') as a, other.open('rb') as b:
        while data := a.read(block):
            if data != b.read(block):
                return False
        return not b.read(1)
