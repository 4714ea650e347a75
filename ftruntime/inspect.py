"""What flags resolve to, without starting anything: the report of ``ftruntime inspect``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO, cast

from ftruntime.config import RuntimeConfig
from ftruntime.facts import probe
from ftruntime.flags import FlagSpec, FlagValue, checked, parse, refuse
from ftruntime.model.config import ModelConfig, builtin
from ftruntime.plan import DeviceFacts, Plan
from ftruntime.sizing import why_no_graphs
from ftruntime.step_model import modelled
from ftruntime.types import LEAST_HALF

if TYPE_CHECKING:
    from rich.table import Table

BUILTIN_MODELS = ("flash", "pro")
CARDS = FlagSpec(
    kind="int", low=1, high=1024,
    help="Plan for this many cards; also sets --tensor-parallel-size unless that is given.",
)  # fmt: skip
CARD_GIB = FlagSpec(
    kind="float", low=0, low_open=True, high=4096,
    help="Plan for cards with this much free memory each, in GiB: one, or as many as --cards or "
    "--tensor-parallel-size say.", shown_default="24 with --cards",
)  # fmt: skip
_DEFAULT_CARD_GIB = 24.0
_GIB = 1 << 30
_WIDTH = 140


def shape_of(model: str) -> ModelConfig:
    """The shape of a checkpoint directory (its config.json is enough), or of ``flash`` or ``pro``.

    Raises:
        ValueError: a bad config.json.
        FileNotFoundError: no such checkpoint.
    """
    return builtin(model) if model in BUILTIN_MODELS else ModelConfig.from_dir(model)


def machine(
    config: RuntimeConfig, cards: str | None, card_gib: str | None
) -> tuple[RuntimeConfig, DeviceFacts]:
    """The machine to plan for: cards as told, or this machine; and the settings with the ranks that
    follow.

    Raises:
        ValueError: a bad number, or cards together with ``--device cpu``.
    """
    number = _read("cards", cards, CARDS)
    gib = _read("card_gib", card_gib, CARD_GIB)
    if number is None and gib is None:
        return config, probe(config.device)
    if config.device == "cpu":
        name, value = ("cards", number) if number is not None else ("card_gib", gib)
        refuse(name, value, "it unset with --device cpu")
    ranks = config.tensor_parallel_size
    count = int(number) if number is not None else ranks
    memory_bytes = int((_DEFAULT_CARD_GIB if gib is None else float(gib)) * _GIB)
    facts = DeviceFacts(
        kind="cuda", cards=count, memory_bytes=memory_bytes, cards_from="of --cards"
    )  # fmt: skip
    if "tensor_parallel_size" in config.explicit:
        return config, facts
    config = RuntimeConfig.from_dict({**config.to_dict(), "tensor_parallel_size": count})
    return config, replace(facts, ranks_flag="cards")


def _read(name: str, text: str | None, spec: FlagSpec) -> FlagValue:
    return None if text is None else checked(name, parse(text, spec), spec)


def report(
    model: str, config: RuntimeConfig, shape: ModelConfig, plan: Plan, refusal: str | None = None
) -> dict[str, object]:
    """The JSON value of ``--json``: the plan, with the model and settings it is for, and modelled
    step times where there are cards.

    Args:
        refusal: the sentence with which `serve` would refuse to start.
    """
    return {
        "model": model,
        "device": plan.kind,
        "kv_format": config.kv_format,
        "numerics": config.numerics,
        **{name: value for name, value in plan.to_dict().items() if name != "kind"},
        "refusal": refusal,
        "modelled": modelled(config, shape, plan),
        "source": "modelled",
    }


def print_table(values: Mapping[str, object], plan: Plan, stream: TextIO) -> None:
    """The same values as text: one row a number, the memory with its reasons, the step times."""
    from rich.console import Console
    from rich.table import Table

    table = Table("plan", "value", box=None, pad_edge=False)
    for name, value in values.items():
        if not isinstance(value, dict | list) and name not in ("refusal", "modelled", "source"):
            table.add_row(name, "-" if value is None else str(value))
    columns = shutil.get_terminal_size((_WIDTH, 1)).columns
    console = Console(file=stream, highlight=False, width=columns)
    console.print(table)
    console.print(*_reasons(values, plan), sep="\n")
    for title, sizes, why in (
        ("bytes of one rank", plan.bytes, plan.why),
        ("host memory, all ranks", plan.host_bytes, plan.host_why),
    ):
        split = Table(title, "GiB", "bytes", "why", box=None, pad_edge=False)
        for column in split.columns[:3]:
            column.no_wrap = True
        for name, size in sizes.items():
            split.add_row(name, f"{size / _GIB:.3f}", str(size), why[name])
        if sizes:
            console.print()
            console.print(split)
    steps = values["modelled"]
    if isinstance(steps, dict):
        console.print()
        console.print(_step_table(steps))
        console.print(_assumed(steps, misses=plan.expert_slots < plan.num_experts))


def _reasons(values: Mapping[str, object], plan: Plan) -> tuple[str, str]:
    """Why chunks run in halves or not, and which decode steps are captured."""
    halves = (
        f"in_halves: chunks of {2 * LEAST_HALF} tokens or more run in two halves, so that the "
        "all-reduces of one hide behind what the other computes"
    )
    if plan.ranks == 1:
        halves = "in_halves: one rank has no all-reduce to hide"
    elif not plan.in_halves:
        halves = "in_halves: the slots do not hold all experts of a layer, which each half needs"
    if plan.graph_sizes:
        return halves, "graph_sizes: decode steps of so many rows are captured, up to the cap"
    why = why_no_graphs(plan.kind, str(values["numerics"])) or "--cuda-graph-max-bs is 0"
    return halves, f"graph_sizes: none, {why}"


def _step_table(model: Mapping[str, object]) -> Table:
    from rich.table import Table

    steps = cast("Mapping[str, Mapping[str, float]]", model["steps"])
    table = Table("modelled ms a step", box=None, pad_edge=False)
    for name in steps:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("tokens", *(f"{step['tokens']:g}" for step in steps.values()))
    for term in ("bus", "memory", "compute", "all_reduce", "sum", "overlapped"):
        table.add_row(term, *(f"{step[f'{term}_ms']:.2f}" for step in steps.values()))
    speeds = [
        f"{step['tokens_per_s']:.1f} to {step['tokens_per_s_overlapped']:.1f}"
        for step in steps.values()
    ]
    table.add_row("tokens/s", *speeds)
    return table


def _assumed(model: Mapping[str, object], *, misses: bool) -> str:
    steps = cast("Mapping[str, Mapping[str, float]]", model["steps"])
    halves = any(step["halves"] for step in steps.values())
    hits = (
        f", hit rate {model['decode_hit_rate']} in decode of one row (simulated), "
        f"{model['decode_full_hit_rate']} of all, {model['prefill_hit_rate']} in prefill"
    )
    return (
        f"modelled, nothing was timed: {model['cards']} x {model['card']}, context of "
        f"{model['context_tokens']} tokens{hits if misses else ''}; assumed "
        f"{model['link_gb_per_s']:g} GB/s to the host, {model['memory_gb_per_s']:g} GB/s of "
        f"memory, all-reduces with {model['all_reduce_gb_per_s']:g} GB/s and "
        f"{model['all_reduce_latency_us']:g} us each; sum: nothing overlaps; overlapped: "
        "copies one layer ahead, memory beside compute"
        + (", all-reduces of a chunk's halves beside both" if halves else "")
        + "; tokens/s: from the sum to overlapped, both upper bounds: launches and what the host "
        "does are left out"
    )
