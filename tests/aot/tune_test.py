"""The tuner: what it stores is what the kernels look up."""

import json

import jax
import jax.numpy as jnp
import pytest

from k3jax.aot import tune
from pallas_kernels.cases import find_case
from pallas_kernels.common import tiles
from pallas_kernels.kda import kda

CASES = [
    'attn_res/k3_4_snapshots_1_tokens/forward',
    'grouped_mlp/k3_14_experts_16_tokens_each/forward',
    'kda/k3_24_heads_1024_given_g/forward',
    'kda/plain_k3_24_heads_8_rows/decode',
    'mla/24_heads_8_sequences_8192_page_64/decode',
    'short_conv/k3_24_heads_1024_tokens/forward',
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stored tiles in an empty folder."""
    monkeypatch.setattr(tiles, 'ROOT', tmp_path)
    tiles._stored.cache_clear()
    yield tmp_path
    tiles._stored.cache_clear()


@pytest.mark.parametrize('name', CASES)
def test_a_stored_winner_is_found_by_its_kernel(name, folder):
    case = find_case(name)
    key, winner = tune.lookup_key(case), dict(case.tile_space[0])
    (folder / case.kernel).mkdir()
    tune.store(case.kernel, key | {'tiles': winner, 'cycles': 1, 'chip': 'v5p'})
    tiles._stored.cache_clear()
    nothing = dict.fromkeys(winner, 0)
    found = tiles.tiles_for(case.kernel, key['pass'], key['shape'], key['dtype'], nothing)
    assert found == winner
    other = key['shape'] | {next(iter(key['shape'])): 77}
    assert tiles.tiles_for(case.kernel, key['pass'], other, key['dtype'], nothing) == nothing


def test_the_key_of_a_case_is_that_of_the_public_function():
    rows = (1, 1024, 24)
    q, g = jnp.zeros((*rows, 128), jnp.bfloat16), jnp.zeros((*rows, 128))
    with tiles.recorded_lookups() as lookups:
        jax.eval_shape(
            lambda q, g, beta: kda(q, q, q, g, beta, implementation='pallas'),
            q,
            g,
            jnp.zeros(rows),
        )
    case = find_case('kda/k3_24_heads_1024_given_g/forward')
    assert tune.lookup_key(case) in lookups


def test_storing_again_replaces_the_row_of_the_same_key_only(folder):
    (folder / 'kda').mkdir()
    row = {'pass': 'forward', 'shape': {'H': 4}, 'dtype': 'bfloat16'}
    for shape, heads in (({'H': 4}, 2), ({'H': 8}, 4), ({'H': 4}, 1)):
        tune.store('kda', row | {'shape': shape, 'tiles': {'heads': heads}})
    rows = json.loads((folder / 'kda' / 'shapes.json').read_text())
    assert [(r['shape'], r['tiles']) for r in rows] == [
        ({'H': 4}, {'heads': 1}),
        ({'H': 8}, {'heads': 4}),
    ]
