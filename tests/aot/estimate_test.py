"""Seconds from work: each part on its own, and the MFU."""

import dataclasses
import json

import pytest

from k3jax.aot.chips import Chip
from k3jax.aot.compile_job import Compiled
from k3jax.aot.estimate import (
    Rates,
    Seconds,
    direction_of,
    estimate,
    mfu,
    read_kernel_seconds,
    seconds_of,
)
from k3jax.aot.memory import Memory
from k3jax.aot.program import KERNEL_OP, OP, Op, Program
from k3jax.aot.report import make_report, share_of_step, table
from k3jax.model.scopes import scope_of

CHIP = Chip(flops=1000, hbm_bandwidth=100, clock=50, cores=1, hbm_bytes=2**30, vmem_bytes=1)
RATES = Rates(
    chip=CHIP,
    ici_bandwidth=10,
    matmul_efficiency=0.5,
    kernel_efficiency={'known': 0.25},
    other_kernels=0.2,
)


def op(kind=OP, name='op', op_name='', times=1, **work):
    work.setdefault('mxu_flops', work.get('flops', 0.0))
    return Op(name, kind, op_name, times, **work)


def test_an_operation_takes_what_limits_it_and_is_booked_there():
    assert seconds_of(op(flops=2000, hbm_bytes=399), RATES) == Seconds(compute=4)
    assert seconds_of(op(flops=2000, hbm_bytes=500), RATES) == Seconds(memory=5)
    assert seconds_of(op(flops=10, mxu_flops=6000), RATES) == Seconds(compute=12)


def test_a_collective_takes_its_bytes_between_chips():
    assert seconds_of(op('all-gather', sent_bytes=70), RATES) == Seconds(communication=7)


def test_a_kernel_takes_its_known_time_or_its_roofline_over_its_share():
    call = {'flops': 1000, 'hbm_bytes': 50}
    assert seconds_of(op(KERNEL_OP, 'known.3', **call), RATES) == Seconds(compute=4)
    assert seconds_of(op(KERNEL_OP, 'other.3', **call), RATES) == Seconds(compute=5)
    given = dataclasses.replace(RATES, kernel_seconds={'known': 0.5})
    assert seconds_of(op(KERNEL_OP, 'known', **call), given) == Seconds(compute=0.5)
    assert seconds_of(op(KERNEL_OP, 'known', hbm_bytes=50), given) == Seconds(memory=0.5)
    assert seconds_of(op(KERNEL_OP, 'kda_forward', hbm_bytes=20), RATES) == Seconds(compute=1)


PROGRAM = Program(
    ops=(
        op(flops=500, op_name='jit(loss)/kda_mixer/dot', times=3),
        op(flops=500, op_name='jit(loss)/transpose(jvp(x))/kda_mixer/dot'),
        op(hbm_bytes=100, op_name='jit(loss)/optimizer/add'),
        op('all-reduce', sent_bytes=20, group=4, op_name='jit(loss)/psum'),
        op(KERNEL_OP, 'mla_forward.1', flops=125, hbm_bytes=1, has_cost=False, times=2),
    ),
    loops=(),
    conditionals=1,
)


def test_a_step_is_the_sum_of_its_parts_without_overlap():
    found = estimate(PROGRAM, RATES)
    assert found.total == Seconds(compute=4 + 2 * 0.125 / 0.2, memory=1, communication=2)
    assert found.total.step == sum(found.total)
    assert found.by_scope[('kda_mixer', 'forward')] == Seconds(compute=3)
    assert found.by_scope[('kda_mixer', 'backward')] == Seconds(compute=1)
    assert found.by_scope[('optimizer', 'forward')] == Seconds(memory=1)
    assert found.by_scope[('other', 'forward')].communication == 2


def test_mfu_is_model_flops_over_what_all_chips_could_do():
    assert mfu(1e6, step_seconds=10, num_chips=4, peak_flops=50e3) == 0.5
    # 2.4e18 FLOPs in 2.5 s on 4,096 chips of v5p.
    assert mfu(2.4e18, 2.5, 4096, 459e12) == pytest.approx(0.5106, rel=1e-3)


def test_the_shares_of_a_step_add_up():
    shares = share_of_step(2000, Seconds(compute=4, memory=1, communication=3), 1, 1000)
    assert shares == {'model': 0.25, 'other_compute': 0.25, 'memory': 0.125, 'communication': 0.375}
    assert sum(shares.values()) == 1
    # Decoding: HBM limits, and the model's few FLOPs are done meanwhile.
    shares = share_of_step(1000, Seconds(memory=4), 1, 1000)
    assert shares == {'model': 0.25, 'other_compute': 0, 'memory': 0.75, 'communication': 0}


@pytest.mark.parametrize(
    'op_name, scope, direction',
    [
        ('jit(loss)/shard_map/psum', 'other', 'forward'),
        ('jit(f)/jvp(loss)/reduce_sum', 'loss', 'forward'),
        ('jit(f)/transpose(jvp())/while/body/kda_mixer/dot', 'kda_mixer', 'backward'),
        (
            'jit(f)/transpose(jvp())/checkpoint/rematted_computation/block_sparse_moe/mlp/dot',
            'block_sparse_moe',
            'recompute',
        ),
        ('jit(f)/layer_0/kda_mixer/gather_parameters/all_gather', 'gather_parameters', 'forward'),
        ('jit(f)/layer_0/jit(call)/attn_res_forward/pallas_call', 'attn_res', 'forward'),
        ('jit(f)/layer_0/mlp/dot', 'mlp', 'forward'),
        ('jit(f)/while/body/jit(dynamic_index_in_dim)/squeeze', 'layer_stack', 'forward'),
        ('', 'other', 'forward'),
    ],
)
def test_where_an_operation_comes_from(op_name, scope, direction):
    assert (scope_of(op_name), direction_of(op_name)) == (scope, direction)


def test_kernel_seconds_come_from_a_file_of_numbers(tmp_path):
    path = tmp_path / 'seconds.json'
    path.write_text(json.dumps({'mla_forward': 0.5}))
    assert read_kernel_seconds(str(path)) == {'mla_forward': 0.5}
    for text, message in (('[1]', 'an object of seconds'), ('{"a": 0}', 'above 0'), ('{', 'JSON')):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_kernel_seconds(str(path))


HLO = """ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4] parameter(0)
  %k = f32[4,4] custom-call(%x), custom_call_target="tpu_custom_call"
  %d = f32[4,4] dot(%k, %k), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %g = f32[4,4] all-reduce(%d), replica_groups={{0,1}}, to_apply=%add
}
"""


def report(text=HLO, error=None):
    memory = Memory(limit=2**30, argument=2**29, temp=2**20, peak=2**29, required=2**29 + 2**20)
    compiled = Compiled(text, memory, [], 2.0, error)
    job = {'config': 'c.py', 'job': 'train', 'topology': 'v5p:2x2x1', 'mesh': {'data': 2}}
    return job | make_report(compiled, RATES, num_chips=2, model_flops=100.0, tokens=8)


def test_a_report_has_what_the_contract_names():
    found = report()
    assert found['estimate'] is True and found['error'] is None
    assert found['hbm']['headroom'] == 2**30 - 2**29 - 2**20
    assert found['flops'] == 128
    assert found['collectives'] == {'all-reduce': 64}
    assert found['kernels'][0]['name'] == 'k' and found['kernels'][0]['calls'] == 1
    assert found['step_seconds'] == sum(found['seconds'].values())
    assert found['mfu'] == 100 / (found['step_seconds'] * 2 * 1000)
    assert found['tokens_per_second'] == 8 / found['step_seconds']
    assert json.loads(json.dumps(found)) == found
    shown = table(found)
    assert 'estimate: ' in shown and 'An estimate, not a measurement' in shown
    assert 'Kernels without a CostEstimate, their FLOPs counted as 0: k.' in shown


def test_a_report_of_what_does_not_fit_has_no_times():
    found = report(None, 'out of memory: needs 2.00 GiB')
    assert 'step_seconds' not in found and found['hbm']['argument'] == 2**29
    assert 'out of memory: needs 2.00 GiB' in table(found)
