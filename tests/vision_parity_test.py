"""Do images through a converted release give what mlx-vlm gives, which nobody here wrote?

The tower and projector are held to 1e-4. Attention residuals and near-ties of the router amplify
the last bit of an activation, so logits have bounds for the worst and the typical position, as in
`oracle_parity_test`: narrow ones for two layers without a router.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from k3jax.convert.to_orbax import convert
from k3jax.model.kimi import forward
from k3jax.model.vision import MediaInputs, media_of, media_rows, mm_projector, vision_tower
from k3jax.serve.load import open_model
from tests import release

ROOT = pathlib.Path(__file__).parents[1]
EPS = 2**-7  # what mlx-vlm takes; here it comes with config.json
MEDIA_ID = 250
# Merged rows and columns: even and odd, odd and even; a patch of each corner; several; video.
CASES = {
    'even_odd': [(1, 4, 6)],
    'odd_even': [(1, 10, 8)],
    'table_size': [(1, 8, 8)],
    'smallest': [(1, 2, 2)],
    'three_images': [(1, 4, 6), (1, 6, 2), (1, 10, 8)],
    'video_chunk': [(4, 4, 6)],
    'short_chunk': [(3, 4, 4), (1, 4, 4)],
}
PATCHES, ROWS = 128, 32  # all cases in one shape
PARITY = 1e-4
LOGITS = {9: (3e-3, 3e-4), 2: (5e-4, 5e-5)}  # by layers: at the worst position, at the median


def _release(num_layers):
    config = release.k3_bf16()
    config['vision_config']['norm_eps'] = EPS
    if num_layers == 2:
        layers = {'kda_layers': [1], 'full_attn_layers': [2]}
        config['text_config']['linear_attn_config'] |= layers
        config['text_config'] |= {'num_hidden_layers': 2, 'first_k_dense_replace': 2}
    return config


def _request():
    """Pixels, grids and tokens by case: text, each medium in its place, text."""
    rng, found = np.random.default_rng(3), {'eps': np.float64(EPS)}
    for name, grids in CASES.items():
        count = sum(t * h * w for t, h, w in grids)
        tokens = [rng.integers(0, 240, 3)]
        for _, h, w in grids:
            tokens += [np.full(h * w // 4, MEDIA_ID), rng.integers(0, 240, 2)]
        found[f'{name}/pixels'] = rng.uniform(-1, 1, (count, 3, 14, 14)).astype(np.float32)
        found[f'{name}/grids'] = np.array(grids)
        found[f'{name}/tokens'] = np.concatenate(tokens).astype(np.int32)
    return found


@pytest.mark.oracle
@pytest.mark.parametrize('num_layers', LOGITS)
def test_images_give_the_rows_and_logits_of_mlx_vlm(tmp_path, num_layers):
    if not importlib.util.find_spec('mlx') or not importlib.util.find_spec('mlx_vlm'):
        pytest.skip("mlx-vlm is not installed (pip install -e '.[oracle]'): PARITY IS NOT TESTED")
    folder = release.write_release(tmp_path / 'release', _release(num_layers))
    request = _request()
    np.savez(tmp_path / 'request.npz', **request)
    arguments = folder, tmp_path / 'request.npz', tmp_path / 'mlx.npz'
    done = subprocess.run(
        [sys.executable, '-m', 'tests.oracles.mlx_vision', *map(str, arguments)],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = np.load(tmp_path / 'mlx.npz')
    convert(folder, tmp_path / 'converted')
    loaded = open_model(str(tmp_path / 'converted'), 'float32')
    model, params = loaded.model, loaded.params
    vision = model.config.vision
    assert vision.norm_eps == EPS

    @jax.jit
    def see(pixels, media):
        corners = vision_tower(params['vision_tower'], pixels, media, vision, np.float32)
        return corners, mm_projector(params['mm_projector'], corners, vision)

    @jax.jit
    def answer(tokens, segment_ids, inputs):
        rows = media_rows(params, inputs, model.config, model.run)
        return forward(model, params, tokens, segment_ids, rows)

    length = max(len(request[f'{name}/tokens']) for name in CASES)
    for name, grids in CASES.items():
        pixels, tokens = request[f'{name}/pixels'], request[f'{name}/tokens']
        padded = np.pad(pixels, ((0, PATCHES - len(pixels)), (0, 0), (0, 0), (0, 0)))
        media = media_of(grids, PATCHES, ROWS)
        corners, rows = see(padded, media)
        want = wanted[f'{name}/rows']
        worst = np.abs(corners[: len(want)] - wanted[f'{name}/corners']).max()
        worst_row = np.abs(rows[: len(want)] - want).max()
        missing = length - len(tokens)
        ids = np.pad(np.ones_like(tokens), (0, missing))[None]
        inputs = MediaInputs(padded[None], jax.tree.map(lambda x: x[None], media))
        logits = np.asarray(answer(np.pad(tokens, (0, missing))[None], ids, inputs))[0]
        by_position = np.abs(logits[: len(tokens)] - wanted[f'{name}/logits']).max(axis=-1)
        typical = np.median(by_position)
        print(
            f'{name}: corners {worst:.1e}, rows {worst_row:.1e}, logits {by_position.max():.1e} '
            f'at worst, median {typical:.1e}'
        )
        assert worst <= PARITY and worst_row <= PARITY
        bounds = LOGITS[num_layers]
        assert by_position.max() <= bounds[0] and typical <= bounds[1]
