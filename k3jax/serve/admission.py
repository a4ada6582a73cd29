"""Who may ask, how often, and how many at once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from etils import epath

from k3jax.serve.api.errors import ApiError, overloaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one server takes.

    Attributes:
      max_body_bytes: of a request. body_timeout_s: until all of it has come.
      max_concurrent: requests that are being answered or wait for the engine.
      requests_per_minute: of one key, or of one address where there are no keys; 0: any number.
      request_timeout_s: after which an answer is cut off as if it had become too long.
      drain_timeout_s: how long requests may go on after SIGTERM.
    """

    max_body_bytes: int = 64 * 2**20
    body_timeout_s: float = 60.0
    max_concurrent: int = 256
    requests_per_minute: int = 0
    request_timeout_s: float = 3600.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, may_be_0 = getattr(self, field.name), field.name == 'requests_per_minute'
            if not (0 <= value < math.inf) or (value == 0 and not may_be_0):
                wanted = '0 or more' if may_be_0 else 'more than 0'
                raise ValueError(f'--{field.name}: got {value}, wanted {wanted}')


def read_keys(path: epath.PathLike) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and those that start with # are left out.

    Raises:
      ValueError: there is none in it, so that a mistake never opens a server to anybody.
    """
    lines = (line.strip() for line in epath.Path(path).read_text().splitlines())
    keys = tuple(line for line in lines if line and not line.startswith('#'))
    if not keys:
        raise ValueError('--api_keys_file: got no key, wanted one a line')
    return keys


class Keys:
    """The keys that may ask; none: anybody may."""

    def __init__(self, keys: Sequence[str] = ()):
        # Hashed: comparing takes as long for any key, and no dump of this shows one.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, header: str | None) -> str | None:
        """Who asks, by a name that is not the key; None where there are no keys.

        Args:
          header: Authorization.

        Raises:
          ApiError: 401.
        """
        if not self._digests:
            return None
        scheme, _, key = (header or '').partition(' ')
        digest = hashlib.sha256(key.strip().encode('utf-8', 'replace')).digest()
        known = [hmac.compare_digest(digest, other) for other in self._digests]
        if scheme.lower() != 'bearer' or not any(known):
            raise ApiError(
                'Invalid Authentication',
                status=401,
                type='invalid_authentication_error',
                code='invalid_api_key',
            )
        return f'key {known.index(True)}'


class Rate:
    """Requests a minute of each client: a bucket that refills steadily."""

    MAX_CLIENTS = 10_000

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic):
        self._per_minute, self._now = per_minute, now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def check(self, client: str) -> None:
        """Takes one request from the client's bucket.

        Raises:
          ApiError: 429, it is empty.
        """
        if not self._per_minute:
            return
        now = self._now()
        left, then = self._buckets.pop(client, (float(self._per_minute), now))
        left = min(self._per_minute, left + (now - then) * self._per_minute / 60)
        is_empty = left < 1
        self._buckets[client] = (left if is_empty else left - 1, now)
        if len(self._buckets) > self.MAX_CLIENTS:
            self._buckets.popitem(last=False)
        if is_empty:
            wait = int((1 - left) * 60 / self._per_minute) + 1
            raise overloaded(f'More than {self._per_minute} requests a minute', wait)


class Slots:
    """Requests that are being answered.

    Attributes:
      num_taken: now.
      draining: no more are taken.
    """

    def __init__(self, max_concurrent: int):
        self._max = max_concurrent
        self.num_taken = 0
        self.draining = False

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Holds a slot.

        Raises:
          ApiError: 429 where there is none left, 503 while draining.
        """
        if self.draining:
            raise ApiError(
                'The server is shutting down',
                status=503,
                type='server_error',
                code='shutting_down',
                retry_after_s=5,
            )
        if self.num_taken >= self._max:
            raise overloaded('The server is answering as many requests as it can')
        self.num_taken += 1
        try:
            yield
        finally:
            self.num_taken -= 1
