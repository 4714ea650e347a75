from __future__ import annotations

import pytest
import torch

from ftkernels.linear.embed import embed, embed_reference
from ftkernels.testing import randn


def lookup(token_ids: torch.Tensor, weight: torch.Tensor, hc: int, start: int) -> torch.Tensor:
    rows = []
    for token in token_ids.tolist():
        known = start <= token < start + weight.shape[0]
        row = weight[token - start] if known else torch.zeros_like(weight[0])
        rows.append(torch.stack([row] * hc))
    return torch.stack(rows)


@pytest.mark.parametrize(("width", "hc"), [(1, 1), (100, 4), (1500, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("start", [0, 7])
def test_matches_lookup(width, hc, dtype, ids, start, device, run):
    weight = randn(11, width, dtype=dtype, device=device)
    token_ids = torch.tensor([0, 10, 3, 7, 17, 18, 3], dtype=ids, device=device)
    got = run(embed, token_ids, weight, hc=hc, vocab_start=start)
    assert torch.equal(got.cpu(), lookup(token_ids.cpu(), weight.cpu(), hc, start))


def test_slices_of_the_vocabulary_add_up(device, run):
    weight = randn(12, 40, device=device)
    token_ids = torch.arange(12, device=device).flip(0)
    parts = [run(embed, token_ids, weight[s : s + 4], vocab_start=s) for s in (0, 4, 8)]
    assert torch.equal(sum(parts), run(embed, token_ids, weight))


def test_unknown_ids_read_nothing(device, run):
    weight = torch.full((3, 8), float("nan"), device=device)
    token_ids = torch.tensor([-1, 3, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    assert torch.equal(run(embed, token_ids, weight), torch.zeros(4, 1, 8, device=device))


def test_strides_and_out(device, run):
    weight = randn(9, 60, device=device)[::2, 10:50]
    token_ids = torch.tensor([4, 0, 1, 0, 3, 0], device=device)[::2]
    out = torch.empty(2, 3, 44, device=device).transpose(0, 1)[..., 2:42]
    assert run(embed, token_ids, weight, hc=2, out=out) is out
    assert torch.equal(out.cpu(), lookup(token_ids.cpu(), weight.cpu(), 2, 0))


def test_extreme_values_are_copied(device, run):
    weight = torch.tensor([[float("inf"), 3e38, -0.0, 1e-45]], device=device)
    got = run(embed, torch.zeros(1, dtype=torch.int32, device=device), weight, hc=2)
    assert torch.equal(got.view(torch.int32), weight.expand(1, 2, 4).contiguous().view(torch.int32))


def test_empty_launches_nothing(device, run):
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert run(embed, none, torch.empty(3, 8, device=device), hc=4, launched=False).shape == (
        0,
        4,
        8,
    )
    two = torch.zeros(2, dtype=torch.int32, device=device)
    assert run(embed, two, torch.empty(3, 0, device=device), launched=False).shape == (2, 1, 0)


def test_no_rows_at_all_gives_zeros(device, run):
    two = torch.zeros(2, dtype=torch.int32, device=device)
    assert torch.equal(
        run(embed, two, torch.empty(0, 8, device=device)), torch.zeros(2, 1, 8, device=device)
    )


IDS, W = torch.zeros(2, dtype=torch.int64), torch.zeros(5, 8)


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "text"),
    [
        (([1, 2], W), {}, TypeError, "embed: token_ids is list, expected a tensor"),
        ((IDS.float(), W), {}, TypeError, "token_ids is float32, expected int32, int64"),
        ((IDS[None], W), {}, ValueError, r"token_ids is \(1, 2\), expected \[T\]"),
        ((IDS, W.double()), {}, TypeError, "weight is float64"),
        ((IDS, W[0]), {}, ValueError, r"weight is \(8,\), expected \[V, C\]"),
        ((IDS, torch.zeros(8, 5).t()), {}, ValueError, "contiguous last dimension"),
        ((IDS, W), {"hc": 0}, ValueError, "hc is 0, expected >= 1"),
        ((IDS, W), {"vocab_start": -1}, ValueError, "vocab_start is -1, expected >= 0"),
        ((IDS, W), {"out": torch.zeros(2, 8)}, ValueError, r"out is \(2, 8\)"),
        ((IDS, W), {"out": torch.zeros(2, 1, 8).half()}, TypeError, "out is float16"),
        ((IDS, W), {"out": W[:2].unsqueeze(1)}, ValueError, "out is overlapping an input"),
        (
            (IDS, torch.zeros(5, 8, device="meta")),
            {},
            ValueError,
            "weight is on meta, expected cpu",
        ),
    ],
)
def test_refusals(args, kwargs, kind, text):
    for op in (embed, embed_reference):
        with pytest.raises(kind, match=text):
            op(*args, **kwargs)


@pytest.mark.gpu
def test_flash_shape(run):
    weight = randn(129280, 4096, dtype=torch.bfloat16, device="cuda")
    token_ids = torch.arange(0, 129280, 37, device="cuda")
    assert torch.equal(
        run(embed, token_ids, weight, hc=4), embed_reference(token_ids, weight, hc=4)
    )
