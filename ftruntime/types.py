"""Data that crosses component borders: requests, plans, results, events. Pure Python, no torch.

A `StepPlan` is plain integers: which rows run, which tokens, which pages were assigned since the
row's last plan. The scheduler makes it, every rank's executor executes it, and the scheduler
commits the `StepResult`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

PAGE_TOKENS = 128
"""Tokens of a page: the window, and a multiple of both compress ratios."""
LEAST_HALF = 256
"""Tokens below which reading a layer's weights twice costs more than sums of the ranks take."""

FinishReason = Literal["stop", "length", "abort", "error"]
_INT32_MAX = 2**31 - 1
StepKind = Literal["prefill", "decode"]
Admission = Literal["reserve", "optimistic"]


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}, expected {expected}")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integer(value: object, low: int, high: int | None = None) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= low
        and (high is None or value <= high)
    )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn. Every field is validated; the error names the field.

    `max_tokens=None` means up to the context limit. `logprobs=k` asks for the token itself and the
    `k` most probable
    tokens at each generated position (0: the token alone), of the raw logits; `prompt_logprobs`
    likewise over the prompt.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            listed = value is None or isinstance(value, list | tuple)
            _require(listed or (name == "stop" and isinstance(value, str)), name, value, "a list")
        _require(
            self.logit_bias is None or isinstance(self.logit_bias, Mapping),
            "logit_bias", self.logit_bias, "a mapping of token ids to biases",
        )  # fmt: skip
        stop = self.stop if self.stop is not None else ()
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        for name, low, high, text in (
            ("temperature", 0.0, 100.0, "a number in [0, 100]"),
            ("min_p", 0.0, 1.0, "a number in [0, 1]"),
            ("presence_penalty", -2.0, 2.0, "a number in [-2, 2]"),
            ("frequency_penalty", -2.0, 2.0, "a number in [-2, 2]"),
        ):
            value = getattr(self, name)
            _require(_finite(value) and low <= value <= high, name, value, text)
        _require(
            _finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]"
        )
        _require(
            _integer(self.top_k, -1, _INT32_MAX),
            "top_k",
            self.top_k,
            "an integer in [-1, 2147483647] (0 and -1: off)",
        )
        _require(
            _finite(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100,
            "repetition_penalty", self.repetition_penalty, "a number in [0.01, 100]",
        )  # fmt: skip
        _require(
            self.seed is None or _integer(self.seed, -(2**63), 2**63 - 1),
            "seed", self.seed, "a 64-bit integer",
        )  # fmt: skip
        _require(
            self.max_tokens is None or _integer(self.max_tokens, 1),
            "max_tokens", self.max_tokens, "an integer >= 1",
        )  # fmt: skip
        _require(_integer(self.min_tokens, 0), "min_tokens", self.min_tokens, "an integer >= 0")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})",
        )  # fmt: skip
        _require(
            len(self.stop) <= 16 and all(isinstance(s, str) and s for s in self.stop),
            "stop", list(self.stop), "at most 16 non-empty strings",
        )  # fmt: skip
        _require(
            all(_integer(t, 0) for t in self.stop_token_ids),
            "stop_token_ids", list(self.stop_token_ids), "token ids >= 0",
        )  # fmt: skip
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        biases = self.logit_bias.items()
        _require(
            all(_integer(t, 0) and _finite(b) and -100 <= b <= 100 for t, b in biases),
            "logit_bias", self.logit_bias, "token ids >= 0 with biases in [-100, 100]",
        )  # fmt: skip
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _integer(value, 0, 20), name, value, "an integer in [0, 20]")
        _require(_integer(self.n, 1, 128), "n", self.n, "an integer in [1, 128]")


@dataclass(frozen=True)
class Request:
    """One sequence as the engine knows it. `params.max_tokens` and `params.seed` are resolved (not
    None), `params.n` is 1."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float


class RequestRejectedError(ValueError):
    """A request that can never run, or not now. `code` is the OpenAI error code, `status` the HTTP
    status."""

    def __init__(self, message: str, *, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class EngineFailedError(Exception):
    """The engine cannot go on: a rank is gone, or hangs. One sentence."""


@dataclass(frozen=True)
class SchedulerLimits:
    """What the resolved plan allows; the numbers of api.md section 3."""

    num_pages: int  # usable pages of compressed rows, the padding page 0 not counted
    window_pages: int  # all window pages, the padding page 0 included
    chunk_tokens: int  # new tokens of one prefill step, a page multiple
    max_running: int
    max_model_len: int  # prompt + output of one request
    num_layers: int
    decode_interleave_every: int | None = None
    max_decode_gap_s: float | None = None
    prefill_layer_groups: int | None = None
    prefix_cache: bool = False  # full pages outlive their requests
    admission: Admission = "reserve"  # whether a request's whole output is reserved
    max_waiting_requests: int = 256
    max_waiting_tokens: int = 1 << 62
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SampleSpec:
    """How one row's next token is drawn: plain numbers of `ftkernels.sample`, and the sparse
    adjustments before it."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int  # absolute position of the token that is drawn
    num_logprobs: int | None = None  # of the raw logits
    # (token id, repetition factor, offset): logit' = (logit / r if logit > 0 else logit * r) +
    # offset
    adjust: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True)
class SeqPlan:
    """One row's share of a step. New tokens stand at positions `start .. start + len(token_ids) -
    1`."""

    row: int  # row of the request table: carry state and block tables have the same number
    request_id: str
    start: int
    token_ids: tuple[int, ...]
    # (logical page, window page, row page) assigned since the row's last plan; window page -1: no
    # new token sees it
    new_pages: tuple[tuple[int, int, int], ...] = ()
    # the row was given to a new request: forget its tables. With `start > 0` its first pages are
    # computed, and its carry is the one kept with the last of their window pages
    fresh: bool = False
    sample: SampleSpec | None = None  # None: the prompt goes on, nothing is drawn
    # prompt tokens that follow each new token, when prompt log-probabilities are wanted; may be one
    # shorter
    prompt_targets: tuple[int, ...] | None = None
    num_prompt_logprobs: int = 0


@dataclass(frozen=True)
class StepPlan:
    """One step for every rank: a prefill chunk's layer slice, or one decode step."""

    index: int
    kind: StepKind
    seqs: tuple[SeqPlan, ...]
    layers: tuple[int, int]
    interleaved: bool = False  # a prefill was unfinished when this decode was planned
    drop: tuple[int, ...] = ()  # rows whose kept streams go, after an abort between two slices

    @property
    def num_tokens(self) -> int:
        return sum(len(seq.token_ids) for seq in self.seqs)


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probability of one token, and the most probable alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SeqResult:
    row: int
    request_id: str
    # drawn token; None when the plan asked for none; -1 when no logit was finite
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class StepResult:
    index: int
    seqs: tuple[SeqResult, ...]


@dataclass(frozen=True)
class TokenEvent:
    """What one step did for one request. The last event of a request carries its finish reason.

    `token_id` is None on an event that only ends a request (abort, error). A stop token (EOS,
    `stop_token_ids`) is reported
    with `finish_reason="stop"`; whether its text is shown is the reader's business.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    # once, with the first token; position 0 is not among them
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic clock."""
        ...


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; a decode plan samples every row, a prefill plan the rows with `sample`."""
        ...
