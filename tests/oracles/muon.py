"""Muon's directions in float64 NumPy, matrix by matrix."""

from __future__ import annotations

import numpy as np

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(x, coefficients=COEFFICIENTS, steps=5):
    """A matrix of the same singular vectors and singular values near 1."""
    x = np.asarray(x, np.float64)
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    x = x / (np.sqrt((x**2).sum()) + 1e-7)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def direction(x, count, rows, update_rms=0.2):
    """Of x [..., rows, columns]: each of `count` times blocks of `rows` is a matrix of its own."""
    found = []
    for matrix in np.asarray(x).reshape(-1, *np.shape(x)[-2:]):
        start = 0
        for height in rows * count:
            block = matrix[start : start + height]
            found.append(update_rms * np.sqrt(max(block.shape)) * newton_schulz(block))
            start += height
    return np.concatenate(found).reshape(np.shape(x))
