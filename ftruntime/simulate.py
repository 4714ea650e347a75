"""``ftruntime simulate``: the step loop of a server with a simulated executor and clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from ftruntime import timeline
from ftruntime.engine.loop import EngineLoop
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.sim import report
from ftruntime.sim.clock import VirtualClock
from ftruntime.sim.cost import StepNoise
from ftruntime.sim.executor import PrefillSpan, SimExecutor
from ftruntime.sim.run import Arrival, ClientLog, run_clients
from ftruntime.sim.settings import Experiment
from ftruntime.types import SchedulerLimits

Progress = Callable[[str, float], None]

_POLICY: Final = ("decode_interleave_every", "max_decode_gap_ms", "prefill_layer_groups")


@dataclass(frozen=True)
class _Run:
    logs: dict[str, ClientLog]
    stats: dict[str, object]
    prefills: dict[str, PrefillSpan]


@dataclass(frozen=True)
class Outcome:
    """One report for each policy, and the lines and shades of the plot."""

    reports: list[dict[str, object]]
    series: dict[str, list[float]]
    spans: dict[str, tuple[float, float]]


def run(experiment: Experiment, progress: Progress | None) -> Outcome:
    """Every policy of the experiment, one after another.

    Raises:
        ValueError: victims or attacker cannot be served.
    """
    outcome = Outcome([], {}, {})
    for config, limits in zip(experiment.configs, experiment.limits, strict=True):
        policy = {name: getattr(config, name) for name in _POLICY}
        policy["chunk_tokens"] = limits.chunk_tokens
        label = report.policy_label(policy)
        told = _told(progress, label)
        if experiment.arrivals is None:
            done, values = _stall(experiment, limits, policy, told)
            span = done.prefills["attacker"]
            outcome.spans[f"{label}: attacker's prefill"] = (span.start_s, span.end_s)
            victims = [log for name, log in done.logs.items() if name != "attacker"]
            for name, times in _lines(victims).items():
                outcome.series[f"{label}: {name}"] = times
        else:
            done = _simulate(experiment, limits, experiment.arrivals, 0.0, told)
            values = report.trace_report(policy, done.logs, done.stats)
            times = sorted(time for log in done.logs.values() for time in log.token_times)
            outcome.series[f"{label}: all clients"] = times
        outcome.reports.append(values)
    return outcome


def draw(experiment: Experiment, outcome: Outcome) -> None:
    """The plot, where one is asked for.

    Raises:
        OSError: the file cannot be written.
    """
    if experiment.plot is None:
        return
    shown = outcome.spans if len(outcome.reports) == 1 else {}
    timeline.draw(experiment.plot, outcome.series, experiment.caption, spans=shown)


def print_reports(experiment: Experiment, reports: list[dict[str, object]], stream: TextIO) -> None:
    """The reports as text, with what they are below them; the clients of a trace come first."""
    for values in reports:
        if "per_client" in values:
            report.print_clients(values, stream)
            stream.write("\n")
    report.print_reports(reports, experiment.caption, stream)


def _lines(victims: Sequence[ClientLog]) -> dict[str, list[float]]:
    """Token times by name; victims whose tokens came together are one line."""
    together: dict[tuple[float, ...], list[str]] = {}
    for log in victims:
        together.setdefault(tuple(log.token_times), []).append(log.arrival.name)
    return {
        names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more": list(times)
        for times, names in together.items()
    }


def _told(progress: Progress | None, label: str) -> Callable[[float], None] | None:
    return None if progress is None else lambda share: progress(label, share)


def _stall(
    experiment: Experiment,
    limits: SchedulerLimits,
    policy: Mapping[str, object],
    progress: Callable[[float], None] | None,
) -> tuple[_Run, dict[str, object]]:
    victims, attacker = experiment.stall.arrivals(experiment.cost, limits.chunk_tokens)
    start_s = victims[0].arrival_s
    alone = _simulate(experiment, limits, victims, start_s, None)
    done = _simulate(experiment, limits, [*victims, attacker], start_s, progress)
    for log in done.logs.values():
        if log.refusal is not None:
            raise ValueError(f"the {log.arrival.name.split()[0]} is refused: {log.refusal}")
    values = report.stall_report(
        policy, [done.logs[victim.name] for victim in victims], done.logs["attacker"],
        done.prefills["attacker"], alone=list(alone.logs.values()),
        interleaved_decode_steps=done.stats["interleaved_decode_steps"],
    )  # fmt: skip
    return done, values


def _simulate(
    experiment: Experiment,
    limits: SchedulerLimits,
    arrivals: Sequence[Arrival],
    start_s: float,
    progress: Callable[[float], None] | None,
) -> _Run:
    clock = VirtualClock(start_s)
    noise = StepNoise(experiment.noise, experiment.seed)
    executor = SimExecutor(clock, experiment.cost, limits.num_layers, noise)
    loop = EngineLoop(Scheduler(limits), executor, clock, info={}, decode_log_interval=1 << 30)
    logs = run_clients(loop, clock, arrivals, progress=progress)
    stats = loop.stats()
    if stats["integrity"] != "ok":
        raise RuntimeError(f"the scheduler's books are wrong: {stats['integrity']}")
    return _Run(logs, stats, executor.prefills)
