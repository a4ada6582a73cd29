"""What KDA refuses, by name and before anything runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import Gate, kda, kda_gate
from tests.pallas_kernels.kda_test import IMPLEMENTATIONS, random_inputs


@pytest.mark.parametrize(
    ('shape', 'dtype', 'message'),
    [
        ((1, 2, 1, 300, 4), np.float32, 'K is 300, wanted at most 256'),
        ((1, 2, 1, 4, 300), np.float32, 'V is 300, wanted at most 256'),
        ((1, 2, 1, 4, 4), np.float16, 'v is float16, wanted bfloat16 or float32'),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name_and_run_by_default(shape, dtype, message):
    inputs, _ = random_inputs(shape, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"'pallas': {message}"):
        kda(**inputs, implementation='pallas')
    o, _ = kda(**inputs)
    assert np.isfinite(np.asarray(o, np.float32)).all()


@pytest.mark.parametrize(
    ('ids', 'message'),
    [
        ([1, 1, 2, 1], 'row 0: 1 comes back after another document'),
        ([1, -1, 2, 2], 'row 0 has -1, wanted 0 or more'),
    ],
)
def test_segment_ids_that_are_no_runs_are_an_error_where_they_are_known(ids, message):
    inputs, _ = random_inputs((1, 4, 1, 4, 4))
    with pytest.raises(ValueError, match=message):
        kda(**inputs, segment_ids=np.array([ids], np.int32))


@pytest.mark.parametrize('name', ['q', 'k', 'v', 'g', 'beta', 'initial_state'])
def test_integers_are_refused(name):
    inputs, _ = random_inputs((1, 4, 1, 4, 4))
    inputs[name] = np.ones(inputs[name].shape, np.int32)
    with pytest.raises(ValueError, match=f'kda: {name} is int32, wanted a floating-point dtype'):
        kda(**inputs)


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ('A_log', 'dt_bias', 'lower_bound', 'message'),
    [
        ((3,), (8,), -5.0, r'kda: A_log has shape \(3,\)'),
        ((2,), (4, 2), -5.0, r'kda: dt_bias has shape \(4, 2\), wanted \(8,\) or \(2, 4\)'),
        ((2,), (8,), 0.0, 'kda: lower_bound is 0.0'),
    ],
)
def test_a_wrong_gate_is_an_error_in_every_form(
    implementation, A_log, dt_bias, lower_bound, message
):
    inputs, _ = random_inputs((1, 4, 2, 4, 4))
    gate = Gate(jnp.zeros(A_log), jnp.zeros(dt_bias), lower_bound)
    with pytest.raises(ValueError, match=message):
        kda(**inputs, gate=gate, implementation=implementation)


def test_a_gate_has_its_own_bound():
    inputs, _ = random_inputs((1, 4, 1, 4, 4))
    with pytest.raises(ValueError, match='g_lower_bound is for a ready-made g'):
        kda(**inputs, gate=Gate(jnp.zeros(1), jnp.zeros(4)), g_lower_bound=-5.0)


def test_a_broken_promise_about_g_is_an_error():
    inputs, _ = random_inputs((1, 2, 1, 4, 4), 'all -100')
    with pytest.raises(ValueError, match='g goes down to -100.0, below g_lower_bound -5.0'):
        kda(**inputs, g_lower_bound=-5.0)
    with pytest.raises(ValueError, match='g_lower_bound is 5.0, wanted a negative number'):
        kda(**inputs, g_lower_bound=5.0)


@pytest.mark.parametrize(
    ('name', 'shape'),
    [
        ('q', (1, 4, 8)),
        ('k', (1, 4, 2, 7)),
        ('v', (1, 5, 2, 8)),
        ('g', (1, 4, 1, 8)),
        ('beta', (1, 4)),
        ('initial_state', (1, 2, 6, 8)),
        ('segment_ids', (4,)),
    ],
)
def test_a_wrong_shape_is_named(name, shape):
    inputs, _ = random_inputs((1, 4, 2, 8, 6))
    inputs[name] = np.zeros(shape, np.int32 if name == 'segment_ids' else np.float32)
    with pytest.raises(ValueError, match=f'kda: {name} has shape'):
        kda(**inputs)


def test_no_tokens_is_an_error():
    inputs, _ = random_inputs((1, 1, 1, 4, 4))
    empty = {n: x[:, :0] for n, x in inputs.items() if n != 'initial_state'}
    with pytest.raises(ValueError, match='at least one token'):
        kda(**empty)


@pytest.mark.parametrize('argument', ['implementation', 'precision'])
def test_an_unknown_name_is_an_error(argument):
    inputs, _ = random_inputs((1, 2, 1, 4, 4))
    with pytest.raises(ValueError, match=f"{argument} is 'fast'"):
        kda(**inputs, **{argument: 'fast'})


@pytest.mark.parametrize(
    ('A_log', 'dt_bias', 'lower_bound', 'message'),
    [
        ((3,), (8,), -5.0, r'A_log has shape \(3,\), wanted \(2,\)'),
        ((2,), (7,), -5.0, r'dt_bias has shape \(7,\), wanted \(8,\)'),
        ((2,), (8,), 5.0, 'lower_bound is 5.0'),
    ],
)
def test_a_wrong_gate_is_an_error(A_log, dt_bias, lower_bound, message):
    with pytest.raises(ValueError, match=message):
        kda_gate(jnp.zeros((1, 2, 4)), jnp.zeros(A_log), jnp.zeros(dt_bias), lower_bound)
