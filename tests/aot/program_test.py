"""What is read out of HLO text: work, loops, collectives and kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.aot.chips import CHIPS
from k3jax.aot.compile_job import compile_lowered
from k3jax.aot.compiler import has_libtpu, lower_for, mesh_of
from k3jax.aot.hlo import HOST, VMEM, HloError, arrays, parse
from k3jax.aot.program import KERNEL_OP, analyse, collective_bytes, kernel_name
from k3jax.aot.work import group_size, sent_bytes

needs_libtpu = pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup')


def entry(*lines, head=''):
    """A program whose ENTRY holds `lines`, the last of them its root."""
    body = '\n'.join(f'  {line}' for line in lines)
    return f'HloModule test\n\n{head}\nENTRY %main (x: f32[]) -> f32[] {{\n{body}\n}}\n'


def only_op(*lines, head='', num_devices=8):
    (op,) = analyse(entry(*lines, head=head), num_devices).ops
    return op


def test_shapes_know_their_bytes_and_where_they_are():
    (packed, scale), (host,) = (
        arrays('(s4[3,5]{1,0:T(8,128)S(1)}, f8e8m0fnu[7])'),
        arrays('bf16[2,3]{1,0:T(8,128)(2,1)S(5)}'),
    )
    assert (packed.bytes, packed.space) == (8, VMEM)
    assert (scale.bytes, host.bytes, host.space) == (7, 12, HOST)
    assert arrays('pred[]')[0].bytes == 1
    with pytest.raises(HloError, match="an array of 'q8'"):
        _ = arrays('q8[2]')[0].bytes


def test_quotes_comments_and_broken_lines_do_not_end_an_instruction():
    text = entry(
        '%a = f32[4]{0} parameter(0)',
        '%b = (f32[4]{0}, /*index=1*/f32[4]{0}) custom-call(%a, /*index=1*/%a), '
        'custom_call_target="x", backend_config="{(\\"',
        ' more text)"',
        'ROOT %c = f32[4]{0} get-tuple-element(%b), index=0, metadata={op_name="jit(f)/a{b/add"}',
    )
    instructions = parse(text).entry.instructions
    assert list(instructions) == ['a', 'b', 'c']
    assert instructions['b'].operands == ('a', 'a')
    assert instructions['c'].op_name == 'jit(f)/a{b/add'


@pytest.mark.parametrize(
    'text, message',
    [
        (
            entry('%a = f32[4] parameter(0)', 'nonsense here'),
            r"line 6: got 'nonsense here', wanted",
        ),
        (entry('%a = f32[4] parameter(0', 'ROOT %b = f32[4] negate(%a)'), r'line 5: got'),
        (
            'HloModule m\n\nENTRY %m (x: f32[]) -> f32[] {\n  %x = f32[] parameter(0)',
            'line 4: .*end',
        ),
        ('nothing', 'no ENTRY computation'),
        (
            entry('%a = f32[4] parameter(0)', 'ROOT %b = f32[4] dot(%a)'),
            r'instruction %b of main: got .*; its text is dot',
        ),
    ],
)
def test_text_that_is_no_program_is_refused_with_its_place(text, message):
    with pytest.raises(HloError, match=message):
        analyse(text, 1)


def test_products_count_two_operations_a_multiply_add():
    dot = only_op(
        '%a = bf16[3,5,7] parameter(0)',
        '%b = bf16[3,7,11] parameter(1)',
        'ROOT %c = bf16[3,5,11] dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0}, '
        'lhs_contracting_dims={2}, rhs_contracting_dims={1}',
    )
    assert dot.flops == dot.mxu_flops == 2 * 3 * 5 * 7 * 11
    assert dot.hbm_bytes == 2 * (3 * 5 * 7 + 3 * 7 * 11 + 3 * 5 * 11)


def test_a_batched_product_that_is_written_as_a_convolution_has_no_other_flops():
    # As libtpu writes einsum('bhtk,bhsk->bhts'): windows over b and h that meet one element each.
    op = only_op(
        '%a = bf16[2,8,512,128] parameter(0)',
        '%b = bf16[2,8,512,128] parameter(1)',
        'ROOT %c = bf16[2,8,512,512] convolution(%a, %b), window={size=2x8 stride=1x7 '
        'lhs_dilate=2x8}, dim_labels=01bf_01oi->01bf',
    )
    assert op.flops == 2 * 16 * 512 * 512 * 128


def test_a_convolution_counts_no_padding():
    op = only_op(
        '%a = f32[1,10,4] parameter(0)',
        '%b = f32[3,4,6] parameter(1)',
        'ROOT %c = f32[1,10,6] convolution(%a, %b), window={size=3 pad=1_1}, '
        'dim_labels=b0f_0io->b0f',
    )
    assert op.flops == 2 * (3 * 10 - 2) * 4 * 6


@pytest.mark.parametrize('precision, passes', [('highest', 6), ('high', 3), ('default', 1)])
def test_float32_products_take_several_passes_where_asked_to(precision, passes):
    op = only_op(
        '%a = f32[8,16] parameter(0)',
        '%b = f32[16,4] parameter(1)',
        'ROOT %c = f32[8,4] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, '
        f'operand_precision={{{precision},{precision}}}',
    )
    assert (op.flops, op.mxu_flops) == (1024, passes * 1024)


def test_what_is_kept_in_vmem_costs_no_bytes_of_hbm():
    op = only_op('%a = f32[64]{0:S(1)} parameter(0)', 'ROOT %b = f32[64]{0} negate(%a)')
    assert op.hbm_bytes == 256


SLICE = """%fused (p: f32[100,8], i: s32[]) -> f32[8] {
  %p = f32[100,8] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = f32[1,8] dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,8}
  ROOT %r = f32[8] bitcast(%s)
}
"""
UPDATE = """%fused (p: f32[100,8], i: s32[], u: bf16[1,8]) -> f32[100,8] {
  %p = f32[100,8] parameter(0)
  %i = s32[] parameter(1)
  %u = bf16[1,8] parameter(2)
  %z = s32[] constant(0)
  %w = f32[1,8] convert(%u)
  ROOT %r = f32[100,8] dynamic-update-slice(%p, %w, %i, %z)
}
"""
STACK, INDEX = '%p = f32[100,8] parameter(0)', '%i = s32[] parameter(1)'


def test_a_slice_of_a_stack_reads_the_slice():
    op = only_op(STACK, INDEX, 'ROOT %f = f32[8] fusion(%p, %i), calls=%fused', head=SLICE)
    assert op.hbm_bytes == 32 + 4 + 32


def test_an_update_in_place_writes_the_update():
    lines = (STACK, INDEX, '%u = bf16[1,8] parameter(2)')
    fusion = 'ROOT %f = f32[100,8] fusion(%p, %i, %u), calls=%fused'
    assert only_op(*lines, fusion, head=UPDATE).hbm_bytes == 16 + 4 + 32
    plain = 'ROOT %f = bf16[100,8] dynamic-update-slice(%p, %u, %i, %i)'
    assert only_op(*lines, plain).hbm_bytes == 16 + 16


def test_a_nested_fusion_that_renames_reads_what_its_reader_reads():
    head = """%rename (q: f32[6,8]) -> f32[6,8] {
  %q = f32[6,8] parameter(0)
  ROOT %b = f32[6,8] bitcast(%q)
}
%fused (p: f32[6,8]) -> f32[6,8] {
  %p = f32[6,8] parameter(0)
  %f = f32[6,8] fusion(%p), kind=kLoop, calls=%rename
  ROOT %r = f32[6,8] negate(%f)
}
"""
    op = only_op(
        '%p = f32[6,8] parameter(0)', 'ROOT %f = f32[6,8] fusion(%p), calls=%fused', head=head
    )
    assert op.hbm_bytes == 2 * 6 * 8 * 4


def test_what_was_prefetched_is_counted_with_its_reader():
    op = only_op(
        '%a = f32[64]{0} parameter(0)',
        '%s = (f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%a)',
        '%d = f32[64]{0:S(1)} copy-done(%s)',
        'ROOT %b = f32[64]{0} fusion(%d), calls=%none',
        head='%none (p: f32[64]) -> f32[64] {\n  %p = f32[64]{0:S(1)} parameter(0)\n'
        '  ROOT %n = f32[64] negate(%p)\n}\n',
    )
    assert (op.name, op.hbm_bytes) == ('b', 512)


def test_a_slice_that_was_prefetched_is_counted_with_its_reader():
    head = """%slice (p: f32[100,8], i: s32[]) -> f32[1,8] {
  %p = f32[100,8] parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,8]{1,0:S(1)} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,8}
}
"""
    op = only_op(
        STACK,
        INDEX,
        '%s = ((f32[100,8], s32[]), f32[1,8]{1,0:S(1)}, u32[]) async-start(%p, %i), calls=%slice',
        '%d = f32[1,8]{1,0:S(1)} async-done(%s)',
        'ROOT %r = f32[1,8]{1,0:S(1)} copy(%d)',
        head=head,
    )
    assert (op.name, op.hbm_bytes) == ('r', 32)


def test_what_goes_to_the_host_is_counted_apart():
    op = only_op(
        '%a = f32[64]{0} parameter(0)',
        '%s = (f32[64]{0:S(5)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%a)',
        'ROOT %d = f32[64]{0:S(5)} copy-done(%s)',
    )
    assert (op.hbm_bytes, op.host_bytes) == (256, 256)


@pytest.mark.parametrize(
    'groups, size',
    [
        ('{{0,1,2},{3,4,5}}', 3),
        ('{}', 8),
        ('[2,4]<=[8]', 4),
        ('[4,2]<=[2,2,2]T(0,2,1)', 2),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4]{'a','b'}", 8),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", 2),
    ],
)
def test_group_sizes_in_every_notation(groups, size):
    text = entry(
        '%a = f32[4] parameter(0)',
        f'ROOT %b = f32[4] all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add',
    )
    assert group_size(parse(text).entry.instructions['b'], 8) == size


def test_bytes_that_each_chip_sends():
    assert sent_bytes('all-gather', 100, 4) == 300
    assert sent_bytes('reduce-scatter', 100, 4) == 75
    assert sent_bytes('all-reduce', 100, 4) == 150
    assert sent_bytes('all-to-all', 100, 4) == sent_bytes('ragged-all-to-all', 100, 4) == 75
    assert sent_bytes('collective-permute', 100, 4) == 100
    assert sent_bytes('all-reduce', 100, 1) == sent_bytes('all-gather', 100, 1) == 0


def test_an_asynchronous_collective_counts_once():
    program = analyse(
        entry(
            '%a = f32[4] parameter(0)',
            '%s = (f32[4], f32[8]) all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}',
            '%d = f32[8] all-gather-done(%s)',
            '%w = ((f32[8]), f32[4], u32[]) async-start(%d), calls=%wrapped',
            '%u = ((f32[8]), f32[4], u32[]) async-update(%w)',
            'ROOT %e = f32[4] async-done(%u)',
            head='%wrapped (p: f32[8]) -> f32[4] {\n  %p = f32[8] parameter(0)\n'
            '  ROOT %r = f32[4] reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}\n}\n',
        ),
        2,
    )
    assert collective_bytes(program) == {'all-gather': 16, 'reduce-scatter': 16}


def test_a_fused_all_reduce_and_slice_is_a_reduce_scatter():
    head = """%fused (p: f32[8]) -> f32[4] {
  %p = f32[8] parameter(0)
  %a = f32[8] all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  %i = s32[] constant(0)
  ROOT %s = f32[4] dynamic-slice(%a, %i), dynamic_slice_sizes={4}
}
"""
    op = only_op('%x = f32[8] parameter(0)', 'ROOT %f = f32[4] fusion(%x), calls=%fused', head=head)
    assert (op.kind, op.sent_bytes, op.group) == ('reduce-scatter', 16, 2)


def test_of_a_ragged_exchange_the_rows_are_sent():
    op = only_op(
        '%a = bf16[16,8] parameter(0)',
        '%o = bf16[32,8] parameter(1)',
        '%n = s32[4] parameter(2)',
        'ROOT %r = bf16[32,8] ragged-all-to-all(%a, %o, %n, %n, %n, %n), '
        'replica_groups={{0,1,2,3}}',
    )
    assert op.sent_bytes == 16 * 8 * 2 * 3 / 4


def loop(start='constant(0)', step='constant(1)', limit='constant(7)', direction='LT', known=''):
    """A while loop around one product."""
    head = f"""%body (c: (s32[], f32[4,4], s32[])) -> (s32[], f32[4,4], s32[]) {{
  %c = (s32[], f32[4,4], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[4,4] get-tuple-element(%c), index=1
  %l = s32[] get-tuple-element(%c), index=2
  %one = s32[] {step}
  %j = s32[] add(%i, %one)
  %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (s32[], f32[4,4], s32[]) tuple(%j, %y, %l)
}}
%less (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %r = pred[] compare(%a, %b), direction={direction}
}}
%condition (c: (s32[], f32[4,4], s32[])) -> pred[] {{
  %c = (s32[], f32[4,4], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %l = s32[] get-tuple-element(%c), index=2
  ROOT %r = pred[] fusion(%i, %l), kind=kLoop, calls=%less
}}
"""
    return entry(
        '%x = f32[4,4] parameter(0)',
        f'%i = s32[] {start}',
        '%copy = s32[] copy(%i)',
        f'%l = s32[] {limit}',
        '%t = (s32[], f32[4,4], s32[]) tuple(%copy, %x, %l)',
        'ROOT %w = (s32[], f32[4,4], s32[]) while(%t), condition=%condition, body=%body' + known,
        head=head,
    )


@pytest.mark.parametrize(
    'text, trips',
    [
        (loop(), 7),
        (loop(start='constant(2)', step='constant(2)'), 3),
        (loop(direction='LE'), 8),
        (loop(direction='NE'), 7),
        (loop(start='constant(7)', step='constant(-1)', limit='constant(0)', direction='GT'), 7),
        (loop(start='constant(9)'), 0),
        (loop(limit='parameter(1)'), None),
        (loop(limit='parameter(1)', known=', backend_config={"known_trip_count":{"n":"12"}}'), 12),
    ],
)
def test_trip_counts(text, trips):
    program = analyse(text, 1)
    (found,) = program.loops
    assert (found.trips, found.exact) == (trips, True)
    assert program.unknown_loops == (['w'] if trips is None else [])
    assert program.total('flops') == 128 * (1 if trips is None else trips)


def test_a_loop_that_data_may_end_earlier_is_counted_at_its_most():
    text = loop(limit='minimum(%x, %m)').replace('  %t =', '  %m = s32[] constant(9)\n  %t =', 2)
    program = analyse(text, 1)
    assert [(loop.trips, loop.exact) for loop in program.loops] == [(9, False)]
    assert program.total('flops') == 9 * 128


def test_the_branch_with_the_most_work_is_counted():
    head = """%small (p: f32[4,4]) -> f32[4,4] {
  ROOT %p = f32[4,4] parameter(0)
}
%large (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4] parameter(0)
  ROOT %d = f32[4,4] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    program = analyse(
        entry(
            '%x = f32[4,4] parameter(0)',
            '%b = s32[] parameter(1)',
            'ROOT %c = f32[4,4] conditional(%b, %x, %x), branch_computations={%small, %large}',
            head=head,
        ),
        1,
    )
    assert (program.conditionals, program.total('flops')) == (1, 128)


def test_a_kernel_is_its_cost_estimate_or_its_operands():
    call = (
        'ROOT %%mla_forward.3 = f32[8] custom-call(%%x), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"body":"AAA("%s},'
        '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]}'
    )
    x = '%x = f32[8] parameter(0)'
    cost = ',"cost_estimate":{"bytes_accessed":"100","flops":"2000","transcendentals":"3"}'
    known, unknown = only_op(x, call % cost), only_op(x, call % '')
    assert known.kind == unknown.kind == KERNEL_OP
    assert (known.flops, known.hbm_bytes, known.vmem_bytes, known.has_cost) == (
        2000,
        100,
        4096,
        True,
    )
    assert (unknown.flops, unknown.hbm_bytes, unknown.has_cost) == (0, 64, False)
    assert kernel_name(known.name) == kernel_name('mla_forward.1.clone') == 'mla_forward'


def test_a_scan_compiled_for_the_cpu_counts_every_step():
    def run(x, weights):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = jax.ShapeDtypeStruct((8, 16), 'float32'), jax.ShapeDtypeStruct((5, 16, 16), 'float32')
    compiled = jax.jit(run).lower(*shapes).compile()
    program = analyse(compiled.as_text(), 1)
    assert [loop.trips for loop in program.loops] == [5]
    assert program.total('flops') == 5 * 2 * 8 * 16 * 16


def exchanges():
    """Three layers of products among four chips, with every collective; lowered."""
    mesh = mesh_of('v5p:2x2x1', data=2, expert=2)
    rows, whole = PartitionSpec(('data', 'expert')), PartitionSpec(None, 'data')

    def layer(x, w):
        with jax.named_scope('mlp'):
            x = x @ lax.all_gather(w, 'data', axis=0, tiled=True)
        with jax.named_scope('block_sparse_moe'):
            x = lax.all_to_all(x.reshape(2, -1, 1024), 'expert', 0, 0).reshape(x.shape)
        return lax.ppermute(x, 'expert', [(0, 1), (1, 0)]), None

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(whole, rows), out_specs=(whole, rows), check_vma=False
    )
    def run(weights, x):
        y, pull = jax.vjp(lambda weights: lax.scan(layer, x, weights)[0], weights)
        (gradient,) = pull(y)
        return lax.psum(gradient, 'expert'), y

    def abstract(shape, spec):
        return jax.ShapeDtypeStruct(shape, 'bfloat16', sharding=NamedSharding(mesh, spec))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        args = abstract((3, 1024, 1024), whole), abstract((1024, 1024), rows)
        return jax.jit(run).lower(*args)


@pytest.mark.aot
@needs_libtpu
def test_a_program_for_four_chips_counts_what_was_asked_for():
    lowered = exchanges()
    found = compile_lowered(lowered, CHIPS['v5p'])
    program = analyse(found.text, 4)
    x, w = 256 * 1024 * 2, 512 * 1024 * 2
    assert program.total('flops') == 3 * 3 * 2 * 256 * 1024 * 1024
    sent = collective_bytes(program)
    assert sent['all-gather'] in (3 * w, 6 * w)  # gathered again for the backward pass, or kept
    assert sent['all-to-all'] == 2 * 3 * x / 2
    assert sent['collective-permute'] >= 2 * 3 * x
    assert sent['reduce-scatter'] == pytest.approx(3 * w, rel=0.1)  # libtpu pads
    assert sent['all-reduce'] == 3 * w
    assert not program.unknown_loops
    # The dump is what as_text says, where that works.
    assert analyse(lowered.compile().as_text(), 4).ops == program.ops


@pytest.mark.aot
@needs_libtpu
def test_a_program_that_cannot_be_read_back_is_read_from_the_dump():
    shapes = jax.ShapeDtypeStruct((163840, 256), 'bfloat16'), jax.ShapeDtypeStruct((2048,), 'int32')
    found = compile_lowered(lower_for('v5p:2x2x1', lambda t, i: t[i], shapes), CHIPS['v5p'])
    assert 'async-update(' in found.text
    program = analyse(found.text, 1)
    # Rows read and written, and the indices, not the table.
    assert program.total('hbm_bytes') == pytest.approx(2 * 2048 * 256 * 2, rel=0.02)
