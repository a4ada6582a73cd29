"""How far two results lie apart: relative Frobenius error of each named array."""

from __future__ import annotations

import numpy as np

NOTHING = 1e-30  # a true value with a smaller norm counts as zero


def relative_error(got, want) -> float:
    """|got - want| / |want|, in float64; |got| where `want` is zero."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f'shape {got.shape}, wanted {want.shape}'
    norm = np.linalg.norm(want)
    if norm < NOTHING:
        return 0.0 if np.abs(got).max(initial=0.0) < NOTHING else float('inf')
    return float(np.linalg.norm(got - want) / norm)


def assert_close(got: dict, want: dict, tolerance: float) -> None:
    """Every array of `got` is finite and within `tolerance` of its namesake."""
    assert got.keys() == want.keys()
    errors = {}
    for name in want:
        assert np.isfinite(np.asarray(got[name], np.float64)).all(), f'{name} is not finite'
        errors[name] = relative_error(got[name], want[name])
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not bad, f'relative errors above {tolerance:g}: {bad} (all: {errors})'
