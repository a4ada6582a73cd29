"""How the kernels multiply by four-bit weights that are decoded on their way to the matrix unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.tiles import tiles_for
from pallas_kernels.grouped_mlp.activations import GatedActivation
from pallas_kernels.grouped_mlp.dense_kernels import column_tile, default_rows
from pallas_kernels.grouped_mlp.experts import Experts, Kept
from pallas_kernels.grouped_mlp.mxfp4_tiles import CHUNK
from pallas_kernels.grouped_mlp.row_kernel import NN, NT, Weight, over_rows, product
from pallas_kernels.grouped_mlp.visits import Known, Table, visits_by_tile

# Decoded numbers are twice the weights: the scale byte is then the exponent field itself.
UNDOUBLE = 0.5
STRIP = 512  # columns whose sums stay in registers
# How far left a scale stands when a flag at bit 6, 3 or 0 is to bring it to the exponent.
SHIFTS = (1, 1, 4, 7)


def _both(half: int) -> jax.Array:
    """A constant for both halves of a word."""
    return jnp.int32(np.uint32(half << 16 | half).astype(np.int32))


def _right(words: jax.Array, count: int) -> jax.Array:
    return lax.shift_right_logical(words, jnp.int32(count))


def decode_words(words: jax.Array, scales: Sequence[jax.Array]) -> list[jax.Array]:
    """Four arrays like `words`: two bfloat16 numbers a word, rows 0..15, 16..31, ... of 64.

    Args:
      words: int32, laid out as `Mxfp4Tiles`. scales: of each of the four, scale << SHIFTS.

    29 operations for 8 codes a word: exact for scale bytes up to 251.
    """
    lowest = 0x0249  # of each magnitude
    exponent = _right(words, 1) | _right(words, 2)  # at `lowest`: whether e != 0
    nonzero = exponent | words
    # 0.5, the only subnormal, has the exponent before 1's and no mantissa bit.
    words = words & (exponent | _both(0xFFFF ^ lowest))
    number = _both(0x81C0)  # sign, two bits of the exponent, one of the mantissa
    # The factors move sign and magnitude by different distances; what else they make is masked.
    bits = [
        words & number,
        ((_right(words, 3) & _both(0x09C0)) * jnp.int32(1 + 16)) & number,
        (words << 3) & number,
        ((words & _both(0x2007)) * jnp.int32(64 + 4)) & number,
    ]
    flags = [
        nonzero & _both(1 << 6),
        _right(nonzero, 3) & _both(1 << 6),
        nonzero & _both(1 << 3),
        nonzero & _both(1),
    ]
    # A product puts the scale into the halves that have a flag, and leaves zeros zero.
    return [b + f * s for b, f, s in zip(bits, flags, scales, strict=True)]


def _scale(words: jax.Array, group: int, shift: int) -> jax.Array:
    """Byte `group` of each word, moved left by `shift`."""
    moved = shift - 8 * group
    words = words << moved if moved >= 0 else _right(words, -moved)
    return words & jnp.int32(255 << shift)


def _decode_chunk(words: Any, first: int, scales: Sequence[Any]) -> jax.Array:
    """[128, N] bfloat16, twice the weights of 128 inputs. scales: one array for each 16 inputs."""
    parts = []
    for half in range(2):
        own = words[first + 8 * half : first + 8 * half + 8, :]
        parts += decode_words(own, scales[4 * half : 4 * half + 4])
    return pltpu.bitcast(jnp.concatenate(parts, 0), jnp.bfloat16)


_PLANES = [(0, 1), (1, 4), (1, 7), (2, 1), (3, 4), (3, 7)]  # group of a chunk, shift
_USED = (0, 0, 1, 2, 3, 3, 4, 5)  # the plane of each 16 inputs


def _spread(ref: Any, row: int, interpret: Any) -> jax.Array:
    """A row of `ref` in all eight sublanes."""
    if interpret:
        return jnp.broadcast_to(ref[row : row + 1, :], (8, ref.shape[1]))
    return ref[pl.ds(row, 8, stride=0), :]  # costs the load only, no vector operation


def _with_scales(scales: Any, columns: Any, first: Any, count: int, use: Callable) -> jax.Array:
    """use(planes): `count` chunks of `scales` from `first` on, at every shift that is needed."""
    size = columns.size

    def run(rows, *planes):
        if first is None:
            own = scales[:, columns]
        else:
            for row in range(count):
                rows[row : row + 1, :] = scales[pl.ds(first + row, 1), columns]
            own = rows[...]
        for plane, (group, shift) in zip(planes, _PLANES, strict=True):
            plane[...] = _scale(own, group, shift)
        return use(planes)

    height = scales.shape[0] if first is None else -(-count // 8) * 8
    one = pltpu.VMEM((height, size), jnp.int32)
    return pl.run_scoped(run, one, *[one for _ in _PLANES])


def _chunk_weight(words: Any, planes: Sequence[Any], chunk: int, interpret: Any) -> jax.Array:
    spread = [_spread(plane, chunk, interpret) for plane in planes]
    return _decode_chunk(words, chunk * 16, [spread[i] for i in _USED])


def times_packed(
    x: jax.Array, words: Any, scales: Any, interpret: Any, first: Any = None
) -> jax.Array:
    """[M, K] x ([K / 8, N] words, [chunks, N] scales) -> [M, N] float32.

    first: the chunk of `scales` at which K starts, None if K has all.
    """
    num_chunks, num_columns = x.shape[1] // CHUNK, words.shape[1]

    def strip(columns):
        def use(planes):
            own = words.at[:, columns]
            total = jnp.zeros((x.shape[0], columns.size), jnp.float32)
            for chunk in range(num_chunks):
                weight = _chunk_weight(own, planes, chunk, interpret)
                total += product(x[:, chunk * CHUNK : (chunk + 1) * CHUNK], weight, NN)
            return total * UNDOUBLE

        return _with_scales(scales, columns, first, num_chunks, use)

    strips = [
        strip(pl.ds(start, min(STRIP, num_columns - start)))
        for start in range(0, num_columns, STRIP)
    ]
    return jnp.concatenate(strips, 1)


def times_packed_transposed(
    x: jax.Array, words: Any, scales: Any, interpret: Any, first: Any
) -> jax.Array:
    """[M, N] x ([columns / 8, N] words, [chunks, N] scales) -> [M, columns] float32.

    first: the chunk of `scales` at which the columns start.
    """
    num_chunks = words.shape[0] // 16

    def use(planes):
        columns = [
            product(x, _chunk_weight(words, planes, chunk, interpret), NT)
            for chunk in range(num_chunks)
        ]
        return jnp.concatenate(columns, 1) * UNDOUBLE

    return _with_scales(scales, pl.ds(0, words.shape[1]), first, num_chunks, use)


def plan(pass_name: str, num_rows: int, experts: Experts, dtype: jnp.dtype) -> dict[str, int]:
    num_groups, words, inner = experts.w1.words.shape
    shape = {'M': num_rows, 'E': num_groups, 'L': 8 * words, 'F': inner}
    # Long strips of columns hide the first fetch, where sums of few rows leave room for them.
    small = default_rows(num_rows, num_groups, dtype) <= 128
    default = {
        'rows': default_rows(num_rows, num_groups, dtype),
        'inner': 1536 if small else 512,
        'width': 1792 if small else 896,
    }
    return tiles_for('grouped_mlp', f'{pass_name}_mxfp4', shape, str(jnp.dtype(dtype)), default)


def forward(
    x: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    activation: GatedActivation,
    *,
    keep: bool,
    interpret: bool,
    tiles: dict[str, int] | None = None,
    table: Table | None = None,
) -> tuple[jax.Array, Kept | None]:
    """As `dense_kernels.forward`, for experts in `Mxfp4Tiles`."""
    w1, w3, w2 = experts
    tiles = tiles or plan('forward', x.shape[0], experts, x.dtype)
    visits = visits_by_tile(group_sizes, x.shape[0], tiles['rows'])
    shared = {
        'rows': tiles['rows'],
        'table': table or Known(visits.tile.shape[0]),
        'interpret': interpret,
    }
    inner, width = w1.words.shape[2], w2.words.shape[2]

    def gate_up(values, weights, _):
        a, b = (times_packed(values[0], *w, interpret) for w in (weights[:2], weights[2:]))
        hidden = activation(a, b)
        return (hidden, a, b) if keep else (hidden,)

    hidden, *kept = over_rows(
        gate_up,
        visits,
        whole=(x,),
        weights=[Weight(part, 2) for part in (*w1, *w3)],
        num_products=2,
        num_columns=inner,
        outs=[x.dtype] * (3 if keep else 1),
        columns=column_tile(inner, tiles['inner']),
        name='grouped_gate_up_mxfp4',
        **shared,
    )
    (y,) = over_rows(
        lambda values, weights, _: (times_packed(values[0], *weights, interpret),),
        visits,
        whole=(hidden,),
        weights=[Weight(part, 2) for part in w2],
        num_products=1,
        num_columns=width,
        outs=[x.dtype],
        columns=column_tile(width, tiles['width']),
        name='grouped_down_mxfp4',
        **shared,
    )
    return y, Kept(*kept) if keep else None


def backward(
    experts: Experts,
    group_sizes: jax.Array,
    kept: Kept,
    dy: jax.Array,
    activation: GatedActivation,
    *,
    interpret: bool,
    tiles: dict[str, int] | None = None,
    table: Table | None = None,
) -> jax.Array:
    """dx [M, L]; packed codes have no gradient."""
    w1, w3, w2 = experts
    tiles = tiles or plan('backward', dy.shape[0], experts, dy.dtype)
    visits = visits_by_tile(group_sizes, dy.shape[0], tiles['rows'])
    shared = {
        'rows': tiles['rows'],
        'table': table or Known(visits.tile.shape[0]),
        'interpret': interpret,
    }
    inner, width = w1.words.shape[2], w2.words.shape[2]

    def block(weight):
        return [Weight(weight.words, 1, 8), Weight(weight.scales, None)]

    def hidden_gradient(values, weights, column):
        dy, a, b = values
        first = column * (a.shape[1] // CHUNK)
        d_hidden = times_packed_transposed(dy, *weights, interpret, first)
        _, vjp = jax.vjp(activation, a.astype(jnp.float32), b.astype(jnp.float32))
        return vjp(d_hidden)

    da, db = over_rows(
        hidden_gradient,
        visits,
        whole=(dy,),
        parts=kept,
        weights=block(w2),
        num_products=1,
        num_columns=inner,
        outs=[dy.dtype] * 2,
        columns=column_tile(inner, tiles['inner']),
        name='grouped_hidden_gradient_mxfp4',
        **shared,
    )

    def input_gradient(values, weights, column):
        first = column * (weights[0].shape[0] * 8 // CHUNK)
        pairs = zip(values, (weights[:2], weights[2:]), strict=True)
        parts = [times_packed_transposed(x, *w, interpret, first) for x, w in pairs]
        return (parts[0] + parts[1],)

    (dx,) = over_rows(
        input_gradient,
        visits,
        whole=(da, db),
        weights=block(w1) + block(w3),
        num_products=2,
        num_columns=width,
        outs=[dy.dtype],
        columns=column_tile(width, tiles['width']),
        name='grouped_input_gradient_mxfp4',
        **shared,
    )
    return dx
