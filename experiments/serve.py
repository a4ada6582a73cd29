"""Serves a checkpoint over HTTP: `python -m experiments.serve --checkpoint=DIR --port=8000`."""

from __future__ import annotations

import math

from absl import flags, logging

from k3jax.flags import (
    activations,
    define_activations_flags,
    define_mesh_flag,
    run_main,
    serving_mesh_config,
)
from k3jax.serve.admission import Limits, read_keys
from k3jax.serve.api.rules import RULES
from k3jax.serve.draft_pool import open_pool
from k3jax.serve.engine import Engine
from k3jax.serve.engine_config import EngineConfig
from k3jax.serve.load import open_model, use_dtype
from k3jax.serve.server import build_app, make_server

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'Converted folder or training workdir.', required=True
)
_MODEL_NAME = flags.DEFINE_string('model_name', None, "What clients call it; None: the model's.")
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Compute dtype.')
_NUM_SLOTS = flags.DEFINE_integer(
    'num_slots', EngineConfig.num_slots, 'Requests that are decoded together.'
)
_MAX_LENGTH = flags.DEFINE_integer(
    'max_length',
    None,
    f'Tokens of a prompt and its answer; by default {EngineConfig.max_length}, or all it reads.',
)
_MAX_WAITING = flags.DEFINE_integer(
    'max_waiting', EngineConfig.max_waiting, 'Requests that wait for a slot; more get 429.'
)
_PREFIX_GIB = flags.DEFINE_float(
    'prefix_cache_gib', 0.0, 'For beginnings of prompts that need not be read again.', lower_bound=0
)
_HOST_GIB = flags.DEFINE_float(
    'prefix_host_gib', 0.0, "Of the host's memory, for those with no room there.", lower_bound=0
)
_DRAFT = flags.DEFINE_string(
    'draft', None, 'Workdir of experiments.draft: its guesses make the same answers come faster.'
)
_NUM_GUESSES = flags.DEFINE_integer('num_guesses', 7, 'Tokens that a draft guesses at a time.')
_SCAN_LAYERS = flags.DEFINE_bool(
    'scan_layers', None, 'Equal layers as one program: compiles faster, runs slower. By depth.'
)
_WARM_UP = flags.DEFINE_bool('warm_up', True, 'Compile everything before the first request.')
define_activations_flags()
define_mesh_flag()
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; 0.0.0.0 for all.')
_PORT = flags.DEFINE_integer(
    'port', 8000, 'Port to listen on; 0 for any free one.', lower_bound=0, upper_bound=65535
)
_API_RULES = flags.DEFINE_enum('api_rules', 'open', sorted(RULES), 'Which parameters are taken.')
_API_KEYS_FILE = flags.DEFINE_string(
    'api_keys_file', None, 'File with one key a line; without it anybody may ask.'
)
_MAX_BODY_BYTES = flags.DEFINE_integer('max_body_bytes', Limits.max_body_bytes, 'Of a request.')
_MAX_CONCURRENT = flags.DEFINE_integer(
    'max_concurrent', Limits.max_concurrent, 'Requests being answered or waiting.'
)
_REQUESTS_PER_MINUTE = flags.DEFINE_integer(
    'requests_per_minute', 0, 'Of one key, or of one address without keys; 0: any number.'
)
_REQUEST_TIMEOUT_S = flags.DEFINE_float(
    'request_timeout_s', Limits.request_timeout_s, 'After which an answer is cut off.'
)
_DRAIN_TIMEOUT_S = flags.DEFINE_float(
    'drain_timeout_s', Limits.drain_timeout_s, 'How long answers may go on after SIGTERM.'
)


def bytes_of(gib: flags.FlagHolder[float]) -> int:
    if not math.isfinite(gib.value):
        raise ValueError(f'--{gib.name}: got {gib.value}, wanted a number of GiB')
    return int(gib.value * 2**30)


def main(argv: list[str]) -> None:
    del argv
    limits = Limits(
        max_body_bytes=_MAX_BODY_BYTES.value,
        max_concurrent=_MAX_CONCURRENT.value,
        requests_per_minute=_REQUESTS_PER_MINUTE.value,
        request_timeout_s=_REQUEST_TIMEOUT_S.value,
        drain_timeout_s=_DRAIN_TIMEOUT_S.value,
    )
    prefix_bytes, host_bytes = bytes_of(_PREFIX_GIB), bytes_of(_HOST_GIB)
    keys = () if _API_KEYS_FILE.value is None else read_keys(_API_KEYS_FILE.value)
    use_dtype(_DTYPE.value)
    mesh = serving_mesh_config()
    loaded = open_model(
        _CHECKPOINT.value,
        _DTYPE.value,
        mesh=mesh,
        scan_layers=_SCAN_LAYERS.value,
        **activations(),
    )
    if loaded.tokenizer is None:
        raise ValueError(
            f'--checkpoint: {_CHECKPOINT.value} carries no tokenizer (no tiktoken.model), '
            'and a server needs one'
        )
    images = loaded.images if loaded.model.config.vision is not None else None
    positions = loaded.model.config.max_position_embeddings
    length = _MAX_LENGTH.value
    if length is None:
        length = min(EngineConfig.max_length, positions)
    config = EngineConfig(
        num_slots=_NUM_SLOTS.value,
        max_length=length,
        max_waiting=_MAX_WAITING.value,
        prefix_cache_bytes=prefix_bytes,
        prefix_host_bytes=host_bytes,
    )
    pool = open_pool(loaded, config.num_slots, config.max_length, _DRAFT.value, _NUM_GUESSES.value)
    engine = Engine(pool, loaded.tokenizer, config, images=images, name=_MODEL_NAME.value)
    if _WARM_UP.value:
        logging.info('compiling')
        engine.warm_up()
    app = build_app(engine, RULES[_API_RULES.value], limits=limits, api_keys=keys, images=images)
    server = make_server(app, _HOST.value, _PORT.value, limits)
    logging.info('serving %s on http://%s:%d', engine.model_name, _HOST.value, _PORT.value)
    engine.start()
    try:
        server.run()
    finally:
        engine.close()


if __name__ == '__main__':
    run_main(main)
