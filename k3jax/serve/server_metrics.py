"""What a server tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class ServerMetrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = {'registry': self._registry}
        self.requests = Counter(
            'k3jax_requests', 'Requests by route and status.', ['route', 'status'], **own
        )
        self.in_flight = Gauge('k3jax_requests_in_flight', 'Requests being answered.', **own)
        self.prompt_tokens = Counter('k3jax_prompt_tokens', 'Tokens of prompts.', **own)
        self.cached_tokens = Counter('k3jax_cached_tokens', 'Of them, found in the cache.', **own)
        self.generated_tokens = Counter('k3jax_generated_tokens', 'Tokens of answers.', **own)
        self.first_token = Histogram(
            'k3jax_time_to_first_token_seconds', 'From a request.', buckets=_SECONDS, **own
        )
        self.between_tokens = Histogram(
            'k3jax_time_between_tokens_seconds', 'Of one answer.', buckets=_SECONDS, **own
        )
        self.cancelled = Counter('k3jax_cancelled', 'Answers whose client went away.', **own)

    def page(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)
