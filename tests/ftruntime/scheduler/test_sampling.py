"""Penalties and finish rules, against the formulas applied one by one to dense logits."""

from __future__ import annotations

import math
import random

import pytest

from ftruntime.scheduler.sampling import adjustments, finish_reason, sample_spec
from ftruntime.scheduler.table import RequestRow, RequestTable
from ftruntime.types import Request, SamplingParams

EOS = (1, 2)


def make_row(prompt: list[int], generated: list[int], **params: object) -> RequestRow:
    sampling = SamplingParams(**{"max_tokens": 50, "seed": 3, **params})  # type: ignore[arg-type]
    row = RequestTable(1).add(Request("r", tuple(prompt), sampling, 0.0))
    for token in generated:
        row.append(token)
    return row


def dense(row: RequestRow, logits: list[float]) -> list[float]:
    """The definition, term by term, over the whole vocabulary."""
    params, prompt = row.params, list(row.request.prompt_token_ids)
    generated = row.token_ids[len(prompt) :]
    out = []
    for token, value in enumerate(logits):
        if token in prompt or token in generated:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        if token in generated:
            value -= params.presence_penalty
            value -= params.frequency_penalty * generated.count(token)
        value += params.logit_bias.get(token, 0.0)
        if len(generated) < params.min_tokens:
            banned = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
            value = -math.inf if token in banned else value
        out.append(value)
    return out


def sparse(row: RequestRow, logits: list[float]) -> list[float]:
    out = list(logits)
    seen = []
    for token, factor, offset in adjustments(row, eos_token_ids=EOS):
        seen.append(token)
        out[token] = (out[token] / factor if out[token] > 0 else out[token] * factor) + offset
    assert seen == sorted(set(seen)), "each id once"
    return out


@pytest.mark.parametrize("seed", range(60))
def test_adjustments_equal_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    vocab = 24

    def maybe(value: float, neutral: float) -> float:
        return value if rng.random() < 0.6 else neutral

    row = make_row(
        [rng.randrange(vocab) for _ in range(rng.randint(1, 12))],
        [rng.randrange(vocab) for _ in range(rng.randint(0, 12))],
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias={rng.randrange(vocab): rng.uniform(-100, 100) for _ in range(rng.randint(0, 5))},
        min_tokens=rng.choice([0, 6, 20]),
        stop_token_ids=[rng.randrange(vocab)],
        ignore_eos=rng.random() < 0.5,
    )
    logits = [rng.uniform(-5, 5) for _ in range(vocab)]
    assert sparse(row, logits) == pytest.approx(dense(row, logits), abs=1e-12)


def test_neutral_settings_adjust_nothing() -> None:
    assert adjustments(make_row([5, 6], [7, 7], logit_bias={9: 0.0}), eos_token_ids=EOS) == ()


def test_worked_adjustments() -> None:
    row = make_row(
        [5], [7, 7], presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0,
        logit_bias={7: 3.0, 9: -1.0},
    )  # fmt: skip
    # 7: 3 - 0.5 - 2 * 0.25
    expected = ((5, 2.0, 0.0), (7, 2.0, 2.0), (9, 1.0, -1.0))
    assert adjustments(row, eos_token_ids=EOS) == expected


def test_spec_carries_the_plain_numbers() -> None:
    row = make_row([5, 6], [7], temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, logprobs=4)
    spec = sample_spec(row, eos_token_ids=EOS)
    assert (spec.temperature, spec.top_k, spec.top_p, spec.min_p) == (0.5, 0, 0.9, 0.1)
    assert (spec.seed, spec.position, spec.num_logprobs, spec.adjust) == (3, 3, 4, ())


@pytest.mark.parametrize(
    ("generated", "params", "reason"),
    [
        ([9], {}, None),
        ([9, 1], {}, "stop"),
        ([9, 2], {}, "stop"),
        ([9, 1], {"ignore_eos": True}, None),
        ([9, 8], {"stop_token_ids": [8]}, "stop"),
        ([9, 8], {"stop_token_ids": [8], "ignore_eos": True}, "stop"),
        ([8, 9], {"stop_token_ids": [8]}, None),  # only the newest token counts
        ([9, 1], {"min_tokens": 2}, None),
        ([9, 9, 1], {"min_tokens": 2}, "stop"),
        ([9, 9, 9], {"max_tokens": 3}, "length"),
        ([9, 9, 1], {"max_tokens": 3}, "stop"),
        ([9, 9, 9, 9], {}, "length"),  # the context of 6 is full
    ],
)
def test_finish_rules(generated: list[int], params: dict[str, object], reason: str | None) -> None:
    row = make_row([5, 6], generated, **params)
    assert finish_reason(row, eos_token_ids=EOS, max_model_len=6) == reason


def test_stop_ids_are_banned_until_min_tokens_exist() -> None:
    for count, banned in ((0, True), (1, True), (2, False)):
        row = make_row([5], [9] * count, min_tokens=2, stop_token_ids=[4], logit_bias={4: 50.0})
        adjust = {token: offset for token, _, offset in adjustments(row, eos_token_ids=EOS)}
        expected = {1: -math.inf, 2: -math.inf, 4: -math.inf} if banned else {4: 50.0}
        assert adjust == expected
