"""Routes requests to several servers: `python -m experiments.route --servers=http://A:8000,http://B:8000`.

A conversation stays with one server, whose prefix cache knows it. When that fails, its answers go
on at another, from the next word on.
"""

from __future__ import annotations

import asyncio

from absl import flags, logging

from k3jax.flags import run_main
from k3jax.serve.admission import Limits
from k3jax.serve.fleet.budgets import DEFAULT_CLASSES, Budgets, read_classes
from k3jax.serve.fleet.router_app import build_router, run
from k3jax.serve.fleet.servers import Fleet, HealthPolicy, read_servers
from k3jax.serve.server import make_server

_SERVERS = flags.DEFINE_list('servers', None, 'Their URLs, comma-separated.', required=True)
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; 0.0.0.0 for all.')
_PORT = flags.DEFINE_integer(
    'port', 8080, 'Port to listen on; 0 for any free one.', lower_bound=0, upper_bound=65535
)
_CLASSES = flags.DEFINE_list(
    'classes',
    list(DEFAULT_CLASSES),
    'Kinds of requests, by tokens of the prompt (of 4 bytes each), with what may be in flight of '
    'each: below:requests:tokens of their prompts; the last is rest:requests:tokens.',
)
_WAIT_S = flags.DEFINE_float(
    'wait_s', 0.0, 'How long the first server may take to come up.', lower_bound=0
)
_HEALTH_INTERVAL_S = flags.DEFINE_float(
    'health_interval_s', HealthPolicy.interval_s, 'Between two checks of a server.'
)
_HEALTH_TIMEOUT_S = flags.DEFINE_float(
    'health_timeout_s', HealthPolicy.timeout_s, 'After which a check has failed.'
)
_HEALTH_FAILURES = flags.DEFINE_integer(
    'health_failures', HealthPolicy.failures, 'Checks in a row after which a server is down.'
)
_MAX_BODY_BYTES = flags.DEFINE_integer('max_body_bytes', Limits.max_body_bytes, 'Of a request.')
_REQUEST_TIMEOUT_S = flags.DEFINE_float(
    'request_timeout_s', Limits.request_timeout_s, 'After which an answer is cut off.'
)
_DRAIN_TIMEOUT_S = flags.DEFINE_float(
    'drain_timeout_s', Limits.drain_timeout_s, 'How long answers may go on after SIGTERM.'
)


def main(argv: list[str]) -> None:
    del argv
    limits = Limits(
        max_body_bytes=_MAX_BODY_BYTES.value,
        request_timeout_s=_REQUEST_TIMEOUT_S.value,
        drain_timeout_s=_DRAIN_TIMEOUT_S.value,
    )
    policy = HealthPolicy(
        interval_s=_HEALTH_INTERVAL_S.value,
        timeout_s=_HEALTH_TIMEOUT_S.value,
        failures=_HEALTH_FAILURES.value,
    )
    fleet = Fleet(read_servers(_SERVERS.value), policy)
    app = build_router(fleet, Budgets(read_classes(_CLASSES.value)), limits)
    server = make_server(app, _HOST.value, _PORT.value, limits)
    logging.info('routing http://%s:%d to %d servers', _HOST.value, _PORT.value, len(fleet.servers))
    asyncio.run(run(server, app.state.exchange, _WAIT_S.value))


if __name__ == '__main__':
    run_main(main)
