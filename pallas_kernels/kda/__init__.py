"""Kimi Delta Attention: chunked training form, token recurrence, gate and decode step."""

from pallas_kernels.kda.api import kda
from pallas_kernels.kda.gate import Gate, kda_gate
from pallas_kernels.kda.reference import kda_decode_step, l2_normalize

__all__ = ['Gate', 'kda', 'kda_decode_step', 'kda_gate', 'l2_normalize']
