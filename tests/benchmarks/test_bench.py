"""The bench of all ops: its table without a card, and on a stand-in for one.

The stand-in says how long each recorded call takes; rates and shares are worked out from that.

Mutants tried: cases of TP 2 timed, ops of one name only in a row, the budget never asked, inputs of
any size taken, one set of inputs for all calls, copies that are views, shares of the FP8 ceiling
for a bf16 product and the reverse, a slow reference timed five times, an error that ends the table,
a failing graph that ends it, other values timed, a lost card's rows dropped, exit code 0 with an
error, a copy's bytes counted once, the reference measured, an unknown backend let through.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench_kernels import bench, card, committed, others
from bench_kernels.card import Bench, Ceilings, measured_ceilings, problems
from bench_kernels.committed import Committed
from ftkernels import backend, registry
from ftkernels.norm.rms_norm import SPEC as NORM
from ftkernels.norm.rms_norm import rms_norm

ROOT = Path(__file__).parents[2]
SMALL = {"T": 4, "D": 64, "weight": True, "residual": False}
CEILINGS = Ceilings(copy_gb_per_s=1000.0, bf16_tflops=100.0, fp8_tflops=200.0)
NO_FIGURES = Committed("3.7.1", {})


class FakeCard:
    """Every call takes 2 us in a graph and 8 by events, references as long as they are told to."""

    device, l2_bytes = "cpu", 4096

    def __init__(self, *, graphs: bool = True, eager_ms: float = 0.008) -> None:
        self.graphs, self.eager_ms = graphs, eager_ms
        self.recorded: list[list[object]] = []
        self.replays = 0

    def graph(self, calls):
        if not self.graphs:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self._replay(calls, 0.002)

    def eager(self, calls):
        return self._replay(calls, self.eager_ms)

    def _replay(self, calls, each_ms):
        self.recorded.append([call() for call in calls])

        def replay():
            self.replays += 1
            return each_ms * len(calls)

        return replay


@pytest.fixture(autouse=True)
def _no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _bench(fake=None, **changed) -> Bench:
    settings = {
        "card": fake or FakeCard(), "ceilings": CEILINGS, "figures": NO_FIGURES, "seconds": 60.0,
        "largest_bytes": 1e9, "references": False, "packages": {},
    }  # fmt: skip
    return Bench(**{**settings, **changed})


def _spec(**changed):
    return dataclasses.replace(NORM, cases=({"name": "flash-x", **SMALL},), **changed)


def _rows(built, *specs):
    return list(built.rows([(spec, case) for spec in specs for case in spec.cases]))


def test_rates_are_useful_work_over_time():
    spec = _spec(bytes_moved=lambda case: 400_000, flops=lambda case: 20_000_000)
    (row,) = _rows(_bench(), spec)
    assert (row["us"], row["timed"]) == (pytest.approx(2.0), "graph")
    assert row["gb_per_s"] == pytest.approx(200.0)  # 400 kB in 2 us
    assert row["copy_share"] == pytest.approx(0.2)
    assert row["tflops"] == pytest.approx(10.0)  # 20 MFLOP in 2 us
    assert row["gemm_share"] == pytest.approx(0.1)
    assert "reference_ratio" not in row


@pytest.mark.parametrize(
    ("mma", "share"),
    [({"QMMA.16832.F32.E4M3.E4M3": 8}, 0.05), ({"HMMA.16816.F32.BF16": 8}, 0.1), ({}, 0.1)],
    ids=str,
)
def test_products_are_held_against_their_own_ceiling(mma, share):
    figures = Committed("3.7.1", {("rms_norm", "flash-x"): [{"mma": mma}]})
    spec = _spec(flops=lambda case: 20_000_000)
    (row,) = _rows(_bench(figures=figures), spec)
    assert row["gemm_share"] == pytest.approx(share)
    other = Committed("3.7.1", {("rms_norm", "flash-tp8"): [{"mma": mma}]})
    (row,) = _rows(_bench(figures=other), spec)
    assert row["gemm_share"] == pytest.approx(share)


def test_without_fp8_products_shares_are_of_bf16():
    assert Ceilings(1.0, 100.0, None).tflops(fp8=True) == 100.0
    assert CEILINGS.tflops(fp8=True) == 200.0
    assert CEILINGS.tflops(fp8=False) == 100.0


def test_inputs_are_copies_in_rotation():
    """640 bytes a set and 4096 of cache: 13 sets, alike and apart."""
    fake = FakeCard()
    seen = []
    spec = _spec(op=lambda x, w, *, residual: seen.append(x) or x)
    _rows(_bench(fake), spec)
    assert len(seen) == 13
    assert len({x.data_ptr() for x in seen}) == 13
    assert all(torch.equal(x, seen[0]) for x in seen)


def test_copies_keep_their_strides():
    rows = torch.arange(40.0).view(4, 10)[:, :6]
    (copied,), _ = card._copy(((rows,), {}))
    assert copied.stride() == rows.stride()
    assert torch.equal(copied, rows)
    assert copied.data_ptr() != rows.data_ptr()
    wide = torch.ones(1, 3).expand(5, 3)
    (copied,), _ = card._copy(((wide,), {}))
    assert torch.equal(copied, wide)


def test_what_no_graph_holds_is_timed_by_events():
    (row,) = _rows(_bench(FakeCard(graphs=False)), _spec())
    assert (row["us"], row["timed"]) == (pytest.approx(8.0), "events")


def test_a_reference_is_a_ratio():
    fake = FakeCard()
    (row,) = _rows(_bench(fake, references=True), _spec())
    assert row["reference_ratio"] == pytest.approx(4.0)
    slow = FakeCard(eager_ms=60.0)
    (row,) = _rows(_bench(slow, references=True), _spec())
    assert row["reference_ratio"] == pytest.approx(30_000)
    assert fake.replays - slow.replays == 3 + 5  # warm-up and replays that the slow one is spared


def test_a_reference_that_does_not_run_is_no_ratio():
    def fails(*args, **kwargs):
        raise RuntimeError("CUDA out of memory")

    (row,) = _rows(_bench(references=True), _spec(reference=fails))
    assert row["reference_ratio"] is None
    assert row["us"] == pytest.approx(2.0)


def test_an_error_is_a_row():
    def fails(*args, **kwargs):
        raise ValueError("rms_norm: x is 3, expected 4\nmore")

    first, second = _rows(_bench(), _spec(op=fails), _spec())
    assert first["error"] == "ValueError: rms_norm: x is 3, expected 4"
    assert second["us"] == pytest.approx(2.0)


def test_the_budget_leaves_cases_out():
    clock = itertools.count(0.0, 25.0)
    spec = _spec()
    rows = list(_bench().rows([(spec, spec.cases[0])] * 4, now=lambda: next(clock)))
    # 25, 50, and 75 s after the begin; each case asks once
    assert ["left_out" in row for row in rows] == [False, False, True, True]
    assert rows[2] == {"op": "rms_norm", "case": "flash-x", "left_out": "after 60 s"}


def test_large_inputs_are_left_out_unbuilt():
    built = []

    def inputs(case, *, device, seed):
        built.append(device)
        return NORM.inputs(case, device=device, seed=seed)

    (row,) = _rows(_bench(largest_bytes=600), _spec(inputs=inputs))
    assert row["left_out"] == "inputs above 6e-07 GB"
    assert built == ["meta"]
    (row,) = _rows(_bench(largest_bytes=640), _spec())
    assert "us" in row


def test_important_ops_come_first_a_case_of_each():
    work = problems(registry(), [])
    names = [(spec.name, case["name"]) for spec, case in work]
    assert [name for name, _ in names[:3]] == list(card.IMPORTANT[:3])
    ops = {spec.name for spec in registry() if spec.kernel}
    assert {name for name, _ in names[: len(ops)]} == ops
    assert len(set(names)) == len(names)
    assert all(case.startswith("flash") for _, case in names)
    assert not any("tp2" in case or "tp4" in case for _, case in names)
    assert ("mla_decode", "flash-tp1-csa") in names
    assert {name for name, _ in names[:60]} >= set(card.IMPORTANT)
    assert {spec.name for spec, _ in problems(registry(), ["hadamard"])} == {"hadamard"}


def test_ceilings_are_measured():
    fake = FakeCard()
    found = measured_ceilings(fake, size=64, copy_bytes=1 << 20)
    assert found.copy_gb_per_s == pytest.approx(2 * 2**20 / 2e-6 / 1e9)
    assert found.bf16_tflops == pytest.approx(2 * 64**3 / 2e-6 / 1e12)
    assert found.fp8_tflops in (None, pytest.approx(found.bf16_tflops))


def _package(monkeypatch, function):
    monkeypatch.setattr(others, "_module", lambda name: SimpleNamespace(rmsnorm=function))


def test_other_engines_are_ratios_where_their_values_are_ours(monkeypatch):
    _package(monkeypatch, lambda x, weight, eps: rms_norm(x, weight, eps=eps))
    (row,) = _rows(_bench(packages={"flashinfer": True}), _spec())
    assert row["others"] == {"flashinfer": pytest.approx(1.0)}
    _package(monkeypatch, lambda x, weight, eps: rms_norm(x, weight, eps=eps) * 1.2)
    (row,) = _rows(_bench(packages={"flashinfer": True}), _spec())
    assert row["others"] == {"flashinfer": "other values"}
    (row,) = _rows(_bench(packages={"flashinfer": False}), _spec())
    assert row["others"] == {}


def test_another_engine_that_fails_is_said(monkeypatch):
    def fails(x, weight, eps):
        raise NotImplementedError("no kernel for this card")

    _package(monkeypatch, fails)
    (row,) = _rows(_bench(packages={"sgl_kernel": True}), _spec())
    assert row["others"] == {"sgl-kernel": "NotImplementedError: no kernel for this card"}


def test_adapters_convert_scales_and_pass_what_they_cannot():
    from ftkernels import fp8_linear, quantize_fp8

    x, weight = torch.randn(3, 256), torch.randn(128, 256).to(torch.float8_e4m3fn)
    rows, scale = quantize_fp8(x), torch.full((1, 2), 120, dtype=torch.uint8)

    def product(a, b, a_scale, b_scale, block, output_dtype):
        wide = b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        out = (a.float() * a_scale.repeat_interleave(128, 1)) @ (b.float() * wide).T
        return out.to(output_dtype)

    module = SimpleNamespace(w8a8_block_fp8_matmul=product)
    call = others._block_product(module, (rows, weight, scale), {})
    assert call is not None
    torch.testing.assert_close(call(), fp8_linear(rows, weight, scale), rtol=0.02, atol=0.02)
    assert others._block_product(module, (x, weight, scale), {}) is None
    assert others._norm("rmsnorm")(module, (x, None), {}) is None
    assert others._norm_into(module, (x, x), {"residual": x}) is None


def test_absent_engines_are_absent():
    assert others.installed() == dict.fromkeys(others.ENGINES, False)


def test_named_ops_have_no_step_unasked_for(capsys):
    assert bench.main(["rms_norm"]) == 0
    told = capsys.readouterr().out
    assert "rms_norm  flash-t3456" in told
    assert "chunk of 3456" not in told
    assert bench.main(["rms_norm", "--json"]) == 0
    assert "roofline" not in json.loads(capsys.readouterr().out)


def test_without_a_card_the_static_model_speaks(capsys):
    assert bench.main(["rms_norm", "--step"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("no card here: the static model of nvidia_geforce_rtx_4090")
    assert "modelled, nothing was timed" in told
    assert "rms_norm  flash-t3456" in told
    assert "chunk of 3456" in told
    assert "mla_decode" not in told


def test_the_static_table_as_json(capsys):
    assert bench.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["source"] == report["roofline"]["source"] == "modelled"
    held = {(x["op"], x["case"]) for x in report["rows"]}
    assert held == set(committed.read().launches)
    assert all(x["modelled_us"] > 0 and x["ceiling_gb_per_s"] > 0 for x in report["rows"])
    row = next(x for x in report["rows"] if (x["op"], x["case"]) == ("mla_decode", "flash-tp8-csa"))
    assert row["useful_gflop"] == pytest.approx(4 * 8 * 512 * 640 / 1e9)
    assert row["ceiling_tflops"] > 100
    assert len(report["roofline"]["steps"]) == 3


def test_on_a_card_the_table_says_what_is_missing(monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise ValueError("refused")

    specs = (
        _spec(), _spec(op=fails),
        dataclasses.replace(NORM, cases=({"name": "flash-big", **SMALL, "D": 100_000},)),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(bench, "CudaTimer", FakeCard)
    monkeypatch.setattr(bench, "registry", lambda: specs)
    monkeypatch.setattr(card, "measured_ceilings", lambda timer: CEILINGS)
    assert bench.main(["--largest-gb", "0.0001"]) == 1
    told = capsys.readouterr().out
    assert told.startswith("measured on NVIDIA GeForce RTX 4090, torch ")
    assert "copy 1000 GB/s, bf16 product 100 TFLOP/s, FP8 product 200 TFLOP/s" in told
    assert "not installed: flashinfer, vllm, sgl_kernel, sglang" in told
    assert "failed: fails flash-x: ValueError: refused" in told
    assert "left out, inputs above 0.0001 GB: 1 cases: rms_norm flash-big" in told

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert bench.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["lost"].startswith("CUDA error: an illegal memory access")
    assert [row["case"] for row in report["rows"]] == ["flash-x"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("mla", "OP is mla, expected the name of an op with kernels"),
     ("a\tb", "OP is 'a\\tb', expected the name of an op with kernels"),
     ("--seconds soon", "--seconds is soon, expected a number from 0 to 86400"),
     ("--largest-gb -1", "--largest-gb is -1, expected a number from 0 to 1024")],
)  # fmt: skip
def test_a_bad_command_line_is_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(words.split(" "))
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", sentence + "\n")


def test_a_process_without_kernels_has_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "always_reference", lambda: True)
    assert bench.main(["hadamard"]) == 1
    sentence = "FTKERNELS_BACKEND is 'reference', which runs no kernels, expected it unset\n"
    assert capsys.readouterr() == ("", sentence)


def test_an_unknown_backend_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "bench_kernels"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "FTKERNELS_BACKEND": "cuda"}, check=False,
    )  # fmt: skip
    told = "FTKERNELS_BACKEND is 'cuda', expected 'reference' or unset\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)


def test_it_runs_from_the_source_tree_with_torch_and_triton_only():
    blocked = ("rich", "click", "matplotlib", "safetensors", "ftruntime", "autotune")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "from bench_kernels import bench; sys.exit(bench.main(['hadamard']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "hadamard" in done.stdout
