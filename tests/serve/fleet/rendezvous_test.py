"""Consistent hashing: who has a conversation, who has it next, and what a change moves."""

import collections

import pytest

from k3jax.serve.fleet.rendezvous import Rendezvous

SERVERS = tuple(f'http://10.0.0.{number}:8000' for number in range(8))
KEYS = [f'conversation {number}' for number in range(8000)]


def places(servers):
    hashing = Rendezvous(servers)
    return {key: tuple(hashing.order(key)) for key in KEYS}


@pytest.fixture(scope='module')
def orders():
    return places(SERVERS)


def test_every_server_comes_once_and_the_secondary_is_another(orders):
    assert all(len(order) == 8 and set(order) == set(SERVERS) for order in orders.values())
    assert Rendezvous(('a',)).order('x') == ['a']


def test_shares_are_even(orders):
    counts = collections.Counter(order[0] for order in orders.values())
    assert max(counts.values()) < 1130 and min(counts.values()) > 870  # four deviations


def test_those_of_a_lost_server_are_spread_evenly(orders):
    for lost in SERVERS:
        heirs = collections.Counter(o[1] for o in orders.values() if o[0] == lost)
        mean = heirs.total() / 7
        assert len(heirs) == 7 and mean > 100
        assert max(heirs.values()) < 1.4 * mean and min(heirs.values()) > 0.6 * mean


def test_a_server_that_leaves_is_left_out_of_every_order_and_changes_nothing_else(orders):
    lost = SERVERS[3]
    for key, order in places([one for one in SERVERS if one != lost]).items():
        assert order == tuple(one for one in orders[key] if one != lost)


def test_a_server_that_joins_takes_its_share_and_moves_no_other(orders):
    moved = 0
    for key, order in places([*SERVERS, 'new']).items():
        assert order[0] in ('new', orders[key][0])
        moved += order[0] == 'new'
    assert 0.87 / 9 < moved / len(KEYS) < 1.13 / 9


def test_the_order_of_the_list_does_not_matter(orders):
    assert places(SERVERS[::-1]) == orders


@pytest.mark.parametrize('servers', [[], ['a', 'a']])
def test_servers_must_be_there_once(servers):
    with pytest.raises(ValueError, match='wanted at least one, each once'):
        Rendezvous(servers)
