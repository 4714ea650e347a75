"""What became of the flags of `serve`: the values in force, and which of them do not act here."""

from __future__ import annotations

from ftruntime.config import RuntimeConfig, flag_specs, served_name
from ftruntime.flags import flag_name
from ftruntime.plan import Plan, chunk_notes
from ftruntime.sizing import why_no_graphs

_SECRET = "api_key"


def effective_flags(
    config: RuntimeConfig, plan: Plan, expert_load: str
) -> dict[str, dict[str, object]]:
    """For each flag but the key, as JSON values: what was ``given`` (None: nothing), the ``value``
    in force, and for one that does not act, or became less, a ``note`` that says why.

    Args:
        expert_load: what the loader did, "serial" or "parallel".
    """
    became: dict[str, object] = {
        "tensor_parallel_size": plan.ranks,
        "moe_backend": plan.moe_backend,
        "moe_cache_size": plan.expert_slots,
        "moe_cache_rate": round(plan.expert_slots / plan.num_experts, 4),
        "num_tokens": plan.num_tokens,
        "num_pages": plan.num_pages,
        "cuda_graph_max_bs": max(plan.graph_sizes, default=0),
        "max_prefill_length": plan.chunk_tokens,
        "max_model_len": plan.max_model_len,
        "max_waiting_tokens": plan.max_waiting_tokens,
        "served_model_name": served_name(config),
        "expert_load": expert_load,
        "device": plan.kind,
    }
    notes = _idle(config, plan, expert_load)
    if smaller := chunk_notes(config, plan):
        notes["max_prefill_length"] = "; ".join(smaller)
    flags: dict[str, dict[str, object]] = {}
    for name in flag_specs():
        if name == _SECRET:
            continue
        given = getattr(config, name)
        flag: dict[str, object] = {
            "given": given if name in config.explicit else None,
            "value": became.get(name, given),
        }
        if name in notes:
            flag["note"] = notes[name]
        flags[flag_name(name)] = flag
    return flags


def inactive_flags(config: RuntimeConfig, plan: Plan) -> list[str]:
    """One line for each flag the user set that does not act in this plan, saying why."""
    return [
        inactive_line(name, getattr(config, name), reason)
        for name, reason in idle_flags(config, plan).items()
    ]


def inactive_line(name: str, value: object, reason: str) -> str:
    """What is said of a flag that does not act; never its value if that is a secret."""
    shown = "***" if name == _SECRET else value
    return f"flag without effect {flag_name(name)}={shown}: {reason}"


def idle_flags(config: RuntimeConfig, plan: Plan) -> dict[str, str]:
    """Why a flag the user set does not act in this plan, by field name."""
    reasons = _idle(config, plan, config.expert_load)
    return {n: reasons[n] for n in flag_specs() if n in reasons and n in config.explicit}


def _idle(config: RuntimeConfig, plan: Plan, expert_load: str) -> dict[str, str]:
    """Why a flag does not act, by field name."""
    reasons = {
        "disable_pynccl": "torch.distributed collectives are what is used anyway",
        "moe_prefill_hit_d2d": "resident experts are read in place anyway",
        **_idle_cache_flags(config, plan),
    }
    if expert_load == "serial":
        reasons["expert_prefetch"] = (
            f"--expert-load {config.expert_load} reads one shard after the other"
        )
    if (why := why_no_graphs(plan.kind, config.numerics)) is not None:
        reasons["cuda_graph_max_bs"] = why
    elif (config.cuda_graph_max_bs or 0) > config.max_running_requests:
        reasons["cuda_graph_max_bs"] = (
            f"no batch is larger than --max-running-requests ({config.max_running_requests})"
        )
    return reasons


def _idle_cache_flags(config: RuntimeConfig, plan: Plan) -> dict[str, str]:
    if plan.moe_backend == "fused":
        names = ("moe_cache_auto", "kv_reserve_tokens", "moe_prefetch_layers")
        return dict.fromkeys(names, "all experts are resident, there are no slots to fill")
    for name in ("num_tokens", "num_pages", "moe_cache_size", "moe_cache_rate"):
        if getattr(config, name) is not None:
            what = "the KV capacity" if name.startswith("num") else "the expert slots"
            return {"kv_reserve_tokens": f"{flag_name(name)} sets {what}"}
    return {}
