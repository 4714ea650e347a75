"""Nodes of the captured decode step of one of eight cards, whole, counted on meta tensors.

There nothing can be read on the host, and here nothing may be made on it or copied from or to it:
what a stream that is captured refuses.

Mutants run, each noticed: a copy of the queries before attention, an op without scratch (a fill
more), a table that the step makes on the host, a row of the logits read.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ftkernels import backend
from ftkernels.moe.bank import ExpertBank
from ftkernels.testing import aot
from ftruntime.checkpoint.loader import LinearWeight, Weights
from ftruntime.checkpoint.names import expected_tensors, num_shares, sharded_dim
from ftruntime.engine.graphs import GraphPool
from ftruntime.engine.runner import BatchBuilder
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model import transformer
from ftruntime.model.config import builtin
from ftruntime.model.numerics import Numerics
from ftruntime.model.scratch import scratch_bytes
from ftruntime.types import SeqPlan, StepPlan

pytestmark = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)
RANKS, ROWS, PAGES = 8, 4, 256
META = torch.device("meta")
DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8, "I8": torch.uint8, "I64": torch.int64,
}  # fmt: skip
# kernels.md section 4, collectives and the look-up of experts included, by compress ratio
BUDGET = {4: 20, 128: 16, 0: 16}
# embedding, its sum, copies of it, the first hyper-connection; the last, head, logits, their join
ENDS = 4 + 5


class Ranks:
    """Rank 0 of eight; `calls` are nodes of their own."""

    rank, size = 0, RANKS

    def __init__(self):
        self.calls = []

    def sum(self, x):
        self.calls.append("sum")
        return x

    def join(self, x):
        self.calls.append("join")
        return x


class Host(TorchDispatchMode):
    """Refuses tensors of the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        devices = {x.device for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)}
        assert devices <= {META}, f"{func} makes or copies a tensor of the host"
        return result


class MetaGraph:
    def begin(self):
        with contextlib.ExitStack() as stack:
            self.got = stack.enter_context(aot.capture_launches(arch=89))
            stack.enter_context(Host())
            self._recording = stack.pop_all()

    def end(self):
        self._recording.close()

    @property
    def names(self):
        return [launch.name for launch in self.got.launches] + self.got.torch_ops


class MetaGraphs:
    def __init__(self):
        self.graphs = []

    def capturing(self):
        return contextlib.nullcontext()

    def graph(self):
        self.graphs.append(MetaGraph())
        return self.graphs[-1]


class Slots:
    """An expert cache of which a capture asks for the tensors alone."""

    def __init__(self, bank, config):
        self.num_experts, self.num_slots = config.n_routed_experts, 4096
        self._pool = (bank.w13, bank.w13_scale, bank.w2, bank.w2_scale)

    def slots(self, layer):
        return self._pool


def empty(shape, dtype):
    return torch.empty(shape, dtype=dtype, device=META)


def weights_of(config):
    made = {}
    for name, spec in expected_tensors(config).items():
        if ".ffn.experts." in name:
            continue
        shape = list(spec.shape)
        if sharded_dim(name) is not None:
            shape[sharded_dim(name)] //= num_shares(name, RANKS)
        made[name] = empty(shape, DTYPES[spec.dtype])
    linears = {
        name.removesuffix(".weight"): LinearWeight(x, made[name.replace(".weight", ".scale")])
        for name, x in made.items() if x.dtype == torch.float8_e4m3fn
    }  # fmt: skip
    experts, width, hidden = (
        config.n_routed_experts, config.moe_intermediate_size // RANKS, config.hidden_size,
    )  # fmt: skip
    bank = ExpertBank(
        empty((experts, 2 * width, hidden // 2), torch.uint8),
        empty((experts, 2 * width, hidden // 32), torch.uint8),
        empty((experts, hidden, width // 2), torch.uint8),
        empty((experts, hidden, width // 32), torch.uint8),
    ).pack()
    return Weights(made, linears, [bank] * config.num_hidden_layers)


class NoHints:
    """In place of `Lookahead`, which reads a table of its own on the host when it is made."""

    def __init__(self, cache, routers, depth):
        pass

    def coming(self, layer, x, batch):
        return []


def captured(offload):
    """What the model captures: its pieces, and the calls of other ranks."""
    config = builtin("flash")
    numerics, ranks, weights = Numerics.of("official"), Ranks(), weights_of(config)
    share = config.share(RANKS)
    cache = Slots(weights.experts[0], config) if offload else None
    model = transformer.Transformer(
        config, weights, numerics, max_positions=128 * PAGES, cache=cache,
        parallel=ranks,
    )  # fmt: skip
    storage = KVStorage(
        share, num_pages=PAGES, window_pages=PAGES, num_rows=ROWS, dtype=numerics.dtype,
        prefix_cache=True, device=META,
    )  # fmt: skip
    size = scratch_bytes(share, num_tokens=ROWS, num_seqs=ROWS, max_positions=128 * PAGES)
    builder = BatchBuilder(
        num_rows=ROWS, max_pages=PAGES, device=META, scratch=empty((size,), torch.uint8)
    )
    padding = StepPlan(
        0, "decode", (SeqPlan(0, "", 1, (0,), ((0, 0, 0),)),), (0, config.num_hidden_layers)
    )
    graphs = MetaGraphs()
    pool = GraphPool(model, storage, builder, (ROWS,), padding, graphs=graphs)
    batch = builder.fixed(ROWS)
    with torch.inference_mode():
        pool._capture(batch, graphs)
    return config, graphs.graphs, ranks.calls


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])
def test_nodes_of_a_whole_step(offload, monkeypatch):
    monkeypatch.setattr(transformer, "Lookahead", NoHints)
    config, pieces, calls = captured(offload)
    nodes = [piece.got.num_nodes for piece in pieces]
    layers = Counter(config.compress_ratios[: config.num_hidden_layers])
    budget = sum(BUDGET[ratio] * count for ratio, count in layers.items())
    # what the host launches between the pieces: where the experts of a layer are
    lookups = config.num_hidden_layers if offload else 0
    total = sum(nodes) + len(calls) + lookups
    print(f"\n{total} nodes of {budget} + {ENDS}: {len(pieces)} pieces, {len(calls)} collectives")
    assert calls == ["sum"] * (2 * config.num_hidden_layers + 1) + ["join"]
    assert len(pieces) == (config.num_hidden_layers + 1 if offload else 1)
    assert total <= budget + ENDS, Counter(name for piece in pieces for name in piece.names)
