"""Clients that load a server tell what it did, and errors from their own going away."""

import asyncio

import pytest

from k3jax.serve.admission import Limits
from k3jax.serve.load_clients import Load, flood, run_load
from tests.asking import wait_until
from tests.scripted_engine import ScriptedEngine, ids_of, running

LOAD = Load(streams=6, seconds=1.0, warm_up_s=0.2, max_tokens=12, drop_share=0.4)


@pytest.fixture(scope='module')
def served():
    limits = Limits(max_concurrent=100, drain_timeout_s=1.0)
    with running(ScriptedEngine(lambda _: []), limits=limits) as found:
        found.engine.delay_s = 0.002
        yield found


def test_what_clients_saw_is_counted_without_those_that_went_away(served):
    served.engine.script = lambda _: ids_of('Thinking — 中.«/think»«response»Hello«/response»¶')
    found = asyncio.run(run_load(served.url, LOAD))
    assert not found['errors']
    assert found['answers'] > 6 and found['dropped'] > 3
    assert found['tokens_per_s'] > 50 and found['events_per_s'] > 50
    assert 2 <= found['between_events']['p50_ms'] <= found['between_events']['p99_ms'] < 1000
    wait_until(lambda: served.engine.num_running == 0)


def test_streams_that_break_are_errors(served):
    served.engine.script = lambda _: [97, -1]
    found = asyncio.run(run_load(served.url, LOAD))
    assert found['answers'] == 0
    assert all('failed to answer' in error for error in found['errors']) and found['errors']


def test_no_server_is_an_error():
    load = Load(streams=1, seconds=0.1, warm_up_s=0.0)
    found = asyncio.run(run_load('http://127.0.0.1:9', load))
    assert any('Connect' in error for error in found['errors'])


def test_of_a_flood_those_too_many_are_refused_at_once(served):
    served.engine.script, served.engine.max_running = (lambda _: ids_of('x' * 500)), 10
    found = asyncio.run(flood(served.url, 40))
    assert (found['taken'], found['refused'], found['errors']) == (10, 30, {})
    assert found['refused_after']['max_ms'] < 2000
    wait_until(lambda: served.engine.num_running == 0)
