"""How long running streams wait while a long prompt is prefilled, seen by their clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ftruntime.bench.client import Server
from ftruntime.bench.prompts import Calibration, probe, prompt
from ftruntime.bench.recording import Json, Recording, integer, short
from ftruntime.bench.report import StallReport, gaps, total, wall
from ftruntime.bench.settings import BenchError, StallSettings
from ftruntime.bench.steps import StepWatch
from ftruntime.timeline import draw

ATTACKER_OUTPUT_TOKENS: Final = 3
_VICTIM_WORDS: Final = 40
_FIRST_VICTIM_SEED: Final = 1000
_POLL_S: Final = 2.0
_CANCEL_AGAIN_S: Final = 1.0
_POLICY: Final = (
    "decode_interleave_every", "max_decode_gap_ms", "prefill_layer_groups",
)  # fmt: skip

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StallResult:
    """The report, and the streams it was made from."""

    report: StallReport
    model: str
    attacker_prompt_tokens: int | None
    alone: tuple[Recording, ...]
    victims: tuple[Recording, ...]
    attacker: Recording

    def timeline(self) -> dict[str, list[float]]:
        """For each victim, the times of its pieces in seconds from the first piece of any."""
        origin_s = min(victim.piece_s[0] for victim in self.victims)
        return {
            victim.who: [time_s - origin_s for time_s in victim.piece_s] for victim in self.victims
        }

    def prefill_span(self) -> tuple[float, float]:
        """From the long prompt's request to its first piece, on the clock of `timeline`."""
        origin_s = min(victim.piece_s[0] for victim in self.victims)
        return self.attacker.sent_s - origin_s, self.attacker.first_piece_s - origin_s


def caption(settings: StallSettings, result: StallResult) -> str:
    """What was measured, for the foot of the table."""
    many = f"{settings.victims} victims, walls and longest wait of the worst, counts of all; "
    return (
        f"measured by the client of {settings.root}, model {result.model}; "
        f"{many if settings.victims > 1 else ''}"
        f"long prompt of {_or_dash(result.attacker_prompt_tokens)} tokens "
        f"{settings.attack_after:g} s after the victims' first pieces; -: not visible there"
    )


def plot(path: Path, settings: StallSettings, result: StallResult) -> None:
    """Draw the pieces of every victim over time.

    Raises:
        ValueError, OSError: as `ftruntime.timeline.draw`.
    """
    title = f"pieces received from {settings.root}, measured"
    draw(path, result.timeline(), title, spans={"long prompt": result.prefill_span()})


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


async def run_stall(settings: StallSettings) -> StallResult:
    """Victims alone, then victims and a long prompt.

    Raises:
        BenchError: the server cannot be measured; nothing is left running on it.
    """
    async with Server(settings) as server:
        _check_context(server, settings, await server.find_model())
        stats = await server.read_json("/v1/stats", "its statistics")
        text = await _attacker_text(server, settings)
        alone = await _alone(server, settings)
        watch = StepWatch(server)
        victims, attacker = await _attacked(server, settings, watch, text)
        return _result(server, settings, stats, watch, alone, victims, attacker)


def _check_context(server: Server, settings: StallSettings, max_model_len: int | None) -> None:
    """The long prompt fits the server, as far as it tells."""
    room = (max_model_len or 0) - ATTACKER_OUTPUT_TOKENS
    if 0 < room < settings.attacker_tokens:
        raise BenchError(
            f"{server.root} holds {max_model_len} tokens for prompt and output of a request, "
            f"expected --attacker-tokens of at most {room}, it is {settings.attacker_tokens}"
        )


async def _attacker_text(server: Server, settings: StallSettings) -> str:
    counts = [await server.prompt_tokens(probe(number)) for number in range(2)]
    try:
        calibration = Calibration.from_probes(*counts)
    except ValueError as error:
        raise BenchError(f"{server.root}: {error}") from error
    _logger.info(
        "prompts calibrated tokens_of_head=%.1f tokens_of_shuffle=%.1f",
        calibration.head_tokens, calibration.shuffle_tokens,
    )  # fmt: skip
    num_words = calibration.num_words(settings.attacker_tokens)
    seed = settings.seed if settings.seed is not None else random.SystemRandom().getrandbits(32)
    _logger.info("long prompt ready words=%d seed=%d", num_words, seed)
    return prompt(num_words, seed)


def _recordings(settings: StallSettings) -> tuple[Recording, ...]:
    if settings.victims == 1:
        return (Recording("the victim"),)
    return tuple(Recording(f"victim {number}") for number in range(settings.victims))


def _streams(
    server: Server, settings: StallSettings, victims: Sequence[Recording]
) -> list[Coroutine[object, object, None]]:
    """One read a victim; the same victim has the same prompt in every run."""
    return [
        server.read(
            victim, prompt(_VICTIM_WORDS, _FIRST_VICTIM_SEED + number), settings.victim_tokens
        )
        for number, victim in enumerate(victims)
    ]


async def _alone(server: Server, settings: StallSettings) -> tuple[Recording, ...]:
    victims = _recordings(settings)
    await _together(_streams(server, settings, victims))
    _check_long_enough(server, settings, victims)
    _logger.info("victims alone done wall_s=%.3f", max(wall(v.piece_s) for v in victims))
    return victims


def _check_long_enough(
    server: Server, settings: StallSettings, victims: Sequence[Recording]
) -> None:
    """Every victim still decodes when the long prompt arrives."""
    last = max(victims, key=lambda victim: victim.first_piece_s)
    start_s = last.first_piece_s
    for victim in victims:
        if victim.piece_s and last.piece_s and victim.end_s is not None and victim.end_s < start_s:
            raise BenchError(
                f"{server.root} ended {victim.who} before {last.who} had its first piece, so not "
                f"all streams run at once, expected a smaller --victims than {settings.victims} "
                f"or a larger --victim-tokens than {settings.victim_tokens}"
            )
        end_s = victim.end_s
        if not victim.piece_s or (end_s is not None and end_s - start_s <= settings.attack_after):
            raise BenchError(
                f"{server.root} ended {victim.who} after {len(victim.piece_s)} pieces, before the "
                f"long prompt would arrive, expected a larger --victim-tokens than "
                f"{settings.victim_tokens} or a smaller --attack-after than "
                f"{settings.attack_after:g}"
            )


async def _attacked(
    server: Server, settings: StallSettings, watch: StepWatch, text: str
) -> tuple[tuple[Recording, ...], Recording]:
    victims, attacker = _recordings(settings), Recording("the long prompt")

    async def attack() -> None:
        for victim in victims:
            await victim.started.wait()
        await asyncio.sleep(settings.attack_after)
        _check_long_enough(server, settings, victims)
        await watch.begin()
        _logger.info("long prompt sent")
        polling = asyncio.ensure_future(_poll(watch))
        try:
            await server.read(attacker, text, ATTACKER_OUTPUT_TOKENS)
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling
        await watch.poll()
        _logger.info("long prompt done wall_s=%.3f", time.monotonic() - attacker.sent_s)

    await _together([*_streams(server, settings, victims), attack()])
    return victims, attacker


async def _poll(watch: StepWatch) -> None:
    while True:
        await asyncio.sleep(_POLL_S)
        await watch.poll()


async def _together(work: Sequence[Coroutine[object, object, None]]) -> None:
    """All of them; when one fails or the caller is cancelled, none is left running."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        left = set(tasks)
        while left:  # a wait inside a task may take a cancellation for its own end
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
        await asyncio.gather(*tasks, return_exceptions=True)


def _result(
    server: Server,
    settings: StallSettings,
    stats: Json | None,
    watch: StepWatch,
    alone: tuple[Recording, ...],
    victims: tuple[Recording, ...],
    attacker: Recording,
) -> StallResult:
    waits = [gap for victim in victims for gap in gaps(victim.piece_s)]
    report = StallReport(
        policy=_policy(stats or {}),
        prefill_chunks=watch.chunks if watch.known else None,
        attacker_wall_s=(attacker.end_s or attacker.sent_s) - attacker.sent_s,
        victim_wall_s=max(wall(victim.piece_s) for victim in victims),
        victim_tokens=total(victim.num_tokens for victim in victims),
        victim_alone_wall_s=max(wall(victim.piece_s) for victim in alone),
        max_gap_s=max(waits, default=0.0),
        gaps_over_5s=sum(gap > 5 for gap in waits),
        gaps_over_20s=sum(gap > 20 for gap in waits),
        interleaved_decode_steps=watch.interleaved_steps if watch.known else None,
        victim_tokens_during_prefill=(
            watch.interleaved_tokens
            if watch.known
            else total(_tokens_during_prefill(victim, attacker) for victim in victims)
        ),
    )
    _warn(settings, alone, victims, attacker)
    asked = integer(attacker.usage or {}, "prompt_tokens")
    return StallResult(report, str(server.model), asked, alone, victims, attacker)


def _policy(stats: Json) -> dict[str, object] | None:
    """The policy flags of our own server and the chunk they act on."""
    flags = stats.get("policy")
    if not isinstance(flags, dict):
        return None
    policy: dict[str, object] = {name: integer(flags, name) for name in _POLICY}
    return {**policy, "chunk_tokens": integer(stats, "chunk_tokens")}


def _tokens_during_prefill(victim: Recording, attacker: Recording) -> int | None:
    """Pieces between the long prompt's request and its first piece, where a piece is a token."""
    if victim.num_tokens != len(victim.piece_s):
        return None
    end_s = attacker.first_piece_s
    return sum(attacker.sent_s < time_s < end_s for time_s in victim.piece_s)


def _warn(
    settings: StallSettings,
    alone: Sequence[Recording],
    victims: Sequence[Recording],
    attacker: Recording,
) -> None:
    """Say what makes the figures weaker than they look."""
    prefilled_s = attacker.first_piece_s
    for before, victim in zip(alone, victims, strict=True):
        received = len(victim.piece_s) if victim.num_tokens is None else victim.num_tokens
        if received < settings.victim_tokens and victim.finish_reason != "length":
            _logger.warning(
                "victim ended early who=%r tokens=%d asked=%d finish_reason=%s",
                victim.who, received, settings.victim_tokens,
                short(str(victim.finish_reason)),
            )  # fmt: skip
        if victim.end_s is not None and victim.end_s < prefilled_s:
            _logger.warning("victim ended before the long prompt was prefilled who=%r", victim.who)
        if before.text != victim.text:
            _logger.warning("victim reads otherwise than alone who=%r", victim.who)
    details = (attacker.usage or {}).get("prompt_tokens_details")
    cached = integer(details, "cached_tokens") if isinstance(details, dict) else None
    if cached:
        _logger.warning("long prompt came from a prefix cache in part cached_tokens=%d", cached)
