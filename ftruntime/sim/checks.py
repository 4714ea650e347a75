"""Whether victims and attacker can meet at all, before anything runs."""

from __future__ import annotations

from ftruntime.flags import refuse
from ftruntime.kvcache.layout import pages_for
from ftruntime.sim.cost import Cost
from ftruntime.sim.workload import StallSpec
from ftruntime.types import PAGE_TOKENS, SchedulerLimits


def check_stall(stall: StallSpec, cost: Cost, noise: float, limits: SchedulerLimits) -> None:
    """Victims and attacker hold rows and pages at the same time, and the victims still decode when
    the attacker comes.

    Args:
        noise: share of a step's cost.

    Raises:
        ValueError: ``--flag is VALUE, expected ...``.
    """
    _check_rows(stall, limits)
    _check_lengths(stall, cost, limits)
    _check_pages(stall, cost, limits)
    _check_in_time(stall, cost, noise)


def _check_rows(stall: StallSpec, limits: SchedulerLimits) -> None:
    """A row for everyone, and a token of a chunk for each victim."""
    num_rows = stall.num_victims + 1
    if num_rows > limits.max_running:
        refuse(
            "max_running_requests", limits.max_running,
            f"at least {num_rows}, a row for each victim and the attacker",
        )  # fmt: skip
    if stall.num_victims > limits.chunk_tokens:
        refuse(
            "victims", stall.num_victims, f"at most {limits.chunk_tokens}, the tokens of a chunk"
        )


def _check_lengths(stall: StallSpec, cost: Cost, limits: SchedulerLimits) -> None:
    """Attacker and victim are no longer than one request may be where that is less than the pages
    hold.
    """
    longest = limits.max_model_len
    if longest >= limits.num_pages * PAGE_TOKENS:
        return
    (victim, *_), attacker = stall.arrivals(cost, limits.chunk_tokens)
    for name, given, client in (
        ("prompt_tokens", stall.prompt_tokens, attacker),
        ("victim_tokens", stall.victim_tokens, victim),
    ):
        beside = client.prompt_tokens + client.max_tokens - given
        if longest <= beside:
            what = f"the least that the {client.name.split()[0]} takes"
            refuse("max_model_len", longest, f"at least {beside + 1}, {what}")
        if given > longest - beside:
            refuse(
                name, given, f"at most {longest - beside}, what --max-model-len {longest} holds "
                f"beside {beside} other tokens of the request",
            )  # fmt: skip


def _check_pages(stall: StallSpec, cost: Cost, limits: SchedulerLimits) -> None:
    """Victims and attacker hold pages at the same time.

    Without a reserve the least is their prompts, and a page for the next token of each victim.
    """
    victims, attacker = stall.arrivals(cost, limits.chunk_tokens)
    beside = sum(pages_for(each.prompt_tokens + each.max_tokens) for each in victims)
    output, held = attacker.max_tokens, "reserve together"
    if limits.admission == "optimistic":
        beside = sum(pages_for(each.prompt_tokens) + 1 for each in victims)
        output, held = 0, "hold together at the least"
    needed = beside + pages_for(attacker.prompt_tokens + output)
    if limits.num_pages >= needed:
        return
    room = (limits.num_pages - beside) * PAGE_TOKENS - output
    if attacker.prompt_tokens > limits.num_pages * PAGE_TOKENS - attacker.max_tokens and room > 0:
        refuse(
            "prompt_tokens", stall.prompt_tokens,
            f"at most {room} beside the victims, or --num-tokens of {needed * PAGE_TOKENS}",
        )  # fmt: skip
    refuse(
        "num_tokens", limits.num_pages * PAGE_TOKENS,
        f"at least {needed * PAGE_TOKENS}, what victims and attacker {held}",
    )  # fmt: skip


def _check_in_time(stall: StallSpec, cost: Cost, noise: float) -> None:
    """The attacker comes while the victims decode; with costless steps, at time 0."""
    end_s = stall.victim_tokens * cost.first_decode_s(stall.num_victims) * (1 + noise)
    if stall.attack_after_s > 0 and stall.attack_after_s >= end_s:
        refuse(
            "attack_after", f"{stall.attack_after_s:g}",
            f"below {end_s:g}, when the victims have their {stall.victim_tokens} tokens",
        )  # fmt: skip
