"""What ``/metrics`` tells: vLLM's names where it has one, tinyspec's own for what it has not."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tinyspec.engine.async_engine import AsyncEngine
from tinyspec.outputs import StreamEvent

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics(Collector):
    """Of one server, in a registry of its own. The engine's numbers are asked for when they are
    read. prefill, first_token, between_tokens: seconds, of streams."""

    def __init__(self, engine: AsyncEngine, model: str):
        self._engine, self._model = engine, model
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._latency = self._seconds("vllm:e2e_request_latency_seconds")
        self._queue = self._seconds("vllm:request_queue_time_seconds")
        self.prefill = self._seconds("vllm:request_prefill_time_seconds")
        self.first_token = self._seconds("vllm:time_to_first_token_seconds")
        self.between_tokens = self._seconds("vllm:inter_token_latency_seconds")
        self._prompts = self._count("vllm:prompt_tokens").labels(model)
        self._queries = self._count("vllm:prefix_cache_queries").labels(model)
        self._generated = self._count("vllm:generation_tokens").labels(model)
        self._ended = self._count("vllm:request_success", "finished_reason")

    def _seconds(self, name: str) -> Histogram:
        made = Histogram(name, name, ["model_name"], registry=self._registry, buckets=SECONDS)
        return made.labels(self._model)

    def _count(self, name: str, *labels: str) -> Counter:
        return Counter(name, name, ["model_name", *labels], registry=self._registry)

    def note(self, event: StreamEvent) -> None:
        """Count the tokens of an event, and its end."""
        self._generated.inc(len(event.token_ids))
        if event.finish_reason is not None:
            self._queue.observe(event.queue_seconds)
            self._ended.labels(self._model, event.finish_reason).inc()

    def answered(self, began: float, prompts: list[list[int]], completions: int) -> None:
        """A request has its answer, so many ``completions`` of each prompt; it ``began`` then."""
        self._latency.observe(time.monotonic() - began)
        self._prompts.inc(count := sum(map(len, prompts)))
        self._queries.inc(count * completions)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers."""
        engine, stats = self._engine.engine, self._engine.engine.stats()
        requests = list(engine.tracker.requests.values())
        sequences = [sequence for request in requests for sequence in request.sequences]
        idle = sum(not (sequence.running or sequence.finished) for sequence in sequences)
        gauges = {
            "vllm:num_requests_running": sum(sequence.running for sequence in sequences),
            "vllm:num_requests_waiting": idle + self._engine.waiting,
            "vllm:kv_cache_usage_perc": 1 - engine.pool.num_free / engine.pool.num_pages,
        }
        counts = {
            "vllm:num_preemptions": stats.preemptions,
            "vllm:prefix_cache_hits": stats.cached_prompt_tokens,
            "vllm:spec_decode_num_drafts": stats.verify_passes,
            "vllm:spec_decode_num_draft_tokens": stats.drafted,
            "vllm:spec_decode_num_accepted_tokens": stats.accepted,
            "tinyspec:rolled_back_tokens": stats.rolled_back,
            "tinyspec:canonical_passes": stats.canonical_passes,
            "tinyspec:passes": sum(stats.passes.values()),
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counts)):
            for name, value in values.items():
                family = kind(name, name, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family
