"""What the experts add to few tokens, in every form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_mlp import SiTU, token_kernel, token_mlp
from pallas_kernels.grouped_mlp.token import needed
from tests.compare import relative_error
from tests.oracles.grouped_mlp import token_oracle
from tests.pallas_kernels.grouped_mlp_arguments import packed_arguments


def token_choices(rng, num_tokens, num_experts, num_chosen):
    ids = np.stack([rng.permutation(num_experts)[:num_chosen] for _ in range(num_tokens)])
    return ids.astype(np.int32), rng.random((num_tokens, num_chosen)).astype(np.float32)


@pytest.mark.parametrize('form', ['reference', 'xla', 'pallas'])
@pytest.mark.parametrize('num_tokens', [1, 7])
@pytest.mark.parametrize('kind', ['float32', 'bfloat16', 'mxfp4'])
def test_tokens_times_their_experts_equal_float64(kind, num_tokens, form):
    packed, decoded, rng = packed_arguments(num_experts=6)
    dtype = jnp.float32 if kind == 'float32' else jnp.bfloat16
    experts = packed if kind == 'mxfp4' else jax.tree.map(lambda w: w.astype(dtype), decoded)
    x = jnp.asarray(rng.standard_normal((num_tokens, 128)), dtype)
    ids, weights = token_choices(rng, num_tokens, 6, 2)
    got = token_mlp(x, experts, ids, weights, SiTU(), implementation=form)
    want = token_oracle(x, decoded, ids, weights)
    assert got.dtype == dtype
    assert relative_error(got, want) < (1e-5 if kind == 'float32' else 5e-3)


def test_only_the_chosen_experts_are_listed_and_foreign_ids_count_for_nothing():
    ids = jnp.array([[5, 2], [9, 5], [-1, 2]], jnp.int32)
    weights = jnp.array([[0.5, 0.25], [7, 0.75], [8, 1]], jnp.float32)
    found = needed(ids, weights, 8)
    assert found.ids.shape == (6,) and int(found.count[0]) == 2
    np.testing.assert_array_equal(found.ids, [2, 5, 5, 5, 5, 5])
    np.testing.assert_array_equal(found.weights[:2, 0], [[0.25, 0, 1], [0.5, 0.75, 0]])
    assert int(needed(jnp.full((2, 2), 8), weights[:2], 8).count[0]) == 0


@pytest.mark.parametrize('form', ['xla', 'pallas'])
def test_foreign_ids_known_only_at_run_time_add_nothing(form):
    _, decoded, rng = packed_arguments()
    x = jnp.asarray(rng.standard_normal((4, 128)), jnp.float32)
    experts = jax.tree.map(lambda w: w.astype(jnp.float32), decoded)
    run = jax.jit(
        lambda ids, weights: token_mlp(x, experts, ids, weights, SiTU(), implementation=form)
    )
    ids, weights = token_choices(rng, 4, 3, 2)
    foreign = ids.copy()
    foreign[:, 0] = [-1, 3, 99, -7]
    weights[:, 1] = [1, 0.5, 0, 2]
    want = weights[:, 1:] * token_oracle(x, experts, ids[:, 1:], np.ones((4, 1)))
    assert relative_error(run(foreign, weights), want) < 1e-5
    assert not np.any(run(np.full((4, 2), 9, np.int32), weights))


def test_the_kernel_for_few_tokens_has_no_races_and_stays_inside_its_arrays():
    _, decoded, rng = packed_arguments()
    x = jnp.asarray(rng.standard_normal((3, 128)), jnp.bfloat16)
    ids, weights = token_choices(rng, 3, 3, 1)
    chosen = needed(jnp.asarray(ids), jnp.asarray(weights), 3)
    y = token_kernel.run(
        x,
        decoded,
        *chosen,
        activation=SiTU(),
        columns=128,
        interpret=pltpu.InterpretParams(detect_races=True),
    )
    assert relative_error(y, token_oracle(x, decoded, ids, weights)) < 5e-3
