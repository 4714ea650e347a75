"""What can be served at all: the limits themselves, and each request against them."""

from __future__ import annotations

from ftruntime.kvcache.layout import min_window_pages
from ftruntime.types import PAGE_TOKENS, Request, RequestRejectedError, SchedulerLimits


def check_limits(limits: SchedulerLimits) -> None:
    """The limits fit together: no step can run out of window pages.

    Raises:
        ValueError: a limit is out of range, or chunk and window pool do not fit; with the
            arithmetic.
    """
    for name in ("num_pages", "max_running", "max_model_len", "num_layers"):
        value = getattr(limits, name)
        if value < 1:
            raise ValueError(f"{name} is {value}, expected >= 1")
    if limits.admission not in ("reserve", "optimistic"):
        raise ValueError(f"admission is {limits.admission!r}, expected reserve or optimistic")
    for name in ("max_waiting_requests", "max_waiting_tokens"):
        value = getattr(limits, name)
        if value < 0:
            raise ValueError(f"{name} is {value}, expected >= 0")
    if limits.max_decode_gap_s is not None and not limits.max_decode_gap_s > 0:
        raise ValueError(f"max_decode_gap_s is {limits.max_decode_gap_s}, expected > 0, or unset")
    if limits.prefill_layer_groups is not None and limits.prefill_layer_groups < 1:
        raise ValueError(
            f"prefill_layer_groups is {limits.prefill_layer_groups}, expected >= 1, or unset"
        )
    if limits.chunk_tokens < PAGE_TOKENS or limits.chunk_tokens % PAGE_TOKENS:
        raise ValueError(
            f"chunk_tokens is {limits.chunk_tokens}, expected a positive multiple of {PAGE_TOKENS}"
        )
    needed = min_window_pages(max_running=limits.max_running, chunk_tokens=limits.chunk_tokens)
    if limits.window_pages < needed:
        raise ValueError(
            f"window_pages is {limits.window_pages}, expected at least {needed}: "
            f"2 for each of {limits.max_running} running requests and "
            f"{limits.chunk_tokens // PAGE_TOKENS} for a chunk of {limits.chunk_tokens} tokens"
        )


def check_request(request: Request, limits: SchedulerLimits) -> None:
    """The request could run on an empty server.

    Raises:
        RequestRejectedError: status 400; it has no prompt, or prompt and output exceed what one
            request may hold.
    """
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestRejectedError(
            "prompt is empty, expected at least 1 token", code="invalid_value"
        )
    num_output = request.params.max_tokens or 1
    capacity = limits.num_pages * PAGE_TOKENS
    limit = min(limits.max_model_len, capacity)
    if num_prompt + num_output <= limit:
        return
    if capacity <= limits.max_model_len:
        remedy = f"--num-tokens (now {capacity})"
    else:
        remedy = f"--max-model-len (now {limits.max_model_len})"
    raise RequestRejectedError(
        f"the request needs {num_prompt + num_output} tokens ({num_prompt} in the prompt, "
        f"{num_output} to generate), but this server holds {limit} tokens for one request; "
        f"shorten it, or start the server with a larger {remedy}",
        code="context_length_exceeded",
    )


def check_queue(
    request: Request,
    limits: SchedulerLimits,
    *,
    num_waiting: int,
    waiting_tokens: int,
    num_free_rows: int,
) -> None:
    """The queue has room for the request.

    Requests that a free row is waiting for do not count, so the bound does not depend on when the
    next step begins. Behind an empty queue any prompt is taken: no token limit makes a legal
    request unservable.

    Raises:
        RequestRejectedError: status 429, code `queue_full`.
    """
    blocked = num_waiting - num_free_rows
    if blocked >= limits.max_waiting_requests:
        raise RequestRejectedError(
            f"the queue is full: {blocked} requests are waiting "
            f"(--max-waiting-requests is {limits.max_waiting_requests}); try again later",
            code="queue_full",
            status=429,
        )
    total = waiting_tokens + len(request.prompt_token_ids)
    if num_waiting > 0 and total > limits.max_waiting_tokens:
        raise RequestRejectedError(
            f"the queue is full: with this prompt {total} tokens would be waiting "
            f"(--max-waiting-tokens is {limits.max_waiting_tokens}); try again later",
            code="queue_full",
            status=429,
        )
