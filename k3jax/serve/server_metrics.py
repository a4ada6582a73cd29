"""What a server tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from k3jax.serve.prefix_figures import PrefixFigures

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


_PREFIX_COUNTS = {
    'hits': 'Prompts whose beginning was held.',
    'misses': 'Prompts of which nothing was held.',
    'hit_tokens': 'Tokens of prompts that were held.',
    'evictions': 'Beginnings that the device gave up.',
    'offloads': 'Of them, those that the host took.',
    'fetches': 'Beginnings that came back from the host.',
    'host_evictions': 'Beginnings that the host gave up.',
    'corrupt_blocks': 'Blocks in host memory with a wrong checksum.',
    'refusals': 'Beginnings that are too long for the cache.',
}


class _PrefixCollector(Collector):
    """Reads a prefix cache's figures when they are asked for."""

    def __init__(self, read: Callable[[], PrefixFigures | None]):
        self._read = read

    def collect(self) -> Iterator[Metric]:
        figures = self._read()
        if figures is None:
            return
        for name, text in _PREFIX_COUNTS.items():
            yield CounterMetricFamily(f'k3jax_prefix_{name}', text, value=getattr(figures, name))
        held = GaugeMetricFamily('k3jax_prefix_bytes', 'Bytes of blocks in use.', labels=['place'])
        held.add_metric(['device'], figures.device_bytes)
        held.add_metric(['host'], figures.host_bytes)
        yield held


class ServerMetrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, prefix_figures: Callable[[], PrefixFigures | None]) -> None:
        """prefix_figures: those of the engine's prefix cache now, or None."""
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
        self._registry.register(_PrefixCollector(prefix_figures))

    def page(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)
