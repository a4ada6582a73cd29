"""Which request gets a slot when: continuous batching over a pool, in a thread of its own.

Between two steps of the running requests one piece of waiting prompts is read, so that a long
prompt does not stop the others.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from k3jax.data.images import ImageConfig, Patches
from k3jax.data.tokenizer import Tokenizer
from k3jax.model.cache import Cache
from k3jax.serve.constrain import Constrainer, Matcher
from k3jax.serve.engine_config import EngineConfig
from k3jax.serve.generate import rows_from
from k3jax.serve.media import rows_of
from k3jax.serve.pool import Pool
from k3jax.serve.prefix_cache import PrefixCache, distinct_tokens
from k3jax.serve.prefix_figures import PrefixFigures
from k3jax.serve.request import Finished, Overloaded, Request, Sampling, Token
from k3jax.serve.rows import Drawn, row_of
from k3jax.serve.stream import EngineStream, deliver
from k3jax.train.eval import check_token_ids

_FAILED = Token(0, finished='error')


@dataclasses.dataclass(eq=False)
class _Job:
    """A request on its way.

    Attributes:
      prompt: with as many media tokens as rows. media: what those are made of, until it is read.
      position: tokens of the prompt that were read. media_position: media tokens among them.
      num_asked, num_drawn: tokens of the answer that the device was told to draw, and of these
        those that were read.
      distinct: the prompt as a prefix cache knows it. answer: tokens that were read. held: of the
        answer, for a next turn.
    """

    request: Request
    stream: EngineStream
    prompt: list[int]
    position: int = 0
    media_position: int = 0
    num_asked: int = 0
    num_drawn: int = 0
    matcher: Matcher | None = None
    rows: jax.Array | None = None
    slot: int | None = None
    distinct: np.ndarray | None = None
    answer: list[int] = dataclasses.field(default_factory=list)
    held: _Held | None = None


class _Held(NamedTuple):
    """A slot's states after its first `length` tokens."""

    length: int
    state: jax.Array


@dataclasses.dataclass
class _Group:
    """Prompts that are read together, by lane."""

    jobs: dict[int, _Job]
    cache: Cache


class _Pending(NamedTuple):
    """Tokens that the device was told to draw, and whose they are, by place in `drawn`."""

    drawn: Drawn
    jobs: list[tuple[int, _Job]]


class Engine:
    """Continues prompts; see `request.Engine`. It is started before the first request.

    Attributes:
      num_checks, num_checked_tokens: of a draft's guesses: how often a request's were checked, and
        how many tokens that gave.

    Raises:
      ValueError: slots that the mesh cannot hold, or more tokens than the model has positions for.
    """

    def __init__(
        self,
        pool: Pool,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        images: ImageConfig | None = None,
        name: str | None = None,
    ):
        """images: how they become patches, in models that see. name: that clients ask for."""
        model = pool.model.config
        if (pool.num_slots, pool.size) != (config.num_slots, config.max_length):
            raise ValueError('pool: wanted one of config.num_slots slots of config.max_length')
        self.tokenizer, self.max_length = tokenizer, config.max_length
        self.model_name = name or model.name
        self._pool, self._config, self._images = pool, config, images
        self._media_id = model.media_placeholder_token_id if model.vision is not None else None
        self._num_ids = min(tokenizer.vocab_size, model.vocab_size)
        self._seeds = np.random.default_rng()
        self._constrainer: Constrainer | None = None
        self._prefixes: PrefixCache | None = None
        if config.prefix_cache_bytes:
            if pool.mesh is not None:
                raise ValueError('prefix_cache_bytes: there is no prefix cache on a mesh yet')
            self._prefixes = PrefixCache(
                pool.model,
                config.prefix_cache_bytes,
                host_bytes=config.prefix_host_bytes,
                hash_tokens=config.prefix_hash_tokens,
            )
        self._wake = threading.Condition()
        self._waiting: collections.deque[_Job] = collections.deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name='engine', daemon=True)
        self._running: dict[int, _Job] = {}
        self._group: _Group | None = None
        self._pending: collections.deque[_Pending] = collections.deque()
        self.num_checks = self.num_checked_tokens = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends all requests as failed, and the thread."""
        self.wake(closing=True)
        if self._thread.is_alive():
            self._thread.join()

    def wake(self, *, closing: bool = False) -> None:
        with self._wake:
            self._closing |= closing
            self._wake.notify()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def prefix_figures(self) -> PrefixFigures | None:
        """Of the prefix cache, if there is one."""
        return None if self._prefixes is None else self._prefixes.figures

    def submit(self, request: Request) -> EngineStream:
        """Queues a request; in the event loop that will read the stream.

        Raises:
          Overloaded: the queue is full. ValueError: a prompt that the model cannot read.
        """
        prompt = self._expanded(request)
        check_token_ids(prompt, self._pool.model.config.vocab_size, 'prompt')
        wanted = len(prompt) + request.sampling.max_new_tokens
        if wanted > self.max_length or request.sampling.max_new_tokens < 1:
            raise ValueError(
                f'prompt of {len(prompt)} tokens and {request.sampling.max_new_tokens} new ones: '
                f'wanted 1 new one or more, and at most {self.max_length} in all'
            )
        job = _Job(request, EngineStream(self.wake), prompt)
        with self._wake:
            if self._closing or len(self._waiting) >= self._config.max_waiting:
                raise Overloaded(f'{len(self._waiting)} requests wait')
            self._waiting.append(job)
            self._wake.notify()
        return job.stream

    def _expanded(self, request: Request) -> list[int]:
        """The prompt with as many media tokens as rows; raises ValueError for another number."""
        prompt, media = list(request.prompt_ids), request.media
        if self._media_id is None:
            if media:
                raise ValueError(f'media: {self._pool.model.config.name} has no vision tower')
            return prompt
        counts = iter([_num_rows(patches) for patches in media])
        pads = prompt.count(self._media_id)
        if pads != len(media):
            raise ValueError(f'prompt: got {pads} media tokens, wanted {len(media)}, one an image')
        return [
            token for token in prompt for _ in range(next(counts) if token == self._media_id else 1)
        ]

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._waiting or self._group or self._running):
                    self._wake.wait()
                if self._closing:
                    break
            try:
                self._turn()
            except Exception:
                logging.exception('a step of the engine failed; what it had is given up')
                self._fail_all(self._take_running())
                self._pool.reset()
                if self._prefixes is not None:
                    self._prefixes.reset()
        with self._wake:
            waiting = list(self._waiting)
            self._waiting.clear()
        self._fail_all([*self._take_running(), *waiting])

    def _take_running(self) -> list[_Job]:
        jobs = [*self._running.values(), *(self._group.jobs.values() if self._group else ())]
        self._running, self._group = {}, None
        self._pending.clear()
        return jobs

    def _fail_all(self, jobs: Iterable[_Job]) -> None:
        deliver([(job.stream, _FAILED) for job in jobs])

    def _give_up(self, job: _Job, error: Exception) -> None:
        """Fails one request, whose own images or grammar are at fault."""
        logging.warning('a request is given up: %s', error)
        self._running.pop(job.slot, None)
        self._fail_all([job])

    def _turn(self) -> None:
        """One piece of prompts, one step of what runs."""
        self._drop_cancelled()
        if self._group is None:
            self._begin_group()
        if self._group is not None:
            self._read_piece(self._group)
        self._fetch_next()
        if self._running:
            self._decode()
        else:
            self._pending.clear()

    def _drop_cancelled(self) -> None:
        self._running = {s: job for s, job in self._running.items() if not job.stream.is_cancelled}
        with self._wake:
            kept = [job for job in self._waiting if not job.stream.is_cancelled]
            self._waiting.clear()
            self._waiting.extend(kept)

    def _fetch_next(self) -> None:
        """Has the beginnings of the next prompts brought to the device while others are read."""
        if self._prefixes is None:
            return
        with self._wake:
            coming = list(itertools.islice(self._waiting, self._pool.num_lanes))
        for job in coming:
            if job.distinct is None:
                self._know(job)
                self._prefixes.fetch(job.distinct)

    def _know(self, job: _Job) -> None:
        job.distinct = distinct_tokens(job.prompt, self._media_id, job.request.media)

    def _begin_group(self) -> None:
        free: dict[int, int] = {}
        for slot in range(self._pool.num_slots):
            if slot not in self._running:
                free.setdefault(self._pool.lane_of(slot), slot)
        jobs: dict[int, _Job] = {}
        while len(jobs) < len(free):
            with self._wake:
                if not self._waiting:
                    break
                job = self._waiting.popleft()
            try:
                self._prepare(job)
            except Exception as error:
                self._give_up(job, error)
                continue
            lane, job.slot = list(free.items())[len(jobs)]
            jobs[lane] = job
        if jobs:
            try:
                self._group = _Group(jobs, self._begun(jobs))
            except Exception:
                self._fail_all(jobs.values())  # which are in no place yet
                raise

    def _begun(self, jobs: dict[int, _Job]) -> Cache:
        """Lanes with what is held of each prompt."""
        cache = self._pool.lanes(
            self._config.lane_size(max(len(job.prompt) for job in jobs.values()))
        )
        for lane, job in jobs.items() if self._prefixes is not None else ():
            cache, job.position = self._prefixes.load(job.distinct, cache, lane)
            job.stream.cached_tokens = job.position
            job.media_position = job.prompt[: job.position].count(self._media_id)
        return cache

    def _prepare(self, job: _Job) -> None:
        """What a request needs before its prompt is read; its images are looked at once."""
        request = job.request
        if request.constraint is not None:
            self._constrainer = self._constrainer or Constrainer(self.tokenizer)
            job.matcher = self._constrainer.matcher(request.constraint)
        if request.media:
            pool, images = self._pool, self._images or ImageConfig()
            rows = [rows_of(pool.model, pool.params, one, images) for one in request.media]
            job.rows = jnp.concatenate(rows)
        if self._prefixes is not None and job.distinct is None:
            self._know(job)
        job.request = dataclasses.replace(request, media=())

    def _read_piece(self, group: _Group) -> None:
        """Reads the next piece of each lane's prompt; what is read whole gets its slot."""
        lanes, jobs = self._pool.num_lanes, group.jobs
        left = [len(job.prompt) - job.position for job in jobs.values()]
        size = self._config.piece(max(left))
        # The cache may be shorter than a piece at its end, whose padding is dropped.
        tokens, num_real = np.zeros((lanes, size), np.int32), np.zeros(lanes, np.int32)
        following = np.full(lanes, -1, np.int32)
        media: list[jax.Array | None] = [None] * lanes
        for lane, job in jobs.items():
            end = self._piece_end(job, size)
            own = job.prompt[job.position : end]
            tokens[lane, : len(own)], num_real[lane] = own, len(own)
            if end < len(job.prompt):
                following[lane] = job.prompt[end]
            if job.rows is not None and self._media_id in own:
                media[lane] = rows_from(job.rows, np.int32(job.media_position), size)
                job.media_position += own.count(self._media_id)
        stacked = None
        if any(rows is not None for rows in media):
            blank = jnp.zeros_like(next(rows for rows in media if rows is not None))
            stacked = jnp.concatenate([blank if rows is None else rows for rows in media])
        logits, group.cache = self._pool.read(tokens, num_real, following, group.cache, stacked)
        unread = []
        for lane, job in jobs.items():
            # A lane that is read keeps its place: the others' caches are beside its own.
            if num_real[lane]:
                job.position += int(num_real[lane])
                self._hold_prompt(job, group.cache, lane)
                if job.position == len(job.prompt):
                    self._admit(job, lane, logits, group.cache)
                else:
                    unread.append(job)
        if all(job.stream.is_cancelled for job in unread):
            self._group = None

    def _piece_end(self, job: _Job, size: int) -> int:
        """Where a piece from `job.position` on ends: also where a beginning is to be held."""
        end = job.position + size
        if self._prefixes is not None:
            boundary = self._prefixes.boundary(len(job.prompt))
            end = boundary if job.position < boundary < end else end
        return end

    def _hold_prompt(self, job: _Job, cache: Cache, lane: int) -> None:
        """Holds what a lane has just read, if a later prompt may begin with it."""
        prefixes = self._prefixes
        if prefixes is not None and job.position == prefixes.boundary(len(job.prompt)):
            state = prefixes.state_of(cache, lane)
            prefixes.store(job.distinct[: job.position], cache, lane, state)

    def _hold_answer(self, job: _Job) -> None:
        """Holds what a slot has of an answer that is over, for the next turn."""
        if self._prefixes is not None and job.held is not None:
            tokens = np.concatenate([job.distinct, np.array(job.answer, np.int64)])
            length, state = job.held
            self._prefixes.store(tokens[:length], self._pool.cache, job.slot, state)

    def _admit(self, job: _Job, lane: int, logits: jax.Array, cache: Cache) -> None:
        if job.stream.is_cancelled:
            return
        sampling = job.request.sampling
        seed = sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(2**32))
        vocab_size = self._pool.model.config.vocab_size
        row = row_of(sampling, seed % 2**32, tuple(job.prompt), self._num_ids, vocab_size)
        try:
            mask = None if job.matcher is None else self._mask_of(job.matcher)
        except Exception as error:
            self._give_up(job, error)
            return
        drawn = self._pool.admit(cache, logits, job.slot, row, mask)
        self._running[job.slot] = job
        self._ask(drawn, [(lane, job)])

    def _mask_of(self, matcher: Matcher) -> np.ndarray:
        """[words]: those of the model's vocabulary, which may be larger than the tokenizer's."""
        mask = np.zeros(self._pool.open_mask.shape[1], np.uint32)
        own = matcher.bitmask()
        mask[: len(own)] = own
        return mask

    def _decode(self) -> None:
        """A step is asked for before the tokens of the one before are read, so that the device does
        not wait; but with a grammar, which must know them, and with guesses, where it is not known
        how many there are."""
        mask, waits = None, self._pool.num_guesses > 0
        if any(job.matcher for job in self._running.values()):
            self._read_tokens()
            mask = self._masks()
        jobs = [
            (slot, job)
            for slot, job in self._running.items()
            if job.num_asked < job.request.sampling.max_new_tokens
        ]
        if jobs:
            active = np.zeros(self._pool.num_slots, bool)
            # Also those that want no more tokens: their caches are still to be held.
            active[list(self._running)] = True
            self._ask(self._pool.step(active, mask, self._limits(jobs)), jobs)
        self._read_tokens(leave=1 if jobs and mask is None and not waits else 0)

    def _limits(self, jobs: list[tuple[int, _Job]]) -> np.ndarray:
        """[B]: how many tokens a step may give each slot."""
        limits = np.full(self._pool.num_slots, self._pool.num_guesses + 1, np.int32)
        for slot, job in jobs:
            # What a grammar or a penalty says of a second token depends on the first.
            if job.matcher is not None or job.request.sampling.has_penalties:
                limits[slot] = 1
            elif self._prefixes is not None:
                # Not past a place whose states are to be held.
                length = len(job.prompt) + job.num_asked - 1
                after = self._prefixes.boundary(length) + self._prefixes.hash_tokens
                limits[slot] = min(limits[slot], after - length)
        return limits

    def _masks(self) -> np.ndarray:
        """[B, words]: what every slot may draw; a request whose grammar fails is given up."""
        mask = np.full(self._pool.open_mask.shape, 2**32 - 1, np.uint32)
        for slot, job in list(self._running.items()):
            try:
                if job.matcher:
                    mask[slot] = self._mask_of(job.matcher)
            except Exception as error:
                self._give_up(job, error)
        return mask

    def _ask(self, drawn: Drawn, jobs: list[tuple[int, _Job]]) -> None:
        for _, job in jobs:
            job.num_asked += 1
            if job.num_asked > 1 and not self._pool.num_guesses:
                self._hold_states(job, job.num_asked)
        self._pending.append(_Pending(drawn, jobs))

    def _hold_states(self, job: _Job, num_drawn: int) -> None:
        """Holds the states of a slot, all of whose tokens but the last are read, at a boundary."""
        length, prefixes = len(job.prompt) + num_drawn - 1, self._prefixes
        if prefixes is not None and prefixes.boundary(length) == length:
            job.held = _Held(length, prefixes.state_of(self._pool.cache, job.slot))

    def _read_tokens(self, leave: int = 0) -> None:
        """Hands tokens out, but for those of the last `leave` steps."""
        while len(self._pending) > leave:
            self._take(*self._pending.popleft())

    def _take(self, drawn: Drawn, jobs: list[tuple[int, _Job]]) -> None:
        # Those that ended or were dropped since the step was asked for take no part.
        jobs = [(place, job) for place, job in jobs if self._running.get(job.slot) is job]
        wants = any(job.request.sampling.logprobs is not None for _, job in jobs)
        counts, tokens = jax.device_get((drawn.count, drawn.token))
        tops = jax.device_get(drawn[2:]) if wants else None
        found = []
        for place, job in jobs:
            own = tokens[place, : counts[place]].tolist()
            try:
                for number, token in enumerate(own):
                    job.num_drawn += 1
                    finished = self._finished(job, token)
                    told = _told(job, tops, (place, number))
                    found.append((job.stream, Token(token, *told, finished)))
                    job.answer.append(token)
                    if finished is not None:
                        break
            except Exception as error:
                self._give_up(job, error)
                continue
            if self._pool.num_guesses:
                job.num_asked = job.num_drawn
                # Where it ends within a window, the states are those of the window's end.
                if job.num_drawn > 1 and number == len(own) - 1:
                    self._hold_states(job, job.num_drawn)
            if finished is not None:
                self._hold_answer(job)
                del self._running[job.slot]
            if tokens.shape[1] > 1:
                self.num_checks += 1
                self.num_checked_tokens += len(own)
        deliver(found)

    def _finished(self, job: _Job, token: int) -> Finished | None:
        sampling = job.request.sampling
        if job.matcher is not None:
            job.matcher.advance(token)
        if token in sampling.stop_ids or (job.matcher is not None and job.matcher.is_finished):
            return 'stop'
        return 'length' if job.num_drawn == sampling.max_new_tokens else None

    def warm_up(self) -> None:
        """Compiles what is needed for texts and small images; before `start`."""
        pool, config, model = self._pool, self._config, self._pool.model.config
        seen = None
        if self._media_id is not None:
            images = self._images or ImageConfig(patch_size=model.vision.patch_size)
            blank = np.zeros((4, 3, *[model.vision.patch_size] * 2), np.uint8)
            seen = rows_of(pool.model, pool.params, Patches(blank, (1, 2, 2)), images)
        for size in sorted({config.lane_size(size) for size in (1, *config.lane_sizes)}):
            for piece in config.pieces:
                lanes = pool.lanes(size)
                tokens = np.zeros((pool.num_lanes, piece), np.int32)
                num_real = np.ones(pool.num_lanes, np.int32)
                following = -num_real
                logits, lanes = pool.read(tokens, num_real, following, lanes, None)
                if seen is not None:
                    media = jnp.concatenate([rows_from(seen, np.int32(0), piece)] * pool.num_lanes)
                    logits, lanes = pool.read(tokens, num_real, following, lanes, media)
            row = row_of(Sampling(), 0, (), self._num_ids, model.vocab_size)
            pool.admit(lanes, logits, 0, row, None)
        jax.block_until_ready(pool.step(np.zeros(pool.num_slots, bool), None))
        pool.reset()


def _told(
    job: _Job, tops: tuple[np.ndarray, ...] | None, where: tuple[int, int]
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """The logprob of a token and the likeliest ones, if the request wants them."""
    count = job.request.sampling.logprobs
    if count is None:
        return None, ()
    logprob, ids, best = (x[where] for x in tops)
    return float(logprob), tuple(zip(ids[:count].tolist(), best[:count].tolist(), strict=True))


def _num_rows(patches: Patches) -> int:
    _, rows, columns = patches.grid
    return rows * columns // 4
