"""``ftruntime simulate``: the step loop of a server with a simulated executor and clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TextIO

from ftruntime import timeline
from ftruntime.engine.loop import EngineLoop
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.sim import report
from ftruntime.sim.clock import VirtualClock
from ftruntime.sim.cost import StepCost
from ftruntime.sim.executor import PrefillSpan, SimExecutor
from ftruntime.sim.run import Arrival, ClientLog, run_clients
from ftruntime.sim.settings import Experiment
from ftruntime.sim.workload import victim_and_attacker
from ftruntime.types import PAGE_TOKENS, SchedulerLimits

Progress = Callable[[str, float], None]

_POLICY: Final = ("decode_interleave_every", "max_decode_gap_ms", "prefill_layer_groups")


@dataclass(frozen=True)
class _Run:
    logs: dict[str, ClientLog]
    stats: dict[str, object]
    prefills: dict[str, PrefillSpan]


def run(experiment: Experiment, progress: Progress | None) -> list[dict[str, object]]:
    """One report for each policy; draws the plot.

    Raises:
        ValueError: victim or attacker cannot be served.
    """
    reports, series, spans = [], {}, {}
    for config, limits in zip(experiment.configs, experiment.limits, strict=True):
        policy = {name: getattr(config, name) for name in _POLICY}
        policy["chunk_tokens"] = limits.chunk_tokens
        label = report.policy_label(policy)
        told = _told(progress, label)
        if experiment.arrivals is None:
            done, values = _stall(experiment, limits, policy, told)
            span = done.prefills["attacker"]
            spans[f"{label}: attacker's prefill"] = (span.start_s, span.end_s)
            series[f"{label}: victim"] = done.logs["victim"].token_times
        else:
            done = _simulate(limits, experiment.cost, experiment.arrivals, 0.0, told)
            values = report.trace_report(policy, done.logs, done.stats)
            times = sorted(time for log in done.logs.values() for time in log.token_times)
            series[f"{label}: all clients"] = times
        reports.append(values)
    if experiment.plot is not None:
        shown = spans if len(reports) == 1 else {}
        timeline.draw(experiment.plot, series, experiment.caption, spans=shown)
    return reports


def print_reports(experiment: Experiment, reports: list[dict[str, object]], stream: TextIO) -> None:
    """The reports as text, with what they are below them."""
    report.print_reports(reports, experiment.caption, stream)
    for values in reports:
        if "per_client" in values:
            stream.write("\n")
            report.print_clients(values, stream)


def _told(progress: Progress | None, label: str) -> Callable[[float], None] | None:
    return None if progress is None else lambda share: progress(label, share)


def _stall(
    experiment: Experiment,
    limits: SchedulerLimits,
    policy: Mapping[str, object],
    progress: Callable[[float], None] | None,
) -> tuple[_Run, dict[str, object]]:
    cost, stall = experiment.cost, experiment.stall
    setup_s = cost.prefill_s(PAGE_TOKENS, 0)
    victim, attacker = victim_and_attacker(
        victim_tokens=int(stall["victim_tokens"] or 0),
        prompt_tokens=int(stall["prompt_tokens"] or 0),
        attack_after_s=float(stall["attack_after"] or 0.0), prefill_s=setup_s,
    )  # fmt: skip
    alone = _simulate(limits, cost, (victim,), -setup_s, None)
    done = _simulate(limits, cost, (victim, attacker), -setup_s, progress)
    for log in done.logs.values():
        if log.refusal is not None:
            raise ValueError(f"the {log.arrival.name} is refused: {log.refusal}")
    values = report.stall_report(
        policy, done.logs, done.prefills["attacker"],
        victim_alone_wall_s=alone.logs["victim"].token_times[-1],
        interleaved_decode_steps=done.stats["interleaved_decode_steps"],
    )  # fmt: skip
    return done, values


def _simulate(
    limits: SchedulerLimits,
    cost: StepCost,
    arrivals: tuple[Arrival, ...],
    start_s: float,
    progress: Callable[[float], None] | None,
) -> _Run:
    clock = VirtualClock(start_s)
    executor = SimExecutor(clock, cost, limits.num_layers)
    loop = EngineLoop(Scheduler(limits), executor, clock, info={}, decode_log_interval=1 << 30)
    logs = run_clients(loop, clock, arrivals, progress=progress)
    stats = loop.stats()
    if stats["integrity"] != "ok":
        raise RuntimeError(f"the scheduler's books are wrong: {stats['integrity']}")
    return _Run(logs, stats, executor.prefills)
