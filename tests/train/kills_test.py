"""A run killed at ten points, some inside a save, ends with the bits of one that was not."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
from etils import epath

from k3jax.data.tokenizer import load_tokenizer
from k3jax.flags import config_from_file
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.course import Course
from tests.corpus import write_corpus

ROOT = pathlib.Path(__file__).parents[2]
# Losses of a narrow window are judged, some are spikes: what a run remembers of them is compared.
CONFIG = """
    from k3jax.config import Config, DataConfig, OptimizerConfig, StageConfig, TrainConfig
    from tests import tiny

    def get_config():
        return Config(
            model=tiny.k3((1,), (2,), vocab_size=512),
            optimizer=OptimizerConfig(warmup_steps=1),
            data=DataConfig(
                source={corpus!r}, sequence_length=16, batch_size=2, held_out_every=5,
                shuffle_rows=8,
            ),
            train=TrainConfig(
                num_steps=400, dtype='float32', log_every=1, checkpoint_every=7, eval_batches=1,
                sample_tokens=0, spike_policy='skip', spike_window=16, spike_deviations=6.0,
                stages=(
                    StageConfig(first_step=0),
                    StageConfig(first_step=150, data={{'batch_size': 3}}),
                ),
            ),
        )
    """
NUM_KILLS = 10


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')
    path = folder / 'config.py'
    path.write_text(textwrap.dedent(CONFIG).format(corpus=write_corpus(folder / 'corpus')))
    return path


def start(config, workdir):
    command = [sys.executable, '-m', 'experiments.train', f'--config={config}']
    environment = os.environ | {
        'JAX_COMPILATION_CACHE_DIR': str(ROOT / '.jax_cache'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.3',
    }
    with (workdir.parent / f'{workdir.name}.log').open('a') as log:
        return subprocess.Popen(
            [*command, f'--workdir={workdir}'], cwd=ROOT, env=environment, stdout=log, stderr=log
        )


def newest(workdir):
    folder = workdir / 'checkpoints'
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def is_saving(workdir):
    return any((workdir / 'checkpoints').glob('*orbax-checkpoint-tmp*'))


def end_of(config, workdir):
    """Step, arrays, and what stands beside them, of the newest checkpoint."""
    run = config_from_file(str(config))
    course = Course(run, load_tokenizer('bytes'), jax.devices()[:1])
    checkpoints = Checkpoints(epath.Path(workdir))
    state = course.restored(checkpoints)
    checkpoints.close()
    return jax.tree.map(np.asarray, state), course.position(state)


@pytest.mark.slow
def test_a_run_killed_at_ten_points_ends_with_the_bits_of_one_that_was_not(config, tmp_path):
    straight = tmp_path / 'straight'
    process = start(config, straight)
    assert process.wait(500) == 0, (tmp_path / 'straight.log').read_text()[-3000:]

    seed = random.SystemRandom().randrange(2**32)
    print('seed', seed)
    rng, killed, in_a_save = random.Random(seed), tmp_path / 'killed', 0
    for number in range(NUM_KILLS):
        process, begun = start(config, killed), newest(killed)
        # Far enough for a kill to take work away, and never to the end.
        target, inside = begun + rng.randrange(7, 36), number % 2 == 0
        deadline = time.monotonic() + 300
        while newest(killed) < target or (inside and not is_saving(killed)):
            assert process.poll() is None, (tmp_path / 'killed.log').read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        if not inside:
            time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        in_a_save += is_saving(killed)
        assert newest(killed) < 400, 'ended before it was killed; make the run longer'
    assert in_a_save, 'no kill was inside a save'
    print('inside a save:', in_a_save)

    process = start(config, killed)
    assert process.wait(500) == 0, (tmp_path / 'killed.log').read_text()[-3000:]
    (got, place), (want, wanted_place) = end_of(config, killed), end_of(config, straight)
    assert int(got.step) == 400
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert json.dumps(place, sort_keys=True) == json.dumps(wanted_place, sort_keys=True)
    rows = [
        [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
        for folder in (killed, straight)
    ]
    for a, b in zip(*rows, strict=True):
        for name in ('step', 'stage', 'loss', 'grad_norm', 'decision', 'reason'):
            assert a.get(name) == b.get(name)
