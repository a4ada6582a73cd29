"""What decoding with MLA computes: one new token a sequence against its paged latent cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.checks import check_floating, check_integer
from pallas_kernels.common.platform import Implementation, check_implementation, form_for, run_form
from pallas_kernels.common.tiles import tiles_for
from pallas_kernels.mla.blocks import LANES, LOWEST, up_to
from pallas_kernels.mla.paged_kernel import CORES, PagedPlan, paged_decode_kernel

TOKENS = 2048  # worked on at a time
_XLA_TOKENS = 512
_MOST_TABLE = 128 * 1024  # entries of a page table, which lies in the 1 MiB of scalar memory
_MOST_PAGE = 2 * 2**20  # bytes


def page_width(latent: int, rope: int) -> int:
    """Lanes of a token in a page: latent, then rope, then zeros up to whole registers."""
    return up_to(latent + rope, LANES)


def paged_decode(
    q_latent: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> jax.Array:
    """o = sum_s softmax_s(scale (q_latent . c_s + q_rope . r_s)) c_s over a sequence's tokens s.

    MLA in absorbed form: keys and values are both the latent c, shared by all heads; the caller
    multiplies q by the keys' half of kv_b_proj before and o by the values' half after.

    Token s of sequence b is row s % P of page page_table[b, s // P]. Each page that holds one of a
    sequence's tokens is read once; no other one is, whatever its entry in the table says.

    Args:
      q_latent: [B, H, R]. q_rope: [B, H, r]. bfloat16 or float32, as `pages`.
      pages: [num_pages, P, page_width(R, r)]: c, r, and zeros in the lanes past them. P a multiple
        of 8. Rows of no token may hold anything.
      page_table: [B, M] int32. lengths: [B] int32, tokens of each sequence, 0 to M * P.
      scale: of the scores: (width of a query head before absorption) ** -0.5.
      implementation: 'reference' | 'xla' | 'pallas' | None (best for the platform lowered for).

    Returns:
      [B, H, R] in q_latent's dtype, accumulated in float32; 0 for a sequence without tokens.

    Raises:
      ValueError: shapes or dtypes disagree, or a known length or page lies out of range. Where they
        are known to the device only, lengths are clipped to 0 to M * P and pages to the pool.
      NotImplementedError: 'pallas' with a dtype, page size or table that it cannot take.

    Source: Kimi K3 MLA (kv_lora_rank 512, qk_rope_head_dim 64), DeepSeek-V2's absorbed form.
    """
    _check(q_latent, q_rope, pages, page_table, lengths)
    check_implementation('paged_decode', implementation)
    latent, size = q_latent.shape[-1], pages.shape[1]
    lengths = jnp.clip(jnp.asarray(lengths, jnp.int32), 0, page_table.shape[1] * size)
    page_table = jnp.clip(jnp.asarray(page_table, jnp.int32), 0, pages.shape[0] - 1)
    past = pages.shape[-1] - latent - q_rope.shape[-1]
    q = jnp.pad(jnp.concatenate([q_latent, q_rope], axis=-1), ((0, 0), (0, 0), (0, past)))
    args = (q, jnp.asarray(pages), page_table, lengths)
    if implementation == 'reference':
        return _reference(*args, latent=latent, scale=scale)
    implementation = form_for('paged_decode', implementation, _unsupported(q, pages, page_table))
    on_tpu = functools.partial(_on_tpu, latent, scale)
    xla = functools.partial(_xla, latent=latent, scale=scale)
    return run_form('paged_decode', implementation, on_tpu, xla, *args)


def _mixed(q: jax.Array, kv: jax.Array, counts: jax.Array, scale: float):
    """Scores [B, H, S] in float32 or wider of the tokens that count, and those tokens or zeros."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    kv = jnp.where(counts[..., None], kv, 0)
    scores = jnp.einsum(
        'bhw,bsw->bhs', q, kv, precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )
    return jnp.where(counts[:, None], scores * scale, LOWEST), kv


def _reference(q, pages, page_table, lengths, *, latent: int, scale: float) -> jax.Array:
    kv = pages[page_table].reshape(q.shape[0], -1, pages.shape[-1])
    counts = jnp.arange(kv.shape[1]) < lengths[:, None]
    scores, kv = _mixed(q, kv, counts, scale)
    weights = jnp.where(counts[:, None], jax.nn.softmax(scores, axis=-1), 0)
    values = kv[..., :latent].astype(weights.dtype)
    o = jnp.einsum('bhs,bsr->bhr', weights, values, precision=lax.Precision.HIGHEST)
    return o.astype(q.dtype)


def _xla(q, pages, page_table, lengths, *, latent: int, scale: float) -> jax.Array:
    """Some pages of every sequence at a time, up to the longest sequence's last."""
    batch, heads, _ = q.shape
    size, wide = pages.shape[1], jnp.promote_types(q.dtype, jnp.float32)
    step_pages = min(max(_XLA_TOKENS // size, 1), page_table.shape[1])
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % step_pages)))

    def step(at, carry):
        top, total, mixed = carry
        table = lax.dynamic_slice_in_dim(page_table, at * step_pages, step_pages, axis=1)
        kv = pages[table].reshape(batch, -1, pages.shape[-1])
        place = at * step_pages * size + jnp.arange(kv.shape[1])
        scores, kv = _mixed(q, kv, place < lengths[:, None], scale)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights, shrink = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        read = jnp.einsum(
            'bhs,bsr->bhr',
            weights.astype(kv.dtype),
            kv[..., :latent],
            precision=lax.Precision.HIGHEST,
            preferred_element_type=wide,
        )
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        return new_top, total, mixed * shrink + read

    top = jnp.full((batch, heads, 1), LOWEST, wide)
    start = (top, jnp.zeros_like(top), jnp.zeros((batch, heads, latent), wide))
    steps = -(-jnp.max(lengths) // (step_pages * size))
    _, total, mixed = lax.fori_loop(0, steps, step, start)
    o = jnp.where(lengths[:, None, None] > 0, mixed / jnp.maximum(total, 1e-30), 0)
    return o.astype(q.dtype)


def plan_for(
    batch: int, heads: int, latent: int, pages: jax.Array, scale: float, length: int | None = None
) -> PagedPlan:
    """How a call is cut; `length` as in PagedPlan."""
    size = pages.shape[1]
    shape = {'B': batch, 'H': heads, 'P': size, 'R': latent}
    default = {'tile': max(TOKENS // size, 1)}
    tiles = tiles_for('mla', 'decode', shape, pages.dtype.name, default)
    return PagedPlan(tiles['tile'], size, latent, scale, length)


def _on_tpu(
    latent: int,
    scale: float,
    interpret: bool,
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    batch, heads, _ = q.shape
    # Sequences are shared out evenly; rows of q fill whole bfloat16 registers.
    more = -batch % CORES
    q = jnp.pad(q, ((0, more), (0, -heads % 16), (0, 0)))
    page_table, lengths = jnp.pad(page_table, ((0, more), (0, 0))), jnp.pad(lengths, (0, more))
    plan = plan_for(batch, heads, latent, pages, scale)
    o = paged_decode_kernel(lengths, page_table, q, pages, plan=plan, interpret=interpret)
    return o[:batch, :heads]


def _unsupported(q: jax.Array, pages: jax.Array, page_table: jax.Array) -> str | None:
    """Why the TPU kernel cannot take these arguments."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f'takes bfloat16 or float32, got {q.dtype}'
    if pages.shape[1] % 8:
        return f'takes pages of a multiple of 8 tokens, got {pages.shape[1]}'
    bytes_a_page = pages.dtype.itemsize * pages.shape[1] * pages.shape[2]
    if bytes_a_page > _MOST_PAGE:
        return f'takes pages of at most {_MOST_PAGE} bytes, got {bytes_a_page}'
    if page_table.size > _MOST_TABLE:
        return f'takes page tables of at most {_MOST_TABLE} entries, got {page_table.size}'
    return None


def _known(x: jax.Array) -> np.ndarray | None:
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _check(q_latent, q_rope, pages, page_table, lengths) -> None:
    check_floating('paged_decode', q_latent=q_latent, q_rope=q_rope, pages=pages)
    check_integer('paged_decode', page_table=page_table, lengths=lengths)
    if q_latent.ndim != 3 or q_rope.ndim != 3 or q_rope.shape[:2] != q_latent.shape[:2]:
        raise ValueError(
            f'paged_decode: got q_latent {q_latent.shape} and q_rope {q_rope.shape}, '
            'wanted [B, H, R] and [B, H, r]'
        )
    batch, _, latent = q_latent.shape
    width = page_width(latent, q_rope.shape[-1])
    if pages.ndim != 3 or pages.shape[-1] != width:
        raise ValueError(
            f'paged_decode: pages have shape {pages.shape}, wanted [num_pages, P, {width}]'
        )
    if page_table.ndim != 2 or page_table.shape[0] != batch or lengths.shape != (batch,):
        raise ValueError(
            f'paged_decode: got page_table {page_table.shape} and lengths {lengths.shape}, '
            f'wanted [{batch}, M] and [{batch}]'
        )
    if 0 in q_latent.shape or 0 in pages.shape or 0 in page_table.shape:
        raise ValueError(
            f'paged_decode: q_latent {q_latent.shape}, pages {pages.shape} and page_table '
            f'{page_table.shape} must not be empty'
        )
    if not q_latent.dtype == q_rope.dtype == pages.dtype:
        raise ValueError(
            f'paged_decode: q_latent is {q_latent.dtype}, q_rope {q_rope.dtype} and pages '
            f'{pages.dtype}; cast two'
        )
    size, most = pages.shape[1], page_table.shape[1] * pages.shape[1]
    known_lengths, known_table = _known(lengths), _known(page_table)
    if known_lengths is None:
        return
    if known_lengths.min() < 0 or known_lengths.max() > most:
        raise ValueError(
            f'paged_decode: lengths are {known_lengths.min()} to {known_lengths.max()}, wanted '
            f'0 to {most}, what page_table {page_table.shape} holds in pages of {size}'
        )
    if known_table is None:
        return
    live = np.arange(known_table.shape[1]) * size < known_lengths[:, None]
    used = known_table[live]
    if used.size and (used.min() < 0 or used.max() >= pages.shape[0]):
        raise ValueError(
            f'paged_decode: page_table names pages {used.min()} to {used.max()}, wanted '
            f'0 to {pages.shape[0] - 1}'
        )
