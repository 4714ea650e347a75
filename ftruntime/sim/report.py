"""What a run comes to, as JSON values and as text tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from ftruntime.sim.executor import PrefillSpan
from ftruntime.sim.run import ClientLog

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 140
_PERCENTILES = (50, 95, 99)


def stall_report(
    policy: Mapping[str, object],
    victims: Sequence[ClientLog],
    attacker: ClientLog,
    span: PrefillSpan,
    *,
    alone: Sequence[ClientLog],
    interleaved_decode_steps: object,
) -> dict[str, object]:
    """The fields of a stall experiment, in seconds. With several victims, walls and the longest gap
    are the worst of any victim, counts are sums.

    A victim's wall and tokens count from time 0, where its first token came; its gaps count from
    there too. A token is one during prefill when it came after the attacker's first step had begun
    and before its last one ended.

    Args:
        span: prefill of the attacker's prompt.
        alone: the victims in a run without the attacker.
    """
    gaps = [gap for victim in victims for gap in victim.gaps()]
    times = [time for victim in victims for time in victim.token_times]
    during = [time for time in times if span.start_s < time < span.end_s]
    return {
        "policy": dict(policy),
        "prefill_chunks": span.num_chunks,
        "attacker_wall_s": _rounded(attacker.wall_s),
        "victim_wall_s": _rounded(max(times)),
        "victim_tokens": len(gaps),
        "victim_alone_wall_s": _rounded(max(log.token_times[-1] for log in alone)),
        "max_gap_s": _rounded(max(gaps)),
        "gaps_over_5s": sum(gap > 5 for gap in gaps),
        "gaps_over_20s": sum(gap > 20 for gap in gaps),
        "interleaved_decode_steps": interleaved_decode_steps,
        "victim_tokens_during_prefill": len(during),
        "source": "simulated",
    }


def trace_report(
    policy: Mapping[str, object], logs: Mapping[str, ClientLog], stats: Mapping[str, object]
) -> dict[str, object]:
    """A trace of many clients: totals, and one record for each client, in order of arrival.

    Percentiles are nearest-rank. What a refused client has not seen is null, as is the gap of a
    client with one token.
    """
    served = [log for log in logs.values() if log.refusal is None]
    gaps = sorted(gap for log in served for gap in log.gaps())
    firsts = sorted(log.first_token_s for log in served)
    begin_s = min((log.arrival.arrival_s for log in served), default=0.0)
    wall_s = max((log.token_times[-1] for log in served), default=0.0) - begin_s
    num_prompt = sum(log.arrival.prompt_tokens for log in served)
    num_output = sum(len(log.token_times) for log in served)
    return {
        "policy": dict(policy),
        "clients": len(logs),
        "refused": len(logs) - len(served),
        "wall_s": _rounded(wall_s),
        "prompt_tokens_per_s": _rounded(num_prompt / wall_s) if wall_s else None,
        "output_tokens_per_s": _rounded(num_output / wall_s) if wall_s else None,
        "first_token_s": _percentiles(firsts),
        "gap_s": _percentiles(gaps),
        "prefill_steps": stats["prefill_steps"],
        "decode_steps": stats["decode_steps"],
        "interleaved_decode_steps": stats["interleaved_decode_steps"],
        "retractions": stats["retractions"],
        "per_client": [_client(log) for log in logs.values()],
        "source": "simulated",
    }


def print_reports(reports: Sequence[Mapping[str, object]], caption: str, stream: TextIO) -> None:
    """One column a report: the policies of one experiment beside each other; the caption below."""
    from rich.table import Table

    policies = [policy_label(report["policy"]) for report in reports]
    table = Table("simulated", *policies, box=None, pad_edge=False)
    for name in reports[0]:
        if name not in ("policy", "per_client", "source"):
            table.add_row(name, *(_cell(report[name]) for report in reports))
    _print(table, stream)
    stream.write(f"\n{caption}\n")


def print_clients(report: Mapping[str, object], stream: TextIO) -> None:
    """One row a client."""
    from rich.table import Table

    clients = report["per_client"]
    assert isinstance(clients, list)
    table = Table(*clients[0], box=None, pad_edge=False)
    for client in clients:
        table.add_row(*(_cell(value) for value in client.values()))
    _print(table, stream)


def policy_label(policy: object) -> str:
    """A policy in a few characters: `N=8 gap<=900ms G=4`, or `unset`."""
    assert isinstance(policy, Mapping)
    shown = {
        "decode_interleave_every": "N={}", "max_decode_gap_ms": "gap<={}ms",
        "prefill_layer_groups": "G={}",
    }  # fmt: skip
    words = [text.format(policy[key]) for key, text in shown.items() if policy[key] is not None]
    return " ".join(words) or "unset"


def _print(table: Table, stream: TextIO) -> None:
    from rich.console import Console

    # a file or pipe has no width of its own
    width = None if stream.isatty() else _WIDTH
    Console(file=stream, highlight=False, width=width).print(table)


def _client(log: ClientLog) -> dict[str, object]:
    arrival, gaps = log.arrival, sorted(log.gaps())
    served = log.refusal is None
    return {
        "client": arrival.name,
        "arrival_s": _rounded(arrival.arrival_s),
        "prompt_tokens": arrival.prompt_tokens,
        "tokens": len(log.token_times),
        "first_token_s": _rounded(log.first_token_s) if served else None,
        "wall_s": _rounded(log.wall_s) if served else None,
        "gap_s": _percentiles(gaps),
        "refusal": log.refusal,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Nearest-rank percentiles of rising values, and the largest."""
    if not values:
        return None
    found = {f"p{p}": values[math.ceil(len(values) * p / 100) - 1] for p in _PERCENTILES}
    return {name: _rounded(value) for name, value in {**found, "max": values[-1]}.items()}


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {number:.3f}" for name, number in value.items())
    return str(value)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
