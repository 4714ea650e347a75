"""What the tuner may try changes no bit of a result, so that no entry can.

The interpreter shows how tiles order a sum, not how threads do: ops whose sums run across the
threads of a block have no candidates with other numbers of warps, and some have none at all.

Mutants tried: other tiles of rows in `mla_prefill`, one query in place of sixteen rows of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch

from ftkernels import config, registry, target
from ftkernels.spec import Case, KernelSpec
from ftkernels.testing import nan_poison

TRIED = 3
SLOW = {("index_select", "small-fp4"), ("index_select", "small-exact")}
# shapes with candidates, where those of the registry are too small for any
WIDE: dict[str, Case] = {
    "dequantize_fp8": {"N": 3, "K": 600, "group_n": 1, "group_k": 128},
    "dequantize_fp4": {"N": 3, "K": 608, "group": 32},
    "embed": {"T": 5, "V": 11, "C": 600, "hc": 4},
    "swiglu_clamp": {"T": 7, "I": 600},
    "moe_combine": {"T": 5, "topk": 4, "C": 600},
    "hc_post": {"T": 3, "hc": 4, "C": 600},
    "fp8_linear": {"T": 70, "N": 200, "K": 256},
    "grouped_linear": {"T": 70, "G": 2, "R": 100, "K": 256},
}
# one config serves them: which threads share a sum would change with another
UNTUNED = (
    "rms_norm", "store_kv", "route_topk", "route_hash", "hc_pre", "hc_post_pre", "hc_head",
    "top_logprobs",
)  # fmt: skip
SPECS = {spec.name: spec for spec in registry()}


def _cases() -> Iterator[object]:
    for spec in SPECS.values():
        named = [c for c in spec.cases if str(c.get("name")).startswith(("small", "checkpoint"))]
        for case in [*named, *([WIDE[spec.name]] if spec.name in WIDE else [])]:
            name = case.get("name", "wide")
            if spec.kernel and (spec.name, name) not in SLOW:
                yield pytest.param(spec, case, id=f"{spec.name}-{name}")


def _bits(spec: KernelSpec, case: Case, device: str) -> list[torch.Tensor]:
    """Everything that a call returns or changes, as bytes."""
    with nan_poison():  # what a builder or an op leaves unwritten is the same twice
        args, kwargs = spec.inputs(case, device=device, seed=1)
        result = spec.op(*args, **kwargs)
    leaves = torch.utils._pytree.tree_leaves((result, args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.numel()]
    return [x.detach().cpu().contiguous().view(torch.uint8) for x in tensors]


@pytest.mark.parametrize(("spec", "case"), list(_cases()))
def test_candidates_give_the_bits_of_the_default(spec: KernelSpec, case: Case, device, lane):
    if lane == "reference":
        pytest.skip("no kernel runs in the reference lane")
    asked: list[config.Found] = []
    with config.watch(asked.append):
        expected = _bits(spec, case, device)
    keys = {config.entry_key(x.key): x.key for x in asked if x.op == spec.name}
    for key in keys.values():
        assert spec.default is not None
        records = [x for x in spec.candidates(key, target.of_arch(89)) if x != spec.default(key)]
        for record in records[:: max(1, -(-len(records) // TRIED))]:
            with config.pin(spec.name, record):
                got = _bits(spec, case, device)
            assert len(got) == len(expected)
            for mine, other in zip(got, expected, strict=True):
                assert torch.equal(mine, other), f"{record}: other bits than the default"


@pytest.mark.parametrize("name", UNTUNED)
def test_sums_across_threads_are_not_tuned(name):
    spec = SPECS[name]
    assert [x for case in spec.cases for x in spec.candidates(case, target.of_arch(89))] == []


@pytest.mark.parametrize("name", ["compress_kv", "append_kv", "index_select"])
def test_only_stages_are_tuned_where_warps_share_a_sum(name):
    spec = SPECS[name]
    for key in ({"c": 512, "ratio": 128}, {"Hi": 64, "Di": 128, "bits": 16, "topk": 512}):
        if ("c" in key) == (name == "index_select"):
            continue
        assert spec.default is not None
        default = vars(spec.default(key))
        for record in spec.candidates(key, target.of_arch(89)):
            changed = [f.name for f in fields(record) if getattr(record, f.name) != default[f.name]]  # type: ignore[arg-type]
            assert changed in ([], ["stages"], ["num_stages"])
