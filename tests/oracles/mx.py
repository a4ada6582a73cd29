"""MX rounding in float64 NumPy: a table of all magnitudes, and the nearest of them."""

from __future__ import annotations

import math

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
    ][:-1]  # the last code is NaN
)
SMALLEST = 2.0**-126  # of normal float32: what is below counts as zero


def exponent_of(largest, magnitudes, rule, most=127):
    """e of the scale 2^e for a group whose largest magnitude is `largest`."""
    if largest == 0:
        return -127
    if rule == 'ocp_floor':
        exponent = math.frexp(largest)[1] - math.frexp(magnitudes[-1])[1]
    else:
        exponent = -200
        while magnitudes[-1] * 2.0**exponent < largest:
            exponent += 1
    return min(max(exponent, -127), most)


def round_group(x, magnitudes, rule, most=127):
    """Exponent, codes (sign in the bit above the magnitudes') and values of one group of 32."""
    x = np.asarray(x, np.float64)
    assert x.shape == (32,)
    size = np.where(np.abs(x) < SMALLEST, 0, np.abs(x))
    exponent = exponent_of(size.max(), magnitudes, rule, most)
    scaled = size / 2.0**exponent
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = np.searchsorted(middle, scaled, side='left')  # how many middles are below
    tie = (below < len(middle)) & (scaled == middle[np.minimum(below, len(middle) - 1)])
    codes = below + (tie & (below % 2 == 1))
    values = magnitudes[codes] * 2.0**exponent
    values = np.where(values < SMALLEST, 0, values)
    return (
        exponent,
        codes + np.where(np.signbit(x), len(magnitudes) + len(magnitudes) % 2, 0),
        np.where(np.signbit(x), -values, values),
    )


def rounded(x, magnitudes, rule, most=127):
    """[..., n] values."""
    groups = np.asarray(x, np.float64).reshape(-1, 32)
    found = [round_group(group, magnitudes, rule, most)[2] for group in groups]
    return np.reshape(found, np.shape(x))
