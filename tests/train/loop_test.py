"""A run: resuming is exact, and every way it can be interrupted leaves a whole checkpoint."""

import dataclasses
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from etils import epath

from k3jax.config import Config, DataConfig, OptimizerConfig, QuantisationConfig, TrainConfig
from k3jax.train import checkpoint as checkpoint_lib
from k3jax.train.loop import NonFiniteLoss, Trainer
from tests import tiny
from tests.corpus import write_corpus


@pytest.fixture
def config(tmp_path):
    corpus = write_corpus(tmp_path / 'corpus')
    return Config(
        model=tiny.k3((1,), (2,), vocab_size=512),
        optimizer=OptimizerConfig(warmup_steps=1),
        data=DataConfig(
            source=corpus, sequence_length=16, batch_size=2, held_out_every=5, shuffle_rows=8
        ),
        train=TrainConfig(
            num_steps=6,
            dtype='float32',
            log_every=1,
            checkpoint_every=2,
            eval_batches=2,
            sample_tokens=0,
        ),
    )


def trainer(config, workdir):
    return Trainer(config, str(workdir), jax.devices()[:1])


def with_train(config, **fields):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


def leaves(state):
    return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]


def stop_after(step):
    def on_step(now):
        if now == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_step


@pytest.mark.parametrize('ramp', [(), pytest.param((1,), marks=pytest.mark.slow)])
def test_a_run_stopped_by_sigterm_and_resumed_equals_one_that_was_not(config, tmp_path, ramp):
    """Also where batches grow on the way."""
    data = dataclasses.replace(config.data, ramp_steps=(2,) * len(ramp), ramp_batch_sizes=ramp)
    config = dataclasses.replace(config, data=data)
    straight = trainer(config, tmp_path / 'a').run()
    stopped = trainer(config, tmp_path / 'b').run(stop_after(3))
    assert not stopped.finished and int(stopped.state.step) == 3
    resumed = trainer(config, tmp_path / 'b').run()
    assert resumed.finished and int(resumed.state.step) == 6
    for a, b in zip(leaves(straight.state), leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = [
        [json.loads(line) for line in (tmp_path / run / 'metrics.jsonl').read_text().splitlines()]
        for run in 'ab'
    ]
    for a, b in zip(*rows, strict=True):
        for name in ('step', 'loss', 'maxvio', 'max_logit'):
            assert a[name] == b[name]


def test_a_finished_run_has_nothing_left_to_do(config, tmp_path):
    first = trainer(config, tmp_path / 'a').run()
    again = trainer(config, tmp_path / 'a').run()
    assert again.finished
    for a, b in zip(leaves(first.state), leaves(again.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept(config, tmp_path):
    trainer(with_train(config, keep_checkpoints=2, z_loss=1e-4), tmp_path / 'a').run()
    kept = sorted(int(path.name) for path in (tmp_path / 'a/checkpoints').iterdir())
    assert kept == [4, 6]
    lines = (tmp_path / 'a/metrics.jsonl').read_text().splitlines()
    assert all(json.loads(line)['z_loss'] > 0 for line in lines)


def damage(checkpoint: pathlib.Path) -> None:
    """Cuts every data file short."""
    for path in checkpoint.rglob('*'):
        if path.is_file() and path.stat().st_size > 200:
            path.write_bytes(path.read_bytes()[:100])


def test_an_unreadable_newest_checkpoint_is_set_aside_and_the_one_before_taken(
    config, tmp_path, caplog
):
    straight = trainer(config, tmp_path / 'a').run()
    damage(tmp_path / 'a/checkpoints/6')
    resumed = trainer(config, tmp_path / 'a').run()
    assert 'checkpoint of step 6 cannot be read' in caplog.text
    assert (tmp_path / 'a/unreadable_checkpoint_6').exists()
    assert (tmp_path / 'a/checkpoints/6').exists()
    for a, b in zip(leaves(straight.state), leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_readable_checkpoint_is_an_error(config, tmp_path):
    trainer(with_train(config, num_steps=2), tmp_path / 'a').run()
    damage(tmp_path / 'a/checkpoints/2')
    with pytest.raises(ValueError, match=r'none of the checkpoints \[2\] can be read'):
        trainer(config, tmp_path / 'a').run()


def test_a_loss_that_is_no_number_stops_the_run_and_the_last_good_checkpoint_goes_on(
    config, tmp_path
):
    """The update of a step ruins what the loss of that step could not show yet."""
    config = with_train(config, checkpoint_every=1)
    trainer(with_train(config, num_steps=2), tmp_path / 'a').run()
    wild = dataclasses.replace(
        config, optimizer=OptimizerConfig(learning_rate=1e30, warmup_steps=0)
    )
    with pytest.raises(NonFiniteLoss, match=r'is (nan|inf) at step 3; the newest .* of step 2'):
        trainer(wild, tmp_path / 'a').run()
    outcome = trainer(config, tmp_path / 'a').run()
    assert outcome.finished
    assert all(np.isfinite(leaf).all() for leaf in leaves(outcome.state))


def test_a_workdir_of_another_model_is_an_error_that_names_the_field(config, tmp_path):
    trainer(with_train(config, num_steps=2), tmp_path / 'a').run()
    other = dataclasses.replace(config, model=tiny.k3(vocab_size=512, hidden_size=32))
    with pytest.raises(ValueError, match=r'model\.hidden_size is 24 there, 32 here'):
        trainer(other, tmp_path / 'a')


def test_a_refused_command_leaves_the_config_of_the_run(config, tmp_path):
    """Export and evaluation read it."""
    config = with_train(config, num_steps=2)
    trainer(config, tmp_path / 'a').run()
    stored = (tmp_path / 'a/run_config.json').read_text()
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, held_out_every=2))
    with pytest.raises(ValueError, match='data position: saved with num_documents'):
        trainer(other, tmp_path / 'a').run()
    assert (tmp_path / 'a/run_config.json').read_text() == stored


def test_quantisation_may_be_switched_on_but_then_stays(config, tmp_path):
    widths = {'moe_intermediate_size': 32, 'routed_expert_hidden_size': 32}
    config = dataclasses.replace(config, model=tiny.k3((1,), (2,), vocab_size=512, **widths))
    on = with_train(config, quantisation=QuantisationConfig(weights='mxfp4'))
    checkpoint_lib.write_config(epath.Path(tmp_path), config)
    checkpoint_lib.check_config(epath.Path(tmp_path), on)
    checkpoint_lib.write_config(epath.Path(tmp_path), on)
    with pytest.raises(
        ValueError, match=r"train\.quantisation\.weights is 'mxfp4' there, None here"
    ):
        checkpoint_lib.check_config(epath.Path(tmp_path), config)


def test_a_run_stopped_before_its_first_checkpoint_leaves_no_double_records(config, tmp_path):
    """As after a kill: records of steps that no checkpoint holds are made again."""
    path = tmp_path / 'a/metrics.jsonl'
    path.parent.mkdir()
    path.write_bytes(
        b'5\n\xff\xfe\n' + json.dumps({'step': 1, 'loss': 9.0}).encode() + b'\n{"step": 2, "lo'
    )
    trainer(with_train(config, num_steps=2), tmp_path / 'a').run()
    steps = [json.loads(line)['step'] for line in path.read_text().splitlines()]
    assert steps == [1, 2]


def test_a_mistake_in_the_config_leaves_no_trace(config, tmp_path):
    data = dataclasses.replace(config.data, source=str(tmp_path / 'nothing'))
    with pytest.raises((ValueError, OSError)):
        trainer(dataclasses.replace(config, data=data), tmp_path / 'a')
    packed = tiny.k3(
        vocab_size=512,
        experts_format='mxfp4',
        moe_intermediate_size=32,
        routed_expert_hidden_size=32,
    )
    with pytest.raises(ValueError, match='packed experts have no gradient'):
        trainer(dataclasses.replace(config, model=packed), tmp_path / 'a')
    assert not (tmp_path / 'a').exists()


def test_a_folder_of_another_kind_is_no_workdir(config, tmp_path):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / checkpoint_lib.CONFIG_FILE).write_text('{"model_type": "x"}')
    with pytest.raises(ValueError, match='not the config of a training run'):
        trainer(config, tmp_path / 'a')


def test_a_vocabulary_too_small_for_the_tokenizer_is_an_error(config, tmp_path):
    small = dataclasses.replace(config, model=tiny.k3(vocab_size=300))
    with pytest.raises(ValueError, match=r'has 512 tokens, wanted at most 300'):
        trainer(small, tmp_path / 'a')


def run_on_a_full_disk(config, tmp_path, room_after):
    """What a run prints whose files must be short from step 3 on, as long as a disk is full."""
    script = f"""
import pathlib, pickle, resource, signal
from tests.train import loop_test
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
config = pickle.loads(pathlib.Path({str(tmp_path / 'config')!r}).read_bytes())
trainer = loop_test.trainer(config, {str(tmp_path / 'a')!r})
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
def limit(step):
    if step == 3:
        trainer.checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, most))
    if step == {room_after}:
        loop_test.settled(trainer)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
try:
    print('FINISHED', trainer.run(limit).finished)
except OSError as error:
    print('OSERROR', error)
"""
    (tmp_path / 'config').write_bytes(pickle.dumps(config))
    cache = {
        'JAX_COMPILATION_CACHE_DIR': str(jax.config.jax_compilation_cache_dir),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.3',
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # as here, so that the last bits are the same
    }
    return subprocess.run(
        [sys.executable, '-c', script], capture_output=True, text=True, env=os.environ | cache
    )


def settled(trainer):
    """Waits for a save that is under way, and leaves it to the run to see how that ended."""
    for thread in threading.enumerate():
        if 'save' in thread.name:
            threading.Thread.join(thread)  # Orbax's own would raise what went wrong


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_the_one_before_stays(config, tmp_path):
    out = run_on_a_full_disk(config, tmp_path, room_after=None)
    assert 'OSERROR' in out.stdout and 'could not be written' in out.stdout, out.stderr[-2000:]
    resumed = trainer(config, tmp_path / 'a')
    assert int(resumed.start().step) == 2


@pytest.mark.slow
def test_a_run_goes_on_after_a_failed_save_where_the_config_says_so(config, tmp_path):
    straight = trainer(config, tmp_path / 'b').run()
    out = run_on_a_full_disk(with_train(config, failed_save='go_on'), tmp_path, room_after=5)
    assert 'FINISHED True' in out.stdout, out.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / 'a/metrics.jsonl').read_text().splitlines()]
    ((step, reason),) = [(row['step'], row['reason']) for row in rows if 'decision' in row]
    assert step == 6 and 'a checkpoint could not be written' in reason
    saved = sorted(int(path.name) for path in (tmp_path / 'a/checkpoints').iterdir())
    assert saved == [2, 6]
    resumed = trainer(config, tmp_path / 'a')
    for a, b in zip(leaves(resumed.start()), leaves(straight.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_data_that_vanishes_stops_the_run_with_a_message_and_it_goes_on_when_it_is_back(
    config, tmp_path
):
    source = pathlib.Path(config.data.source)

    def hide(step):
        if step == 4:
            source.rename(tmp_path / 'hidden')

    data = dataclasses.replace(config.data, shuffle_rows=1)
    config = dataclasses.replace(config, data=data)
    with pytest.raises(OSError, match=r'data\.source: .* cannot be read any more, at step .*bring'):
        trainer(config, tmp_path / 'a').run(hide)
    (tmp_path / 'hidden').rename(source)
    resumed = trainer(config, tmp_path / 'a')
    assert int(resumed.start().step) == 4


def test_data_that_ends_stops_the_run_with_a_message(config, tmp_path):
    run = trainer(config, tmp_path / 'a')
    take, batches = run._course.data.take, iter(range(3))

    def three(rows):
        next(batches)
        return take(rows)

    run._course.data.take = three
    with pytest.raises(ValueError, match=r'has no rows left for step 4 of 6 \(train.num_steps\)'):
        run.run()
    resumed = trainer(config, tmp_path / 'a')
    assert int(resumed.start().step) == 2


@pytest.mark.slow
def test_a_state_that_waits_in_host_memory_gives_the_same_run_and_a_model_on_one_chip(
    config, tmp_path
):
    config = with_train(config, num_steps=2, eval_every=1)
    outcomes = []
    for memory in ('device', 'pinned_host'):
        optimizer = dataclasses.replace(config.optimizer, state_memory=memory)
        run = dataclasses.replace(config, optimizer=optimizer)
        outcomes.append(Trainer(run, str(tmp_path / memory), jax.devices()[:2]).run())
    for a, b in zip(*(leaves(outcome.state) for outcome in outcomes), strict=True):
        np.testing.assert_array_equal(a, b)
    _, params = outcomes[1].on_one_chip()
    assert {x.sharding.memory_kind for x in jax.tree.leaves(params)} == {'device'}
    assert all(x.devices() == {jax.devices()[0]} for x in jax.tree.leaves(params))
