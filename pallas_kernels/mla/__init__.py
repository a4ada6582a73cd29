"""Causal softmax attention over packed documents, for the expanded heads of MLA."""

from pallas_kernels.mla.api import causal_attention

__all__ = ['causal_attention']
