"""A simulated fleet: by hand, against queueing theory, and what must hold of any run."""

import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.overrides import apply_overrides
from k3jax.serve.fleet.rendezvous import Rendezvous
from k3jax.serve.fleet.simulation import POLICIES, FleetConfig, Setup, simulate
from k3jax.serve.fleet.simulation_report import figures, plot, report
from k3jax.serve.fleet.trace import Conversation, Mix, Turn, make_trace, read_trace, summary

ONE = FleetConfig(
    servers=1,
    cache_tokens=10_000,
    prefill_tokens_per_s=1000.0,
    slots=2,
    decode_tokens_per_s=10.0,
    overhead_s=1e-9,
)
MIX = Mix(cached_tokens=40_000, new_tokens=1_000, answer_tokens=100, turns=8, pause_s=5.0)
FLEET = FleetConfig(servers=4, cache_tokens=200_000, prefill_tokens_per_s=20_000.0, slots=8)


ROOT = pathlib.Path(__file__).parents[3]


def conversations(*rows):
    return [Conversation(start, tuple(Turn(*turn) for turn in turns)) for start, *turns in rows]


def times(request):
    found = (request.arrived_s, request.started_s, request.first_s, request.ended_s)
    return [round(x, 3) for x in found]


def test_a_conversation_by_hand():
    # 1000 tokens read in 1 s and 20 written in 2; after 5 s 100 more, all but 1020 % 512 are held.
    trace = conversations((1.0, (9.0, 1000, 20), (5.0, 100, 10)))
    first, second = simulate(trace, ONE, 'hash')
    assert times(first) == [1, 1, 2, 4] and first.hit == 0
    assert second.hit == 512 and second.prompt == 1120
    assert times(second) == [9, 9, 9.608, 10.608]


def test_prompts_are_read_one_by_one_and_slots_are_waited_for():
    trace = conversations(*((0.0, (0, 1000, 100)) for _ in range(3)))
    found = simulate(trace, ONE, 'round_robin')
    assert [times(r)[1:] for r in found] == [[0, 1, 11], [1, 2, 12], [11, 12, 22]]


def test_what_was_unused_for_longest_is_given_up():
    turns = ((0, 4000, 10), (30, 1, 10))
    rows = [(0.0, *turns), (10.0, *turns), (20.0, *turns)]
    hits = [r.hit for r in simulate(conversations(*rows), ONE, 'hash') if r.turn]
    assert hits == [0, 0, 0]  # each comes just after it was given up, as three do not fit
    hits = [r.hit for r in simulate(conversations(*rows[:2]), ONE, 'hash') if r.turn]
    assert hits == [3584, 3584]


def test_running_requests_never_hold_more_than_there_is():
    trace = conversations((0.0, (0, 6000, 10)), (0.0, (0, 6000, 10)))
    first, second = simulate(trace, ONE, 'hash')
    assert second.started_s == first.ended_s


def test_waiting_is_that_of_queueing_theory():
    # Poisson arrivals, equal service: Pollaczek and Khinchine's mean wait, rho s / 2 (1 - rho).
    rng, load, service_s, count = np.random.default_rng(1), 0.7, 0.5, 40_000
    starts = np.cumsum(rng.exponential(service_s / load, count)).tolist()
    trace = conversations(*((start, (0, 500, 1)) for start in starts))
    config = FleetConfig(
        **{**vars(ONE), 'slots': 1000, 'decode_tokens_per_s': 1000.0, 'cache_tokens': 10**9}
    )
    waits = [r.started_s - r.arrived_s for r in simulate(trace, config, 'hash')]
    assert np.mean(waits) == pytest.approx(load * service_s / 2 / (1 - load), rel=0.05)


@pytest.fixture(scope='module')
def trace():
    return make_trace(MIX, 0.5, 400.0, seed=3)


@pytest.mark.parametrize('policy', POLICIES)
@pytest.mark.parametrize('fail_at_s', [None, 150.0])
def test_what_holds_of_any_run(trace, policy, fail_at_s):
    config = FleetConfig(**{**vars(FLEET), 'fail_at_s': fail_at_s, 'down_s': 100.0})
    found = simulate(trace, config, policy)
    assert len(found) == sum(len(one.turns) for one in trace)
    for r in found:
        assert r.arrived_s <= r.started_s < r.first_s < r.ended_s
        assert r.hit % 512 == 0 and r.hit < r.prompt
        if math.isnan(r.lost_s):
            least = (r.prompt - r.hit) / config.prefill_tokens_per_s
            assert r.first_s - r.started_s >= least
        elif r.first_s < r.lost_s:
            assert r.stalled_s > config.detect_s and r.lost_s < r.ended_s
    assert any(not math.isnan(r.lost_s) for r in found) == (fail_at_s is not None)
    again = simulate(trace, config, policy)
    np.testing.assert_equal([vars(r) for r in again], [vars(r) for r in found])


def test_hashing_finds_what_round_robin_reads_again(trace):
    rates = {p: figures(simulate(trace, FLEET, p), 50, 400, 5.0)['hit_rate'] for p in POLICIES}
    assert rates['hash'] > 0.65 > max(rates['round_robin'], rates['least_loaded']) + 0.2
    total = summary(trace)
    assert rates['hash'] < total['share_said_before']


def test_a_lost_server_is_missed_only_by_its_own_conversations(trace):
    whole = FleetConfig(**{**vars(FLEET), 'cache_tokens': 10**9})
    config = FleetConfig(**{**vars(whole), 'fail_at_s': 150.0, 'down_s': 20.0})
    well, failed = simulate(trace, whole, 'hash'), simulate(trace, config, 'hash')
    order = Rendezvous([str(number) for number in range(4)]).order
    own = {n for n in range(len(trace)) if order(str(n))[0] == order('0')[0]}
    again = [r for r in failed if r.turn and not r.hit]
    assert again and {r.conversation for r in again} <= own
    assert not [r for r in well if r.turn and not r.hit and r.prompt > 1024]
    # Each is read again once, by its secondary or a primary that is back, where it stays.
    assert len(again) == len({r.conversation for r in again})
    config = FleetConfig(**{**vars(config), 'stay': False})
    home = [r for r in simulate(trace, config, 'hash') if r.turn and not r.hit]
    assert len(home) > len({r.conversation for r in home})


def test_the_mix_is_what_it_says():
    found = summary(make_trace(Mix(), 1.0, 2000.0, seed=0))
    assert found['their_tokens_said_before'] == pytest.approx(400_000, rel=0.02)
    assert found['their_new_tokens'] == pytest.approx(4_000, rel=0.02)
    assert found['conversations'] == pytest.approx(2000, rel=0.1)


def test_reports_and_plots(trace):
    rows = []
    for policy in POLICIES:
        found = report(simulate(trace, FLEET, policy), 50.0, 400.0, 5.0)
        rows.append({'load': 0.5, 'policy': policy, **found})
        assert len(found['timeline']) == 7 and found['lost']['requests'] == 0
    assert plot(rows, None)[:4] == plot(rows, 100.0)[:4] == b'\x89PNG'
    empty = figures([], 0, 10, 1.0)
    assert empty['hit_rate'] is None and empty['goodput'] == 0


def test_a_trace_is_read(tmp_path):
    path = tmp_path / 'trace.jsonl'
    turn = {'pause_s': 0, 'new_tokens': 900, 'answer_tokens': 80}
    lines = [{'start_s': 2.5, 'turns': [turn, turn]}, {'start_s': 0, 'turns': [turn]}]
    path.write_text('\n'.join(map(json.dumps, lines)) + '\n\n')
    assert read_trace(path) == conversations((0, (0, 900, 80)), (2.5, (0, 900, 80), (0, 900, 80)))
    for bad in (
        *('', '{', '[]', '{"start_s": 0}', '{"start_s": 0, "turns": []}'),
        json.dumps({'start_s': -1, 'turns': [turn]}),
        json.dumps({'start_s': 0, 'turns': [turn | {'new_tokens': 0}]}),
        json.dumps({'start_s': 0, 'turns': [turn | {'answer_tokens': 1.5}]}),
    ):
        path.write_text(json.dumps(lines[0]) + '\n' + bad if bad else bad)
        with pytest.raises(ValueError, match='--trace: (line 2|there is no)'):
            read_trace(path)


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('fleet.servers=0', 'fleet.servers: got 0'),
        ('fleet.server=2', "did you mean 'fleet.servers'"),
        ('fleet.slots=nan', 'wanted an integer'),
        ('fleet.overhead_s=nan', 'fleet.overhead_s: got nan'),
        ('mix.long_share=2', 'mix.long_share: got 2'),
        ('mix.turns=1000', 'mix.cached_tokens: got 400000'),
        ('mix.pause_s=0', 'mix.pause_s: got 0'),
        ('mix.pause_s=inf', 'mix.pause_s: got inf'),
        ('mix.turns=1', 'mix.turns: got 1, wanted 2'),
        ('fleet.overhead_s=inf', 'fleet.overhead_s: got inf'),
    ],
)
def test_settings_that_are_none_are_named(override, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(Setup(), [override])
    with pytest.raises(ConfigError, match='fleet.servers: got 1, wanted 2'):
        apply_overrides(Setup(), ['fleet.servers=1', 'fleet.fail_at_s=5'])


def test_a_conversation_that_fits_nowhere_is_refused(trace):
    with pytest.raises(ValueError, match='fleet.cache_tokens: got 100'):
        simulate(trace, FleetConfig(cache_tokens=100), 'hash')


def test_the_script_writes_what_it_prints(tmp_path):
    def run(*args):
        command = [sys.executable, '-m', 'experiments.fleet', '--policies=hash', *args]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    rows, png = tmp_path / 'rows.json', tmp_path / 'fleet.png'
    given = ('--loads=0.5', '--seconds=300', '--warm_up_s=60', '--set=fleet.fail_at_s=100')
    done = run(*given, f'--json={rows}', f'--png={png}')
    assert done.returncode == 0 and '| 0.5 | consistent hashing | ' in done.stdout
    found = json.loads(rows.read_text())
    assert found['assumed']['fleet']['fail_at_s'] == 100 and found['rows'][0]['lost']['requests']
    assert png.read_bytes()[:4] == b'\x89PNG'
    done = run('--loads=0,x')
    assert (done.returncode, done.stderr[:25]) == (1, "error: --loads: got '0,x'")
