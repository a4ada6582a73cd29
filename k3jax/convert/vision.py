"""The vision tower and projector: which tensor of the release is which leaf.

`{E}` counts blocks, whose tensors are stacked on the leaf's first axis. K2.5 has the biases, and a
norm before the projector in place of the one after it.
"""

from k3jax.convert.rules import Rule
from k3jax.convert.transforms import JOIN_PATCH

TOWER, BLOCK, BLOCK_LEAF = (
    'vision_tower.',
    'vision_tower.encoder.blocks.{E}.',
    'vision_tower/blocks/',
)

VISION = (
    Rule(TOWER + 'patch_embed.proj.weight', 'vision_tower/patch_embed/proj/weight', JOIN_PATCH),
    Rule(TOWER + 'patch_embed.proj.bias', 'vision_tower/patch_embed/proj/bias'),
    Rule(TOWER + 'patch_embed.pos_emb.weight', 'vision_tower/patch_embed/pos_emb'),
    Rule(BLOCK + 'norm0.weight', BLOCK_LEAF + 'norm0/weight'),
    Rule(BLOCK + 'norm0.bias', BLOCK_LEAF + 'norm0/bias'),
    Rule(BLOCK + 'norm1.weight', BLOCK_LEAF + 'norm1/weight'),
    Rule(BLOCK + 'norm1.bias', BLOCK_LEAF + 'norm1/bias'),
    Rule(BLOCK + 'wqkv.weight', BLOCK_LEAF + 'wqkv/weight'),
    Rule(BLOCK + 'wqkv.bias', BLOCK_LEAF + 'wqkv/bias'),
    Rule(BLOCK + 'wo.weight', BLOCK_LEAF + 'wo/weight'),
    Rule(BLOCK + 'wo.bias', BLOCK_LEAF + 'wo/bias'),
    Rule(BLOCK + 'mlp.fc0.weight', BLOCK_LEAF + 'mlp/fc0/weight'),
    Rule(BLOCK + 'mlp.fc0.bias', BLOCK_LEAF + 'mlp/fc0/bias'),
    Rule(BLOCK + 'mlp.fc1.weight', BLOCK_LEAF + 'mlp/fc1/weight'),
    Rule(BLOCK + 'mlp.fc1.bias', BLOCK_LEAF + 'mlp/fc1/bias'),
    Rule(TOWER + 'encoder.final_layernorm.weight', 'vision_tower/final_layernorm/weight'),
    Rule(TOWER + 'encoder.final_layernorm.bias', 'vision_tower/final_layernorm/bias'),
    Rule('mm_projector.pre_norm.weight', 'mm_projector/pre_norm/weight'),
    Rule('mm_projector.pre_norm.bias', 'mm_projector/pre_norm/bias'),
    Rule('mm_projector.proj.0.weight', 'mm_projector/proj_0/weight'),
    Rule('mm_projector.proj.0.bias', 'mm_projector/proj_0/bias'),
    Rule('mm_projector.proj.2.weight', 'mm_projector/proj_2/weight'),
    Rule('mm_projector.proj.2.bias', 'mm_projector/proj_2/bias'),
    Rule('mm_projector.post_norm.weight', 'mm_projector/post_norm/weight'),
)
PREFIXES = (TOWER, 'mm_projector.')
