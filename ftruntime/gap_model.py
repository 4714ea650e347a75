"""The bound on the time between two decode steps that the policy flags come to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftruntime.model.config import ModelConfig
from ftruntime.step_model import RTX_4090, StepModel
from ftruntime.types import PAGE_TOKENS

if TYPE_CHECKING:
    from ftruntime.config import RuntimeConfig
    from ftruntime.plan import Plan


def decode_gap_s(config: RuntimeConfig, shape: ModelConfig, plan: Plan) -> float | None:
    """Seconds between two decode steps while prefill runs; None where no flag bounds them, or only
    by work whose time is not modelled.

    `--max-decode-gap-ms` is the bound itself, or the smallest piece of prefill and a decode step
    where these are modelled to take longer. N chunks and layer slices are modelled: at the longest
    context, with all rows, nothing overlapping.
    """
    gap_ms, every, groups = (
        config.max_decode_gap_ms, config.decode_interleave_every, config.prefill_layer_groups
    )  # fmt: skip
    asked_s = None if gap_ms is None else gap_ms / 1e3
    bounded = gap_ms is not None or every is not None or (groups or 1) > 1
    if not bounded or plan.kind != "cuda" or config.numerics == "exact" or not plan.fits:
        return asked_s
    model, layers = StepModel(config, shape, plan, RTX_4090), shape.num_hidden_layers
    context = plan.max_model_len
    decode_s = model.decode(plan.max_running, context).sum_s
    largest_slice = -(-layers // min(groups or 1, layers)) / layers
    if asked_s is not None:
        share = 1 / layers if groups is None else largest_slice
        page_s = model.prefill(min(PAGE_TOKENS, context), context).sum_s
        return max(asked_s, share * page_s + decode_s)
    chunk_s = model.prefill(min(plan.chunk_tokens, context), context).sum_s
    if groups is not None and groups > 1:
        return largest_slice * chunk_s + decode_s
    return None if every is None else every * chunk_s + decode_s


def gap_notes(config: RuntimeConfig, plan: Plan, gap_s: float | None) -> list[str]:
    """Log lines of the start: the bound in seconds, and where it comes from."""
    gap_ms, every, groups = (
        config.max_decode_gap_ms, config.decode_interleave_every, config.prefill_layer_groups or 1
    )  # fmt: skip
    if gap_ms is None and every is None and groups == 1:
        return []
    if gap_s is None:
        most = f"{every} chunks" if groups == 1 else f"1 of {groups} slices of a chunk"
        return [
            f"decode gap bounded by work: at most {most} of {plan.chunk_tokens} tokens between two "
            "decode steps; how long they take is not modelled for this machine"
        ]
    source = "flag" if gap_ms is not None and gap_s == gap_ms / 1e3 else "modelled"
    return [f"decode gap bounded max_decode_gap_s={gap_s:.3f} source={source}"]
