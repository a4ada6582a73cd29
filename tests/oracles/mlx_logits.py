"""What mlx-lm makes of a release folder: float32 logits on the CPU, one file per kind of run.

    python -m tests.oracles.mlx_logits RELEASE_DIR REQUEST.json OUT.npz

The request: `{"prompts": {name: [ids]}, "decode": [names]}`. For each prompt the output holds
`prefill/NAME` [T, Z], all tokens at once, and where asked `decode/NAME`, one token at a time.
"""

from __future__ import annotations

import json
import pathlib
import sys

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model


def _numpy(logits: mx.array) -> np.ndarray:
    return np.array(logits[0].astype(mx.float32))


def main(release: str, request_file: str, output: str) -> None:
    mx.set_default_device(mx.cpu)
    request = json.loads(pathlib.Path(request_file).read_text())
    model, _ = load_model(pathlib.Path(release))
    model.set_dtype(mx.float32)
    results = {}
    for name, ids in request['prompts'].items():
        tokens = mx.array([ids])
        results[f'prefill/{name}'] = _numpy(model(tokens))
        if name in request['decode']:
            cache = model.make_cache()
            steps = [_numpy(model(tokens[:, t : t + 1], cache=cache)) for t in range(len(ids))]
            results[f'decode/{name}'] = np.concatenate(steps)
    np.savez(output, **results)


if __name__ == '__main__':
    main(*sys.argv[1:])
