"""From a run with experts in MXFP4 and MXFP8 to what serves it: the same logits, bit by bit."""

import dataclasses
import functools
import json
import os
import signal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath

from k3jax.config import Config, DataConfig, OptimizerConfig, QuantisationConfig, TrainConfig
from k3jax.convert.binding import flatten, unflatten
from k3jax.convert.converted import load_params
from k3jax.convert.files import ConversionError
from k3jax.convert.to_orbax import convert
from k3jax.data.tokenizer import load_tokenizer
from k3jax.model.kimi import Kimi
from k3jax.model.layout import model_leaves
from k3jax.model.plan import stack_params, unstack_params
from k3jax.model.run import Run
from k3jax.serve.export import export_workdir, released_form
from k3jax.serve.load import open_model
from k3jax.train.checkpoint import Checkpoints, write_config
from k3jax.train.eval import logits_of
from k3jax.train.loop import Outcome, Trainer
from k3jax.train.state import TrainState, working_copy
from pallas_kernels.grouped_mlp import quantise_mxfp4
from tests import tiny
from tests.corpus import write_corpus

WIDTHS = {'vocab_size': 512, 'moe_intermediate_size': 64, 'routed_expert_hidden_size': 32}
MODELS = {
    'one layer': tiny.k3((), (1,), first_k_dense_replace=0, **WIDTHS),
    'all mixers': tiny.k3((1, 2), (3,), **WIDTHS),
}
# Not the rule that serving takes where nobody says.
ON = QuantisationConfig(weights='mxfp4', activations='mxfp8', scale_rule='ceil')
IDS = [5, 17, 200, 3, 400, 97, 12]


SLOW = pytest.mark.slow


@pytest.fixture(scope='module', autouse=True)
def optimised():
    """Programs of training and serving have the same last bits only as users compile them."""
    jax.config.update('jax_disable_most_optimizations', False)
    yield
    jax.config.update('jax_disable_most_optimizations', True)


@pytest.fixture(
    scope='module',
    params=[
        ('saved', 'one layer'),
        pytest.param(('trained', 'one layer'), marks=SLOW),
        pytest.param(('trained', 'all mixers'), marks=SLOW),
    ],
    ids=' '.join,
)
def how(request):
    return request.param


@pytest.fixture(scope='module')
def config(how, tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp('quantisation') / 'corpus')
    return Config(
        model=MODELS[how[1]],
        optimizer=OptimizerConfig(warmup_steps=1, learning_rate=3e-3),
        data=DataConfig(
            source=corpus, sequence_length=16, batch_size=2, held_out_every=5, shuffle_rows=8
        ),
        train=TrainConfig(
            num_steps=3,
            dtype='float32',
            log_every=1,
            sample_tokens=0,
            quantisation=ON,
            scan_layers=False,  # as serving: a scanned program may add in another order
        ),
    )


def saved(config, workdir):
    """What a run leaves, without the training."""
    run = Run(*[jnp.dtype('float32')] * 2, implementation='xla', quantisation=ON)
    model = Kimi(config.model, run, config.train.scan_layers)
    values = jax.tree.map(np.float32, tiny.random_params(config.model))
    params = jax.device_put(stack_params(values, model.plan, np.stack), jax.devices()[0])
    workdir.mkdir()
    write_config(workdir, config)
    state = TrainState(jnp.int32(0), params, {'none': jnp.zeros(1)})
    checkpoints = Checkpoints(workdir, keep=1)
    checkpoints.save(state, {})
    checkpoints.wait()
    return Outcome(state, model, load_tokenizer(config.data.tokenizer), True)


@pytest.fixture(scope='module')
def trained(how, config, tmp_path_factory):
    """A workdir and how its run ended."""
    workdir = epath.Path(tmp_path_factory.mktemp('runs')) / 'straight'
    if how[0] == 'saved':
        return workdir, saved(config, workdir)
    return workdir, Trainer(config, str(workdir), jax.devices()[:1]).run()


@pytest.mark.slow
@pytest.mark.parametrize('how', [('trained', name) for name in MODELS], ids=' '.join, indirect=True)
def test_a_resumed_run_equals_one_that_was_not_stopped(config, trained, tmp_path):
    def stop(step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    devices = jax.devices()[:1]
    assert not Trainer(config, str(tmp_path / 'stopped'), devices).run(stop).finished
    resumed = Trainer(config, str(tmp_path / 'stopped'), devices).run()
    for a, b in zip(*map(jax.tree.leaves, (resumed.state, trained[1].state)), strict=True):
        np.testing.assert_array_equal(a, b)


def step_logits(outcome, params):
    """What the forward pass of training gives, over the working copy of `params`."""
    model = outcome.model
    return logits_of(model, jax.jit(functools.partial(working_copy, model))(params), IDS)


def test_a_workdir_is_loaded_as_it_was_trained(trained):
    workdir, outcome = trained
    want = step_logits(outcome, outcome.state.params)
    loaded = open_model(str(workdir), 'float32')
    assert loaded.model.run.quantisation == dataclasses.replace(ON, weights=None)  # they are
    np.testing.assert_array_equal(logits_of(loaded.model, loaded.params, IDS), want)
    model, params = outcome.on_one_chip()
    np.testing.assert_array_equal(logits_of(model, params, IDS), want)
    for given, wanted in (
        ({'activations': 'none'}, QuantisationConfig(scale_rule='ceil')),
        ({'scale_rule': 'ocp_floor'}, QuantisationConfig(activations='mxfp8')),
    ):
        assert open_model(str(workdir), 'float32', **given).model.run.quantisation == wanted


def masters_of(outcome):
    return flatten(unstack_params(jax.device_get(outcome.state.params), outcome.model.plan))


def as_released(masters, model):
    """Masters as a release can hold them: all but the experts in its own dtypes."""
    leaves = flatten(model_leaves(model))
    return unflatten(
        {
            path: array
            if leaves[path].quantisable
            else array.astype(np.dtype(leaves[path].dtype)).astype(np.float32)
            for path, array in masters.items()
        }
    )


@pytest.fixture(scope='module')
def released(trained, tmp_path_factory):
    """The run's newest checkpoint exported, and that converted."""
    folder = tmp_path_factory.mktemp('released')
    config = export_workdir(trained[0], folder / 'release')
    assert config == dataclasses.replace(trained[1].model.config, experts_format='mxfp4')
    convert(folder / 'release', folder / 'converted')
    return folder


def test_export_packs_the_float32_masters_by_the_rule_of_the_run(trained, released):
    fields = json.loads((released / 'release/config.json').read_text())
    assert fields['text_config']['quantization_config']['format'] == 'mxfp4-pack-quantized'
    got = flatten(load_params(released / 'converted'))
    masters, num_experts = masters_of(trained[1]), 0
    for path, array in masters.items():
        if path.endswith(('w1', 'w2', 'w3')):
            num_experts += 1
            want = quantise_mxfp4(array, 'ceil')
            np.testing.assert_array_equal(got[f'{path}_packed'], want.packed)
            np.testing.assert_array_equal(got[f'{path}_scale'], want.scale)
    assert num_experts >= 3


def test_an_exported_run_served_with_mxfp8_has_the_logits_of_training(trained, released):
    """A release holds all but the experts in its own dtypes: training is asked about those values.

    That is all that export changes.
    """
    outcome = trained[1]
    params = stack_params(
        as_released(masters_of(outcome), outcome.model.config), outcome.model.plan, np.stack
    )
    want = step_logits(outcome, params)
    path = str(released / 'converted')
    loaded = open_model(path, 'float32', activations='mxfp8', scale_rule='ceil')
    # The values are the same; products of decoded weights round in the last bit otherwise.
    np.testing.assert_allclose(logits_of(loaded.model, loaded.params, IDS), want, rtol=0, atol=2e-7)
    plain = open_model(path, 'float32')
    assert plain.model.run.quantisation == QuantisationConfig()
    assert np.max(np.abs(logits_of(plain.model, plain.params, IDS) - want)) > 1e-4


def test_a_family_without_packed_experts_is_exported_with_the_same_values():
    model = tiny.kimi_linear((1,), (2,), moe_intermediate_size=32, hidden_size=32)
    masters = jax.tree.map(np.float32, tiny.random_params(model))
    params, config = released_form(masters, model, ON)
    assert config == model
    w1 = params['layers_1']['block_sparse_moe']['experts']['w1']
    np.testing.assert_array_equal(w1.astype(ml_dtypes.bfloat16).astype(np.float32), w1)
    assert len(np.unique(w1[0, 0])) <= 16 and np.any(
        w1 != masters['layers_1']['block_sparse_moe']['experts']['w1']
    )
    assert released_form(masters, model, QuantisationConfig()) == (masters, model)


def test_a_target_that_holds_something_else_is_refused(trained, tmp_path):
    (tmp_path / 'mine.txt').write_text('x')
    with pytest.raises(ConversionError, match='not empty'):
        export_workdir(trained[0], tmp_path)
