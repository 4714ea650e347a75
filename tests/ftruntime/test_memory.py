"""Bytes of a shape against the totals of the specification.

Mutants tried and seen red: the shared expert not sharded, FP4 counted as one value a byte when
widened, index rows forgotten, one rope table pair instead of two, scales left out,
launches of one graph alone, no block tables, single FP8 rows without padding.
"""

from __future__ import annotations

import pytest
import torch

from ftruntime import memory
from ftruntime.model.config import builtin

FLASH = builtin("flash")
BF16 = {"kv_format": "bf16", "numerics": "official"}


def test_flash_weights_are_the_totals_of_the_roofline_section():
    weights = memory.weight_bytes(FLASH, widened=False, ranks=1)
    assert weights.expert == 13369344
    assert weights.num_experts == 43 * 256
    assert weights.expert * weights.num_experts == pytest.approx(147.170e9, rel=1e-5)
    # embedding, head, dense, tid2eid as I64; to the precision the figures are given in
    assert weights.dense == pytest.approx(1.059e9 + 1.059e9 + 6.709e9 + 18.6e6, rel=2e-4)


def test_pro_weights():
    weights = memory.weight_bytes(builtin("pro"), widened=False, ranks=1)
    assert weights.expert * weights.num_experts == pytest.approx(822.05e9, rel=1e-4)
    assert weights.dense == pytest.approx(24.97e9 + 2 * 129280 * 7168 * 2, rel=1e-3)


def test_a_widened_expert_is_its_parameters_in_fp32():
    assert memory.weight_bytes(FLASH, widened=True, ranks=1).expert == 25165824 * 4


@pytest.mark.parametrize("widened", [False, True])
def test_weights_are_what_the_loader_holds(widened):
    from ftruntime.checkpoint.memory import estimate

    shape = builtin("pro")
    weights = memory.weight_bytes(shape, widened=widened, ranks=1)
    loaded = estimate(shape, torch.float32 if widened else None)
    assert weights.dense == loaded.dense_bytes
    assert weights.expert * weights.num_experts == loaded.expert_bytes


def test_ranks_share_what_is_sharded():
    one = memory.weight_bytes(FLASH, widened=False, ranks=1)
    eight = memory.weight_bytes(FLASH, widened=False, ranks=8)
    assert eight.expert == one.expert // 8
    # the replicated part of one CSA layer: wq_a, wkv, compressor, indexer, router, mHC, norms
    wq_a, wkv = 1024 * 4096 + 8 * 32, 512 * 4096 + 4 * 32
    replicated = wq_a + wkv + 16.79e6 + 13.11e6 + 2.10e6 + 3.15e6 + 16e3
    assert eight.dense > 21 * replicated
    sharded = (one.dense - eight.dense) * 8 / 7
    query_output = 32768 * 1024 + 8192 * 4096 + 4096 * 8192
    assert sharded == pytest.approx(2 * 1.059e9 + 43 * (query_output + 25.17e6), rel=1e-3)


def test_kv_bytes_of_flash():
    # 6880 bytes a token of rows; a window of 128 tokens is 5.64 MB
    assert memory.row_page_bytes(FLASH, **BF16) == 6880 * 128
    assert memory.window_page_bytes(FLASH, **BF16) == 43 * 128 * 1024
    fp8 = {"kv_format": "fp8", "numerics": "official"}
    # rows of 584 bytes; a page of one HCA row is padded to 592; index rows stay bf16
    assert memory.row_page_bytes(FLASH, **fp8) == 21 * 32 * (584 + 256) + 20 * 592
    assert memory.window_page_bytes(FLASH, **fp8) == 43 * 128 * 584
    exact = {"kv_format": "bf16", "numerics": "exact"}
    assert memory.row_page_bytes(FLASH, **exact) == 2 * 6880 * 128


def test_carry_bytes_of_flash():
    # 8 slots of two series: 1.38 MB CSA and 0.34 MB indexer; HCA as an online softmax, two buffers
    assert memory.carry_bytes(FLASH) == pytest.approx(1.38e6 + 0.34e6 + 2 * 0.12e6, rel=0.02)


def test_carry_snapshot_bytes_of_flash():
    # 4 tokens of one series, values and gates, of 21 CSA layers and their indexers
    assert memory.carry_snapshot_bytes(FLASH) == 21 * 2 * 4 * (512 + 128) * 4


def test_rope_tables():
    assert memory.rope_table_bytes(FLASH, 1048576) == 2 * 268435456


def test_activations_grow_with_the_chunk_and_shrink_with_ranks():
    def size(chunk_tokens: int, ranks: int = 1, numerics: str = "official") -> int:
        return memory.activation_bytes(
            FLASH, num_tokens=chunk_tokens, max_running=4, numerics=numerics, ranks=ranks
        )

    streams, queries = 2 * 4 * 4096 * 2, 2 * 64 * 512 * 2
    assert size(2048) - size(1024) >= 1024 * (streams + queries)
    assert size(2048, ranks=8) < size(2048)
    assert size(2048, numerics="exact") > 1.5 * size(2048)


def test_graphs_share_the_tensors_of_the_largest():
    def size(*sizes: int, context: int = 1024) -> int:
        return memory.graph_bytes(
            FLASH, sizes=sizes, max_model_len=context, numerics="official", ranks=1
        )

    nodes = 43 * 20 * 8192
    assert size() == 0
    assert size(1, 2, 4) == size(4) + 2 * nodes
    assert size(4) > nodes + 4 * (2 * 129280 * 4 + 2 * 4 * 4096 * 2)
    # two block tables of four bytes a page
    assert size(4, context=1024 + 1280) == size(4) + 4 * 2 * 10 * 4
