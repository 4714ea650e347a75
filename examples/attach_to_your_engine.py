"""Attach the attention kernels to an engine that has its own page tables and its own pools.

Two adapters, a few lines each; neither copies a pool. `BlockTables` is for engines that keep block
tables, with blocks of any size and any stride. `SlotLists` is for engines that name the rows of a
query one by one, as sparse-MLA engines do. Below them stands a toy engine, whose every result is
compared with attention in fp64 over rows that it gathers by itself. MoE layers: see
`experts_in_host_memory.py`.

    .venv/bin/python examples/attach_to_your_engine.py [--device cuda]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import ftkernels

RATIO, WINDOW, ROPE_DIM = 4, 128, 64


@dataclass(frozen=True)
class Layer:
    """What an attention layer has besides its pools."""

    softmax_scale: float
    sink: torch.Tensor  # [H] fp32
    cos: torch.Tensor  # [max_positions, ROPE_DIM/2] fp32, of the compressed layers
    sin: torch.Tensor


@dataclass(frozen=True)
class Step:
    """The metadata of one step, as schedulers hand it out; a decode step has one token a request.

    Args:
        query_start_loc: ``[S+1]`` int32, prefix sums of the new tokens (cu_seqlens, qo_indptr).
        seq_lens: ``[S]`` int32, context and new tokens; 0 marks a padded row of a graph.
        slot_mapping: ``[T]``, ``block * block_size + offset`` of each new token's window row, -1 to
            skip.
        window_block_table: ``[S, max_blocks]`` int32 by logical block of the request; blocks that
            have slid out of the window may be freed and stand as -1.
        block_table: ``[S, max_blocks]`` int32, of the compressed rows.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    window_block_table: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True)
class BlockTables:
    """Adapter for block tables: they pass as they are, the block sizes stand in the pools' shapes.

    Args:
        window_cache: ``[blocks, block_size, D]``; the block stride is free, so that a view into a
            bigger allocation will do.
        compressed_cache: ``[blocks, rows of a block, D]``, likewise.
    """

    layer: Layer
    window_cache: torch.Tensor
    compressed_cache: torch.Tensor

    def write(self, kv: torch.Tensor, step: Step) -> None:
        """Put the new tokens' rows into the window cache (reshape_and_cache)."""
        ftkernels.store_kv(kv, self.window_cache, step.slot_mapping)

    def prefill(self, q: torch.Tensor, step: Step, index_topk: torch.Tensor) -> torch.Tensor:
        """``q [T, H, D]``; ``index_topk [T, k]`` int32 row numbers of the request, -1 for none."""
        out = ftkernels.mla_prefill(
            q, self.window_cache, step.window_block_table, step.query_start_loc, step.seq_lens,
            softmax_scale=self.layer.softmax_scale, sink=self.layer.sink, window=WINDOW,
            cmp_kv=self.compressed_cache, block_table=step.block_table, compress_ratio=RATIO,
            index_topk=index_topk, cos=self.layer.cos, sin=self.layer.sin,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    def decode(self, q: torch.Tensor, step: Step, index_topk: torch.Tensor) -> torch.Tensor:
        """``q [S, H, D]``, the newest token of each request."""
        out = ftkernels.mla_decode(
            q, self.window_cache, step.window_block_table, step.seq_lens,
            softmax_scale=self.layer.softmax_scale, sink=self.layer.sink, window=WINDOW,
            cmp_kv=self.compressed_cache, block_table=step.block_table, compress_ratio=RATIO,
            index_topk=index_topk, cos=self.layer.cos, sin=self.layer.sin,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out


@dataclass(frozen=True)
class SlotLists:
    """Adapter for global slots: ``slot = block * block_size + offset``, -1 for none.

    Selected rows: exactly the entries ``>= 0`` of ``index_topk`` are read, whatever the length of
    the request. Over a table that maps every block to itself, a row number is a slot.

    Window rows: over a pool seen as blocks of one row, a list of slots is a block table. A request
    then is as long as its list, so the rotation back goes by the true positions, in a launch of its
    own. Rows packed as fp8 keep their scales at the end of the block and cannot be seen this way:
    their window goes by block table, as in ``prefill``; selected rows take every format.

    Args:
        window_cache: ``[blocks, block_size, D]``, contiguous for ``decode``.
        compressed_cache: ``[blocks, rows of a block, D]``, any block stride.
        identity: ``[1, blocks of compressed_cache]`` int32, ``arange``; made once.
    """

    layer: Layer
    window_cache: torch.Tensor
    compressed_cache: torch.Tensor
    identity: torch.Tensor

    def prefill(self, q: torch.Tensor, step: Step, slots: torch.Tensor) -> torch.Tensor:
        """``slots [T, k]`` int32 of the selected rows; the window by block table, read once for a
        block of queries."""
        out = ftkernels.mla_prefill(
            q, self.window_cache, step.window_block_table, step.query_start_loc, step.seq_lens,
            softmax_scale=self.layer.softmax_scale, sink=self.layer.sink, window=WINDOW,
            cmp_kv=self.compressed_cache, compress_ratio=RATIO, index_topk=slots,
            block_table=self.identity.expand(step.seq_lens.shape[0], -1),
            cos=self.layer.cos, sin=self.layer.sin,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    def decode(
        self, q: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
        window_slots: torch.Tensor, window_lens: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Any queries, each with lists of its own.

        Args:
            q, positions: ``[T, H, D]`` and ``[T]``.
            slots: ``[T, k]`` int32, selected rows in any order.
            window_slots, window_lens: ``[T, WINDOW]`` and ``[T]`` int32, the first ``window_lens``
                entries of a row count; 0 marks a padded row.
        """
        one_row_blocks = self.window_cache.view(-1, 1, self.window_cache.shape[-1])
        out = ftkernels.mla_decode(
            q, one_row_blocks, window_slots, window_lens,
            softmax_scale=self.layer.softmax_scale, sink=self.layer.sink, window=WINDOW,
            cmp_kv=self.compressed_cache, compress_ratio=RATIO, index_topk=slots,
            block_table=self.identity.expand(q.shape[0], -1),
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return ftkernels.apply_rope(
            out, positions, self.layer.cos, self.layer.sin, inverse=True, out=out
        )


class ToyEngine:
    """Stands for yours: three requests whose rows lie in blocks handed out in no order.

    Args:
        window_block, rows_block: tokens of a window block, rows of a compressed block.
        shared: both lie in one allocation, a window block and a compressed block side by side.
        topk: rows selected for a query.
        new_tokens: of each request, in a prefill step.
    """

    seq_lens = (301, 5, 131)

    def __init__(
        self, *, window_block: int, rows_block: int, shared: bool = False, heads: int = 8,
        dim: int = 512, topk: int = 16, new_tokens: tuple[int, ...] = (45, 5, 1),
        dtype: torch.dtype = torch.bfloat16, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.generator = torch.Generator().manual_seed(0)
        self.new_tokens = new_tokens
        self.sizes, self.dtype, self.device = (heads, dim, topk), dtype, device
        self.window = [self.random(n, dim) for n in self.seq_lens]
        self.compressed = [self.random(n // RATIO, dim) for n in self.seq_lens]
        width = 1 + max(max(self.seq_lens) // window_block, max(self.seq_lens) // 4 // rows_block)
        blocks = len(self.seq_lens) * width + 1
        # what no query may read is NaN
        both = torch.full((blocks, window_block + rows_block, dim), torch.nan, dtype=dtype)
        both = both.to(device)
        parts = both[:, :window_block], both[:, window_block:]
        self.window_cache, self.compressed_cache = (
            parts if shared else [part.contiguous() for part in parts]
        )
        order = torch.randperm(blocks, generator=self.generator)[:-1].to(torch.int32)
        self.table = order.view(len(self.seq_lens), width)
        for request, rows in enumerate(self.compressed):
            for j, row in enumerate(rows):
                block, offset = divmod(self.slot(request, j, rows_block), rows_block)
                self.compressed_cache[block, offset] = row
        angles = torch.rand(max(self.seq_lens), ROPE_DIM // 2, generator=self.generator) * 6.0
        # sinks near ln(rows), so that they matter
        sink = torch.randn(heads, generator=self.generator) + 4.5
        tables = (t.to(device) for t in (sink, angles.cos(), angles.sin()))
        self.layer = Layer(dim**-0.5, *tables)

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(self.dtype).to(self.device)

    def slot(self, request: int, number: int, block_size: int) -> int:
        """Global slot of a logical row of a request."""
        return int(self.table[request, number // block_size]) * block_size + number % block_size

    def step(self, new_tokens: tuple[int, ...]) -> Step:
        """The newest tokens of every request; blocks that none of them sees are freed."""
        size, slots = self.window_cache.shape[1], []
        window_table = self.table.clone()
        for request, (length, new) in enumerate(zip(self.seq_lens, new_tokens, strict=True)):
            slots += [self.slot(request, p, size) for p in range(length - new, length)]
            window_table[request, : max(0, length - new - WINDOW + 1) // size] = -1
        starts = torch.tensor((0, *new_tokens)).cumsum(0).to(torch.int32)
        lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        parts = (starts, lens, torch.tensor(slots), window_table, self.table)
        return Step(*(part.to(self.device) for part in parts))

    def queries(self, new_tokens: tuple[int, ...]) -> list[tuple[int, int]]:
        """``(request, position)`` of each new token."""
        return [
            (request, position)
            for request, (length, new) in enumerate(zip(self.seq_lens, new_tokens, strict=True))
            for position in range(length - new, length)
        ]

    def fill(self, new_tokens: tuple[int, ...]) -> None:
        """Window rows of the context; those of the new tokens come with the step."""
        size = self.window_cache.shape[1]
        for request, (length, new) in enumerate(zip(self.seq_lens, new_tokens, strict=True)):
            for position in range(length - new):
                block, offset = divmod(self.slot(request, position, size), size)
                self.window_cache[block, offset] = self.window[request][position]

    def select(self, queries: list[tuple[int, int]]) -> torch.Tensor:
        """Rows as an indexer would pick them: any of the visible ones, in no order."""
        picks = torch.full((len(queries), self.sizes[2]), -1, dtype=torch.int32)
        for t, (_, position) in enumerate(queries):
            visible = torch.randperm((position + 1) // RATIO, generator=self.generator)
            chosen = visible[: self.sizes[2]]
            picks[t, : len(chosen)] = chosen.to(torch.int32)
        return picks.to(self.device)

    def slots_of(self, queries: list[tuple[int, int]], picks: torch.Tensor) -> torch.Tensor:
        """The same picks as global slots, as a sparse-MLA indexer hands them out."""
        size = self.compressed_cache.shape[1]
        rows = zip(queries, picks.tolist(), strict=True)
        named = [[self.slot(r, j, size) if j >= 0 else -1 for j in row] for (r, _), row in rows]
        return torch.tensor(named, dtype=torch.int32, device=self.device)

    def window_slots(self, queries: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the window rows of each query, oldest first, and how many there are."""
        size = self.window_cache.shape[1]
        slots = torch.full((len(queries), WINDOW), -1, dtype=torch.int32)
        for t, (request, position) in enumerate(queries):
            seen = range(max(0, position - WINDOW + 1), position + 1)
            slots[t, : len(seen)] = torch.tensor([self.slot(request, p, size) for p in seen])
        return slots.to(self.device), (slots >= 0).sum(1, dtype=torch.int32).to(self.device)

    def formula(
        self, q: torch.Tensor, queries: list[tuple[int, int]], picks: torch.Tensor
    ) -> torch.Tensor:
        """Softmax over the gathered rows in fp64, the sink in the denominator, rotated back."""
        results = []
        for t, (request, position) in enumerate(queries):
            seen = self.window[request][max(0, position - WINDOW + 1) : position + 1]
            rows = torch.cat((seen, self.compressed[request][picks[t][picks[t] >= 0]])).double()
            logits = q[t].double() @ rows.T * self.layer.softmax_scale
            sink = self.layer.sink.double()[:, None]
            mixed = torch.softmax(torch.cat((logits, sink), dim=1), dim=1)[:, :-1] @ rows
            even, odd = mixed[:, -ROPE_DIM::2].clone(), mixed[:, -ROPE_DIM + 1 :: 2].clone()
            cos, sin = self.layer.cos[position].double(), self.layer.sin[position].double()
            mixed[:, -ROPE_DIM::2] = even * cos + odd * sin
            mixed[:, -ROPE_DIM + 1 :: 2] = odd * cos - even * sin
            results.append(mixed)
        return torch.stack(results)


def difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest value of its row."""
    error = (out.double() - expected).abs().amax(dim=-1)
    return float((error / expected.abs().amax(dim=-1)).max())


def run(engine: ToyEngine, adapter: str, phase: str) -> float:
    """One step by either adapter; the largest difference from the formula."""
    new_tokens = engine.new_tokens if phase == "prefill" else (1,) * len(engine.seq_lens)
    queries, step = engine.queries(new_tokens), engine.step(new_tokens)
    engine.fill(new_tokens)
    picks, q = engine.select(queries), engine.random(len(queries), *engine.sizes[:2])
    caches = engine.window_cache, engine.compressed_cache
    tables = BlockTables(engine.layer, *caches)
    tables.write(torch.stack([engine.window[r][p] for r, p in queries]), step)
    if adapter == "block tables":
        out = (tables.prefill if phase == "prefill" else tables.decode)(q, step, picks)
    else:
        slots = engine.slots_of(queries, picks)
        identity = torch.arange(len(caches[1]), dtype=torch.int32, device=engine.device)[None]
        lists = SlotLists(engine.layer, *caches, identity)
        if phase == "prefill":
            out = lists.prefill(q, step, slots)
        else:
            positions = torch.tensor([p for _, p in queries], device=engine.device)
            out = lists.decode(q, positions, slots, *engine.window_slots(queries))
    return difference(out, engine.formula(q, queries, picks))


LAYOUTS = {
    "blocks of 64 tokens and 16 rows, side by side in one allocation": (64, 16, True),
    "blocks of 256 tokens and 8 rows, two pools": (256, 8, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    plain = ftkernels.backend.use_reference(torch.empty(0, device=device))
    path = "plain-torch references" if plain else "Triton kernels"
    print(f"requests of {ToyEngine.seq_lens} tokens, 8 heads of 512, bf16, on {device}: {path}")
    print("largest difference from fp64, relative to the largest value of the row:")
    for text, (window_block, rows_block, shared) in LAYOUTS.items():
        print(text)
        for adapter in ("block tables", "slot lists"):
            for phase in ("prefill", "decode"):
                # one-row blocks need a window pool without gaps
                if shared and (adapter, phase) == ("slot lists", "decode"):
                    continue
                engine = ToyEngine(
                    window_block=window_block, rows_block=rows_block, shared=shared, device=device
                )
                print(f"  {adapter}, {phase:<7}  {run(engine, adapter, phase):.1e}")


if __name__ == "__main__":
    main()
