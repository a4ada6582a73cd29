"""Which part of the model an operation of a compiled program belongs to."""

from __future__ import annotations

import re

# First match wins; op names carry the Flax module path, the named scopes and the kernels' names.
SCOPES = (
    ('gather_parameters', re.compile(r'gather_parameters')),
    ('vision', re.compile(r'vision_tower|mm_projector')),
    ('attn_res', re.compile(r'attn_res')),
    ('kda_mixer', re.compile(r'kda_mixer|/kda_|short_conv')),
    ('mla_mixer', re.compile(r'mla_mixer|/mla_')),
    ('block_sparse_moe', re.compile(r'block_sparse_moe|/grouped_|token_mlp')),
    ('mlp', re.compile(r'[/(]mlp[/)]')),
    ('loss', re.compile(r'[/(](loss|head)[/)]')),
    ('optimizer', re.compile(r'optimizer')),
    # What a scan over layers cuts out of stacked arrays and puts into them.
    ('layer_stack', re.compile(r'while/body/jit\(dynamic(_update)?_index_in_dim\)')),
)
OTHER = 'other'


def scope_of(op_name: str) -> str:
    """Which part of the model an operation belongs to."""
    path = re.sub(r'^(jit\([^()]*\)/)+', '/', op_name)  # the function's own name is no scope
    return next((name for name, pattern in SCOPES if pattern.search(path)), OTHER)
