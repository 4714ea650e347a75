"""All settings of a server or an `LLM`, checked once, in one frozen dataclass.

Field names are the flags of ``ftruntime serve`` with underscores. What the settings come to on a
given machine and checkpoint is `ftruntime.plan.resolve`; it is offered here again under the same
name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import cast

from ftruntime.distribution import DEMO_DIRECTORY, demo_directory
from ftruntime.flags import (
    FlagSpec,
    FlagValue,
    checked,
    choice,
    flag_name,
    integer,
    number,
    refuse,
    switch,
    words,
)
from ftruntime.plan import DeviceFacts, Plan, resolve
from ftruntime.types import PAGE_TOKENS

__all__ = [
    "DeviceFacts",
    "Plan",
    "RuntimeConfig",
    "flag_specs",
    "resolve",
    "served_name",
]


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Every flag of ``serve``; units are part of the names or of the help.

    ``explicit`` holds the names the user set; fields that differ from their default are added to
    it, but for the model, in whose place the demo may stand.

    Raises:
        ValueError: ``--flag is VALUE, expected ...`` for a value outside its range, two flags of a
        one-of group, or two
            flags that contradict each other.
    """

    model: str | None = words(
        None, "Checkpoint directory.", shown_default="the trained demo that comes along"
    )
    tensor_parallel_size: int = integer(
        1, "Ranks, one process each.", low=1, aliases=("--tp",)
    )  # fmt: skip
    disable_pynccl: bool = switch(
        "Accepted: torch.distributed collectives are what is used anyway."
    )
    moe_backend: str = choice(
        "auto",
        "Where routed experts live: fused (all on the device), offload (in host memory, slots of "
        "them on the device) or auto (fused if they fit).",
        ("auto", "fused", "offload"),
    )
    moe_cache_auto: bool = switch(
        "Expert slots take the device memory that KV leaves (as without any --moe-cache flag).",
        group="moe-cache",
    )
    moe_cache_size: int | None = integer(
        None, "Expert slots on the device, all layers together.", low=1, group="moe-cache",
        shown_default="auto",
    )  # fmt: skip
    moe_cache_rate: float | None = number(
        None, "Expert slots as a share of all experts, 0 to 1.", low=0, high=1, group="moe-cache",
        shown_default="auto",
    )  # fmt: skip
    kv_reserve_tokens: int = integer(
        8192, "KV room set aside before experts take the rest, in tokens.", low=0
    )
    num_tokens: int | None = integer(
        None, "KV capacity in tokens, a multiple of 128.", low=PAGE_TOKENS, multiple_of=PAGE_TOKENS,
        group="kv-capacity", shown_default="from --memory-ratio; at most 65536 on CPU",
    )  # fmt: skip
    num_pages: int | None = integer(
        None, "KV capacity in pages of 128 tokens.", low=1, group="kv-capacity",
        shown_default="from --memory-ratio",
    )  # fmt: skip
    swa_full_tokens_ratio: float = number(
        0.2, "Window pages as a share of all pages, above 0, up to 1.", low=0, low_open=True, high=1
    )
    memory_ratio: float = number(
        0.9, "Share of free device memory (CPU: MemAvailable) to use.",
        low=0, low_open=True, high=1, high_open=True,
    )  # fmt: skip
    max_running_requests: int = integer(4, "Rows decoded together.", low=1)
    cuda_graph_max_bs: int | None = integer(
        None, "Largest captured decode batch, in rows; 0 captures none.", low=0,
        shown_default="--max-running-requests",
    )  # fmt: skip
    max_prefill_length: int = integer(
        8192, "Upper bound on the new tokens of one prefill step, at least 128.", low=PAGE_TOKENS
    )
    max_model_len: int | None = integer(
        None, "Longest prompt + output served, in tokens.", low=2,
        shown_default="the smaller of checkpoint and KV capacity",
    )  # fmt: skip
    cache_type: str = choice("radix", "Prefix cache: radix or naive (off).", ("radix", "naive"))
    admission: str = choice(
        "reserve",
        "Whether a request's whole output is reserved when it is admitted. optimistic: its prompt "
        "only; when pages run out the newest request waits and is computed again later.",
        ("reserve", "optimistic"),
    )  # fmt: skip
    max_waiting_requests: int = integer(256, "Requests that may wait; beyond: 429.", low=1)
    max_waiting_tokens: int | None = integer(
        None, "Prompt tokens that may wait; beyond: 429.", low=1, shown_default="4 x KV capacity"
    )
    request_timeout_s: float = number(0.0, "Time limit of a request in seconds; 0 is none.", low=0)
    shutdown_timeout_s: float = number(30.0, "Seconds to finish requests after SIGTERM.", low=0)
    stall_timeout_s: float = number(
        120.0, "Seconds after which a step that does not return turns /health to 503. With ranks "
        "it ends the server too, and bounds every wait for a rank.",
        low=0, low_open=True, high=100_000,
    )  # fmt: skip
    max_body_mb: float = number(
        32.0, "Largest request body in MB; beyond: 413.", low=0, low_open=True
    )
    api_key: str | None = words(
        None, "Bearer token that clients must send, or FTRUNTIME_API_KEY.", env="FTRUNTIME_API_KEY",
        secret=True, shown_default="none",
    )  # fmt: skip
    expert_load: str = choice(
        "auto", "How host expert banks are filled: auto, serial or parallel.",
        ("auto", "serial", "parallel"),
    )  # fmt: skip
    expert_prefetch: int = integer(
        2, "Checkpoint shards read ahead of placement by the parallel loader.", low=1
    )
    moe_prefetch_layers: int = integer(
        1, "Layers ahead whose experts are copied while the current layer runs.", low=0
    )
    moe_prefill_hit_d2d: bool = switch(
        "Resident experts do not cross the bus again in prefill (they are read in place anyway)."
    )
    enable_cache_report: bool = switch("Report prompt_tokens_details.cached_tokens in usage.")
    decode_log_interval: int = integer(40, "One decode log line per this many decode steps.", low=1)
    decode_interleave_every: int | None = integer(
        None, "After this many prefill chunks in a row, one decode step if one can run.",
        low=1,
    )  # fmt: skip
    max_decode_gap_ms: int | None = integer(
        None, "Bound in ms on the time between two decode steps while prefill runs.", low=1
    )
    prefill_layer_groups: int | None = integer(
        None, "Layer slices of a prefill chunk; with 2 or more a decode step after each.", low=1,
        shown_default="1, or cut as --max-decode-gap-ms needs",
    )  # fmt: skip
    served_model_name: str | None = words(
        None, "Model name in the API.", shown_default="the directory's name"
    )
    host: str = words("127.0.0.1", "Address to listen on.")
    port: int = integer(1919, "TCP port to listen on.", low=1, high=65535)
    device: str = choice(
        "auto", "Where the model runs: auto, cuda or cpu.", ("auto", "cuda", "cpu")
    )
    numerics: str = choice(
        "official", "official, or exact (fp32, no round trips; to test and to find drift).",
        ("official", "exact"),
    )  # fmt: skip
    kv_format: str = choice(
        "bf16", "Format of window and compressed rows: bf16 or fp8.", ("bf16", "fp8")
    )
    explicit: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, spec in flag_specs().items():
            object.__setattr__(self, name, checked(name, getattr(self, name), spec))
        changed = {
            name for name, spec in flag_specs().items()
            if name != "model" and getattr(self, name) != spec.default
        }  # fmt: skip
        object.__setattr__(self, "explicit", frozenset(self.explicit) | changed)
        self._check_groups()
        if self.kv_format == "fp8" and self.numerics == "exact":
            refuse("kv_format", "fp8", "bf16 with --numerics exact, which rounds no KV row")
        for name in ("moe_cache_size", "moe_cache_rate"):
            value: FlagValue = getattr(self, name)
            if value is not None and self.moe_backend == "fused":
                refuse(name, value, "it unset with --moe-backend fused, which has no slots")

    def _check_groups(self) -> None:
        given: dict[str, str] = {}
        for name, spec in flag_specs().items():
            value: FlagValue = getattr(self, name)
            if spec.group is None or value is None or value is False:
                continue
            first = given.setdefault(spec.group, name)
            if first != name:
                expected = f"only one of {flag_name(first)} and {flag_name(name)}"
                refuse(name, "given too" if value is True else value, expected)

    @staticmethod
    def from_flags(**flags: object) -> RuntimeConfig:
        """Settings from keywords, all of them explicit; ``tp`` is ``tensor_parallel_size``.

        The keywords of `to_dict`, ``explicit`` among them, give the same config back.
        """
        if "explicit" in flags:
            return RuntimeConfig.from_dict(flags)
        specs = flag_specs()
        aliases = {
            alias.removeprefix("--").replace("-", "_"): name
            for name, spec in specs.items()
            for alias in spec.aliases
        }
        values: dict[str, object] = {}
        spelled: dict[str, str] = {}
        for given, value in flags.items():
            name = aliases.get(given, given)
            if name not in specs:
                near = difflib.get_close_matches(name, specs, n=1)
                hint = f" (nearest: {near[0]})" if near else ""
                raise ValueError(f"{given} is not a setting, expected a flag of serve{hint}")
            if name in values:
                expected = f"only one of {spelled[name]} and {given}"
                raise ValueError(f"{given} is {value!r}, expected {expected}")
            values[name], spelled[name] = value, given
        return _build(values, frozenset(name for name in values if values[name] is not None))

    def with_model(self) -> RuntimeConfig:
        """These settings, with the trained demo as the model where none is named.

        Raises:
            FileNotFoundError: there is none in this installation.
        """
        return self if self.model is not None else replace(self, model=str(demo_directory()))

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values, from which `from_dict` makes an equal config."""
        values: dict[str, object] = {name: getattr(self, name) for name in flag_specs()}
        values["explicit"] = sorted(self.explicit)
        return values

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> RuntimeConfig:
        """The inverse of `to_dict`."""
        values = {name: value for name, value in data.items() if name != "explicit"}
        unknown = sorted(set(values) - set(flag_specs()))
        if unknown:
            raise ValueError(f"{unknown[0]} is not a setting, expected a flag of serve")
        explicit = cast("Sequence[str]", data.get("explicit", ()))
        return _build(values, frozenset(explicit))


def _build(values: Mapping[str, object], explicit: frozenset[str]) -> RuntimeConfig:
    return RuntimeConfig(**values, explicit=explicit)  # type: ignore[arg-type]


def served_name(config: RuntimeConfig) -> str:
    """The model's name in the API: without ``--served-model-name`` that of its directory."""
    basename = os.path.basename(os.path.normpath(config.model or DEMO_DIRECTORY))
    return config.served_model_name or basename


def flag_specs() -> dict[str, FlagSpec]:
    """Field name -> its flag, in the order of the help."""
    return {f.name: f.metadata["flag"] for f in fields(RuntimeConfig) if "flag" in f.metadata}
