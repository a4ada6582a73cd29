"""Softmax attention of MLA: packed documents in training, a paged latent cache in decoding."""

from pallas_kernels.mla.api import Part, attend_part, causal_attention, merged, part_gradients
from pallas_kernels.mla.paged import page_width, paged_decode

__all__ = [
    'Part',
    'attend_part',
    'causal_attention',
    'merged',
    'page_width',
    'paged_decode',
    'part_gradients',
]
