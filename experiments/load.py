"""Loads a running server: `python -m experiments.load --url=http://127.0.0.1:8000 --minutes=5`.

Many clients at once chat over streams with random prompts, and some go away midway. Prints the
errors (other than these), tokens a second, and the time between the events of a stream; with --pid
the server's memory after the warm-up and at the end. Exits with 1 if there was an error.
"""

from __future__ import annotations

import asyncio
import json

from absl import flags

from k3jax.flags import run_main
from k3jax.serve.load_clients import Load, flood, run_load

_URL = flags.DEFINE_string('url', 'http://127.0.0.1:8000', 'Of the server.')
_STREAMS = flags.DEFINE_integer('streams', Load.streams, 'Clients at once.', lower_bound=1)
_MINUTES = flags.DEFINE_float('minutes', Load.seconds / 60, 'How long.', lower_bound=0)
_WARM_UP_S = flags.DEFINE_float('warm_up_s', Load.warm_up_s, 'Of these, not counted.')
_MAX_WORDS = flags.DEFINE_integer('max_words', Load.max_words, 'Of a prompt.', lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer('max_tokens', Load.max_tokens, 'Of an answer.', lower_bound=1)
_DROP_SHARE = flags.DEFINE_float(
    'drop_share', Load.drop_share, 'Of the requests, whose clients go away.', 0, 1
)
_SEED = flags.DEFINE_integer('seed', Load.seed, 'Of the prompts.')
_API_KEY = flags.DEFINE_string('api_key', None, 'To be sent.')
_PID = flags.DEFINE_integer('pid', None, "The server's process, on this machine.")
_FLOOD = flags.DEFINE_integer(
    'flood', 0, 'So many requests at once, in the end: how soon are those too many refused?'
)
_JSON = flags.DEFINE_bool('json', False, 'Print one JSON object.')


def main(argv: list[str]) -> int:
    del argv
    load = Load(
        streams=_STREAMS.value,
        seconds=60 * _MINUTES.value,
        warm_up_s=_WARM_UP_S.value,
        max_words=_MAX_WORDS.value,
        max_tokens=_MAX_TOKENS.value,
        drop_share=_DROP_SHARE.value,
        api_key=_API_KEY.value,
        seed=_SEED.value,
    )
    found = asyncio.run(run_load(_URL.value, load, _PID.value))
    if _FLOOD.value:
        found['flood'] = asyncio.run(flood(_URL.value, _FLOOD.value, _API_KEY.value))
    if _JSON.value:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f'{name}: {value}')
    return int(bool(found['errors'] or found.get('flood', {}).get('errors')))


if __name__ == '__main__':
    run_main(main)
