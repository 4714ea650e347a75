"""What `ftruntime eval` can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ftruntime.config import RuntimeConfig
from ftruntime.flags import FlagSpec, FlagValue, checked, flag_name, parse, refuse
from ftruntime.kvcache.layout import pages_for
from ftruntime.plan import Plan
from ftruntime.types import PAGE_TOKENS

DEFAULT_CONTEXT: Final = 2048  # tokens of a window
CONTEXT: Final = FlagSpec(
    kind="int", help="Tokens of a window, BOS among them; windows do not overlap.", low=2,
    shown_default="2048, or max-model-len - 1 if less",
)  # fmt: skip
TRIALS: Final = FlagSpec(
    kind="int", help="Needles asked for at each distance.", default=10, low=1, high=1000
)
SEED: Final = FlagSpec(kind="int", help="Seed of the needles and their places.", default=0, low=0)
TEXT: Final = FlagSpec(
    kind="str", help="UTF-8 file to score, and to hide needles in.", shown_default="none, required"
)  # fmt: skip
NEEDLES_HELP: Final = (
    "Also hide needles in the text and ask for them 300 to 3000 tokens later, --trials times each. "
    "The text has more than 340 tokens; a distance that text or --max-model-len has no room for is "
    "left out. Reads about 9000 tokens more a trial, often longer than the text itself."
)
_UNSERVED: Final = (
    "served_model_name", "host", "port", "api_key", "max_waiting_requests", "max_waiting_tokens",
    "request_timeout_s", "shutdown_timeout_s", "max_body_mb", "enable_cache_report",
    "decode_log_interval",
)  # fmt: skip
_BESIDE_DECODE: Final = ("decode_interleave_every", "max_decode_gap_ms")


def eval_specs() -> Mapping[str, FlagSpec]:
    """The flags with a value, by the names of their parameters."""
    return {"text": TEXT, "context": CONTEXT, "trials": TRIALS, "seed": SEED}


def read_values(
    params: Mapping[str, str | bool | None], *, needles: bool
) -> dict[str, int | str | None]:
    """The values of `eval_specs`, given or by default.

    Raises:
        ValueError: ``--flag is VALUE, expected ...``.
    """
    values: dict[str, int | str | None] = {}
    for name, spec in eval_specs().items():
        word = params[name]
        if word is not None and name in ("trials", "seed") and not needles:
            refuse(name, word, "it unset without --needles")
        value: FlagValue = spec.default
        if word is not None:
            value = checked(name, parse(str(word), spec), spec)
        assert not isinstance(value, bool | float)
        values[name] = value
    return values


def unused_flags(config: RuntimeConfig, *, needles: bool) -> dict[str, str]:
    """Why a flag the user set does not act on a score, whatever the plan, by field name.

    All others change memory, numerics, how prefill is scheduled or where experts lie.
    """
    reasons = dict.fromkeys(_UNSERVED, "eval serves no clients")
    if not needles:
        reasons |= dict.fromkeys(_BESIDE_DECODE, "nothing decodes without --needles")
    if config.tensor_parallel_size == 1:
        reasons["stall_timeout_s"] = "there is one rank, which waits for no other"
    return {name: reasons[name] for name in sorted(config.explicit & reasons.keys())}


@dataclass(frozen=True)
class LengthLimit:
    """What bounds prompt and answer together, and by which flag: in tokens or in pages."""

    longest: int
    flag: str
    value: int

    def __str__(self) -> str:
        return f"{flag_name(self.flag)} {self.value}"

    def least(self, tokens: int) -> int:
        """The least value of the flag that has room for so many tokens."""
        if self.flag == "max_model_len":
            return tokens
        pages = pages_for(tokens)
        return pages if self.flag == "num_pages" else pages * PAGE_TOKENS


def length_limit(config: RuntimeConfig, plan: Plan) -> LengthLimit:
    """The limit of a plan: its KV capacity where nothing less was asked for."""
    longest = plan.max_model_len
    if "max_model_len" in config.explicit or longest < plan.num_tokens:
        return LengthLimit(longest, "max_model_len", longest)
    if "num_pages" in config.explicit:
        return LengthLimit(longest, "num_pages", plan.num_pages)
    return LengthLimit(longest, "num_tokens", plan.num_tokens)


def help_sections() -> Mapping[str, tuple[str, ...]]:
    """Options by heading of the help, those of `serve` that change what is computed among them."""
    return {
        "What is asked": ("text", "context", "needles", "trials", "seed", "as_json"),
        "What computes it (flags of serve)": (
            "model", "device", "numerics", "kv_format", "tensor_parallel_size", "moe_backend",
            "moe_cache_size", "moe_cache_rate", "num_tokens", "max_model_len", "max_prefill_length",
            "prefill_layer_groups", "max_running_requests", "cache_type",
        ),
    }  # fmt: skip
