"""How one token a sequence reads its paged latent cache on the TPU: each live page once.

A sequence's pages lie anywhere in HBM, so they are copied by hand: while one tile of pages is
worked on, the next one, of the same sequence or the next, is on its way.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.blocks import LOG2_E, LOWEST, VMEM_LIMIT

F32 = jnp.float32
CORES = 2
UNROLL = 8  # copies started without a branch between them
CHUNK = 512  # tokens: one chunk's softmax runs while others are multiplied


class PagedPlan(NamedTuple):
    """What is known while tracing.

    Attributes:
      tile: pages worked on at a time. page: tokens a page. latent: lanes that are also values.
      scale: of q . k.
      length: tokens of every sequence, whose pages lie in order, where a stand-in of static size is
        costed; None: what `lengths` and `page_table` say.
    """

    tile: int
    page: int
    latent: int
    scale: float
    length: int | None = None


def _kernel(
    lengths,
    page_table,
    q_ref,
    pages_ref,
    o_ref,
    tile_ref,
    m_ref,
    l_ref,
    acc_ref,
    count_ref,
    semaphore,
    *,
    plan: PagedPlan,
):
    turn, per_core = pl.program_id(1), pl.num_programs(1)
    sequence = pl.program_id(0) * per_core + turn
    tokens = plan.tile * plan.page
    is_bfloat16 = q_ref.dtype == jnp.bfloat16
    dot = functools.partial(
        lax.dot_general,
        precision=lax.Precision.DEFAULT if is_bfloat16 else lax.Precision.HIGHEST,
        preferred_element_type=F32,
    )

    def length_of(sequence):
        return lengths[sequence] if plan.length is None else plan.length

    def tiles_of(sequence):
        return jnp.maximum(pl.cdiv(length_of(sequence), tokens), 1)

    def pages_left(sequence, tile):
        return pl.cdiv(length_of(sequence), plan.page) - tile * plan.tile

    def copy_of(sequence, tile, slot, r):
        at = tile * plan.tile + r
        if plan.length is None:
            page = page_table[sequence, at]
        else:
            page = sequence * pl.cdiv(plan.length, plan.page) + at
        source, target = pages_ref.at[page], tile_ref.at[slot, r]
        return pltpu.make_async_copy(source, target, semaphore.at[slot])

    def start(sequence, tile, slot):
        """Starts the copy of each live page of a tile."""
        live = pages_left(sequence, tile)

        def one(r, carry):
            copy_of(sequence, tile, slot, r).start()
            return carry

        @pl.when(live >= plan.tile)
        def _():
            lax.fori_loop(0, plan.tile, one, 0, unroll=UNROLL)

        @pl.when(live < plan.tile)
        def _():
            lax.fori_loop(0, live, one, 0)

    def wait(sequence, tile, slot):
        live = pages_left(sequence, tile)

        @pl.when(live >= plan.tile)
        def _():
            # The semaphore counts bytes, so one wait serves all copies.
            pltpu.make_async_copy(
                tile_ref.at[1 - slot], tile_ref.at[slot], semaphore.at[slot]
            ).wait()

        @pl.when(live < plan.tile)
        def _():
            def one(r, carry):
                copy_of(sequence, tile, slot, r).wait()
                return carry

            lax.fori_loop(0, live, one, 0)

    @pl.when(turn == 0)
    def _():
        # What no copy has reached must be finite: its weight is 0, and 0 * NaN would count.
        tile_ref[...] = jnp.zeros(tile_ref.shape, tile_ref.dtype)
        count_ref[0] = 0
        start(sequence, 0, 0)

    m_ref[...] = jnp.full(m_ref.shape, LOWEST, F32)
    l_ref[...] = jnp.zeros(l_ref.shape, F32)
    acc_ref[...] = jnp.zeros(acc_ref.shape, F32)
    length, num = length_of(sequence), tiles_of(sequence)
    before = count_ref[0]

    def clear_tail(slot, live):
        """Zeroes the rows of the last live page that are past the end."""
        r = (live - 1) // plan.page
        page = tile_ref[slot, r].astype(F32)
        row = lax.broadcasted_iota(jnp.int32, page.shape, 0)
        tile_ref[slot, r] = jnp.where(row < live - r * plan.page, page, 0.0).astype(tile_ref.dtype)

    def attend(slot, live):
        """Adds a tile; live: how many of its tokens count, None for all."""
        pages = min(max(CHUNK // plan.page, 1), plan.tile)
        chunks = []
        for first in range(0, plan.tile, pages):
            kv = tile_ref[slot, pl.ds(first, min(pages, plan.tile - first))]
            kv = kv.reshape(-1, kv.shape[-1])
            s = dot(q_ref[0], kv, (((1,), (1,)), ((), ())))
            if live is not None:
                place = first * plan.page + lax.broadcasted_iota(jnp.int32, s.shape, 1)
                s = jnp.where(place < live, s, LOWEST)
            chunks.append((kv, s))
        m_old, total, acc = m_ref[...], l_ref[...], acc_ref[...]
        tops = [jnp.max(s, axis=1, keepdims=True) for _, s in chunks]
        m = functools.reduce(jnp.maximum, tops, m_old)
        shrink = jnp.exp2((m_old - m) * (plan.scale * LOG2_E))
        total, acc = total * shrink, acc * shrink
        for kv, s in chunks:
            p = jnp.exp2((s - m) * (plan.scale * LOG2_E))
            total += jnp.sum(p, axis=1, keepdims=True)
            acc += dot(p.astype(kv.dtype), kv[:, : plan.latent], (((1,), (0,)), ((), ())))
        m_ref[...], l_ref[...], acc_ref[...] = m, total, acc

    def step(tile, carry):
        slot = (before + tile) % 2
        is_last = tile + 1 == num

        @pl.when(jnp.logical_not(is_last))
        def _():
            start(sequence, tile + 1, 1 - slot)

        @pl.when(is_last & (turn + 1 < per_core))
        def _():
            start(sequence + 1, 0, 1 - slot)

        wait(sequence, tile, slot)
        live = length - tile * tokens
        pl.when(live >= tokens)(lambda: attend(slot, None))

        @pl.when((live > 0) & (live < tokens))
        def _():
            clear_tail(slot, live)
            attend(slot, live)

        return carry

    lax.fori_loop(0, num, step, 0)
    count_ref[0] = before + num
    # A sequence without tokens has neither read nor summed anything.
    total = l_ref[...]
    o_ref[0] = (acc_ref[...] / jnp.where(total > 0, total, 1.0)).astype(o_ref.dtype)


def paged_decode_kernel(
    lengths: jax.Array,
    page_table: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    *,
    plan: PagedPlan,
    interpret: bool,
) -> jax.Array:
    """o [B, H, latent] in q's dtype.

    Args:
      lengths: [B] int32. page_table: [B, M] int32. Both within bounds. B even.
      q: [B, H, W]. pages: [num_pages, P, W] in q's dtype.
    """
    batch, heads, width = q.shape
    per_core = batch // CORES

    def own(core, turn, *_):
        return core * per_core + turn, 0, 0

    kept = plan.length or page_table.shape[1] * plan.page
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(CORES, per_core),
            in_specs=[
                pl.BlockSpec((1, heads, width), own),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, heads, plan.latent), own),
            scratch_shapes=[
                pltpu.VMEM((2, plan.tile, plan.page, width), pages.dtype),
                pltpu.VMEM((heads, 1), F32),
                pltpu.VMEM((heads, 1), F32),
                pltpu.VMEM((heads, plan.latent), F32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, heads, plan.latent), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * heads * kept * (width + plan.latent),
            bytes_accessed=batch * kept * width * pages.dtype.itemsize,
            transcendentals=batch * heads * kept,
        ),
        interpret=interpret,
        name='mla_paged_decode',
    )(lengths, page_table, q, pages)
