"""In what order the kernels read four-bit weights: the release's bits, moved at load time.

64 rows of the input axis and one output are eight codes in each of eight 32-bit words. Bit
positions in both 16-bit halves of a word (low half: even row; the magnitudes are E2M1's e, e, m):

    rows 16..31 of 64: sign 14, magnitude 11..9        rows 0..15:  sign 15, magnitude 8..6
    rows 32..47:       sign 12, magnitude 5..3         rows 48..63: sign 13, magnitude 2..0

so that a mask, and at most two shifts, leave two bfloat16 numbers in a word: README, "MXFP4".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_mlp.mxfp4 import GROUP, Mxfp4, decode_mxfp4

CHUNK = 128  # inputs whose four scales share a word
_SLOTS = ((15, 6), (14, 9), (12, 3), (13, 0))  # sign bit and lowest magnitude bit of 16 rows


class Mxfp4Tiles(NamedTuple):
    """words: [..., in / 8, out] int32. scales: [..., in / 128, out] int32, four bytes each."""

    words: jax.Array
    scales: jax.Array


def tile_mxfp4(weight: Mxfp4) -> Mxfp4Tiles:
    """The same bits in the kernels' order; `untile_mxfp4` is the inverse.

    Raises:
      ValueError: the input axis is not a multiple of 128.
    """
    return Mxfp4Tiles(tile_codes(weight.packed), tile_scales(weight.scale))


def tile_codes(packed: jax.Array) -> jax.Array:
    """The words of `Mxfp4Tiles`, of codes [..., out, in / 2] uint8. Raises as `tile_mxfp4`."""
    *lead, outputs, half = packed.shape
    if 2 * half % CHUNK:
        raise ValueError(
            f'tile_mxfp4: the input axis has {2 * half} weights, wanted a multiple of {CHUNK}'
        )
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.uint32)
    # [..., out, blocks of 64, slot, word, half]
    codes = codes.reshape(*lead, outputs, -1, 4, 8, 2)
    words = jnp.zeros((*lead, outputs, codes.shape[-4], 8), jnp.uint32)
    for slot, (sign, low) in enumerate(_SLOTS):
        for part in range(2):
            code = codes[..., slot, :, part]
            words |= ((code >> 3) << (sign + 16 * part)) | ((code & 7) << (low + 16 * part))
    words = words.reshape(*lead, outputs, -1)
    return jnp.swapaxes(lax.bitcast_convert_type(words, jnp.int32), -1, -2)


def tile_scales(scale: jax.Array) -> jax.Array:
    """The scales of `Mxfp4Tiles`, of [..., out, in / 32] uint8, in a multiple of four."""
    fours = scale.reshape(*scale.shape[:-1], -1, 4)
    return jnp.swapaxes(lax.bitcast_convert_type(fours, jnp.int32), -1, -2)


def untile_mxfp4(weight: Mxfp4Tiles) -> Mxfp4:
    """The release's order, bit for bit what `tile_mxfp4` was given."""
    words = jnp.swapaxes(lax.bitcast_convert_type(weight.words, jnp.uint32), -1, -2)
    *lead, outputs, count = words.shape
    words = words.reshape(*lead, outputs, count // 8, 8)
    slots = [
        jnp.stack(
            [
                ((words >> (sign + 16 * part)) & 1) << 3 | ((words >> (low + 16 * part)) & 7)
                for part in range(2)
            ],
            axis=-1,
        )
        for sign, low in _SLOTS
    ]
    codes = jnp.stack(slots, axis=-3).reshape(*lead, outputs, -1, 2).astype(jnp.uint8)
    scale = lax.bitcast_convert_type(jnp.swapaxes(weight.scales, -1, -2), jnp.uint8)
    return Mxfp4(codes[..., 0] | codes[..., 1] << 4, scale.reshape(*lead, outputs, -1))


def decode_tiles(weight: Mxfp4Tiles, dtype: jnp.dtype = jnp.bfloat16) -> jax.Array:
    """[..., out, in] weights, as `decode_mxfp4`."""
    return decode_mxfp4(untile_mxfp4(weight), dtype)


assert CHUNK == 4 * GROUP
