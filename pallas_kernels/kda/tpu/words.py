"""How matrices wait between matmuls: rounded to the operand type, as 32-bit words.

Two bfloat16 rows share a word, so a mask is one AND and the union of disjoint parts is one OR on
half the registers, and neither lets an inf or NaN of a masked entry through. With float32 operands
a word is an element and the same code holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

CHUNK = 128  # tokens; the width of a matrix unit
PACKED = 16  # rows of the diagonal blocks that the inverse solves packed side by side


def rows_per_word(dtype: jnp.dtype) -> int:
    return 4 // jnp.dtype(dtype).itemsize


def pack(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 [n, w] -> int32 words [n / rows_per_word, w]."""
    return pltpu.bitcast(x.astype(dtype), jnp.int32)


def matrix(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The operand [n, w] that words hold."""
    return pltpu.bitcast(words, dtype)


def numbers(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The operand as float32, exactly as the matmul sees it."""
    return pltpu.bitcast(words, dtype).astype(jnp.float32)


def stack(parts: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]


def rows(words: jax.Array, start: int, stop: int, dtype: jnp.dtype) -> jax.Array:
    """Words of rows start to stop of the operand."""
    size = rows_per_word(dtype)
    return words[start // size : stop // size]


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """a and b contracted over one axis each, summed in float32; float32 operands stay whole."""
    # On TPU a float32 product at default precision is a single bfloat16 pass.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, precision, jnp.float32)


def high_half(x: jax.Array) -> jax.Array:
    """Float32 cut to its upper 16 bits: exact in bfloat16, and x minus it is exact in float32."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _mask_words(mask: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """Boolean [n, w] -> int32 words of all ones where it holds."""
    ones = np.where(mask, np.uint32(0xFFFFFFFF), np.uint32(0))
    if rows_per_word(dtype) == 1:
        return ones.view(np.int32)
    return ((ones[1::2] & np.uint32(0xFFFF0000)) | (ones[0::2] & np.uint32(0xFFFF))).view(np.int32)


def _one_words(mask: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """Boolean [n, w] -> words of the number 1 where it holds."""
    one = np.float32(1).view(np.int32)
    return _mask_words(mask, dtype) & (one if rows_per_word(dtype) == 1 else one | (one >> 16))


def constant_words(dtype: jnp.dtype) -> tuple[list[str], np.ndarray]:
    """Names and int32 words [sum of rows, C] of the masks that the kernels take as an input.

    strict, causal, eye: [C, C]. level_l: row in a right block of 2^l, column in the left block
    before it. blocks: both in one diagonal block of 16. pairs: [16, C], the diagonal blocks side by
    side, true within pairs of rows. unit: [16, C], their identities, as numbers.
    """
    t, s = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None]
    masks = {'strict': t > s, 'causal': t >= s, 'eye': t == s, 'blocks': t // PACKED == s // PACKED}
    for level in range(CHUNK.bit_length() - 1):
        masks[f'level_{level}'] = ((t >> level) % 2 == 1) & ((t >> level) == (s >> level) + 1)
    local = np.arange(PACKED)[:, None]
    masks['pairs'] = (local ^ (s % PACKED)) < 2
    parts = [_mask_words(mask, dtype) for mask in masks.values()]
    parts.append(_one_words(local == s % PACKED, dtype))
    return [*masks, 'unit'], np.concatenate(parts)


def split_constants(words: jax.Array, dtype: jnp.dtype) -> dict[str, jax.Array]:
    names, _ = constant_words(dtype)
    parts, start = {}, 0
    for name in names:
        size = (PACKED if name in ('pairs', 'unit') else CHUNK) // rows_per_word(dtype)
        parts[name] = words[start : start + size]
        start += size
    return parts


def masked_words(tiles: list[jax.Array], mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Words of the matrix whose rows come in tiles, where `mask` (words) holds.

    Packed tile by tile: the compiler lays out a tall float32 matrix that is packed whole in a way
    that costs the matmuls which read it.
    """
    out, start = [], 0
    for tile in tiles:
        stop = start + tile.shape[0]
        out.append(pack(tile, dtype) & rows(mask, start, stop, dtype))
        start = stop
    return stack(out)


def keep(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Float32 x where the int32 `bits` are ones, 0 where they are zeros."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & bits, jnp.float32)


def mask_words(mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`_mask_words` inside a kernel."""
    if rows_per_word(dtype) == 1:
        return jnp.where(mask, jnp.int32(-1), jnp.int32(0))
    # The lowest exponent bit of 1.0 spread over its half of the word.
    bit = (pack(jnp.where(mask, 1.0, 0.0), dtype) >> 7) & jnp.int32(0x00010001)
    return (bit << 16) - bit
