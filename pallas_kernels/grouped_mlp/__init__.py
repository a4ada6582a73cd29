"""Routed experts: gated MLPs over ragged groups of rows."""

from pallas_kernels.grouped_mlp.activations import GatedActivation, SiTU, SwiGLU
from pallas_kernels.grouped_mlp.api import Experts, grouped_mlp
from pallas_kernels.grouped_mlp.mxfp4 import Mxfp4, decode_mxfp4

__all__ = [
    'Experts',
    'GatedActivation',
    'Mxfp4',
    'SiTU',
    'SwiGLU',
    'decode_mxfp4',
    'grouped_mlp',
]
