"""Which steps are undone: the threshold against NumPy, an update that is undone, whole runs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import Config, ConfigError, DataConfig, OptimizerConfig, TrainConfig
from k3jax.data.tokenizer import load_tokenizer
from k3jax.train import spikes
from k3jax.train.loop import LossSpike, NonFiniteLoss, Trainer
from k3jax.train.program import Program
from k3jax.train.replay import replay
from tests import tiny
from tests.corpus import write_corpus

LIMITS = spikes.Limits(window=5, deviations=3.0)


def judged(losses, norms=None):
    """(verdict, threshold) of each loss in turn, and the guard after them."""
    judge = jax.jit(spikes.judged, static_argnums=3)
    guard, found = spikes.fresh_guard(LIMITS), []
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        judgement, guard = judge(guard, jnp.float32(loss), jnp.float32(norm), LIMITS)
        found.append((int(judgement.verdict), float(judgement.threshold)))
    return found, guard


def test_a_loss_far_above_the_median_of_the_window_is_a_spike_and_leaves_no_trace_in_it():
    rng = np.random.default_rng(0)
    losses = 3 + 0.1 * rng.standard_normal(40)
    losses[[12, 13, 30]] += 5
    found, guard = judged(losses)
    kept = []
    for loss, (verdict, threshold) in zip(losses, found, strict=True):
        if len(kept) < LIMITS.window:
            assert threshold == np.inf
        else:
            window = np.array(kept[-LIMITS.window :], np.float64)
            median = np.median(window)
            spread = max(1.4826 * np.median(abs(window - median)), 1e-3 * median)
            np.testing.assert_allclose(threshold, median + 3 * spread, rtol=1e-6)
        assert verdict == (spikes.SPIKE if loss > threshold else spikes.FINE)
        if verdict == spikes.FINE:
            kept.append(np.float32(loss))
    assert {12, 13, 30} <= {n for n, (verdict, _) in enumerate(found) if verdict == spikes.SPIKE}
    assert int(guard.accepted) == len(kept) and int(guard.skipped) == 40 - len(kept)


def test_what_is_no_number_is_told_apart_and_counted():
    inf, nan = np.inf, np.nan
    found, guard = judged([1, nan, 1, inf, 1, 1], [1, 1, inf, 1, nan, 1])
    bad = spikes.NON_FINITE
    assert [verdict for verdict, _ in found] == [0, bad, bad, bad, bad, 0]
    assert (int(guard.accepted), int(guard.skipped), int(guard.in_a_row)) == (2, 4, 0)
    np.testing.assert_array_equal(guard.losses, [1, 1, 0, 0, 0])


def test_without_a_spike_policy_only_what_is_no_number_is_undone():
    limits = spikes.limits_of(TrainConfig(non_finite_policy='skip'))
    assert limits.deviations is None
    guard = spikes.fresh_guard(limits)._replace(accepted=np.int32(10**6))
    judgement, _ = spikes.judged(guard, jnp.float32(1e30), jnp.float32(1), limits)
    assert int(judgement.verdict) == spikes.FINE
    assert spikes.limits_of(TrainConfig()) is None


def test_the_guard_survives_json_bit_for_bit():
    _, guard = judged(np.random.default_rng(1).uniform(1, 9, 8).astype(np.float32))
    again = spikes.from_json(json.loads(json.dumps(spikes.to_json(guard))), LIMITS)
    jax.tree.map(np.testing.assert_array_equal, again, guard)
    other = spikes.from_json(spikes.to_json(guard), LIMITS._replace(window=9))
    assert int(other.accepted) == 0 and int(other.skipped) == int(guard.skipped)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'spike_policy': 'ignore'}, "train.spike_policy: got 'ignore', wanted one of none, stop"),
        ({'non_finite_policy': 'none'}, "train.non_finite_policy: got 'none', wanted one of stop"),
        ({'spike_window': 3}, 'train.spike_window: got 3, wanted 4 to 2'),
        ({'max_skipped_steps': 0}, 'train.max_skipped_steps: got 0, wanted a number above 0'),
    ],
)
def test_policies_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**fields)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('data') / 'corpus')


def config_of(corpus, **train):
    return Config(
        model=tiny.k3((1,), (2,), vocab_size=512),
        optimizer=OptimizerConfig(warmup_steps=1),
        data=DataConfig(
            source=corpus, sequence_length=16, batch_size=2, held_out_every=5, shuffle_rows=8
        ),
        train=TrainConfig(
            **{
                'num_steps': 16,
                'dtype': 'float32',
                'log_every': 3,
                'checkpoint_every': 4,
                'keep_checkpoints': 9,
                'eval_batches': 1,
                'sample_tokens': 0,
                'spike_window': 4,
                # So few that some losses of this short run are above.
                'spike_deviations': 2.0,
                'max_roll_backs': 9,
            }
            | train
        ),
    )


def test_an_undone_step_changes_the_counts_and_nothing_else(corpus):
    config = config_of(corpus, spike_policy='skip')
    program = Program(config, load_tokenizer('bytes'), jax.devices()[:1])
    batch = program.placement.place(program.open_data().take(2))
    program.compile(batch)
    low = {'losses': [0.1] * 4, 'accepted': 7, 'skipped': 3, 'in_a_row': 1}
    state = program.fresh()._replace(guard=program.placed_guard(low))
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = program.step(state, batch)
    assert int(metrics['judgement'].verdict) == spikes.SPIKE
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    assert int(state.step) == 1
    assert spikes.to_json(state.guard) == low | {
        'losses': [float(np.float32(0.1))] * 4,
        'skipped': 4,
        'in_a_row': 2,
    }
    high = program.placed_guard(low | {'losses': [9.0] * 4})
    state, metrics = program.step(state._replace(guard=high), batch)
    assert int(metrics['judgement'].verdict) == spikes.FINE
    assert int(state.guard.accepted) == 8 and int(state.guard.in_a_row) == 0
    moved = jax.tree.map(lambda a, b: np.any(a != np.asarray(b)), before, state[1:3])
    assert np.mean(jax.tree.leaves(moved)) > 0.9


def trainer(config, workdir):
    return Trainer(config, str(workdir), jax.devices()[:1])


def leaves(state):
    return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state, state.guard))]


def rows(workdir):
    return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


class Killed(Exception):
    pass


def kill_after(step, times=1):
    """When it is made so many times."""
    seen = []

    def on_step(now):
        seen.append(now)
        if seen.count(step) == times:
            raise Killed

    return on_step


@pytest.mark.slow
@pytest.mark.parametrize(
    ('policy', 'kill'),
    [('skip', (15, 1)), ('roll_back', (13, 2))],
)
def test_a_run_with_spikes_that_is_killed_and_resumed_equals_one_that_was_not(
    corpus, tmp_path, policy, kill
):
    config = config_of(corpus, spike_policy=policy)
    straight = trainer(config, tmp_path / 'a').run()
    decisions = [row for row in rows(tmp_path / 'a') if 'decision' in row]
    assert len(decisions) > 1 and {row['decision'] for row in decisions} == {policy}
    with pytest.raises(Killed):
        trainer(config, tmp_path / 'b').run(kill_after(*kill))
    resumed = trainer(config, tmp_path / 'b').run()
    for a, b in zip(leaves(resumed.state), leaves(straight.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [row for row in rows(tmp_path / 'b') if 'decision' in row] == decisions
    steps = [row['step'] for row in rows(tmp_path / 'a') if 'loss' in row]
    assert steps == sorted(set(steps))
    # Made again, with the data that the run went on with after it went back.
    made = list(replay(str(tmp_path / 'a'), 15, jax.devices()[:1]))
    assert [(one.step, one.equal) for one in made] == [(13, True), (14, True), (15, True)]
    assert made[-1].recorded


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'spike_policy': 'stop'},
            r'loss .* at step 14 is a spike: above .* checkpoint is of step 12',
        ),
        pytest.param(
            {'spike_policy': 'skip', 'max_skipped_steps': 2},
            r'step 16 .*3 steps in a row are undone, wanted at most 2 \(train.max_skipped_steps\)',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {'spike_policy': 'roll_back', 'max_roll_backs': 1},
            r'the run went back to step 12 1 times, wanted at most 1 \(train.max_roll_backs\)',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_must_not_go_on_says_why_and_saves_nothing_new(
    corpus, tmp_path, fields, message
):
    with pytest.raises(LossSpike, match=message):
        trainer(config_of(corpus, **fields), tmp_path / 'a').run()
    saved = sorted(int(path.name) for path in (tmp_path / 'a/checkpoints').iterdir())
    assert saved == [4, 8, 12]


@pytest.mark.slow
@pytest.mark.parametrize('policy', ['skip', 'roll_back'])
def test_numbers_that_stay_no_numbers_end_the_run(corpus, tmp_path, policy):
    """An update so large that no later loss is a number, whatever the data."""
    config = config_of(corpus, non_finite_policy=policy, max_skipped_steps=2, log_every=1)
    wild = OptimizerConfig(learning_rate=1e30, warmup_steps=0)
    with pytest.raises(NonFiniteLoss, match=r'3 steps in a row|went back to step 0 9 times'):
        trainer(dataclasses.replace(config, optimizer=wild), tmp_path / 'a').run()
    found = rows(tmp_path / 'a')
    assert (
        sum(row.get('decision') == policy for row in found) == {'skip': 2, 'roll_back': 9}[policy]
    )
    assert all(np.isfinite(row['loss']) for row in found if 'loss' in row)
