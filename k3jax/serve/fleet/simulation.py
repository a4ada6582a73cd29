"""What a fleet does with a trace, event by event: hits, waiting and goodput of ways to route.

A server reads one prompt after another and writes answers beside that, each in a slot. All it has
room for lies in one pool of tokens: running requests, and conversations that came before, of which
those unused for longest are given up. Nothing here is a model of the arithmetic: rates are given.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from k3jax.serve.fleet.rendezvous import Rendezvous
from k3jax.serve.fleet.trace import Conversation, Mix

POLICIES = ('hash', 'round_robin', 'least_loaded')
_HASH_TOKENS = 512  # a prefix is found by blocks of so many


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Servers and what happens to them. The rates are assumptions, not measured.

    Attributes:
      cache_tokens: that a server has room for. prefill_tokens_per_s: of one server.
      slots: answers that a server writes at once. decode_tokens_per_s: of each.
      overhead_s: of a prompt, beside its tokens.
      fail_at_s: when the server that hashing gives the first conversation is lost; None: never.
      down_s: how long. detect_s: until its requests are asked elsewhere.
      stay: conversations that went to a secondary stay there when their primary is back.
    """

    servers: int = 8
    cache_tokens: int = 16_000_000
    prefill_tokens_per_s: float = 50_000.0
    slots: int = 64
    decode_tokens_per_s: float = 50.0
    overhead_s: float = 0.05
    fail_at_s: float | None = None
    down_s: float = math.inf
    detect_s: float = 1.0
    stay: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or value is False:
                continue
            if not value > 0:
                raise ValueError(f'fleet.{field.name}: got {value}, wanted more than 0')
            if value == math.inf and field.name != 'down_s':
                raise ValueError(f'fleet.{field.name}: got inf, wanted a number')
        if self.fail_at_s is not None and self.servers < 2:
            raise ValueError(f'fleet.servers: got {self.servers}, wanted 2 or more with a failure')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What --set changes."""

    fleet: FleetConfig = FleetConfig()
    mix: Mix = Mix()


@dataclasses.dataclass(eq=False)
class Request:
    """One turn.

    Attributes:
      prompt: tokens, those of the turns before counted. hit: of them, found in the cache.
      arrived_s, started_s, first_s, ended_s: the prompt begins to be read at `started_s`.
      lost_s: when its server failed. stalled_s: from then until its answer went on.
    """

    conversation: int
    turn: int
    prompt: int
    answer: int
    arrived_s: float
    started_s: float = math.nan
    first_s: float = math.nan
    ended_s: float = math.nan
    hit: int = 0
    lost_s: float = math.nan
    stalled_s: float = math.nan
    num_sent: int = 0


class _Server:
    """Queue, slots and pool of one server."""

    def __init__(self, config: FleetConfig):
        self.config = config
        self.is_up, self.life = True, 0  # life: events of an earlier one mean nothing
        self._clear()

    def _clear(self) -> None:
        self.queue: collections.deque[Request] = collections.deque()
        self.running: dict[Request, int] = {}  # tokens
        self.held: collections.OrderedDict[int, int] = collections.OrderedDict()
        self.is_reading = False
        self.num_running_tokens = self.num_held_tokens = 0

    @property
    def load(self) -> int:
        return len(self.queue) + len(self.running)

    def fail(self) -> list[Request]:
        """Everything is lost; gives the requests."""
        lost = [*self.running, *self.queue]
        self.is_up = False
        self.life += 1
        self._clear()
        return lost

    def start(self) -> Request | None:
        """The next request whose prompt is read, if it can be now."""
        if self.is_reading or not self.queue or len(self.running) >= self.config.slots:
            return None
        request = self.queue[0]
        size = request.prompt + request.answer
        if self.running and self.num_running_tokens + size > self.config.cache_tokens:
            return None
        self.queue.popleft()
        held = self.held.pop(request.conversation, 0)
        self.num_held_tokens -= held
        request.hit = min(held, request.prompt - 1) // _HASH_TOKENS * _HASH_TOKENS
        self.running[request] = size
        self.num_running_tokens += size
        self.is_reading = True
        self._give_up_old()
        return request

    def _give_up_old(self) -> None:
        room = self.config.cache_tokens - self.num_running_tokens
        while self.held and self.num_held_tokens > room:
            self.num_held_tokens -= self.held.popitem(last=False)[1]

    def end(self, request: Request) -> None:
        size = self.running.pop(request)
        self.num_running_tokens -= size
        self.held[request.conversation] = size
        self.num_held_tokens += size


class _Simulation:
    """One run."""

    def __init__(self, trace: Sequence[Conversation], config: FleetConfig, policy: str):
        self.trace, self.config = trace, config
        self.servers = [_Server(config) for _ in range(config.servers)]
        self.requests: list[Request] = []
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._turn = itertools.count()
        self._moved: dict[int, _Server] = {}
        self._hashing = Rendezvous([str(number) for number in range(config.servers)])
        self._choose = {
            'hash': self._by_hash,
            'round_robin': self._in_turn,
            'least_loaded': self._least_loaded,
        }[policy]

    def _at(self, time_s: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), what, args))

    def run(self) -> list[Request]:
        for number, conversation in enumerate(self.trace):
            self._at(conversation.start_s, self._arrive, number, 0, 0)
        if self.config.fail_at_s is not None:
            self._at(self.config.fail_at_s, self._fail)
        while self._events:
            self.now, _, what, args = heapq.heappop(self._events)
            what(*args)
        return self.requests

    def _by_hash(self, request: Request) -> _Server:
        moved = self._moved.get(request.conversation)
        if moved is not None and moved.is_up:
            return moved
        order = self._hashing.order(str(request.conversation))
        servers = [self.servers[int(name)] for name in order]
        found = next(server for server in servers if server.is_up)
        if self.config.stay and found is not servers[0]:
            self._moved[request.conversation] = found
        return found

    def _in_turn(self, request: Request) -> _Server:
        up = [server for server in self.servers if server.is_up]
        return up[next(self._turn) % len(up)]

    def _least_loaded(self, request: Request) -> _Server:
        return min((server for server in self.servers if server.is_up), key=lambda s: s.load)

    def _arrive(self, conversation: int, turn: int, said: int) -> None:
        """said: tokens before the new ones."""
        asked = self.trace[conversation].turns[turn]
        prompt = said + asked.new_tokens
        request = Request(conversation, turn, prompt, asked.answer_tokens, self.now)
        self.requests.append(request)
        self._ask(request)

    def _ask(self, request: Request) -> None:
        server = self._choose(request)
        server.queue.append(request)
        self._go_on(server)

    def _go_on(self, server: _Server) -> None:
        request = server.start()
        if request is None:
            return
        if math.isnan(request.started_s):
            request.started_s = self.now
        new = request.prompt - request.hit
        seconds = self.config.overhead_s + new / self.config.prefill_tokens_per_s
        self._at(self.now + seconds, self._read, server, server.life, request)

    def _read(self, server: _Server, life: int, request: Request) -> None:
        if life != server.life:
            return
        server.is_reading = False
        rate = self.config.decode_tokens_per_s
        if math.isnan(request.first_s):
            request.first_s = self.now
        elif math.isnan(request.stalled_s):
            # What was sent is written once more before anything new.
            request.stalled_s = self.now + request.num_sent / rate - request.lost_s
        seconds = request.answer / rate
        self._at(self.now + seconds, self._end, server, life, request)
        self._go_on(server)

    def _end(self, server: _Server, life: int, request: Request) -> None:
        if life != server.life:
            return
        request.ended_s = self.now
        server.end(request)
        turns, turn = self.trace[request.conversation].turns, request.turn + 1
        if turn < len(turns):
            said = request.prompt + request.answer
            self._at(self.now + turns[turn].pause_s, self._arrive, request.conversation, turn, said)
        self._go_on(server)

    def _fail(self) -> None:
        server = self.servers[int(self._hashing.order('0')[0])]
        for request in server.fail():
            request.lost_s = self.now
            if not math.isnan(request.first_s):
                sent = (self.now - request.first_s) * self.config.decode_tokens_per_s
                request.num_sent = min(request.answer, int(sent))
            self._at(self.now + self.config.detect_s, self._ask, request)
        if math.isfinite(self.config.down_s):
            self._at(self.now + self.config.down_s, self._come_back, server)

    def _come_back(self, server: _Server) -> None:
        server.is_up = True


def simulate(trace: Sequence[Conversation], config: FleetConfig, policy: str) -> list[Request]:
    """All requests of a trace, each as it went, until the last answer.

    policy: hash: to the conversation's primary, or its secondary while that is down; round_robin;
      least_loaded: to the server with the fewest requests.

    Raises:
      ValueError: a conversation that no server has room for.
    """
    for conversation in trace:
        size = sum(turn.new_tokens + turn.answer_tokens for turn in conversation.turns)
        if size > config.cache_tokens:
            raise ValueError(
                f'fleet.cache_tokens: got {config.cache_tokens}, and a conversation has {size}'
            )
    return _Simulation(trace, config, policy).run()
