"""When a server is down or up, who loses what then, and what the script says of bad lists."""

import asyncio
import pathlib
import subprocess
import sys

import pytest

from k3jax.serve.fleet.servers import Fleet, HealthPolicy, Server, ServerDown

ROOT = pathlib.Path(__file__).parents[3]
POLICY = HealthPolicy(failures=3, successes=2)


def states(*seen):
    server = Server('http://a:80', POLICY)
    found = []
    for state in seen:
        server.saw(state)
        found.append(server.state)
    return found


def test_the_first_check_decides_and_then_it_takes_several():
    async def check():
        assert states('up') == ['up']
        assert states('down', 'up', 'up') == ['down', 'down', 'up']
        assert states('up', 'down', 'down', 'up', 'down') == ['up'] * 5
        assert states('up', 'down', 'down', 'down', 'up', 'down', 'up', 'up') == [
            *('up', 'up', 'up', 'down', 'down', 'down', 'down', 'up')
        ]
        assert states('up', 'draining', 'down', 'down', 'down') == [
            *('up', 'draining', 'draining', 'draining', 'down')
        ]

    asyncio.run(check())


def test_what_is_awaited_of_a_server_ends_when_it_is_given_up():
    async def check():
        server = Server('http://a:80', HealthPolicy(failures=1, successes=1))
        server.saw('up')
        assert await server.unless_down(asyncio.sleep(0, 'found')) == 'found'
        waiting = asyncio.create_task(server.unless_down(asyncio.sleep(30)))
        await asyncio.sleep(0)
        server.saw('down')
        with pytest.raises(ServerDown):
            await waiting
        with pytest.raises(ServerDown):  # also of what begins only now
            await server.unless_down(asyncio.sleep(30))
        server.saw('up')
        with pytest.raises(TimeoutError):  # and another's timeout stays one
            async with asyncio.timeout(0):
                await server.unless_down(asyncio.sleep(30))

    asyncio.run(check())


def test_a_conversation_stays_where_it_had_to_go(monkeypatch):
    async def check():
        fleet = Fleet(['http://a:80', 'http://b:80', 'http://c:80'])
        for server in fleet.servers:
            server.saw('up')
        primary, secondary, third = fleet.order('x')
        assert fleet.order('x') == [primary, secondary, third]
        fleet.answered('x', third)
        assert fleet.order('x') == [third, primary, secondary]
        fleet.answered('x', primary)
        assert fleet.order('x') == [primary, secondary, third]
        fleet.answered('x', secondary)
        monkeypatch.setattr('k3jax.serve.fleet.servers._STAY_S', 0.0)
        assert fleet.order('x') == [primary, secondary, third]
        monkeypatch.setattr('k3jax.serve.fleet.servers._MAX_MOVED', 5)
        for number in range(100):
            fleet.answered(str(number), third)
        assert len(fleet._moved) == 5

    asyncio.run(check())


def test_a_time_that_never_ends_is_refused():
    for value in (float('nan'), float('inf'), 0):
        with pytest.raises(ValueError, match=f'--health_interval_s: got {value}, wanted more'):
            HealthPolicy(interval_s=value)

    async def check():
        async with Fleet(['http://a:80'], POLICY).watched(None, float('nan')):
            pass

    with pytest.raises(ValueError, match='--wait_s: got nan, wanted 0 or more'):
        asyncio.run(check())


def test_the_script_says_what_is_wrong_with_its_servers():
    command = [sys.executable, '-m', 'experiments.route', '--port=0']
    for servers, message in (
        ('http://127.0.0.1:9', 'none of http://127.0.0.1:9 answers /health with 200'),
        ('http://a:1,http://a:1/', 'got http://a:1 more than once'),
    ):
        given = [*command, f'--servers={servers}']
        done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f'error: --servers: {message}'
