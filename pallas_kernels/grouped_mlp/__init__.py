"""Routed experts: gated MLPs over ragged groups of rows."""

from pallas_kernels.grouped_mlp.activations import GatedActivation, SiTU, SwiGLU
from pallas_kernels.grouped_mlp.api import grouped_mlp
from pallas_kernels.grouped_mlp.experts import Experts
from pallas_kernels.grouped_mlp.mxfp4 import Mxfp4, decode_mxfp4
from pallas_kernels.grouped_mlp.mxfp4_tiles import (
    CHUNK,
    Mxfp4Tiles,
    tile_codes,
    tile_mxfp4,
    tile_scales,
    untile_mxfp4,
)
from pallas_kernels.grouped_mlp.mxfp8 import Mxfp8, fake_quantise_mxfp8, round_rows
from pallas_kernels.grouped_mlp.quantise import fake_quantise_mxfp4, quantise_mxfp4
from pallas_kernels.grouped_mlp.token import MAX_TOKENS, token_mlp

__all__ = [
    'CHUNK',
    'MAX_TOKENS',
    'Experts',
    'GatedActivation',
    'Mxfp4',
    'Mxfp4Tiles',
    'Mxfp8',
    'SiTU',
    'SwiGLU',
    'decode_mxfp4',
    'fake_quantise_mxfp4',
    'fake_quantise_mxfp8',
    'grouped_mlp',
    'quantise_mxfp4',
    'round_rows',
    'tile_codes',
    'tile_mxfp4',
    'tile_scales',
    'token_mlp',
    'untile_mxfp4',
]
