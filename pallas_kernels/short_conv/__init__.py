"""Depthwise causal convolution with SiLU."""

from pallas_kernels.short_conv.api import short_conv

__all__ = ['short_conv']
