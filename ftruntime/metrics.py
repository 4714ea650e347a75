"""Prometheus metrics of one server: its own numbers, and the engine's as of the scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Outcome = Literal["ok", "aborted", "timeout", "rejected", "error"]
"""How a request ended: answered; left by its client or cut by a shutdown; over its time limit;
refused; failed."""

_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAP_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


@dataclass(frozen=True)
class _Stat:
    """One number of the engine's stats: where it stands, and what it is called in a scrape."""

    path: tuple[str, ...]
    name: str
    text: str
    is_counter: bool = False
    scale: float = 1.0
    labels: tuple[tuple[str, str], ...] = ()


_STATS = (
    _Stat(("num_running",), "running_requests", "Requests that decode."),
    _Stat(("num_waiting",), "waiting_requests", "Requests that wait or prefill."),
    _Stat(("used_pages",), "used_pages", "KV pages held by running requests."),
    _Stat(("cached_pages",), "cached_pages", "KV pages kept for prefix reuse."),
    _Stat(("total_pages",), "total_pages", "KV pages of the pool."),
    _Stat(("used_window_pages",), "used_window_pages", "Window pages in use."),
    _Stat(("total_window_pages",), "total_window_pages", "Window pages of the pool."),
    _Stat(
        ("largest_gap_ms",), "largest_decode_gap_seconds",
        "Longest time between two decode steps while a row could decode.", scale=1e-3,
    ),
    _Stat(
        ("prefill_steps",), "prefill_steps", "Prefill steps run, layer slices counted.",
        is_counter=True,
    ),
    _Stat(("decode_steps",), "decode_steps", "Decode steps run.", is_counter=True),
    _Stat(
        ("interleaved_decode_steps",), "interleaved_decode_steps",
        "Decode steps run while a prefill was unfinished.", is_counter=True,
    ),
    _Stat(("prefill_streak",), "prefill_streak", "Prefill chunks since the last decode step."),
    _Stat(("retractions",), "retractions", "Requests put back for lack of pages.", is_counter=True),
    _Stat(("aborted",), "engine_aborts", "Requests the engine dropped.", is_counter=True),
    *(
        _Stat(
            ("experts", phase, key), f"expert_{key}", text, is_counter=True,
            labels=(("phase", phase),),
        )
        for key, text in (
            ("hits", "Routed experts found on the device, or on their way as a hint."),
            ("misses", "Routed experts that had to be copied."),
            ("bytes_h2d", "Bytes of experts copied to rank 0's device; every rank copies as many."),
            ("prefetch_used", "Experts copied ahead that a step then used."),
            ("prefetch_wasted", "Experts copied ahead that left unused."),
            ("evictions", "Experts that gave up their slot."),
        )
        for phase in ("decode", "prefill")
    ),
)  # fmt: skip


class ServerMetrics:
    """Counters and histograms of one app, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self._requests = Counter(
            "ftruntime_requests", "Requests by how they ended.", ["outcome"], registry=self.registry
        )
        for outcome in ("ok", "aborted", "timeout", "rejected", "error"):
            self._requests.labels(outcome)
        self.prompt_tokens = Counter(
            "ftruntime_prompt_tokens", "Prompt tokens of started requests.", registry=self.registry
        )
        self.generation_tokens = Counter(
            "ftruntime_generation_tokens", "Tokens generated.", registry=self.registry
        )
        self.time_to_first_token = Histogram(
            "ftruntime_time_to_first_token_seconds", "From arrival to a sequence's first token.",
            buckets=_LATENCY_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self.token_gap = Histogram(
            "ftruntime_inter_token_gap_seconds", "Between two tokens of one sequence.",
            buckets=_GAP_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self.request_seconds = Histogram(
            "ftruntime_request_seconds", "From arrival to the end of a started request.",
            buckets=_LATENCY_BUCKETS_S, registry=self.registry,
        )  # fmt: skip

    def count(self, outcome: Outcome) -> None:
        """One request more that ended so."""
        self._requests.labels(outcome).inc()

    def render(self, stats: Mapping[str, object] | None) -> bytes:
        """The scrape, in Prometheus text.

        Args:
            stats: the dict of `/v1/stats`; None leaves the engine's numbers out.
        """
        self._engine.stats = stats
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's numbers as of the current scrape; a number it does not report is left out."""

    def __init__(self) -> None:
        self.stats: Mapping[str, object] | None = None

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("ftruntime_engine_up", "1 while the engine answers.")
        up.add_metric([], 0.0 if self.stats is None else 1.0)
        yield up
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for stat in _STATS:
            value = _number(self.stats, stat.path)
            if value is None:
                continue
            if stat.name not in families:
                family = CounterMetricFamily if stat.is_counter else GaugeMetricFamily
                names = [name for name, _ in stat.labels]
                families[stat.name] = family(f"ftruntime_{stat.name}", stat.text, labels=names)
            families[stat.name].add_metric([text for _, text in stat.labels], value * stat.scale)
        yield from families.values()


def _number(stats: object, path: tuple[str, ...]) -> float | None:
    for key in path:
        if not isinstance(stats, Mapping):
            return None
        stats = stats.get(key)
    is_number = isinstance(stats, int | float) and not isinstance(stats, bool)
    return float(str(stats)) if is_number else None
