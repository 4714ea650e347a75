"""Graph nodes that attention's own ops put into one step of a layer.

Counted on meta tensors: what each op launches and the torch operators it issues (fills, copies,
products), so that a scratch that is made and zeroed in every call counts too. Projections are not
counted; they belong to the linears.

Mutants tried: attention or selection without scratch, a copy of the queries before attention, a
compressor that runs twice.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

import ftkernels
from ftkernels import backend
from ftkernels.testing import aot
from ftruntime.checkpoint.loader import LinearWeight, Weights
from ftruntime.checkpoint.names import block_tensors
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model.attention import Attention, scratch_bytes
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.config import builtin
from ftruntime.model.numerics import Numerics

pytestmark = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)
COUNTED = (
    "store_kv", "compress_kv", "index_select", "mla_decode", "mla_prefill", "merge_splits",
)  # fmt: skip
LAYERS = {"csa": 4, "hca": 128, "swa": 0}
MOST = {"csa": 5, "hca": 3, "swa": 2}
OPS = {
    "csa": Counter(store_kv=1, compress_kv=2, index_select=1),
    "hca": Counter(store_kv=1, compress_kv=1),
    "swa": Counter(store_kv=1),
}
SEQUENCES, PAGES = 4, 256
DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
}  # fmt: skip


def _empty(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def _config(ratio):
    """The published shape as one of eight cards sees it, one layer of it."""
    return dataclasses.replace(
        builtin("flash"), num_hidden_layers=1, compress_ratios=(ratio,), num_attention_heads=8,
        o_groups=1, num_hash_layers=0,
    )  # fmt: skip


def _weights(config):
    ratio = config.compress_ratios[0]
    named = block_tensors(config, "layers.0", ratio=ratio, hash_routed=False)
    made = {
        name: _empty(*spec.shape, dtype=DTYPES[spec.dtype])
        for name, spec in named
        if ".attn." in name
    }
    linears = {
        name.removesuffix(".weight"): LinearWeight(x, made[name.replace(".weight", ".scale")])
        for name, x in made.items()
        if x.dtype == torch.float8_e4m3fn
    }
    return Weights(made, linears, [])


def _batch(config, num_tokens, phase):
    return ForwardBatch(
        token_ids=_empty(num_tokens, dtype=torch.int64),
        positions=_empty(num_tokens, dtype=torch.int64),
        cu_seqlens=_empty(num_tokens + 1), seq_lens=_empty(num_tokens),
        slot_mapping=_empty(num_tokens, dtype=torch.int64),
        window_block_table=_empty(num_tokens, PAGES), block_table=_empty(num_tokens, PAGES),
        state_index=_empty(num_tokens), is_decode=phase == "decode",
        scratch=_empty(
            scratch_bytes(
                config, num_tokens=num_tokens, num_seqs=num_tokens, max_positions=128 * PAGES
            ),
            dtype=torch.uint8,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "kv_format"), [("decode", "bf16"), ("decode", "fp8"), ("prefill", "bf16")]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_nodes_of_a_layer(kind, phase, kv_format, monkeypatch):
    config, numerics = _config(LAYERS[kind]), Numerics.of("official")
    storage = KVStorage(
        config, num_pages=PAGES, window_pages=PAGES, num_rows=SEQUENCES, dtype=numerics.dtype,
        kv_format=kv_format, device="meta",
    )  # fmt: skip
    attention = Attention.of(_weights(config), 0, config, numerics)
    batch, tables = _batch(config, SEQUENCES, phase), (_empty(1024, 32, dtype=torch.float32),) * 2
    nodes, calls = Counter(), Counter()
    with aot.capture_launches(arch=89) as got:

        def counted(op):
            def call(*args, **kwargs):
                before = got.num_nodes
                result = op(*args, **kwargs)
                nodes[op.__name__] += got.num_nodes - before
                calls[op.__name__] += 1
                return result

            return call

        for name in COUNTED:
            monkeypatch.setattr(ftkernels, name, counted(getattr(ftkernels, name)))
        # references of the projections read their operands, so they are stood in for
        for name in ("fp8_linear", "grouped_linear", "linear"):
            monkeypatch.setattr(ftkernels, name, _projection(name))
        x = _empty(SEQUENCES, config.hidden_size, dtype=numerics.dtype)
        assert attention(x, batch, storage.layers[0], tables).shape == x.shape
    assert calls == OPS[kind] + Counter({f"mla_{phase}": 1})
    assert sum(nodes.values()) <= MOST[kind], f"{dict(nodes)}: {got.torch_ops}"


def _projection(name):
    op = getattr(torch.ops.ftkernels, name)

    def project(x, weight, *scale, path=None, **kwargs):
        return op(x, weight, *scale, **kwargs)

    return project
