"""Three servers behind a router, each its own process: one is killed, and no answer is another."""

import asyncio
import collections
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import httpx
import pytest

from k3jax.serve.fleet.asked import conversation_key
from k3jax.serve.fleet.rendezvous import Rendezvous
from k3jax.serve.load_clients import chat
from tests.corpus import write_corpus

ROOT = pathlib.Path(__file__).parents[3]
CONFIG = """
    from k3jax.config import Config, DataConfig, OptimizerConfig, TrainConfig
    from tests import tiny

    def get_config():
        return Config(
            model=tiny.k3((1,), (2,), vocab_size=512, max_position_embeddings=2048),
            optimizer=OptimizerConfig(warmup_steps=1),
            data=DataConfig(source={corpus!r}, sequence_length=16, batch_size=4, num_streams=2),
            train=TrainConfig(num_steps=2, dtype='float32', eval_batches=1, sample_tokens=0),
        )
    """
COUNT = 48  # streams at once


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


@pytest.fixture
def started():
    """Starts scripts, none of which outlives the test."""
    processes = []

    def start(script, *args):
        environment = os.environ | {
            'JAX_PLATFORMS': 'cpu',
            'JAX_COMPILATION_CACHE_DIR': str(ROOT / '.jax_cache'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.3',
        }
        command = [sys.executable, '-m', f'experiments.{script}', *args]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def body(number):
    """Of a conversation; half of them greedy."""
    words = ' '.join(str(number * k) for k in range(1, 4 + number % 9))
    sampling = {'temperature': 0} if number % 2 else {'temperature': 0.8, 'seed': number}
    return {
        'messages': [{'role': 'user', 'content': words}],
        'max_tokens': 150,
        'thinking': {'type': 'disabled'},
        **sampling,
    }


def text_of(chunk):
    delta = chunk['choices'][0]['delta']
    calls = ''.join(call['function']['arguments'] for call in delta.get('tool_calls') or ())
    return (delta.get('reasoning_content') or '') + (delta.get('content') or '') + calls


async def answer(url, number, progress=None):
    """(text, reason, longest silence) of a stream."""
    text, reason, last, silence = '', None, None, 0.0
    async for chunk in chat(url, body(number), None):
        if chunk is None:
            break
        assert 'error' not in chunk, chunk
        text += text_of(chunk)
        reason = chunk['choices'][0]['finish_reason'] or reason
        now = time.monotonic()
        silence, last = max(silence, now - (last or now)), now
        if progress is not None:
            progress[number] += 1
    return text, reason, silence


@pytest.mark.slow
def test_one_is_killed_under_load_and_every_answer_is_that_of_one_server_alone(started, tmp_path):
    corpus = write_corpus(tmp_path / 'corpus')
    config, workdir = tmp_path / 'config.py', tmp_path / 'run'
    config.write_text(textwrap.dedent(CONFIG).format(corpus=corpus))
    assert not started('train', f'--config={config}', f'--workdir={workdir}').wait(300)
    urls = [f'http://127.0.0.1:{free_port()}' for _ in range(3)]
    serve = (f'--checkpoint={workdir}', '--dtype=float32', '--max_length=512', '--num_slots=8')
    servers = {url: started('serve', *serve, f'--port={url[-5:]}') for url in urls}
    port = free_port()
    router = started('route', f'--servers={",".join(urls)}', f'--port={port}', '--wait_s=300')
    url = f'http://127.0.0.1:{port}'
    with httpx.Client(base_url=url, timeout=20) as client:

        def is_up():
            try:
                return client.get('/health').json()['up'] == 3
            except httpx.TransportError:
                return False

        deadline = time.monotonic() + 300
        while not is_up():
            assert time.monotonic() < deadline and router.poll() is None
            time.sleep(0.2)

        order = Rendezvous(urls).order
        primaries = {n: order(conversation_key(None, body(n)))[0] for n in range(COUNT)}
        victim = collections.Counter(primaries.values()).most_common(1)[0][0]
        moved = [n for n in range(COUNT) if primaries[n] == victim]
        progress = collections.Counter()

        async def under_load():
            tasks = [asyncio.create_task(answer(url, n, progress)) for n in range(COUNT)]
            while sum(progress[n] > 20 for n in moved) < 4:
                await asyncio.sleep(0.005)
            servers[victim].kill()
            print('\nat the kill, events sent of its streams:', [progress[n] for n in moved])
            return await asyncio.gather(*tasks)

        async def alone():
            return await asyncio.gather(*(answer(survivor, n) for n in range(COUNT)))

        found = asyncio.run(asyncio.wait_for(under_load(), 300))
        survivor = next(url for url in urls if url != victim)
        wanted = asyncio.run(asyncio.wait_for(alone(), 300))
        assert [one[:2] for one in found] == [one[:2] for one in wanted]
        assert len({one[0] for one in found}) > COUNT / 2  # they do say different things
        page = client.get('/metrics').text
        continued = next(
            float(line.split()[1])
            for line in page.splitlines()
            if line.startswith('k3jax_router_continued_total')
        )
        stayed = set(range(COUNT)) - set(moved)
        silences = [round(max(found[n][2] for n in group), 2) for group in (moved, stayed)]
        print(f'{len(moved)} moved, {continued:g} in the middle; longest silences: {silences} s')
        assert continued >= 4
        assert client.get('/health').json()['up'] == 2
    router.send_signal(signal.SIGTERM)
    assert router.wait(60) == 0
