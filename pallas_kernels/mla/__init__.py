"""Softmax attention of MLA: packed documents in training, a paged latent cache in decoding."""

from pallas_kernels.mla.api import causal_attention
from pallas_kernels.mla.paged import page_width, paged_decode

__all__ = ['causal_attention', 'page_width', 'paged_decode']
