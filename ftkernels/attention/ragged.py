"""Ragged batches and tables on the host: what the references loop over."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def sequences(
    cu_seqlens: torch.Tensor, seq_lens: torch.Tensor
) -> Iterator[tuple[int, int, int, int]]:
    """``(s, first token, past last token, position of the first)`` of each sequence with new
    tokens."""
    bounds, lens = cu_seqlens.tolist(), seq_lens.tolist()
    for s, length in enumerate(lens):
        begin, end = bounds[s], bounds[s + 1]
        if length and end > begin:
            yield s, begin, end, length - (end - begin)
