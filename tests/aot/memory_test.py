"""HBM by what the compiler says, and the buffers that fill it."""

import types

import jax
import jax.numpy as jnp
import pytest

from k3jax.aot.chips import CHIPS, chip_of
from k3jax.aot.compile_job import compile_lowered
from k3jax.aot.compiler import has_libtpu, lower_for
from k3jax.aot.memory import (
    Buffer,
    is_out_of_memory,
    largest_buffers,
    memory_of,
    memory_of_failure,
)

needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup')

ASSIGNMENT = """BufferAssignment:
allocation 0: size 999999, color 1, page 0, preallocated-temp:
 value: <1 in_vmem @1> (size=999999,offset=0): f32[9]{0:S(1)}
allocation 1: size 4000, page 0, parameter 0, shape |f32[1000]| at ShapeIndex {}, maybe-live-out:
 value: <2 x.1 @0> (size=4000,offset=0): f32[1000]{0:T(1024)}
 value: <3 updated @0> (size=4000,offset=0): f32[1000]{0:T(1024)}
allocation 2: size 8, page 0, thread-local:
 value: <4 inner @0> (size=8,offset=0): f32[2]{0}
allocation 3: size 500, page 0, maybe-live-out:
 value: <5 y @0> (size=500,offset=0): f32[125]{0}
allocation 4: size 3000, page 0, preallocated-temp:
 value: <6 early @0> (size=2000,offset=0): bf16[1000]{0}
 value: <7 a{0} @0> (size=1000,offset=0): bf16[500]{0:T(8,128)(2,1)}
 value: <8 a{1} @0> (size=1000,offset=1000): bf16[500]{0:T(8,128)(2,1)}
 value: <9 same_place @0> (size=1000,offset=1000): bf16[500]{0}
 value: <10 b @0> (size=1000,offset=2000): f32[250]{0}
"""
RANGES = """HloLiveRange (max 9):
  BufferLiveRange:
    x.1{}:0-9
    early{}:1-2
    a{0}:3-6
    a{1}:3-6
    same_place{}:5-7
    b{}:4-6
"""


@pytest.fixture
def dump(tmp_path):
    (tmp_path / 'm.after_optimizations-buffer-assignment.txt').write_text(ASSIGNMENT)
    (tmp_path / 'm.after_optimizations-buffer-assignment-values.txt').write_text('')
    (tmp_path / 'm.after_optimizations-live-range.txt').write_text(RANGES)
    return tmp_path


def test_the_largest_buffers_are_those_in_use_together(dump):
    names = {'x.1': 'params', 'a': 'jit(f)/mlp/dot', 'b': 'jit(f)/loss'}
    assert largest_buffers(dump, names, 4) == [
        Buffer(4000, 1, 'f32[1000]', 'argument', 'params'),
        Buffer(2000, 2, 'bf16[500]', 'temporary', 'jit(f)/mlp/dot'),
        Buffer(1000, 1, 'f32[250]', 'temporary', 'jit(f)/loss'),
        Buffer(500, 1, 'f32[125]', 'output', 'y'),
    ]
    assert largest_buffers(dump / 'nothing', {}, 4) == []


def test_a_failure_says_what_was_needed(dump):
    error = RuntimeError(
        'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory '
        'required for HLO temporaries (149.06G) exceeds available HBM (95.73G). HLO module: f.'
    )
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError('CompileTimeScopedVmemOom: ran out of memory in vmem'))
    memory = memory_of_failure(error, dump, CHIPS['v5p'])
    assert memory.required == int(149.06 * 2**30) and memory.headroom < 0
    assert (memory.argument, memory.output, memory.temp) == (4000, 500, 3000)
    assert memory_of_failure(error, dump / 'nothing', CHIPS['v5p']).argument is None
    assert memory_of_failure(RuntimeError('?'), dump, CHIPS['v5p']).required == 7500


def scores(size):
    """Attention weights of `size` tokens, all at once."""

    def run(x):
        with jax.named_scope('mla_mixer'):
            weights = jax.nn.softmax((x @ x.T).astype(jnp.float32), axis=-1)
        return weights.T @ x.astype(jnp.float32)

    return lower_for('v5p:2x2x1', run, (jax.ShapeDtypeStruct((size, 512), 'bfloat16'),))


@pytest.mark.aot
@needs_libtpu
def test_out_of_memory_is_a_table_of_the_largest_buffers():
    found = compile_lowered(scores(400_000), CHIPS['v5p'])
    assert found.text is None and found.error.startswith('out of memory: needs')
    assert found.memory.headroom < 0
    largest = found.buffers[0]
    assert largest.shape == 'bf16[400000,400000]' and largest.kind == 'temporary'
    assert largest.bytes == 2 * 400_000**2 and 'mla_mixer' in largest.op_name


@pytest.mark.aot
@needs_libtpu
def test_memory_of_a_program_that_fits():
    found = compile_lowered(scores(8192), CHIPS['v5p'])
    memory = found.memory
    assert memory.argument == 8192 * 512 * 2
    assert memory.output == 8192 * 512 * 4
    assert memory.peak <= memory.required < memory.limit
    assert memory.headroom == memory.limit - memory.required
    assert sum(buffer.bytes for buffer in found.buffers) <= memory.peak


@pytest.mark.parametrize(('host', 'peak'), [(0, 50), (7, None)])
def test_a_peak_is_not_reported_where_the_compiler_counts_host_memory_in_it(host, peak):
    sizes = dict.fromkeys(('argument', 'output', 'alias', 'temp', 'generated_code'), 10)
    stats = {f'{name}_size_in_bytes': size for name, size in sizes.items()}
    stats |= {'host_argument_size_in_bytes': host, 'host_temp_size_in_bytes': 0}
    stats = types.SimpleNamespace(**stats, peak_memory_in_bytes=50)
    compiled = types.SimpleNamespace(memory_analysis=lambda: stats)
    memory = memory_of(compiled, chip_of('v5p:2x2x1'))
    assert (memory.peak, memory.host, memory.required) == (peak, host, 30)
