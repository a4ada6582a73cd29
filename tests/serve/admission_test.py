"""Who may ask, how often, and how many at once."""

import pytest

from k3jax.serve.admission import Keys, Limits, Rate, Slots, read_keys
from k3jax.serve.api.errors import ApiError


def test_keys():
    assert Keys().check(None) is None
    keys = Keys(['one', 'two'])
    assert keys.check('Bearer one') == 'key 0'
    assert keys.check('bearer two') == 'key 1'
    for header in (None, '', 'one', 'Bearer', 'Bearer three', 'Basic one', 'Bearer \ud800'):
        with pytest.raises(ApiError) as caught:
            keys.check(header)
        assert caught.value.status == 401
    assert 'one' not in repr(vars(keys))


def test_a_file_of_keys(tmp_path):
    path = tmp_path / 'keys'
    path.write_text('# ours\n one \n\ntwo\n')
    assert read_keys(path) == ('one', 'two')
    path.write_text('# none yet\n\n')
    with pytest.raises(ValueError, match='--api_keys_file: got no key'):
        read_keys(path)


def test_a_bucket_refills_steadily():
    now = [0.0]
    rate = Rate(6, lambda: now[0])
    for _ in range(6):
        rate.check('a')
    with pytest.raises(ApiError) as caught:
        rate.check('a')
    assert caught.value.status == 429 and caught.value.retry_after_s == 11
    rate.check('b')
    now[0] += 10.1
    rate.check('a')
    with pytest.raises(ApiError):
        rate.check('a')
    now[0] += 1000
    for _ in range(6):
        rate.check('a')
    with pytest.raises(ApiError):
        rate.check('a')


def test_clients_are_forgotten_before_they_fill_the_memory():
    rate = Rate(1)
    for number in range(rate.MAX_CLIENTS + 5):
        rate.check(str(number))
    assert len(rate._buckets) == rate.MAX_CLIENTS


def test_slots():
    slots = Slots(1)
    with slots.take(), pytest.raises(ApiError) as caught, slots.take():
        pass
    assert caught.value.status == 429 and slots.num_taken == 0
    slots.draining = True
    with pytest.raises(ApiError) as caught, slots.take():
        pass
    assert caught.value.status == 503


def test_limits_name_their_flag():
    with pytest.raises(ValueError, match='--max_concurrent: got 0, wanted more than 0'):
        Limits(max_concurrent=0)
    for value in (float('nan'), float('inf'), -1.0):
        with pytest.raises(ValueError, match=f'--request_timeout_s: got {value}, wanted more'):
            Limits(request_timeout_s=value)
    assert Limits(requests_per_minute=0).requests_per_minute == 0
