"""The bound on the time between two decode steps that the policy flags come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ftruntime.model.config import ModelConfig
from ftruntime.step_model import StepModel, step_model
from ftruntime.types import PAGE_TOKENS

if TYPE_CHECKING:
    from ftruntime.config import RuntimeConfig
    from ftruntime.plan import Plan

GapSource = Literal["flag", "modelled"]


@dataclass(frozen=True, kw_only=True)
class DecodeGap:
    """Seconds between two decode steps while prefill runs, and what the start log says of them.

    `seconds` is None where no flag bounds them, where the bound that was asked for cannot hold, and
    where only work is bounded whose time is not modelled. `source`: the flag itself, which the
    scheduler keeps by the times it measures, or step times that nobody measured.
    """

    seconds: float | None = None
    source: GapSource | None = None
    note: str | None = None  # log line at info level
    warning: str | None = None  # log line at warning level


def decode_gap(config: RuntimeConfig, shape: ModelConfig, plan: Plan) -> DecodeGap:
    """The gap that a plan's policy flags come to.

    Modelled are the longest context and all rows, with nothing overlapping. `--max-decode-gap-ms`
    cannot hold where the smallest piece of prefill and a decode step take longer; what N chunks or
    a layer slice come to is then left.
    """
    gap_ms, model = config.max_decode_gap_ms, step_model(config, shape, plan)
    by_work = _bound_by_work(config, shape, plan, model)
    if gap_ms is None:
        return by_work
    known = f"decode gap bounded max_decode_gap_s={gap_ms / 1e3:.3f} source=flag: "
    if model is None:
        known += "whether it can hold is not modelled for this plan, and a warning says if not"
        return DecodeGap(seconds=gap_ms / 1e3, source="flag", note=known)
    smallest = (
        f"one page through {_share_words(config)} and a decode step of {plan.max_running} "
        f"rows at {plan.max_model_len} tokens are modelled to take "
    )
    smallest_s = _smallest_s(config, shape, plan, model)
    if smallest_s <= gap_ms / 1e3:
        known += f"{smallest}{1e3 * smallest_s:.1f} ms"
        return DecodeGap(seconds=gap_ms / 1e3, source="flag", note=known)
    warning = (
        f"gap bound cannot hold at full load max_decode_gap_ms={gap_ms}: {smallest}"
        f"{1e3 * smallest_s:.1f} ms; pieces of prefill then grow with the wait of the oldest prompt"
    )
    return replace(by_work, warning=warning)


def _bound_by_work(
    config: RuntimeConfig, shape: ModelConfig, plan: Plan, model: StepModel | None
) -> DecodeGap:
    """N chunks or one layer slice, and a decode step."""
    every, groups = config.decode_interleave_every, config.prefill_layer_groups or 1
    if every is None and groups == 1:
        return DecodeGap()
    most = f"{every} chunks" if groups == 1 else f"1 of {groups} slices of a chunk"
    work = f"at most {most} of {plan.chunk_tokens} tokens between two decode steps"
    if model is None:
        note = f"decode gap bounded by work: {work}; their time is not modelled for this plan"
        return DecodeGap(note=note)
    context = plan.max_model_len
    chunk_s = model.prefill(min(plan.chunk_tokens, context), context).sum_s
    share = _largest_slice(groups, shape) if groups > 1 else float(every or 1)
    gap_s = share * chunk_s + model.decode(plan.max_running, context).sum_s
    note = (
        f"decode gap modelled, not promised: max_decode_gap_s={gap_s:.3f} source=modelled: {work}, "
        "whose time was not measured"
    )
    return DecodeGap(seconds=gap_s, source="modelled", note=note)


def _smallest_s(config: RuntimeConfig, shape: ModelConfig, plan: Plan, model: StepModel) -> float:
    """The least that the scheduler can put between two decode steps, and the decode step."""
    context, groups = plan.max_model_len, config.prefill_layer_groups
    share = 1 / shape.num_hidden_layers if groups is None else _largest_slice(groups, shape)
    page_s = model.prefill(min(PAGE_TOKENS, context), context).sum_s
    return share * page_s + model.decode(plan.max_running, context).sum_s


def _largest_slice(groups: int, shape: ModelConfig) -> float:
    """Share of all layers."""
    layers = shape.num_hidden_layers
    return -(-layers // min(groups, layers)) / layers


def _share_words(config: RuntimeConfig) -> str:
    groups = config.prefill_layer_groups
    if groups == 1:
        return "all layers"
    return "one layer" if groups is None else f"the longest of {groups} slices"
