"""Kimi Delta Attention: chunked training form, token recurrence, gate, and decoding from pools."""

from pallas_kernels.kda.api import kda
from pallas_kernels.kda.decode import (
    Conv,
    Projected,
    kda_decode,
    kda_decode_fused,
    kda_decode_window,
)
from pallas_kernels.kda.gate import Gate, kda_gate
from pallas_kernels.kda.reference import kda_decode_step, l2_normalize

__all__ = [
    'Conv',
    'Gate',
    'Projected',
    'kda',
    'kda_decode',
    'kda_decode_fused',
    'kda_decode_step',
    'kda_decode_window',
    'kda_gate',
    'l2_normalize',
]
