"""Two processes of four devices train, are killed, and one process with one device goes on."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from tests.corpus import write_corpus

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
    from k3jax.config import Config, DataConfig, MeshConfig, OptimizerConfig, TrainConfig
    from tests import tiny

    def get_config():
        return Config(
            model=tiny.k3((1,), (2,), vocab_size=512, num_experts=8),
            optimizer=OptimizerConfig(warmup_steps=1),
            data=DataConfig(
                source={corpus!r}, sequence_length=16, batch_size=4, num_streams=2,
                held_out_every=5, shuffle_rows=8,
            ),
            train=TrainConfig(
                num_steps=6, dtype='float32', log_every=1, checkpoint_every=2, eval_batches=1,
                sample_tokens=0,
            ),
            mesh=MeshConfig(whole_below=0),
        )
    """


def free_port():
    with socket.socket() as s:
        s.bind(('localhost', 0))
        return s.getsockname()[1]


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')
    corpus = write_corpus(folder / 'corpus')
    path = folder / 'config.py'
    path.write_text(textwrap.dedent(CONFIG).format(corpus=corpus))
    return path


@pytest.fixture(autouse=True)
def started():
    """Processes of a test, none of which outlives it."""
    processes = []
    yield processes
    for process in processes:
        with process:
            process.kill()


def start(started, config, workdir, devices, *args):
    command = [sys.executable, '-m', 'experiments.train', f'--config={config}']
    environment = os.environ | {
        'JAX_NUM_CPU_DEVICES': str(devices),
        'JAX_COMPILATION_CACHE_DIR': str(ROOT / '.jax_cache'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.3',
    }
    process = subprocess.Popen(
        [*command, f'--workdir={workdir}', *args],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started.append(process)
    return process


def start_two(started, config, workdir, *args):
    port = free_port()
    return [
        start(
            started,
            config,
            workdir,
            4,
            '--set=mesh.expert=2',
            '--set=mesh.sequence=2',
            f'--coordinator=localhost:{port}',
            '--num_processes=2',
            f'--process_id={number}',
            *args,
        )
        for number in range(2)
    ]


def wait_for(path, processes):
    for _ in range(3000):
        if path.exists():
            return
        for process in processes:
            assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.1)
    raise AssertionError(f'{path} did not come')


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    return {row['step']: row['loss'] for row in rows if 'loss' in row}


@pytest.mark.slow
def test_two_processes_are_killed_and_one_goes_on(started, config, tmp_path):
    alone = start(started, config, tmp_path / 'alone', 1)
    text = alone.communicate(timeout=500)[0]
    assert alone.returncode == 0, text[-3000:]

    together = tmp_path / 'together'
    processes = start_two(started, config, together)
    wait_for(together / 'checkpoints' / '2', processes)
    processes[1].send_signal(signal.SIGKILL)
    processes[0].send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate(timeout=100)

    resumed = start(started, config, together, 1)
    text = resumed.communicate(timeout=500)[0]
    assert resumed.returncode == 0, text[-3000:]
    assert 'resumed from step' in text
    got, want = losses(together), losses(tmp_path / 'alone')
    assert got.keys() == want.keys() == set(range(1, 7))
    np.testing.assert_allclose([got[n] for n in got], [want[n] for n in got], rtol=2e-5)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_other_and_leaves_the_last_checkpoint(
    started, config, tmp_path
):
    processes = start_two(
        started, config, tmp_path / 'run', '--process_timeout=15', '--set=train.num_steps=100000'
    )
    wait_for(tmp_path / 'run' / 'checkpoints' / '2', processes)
    processes[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    text = processes[0].communicate(timeout=120)[0]
    assert processes[0].returncode != 0
    assert time.monotonic() - killed < 100, text[-2000:]
    resumed = start(started, config, tmp_path / 'run', 1, '--set=train.num_steps=4')
    text = resumed.communicate(timeout=500)[0]
    assert resumed.returncode == 0 and 'resumed from step' in text, text[-3000:]


@pytest.mark.slow
def test_two_processes_that_share_every_row_stop_together_and_finish(started, config, tmp_path):
    """Every chip works on every row: both processes read both streams."""
    shared = ['--set=mesh.expert=1', '--set=mesh.sequence=8', '--set=data.batch_size=2']
    shared += ['--set=data.sequence_length=48']
    shared += ['--set=train.eval_every=3', '--set=train.num_steps=8']
    processes = start_two(started, config, tmp_path / 'run', *shared)
    wait_for(tmp_path / 'run' / 'checkpoints' / '2', processes)
    processes[1].send_signal(signal.SIGTERM)  # only one is told
    texts = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert 'the same command goes on from there' in texts[0]
    processes = start_two(started, config, tmp_path / 'run', *shared)
    texts = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert 'resumed from step' in texts[0] and 'held-out:' in texts[0]
    ours = [line for line in texts[1].splitlines() if '[Gloo]' not in line]
    assert not ours, ours  # one log
    assert (tmp_path / 'run' / 'loss.png').exists()
    rows = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
    steps = [row['step'] for row in map(json.loads, rows) if 'loss' in row]
    assert steps == list(range(1, 9))


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['--num_processes=2'], 'wanted all three, or none'),
        (
            ['--coordinator=localhost', '--num_processes=1', '--process_id=0'],
            "error: --coordinator: got 'localhost', wanted HOST:PORT",
        ),
        (
            ['--coordinator=localhost:1', '--num_processes=0', '--process_id=0'],
            'error: --num_processes: got 0, wanted 1 or more',
        ),
        (
            ['--coordinator=localhost:1', '--num_processes=2', '--process_id=2'],
            r'--process_id: got 2, wanted 0..1',
        ),
        (['--set=mesh.data=3'], 'got data=3, which is 3 chips, wanted the 1 there are; what fits'),
    ],
)
def test_what_cannot_start_says_why(started, config, tmp_path, args, message):
    process = start(started, config, tmp_path / 'run', 1, *args)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 1 and message in text, text[-2000:]


# After `CONFIG`, whose `get_config` is `before` here.
STAGES = """
    import dataclasses

    from k3jax.config import StageConfig

    def get_config():
        config = before()
        stages = (
            StageConfig(first_step=0),
            StageConfig(
                first_step=3,
                data={'sequence_length': 32, 'batch_size': 2},
                mesh={'expert': 1, 'sequence': 4},
            ),
        )
        train = dataclasses.replace(config.train, stages=stages)
        return dataclasses.replace(config, train=train)
    """


@pytest.mark.slow
def test_stages_with_meshes_of_their_own_go_through_two_processes(started, config, tmp_path):
    """Killed in the second stage and gone on with; against one process with as many devices."""
    path = tmp_path / 'stages.py'
    text = config.read_text().replace('def get_config', 'def before')
    path.write_text(text + textwrap.dedent(STAGES))
    meshes = '--set=mesh.expert=2', '--set=mesh.sequence=2'
    alone = start(started, path, tmp_path / 'alone', 8, *meshes)
    text = alone.communicate(timeout=500)[0]
    assert alone.returncode == 0, text[-3000:]

    together = tmp_path / 'together'
    processes = start_two(started, path, together)
    wait_for(together / 'checkpoints' / '4', processes)
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=100)
    for process in start_two(started, path, together):
        text = process.communicate(timeout=500)[0]
        assert process.returncode == 0, text[-3000:]
    got, want = losses(together), losses(tmp_path / 'alone')
    assert got.keys() == want.keys() == set(range(1, 7))
    np.testing.assert_allclose([got[n] for n in got], [want[n] for n in got], rtol=2e-5)
