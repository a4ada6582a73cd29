"""How a unit lower triangular matrix is inverted on the matrix unit, many heads at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kda.tpu.words import CHUNK, PACKED, dot, matrix, pack, rows, stack


def _diagonal_blocks(packed: jax.Array, masks: dict[str, jax.Array], dtype) -> jax.Array:
    """[16, C] blocks side by side -> [C, C] with the blocks on its diagonal."""
    blocks = masks['blocks']
    return stack([packed & rows(blocks, i, i + PACKED, dtype) for i in range(0, CHUNK, PACKED)])


def _small_blocks(negated: jax.Array, masks: dict[str, jax.Array], dtype) -> jax.Array:
    """Inverse of every 2 x 2 diagonal block, as [16, C]: 1 - N of the pair."""
    packed = None
    for i in range(0, CHUNK, PACKED):
        block = rows(negated, i, i + PACKED, dtype) & rows(masks['blocks'], i, i + PACKED, dtype)
        packed = block if packed is None else packed | block
    return (packed & masks['pairs']) | masks['unit']


def inverses(
    negated: list[jax.Array], masks: dict[str, jax.Array], dtype: jnp.dtype
) -> list[jax.Array]:
    """Inverses of I + N except their lower left quarter, one a head; all are words.

    Solved blocks double: where a and b are inverted already, the block below the diagonal is
    -b c a. Up to blocks of 16 the diagonal blocks lie side by side, so that a product streams 16
    rows, from there on only the rows of right blocks stream.

    Args:
      negated: [C, C] words of -N, N strictly lower triangular.
    """
    packed = [_small_blocks(n, masks, dtype) for n in negated]
    level = 1
    while 1 << level < PACKED:
        mask = masks[f'level_{level}']
        halves = [
            dot(matrix(t, dtype), matrix(n & mask, dtype))
            for t, n in zip(packed, negated, strict=True)
        ]
        packed = [
            t
            | pack(
                dot(
                    matrix(pack(half, dtype), dtype),
                    matrix(_diagonal_blocks(t, masks, dtype), dtype),
                ),
                dtype,
            )
            for t, half in zip(packed, halves, strict=True)
        ]
        level += 1
    solved = [_diagonal_blocks(t, masks, dtype) for t in packed]
    while 1 << level < CHUNK:
        size = 1 << level
        starts = range(0, CHUNK, 2 * size)
        mask = masks[f'level_{level}']
        right = [stack([rows(t, s + size, s + 2 * size, dtype) for s in starts]) for t in solved]
        halves = [
            dot(matrix(t, dtype), matrix(n & mask, dtype))
            for t, n in zip(right, negated, strict=True)
        ]
        below = [
            pack(dot(matrix(pack(half, dtype), dtype), matrix(t, dtype)), dtype)
            for half, t in zip(halves, solved, strict=True)
        ]
        solved = [
            stack(
                [
                    part
                    for i, s in enumerate(starts)
                    for part in (
                        rows(t, s, s + size, dtype),
                        rows(t, s + size, s + 2 * size, dtype)
                        | rows(d, i * size, (i + 1) * size, dtype),
                    )
                ]
            )
            for t, d in zip(solved, below, strict=True)
        ]
        level += 1
    return solved
