"""What `ftruntime eval` can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ftruntime.flags import FlagSpec

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
    kind="str", help="UTF-8 file to score, and to hide needles in.", shown_default="none: required"
)  # fmt: skip


def eval_specs() -> Mapping[str, FlagSpec]:
    """The flags with a value, by the names of their parameters."""
    return {"text": TEXT, "context": CONTEXT, "trials": TRIALS, "seed": SEED}


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
