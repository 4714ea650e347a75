"""Graph nodes of one decode layer, by half, as one of eight cards sees it.

Counted on meta tensors: what each op launches and the torch operators between them (fills, copies,
products), so that a scratch that is made and zeroed in a call counts too. An all-reduce closes each
half, and the expert half looks its experts up; both come on top, so that the budgets of a captured
step are less by one and by two. The whole step: tests/ftruntime/engine/test_captured_nodes.py.

Mutants tried: attention, selection, experts or hyper-connections without scratch, a copy of the
queries before attention, hc_post and hc_pre apart, the input not quantized by the hyper-connection,
the indexer's queries projected apart, swiglu_clamp apart, store and compressor apart, snapshots of
the carry in a launch of their own.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ftkernels import backend
from ftkernels.moe.bank import ExpertBank
from ftkernels.testing import aot
from ftruntime.checkpoint.loader import LinearWeight, Weights
from ftruntime.checkpoint.names import block_tensors
from ftruntime.kvcache.storage import KVStorage
from ftruntime.model.attention import Attention
from ftruntime.model.batch import ForwardBatch
from ftruntime.model.config import builtin
from ftruntime.model.experts import ResidentExperts, resident
from ftruntime.model.linear import Input
from ftruntime.model.mhc import HyperConnection
from ftruntime.model.moe import MoE
from ftruntime.model.numerics import Numerics
from ftruntime.model.router import Router
from ftruntime.model.scratch import scratch_bytes

pytestmark = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)
LAYERS = {"csa": 4, "hca": 128, "swa": 0}
ATTENTION = {"csa": 12 - 1, "hca": 8 - 1, "swa": 8 - 1}
EXPERTS = 8 - 2
SEQUENCES, PAGES = 4, 256
DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8, "I8": torch.uint8, "I64": torch.int64,
}  # fmt: skip


def _empty(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def _config(ratio):
    return dataclasses.replace(
        builtin("flash"), num_hidden_layers=1, compress_ratios=(ratio,), num_attention_heads=8,
        o_groups=1, num_hash_layers=0, moe_intermediate_size=256,
    )  # fmt: skip


def _weights(config, hashed=False):
    named = block_tensors(config, "layers.0", ratio=config.compress_ratios[0], hash_routed=hashed)
    made = {
        name: _empty(*spec.shape, dtype=DTYPES[spec.dtype])
        for name, spec in named
        if ".ffn.experts." not in name
    }
    made["embed.weight"] = _empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
    linears = {
        name.removesuffix(".weight"): LinearWeight(x, made[name.replace(".weight", ".scale")])
        for name, x in made.items()
        if x.dtype == torch.float8_e4m3fn
    }
    experts, inter, hidden = (
        config.n_routed_experts, config.moe_intermediate_size, config.hidden_size,
    )  # fmt: skip
    u8 = torch.uint8
    bank = ExpertBank(
        _empty(experts, 2 * inter, hidden // 2, dtype=u8),
        _empty(experts, 2 * inter, hidden // 32, dtype=u8),
        _empty(experts, hidden, inter // 2, dtype=u8),
        _empty(experts, hidden, inter // 32, dtype=u8),
    )
    return Weights(made, linears, [bank])


def _batch(config, num_tokens, phase):
    size = scratch_bytes(
        config, num_tokens=num_tokens, num_seqs=num_tokens, max_positions=128 * PAGES
    )
    return ForwardBatch(
        token_ids=_empty(num_tokens, dtype=torch.int64),
        positions=_empty(num_tokens, dtype=torch.int64),
        cu_seqlens=_empty(num_tokens + 1), seq_lens=_empty(num_tokens),
        slot_mapping=_empty(num_tokens, dtype=torch.int64),
        window_block_table=_empty(num_tokens, PAGES), block_table=_empty(num_tokens, PAGES),
        state_index=_empty(num_tokens), is_decode=phase == "decode",
        host_token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        scratch=_empty(size, dtype=torch.uint8),
    )  # fmt: skip


def _expert_half(config, weights, numerics):
    """Packed experts, all on the device."""
    bank = resident(weights.experts[0], torch.device("meta"))
    assert bank.packed
    experts = ResidentExperts(bank, config, numerics)
    return MoE.of(weights, 0, Router.of(weights, 0, config), experts, config, numerics)


def _between(config, weights, site, batch, dtype):
    """The hyper-connection in front of a half, with the previous sublayer's output."""
    connection = HyperConnection.of(weights, 0, site, True, config)
    streams = _empty(SEQUENCES, config.hc_mult, config.hidden_size, dtype=dtype)
    mixes = (
        _empty(SEQUENCES, config.hc_mult, dtype=torch.float32),
        _empty(SEQUENCES, config.hc_mult, config.hc_mult, dtype=torch.float32),
    )
    return connection.between(streams[:, 0], streams, mixes, batch)[1]


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["naive", "radix"])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_attention_half_of_a_decode_step(kind, kv_format, prefix_cache):
    """Snapshots of the carry, which a prefix cache asks for, cost no node."""
    config, numerics = _config(LAYERS[kind]), Numerics.of("official")
    storage = KVStorage(
        config, num_pages=PAGES, window_pages=PAGES, num_rows=SEQUENCES, dtype=numerics.dtype,
        kv_format=kv_format, prefix_cache=prefix_cache, device="meta",
    )  # fmt: skip
    weights, batch = _weights(config), _batch(config, SEQUENCES, "decode")
    attention = Attention.of(weights, 0, config, numerics)
    tables = (_empty(1024, 32, dtype=torch.float32),) * 2
    with aot.capture_launches(arch=89) as got:
        x = _between(config, weights, "attn", batch, numerics.dtype)
        out = attention(x, batch, storage.layers[0], tables)
    assert out.shape == x.dense.shape
    assert got.num_nodes <= ATTENTION[kind], f"{_names(got)}: {got.torch_ops}"


@pytest.mark.parametrize("hashed", [False, True], ids=["topk", "hash"])
def test_expert_half_of_a_decode_step(hashed):
    config, numerics = _config(0), Numerics.of("official")
    config = dataclasses.replace(config, num_hash_layers=int(hashed))
    weights, batch = _weights(config, hashed), _batch(config, SEQUENCES, "decode")
    experts = _expert_half(config, weights, numerics)
    with aot.capture_launches(arch=89) as got:
        x = _between(config, weights, "ffn", batch, numerics.dtype)
        out = experts(x, batch)
    assert out.shape == x.dense.shape
    assert got.num_nodes <= EXPERTS, f"{_names(got)}: {got.torch_ops}"


def test_a_prefill_step_makes_no_scratch():
    """Products take a launch more to prepare their rows; nothing is filled or copied."""
    config, numerics = _config(4), Numerics.of("official")
    storage = KVStorage(
        config, num_pages=PAGES, window_pages=PAGES, num_rows=SEQUENCES, dtype=numerics.dtype,
        prefix_cache=True, device="meta",
    )  # fmt: skip
    weights, batch = _weights(config), _batch(config, SEQUENCES, "prefill")
    attention = Attention.of(weights, 0, config, numerics)
    experts = _expert_half(config, weights, numerics)
    x = _empty(SEQUENCES, config.hidden_size, dtype=numerics.dtype)
    tables = (_empty(1024, 32, dtype=torch.float32),) * 2
    with aot.capture_launches(arch=89) as got:
        attention(Input(x, None), batch, storage.layers[0], tables)
        experts(Input(x, None), batch)
    assert not any("fill" in name or "zero" in name or "copy" in name for name in got.torch_ops)


def _names(got):
    return [launch.name for launch in got.launches]
