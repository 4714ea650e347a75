"""Command-line options generated from the fields of a settings dataclass, such as those of `serve`
and `inspect` from `RuntimeConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import click

from ftruntime.config import RuntimeConfig, flag_specs
from ftruntime.flags import FlagSpec, flag_name, parse, refuse

_Command = TypeVar("_Command", bound=Callable[..., object])
_METAVARS: Final = {"int": "N", "float": "F", "str": "TEXT"}
_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Model": (
        "model", "served_model_name", "device", "tensor_parallel_size", "disable_pynccl",
        "numerics", "kv_format",
    ),
    "Long prompts beside running streams": (
        "decode_interleave_every", "max_decode_gap_ms", "prefill_layer_groups",
        "max_prefill_length",
    ),
    "Experts": (
        "moe_backend", "moe_cache_auto", "moe_cache_size", "moe_cache_rate", "moe_prefetch_layers",
        "moe_prefill_hit_d2d", "expert_load", "expert_prefetch",
    ),
    "Memory": (
        "memory_ratio", "kv_reserve_tokens", "num_tokens", "num_pages", "swa_full_tokens_ratio",
        "max_model_len", "cache_type",
    ),
    "Requests": (
        "max_running_requests", "cuda_graph_max_bs", "admission", "max_waiting_requests",
        "max_waiting_tokens", "request_timeout_s", "max_body_mb", "enable_cache_report",
    ),
    "Server": (
        "host", "port", "api_key", "shutdown_timeout_s", "stall_timeout_s", "decode_log_interval",
    ),
}  # fmt: skip


def flag_options(command: _Command) -> _Command:
    """Add every flag of `serve` to a click command."""
    return options(flag_specs())(command)


def flag_sections() -> Mapping[str, tuple[str, ...]]:
    """Every flag of `serve` by heading of the help."""
    return _SECTIONS


def options(specs: Mapping[str, FlagSpec]) -> Callable[[_Command], _Command]:
    """Add one option a flag to a click command. Values arrive as words: the dataclass converts and
    checks them.
    """

    def add(command: _Command) -> _Command:
        for name, spec in reversed(list(specs.items())):
            command = _option(name, spec)(command)
        return command

    return add


def given_values(
    params: Mapping[str, str | bool | None], specs: Mapping[str, FlagSpec]
) -> dict[str, object]:
    """What was given of these flags, as keywords of their dataclass."""
    given: dict[str, object] = {}
    for name, spec in specs.items():
        value = params[name]
        if isinstance(value, str):
            given[name] = parse(value, spec)
        elif value:
            given[name] = True
    return given


def _option(name: str, spec: FlagSpec) -> Callable[[_Command], _Command]:
    declarations = (flag_name(name), *spec.aliases, name)
    if spec.kind == "switch":
        return click.option(*declarations, is_flag=True, default=False, help=spec.help_line)
    metavar = "|".join(spec.choices) or _METAVARS[spec.kind]
    return click.option(
        *declarations, type=str, default=None, metavar=metavar, envvar=spec.env, help=spec.help_line
    )


def read_config(params: Mapping[str, str | bool | None], positional: str | None) -> RuntimeConfig:
    """The settings behind the options given on a command line, and the MODEL argument.

    Raises:
        ValueError: as `RuntimeConfig`; also two different models.
    """
    given = given_values(params, flag_specs())
    if positional is not None:
        named = given.setdefault("model", positional)
        if named != positional:
            refuse("model", named, f"only one model, {positional} was given too")
    return RuntimeConfig.from_flags(**given)
