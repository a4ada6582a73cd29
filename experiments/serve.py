"""Serves a checkpoint over HTTP: `python -m experiments.serve --checkpoint=DIR --port=8000`.

As OpenAI's clients expect it, with a chat page at /. SIGTERM lets running answers end.
"""

from __future__ import annotations

from absl import flags, logging

from k3jax.flags import activations, define_activations_flags, run_main
from k3jax.serve.admission import Limits, read_keys
from k3jax.serve.api.rules import RULES
from k3jax.serve.engine import Engine, EngineConfig
from k3jax.serve.load import open_model, use_dtype
from k3jax.serve.pool import Pool
from k3jax.serve.server import build_app, make_server

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'Converted folder or training workdir.', required=True
)
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at; 0.0.0.0: all of them.')
_PORT = flags.DEFINE_integer('port', 8000, 'To listen at.', lower_bound=0, upper_bound=65535)
_NAME = flags.DEFINE_string('name', None, "What clients call the model; by default, its config's.")
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Compute dtype.')
define_activations_flags()
_RULES = flags.DEFINE_enum('api_rules', 'open', list(RULES), 'Which parameters are taken.')
_KEYS = flags.DEFINE_string('api_keys_file', None, 'Keys that may ask, one a line; else anybody.')

_ENGINE = EngineConfig()
_SLOTS = flags.DEFINE_integer('num_slots', _ENGINE.num_slots, 'Answers made together.')
_LENGTH = flags.DEFINE_integer(
    'max_length', None, 'Tokens of a prompt and its answer; by default 4096, or what the model has.'
)
_WAITING = flags.DEFINE_integer('max_waiting', _ENGINE.max_waiting, 'Requests that wait for one.')
_LIMITS = Limits()
_BODY = flags.DEFINE_integer('max_body_bytes', _LIMITS.max_body_bytes, 'Of a request.')
_CONCURRENT = flags.DEFINE_integer(
    'max_concurrent', _LIMITS.max_concurrent, 'Requests that run or wait; more get 429.'
)
_RATE = flags.DEFINE_integer(
    'requests_per_minute', _LIMITS.requests_per_minute, 'Of a key, or an address; 0: any number.'
)
_TIMEOUT = flags.DEFINE_float(
    'request_timeout_s', _LIMITS.request_timeout_s, 'After which an answer is cut off.'
)
_DRAIN = flags.DEFINE_float(
    'drain_timeout_s', _LIMITS.drain_timeout_s, 'That answers have after SIGTERM.'
)


def main(_: list[str]) -> None:
    limits = Limits(
        max_body_bytes=_BODY.value,
        max_concurrent=_CONCURRENT.value,
        requests_per_minute=_RATE.value,
        request_timeout_s=_TIMEOUT.value,
        drain_timeout_s=_DRAIN.value,
    )
    keys = () if _KEYS.value is None else read_keys(_KEYS.value)
    use_dtype(_DTYPE.value)
    loaded = open_model(_CHECKPOINT.value, _DTYPE.value, **activations())
    model, tokenizer = loaded.model, loaded.tokenizer
    if tokenizer is None:
        raise ValueError(f'--checkpoint: {_CHECKPOINT.value} carries no tokenizer')
    most = model.config.max_position_embeddings
    length = min(most, _ENGINE.max_length) if _LENGTH.value is None else _LENGTH.value
    if length > most:
        raise ValueError(
            f'--max_length: got {length}, wanted at most {most} (model.max_position_embeddings)'
        )
    config = EngineConfig(num_slots=_SLOTS.value, max_length=length, max_waiting=_WAITING.value)
    pool = Pool(model, loaded.params, config.num_slots, config.max_length, None)
    sees = model.config.vision is not None
    engine = Engine(pool, tokenizer, config, images=loaded.images, name=_NAME.value)
    images = loaded.images if sees else None
    app = build_app(engine, RULES[_RULES.value], limits=limits, api_keys=keys, images=images)
    logging.info('compiling for %d slots of %d tokens', config.num_slots, config.max_length)
    engine.warm_up()
    engine.start()
    logging.info('%s at http://%s:%d', engine.model_name, _HOST.value, _PORT.value)
    try:
        make_server(app, _HOST.value, _PORT.value, limits).run()
    finally:
        engine.close()


if __name__ == '__main__':
    run_main(main)
