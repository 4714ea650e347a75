"""Requests the scheduler knows, and the rows they stand in.

A row number names the same sequence everywhere: in plans, block tables and carry state. It is given
at admission and goes to another request once its holder has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ftruntime.types import Request, SamplingParams, SeqPlan, TokenLogprobs

RowStatus = Literal["waiting", "prefilling", "running", "ended"]
NO_ROW = -1


@dataclass(slots=True, eq=False)
class RequestRow:
    """One request from submission to its end. Compared by identity: an id may come back."""

    request: Request
    token_ids: list[int]  # prompt, then what was generated
    max_tokens: int
    seed: int
    row: int = NO_ROW
    status: RowStatus = "waiting"
    num_computed: int = 0  # tokens whose rows stand in the pools
    num_cached: int = 0  # of those, tokens that another request had computed before
    planned: bool = False  # some plan has named this row for this request
    retracted: bool = False  # it has given its pages up before
    output_counts: dict[int, int] = field(default_factory=dict)  # generated token id -> times
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known, prompt and output: what has to be computed before the next."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens the request may come to, prompt and output."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def live(self) -> bool:
        return self.status != "ended"

    def stands_in(self, seq: SeqPlan) -> bool:
        """Whether the request is still in the row that a plan names for it."""
        return self.live and self.row == seq.row

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1


class RequestTable:
    """All requests that have not ended; `max_running` of them hold a row."""

    def __init__(self, max_running: int) -> None:
        if max_running < 1:
            raise ValueError(f"max_running is {max_running}, expected >= 1")
        self._max_running = max_running
        self._by_id: dict[str, RequestRow] = {}
        self._free_rows = list(range(max_running))  # a heap: low rows first keeps batches dense

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RequestRow]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_running(self) -> int:
        """Requests that hold a row, prefilling ones included."""
        return self._max_running - len(self._free_rows)

    def get(self, request_id: str) -> RequestRow | None:
        return self._by_id.get(request_id)

    def add(self, request: Request) -> RequestRow:
        """Take in a request, waiting and without a row.

        Raises:
            ValueError: its id belongs to a request that has not ended, or a parameter is not
                resolved.
        """
        params = request.params
        if request.request_id in self._by_id:
            raise ValueError(f"request_id is {request.request_id!r}, which is already being served")
        if params.max_tokens is None or params.seed is None or params.n != 1:
            raise ValueError(
                f"request {request.request_id!r} has max_tokens={params.max_tokens}, "
                f"seed={params.seed}, n={params.n}, expected numbers and n=1"
            )
        row = RequestRow(
            request, list(request.prompt_token_ids), max_tokens=params.max_tokens, seed=params.seed
        )
        self._by_id[request.request_id] = row
        return row

    def seat(self, row: RequestRow) -> None:
        """Give a waiting request a row number; it is prefilling from now on."""
        assert row.status == "waiting"
        assert self._free_rows
        row.row = heapq.heappop(self._free_rows)
        row.status = "prefilling"

    def unseat(self, row: RequestRow) -> None:
        """Take a request's row number away; it waits again."""
        assert row.status in ("prefilling", "running")
        heapq.heappush(self._free_rows, row.row)
        row.row = NO_ROW
        row.status = "waiting"

    def end(self, row: RequestRow) -> None:
        """Forget a request; its row number is free, the object keeps it for results under way."""
        assert self._by_id.get(row.request_id) is row
        del self._by_id[row.request_id]
        if row.row != NO_ROW:
            heapq.heappush(self._free_rows, row.row)
        row.status = "ended"

    def check(self) -> None:
        """Every row number is free or held by one live request.

        Raises:
            AssertionError: a row number leaked, or is held twice.
        """
        held = [row.row for row in self._by_id.values() if row.row != NO_ROW]
        if sorted(held + self._free_rows) != list(range(self._max_running)):
            raise AssertionError(
                f"rows {sorted(held)} are held and {sorted(self._free_rows)} free, "
                f"expected each of {self._max_running} once"
            )
        for row in self._by_id.values():
            if row.status == "ended" or (row.status == "waiting") != (row.row == NO_ROW):
                raise AssertionError(f"request {row.request_id!r} is {row.status} in row {row.row}")
