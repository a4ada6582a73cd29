"""How the release's tensors become our leaves, and back: the transforms the rule tables name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from k3jax.convert.files import ConversionError
from k3jax.model.layout import GROUP

Shape = tuple[int, ...]

# The eight magnitudes of E2M1; the code's fourth bit is the sign.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E8M0_BIAS = 127
E8M0_NAN = 255
A_LOG_MULTIPLE = 128  # the release pads A_log to this


@dataclasses.dataclass(frozen=True)
class Transform:
    """The identity; base of the others."""

    name: str = 'identity'

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The shape of each source tensor, where the leaf (one expert's part) has `shape`."""
        return (shape,)

    def source_dtypes(self, dtype: str) -> tuple[str, ...]:
        """The dtype of each source tensor, where the leaf has `dtype`."""
        return (dtype,)

    def accepts(self, got: Shape, wanted: Shape) -> bool:
        """Whether a source tensor may have shape `got`."""
        return got == wanted

    def load(self, arrays: Sequence[np.ndarray], shape: Shape, where: str) -> np.ndarray:
        """The leaf of `shape` from its source tensors; `where` names the first in errors."""
        return arrays[0]

    def store(self, array: np.ndarray, source_shape: Shape) -> np.ndarray:
        """The source tensor of `source_shape` from the leaf: the inverse of `load`."""
        return array


@dataclasses.dataclass(frozen=True)
class Squeeze(Transform):
    """Drops the unit `axes` of the source."""

    name: str = 'squeeze'
    axes: Shape = (0,)

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        sizes = list(shape)
        for axis in self.axes:
            sizes.insert(axis, 1)
        return (tuple(sizes),)

    def load(self, arrays: Sequence[np.ndarray], shape: Shape, where: str) -> np.ndarray:
        return arrays[0].reshape(shape)

    def store(self, array: np.ndarray, source_shape: Shape) -> np.ndarray:
        return array.reshape(source_shape)


@dataclasses.dataclass(frozen=True)
class JoinPatch(Transform):
    """[out, 3, size, size] -> [out, 3 * size * size]."""

    name: str = 'join_patch'

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        size = math.isqrt(shape[1] // 3)
        return ((shape[0], 3, size, size),)

    def load(self, arrays: Sequence[np.ndarray], shape: Shape, where: str) -> np.ndarray:
        return arrays[0].reshape(shape)

    def store(self, array: np.ndarray, source_shape: Shape) -> np.ndarray:
        return array.reshape(source_shape)


@dataclasses.dataclass(frozen=True)
class TrimZeroPadding(Transform):
    """[H + padding] -> [H]; the padding must be exactly zero."""

    name: str = 'trim_zero_padding'

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return ((-(-shape[0] // A_LOG_MULTIPLE) * A_LOG_MULTIPLE,),)

    def accepts(self, got: Shape, wanted: Shape) -> bool:
        return len(got) == 1

    def load(self, arrays: Sequence[np.ndarray], shape: Shape, where: str) -> np.ndarray:
        padded = arrays[0]
        if padded.size < shape[0]:
            raise ConversionError(
                f'{where}: got {padded.size} values, wanted at least {shape[0]}, one a head'
            )
        tail = padded[shape[0] :]
        if tail.any():
            at = int(np.flatnonzero(tail)[0])
            raise ConversionError(
                f'{where}: got {tail[at]} at index {shape[0] + at}, wanted 0: the entries after '
                f'the first {shape[0]} are padding; the config has another number of heads, or '
                'the file is damaged'
            )
        return padded[: shape[0]]

    def store(self, array: np.ndarray, source_shape: Shape) -> np.ndarray:
        return np.pad(array, (0, source_shape[0] - array.shape[0]))


@functools.cache
def _mxfp4_table() -> np.ndarray:
    """[256 * 256] uint32: two bfloat16 weights for each scale byte (high) and code byte (low)."""
    codes = np.concatenate([E2M1, -E2M1])
    byte = np.arange(256)
    pairs = np.stack([codes[byte & 15], codes[byte >> 4]], axis=-1)  # low nibble: even column
    with np.errstate(over='ignore'):
        multiplier = np.exp2(np.arange(256, dtype=np.float64) - E8M0_BIAS)
        weights = (pairs[None] * multiplier[:, None, None]).astype(np.float32)
        weights = weights.astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(weights).view(np.uint32).reshape(-1)


def expand_mxfp4(packed: np.ndarray, scale: np.ndarray, where: str) -> np.ndarray:
    """The exact bfloat16 weights of MXFP4 codes.

    W[o, i] = E2M1(code[o, i]) * 2^(scale[o, i // 32] - 127)

    Args:
      packed: [out, in / 2] uint8, column 2j in the low nibble of byte j, 2j + 1 in the high one.
      scale: [out, in / 32] uint8 E8M0.
      where: the tensor's name, for errors.

    Returns:
      [out, in] bfloat16.

    Raises:
      ConversionError: a scale is NaN (255), or a weight leaves bfloat16's range.

    Source: OCP Microscaling Formats v1.0.
    """
    largest = int(scale.max(initial=0))
    if largest == E8M0_NAN:
        at = tuple(int(i) for i in np.argwhere(scale == E8M0_NAN)[0])
        raise ConversionError(
            f'{where}: its scale at {at} is 255, the E8M0 NaN; the file is damaged'
        )
    index = np.repeat(scale.astype(np.uint16) << 8, GROUP // 2, axis=1)
    index |= packed
    weights = _mxfp4_table()[index].view(ml_dtypes.bfloat16)
    # 6 * 2^126 is above the largest bfloat16; smaller scales cannot overflow.
    if largest >= E8M0_BIAS + 126 and not np.isfinite(weights.astype(np.float32)).all():
        raise ConversionError(
            f'{where}: a scale of {largest} takes a weight beyond bfloat16; keep the experts '
            'packed (--experts=mxfp4)'
        )
    return weights


@dataclasses.dataclass(frozen=True)
class ExpandMxfp4(Transform):
    """Packed codes [out, in/2] and scales [out, in/32] -> bfloat16 [out, in]; has no inverse."""

    name: str = 'expand_mxfp4'

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        out, inp = shape
        return (out, inp // 2), (out, inp // GROUP)

    def source_dtypes(self, dtype: str) -> tuple[str, ...]:
        return 'uint8', 'uint8'

    def load(self, arrays: Sequence[np.ndarray], shape: Shape, where: str) -> np.ndarray:
        return expand_mxfp4(*arrays, where)

    def store(self, array: np.ndarray, source_shape: Shape) -> np.ndarray:
        raise NotImplementedError('quantising to MXFP4 is not part of this converter')


IDENTITY = Transform()
SQUEEZE_RES_PROJ = Squeeze(axes=(0,))  # [1, D] -> [D]
SQUEEZE_CONV = Squeeze(axes=(1,))  # [P, 1, W] -> [P, W]
SQUEEZE_A_LOG = Squeeze(axes=(0, 1, 3))  # [1, 1, H, 1] -> [H]
JOIN_PATCH = JoinPatch()
TRIM_ZERO_PADDING = TrimZeroPadding()
EXPAND_MXFP4 = ExpandMxfp4()
