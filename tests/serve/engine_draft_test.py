"""An engine that guesses answers as one that does not, whatever of the guesses stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from k3jax.config import MeshConfig
from k3jax.data.images import ImageConfig, Patches
from k3jax.model.draft import init_draft, with_taps
from k3jax.parallel.mesh import make_mesh
from k3jax.serve.draft_pool import DraftPool, open_pool
from k3jax.serve.engine import Engine
from k3jax.serve.engine_config import EngineConfig
from k3jax.serve.generate import generate
from k3jax.serve.load import Loaded
from k3jax.serve.rows import row_of
from k3jax.serve.sampling import Choice, probabilities
from k3jax.train.eval import logits_of
from tests.engines import MODEL, PAD, TOKENIZER, answers, ids, parameters, prompt_of, request

CONFIG = EngineConfig(
    num_slots=3, max_length=200, max_waiting=8, pieces=(8, 32), lane_sizes=(48, 120)
)
GUESSING = with_taps(MODEL)
OUTPUTS = 'o_proj', 'down_proj', 'w2', 'routed_expert_up_proj'


def quieter(params, factor):
    """The outputs of mixers and experts made small: what is said follows the last token."""

    def scaled(path, x):
        return factor * x if path[-1].key in OUTPUTS else x

    return jax.tree_util.tree_map_with_path(scaled, params)


@functools.cache
def model_params():
    return quieter(parameters(), 0.3)


@functools.cache
def draft():
    """A draft that says what the last token alone would make the model say."""
    fresh = quieter(init_draft(GUESSING, {}, jax.random.key(1)), 0.0)
    d = MODEL.config.hidden_size
    halves = jnp.concatenate([jnp.eye(d), jnp.zeros((d, d))], axis=1)
    return fresh | {'mtp': fresh['mtp'] | {'eh_proj': halves}}


def alone(prompt, count=8, **options):
    return list(generate(MODEL, model_params(), prompt, max_new_tokens=count, **options))


def new_engine(**options):
    config = EngineConfig(**vars(CONFIG) | options)
    pool = DraftPool(GUESSING, model_params(), draft(), config.num_slots, config.max_length, 4)
    return Engine(pool, TOKENIZER, config, images=ImageConfig(patch_size=2))


@pytest.fixture(scope='module')
def engine():
    engine = new_engine()
    engine.start()
    yield engine
    engine.close()


def test_requests_of_any_length_answer_as_each_does_without_guesses(engine):
    some = [request(prompt_of(n), max_new_tokens=3 + n % 19) for n in (1, 7, 8, 9, 48, 49, 130, 2)]
    found = answers(engine, *some)
    for asked, tokens in zip(some, found, strict=True):
        count = asked.sampling.max_new_tokens
        assert ids(tokens) == alone(asked.prompt_ids, count, num_ids=512)
        assert [token.finished for token in tokens] == [None] * (count - 1) + ['length']
    checks, tokens = engine.num_checks, engine.num_checked_tokens
    assert 1.2 < tokens / checks < 4.8  # some guesses stand, not all


def test_what_a_seed_draws_does_not_depend_on_the_others(engine):
    asked = request(prompt_of(20), temperature=2.0, seed=5, max_new_tokens=12)
    others = [request(prompt_of(20), temperature=2.0, seed=n) for n in (6, 7, 8)]
    (want,) = answers(engine, asked)
    assert ids(answers(engine, *others, asked)[-1]) == ids(want)
    assert ids(answers(engine, others[0])[0]) != ids(want)[:8]


def test_nothing_comes_after_a_stop_id_within_a_window(engine):
    for place in range(2, 8):
        new = alone(prompt_of(9))
        (found,) = answers(engine, request(prompt_of(9), stop_ids=frozenset({new[place]})))
        assert ids(found) == new[: new.index(new[place]) + 1]
        assert found[-1].finished == 'stop'


def test_logprobs_are_the_models_own(engine):
    prompt = prompt_of(11)
    found = answers(engine, request(prompt, logprobs=3, max_new_tokens=12), request([5]))[0]
    logits = logits_of(MODEL, model_params(), [*prompt, *ids(found)])[0, len(prompt) - 1 : -1]
    want = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    for token, row in zip(found, want, strict=True):
        np.testing.assert_allclose(token.logprob, row[token.id], atol=2e-4)
        assert [i for i, _ in token.top] == np.argsort(-row)[:3].tolist()


def test_grammars_penalties_and_images_go_beside_guesses(engine):
    grammar = 'start: "abc" | "bcd" | "bd"'
    asked = [request(prompt_of(4, n), constraint=grammar, max_new_tokens=20) for n in range(2)]
    punished = request(prompt_of(6), frequency_penalty=1e4, max_new_tokens=20)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 3, 2, 2), np.uint8)
    seeing = request([3, PAD, *prompt_of(30)], media=[Patches(pixels, (1, 2, 4))])
    *found, different, seen, free = answers(engine, *asked, punished, seeing, request(prompt_of(6)))
    for tokens in found:
        assert TOKENIZER.decode(ids(tokens)[:-1]) in ('abc', 'bcd', 'bd')
    assert len(set(ids(different))) == 20
    assert len(seen) == 8
    assert ids(free) == alone(prompt_of(6))


def continued(engine, request):
    """How much of the prompt was held, and the answer."""
    streams, submit = [], engine.submit
    engine.submit = lambda request: streams.append(submit(request)) or streams[-1]
    (found,) = answers(engine, request)
    engine.submit = submit
    return streams[0].cached_tokens, ids(found)


def test_a_next_turn_goes_on_from_what_is_held():
    engine = new_engine(prefix_cache_bytes=1 << 24, prefix_hash_tokens=16)
    engine.start()
    try:
        first = prompt_of(21)
        _, said = continued(engine, request(first, max_new_tokens=40))
        assert said == alone(first, 40)
        second = [*first, *said, *prompt_of(5)]
        cached, answer = continued(engine, request(second, max_new_tokens=20))
        assert answer == alone(second, 20)
        # All but the last partial block of what was read: the last token drawn never is.
        assert cached == (len(first) + 39) // 16 * 16
    finally:
        engine.close()


@pytest.mark.slow
def test_tokens_are_drawn_from_the_model_whatever_the_limit():
    """Hundreds of slots with one prompt: first tokens of a step, against the model's own odds."""
    slots, prompt = 512, prompt_of(5)
    pool = DraftPool(GUESSING, model_params(), draft(), slots, 16, 2)
    lanes = pool.lanes(16)
    tokens, following = np.array([prompt], np.int32), np.array([-1], np.int32)
    logits, lanes = pool.read(tokens, np.array([5], np.int32), following, lanes, None)
    options = {'temperature': 60.0, 'top_k': 6}
    sampling = request(prompt, **options).sampling
    first = None
    for slot in range(slots):
        # The same first token everywhere: greedy; what follows is drawn.
        row = row_of(sampling, slot, tuple(prompt), 512, 512)
        choice = row.choice._replace(temperature=np.zeros(1, np.float32))
        drawn = pool.admit(lanes, logits, slot, row._replace(choice=choice), None)
        first = int(drawn.token[0, 0])
    pool.rows = pool.rows._replace(
        choice=pool.rows.choice._replace(temperature=jnp.full(slots, 60.0))
    )
    limit = np.where(np.arange(slots) % 2, 1, 3).astype(np.int32)
    drawn = pool.step(np.ones(slots, bool), None, limit)
    own = np.asarray(logits_of(MODEL, model_params(), [*prompt, first]))[0, -1]
    choice = Choice(*map(jnp.asarray, (60.0, 1.0, 512, 6)))
    odds = np.asarray(probabilities(own, choice), np.float64)
    odds /= odds.sum()
    assert np.sum(odds > 0) == 6 and np.max(odds) < 0.9
    for half in (0, 1):
        seen = np.bincount(np.asarray(drawn.token[half::2, 0]), minlength=512)
        assert not np.any(seen[odds == 0])
        kept = odds > 0
        assert stats.chisquare(seen[kept], odds[kept] * slots / 2).pvalue > 1e-3
    counts = np.asarray(drawn.count)
    assert np.all(counts[1::2] == 1) and 1 < np.mean(counts[::2]) < 3


def test_a_mesh_and_no_guesses_are_refused():
    with pytest.raises(ValueError, match='num_guesses: got 0, wanted 1 or more'):
        DraftPool(GUESSING, model_params(), draft(), 2, 16, 0)
    mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[:2])
    with pytest.raises(ValueError, match='--draft: there are no guesses on a mesh yet'):
        open_pool(Loaded(MODEL, model_params(), TOKENIZER, None, mesh=mesh), 2, 16, 'draft')
