"""Attention residual: what a sublayer reads of earlier blocks, normalised."""

from pallas_kernels.attn_res.api import attn_res
from pallas_kernels.attn_res.reference import Flag, attn_res_mix

__all__ = ['Flag', 'attn_res', 'attn_res_mix']
