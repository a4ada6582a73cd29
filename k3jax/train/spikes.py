"""Which steps are undone: those with a loss or gradient that is no number, or a loss spike."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import TrainConfig

FINE, NON_FINITE, SPIKE = 0, 1, 2  # verdicts

_NORMAL = 1.4826  # a normal distribution's standard deviation, in median distances
# A deviation is at least this much of the median, or a flat loss would be all spikes.
_LEAST = 1e-3


class Limits(NamedTuple):
    """window: losses that are remembered. deviations: None where no loss is a spike."""

    window: int
    deviations: float | None


class Guard(NamedTuple):
    """What training remembers to judge a step by; a part of its state.

    Attributes:
      losses: [window] float32, the last that were no spikes; the n-th at n modulo window.
      accepted: int32, how many there were.
      skipped: int32, updates undone, of the whole run.
      in_a_row: int32, updates undone since the last that was not.
    """

    losses: jax.Array
    accepted: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array


class Judgement(NamedTuple):
    """Of a step.

    Attributes:
      verdict: int32, one of the above.
      threshold: float32, the largest loss that would have been no spike.
      skipped, in_a_row: as the Guard after it.
    """

    verdict: jax.Array
    threshold: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array


def limits_of(config: TrainConfig) -> Limits | None:
    """What steps are judged by; None where none is undone, and the first bad one ends the run."""
    if config.non_finite_policy == 'stop' and config.spike_policy == 'none':
        return None
    spikes = config.spike_policy != 'none'
    return Limits(config.spike_window, config.spike_deviations if spikes else None)


def fresh_guard(limits: Limits) -> Guard:
    """Nothing seen yet."""
    counts = (np.int32(0) for _ in Guard._fields[1:])
    return Guard(np.zeros(limits.window, np.float32), *counts)


def threshold(guard: Guard, limits: Limits) -> jax.Array:
    """The largest loss that is no spike: median + deviations * spread; infinite until it is known.

    The spread is 1.4826 times the median distance from the median. Float32.
    """
    if limits.deviations is None:
        return jnp.float32(jnp.inf)
    median = jnp.median(guard.losses)
    spread = _NORMAL * jnp.median(jnp.abs(guard.losses - median))
    spread = jnp.maximum(spread, _LEAST * jnp.abs(median))
    full = guard.accepted >= limits.window
    return jnp.where(full, median + limits.deviations * spread, jnp.inf)


def judged(
    guard: Guard, loss: jax.Array, norm: jax.Array, limits: Limits
) -> tuple[Judgement, Guard]:
    """Whether a step counts, and what is remembered after it. For use under `jit`.

    loss, norm: float32, of the step and of its gradient.
    """
    most = threshold(guard, limits)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    verdict = jnp.where(finite, jnp.where(loss > most, SPIKE, FINE), NON_FINITE)
    bad = verdict != FINE
    here = np.arange(limits.window) == guard.accepted % limits.window
    after = Guard(
        jnp.where(here & ~bad, loss, guard.losses),
        guard.accepted + jnp.where(bad, 0, 1),
        guard.skipped + jnp.where(bad, 1, 0),
        jnp.where(bad, guard.in_a_row + 1, 0),
    )
    verdict = verdict.astype(jnp.int32)
    return Judgement(verdict, most, after.skipped, after.in_a_row), after


def to_json(guard: Guard) -> dict[str, Any]:
    """What a checkpoint keeps: exact, as float64 holds every float32."""
    return {name: np.asarray(x).tolist() for name, x in guard._asdict().items()}


def of_next_stage(fields: dict[str, Any] | None) -> dict[str, Any] | None:
    """What is kept of `to_json` where other data begin: losses may well be others there."""
    return None if fields is None else fields | {'losses': []}


def from_json(fields: dict[str, Any] | None, limits: Limits) -> Guard:
    """Inverse of `to_json`, on the host; what was of another window is dropped."""
    fresh = fresh_guard(limits)
    if fields is None:
        return fresh
    if len(fields['losses']) != limits.window:
        return fresh._replace(skipped=np.int32(fields['skipped']))
    counts = (np.int32(fields[name]) for name in Guard._fields[1:])
    return Guard(np.asarray(fields['losses'], np.float32), *counts)
