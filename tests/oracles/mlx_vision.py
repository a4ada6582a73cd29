"""What mlx-vlm makes of images for a release folder: float32 on the CPU, one file.

    python -m tests.oracles.mlx_vision RELEASE_DIR REQUEST.npz OUT.npz

The request holds `eps`, of the tower's norms, and for each case `NAME/pixels` [P, 3, size, size],
`NAME/grids` [M, 3] and `NAME/tokens` [T]. The output holds `NAME/corners` [N, 4, D], `NAME/rows`
[N, text width] and `NAME/logits` [T, Z].
"""

from __future__ import annotations

import json
import pathlib
import sys

import mlx.core as mx
import numpy as np
from mlx_vlm.models.kimi_k3 import kimi_k3
from mlx_vlm.models.kimi_k3.config import ModelConfig, TextConfig, VisionConfig


def _model(folder: pathlib.Path, eps: float) -> kimi_k3.Model:
    config = json.loads((folder / 'config.json').read_text())
    model = kimi_k3.Model(
        ModelConfig(
            text_config=TextConfig.from_dict(config['text_config']),
            vision_config=VisionConfig.from_dict(config['vision_config']),
            media_placeholder_token_id=config['media_placeholder_token_id'],
        )
    )
    weights = {}
    for shard in sorted(folder.glob('*.safetensors')):
        weights |= mx.load(str(shard))
    weights = model.vision_tower.sanitize(model.language_model.sanitize(weights))
    model.load_weights(list(weights.items()), strict=True)
    model.set_dtype(mx.float32)
    encoder = model.vision_tower.encoder
    for block in encoder.blocks:
        block.norm0.eps = block.norm1.eps = eps
    encoder.final_layernorm.eps = eps
    return model


def main(release: str, request_file: str, output: str) -> None:
    mx.set_default_device(mx.cpu)
    request = np.load(request_file)
    model = _model(pathlib.Path(release), float(request['eps']))
    results = {}
    for name in sorted({key.partition('/')[0] for key in request.files} - {'eps'}):
        pixels, grids, tokens = (request[f'{name}/{x}'] for x in ('pixels', 'grids', 'tokens'))
        grids = grids.tolist()
        corners = model.vision_tower(mx.array(pixels).transpose(0, 2, 3, 1), grid_thws=grids)
        rows = model.mm_projector(corners)
        out = model(mx.array(tokens)[None], mx.array(pixels), grid_thws=grids)
        logits = getattr(out, 'logits', out)[0].astype(mx.float32)
        for what, value in (('corners', corners), ('rows', rows), ('logits', logits)):
            results[f'{name}/{what}'] = np.array(value)
    np.savez(output, **results)


if __name__ == '__main__':
    main(*sys.argv[1:])
