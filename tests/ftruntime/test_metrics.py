"""Mutants tried: gauges typed as counters, milliseconds not scaled, a missing number shown as 0,
one registry for all."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from ftruntime.metrics import ServerMetrics


def scrape(metrics: ServerMetrics, stats: dict[str, object] | None) -> dict[str, float]:
    text = metrics.render(stats).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_engine_numbers_of_the_scrape() -> None:
    stats: dict[str, object] = {
        "num_running": 2, "num_waiting": 1, "used_pages": 10, "total_pages": 64,
        "largest_gap_ms": 1500.0, "interleaved_decode_steps": 4, "aborted": 3, "limiting": "x",
        "prefill_streak": 6,
        "experts": {"decode": {"hits": 5, "misses": 6, "bytes_h2d": 7}, "prefill": {"hits": 8}},
    }  # fmt: skip
    samples = scrape(ServerMetrics(), stats)
    assert samples["ftruntime_engine_up"] == 1
    assert samples["ftruntime_running_requests"] == 2
    assert samples["ftruntime_waiting_requests"] == 1
    assert samples["ftruntime_used_pages"] == 10
    assert samples["ftruntime_total_pages"] == 64
    assert samples["ftruntime_largest_decode_gap_seconds"] == 1.5
    assert samples["ftruntime_interleaved_decode_steps_total"] == 4
    assert samples["ftruntime_prefill_streak"] == 6
    assert samples["ftruntime_engine_aborts_total"] == 3
    assert samples["ftruntime_expert_hits_total{phase=decode}"] == 5
    assert samples["ftruntime_expert_bytes_h2d_total{phase=decode}"] == 7
    assert samples["ftruntime_expert_hits_total{phase=prefill}"] == 8
    assert "ftruntime_expert_misses_total{phase=prefill}" not in samples
    assert "ftruntime_cached_pages" not in samples  # not reported: left out


def test_bytes_of_experts_are_those_of_one_rank() -> None:
    text = ServerMetrics().render({"experts": {"decode": {"bytes_h2d": 7}}}).decode()
    assert (
        "# HELP ftruntime_expert_bytes_h2d_total Bytes of experts copied to rank 0's device; every "
        "rank copies as many.\n"
    ) in text


def test_without_an_engine_only_its_own() -> None:
    metrics = ServerMetrics()
    scrape(metrics, {"num_running": 2})
    samples = scrape(metrics, None)
    assert samples["ftruntime_engine_up"] == 0
    assert "ftruntime_running_requests" not in samples
    assert samples["ftruntime_requests_total{outcome=aborted}"] == 0


def test_counts_and_separate_registries() -> None:
    one, other = ServerMetrics(), ServerMetrics()
    one.count("aborted")
    one.count("aborted")
    one.token_gap.observe(0.03)
    samples = scrape(one, None)
    assert samples["ftruntime_requests_total{outcome=aborted}"] == 2
    assert samples["ftruntime_inter_token_gap_seconds_bucket{le=0.02}"] == 0
    assert samples["ftruntime_inter_token_gap_seconds_bucket{le=0.05}"] == 1
    assert scrape(other, None)["ftruntime_requests_total{outcome=aborted}"] == 0


def test_odd_stats_do_not_break_a_scrape() -> None:
    samples = scrape(ServerMetrics(), {"num_running": "many", "experts": 5, "used_pages": True})
    assert "ftruntime_running_requests" not in samples
    assert "ftruntime_used_pages" not in samples
