"""What the tests of routed experts compute with."""

import numpy as np

from pallas_kernels.grouped_mlp import Experts, Mxfp4, SiTU, SwiGLU, decode_mxfp4

NUM_ROWS, WIDTH, INNER, NUM_EXPERTS = 40, 12, 20, 5
ACTIVATIONS = {'situ': SiTU(), 'swiglu': SwiGLU()}


def random_arguments(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    wide = rng.standard_normal((2, NUM_EXPERTS, INNER, WIDTH)).astype(np.float32)
    w2 = rng.standard_normal((NUM_EXPERTS, WIDTH, INNER)).astype(np.float32)
    dy = rng.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    return x, Experts(wide[0], wide[1], w2), dy


def random_mxfp4(rng, *shape):
    *lead, inputs = shape
    packed = rng.integers(0, 256, (*lead, inputs // 2)).astype(np.uint8)
    return Mxfp4(packed, rng.integers(118, 128, (*lead, inputs // 32)).astype(np.uint8))


def packed_arguments(seed=5, num_experts=3, width=128, inner=256):
    """Packed experts, and the arrays that they stand for."""
    rng = np.random.default_rng(seed)
    shapes = ((inner, width), (inner, width), (width, inner))
    packed = Experts(*(random_mxfp4(rng, num_experts, *s) for s in shapes))
    return packed, Experts(*(decode_mxfp4(w) for w in packed)), rng
