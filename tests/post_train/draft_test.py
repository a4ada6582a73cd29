"""Training a draft: it learns, goes on where it stopped, and its folder is refused to others."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from k3jax.config import ConfigError, OptimizerConfig, QuantisationConfig
from k3jax.model.draft import draft_leaves
from k3jax.model.kimi import Kimi, forward
from k3jax.model.plan import stack_params
from k3jax.model.run import Run
from k3jax.post_train.draft import (
    OWN_TEXT,
    DraftConfig,
    DraftTrainer,
    Target,
    texts_of_step,
    tokens_a_check,
)
from k3jax.post_train.rollout import rollout
from k3jax.serve.draft_folder import DRAFT_FILE, open_draft
from k3jax.serve.sampling import Choice
from k3jax.train.metrics import read_metrics
from tests import tiny

MODEL_CONFIG = tiny.k3((1, 2), (3,))
MODEL = Kimi(MODEL_CONFIG, Run(jnp.dtype('float32'), implementation='xla'))
CONFIG = DraftConfig(
    unroll_steps=3,
    num_texts=16,
    text_length=24,
    prompt_length=4,
    texts_at_once=16,
    num_steps=30,
    batch_size=8,
    checkpoint_every=10,
    log_every=5,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
)


@pytest.fixture(scope='module')
def target():
    params = stack_params(tiny.random_params(MODEL_CONFIG), MODEL.plan, np.stack)
    return Target(MODEL, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), None)


def prompts(seed=0):
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(0, 40, CONFIG.prompt_length).astype(np.int32)


@pytest.fixture(scope='module')
def trained(target, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('draft')
    return DraftTrainer(target, CONFIG, workdir).run(prompts()), workdir


def test_guesses_become_acceptable(trained):
    rows = read_metrics(epath.Path(trained[1]) / 'metrics.jsonl')
    first, last = rows[0], rows[-1]
    assert last['step'] == 30 and last['loss'] < 0.8 * first['loss']
    assert len(last['accepted']) == 3 and last['accepted'][0] > first['accepted'][0]
    assert last['loss'] >= -np.log(np.mean(last['accepted']))  # Jensen
    assert last['hopeless'] == 0


def test_the_folder_gives_the_draft_back(trained, target):
    params, workdir = trained
    model, restored = open_draft(workdir, MODEL)
    assert model.run.taps == (1, 2)
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    found = tokens_a_check(
        model, target, restored, [np.array([1, 2, 3])], num_guesses=3, num_new=20, temperature=1.0
    )
    assert 1 <= found <= 4


def test_a_resumed_training_ends_as_an_uninterrupted_one(trained, target, tmp_path):
    shutil.copytree(trained[1], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / 'checkpoints' / '30')
    # The texts are there already: no prompt is read.
    again = DraftTrainer(target, CONFIG, tmp_path).run(iter(()))
    jax.tree.map(np.testing.assert_array_equal, again, trained[0])


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'prompt_length': 5}, 'prompt_length is 4 there, 5 here'),
        ({'seed': 1}, 'seed is 0 there, 1 here'),
        ({'taps': (2,)}, r'taps is \[1, 2\] there, \[2\] here'),
        ({'quantisation': QuantisationConfig(weights='mxfp4')}, 'quantisation is'),
    ],
)
def test_a_workdir_is_gone_on_with_as_it_was_begun(trained, target, fields, message):
    before = (trained[1] / DRAFT_FILE).read_text()
    with pytest.raises(ValueError, match=f'holds a draft trained in another way: {message}'):
        DraftTrainer(target, dataclasses.replace(CONFIG, **fields), trained[1])
    assert (trained[1] / DRAFT_FILE).read_text() == before


def test_texts_that_cannot_be_read_are_named(trained, target, tmp_path):
    shutil.copytree(trained[1], tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / OWN_TEXT).read_bytes()
    (tmp_path / OWN_TEXT).write_bytes(whole[:90])
    with pytest.raises(ValueError, match=f'{OWN_TEXT}: cannot be read .* delete it'):
        DraftTrainer(target, CONFIG, tmp_path).run(iter(()))


def test_numbers_that_are_none_end_the_training_before_they_are_saved(target, tmp_path):
    wild = OptimizerConfig(learning_rate=1e20, warmup_steps=1)
    config = dataclasses.replace(CONFIG, optimizer=wild, checkpoint_every=4, log_every=30)
    with pytest.raises(ConfigError, match='got nan, wanted a number at step 4'):
        DraftTrainer(target, config, tmp_path).run(prompts())
    assert not list((tmp_path / 'checkpoints').glob('[0-9]*'))


def test_a_draft_s_experts_are_never_packed():
    config = tiny.k3(experts_format='mxfp4', moe_intermediate_size=32, routed_expert_hidden_size=32)
    plain = dataclasses.replace(config, experts_format='bf16')
    assert draft_leaves(config, 2) == draft_leaves(plain, 2)


def test_the_draft_of_another_model_is_refused(trained):
    other = Kimi(dataclasses.replace(MODEL_CONFIG, routed_scaling_factor=2.0), MODEL.run)
    with pytest.raises(ValueError, match='draft of another model: routed_scaling_factor is 1.0'):
        open_draft(trained[1], other)


def test_a_folder_without_a_draft_and_a_damaged_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match=f'has no {DRAFT_FILE}; make one with'):
        open_draft(tmp_path, MODEL)
    for text in ('{', '{}', '{"model": {}, "taps": [1], "quantisation": {}}'):
        (tmp_path / DRAFT_FILE).write_text(text)
        with pytest.raises(ValueError, match='not the config of a draft'):
            open_draft(tmp_path, MODEL)


def test_each_text_is_met_once_an_epoch():
    for epoch in range(2):
        rows = [texts_of_step(CONFIG, 2 * epoch + i) for i in range(2)]
        assert sorted(np.concatenate(rows)) == list(range(16))


@pytest.mark.slow
def test_a_rollout_at_temperature_0_says_the_likeliest(target):
    begun = np.array([[1, 2, 3], [7, 8, 9]], np.int32)
    choice = Choice(jnp.float32(0.0), jnp.float32(1.0), jnp.int32(40))
    tokens = np.asarray(rollout(MODEL, target.params, begun, 6, choice, jax.random.key(0)))
    np.testing.assert_array_equal(tokens[:, :3], begun)
    best = np.argmax(forward(MODEL, target.params, tokens), axis=-1)
    np.testing.assert_array_equal(tokens[:, 3:], best[:, 2:-1])


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'unroll_steps': 0}, 'unroll_steps: got 0'),
        ({'step_decay': 0.0}, 'step_decay: got 0.0'),
        ({'text_length': 20, 'prompt_length': 16}, 'text_length: got 20, wanted at least 24'),
        ({'num_texts': 4}, r'num_texts: got 4, wanted at least batch_size \(8\)'),
        ({'temperature': 0.0}, 'temperature: got 0.0'),
        ({'num_steps': 20}, r'optimizer.warmup_steps: got 20, wanted fewer than num_steps \(20\)'),
    ],
)
def test_settings_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        DraftConfig(**fields)


def test_texts_longer_than_the_model_s_positions_are_refused(target, tmp_path):
    with pytest.raises(ConfigError, match='text_length: got 65, wanted at most 64'):
        DraftTrainer(target, dataclasses.replace(CONFIG, text_length=65), tmp_path / 'x')
    assert not (tmp_path / 'x').exists()
