"""The TPU kernel of chunked KDA, forward and backward."""

from pallas_kernels.kda.tpu.call import tpu_kda, why_unsupported

__all__ = ['tpu_kda', 'why_unsupported']
