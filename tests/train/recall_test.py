"""Facts found: the model's own most likely tokens, counted at the right depth."""

import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import DataConfig, NeedlesConfig
from k3jax.data.needles import Needles
from k3jax.data.tokenizer import byte_tokenizer
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.run import Run
from k3jax.train.eval import logits_of
from k3jax.train.recall import Recall, markdown, measure, plot
from tests import tiny

TOKENIZER = byte_tokenizer()
CONFIG = tiny.k3((), (1,), vocab_size=512, max_position_embeddings=64)
MODEL = Kimi(CONFIG, Run(jnp.dtype('float32'), jnp.dtype('float32'), implementation='xla'))


@pytest.fixture
def needles(tmp_path):
    def of(length):
        for i in range(20):
            (tmp_path / f'{i}.txt').write_text('some text in between. ' * 9)
        config = DataConfig(
            source='needles',
            sequence_length=length,
            needles=NeedlesConfig(facts=4, asked=3, text=str(tmp_path)),
        )
        return Needles.of(config, TOKENIZER, 'held_out')

    return of


def test_answers_are_the_most_likely_tokens_after_the_true_ones(needles):
    params = jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0))
    windows, done = needles(64), []
    found = measure(MODEL, params, windows, 6, tokens_at_once=130, on_batch=done.append)
    assert done == [2, 4, 6] and found.length == 64
    for index in range(6):
        window = windows[index]
        best = logits_of(MODEL, params, window.tokens.tolist())[0].argmax(-1)
        want = best[window.answers - 1] == window.tokens[window.answers]
        np.testing.assert_array_equal(found.right[index], want)
        np.testing.assert_array_equal(found.depths[index], window.depths)


def test_windows_beyond_the_positions_are_refused(needles):
    with pytest.raises(ValueError, match='length: got 65 tokens, wanted at most 64'):
        measure(MODEL, {}, needles(65), 1)


FOUND = Recall(
    length=128,
    right=np.array([[True, True], [True, False], [False, False]]),
    depths=np.array([[0.0, 0.05], [0.95, 0.0999], [1.0, 0.5]]),
)


def test_accuracy_is_counted_by_tenths_of_the_depth():
    accuracy, asked = FOUND.by_depth()
    assert asked.tolist() == [3, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    np.testing.assert_allclose(accuracy[[0, 5, 9]], [2 / 3, 0, 1 / 2])
    assert all(math.isnan(x) for x in np.delete(accuracy, [0, 5, 9]))


def test_a_report_is_json_a_table_and_a_picture():
    report = json.loads(json.dumps(FOUND.report()))
    assert report['accuracy'] == 0.5 and report['whole_answers'] == pytest.approx(1 / 3)
    assert report['windows'] == 3 and report['asked'] == 2
    assert report['by_depth'][1] is None
    row = markdown([report]).splitlines()[-1]
    assert row.startswith('| 128 | 3 | 0.500 | 0.333 | 0.67 | - | - | - | - | 0.00 | - ')
    assert plot([report, report]).startswith(b'\x89PNG')


@pytest.mark.slow
def test_the_scripts_train_on_windows_and_ask_about_them(tmp_path):
    def run(script, *args):
        return subprocess.run(
            [sys.executable, '-m', f'experiments.{script}', *args],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        )

    few = [
        f'--set=train.num_steps={2}',
        '--set=optimizer.warmup_steps=1',
        '--set=data.batch_size=2',
    ]
    few.append('--set=train.eval_batches=1')
    done = run('train', '--config=configs/needle_k3.py', f'--workdir={tmp_path}/run', *few)
    assert done.returncode == 0, done.stderr
    files = [f'--json={tmp_path}/found.json', f'--plot={tmp_path}/found.png']
    ask = ('needles', f'--checkpoint={tmp_path}/run', '--lengths=128,256', '--windows=4')
    done = run(*ask, *files, '--dtype=float32', '--asked=5')
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / 'found.json').read_text())
    assert [row['length'] for row in found] == [128, 256]
    assert all(sum(row['asked_by_depth']) == 4 * 5 for row in found)
    assert (tmp_path / 'found.png').read_bytes().startswith(b'\x89PNG')
    assert '| 256 | 4 |' in done.stdout and '256 tokens: 4/4 windows' in done.stderr
    for flag, message in (
        ('--lengths=1k', "--lengths: got '1k', wanted whole numbers"),
        ('--lengths=', "--lengths: got '', wanted whole numbers"),
        ('--text=/nowhere', "data.needles.text: got '/nowhere', which does not exist"),
        ('--lengths=20', 'data.sequence_length: got 20, wanted at least'),
        (f'--json={tmp_path}/none/a.json', 'there is no such folder; make it first'),
    ):
        done = run(*ask, flag)
        assert done.returncode == 1 and message in done.stderr
