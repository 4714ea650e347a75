"""One step's tensors: the only thing a forward pass knows about the requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


class Tape(Protocol):
    """Takes down what a step launches, to launch it again."""

    def around(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """What is launched from here to the next such call is launched inside ``context()``, which
        the host enters anew each time, after all that came before."""
        ...


@dataclass(frozen=True)
class ForwardBatch:
    """New tokens of ``S`` sequences, back to back.

    Args:
        token_ids, positions: ``[T]`` int64.
        cu_seqlens: ``[S+1]`` int32, prefix sums of the new tokens.
        seq_lens: ``[S]`` int32, tokens of each sequence, the new ones included.
        slot_mapping: ``[T]`` int64, window row of each new token.
        window_block_table, block_table: ``[S, max_pages]`` int32 by logical page, -1 for none.
        state_index: ``[S]`` int32, carry row of each sequence.
        is_decode: one new token a sequence, attention by ``mla_decode``.
        host_token_ids: ``token_ids`` on the host.
        scratch: as ``scratch.scratch_bytes`` says, zero at first; None where references run.
        halves: the same tokens in two parts, back to back, each a batch of its own.
        tape: set while a step is taken down; then nothing is read on the host.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    window_block_table: torch.Tensor
    block_table: torch.Tensor
    state_index: torch.Tensor
    is_decode: bool
    host_token_ids: torch.Tensor
    scratch: torch.Tensor | None = None
    halves: tuple[ForwardBatch, ForwardBatch] | None = None
    tape: Tape | None = None

    @property
    def path(self) -> str:
        """How products take their rows: by phase, so that a decode row has the same bits in any
        batch."""
        return "gemv" if self.is_decode else "gemm"

    @property
    def phase(self) -> str:
        return "decode" if self.is_decode else "prefill"
