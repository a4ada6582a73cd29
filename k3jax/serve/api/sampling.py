"""Which sampling a request asks for, in chat and in plain completions alike."""

from __future__ import annotations

from typing import NamedTuple

from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.fields import Fields, wrong
from k3jax.serve.api.rules import Rules
from k3jax.serve.request import Sampling

# Fields that say nothing about the answer here; clients of OpenAI's interface send them.
IGNORED = (
    *('user', 'metadata', 'store', 'service_tier', 'prompt_cache_key', 'safety_identifier'),
    *('prompt_cache_retention', 'verbosity', 'modalities'),
)
SAMPLING_FIELDS = (
    *('model', 'temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'n', 'seed'),
    *('presence_penalty', 'frequency_penalty', 'stop', 'stream', 'stream_options', 'max_tokens'),
    *('logit_bias', 'logprobs'),
    *IGNORED,
)
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20


class Common(NamedTuple):
    """What every request has.

    Attributes:
      max_tokens: that the client names; None leaves it to the server.
      sampling: without `max_new_tokens`, `stop_ids` and `logprobs`.
    """

    model: str | None
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    max_tokens: int | None
    sampling: Sampling


def _stop(fields: Fields, rules: Rules) -> tuple[str, ...]:
    value = fields.get('stop')
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or any(not isinstance(stop, str) for stop in stops):
        raise wrong('stop', value, 'a string or an array of strings')
    if len(stops) > rules.max_stops:
        raise ApiError(
            f'stop: got {len(stops)} strings, wanted at most {rules.max_stops}', param='stop'
        )
    for stop in stops:
        size = len(stop.encode('utf-8', 'replace'))
        if not 1 <= size <= rules.max_stop_bytes:
            wanted = f'1 to {rules.max_stop_bytes}'
            raise ApiError(f'stop: got a string of {size} bytes, wanted {wanted}', param='stop')
    return tuple(stops)


def _top_p(fields: Fields, rules: Rules) -> float:
    top_p = fields.number('top_p', 0.0, 1.0)
    if top_p is None:
        return rules.default_top_p
    if rules.top_p_values is not None and top_p not in rules.top_p_values:
        values = ' or '.join(f'{value:g}' for value in rules.top_p_values)
        raise wrong('top_p', top_p, values)
    if top_p == 0:
        raise wrong('top_p', 0, 'a number above 0')
    return top_p


def read_common(fields: Fields, rules: Rules) -> Common:
    """What a request says on model, sampling, stops and streaming.

    Raises:
      ApiError: a value that the rules do not have; names it.
    """
    penalty = 2.0 if rules.has_penalties else 0.0
    repetition = fields.number('repetition_penalty', 0.01, 100.0)
    top_k, min_p = fields.integer('top_k', -1), fields.number('min_p', 0.0, 1.0)
    if not rules.has_extra_sampling:
        for name in ('top_k', 'min_p', 'repetition_penalty'):
            if fields.get(name) is not None:
                raise ApiError(f'{name}: not taken by this server', param=name)
    fields.integer('n', 1, 1)
    if fields.object('logit_bias'):
        raise ApiError('logit_bias: not taken by this server', param='logit_bias')
    temperature = fields.number('temperature', 0.0, rules.max_temperature)
    sampling = Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=_top_p(fields, rules),
        top_k=max(top_k or 0, 0),  # -1 is how others write all
        min_p=min_p or 0.0,
        presence_penalty=fields.number('presence_penalty', -penalty, penalty) or 0.0,
        frequency_penalty=fields.number('frequency_penalty', -penalty, penalty) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        seed=fields.integer('seed', -MAX_SEED, MAX_SEED),
    )
    stream = fields.boolean('stream') or False
    options = Fields(fields.object('stream_options') or {}, 'stream_options')
    options.only(('include_usage', 'include_obfuscation'))
    include_usage = options.boolean('include_usage') or False
    if fields.get('stream_options') is not None and not stream:
        raise ApiError('stream_options: only with stream', param='stream_options')
    max_tokens = fields.integer('max_tokens', 1, rules.max_completion_tokens)
    return Common(
        fields.string('model'), stream, include_usage, _stop(fields, rules), max_tokens, sampling
    )
