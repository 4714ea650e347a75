"""``ftruntime simulate``: its options, and the experiments behind them.

The step loop, the scheduler and the KV bookkeeping are those of a server; only the executor and the
clock are simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO, TypeVar, cast

import click

from ftruntime import timeline
from ftruntime.config import RuntimeConfig, flag_specs
from ftruntime.engine.loop import EngineLoop
from ftruntime.flags import FlagSpec, FlagValue, checked, flag_name, parse, refuse
from ftruntime.inspect import shape_of
from ftruntime.options import read_config
from ftruntime.plan import DeviceFacts, Plan, resolve
from ftruntime.scheduler.scheduler import Scheduler
from ftruntime.sim import report
from ftruntime.sim.clock import VirtualClock
from ftruntime.sim.cost import SEED_COST, StepCost
from ftruntime.sim.executor import PrefillSpan, SimExecutor
from ftruntime.sim.run import Arrival, ClientLog, run_clients
from ftruntime.sim.workload import (
    MAX_TOKENS,
    TraceSpec,
    make_trace,
    read_trace,
    victim_and_attacker,
)
from ftruntime.types import PAGE_TOKENS, SchedulerLimits

_Command = TypeVar("_Command", bound=Callable[..., object])
Progress = Callable[[str, float], None]

SEED_FLAGS: Final[Mapping[str, object]] = {
    "model": "flash", "tensor_parallel_size": 8, "disable_pynccl": True, "moe_backend": "offload",
    "moe_cache_auto": True, "kv_reserve_tokens": 327680, "num_tokens": 327680,
    "swa_full_tokens_ratio": 0.12, "memory_ratio": 0.90, "max_running_requests": 50,
    "cuda_graph_max_bs": 64, "max_prefill_length": 4096, "expert_load": "parallel",
    "expert_prefetch": 2, "enable_cache_report": True, "decode_log_interval": 20,
    "served_model_name": "deepseek-v4-flash", "host": "0.0.0.0", "port": 1919,
    "moe_prefill_hit_d2d": True,
}  # fmt: skip
"""Serve flags of the preset; no flag of the policy is among them."""
_CARD_BYTES: Final = 24 << 30
_POLICY: Final = ("decode_interleave_every", "max_decode_gap_ms", "prefill_layer_groups")

_STALL: Final[Mapping[str, FlagSpec]] = {
    "prompt_tokens": FlagSpec(
        kind="int", help="Prompt tokens of the attacker.", default=200_019, low=1, high=MAX_TOKENS
    ),
    "victim_tokens": FlagSpec(
        kind="int", help="Tokens the victim asks for from time 0 on.", default=699, low=1,
        high=MAX_TOKENS,
    ),
    "attack_after": FlagSpec(
        kind="float", help="Seconds after which the attacker arrives.", default=6.0, low=0
    ),
}  # fmt: skip
_TRACE: Final[Mapping[str, FlagSpec]] = {
    "requests": FlagSpec(
        kind="int", help="A random trace of this many requests.", default=100, low=1, high=1_000_000
    ),
    "arrivals": FlagSpec(
        kind="str", default="poisson:0.1",
        help="poisson:RATE or uniform:RATE (a second), or burst:SIZE:PERIOD_S.",
    ),
    "prompt_lengths": FlagSpec(
        kind="str", default="lognormal:2000:1.5",
        help="Prompt tokens: fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.",
    ),
    "output_lengths": FlagSpec(
        kind="str", default="lognormal:200:1", help="Output tokens, likewise."
    ),
    "seed": FlagSpec(kind="int", help="Seed of the random trace.", default=0, low=0),
}  # fmt: skip
_OPTIONS: Final[Mapping[str, FlagSpec]] = {
    "preset": FlagSpec(
        kind="str", default="seed", choices=("seed",),
        help="Serve flags to begin with: seed (flash on 8 cards of 24 GiB, chunks of 3456 tokens).",
    ),
    "cost": FlagSpec(
        kind="str", default=str(SEED_COST),
        help="Seconds a,b,d,decode: a prefill step of c tokens at context x costs a + c*(b + d*x).",
    ),
    **_STALL,
    "table": FlagSpec(
        kind="str", help="Unset and these values of --decode-interleave-every side by side: N,N,..."
    ),
    "trace": FlagSpec(
        kind="str",
        help='Replay a JSONL file, {"arrival_s", "prompt_tokens", "max_tokens"} a line.',
    ),
    **_TRACE,
    "plot": FlagSpec(kind="str", help="Draw the token timeline into this png, svg or pdf file."),
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """What one command line asks for. `arrivals` is None for victim and attacker."""

    plan: Plan
    configs: tuple[RuntimeConfig, ...]  # equal but for their policies
    limits: tuple[SchedulerLimits, ...]  # of each config
    cost: StepCost
    stall: Mapping[str, FlagValue]
    arrivals: tuple[Arrival, ...] | None
    plot: Path | None

    @property
    def caption(self) -> str:
        """What the numbers are, in one sentence."""
        config = self.configs[0]
        return (
            f"simulated, nothing was timed: {config.model} on {self.plan.ranks} x 24 GiB, chunks "
            f"of {self.plan.chunk_tokens} tokens, step cost {self.cost} s"
        )


@dataclass(frozen=True)
class _Run:
    logs: dict[str, ClientLog]
    stats: dict[str, object]
    prefills: dict[str, PrefillSpan]


def simulate_options(command: _Command) -> _Command:
    """Add the options that `serve` does not have; values arrive as words."""
    for name, spec in reversed(tuple(_OPTIONS.items())):
        metavar = "|".join(spec.choices) or {"int": "N", "float": "F"}.get(spec.kind, "TEXT")
        option = click.option(flag_name(name), name, metavar=metavar, help=spec.help_line)
        command = option(command)
    return command


def prepare(params: Mapping[str, str | bool | None]) -> Experiment:
    """Read and check a whole command line before anything runs.

    Raises:
        ValueError: ``--flag is VALUE, expected ...``.
        OSError: the trace file cannot be read.
    """
    values = _read(params)
    config = _config(read_config(params, None))
    cost = StepCost.parse(str(values["cost"]))
    configs = _policies(config, cast("str | None", values["table"]))
    arrivals = _arrivals(values, traced=_is_traced(params))
    plot = None if values["plot"] is None else Path(str(values["plot"]))
    if plot is not None:
        timeline.check_drawable(plot)
    shape, ranks = shape_of(config.model), config.tensor_parallel_size
    plan = resolve(config, shape, DeviceFacts(kind="cuda", cards=ranks, memory_bytes=_CARD_BYTES))
    limits = tuple(plan.scheduler_limits(each, shape) for each in configs)
    stall = {name: values[name] for name in _STALL}
    return Experiment(plan, configs, limits, cost, stall, arrivals, plot)


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


def _read(params: Mapping[str, str | bool | None]) -> dict[str, FlagValue]:
    values: dict[str, FlagValue] = {}
    for name, spec in _OPTIONS.items():
        text = params[name]
        given = spec.default if text is None else parse(str(text), spec)
        values[name] = checked(name, given, spec)
    traced = _is_traced(params)
    for name in (*_STALL, *_TRACE, "table"):
        text = params[name]
        if text is None:
            continue
        if traced and name not in _TRACE:
            refuse(name, text, "it unset with a trace of many clients")
        if params["trace"] is not None and name in _TRACE:
            refuse(name, text, "it unset with --trace, whose file says it")
    return values


def _is_traced(params: Mapping[str, str | bool | None]) -> bool:
    return any(params[name] is not None for name in ("trace", *_TRACE))


def _config(given: RuntimeConfig) -> RuntimeConfig:
    """The preset with the flags that were given; one of a one-of group replaces the preset's."""
    specs = flag_specs()
    values = {name: getattr(given, name) for name in given.explicit}
    groups = {specs[name].group for name in values} - {None}
    preset = {name: value for name, value in SEED_FLAGS.items() if specs[name].group not in groups}
    return RuntimeConfig.from_flags(**{**preset, **values})


def _policies(config: RuntimeConfig, table: str | None) -> tuple[RuntimeConfig, ...]:
    name = "decode_interleave_every"
    if table is None:
        return (config,)
    if config.decode_interleave_every is not None:
        refuse("table", table, f"only one of --table and {flag_name(name)}")
    spec = flag_specs()[name]
    numbers = [parse(word.strip(), spec) for word in table.split(",")]
    if not all(isinstance(number, int) and number >= 1 for number in numbers):
        refuse("table", table, "integers >= 1 with commas between them, as in 1,2,4,8,16")
    replaced = (dataclasses.replace(config, **{name: number}) for number in numbers)  # type: ignore[arg-type]
    return (config, *replaced)


def _arrivals(values: Mapping[str, FlagValue], *, traced: bool) -> tuple[Arrival, ...] | None:
    if not traced:
        return None
    if values["trace"] is not None:
        return tuple(read_trace(Path(str(values["trace"]))))
    spec = TraceSpec(
        int(values["requests"] or 0), str(values["arrivals"]), str(values["prompt_lengths"]),
        str(values["output_lengths"]), int(values["seed"] or 0),
    )  # fmt: skip
    return tuple(make_trace(spec))
