"""Mutants that these tests catch: unstable order within an expert, no padding, expert of an empty
block, -1 counted as an expert, count without padding, tail left unwritten.
"""

from __future__ import annotations

import pytest
import torch

from ftkernels.config import pin
from ftkernels.moe.align import AlignConfig, moe_align, moe_align_reference


def model(topk_ids: torch.Tensor, num_experts: int, block_m: int):
    """Lists, from the contract's words."""
    routes = topk_ids.flatten().tolist()
    num_routes = len(routes)
    ids, experts = [], []
    for expert in range(num_experts):
        mine = [q for q in range(num_routes) if routes[q] == expert]
        while mine:
            block, mine = mine[:block_m], mine[block_m:]
            ids += block + [num_routes] * (block_m - len(block))
            experts.append(expert)
    count = len(ids)
    size = -(-(num_routes + num_experts * (block_m - 1)) // block_m) * block_m
    ids += [num_routes] * (size - count)
    experts += [-1] * (size // block_m - len(experts))
    return ids, experts, count


def random_ids(rows, topk, num_experts, device, seed=0, holes=True):
    generator = torch.Generator().manual_seed(seed)
    low = -1 if holes else 0
    ids = torch.randint(low, num_experts, (rows, topk), generator=generator, dtype=torch.int32)
    return ids.to(device)


@pytest.mark.parametrize(("rows", "topk"), [(1, 1), (7, 4), (40, 6)])
@pytest.mark.parametrize("num_experts", [1, 5, 8])
@pytest.mark.parametrize("block_m", [1, 3, 16])
def test_matches_model(rows, topk, num_experts, block_m, device, run):
    topk_ids = random_ids(rows, topk, num_experts, device, seed=rows)
    out = run(moe_align, topk_ids, num_experts=num_experts, block_m=block_m)
    ids, experts, count = model(topk_ids, num_experts, block_m)
    assert out[0].tolist() == ids
    assert out[1].tolist() == experts
    assert out[2].tolist() == [count]
    assert all(x.dtype == torch.int32 for x in out)


def test_several_blocks_of_routes(device, run):
    topk_ids = random_ids(70, 5, 6, device)
    with pin("moe_align", AlignConfig(block_r=128, num_warps=4)):
        out = run(moe_align, topk_ids, num_experts=6, block_m=16)
    ids, experts, count = model(topk_ids, 6, 16)
    assert (out[0].tolist(), out[1].tolist(), out[2].item()) == (ids, experts, count)


@pytest.mark.parametrize("value", [-1, 0, 3])
def test_all_routes_alike(value, device, run):
    topk_ids = torch.full((50, 3), value, dtype=torch.int32, device=device)
    out = run(moe_align, topk_ids, num_experts=4, block_m=8)
    ids, experts, count = model(topk_ids, 4, 8)
    assert (out[0].tolist(), out[1].tolist(), out[2].item()) == (ids, experts, count)


def test_strided_ids_and_out(device, run):
    wide = random_ids(12, 9, 5, device)
    out = tuple(
        torch.empty(n, dtype=torch.int32, device=device) for n in ((24 + 5 * 3 + 3) // 4 * 4, 10, 1)
    )
    result = run(moe_align, wide[::2, 4:8], num_experts=5, block_m=4, out=out)
    assert all(a is b for a, b in zip(result, out, strict=True))
    ids, experts, count = model(wide[::2, 4:8], 5, 4)
    assert (out[0].tolist(), out[1].tolist(), out[2].item()) == (ids, experts, count)


def test_empty_launches_nothing(device, run):
    topk_ids = torch.empty(0, 4, dtype=torch.int32, device=device)
    ids, experts, count = run(moe_align, topk_ids, num_experts=3, block_m=4, launched=False)
    assert ids.tolist() == [0] * 12
    assert experts.tolist() == [-1] * 3
    assert count.item() == 0


@pytest.mark.gpu
def test_model_shape(device, run):
    topk_ids = random_ids(3456, 6, 256, device)
    out = run(moe_align, topk_ids, num_experts=256, block_m=64)
    for a, b in zip(out, moe_align_reference(topk_ids, num_experts=256, block_m=64), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kwargs", "kind", "text"),
    [
        ({"num_experts": 0}, ValueError, "moe_align: num_experts is 0, expected >= 1"),
        ({"block_m": 0}, ValueError, "moe_align: block_m is 0, expected >= 1"),
        ({"topk_ids": torch.zeros(2, 2).long()}, TypeError, "topk_ids is int64, expected int32"),
        ({"topk_ids": torch.zeros(4, dtype=torch.int32)}, ValueError, r"topk_ids is \(4,\)"),
        ({"out": (torch.empty(3, dtype=torch.int32), None, None)}, ValueError, "sorted_token_ids"),
    ],
)
def test_refusals(kwargs, kind, text):
    kwargs = {"num_experts": 2, "block_m": 2, **kwargs}
    topk_ids = kwargs.pop("topk_ids", torch.zeros(2, 2, dtype=torch.int32))
    for op in (moe_align, moe_align_reference):
        with pytest.raises(kind, match=text):
            op(topk_ids, **kwargs)
