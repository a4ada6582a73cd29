"""How decode steps update states where they lie: one read and one write of each, by slot index.

A program owns some rows of the batch. It walks over (row, tile of heads), with copies of states
some steps ahead of the work and some behind it; what is updated in VMEM goes back to the place in
HBM it came from. Rows without a slot start no copy at all.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.decode_math import F32, WIDTH, chunk, convolved, gate, normalised, step

VMEM_LIMIT = 64 * 2**20
_ROWS_BUDGET = 28 * 2**20  # bytes of one program's rows of everything but states
_READY_HEADS = 96  # heads of all rows that are made ready at once
_MAX_GROUP = 8  # heads worked on at a time, where their number allows it


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Sizes of one call.

    rows: of the batch, up to a whole number of programs. heads: H. num_slots: of the pool.
    replayed: tokens that may be committed; ahead: tokens after them that are not.
    taps: of the convolution, 0 where q, k, v, g come prepared. lower_bound: of the gate.
    program_rows, tile, buffers: rows a program, heads a copy, copies in flight.
    all_active: every row is known to have a slot, and everything replayed is committed.
    """

    rows: int
    heads: int
    num_slots: int
    replayed: int
    ahead: int
    taps: int
    lower_bound: float | None
    program_rows: int
    tile: int
    buffers: int
    all_active: bool

    @property
    def tokens(self) -> int:
        return self.replayed + self.ahead

    @property
    def outputs(self) -> int:
        """Tokens with an output: those ahead, or the one replayed in plain decode."""
        return self.ahead or self.replayed

    @property
    def group(self) -> int:
        return _MAX_GROUP if self.tile % _MAX_GROUP == 0 else self.tile

    @property
    def tiles(self) -> int:
        return self.heads // self.tile

    @property
    def chunk(self) -> int:
        """Rows made ready for the recurrence at once, so that short rows share latencies."""
        if self.ahead:
            return 1
        most = max(1, _READY_HEADS // self.heads)
        return max(c for c in range(1, most + 1) if self.program_rows % c == 0)

    @property
    def units(self) -> int:
        return self.program_rows * self.tiles

    @property
    def lead(self) -> int:
        """Units between the start of a read and its use; two more buffers are being written."""
        return self.buffers - 2


def plan_decode(
    rows: int,
    heads: int,
    num_slots: int,
    *,
    replayed: int,
    ahead: int,
    taps: int,
    lower_bound: float | None,
    tiles: dict[str, int],
    all_active: bool = False,
) -> DecodePlan:
    """tiles: 'heads' a copy (a divisor of H) and 'buffers'."""
    tokens = replayed + ahead
    row_bytes = heads * WIDTH * (4 * 5 * tokens * 2 + 4 * 2 * (ahead or replayed) + 2 * 9)
    most = max(1, _ROWS_BUDGET // row_bytes)
    programs = 1 if rows == 1 else 2 * pl.cdiv(rows, 2 * most)
    program_rows = pl.cdiv(rows, programs)
    return DecodePlan(
        rows=programs * program_rows,
        heads=heads,
        num_slots=num_slots,
        replayed=replayed,
        ahead=ahead,
        taps=taps,
        lower_bound=lower_bound,
        program_rows=program_rows,
        tile=tiles['heads'],
        buffers=tiles['buffers'],
        all_active=all_active,
    )


def default_tiles(heads: int) -> dict[str, int]:
    """All heads of a short layer, else the largest multiple of 8 up to 24 that divides them."""
    tile = heads
    if heads > 24:
        tile = next((t for t in (24, 16, 8) if heads % t == 0), heads)
    return {'heads': tile, 'buffers': 6}


def _kernel(slots_ref, accepted_ref, *refs, plan: DecodePlan) -> None:
    *inputs, f_ref, beta_ref = refs[:5]
    has_conv, history, num_pools = plan.taps > 0, plan.taps - 1, 1 + (plan.taps > 0)
    conv_refs, refs = refs[5 : 8 if has_conv else 5], refs[8 if has_conv else 5 :]
    o_ref, pool_ref, *refs = refs[num_pools:]
    if has_conv:
        tail_ref, tails_ref, tail_read_sem, tail_write_sem, *refs = refs
    if plan.ahead:
        history_ref, rows_ref, reads_ref, *refs = refs
    buffer_ref, read_sem, write_sem, ready_ref = refs
    first = pl.program_id(0) * plan.program_rows

    def if_active(row, run) -> None:
        if plan.all_active:
            run()
        else:
            slot = slots_ref[first + row]
            pl.when((slot >= 0) & (slot < plan.num_slots))(run)

    def state_copy(unit, is_read: bool):
        row, place = unit // plan.tiles, lax.rem(unit, plan.buffers)
        heads = pl.ds(lax.rem(unit, plan.tiles) * plan.tile, plan.tile)
        there, here = pool_ref.at[slots_ref[first + row], heads], buffer_ref.at[place]
        if is_read:
            return pltpu.make_async_copy(there, here, read_sem.at[place])
        return pltpu.make_async_copy(here, there, write_sem.at[place])

    def tail_copy(row, is_read: bool):
        there, here = tail_ref.at[slots_ref[first + row]], tails_ref.at[row]
        if is_read:
            return pltpu.make_async_copy(there, here, tail_read_sem.at[row])
        return pltpu.make_async_copy(here, there, tail_write_sem.at[row])

    def on_state(unit, action: str, is_read: bool) -> None:
        if_active(unit // plan.tiles, lambda: getattr(state_copy(unit, is_read), action)())

    def on_tail(row, action: str, is_read: bool) -> None:
        if_active(row, lambda: getattr(tail_copy(row, is_read), action)())

    def prepare(place, rows, tokens, taps: list[list[jax.Array]] | None, count=None) -> None:
        """ready_ref[place:] = q, k, v, g, beta of some tokens, ready for the recurrence.

        rows, tokens: index the arguments, one of them a slice. taps: rows [n, H, K] of the
        convolutions of q, k and v. count: of tokens that count, where not all of them do.
        """
        f, beta = f_ref[rows, tokens].astype(F32), beta_ref[rows, tokens]
        if taps is None:
            q, k, v = (ref[rows, tokens].astype(F32) for ref in inputs)
        else:
            weight_ref, rate_ref, bias_ref = conv_refs
            q, k, v = (convolved(taps[part], weight_ref, part) for part in range(3))
            q, k = normalised(q) * WIDTH**-0.5, normalised(k)
            f = gate(f, rate_ref[...], bias_ref[...], plan.lower_bound)
        if count is not None:
            # Tokens that are not committed leave the state as it is.
            token = lax.broadcasted_iota(jnp.int32, f.shape, 0)
            k, v, f, beta = (jnp.where(token < count, x, 0.0) for x in (k, v, f, beta))
        for part, value in enumerate((q, k, v, f, beta)):
            ready_ref[part, pl.ds(place, value.shape[0])] = value

    def prepare_rows(row) -> None:
        """Everything of plan.chunk rows with one token each."""
        rows, taps = pl.ds(row, plan.chunk), None
        if has_conv:
            _each(plan.chunk, lambda i: on_tail(row + i, 'wait', True))
            taps = [
                [*(tails_ref[rows, part, j] for j in range(history)), inputs[part][rows, 0]]
                for part in range(3)
            ]
            for part in range(3):
                for j in range(history):
                    tails_ref[rows, part, j] = taps[part][j + 1].astype(tails_ref.dtype)
            taps = [[row.astype(F32) for row in part] for part in taps]
            _each(plan.chunk, lambda i: on_tail(row + i, 'start', False))
        prepare(0, rows, 0, taps)

    def prepare_window(row, count) -> None:
        """Everything of one row with many tokens, of which `count` are committed."""
        on_tail(row, 'wait', True)
        spans = ((0, plan.replayed), (plan.replayed, plan.ahead))
        for is_ahead, (start, size) in enumerate(spans):
            taps = []
            for part in range(3):
                if is_ahead:
                    tail = history_ref[part, pl.ds(count, history)]
                    tails_ref[row, part] = tail.astype(tails_ref.dtype)
                else:
                    tail = tails_ref[row, part].astype(F32)
                window = inputs[part][row, start : start + size].astype(F32)
                rows = jnp.concatenate([tail, window])
                if not is_ahead:
                    history_ref[part] = rows
                taps.append([rows[j : j + size] for j in range(plan.taps)])
            kept = None if is_ahead or plan.all_active else count
            prepare(start, row, slice(start, start + size), taps, kept)
        on_tail(row, 'start', False)

    def work(row, tile, place, group) -> None:
        start = tile * plan.tile + group * plan.group
        if not isinstance(start, int) and plan.group == _MAX_GROUP:
            start = pl.multiple_of(start, _MAX_GROUP)
        heads = pl.ds(start, plan.group)
        state = buffer_ref.at[place, pl.ds(group * plan.group, plan.group)]

        def ready(sample) -> list[jax.Array]:
            return [ready_ref[part, sample, heads, :] for part in range(5)]

        if not plan.ahead:
            q, k, v, g, beta = ready(lax.rem(row, plan.chunk))
            for head, o in enumerate(step(state, q, k, v, jnp.exp(g), beta)):
                o_ref[row, 0, pl.ds(start + head, 1), :] = o
            return
        tokens = [ready(i) for i in range(plan.tokens)]
        chunk(tokens[: plan.replayed], state, rows_ref, reads_ref, True)
        outputs = chunk(tokens[plan.replayed :], state, rows_ref, reads_ref, False)
        for token, o in enumerate(outputs):
            o_ref[row, token, heads, :] = o

    def unit_body(row, tile) -> None:
        unit = row * plan.tiles + tile
        place, following = lax.rem(unit, plan.buffers), unit + plan.lead

        @pl.when(following < plan.units)
        def _():
            pl.when(unit >= 2)(lambda: on_state(unit - 2, 'wait', False))
            on_state(following, 'start', True)

        def compute() -> None:
            state_copy(unit, True).wait()
            _each(plan.tile // plan.group, functools.partial(work, row, tile, place))
            state_copy(unit, False).start()

        if_active(row, compute)

    def row_body(row) -> None:
        if plan.ahead:
            count = plan.replayed
            if not plan.all_active:
                count = jnp.clip(accepted_ref[first + row], 0, plan.replayed)
            if_active(row, lambda: prepare_window(row, count))
        else:
            pl.when(lax.rem(row, plan.chunk) == 0)(lambda: prepare_rows(row))
        body = functools.partial(unit_body, row)
        if plan.group == _MAX_GROUP:
            _each(plan.tiles, body)
        else:
            for tile in range(plan.tiles):
                body(tile)

    if has_conv:
        _each(plan.program_rows, lambda row: on_tail(row, 'start', True))
    _each(min(plan.lead, plan.units), lambda unit: on_state(unit, 'start', True))
    if not plan.all_active:
        o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)
    _each(plan.program_rows, row_body)
    last = max(0, plan.units - plan.buffers)
    _each(plan.units - last, lambda i: on_state(last + i, 'wait', False))
    if has_conv:
        _each(plan.program_rows, lambda row: on_tail(row, 'wait', False))


def _each(count: jax.Array | int, body) -> None:
    lax.fori_loop(0, count, lambda i, carry: (body(i), carry)[1], 0)


def decode_call(
    slots: jax.Array,
    accepted: jax.Array,
    tokens: tuple[jax.Array, ...],
    conv: tuple[jax.Array, ...],
    pool: jax.Array,
    tails: jax.Array | None,
    *,
    plan: DecodePlan,
    interpret: bool,
) -> list[jax.Array]:
    """o [B, outputs, H, V] float32, the pool and, with a convolution, the pool of tails.

    Args:
      slots, accepted: [B] int32; accepted is only read where several tokens may be replayed.
      tokens: q, k, v, f [B, tokens, H, 128] and beta [B, tokens, H, 128], the same on every lane.
      conv: weight [3, taps, H, 128], rate and bias [H, 128] of the gate, all float32; or ().
      pool: [num_slots, H, K, V] float32; tails: [num_slots, 3, taps - 1, H, K].
    """

    def rows_spec(count: int) -> pl.BlockSpec:
        block = (plan.program_rows, count, plan.heads, WIDTH)
        return pl.BlockSpec(block, lambda program, *_: (program, 0, 0, 0))

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda program, *_: (0,) * array.ndim)

    in_hbm = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    pools = [pool] if tails is None else [pool, tails]
    dma = pltpu.SemaphoreType.DMA
    scratch = []
    if tails is not None:
        scratch += [
            pltpu.VMEM((plan.program_rows, *tails.shape[1:]), tails.dtype),
            dma((plan.program_rows,)),
            dma((plan.program_rows,)),
        ]
    if plan.ahead:
        scratch += [
            pltpu.VMEM((3, plan.taps - 1 + plan.replayed, plan.heads, WIDTH), F32),
            *[pltpu.VMEM((max(plan.replayed, 2 * plan.ahead) * plan.group, WIDTH), F32)] * 2,
        ]
    scratch += [
        pltpu.VMEM((plan.buffers, plan.tile, WIDTH, WIDTH), F32),
        dma((plan.buffers,)),
        dma((plan.buffers,)),
        pltpu.VMEM((5, max(plan.chunk, plan.tokens), plan.heads, WIDTH), F32),
    ]
    num_inputs = 2 + len(tokens) + len(conv)
    states = 2 * 4 * plan.rows * plan.heads * WIDTH * WIDTH
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.rows // plan.program_rows,),
            in_specs=[
                *(rows_spec(plan.tokens) for _ in tokens),
                *(whole(array) for array in conv),
                *(in_hbm for _ in pools),
            ],
            out_specs=[rows_spec(plan.outputs), *(in_hbm for _ in pools)],
            scratch_shapes=scratch,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((plan.rows, plan.outputs, plan.heads, WIDTH), F32),
            *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools),
        ],
        input_output_aliases={num_inputs + i: 1 + i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel',), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=8 * plan.tokens * states // 8, bytes_accessed=states, transcendentals=0
        ),
        interpret=interpret,
        name='kda_decode',
    )(slots, accepted, *tokens, *conv, *pools)
