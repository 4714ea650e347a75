"""Slices of the experts and their packed form, against the stored bytes cut by hand.

Mutants tried: a rank's rows one off; w3 before w1; scales of rank 0 for all; columns of w2 cut as
if a byte held one code; w2 cut by rows; folding decided for each expert; folding decided for both
matrices at once; experts that folded left so; all rows read and then cut.
"""

from __future__ import annotations

import pytest
import torch

from ftkernels import unpack_fp4
from ftruntime.checkpoint.files import ShardFiles
from ftruntime.checkpoint.loader import load_weights
from ftruntime.model.config import ModelConfig
from tests.support.hf_model import read_dequantized

FORMS = {
    "codes": {"dequantize": None}, "packed": {"dequantize": None, "pack": True},
    "fp32": {"dequantize": torch.float32}, "bf16": {"dequantize": torch.bfloat16},
}  # fmt: skip


def _load(directory, **options):
    options = {"dequantize": None, **options}
    return load_weights(directory, ModelConfig.from_dir(directory), **options)


def _codes(tensors, layer, matrix, suffix, rank=0, ranks=1):
    """A rank's share of one stored tensor of all experts, cut along I, as bytes."""
    names = [f"layers.{layer}.ffn.experts.{e}.{matrix}.{suffix}" for e in range(16)]
    whole = torch.stack([tensors[name].view(torch.uint8) for name in names])
    return whole.chunk(ranks, dim=2 if matrix == "w2" else 1)[rank]


def _expected(tensors, layer, rank, ranks):
    halves = [
        [_codes(tensors, layer, w, s, rank, ranks) for w in ("w1", "w3")]
        for s in ("weight", "scale")
    ]
    w13, s13 = (torch.cat(pair, dim=1) for pair in halves)
    w2, s2 = (_codes(tensors, layer, "w2", s, rank, ranks) for s in ("weight", "scale"))
    return w13, s13, w2, s2


def _unpacked(bank):
    assert bank.packed
    w13 = [unpack_fp4(w, s, gated=True) for w, s in zip(bank.w13, bank.w13_scale, strict=True)]
    w2 = [unpack_fp4(w, s) for w, s in zip(bank.w2, bank.w2_scale, strict=True)]
    return [torch.stack(column) for pair in (w13, w2) for column in zip(*pair, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("form", ["codes", "packed"])
def test_q07_each_rank_holds_its_share_of_every_expert(scattered, stored, form, ranks):
    tensors = stored(scattered)
    for rank in range(ranks):
        weights = _load(scattered, **FORMS[form], rank=rank, ranks=ranks)
        assert len(weights.experts) == 6
        for layer, bank in enumerate(weights.experts):
            mine = _unpacked(bank) if form == "packed" else bank.tensors
            for one, other in zip(mine, _expected(tensors, layer, rank, ranks), strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_q07_shares_add_up_to_the_whole(tiny, ranks, form):
    whole = _load(tiny, **FORMS[form]).experts
    shares = [_load(tiny, **FORMS[form], rank=r, ranks=ranks).experts for r in range(ranks)]
    for layer, bank in enumerate(whole):
        parts = [experts[layer] for experts in shares]
        if form == "packed":
            # fewer than 128 columns of w2 leave part of a folded scale unused
            weights = [x for bank in parts for x in (bank.w13, bank.w2)]
            assert sum(x.nbytes for x in weights) == bank.w13.nbytes + bank.w2.nbytes
            continue
        assert sum(x.nbytes for p in parts for x in p.tensors) == sum(
            x.nbytes for x in bank.tensors
        )
        gate = torch.cat([p.w13.chunk(2, dim=1)[0] for p in parts], dim=1)
        up = torch.cat([p.w13.chunk(2, dim=1)[1] for p in parts], dim=1)
        assert torch.equal(torch.cat((gate, up), dim=1), bank.w13)
        assert torch.equal(torch.cat([p.w2 for p in parts], dim=2), bank.w2)


def test_dequantized_slices_are_the_formulas(tiny):
    values = read_dequantized(tiny)
    bank = _load(tiny, dequantize=torch.float32, rank=3, ranks=4).experts[5]
    name = "layers.5.ffn.experts.7"
    rows = slice(3 * 64, 4 * 64)
    assert torch.equal(bank.w13[7, :64], values[f"{name}.w1.weight"][rows])
    assert torch.equal(bank.w13[7, 64:], values[f"{name}.w3.weight"][rows])
    assert torch.equal(bank.w2[7], values[f"{name}.w2.weight"][:, rows])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_expert_lies_in_one_row(tiny, form, ranks):
    weights = _load(tiny, **FORMS[form], ranks=ranks)
    for bank in weights.experts:
        assert bank.rows() is not None
        assert bank.w13.data_ptr() % 256 == 0
    if "dequantize" in FORMS[form] and FORMS[form]["dequantize"] is not None:
        # the product of one row reads columns
        assert weights.experts[0].w13.stride(1) == 1
    assert weights.host_memory.num_bytes == sum(b.rows().nbytes for b in weights.experts)


def test_a_rank_reads_its_rows_only(tiny, monkeypatch):
    read = {}

    def record(self, entry, into, *, skip=0):
        read[entry.name] = (skip, into.nbytes)
        real(self, entry, into, skip=skip)

    real = ShardFiles.read
    monkeypatch.setattr(ShardFiles, "read", record)
    _load(tiny, rank=2, ranks=4)
    for name, size in (("weight", 256 * 64), ("scale", 256 * 4)):
        for matrix in ("w1", "w3"):
            part = read[f"layers.4.ffn.experts.9.{matrix}.{name}"]
            assert part == (2 * size // 4, size // 4)


def test_foldable_scales_are_folded_everywhere(tiny):
    for bank in _load(tiny, pack=True).experts:
        assert bank.w13_scale.dtype == bank.w2_scale.dtype == torch.int32
        assert tuple(bank.w13_scale.shape) == (16, 1, 512)
        assert tuple(bank.w2_scale.shape) == (16, 2, 128)


@pytest.mark.parametrize("place", ["layers.0.ffn.experts.0", "layers.5.ffn.experts.15"])
@pytest.mark.parametrize("matrix", ["w1", "w3", "w2"])
@pytest.mark.parametrize("expert_load", ["serial", "parallel"])
def test_one_scale_that_does_not_fold_keeps_all_of_its_kind_as_bytes(
    damaged, stored, set_bytes, place, matrix, expert_load
):
    # codes 1 and 120 in one block: as a block of zeros has beside others
    set_bytes(damaged, f"{place}.{matrix}.scale", bytes([1, 120, 120, 120]))
    tensors = stored(damaged)
    weights = _load(damaged, pack=True, expert_load=expert_load, threads=3)
    for layer, bank in enumerate(weights.experts):
        kinds = (torch.uint8, torch.int32) if matrix != "w2" else (torch.int32, torch.uint8)
        assert (bank.w13_scale.dtype, bank.w2_scale.dtype) == kinds
        for one, other in zip(_unpacked(bank), _expected(tensors, layer, 0, 1), strict=True):
            assert torch.equal(one, other)
        assert bank.rows() is not None


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_bytes_in_the_room_of_folded_scales_of_a_narrow_slice(damaged, stored, set_bytes, rank):
    # 32 columns of w2 a rank: one scale a row, which folds only if it is not too small
    set_bytes(damaged, "layers.5.ffn.experts.15.w2.scale", bytes([1]))
    tensors = stored(damaged)
    for layer, bank in enumerate(_load(damaged, pack=True, rank=rank, ranks=8).experts):
        assert bank.w2_scale.dtype == (torch.int32 if rank else torch.uint8)
        for one, other in zip(_unpacked(bank), _expected(tensors, layer, rank, 8), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 3}, "ranks is 3, expected slices of 256 intermediate channels that are mult"),
        ({"ranks": 16}, "ranks is 16, expected slices of 256"),
        ({"ranks": 0}, "ranks is 0, expected"),
        ({"rank": 2, "ranks": 2}, "rank is 2, expected 0 to 1"),
        ({"rank": -1}, "rank is -1, expected an integer >= 0"),
        ({"rank": 0.5}, "rank is 0.5, expected an integer >= 0"),
        ({"rank": "0"}, "rank is '0', expected an integer >= 0"),
        ({"ranks": True}, "ranks is True, expected an integer >= 0"),
        ({"threads": float("inf")}, "threads is inf, expected an integer >= 0"),
        ({"expert_prefetch": None}, "expert_prefetch is None, expected an integer >= 0"),
        ({"extra_bytes": float("nan")}, "extra_bytes is nan, expected an integer >= 0"),
        ({"extra_bytes": -1}, "extra_bytes is -1, expected an integer >= 0"),
        ({"pack": "yes"}, "pack is 'yes', expected True or False"),
        ({"pack": True, "dequantize": torch.float32}, "pack is True, expected False for dequant"),
        ({"expert_load": "fast"}, "expert_load is 'fast', expected auto, serial or parallel"),
        ({"expert_prefetch": 0}, "expert_prefetch is 0, expected at least 1"),
        ({"threads": 0}, "threads is 0, expected None or at least 1"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_bad_arguments(tiny, monkeypatch, options, text):
    monkeypatch.setattr("ftruntime.checkpoint.loader.open_checkpoint", pytest.fail)
    with pytest.raises(ValueError, match=f"load_weights: {text}"):
        _load(tiny, **options)
