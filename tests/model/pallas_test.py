"""The whole model on its TPU kernels, interpreted, against the model in XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model.kimi import Kimi
from k3jax.model.plan import stack_params
from k3jax.model.run import Run
from tests import tiny
from tests.compare import assert_close

TOKENS = np.random.default_rng(0).integers(0, 40, (1, 24)).astype(np.int32)
SEGMENTS = np.array([[1] * 9 + [2] * 11 + [0] * 4], np.int32)


@functools.cache
def loss_and_grads(implementation):
    """Of one KDA layer, one MLA layer with experts, and the residual attention, in float32."""
    config = tiny.k3((1,), (2,))
    model = Kimi(config, Run(jnp.float32, implementation=implementation))
    params = stack_params(tiny.random_params(config), model.plan, np.stack)

    @jax.jit
    def run(params):
        def loss(params):
            hidden = model.apply({'params': params}, TOKENS, SEGMENTS).hidden
            return jnp.sum(jnp.sin(hidden) * (SEGMENTS > 0)[..., None])

        return jax.value_and_grad(loss)(params)

    value, grads = run(params)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {'loss': value} | {jax.tree_util.keystr(path): x for path, x in leaves}


@pytest.mark.slow
def test_a_tiny_model_on_interpreted_kernels_equals_xla():
    assert_close(loss_and_grads('pallas'), loss_and_grads('xla'), 1e-3)
