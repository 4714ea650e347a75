"""What `LLM.generate` returns, and how one sequence's events become its part of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ftruntime.tokenizer.detokenize import IncrementalDetokenizer
from ftruntime.tokenizer.stop import StopMatcher
from ftruntime.tokenizer.tokenizer import Tokenizer
from ftruntime.types import FinishReason, SamplingParams, TokenEvent, TokenLogprobs


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    `token_ids` has every generated token, a stop token included; `text` ends before a stop token or
    stop string. `logprobs` has one dict a token, id -> raw log-probability, or is None when not
    asked for.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[dict[int, float]] | None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and the `n` sequences generated from it.

    `prompt_logprobs[0]` is None: nothing predicts the first token.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | None] | None
    num_cached_tokens: int
    outputs: list[CompletionOutput]


def logprob_dict(entry: TokenLogprobs) -> dict[int, float]:
    """Id -> log-probability, the most probable first; the token itself is always among the keys."""
    values = dict(entry.top)
    values.setdefault(entry.token_id, entry.logprob)
    return values


@dataclass
class Completion:
    """One sequence while its events arrive."""

    params: SamplingParams
    detokenizer: IncrementalDetokenizer
    matcher: StopMatcher
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    num_cached_tokens: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None

    @classmethod
    def begin(cls, params: SamplingParams, tokenizer: Tokenizer) -> Completion:
        return cls(params, IncrementalDetokenizer(tokenizer), StopMatcher(params.stop))

    def take(self, event: TokenEvent) -> bool:
        """Add one event; True when a stop string ended the sequence before the engine did.

        Raises:
            RuntimeError: the engine failed the request; its sentence.
        """
        if event.finish_reason == "error":
            raise RuntimeError(event.error or "the engine failed the request without a reason")
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *map(logprob_dict, event.prompt_logprobs)]
        matched = event.token_id is not None and self._take_token(event.token_id, event)
        if matched:
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.text += self.matcher.flush() + self.detokenizer.flush()
        return matched and event.finish_reason is None

    def output(self, index: int) -> CompletionOutput:
        logprobs = self.logprobs if self.params.logprobs is not None else None
        return CompletionOutput(index, self.token_ids, self.text, self.finish_reason, logprobs)

    def _take_token(self, token_id: int, event: TokenEvent) -> bool:
        self.token_ids.append(token_id)
        if event.logprobs is not None:
            self.logprobs.append(logprob_dict(event.logprobs))
        if event.finish_reason == "stop":  # a stop token has no text
            return False
        piece = self.detokenizer.push(token_id)
        if len(self.token_ids) < self.params.min_tokens:  # no stop string counts yet
            self.text += piece
            return False
        shown, matched = self.matcher.push(piece)
        self.text += shown
        return matched is not None


def request_output(
    prompt: str | None, prompt_token_ids: list[int], completions: Mapping[int, Completion]
) -> RequestOutput:
    """Put the sequences of one prompt together, keyed by choice number."""
    first = completions[0]
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        outputs=[completions[index].output(index) for index in sorted(completions)],
    )
