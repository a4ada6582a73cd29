"""The whole model on its TPU kernels: interpreted against XLA, and compiled for a TPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import kimi_k3
from k3jax.aot.chips import chip_of
from k3jax.aot.compiler import has_libtpu, lower_for
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.plan import stack_params
from k3jax.model.run import Run
from k3jax.train.optim import leaf_labels, make_optimizer
from k3jax.train.step import TrainState, make_train_step
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
            hidden, _ = model.apply({'params': params}, TOKENS, SEGMENTS)
            return jnp.sum(jnp.sin(hidden) * (SEGMENTS > 0)[..., None])

        return jax.value_and_grad(loss)(params)

    value, grads = run(params)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {'loss': value} | {jax.tree_util.keystr(path): x for path, x in leaves}


def test_a_tiny_model_on_interpreted_kernels_equals_xla():
    assert_close(loss_and_grads('pallas'), loss_and_grads('xla'), 1e-3)


def training_step():
    """K3's step at real widths with three layers and 16 experts, and its abstract arguments."""
    config = kimi_k3.get_config()
    linear = dataclasses.replace(
        config.model.linear_attn_config, kda_layers=(1, 2), full_attn_layers=(3,)
    )
    small = {'num_hidden_layers': 3, 'attn_res_block_size': 2, 'vocab_size': 4096}
    small |= {'num_experts': 16, 'num_experts_per_token': 4, 'linear_attn_config': linear}
    model_config = dataclasses.replace(config.model, **small)
    model = Kimi(model_config, Run(jnp.bfloat16, jnp.bfloat16, 'layer'))
    optimizer = make_optimizer(config.optimizer, 1000, leaf_labels(model_config, model.plan))

    def initial():
        params = init_params(model, jax.random.key(0))
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    rows = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    batch = dict.fromkeys(('tokens', 'targets', 'segment_ids'), rows)
    return make_train_step(model, optimizer, 1), (jax.eval_shape(initial), batch)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup')
def test_the_k3_training_step_for_a_tpu_compiles_with_our_kernels():
    lowered = lower_for('v5p:2x2x1', *training_step())
    names = set(re.findall(r'kernel_name = "([^"]*)"', lowered.as_text()))
    kernels = {name.rsplit('_', 1)[0] for name in names if name.endswith('_forward')}
    assert kernels >= {'attn_res', 'kda', 'short_conv'}, names
    assert names >= {f'{kernel}_backward' for kernel in kernels}, names
    assert any(name.startswith('grouped_mlp') for name in names), names
    assert any(name.startswith('mla') for name in names), names
    memory = lowered.compile().memory_analysis()
    assert memory.peak_memory_in_bytes < chip_of('v5p:2x2x1').hbm_bytes
