"""A run of stages: what each changes, what is refused, and that resuming is exact everywhere."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from k3jax.config import (
    Config,
    ConfigError,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    StageConfig,
    TrainConfig,
)
from k3jax.data.tokenizer import load_tokenizer
from k3jax.train.curriculum import stage_at, stages_of
from k3jax.train.loop import Trainer
from k3jax.train.program import Program
from k3jax.train.replay import replay
from tests import tiny
from tests.corpus import write_corpus

LONG = {'sequence_length': 32, 'batch_size': 2}
STAGES = (
    StageConfig(first_step=0),
    StageConfig(first_step=3, data=LONG, mesh={'sequence': 2}),
)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('data') / 'corpus')


@pytest.fixture
def config(corpus):
    return Config(
        model=tiny.k3((1,), (2,), vocab_size=512),
        optimizer=OptimizerConfig(warmup_steps=1),
        data=DataConfig(
            source=corpus, sequence_length=16, batch_size=4, held_out_every=5, shuffle_rows=8
        ),
        train=TrainConfig(
            num_steps=6,
            stages=STAGES,
            dtype='float32',
            log_every=1,
            checkpoint_every=5,
            keep_checkpoints=9,
            eval_batches=1,
            sample_tokens=0,
            spike_policy='skip',
            spike_window=4,
        ),
        mesh=MeshConfig(whole_below=0),
    )


def with_train(config, **fields):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


def with_stage(config, **fields):
    """Its second stage changed."""
    stages = config.train.stages
    return with_train(config, stages=(stages[0], dataclasses.replace(stages[1], **fields)))


def test_a_stage_has_what_it_changes_and_the_rest_of_the_run(config):
    data = dataclasses.replace(config.data, ramp_steps=(2, 5), ramp_batch_sizes=(1, 2))
    stages = stages_of(dataclasses.replace(config, data=data))
    assert [(stage.first_step, stage.end_step) for stage in stages] == [(0, 3), (3, 6)]
    assert stages[0].config.data == data
    assert stages[0].config.mesh == config.mesh
    second = stages[1].config
    assert second.data.batch_sizes == (2, 2)  # of the ramp only what is still ahead
    assert second.data == dataclasses.replace(
        data, **LONG, ramp_steps=(5,), ramp_batch_sizes=(2,), shuffle_seed=1
    )
    assert second.mesh == MeshConfig(whole_below=0, sequence=2)
    assert second.optimizer == config.optimizer and second.model == config.model
    seeded = with_stage(config, data={'shuffle_seed': 7})
    assert stages_of(seeded)[1].config.data.shuffle_seed == 7


def test_a_run_without_stages_is_one(config):
    alone = with_train(config, stages=())
    (stage,) = stages_of(alone)
    assert (stage.first_step, stage.end_step, stage.config) == (0, 6, alone)


def test_steps_are_of_the_stage_that_makes_the_next_one(config):
    stages = stages_of(config)
    assert [stage_at(stages, step).number for step in range(7)] == [0, 0, 0, 1, 1, 1, 1]
    # A run that ends where a stage would begin does not go there.
    short = stages_of(with_train(config, num_steps=3))
    assert stage_at(short, 3).number == 0 and len(short) == 1


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'data': {'sequence_length': 128}},
            r'train\.stages\.1: data\.sequence_length: got 128, wanted at most 64 \(model\.max_pos',
        ),
        (
            {'data': {'batch_size': 3}},
            r'train\.stages\.1: data\.batch_size: got 3, wanted a multiple of the 2 parts',
        ),
        (
            {'mesh': {'sequence': 3}},
            r'train\.stages\.1: mesh: got data=-1 sequence=3, which is 3 chips, wanted the 4',
        ),
        (
            {'data': LONG | {'sequence_length': 30}, 'mesh': {'sequence': 4}},
            r'train\.stages\.1: data\.sequence_length: got 30, wanted a multiple of 8',
        ),
        (
            {'train': {'grad_accum_steps': 4}},
            r'train\.stages\.1: data\.batch_size: got 2, wanted a multiple of train\.grad_acc',
        ),
        ({'data': {'source': '/nowhere'}}, r"train\.stages\.1: data\.source: got '/nowhere'"),
    ],
)
def test_a_stage_that_cannot_work_is_refused_before_the_first_step(
    config, tmp_path, fields, message
):
    with pytest.raises(ValueError, match=message):
        Trainer(with_stage(config, **fields), str(tmp_path / 'run'), jax.devices()[:4])
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('stages', 'message'),
    [
        ([StageConfig(first_step=1)], r'first_step: got \(1,\), wanted 0 for the first stage'),
        ([StageConfig(first_step=0)] * 2, r'got \(0, 0\), wanted 0 for the first .* later than'),
    ],
)
def test_stages_that_do_not_follow_each_other_are_refused(config, stages, message):
    with pytest.raises(ConfigError, match=message):
        with_train(config, stages=tuple(stages))


def test_what_a_stage_cannot_change_is_refused():
    with pytest.raises(ConfigError, match=r'data\.tokenizer: .*wanted one of source, '):
        StageConfig(first_step=0, data={'tokenizer': 'bytes'})
    with pytest.raises(ConfigError, match=r'train\.num_steps: got 3, wanted one of grad_accum'):
        StageConfig(first_step=0, train={'num_steps': 3})


def leaves(state):
    return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state, state.guard))]


def rows(workdir):
    lines = (workdir / 'metrics.jsonl').read_text().splitlines()
    return {row['step']: row for row in map(json.loads, lines)}


@pytest.fixture(scope='module')
def straight(corpus, tmp_path_factory):
    """A run through both stages, without a stop: its workdir and outcome."""
    workdir = tmp_path_factory.mktemp('straight')
    whole = config.__wrapped__(corpus)
    return workdir, Trainer(whole, str(workdir), jax.devices()[:4]).run()


def test_a_stage_goes_on_with_the_state_on_its_own_mesh(straight, config):
    workdir, outcome = straight
    found = rows(workdir)
    assert [found[step]['stage'] for step in range(1, 7)] == [0, 0, 0, 1, 1, 1]
    sharding = jax.tree.leaves(outcome.state.params)[0].sharding
    assert dict(sharding.mesh.shape) == {'data': 2, 'expert': 1, 'sequence': 2, 'tensor': 1}
    assert sorted(int(path.name) for path in (workdir / 'checkpoints').iterdir()) == [3, 5, 6]
    rates = [found[step]['learning_rate'] for step in range(1, 7)]
    assert rates[1] == max(rates) and all(a > b for a, b in zip(rates[1:], rates[2:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize('step', [3, 5])
def test_a_run_resumed_in_a_stage_or_between_two_equals_one_that_was_not(
    straight, config, tmp_path, step
):
    workdir, outcome = straight
    shutil.copytree(workdir, tmp_path / 'run')
    for path in (tmp_path / 'run/checkpoints').iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    resumed = Trainer(config, str(tmp_path / 'run'), jax.devices()[:4]).run()
    for a, b in zip(leaves(resumed.state), leaves(outcome.state), strict=True):
        np.testing.assert_array_equal(a, b)
    again, before = rows(tmp_path / 'run'), rows(workdir)
    assert again.keys() == before.keys()
    for number, row in again.items():
        for name in ('loss', 'grad_norm', 'stage', 'skipped_steps'):
            assert row[name] == before[number][name]


@pytest.mark.slow
def test_steps_of_every_stage_are_made_again_bit_for_bit(straight):
    """Those before the first checkpoint, too."""
    workdir, _ = straight
    first = list(replay(str(workdir), 2, jax.devices()[:4]))
    later = list(replay(str(workdir), 5, jax.devices()[:4]))
    assert [made.step for made in first + later] == [1, 2, 4, 5]
    assert all(made.recorded is not None and made.equal for made in first + later)
    a, b = later[-1].rows
    assert a['loss'] >= b['loss'] and {a['row'], b['row']} == {0, 1}
    assert 'document' in ''.join(a['text'] + b['text'])
    assert not first[0].rows and len(first[-1].rows) == 4


def test_what_cannot_be_made_again_is_refused(straight, tmp_path):
    workdir, _ = straight
    with pytest.raises(ConfigError, match=r'--step: got 7, wanted 1\.\.6'):
        next(replay(str(workdir), 7, jax.devices()[:4]))
    with pytest.raises(ValueError, match='holds no run of experiments.train'):
        next(replay(str(tmp_path), 1))


def test_a_checkpoint_of_another_stage_than_the_config_says_is_refused(straight, config, tmp_path):
    workdir, _ = straight
    shutil.copytree(workdir, tmp_path / 'run')
    for path in (tmp_path / 'run/checkpoints').iterdir():
        if int(path.name) > 5:
            shutil.rmtree(path)
    moved = with_stage(config, first_step=5)
    message = r'the checkpoint of step 5 is of stage 1, but here'
    late = with_stage(config, first_step=6)
    with pytest.raises(ValueError, match=message):
        Trainer(with_train(late, num_steps=9), str(tmp_path / 'run'), jax.devices()[:4]).start()
    Trainer(moved, str(tmp_path / 'run'), jax.devices()[:4]).start()


def test_stages_read_the_same_source_in_other_orders(config):
    plain = with_stage(config, data={}, mesh={})
    programs = [
        Program(stage.config, load_tokenizer('bytes'), jax.devices()[:1])
        for stage in stages_of(plain)
    ]
    first, second = (program.open_data().take(4)['tokens'] for program in programs)
    assert not np.array_equal(first, second)
