"""What a router tells Prometheus. Servers are called by their place in the list, not by address."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from k3jax.serve.fleet.budgets import Budgets
from k3jax.serve.fleet.servers import Fleet

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class RouterMetrics:
    """Counters of one router, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = {'registry': self._registry}
        self.requests = Counter(
            'k3jax_router_requests', 'Requests by route and status.', ['route', 'status'], **own
        )
        self.asked = Counter('k3jax_router_asked', 'Requests to a server.', ['server'], **own)
        self.failures = Counter(
            'k3jax_router_failures', 'Requests to a server that failed.', ['server', 'why'], **own
        )
        self.continued = Counter(
            'k3jax_router_continued', 'Streams that went on at another server.', **own
        )
        self.refused = Counter(
            'k3jax_router_refused', 'Requests over the budget of their class.', ['class'], **own
        )
        self.first_byte = Histogram(
            'k3jax_router_time_to_first_byte_seconds', 'From a request.', buckets=_SECONDS, **own
        )
        self._up = Gauge('k3jax_router_server_up', 'Can be asked.', ['server'], **own)
        self._in_flight = Gauge('k3jax_router_in_flight', 'Requests.', ['class'], **own)
        self._tokens = Gauge(
            'k3jax_router_prompt_tokens_in_flight', 'About, by bytes.', ['class'], **own
        )

    def page(self, fleet: Fleet, budgets: Budgets) -> bytes:
        """All of them in Prometheus' text format."""
        for number, server in enumerate(fleet.servers):
            self._up.labels(str(number)).set(server.state == 'up')
        for name, (num_requests, num_tokens) in budgets.in_flight().items():
            self._in_flight.labels(name).set(num_requests)
            self._tokens.labels(name).set(num_tokens)
        return generate_latest(self._registry)
