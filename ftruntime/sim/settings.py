"""Options of ``ftruntime simulate`` and what they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from ftruntime import timeline
from ftruntime.config import RuntimeConfig, flag_specs
from ftruntime.flags import FlagSpec, FlagValue, checked, flag_name, parse, refuse
from ftruntime.inspect import shape_of
from ftruntime.options import read_config
from ftruntime.plan import DeviceFacts, Plan, resolve
from ftruntime.sim.checks import check_stall
from ftruntime.sim.cost import MODELLED, SEED_COST, Cost, ModelledCost, StepCost
from ftruntime.sim.run import Arrival
from ftruntime.sim.workload import MAX_TOKENS, StallSpec, TraceSpec, make_trace, read_trace
from ftruntime.step_model import StepModel, step_model
from ftruntime.types import SchedulerLimits

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
_CONTEXT_FLAGS: Final = frozenset(("model", "num_tokens", "num_pages", "max_model_len"))
_CARD_BYTES: Final = 24 << 30
_POLICY_FLAGS: Final = (
    "decode_interleave_every", "max_decode_gap_ms", "prefill_layer_groups", "max_prefill_length",
    "max_running_requests", "num_tokens", "swa_full_tokens_ratio", "admission", "cache_type",
)  # fmt: skip

_STALL: Final[Mapping[str, FlagSpec]] = {
    "prompt_tokens": FlagSpec(
        kind="int", help="Prompt tokens of the attacker.", default=200_019, low=1, high=MAX_TOKENS
    ),
    "victims": FlagSpec(
        kind="int", help="Streams that decode when the attacker arrives.", default=1, low=1,
        high=1024,
    ),
    "victim_tokens": FlagSpec(
        kind="int", help="Tokens each victim asks for from time 0 on.", default=699, low=1,
        high=MAX_TOKENS,
    ),
    "attack_after": FlagSpec(
        kind="float", help="Seconds after which the attacker arrives.", default=6.0, low=0
    ),
}  # fmt: skip
_TRACE: Final[Mapping[str, FlagSpec]] = {
    "requests": FlagSpec(
        kind="int", default=100, low=1, high=1_000_000,
        help="Clients of a random trace; this or a flag below it replaces victims and attacker.",
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
}  # fmt: skip
_OPTIONS: Final[Mapping[str, FlagSpec]] = {
    "preset": FlagSpec(
        kind="str", default="seed", choices=("seed",),
        help="Serve flags to begin with: seed (flash on 8 cards of 24 GiB; its window pages cut "
        "--max-prefill-length 4096 to chunks of 3456 tokens).",
    ),
    "cost": FlagSpec(
        kind="str", default=str(SEED_COST),
        help="Seconds a,b,d,decode: a prefill step of c tokens at context x costs a + c*(b + d*x). "
        "Or the steps that `inspect` models for the plan: sum, nothing overlaps; overlapped, "
        "everything does that can.",
    ),
    "noise": FlagSpec(
        kind="float", default=0.0, low=0, high=1, high_open=True,
        help="Every step from time 0 on takes its cost times a factor of its own, drawn uniformly "
        "from [1 - F, 1 + F].",
    ),
    "seed": FlagSpec(
        kind="int", default=0, low=0,
        help="Seed of --noise and of a random trace; it asks for neither.",
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
    "plot": timeline.PLOT,
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """What one command line asks for. `arrivals` is None for victims and attacker."""

    plan: Plan
    configs: tuple[RuntimeConfig, ...]  # equal but for their policies
    limits: tuple[SchedulerLimits, ...]  # of each config
    cost: Cost
    noise: float  # share of a step's cost
    seed: int  # of the noise
    stall: StallSpec
    arrivals: tuple[Arrival, ...] | None
    plot: Path | None

    @property
    def caption(self) -> str:
        """What the numbers are, in one sentence."""
        config, victims = self.configs[0], self.stall.num_victims
        text = (
            f"simulated, nothing was timed: {config.model} on {self.plan.ranks} x 24 GiB, chunks "
            f"of {self.plan.chunk_tokens} tokens, {self.cost.words}"
        )
        if self.noise:
            text += f" times factors in [{1 - self.noise:g}, {1 + self.noise:g}], seed {self.seed}"
        if self.arrivals is None and victims > 1:
            text += f"; {victims} victims, walls and longest gap of the worst, counts of all"
        return text


def help_sections() -> Mapping[str, tuple[str, ...]]:
    """Options by heading of the help, those of `serve` that change what is simulated among them."""
    return {
        "Experiment": ("as_json", "preset", "cost", "noise", "seed", "table", "plot"),
        "Long prompt beside running streams": tuple(_STALL),
        "Trace of many clients, in place of it": ("trace", *_TRACE),
        "Policy (flags of serve)": _POLICY_FLAGS,
    }


def simulate_specs() -> Mapping[str, FlagSpec]:
    """Name -> option, of those that `serve` does not have."""
    return _OPTIONS


def preset_specs() -> Mapping[str, FlagSpec]:
    """The options of `serve`, with the defaults that the preset gives them."""
    return {
        name: dataclasses.replace(spec, shown_default=f"{SEED_FLAGS[name]}, by the preset")
        if name in SEED_FLAGS
        else spec
        for name, spec in flag_specs().items()
    }


def prepare(params: Mapping[str, str | bool | None]) -> Experiment:
    """Read and check a whole command line before anything runs.

    Raises:
        ValueError: ``--flag is VALUE, expected ...``.
        OSError: the checkpoint's config.json cannot be read.
    """
    values = _read(params)
    serve_flags = read_config(params, None)
    config = _config(serve_flags)
    numbers = None if values["cost"] in MODELLED else StepCost.parse(str(values["cost"]))
    configs = _policies(config, cast("str | None", values["table"]))
    arrivals = _arrivals(values, traced=_is_traced(params))
    plot = None if values["plot"] is None else Path(str(values["plot"]))
    if plot is not None:
        timeline.check_drawable(plot)
    shape, ranks = shape_of(str(config.model)), config.tensor_parallel_size
    # the run judges a bound by time, not the step times that the plan would model
    unbounded = dataclasses.replace(config, max_decode_gap_ms=None)
    if not serve_flags.explicit & _CONTEXT_FLAGS:
        # the context of the preset is what it asks for, nothing to warn of
        unbounded = dataclasses.replace(unbounded, max_model_len=config.num_tokens)
    facts = DeviceFacts(kind="cuda", cards=ranks, memory_bytes=_CARD_BYTES)
    plan = resolve(unbounded, shape, facts)
    limits = tuple(plan.scheduler_limits(each, shape) for each in configs)
    cost = numbers or _modelled(str(values["cost"]), step_model(unbounded, shape, plan))
    stall = StallSpec(
        int(values["victims"] or 0), int(values["victim_tokens"] or 0),
        int(values["prompt_tokens"] or 0), float(values["attack_after"] or 0.0),
    )  # fmt: skip
    if arrivals is None:
        check_stall(stall, cost, float(values["noise"] or 0.0), limits[0])
    noise, seed = float(values["noise"] or 0.0), int(values["seed"] or 0)
    return Experiment(plan, configs, limits, cost, noise, seed, stall, arrivals, plot)


def _modelled(total: str, model: StepModel | None) -> Cost:
    if model is None:
        refuse("cost", total, "four numbers with --numerics exact, whose steps are not modelled")
    return ModelledCost(model, "sum" if total == "sum" else "overlapped")


def _read(params: Mapping[str, str | bool | None]) -> dict[str, FlagValue]:
    values: dict[str, FlagValue] = {}
    for name, spec in _OPTIONS.items():
        text = params[name]
        given = spec.default if text is None else parse(str(text), spec)
        values[name] = checked(name, given, spec)
    for name in (*_STALL, "table"):
        if _is_traced(params) and params[name] is not None:
            refuse(name, params[name], "it unset with a trace of many clients")
    for name in _TRACE:
        if params["trace"] is not None and params[name] is not None:
            refuse(name, params[name], "it unset with --trace, whose file says it")
    drawn = _is_traced(params) and params["trace"] is None
    if params["seed"] is not None and params["noise"] is None and not drawn:
        refuse("seed", params["seed"], "it unset without --noise or a random trace (--requests)")
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
    try:
        for number in numbers:
            checked(name, number, spec)
    except ValueError:
        refuse("table", table, "integers in [1, 2^40) with commas between them, as in 1,2,4,8,16")
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
