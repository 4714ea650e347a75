"""The contract: what may not get worse, and that each way of getting worse is named.

Five ways are compiled, as patched copies of one product of two matrices.

Mutants run, each noticed: a tolerance dropped, a tolerance of twice as much, modelled time unheld,
a count of matrix instructions held, another kind allowed, a kind beside others lost, none left,
narrow loads allowed, copies uncounted, fewer copies of less unrolled products refused, of no
products allowed, more copies refused, spills allowed where they were committed, the limit of shared
memory read off the contract, a case without committed figures passed, other launches passed, TP 2
and 4 committed, other ops' figures dropped, a file cut short by a write that fails, a half of one
left behind, cases that no op has kept silent, launches of a case uncounted, ignored entries told
where another serves or no held case asks, a damaged file untold, launches of held cases counted
among those left out, a case of several counted once.
"""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import triton
import triton.language as tl

from autotune import contract
from autotune.inspect import LaunchRow, launch_rows
from ftkernels import backend, config, registry
from ftkernels.offline import Compiled
from ftkernels.spec import KernelSpec
from ftkernels.testing import aot
from ftkernels.work import Work, even_loop
from tests.autotune.toy import ENTRY, HOST, PLAIN, TOY

needs_compiler = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)
M, N, K = 512, 512, 2048
CASE = {"name": "flash-product"}


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, out_ptr, limit, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a_ptrs = a_ptr + m[:, None] * K + start + k[None, :]
        if MASKED:
            # a bound on every element's own number
            a = tl.load(a_ptrs, mask=(start + k)[None, :] < limit, other=0.0)
        else:
            a = tl.load(a_ptrs)
        b = tl.load(b_ptr + n[None, :] * K + start + k[:, None])
        if WIDENED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


def _rows(
    *, block=(64, 64, 64), warps=4, stages=3, masked=False, widened=False, dtype=torch.bfloat16
) -> list[LaunchRow]:
    """Compile the product for sm_89 and read its figures."""
    a = torch.empty(M, K, dtype=dtype, device="meta")
    b = torch.empty(N, K, dtype=dtype, device="meta")
    out = torch.empty(M, N, dtype=torch.float32, device="meta")
    with aot.capture_launches(arch=89) as got:
        _product_kernel[(M // block[0], N // block[1])](
            a, b, out, 2047, N, K, BLOCK_M=block[0], BLOCK_N=block[1], BLOCK_K=block[2],
            MASKED=masked, WIDENED=widened, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def work(case, kernel, config) -> Work:
        blocks = M // config["BLOCK_M"] * (N // config["BLOCK_N"])
        tile = config["BLOCK_M"] * config["BLOCK_N"] * config["BLOCK_K"]
        return Work(blocks, (even_loop(M * N * K, blocks, K / config["BLOCK_K"], tile),))

    def product():
        raise NotImplementedError

    spec = KernelSpec(
        op=product, reference=product, cases=(), inputs=lambda case: ((), {}), work=work,
        bytes_moved=lambda case: 2 * K * (M + N) + 4 * M * N, flops=lambda case: 2 * M * N * K,
    )  # fmt: skip
    return launch_rows(spec, CASE, [Compiled(launch, None) for launch in got.launches])


@pytest.fixture(scope="module")
def sound():
    return _rows()


def _failing(now: list[LaunchRow], before: list[LaunchRow]) -> dict[str, contract.Change]:
    committed = [contract.entry(row) for row in before]
    found = contract.changes("product", CASE, now, committed)
    return {change.figure: change for change in found if change.fails}


@needs_compiler
def test_the_product_itself_holds(sound):
    assert _failing(_rows(), sound) == {}
    (row,) = sound
    assert row.figures.mma == "HMMA.16816.F32.BF16"
    assert row.figures.ceiling_tflops == pytest.approx(165, rel=0.02)
    assert row.figures.wide_share == 1


@needs_compiler
def test_a_mask_that_breaks_vector_loads_is_named(sound):
    failing = _failing(_rows(masked=True), sound)
    change = failing["wide_share"]
    assert str(change) == (
        f"product flash-product _product_kernel: wide_share was 1.0, is {change.now}"
    )
    assert change.now < 0.95
    assert "copies" in failing or "issue_per_kmac" in failing


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_widened_operand_is_named(dtype):
    """The products run at a half or a quarter of their rate, and nothing else says so."""
    failing = _failing(_rows(dtype=dtype, widened=True), _rows(dtype=dtype))
    kind = {torch.bfloat16: "HMMA.16816.F32.BF16", torch.float8_e4m3fn: "QMMA.16832.F32.E4M3.E4M3"}
    assert kind[dtype] in failing["mma"].committed
    assert kind[dtype] not in failing["mma"].now
    assert "mma was" in str(failing["mma"])


@needs_compiler
def test_one_stage_less_is_named(sound):
    change = _failing(_rows(stages=2), sound)["copies"]
    assert change.now < change.committed


@needs_compiler
def test_a_tile_that_spills_is_named():
    before = _rows(block=(128, 128, 32), warps=8)
    failing = _failing(_rows(block=(256, 256, 32), warps=8, stages=2), before)
    assert failing["spill_bytes"].committed == 0
    assert failing["spill_bytes"].now > 0


@needs_compiler
def test_a_tile_that_overflows_shared_memory_is_named(sound):
    failing = _failing(_rows(block=(128, 128, 64), warps=8, stages=5), sound)
    assert failing["shared_bytes"].now > 101376
    assert str(failing["shared_bytes"]).startswith(
        "product flash-product _product_kernel: shared_bytes was "
    )


def _entry(**changes: object) -> dict[str, object]:
    return {
        "kernel": "k", "registers": 100, "spill_bytes": 0, "shared_bytes": 50000,
        "warps_per_sm": 8, "mma": {"QMMA": 64}, "copies": 12, "wide_share": 0.9,
        "issue_per_kmac": 2.0, "ceiling_tflops": 300.0, "us": 10.0, "bound": "tensor", **changes,
    }  # fmt: skip


@pytest.fixture
def compared(monkeypatch):
    """Compares entries as if they were rows."""
    monkeypatch.setattr(contract, "entry", lambda row: row)

    def compare(now, before):
        return contract.changes("op", CASE, now, before)

    return compare


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({"registers": 255}, False), ({"warps_per_sm": 4}, False), ({"bound": "alu"}, False),
        ({"ceiling_tflops": 100.0}, False), ({"shared_bytes": 101376}, False),
        ({"shared_bytes": 101377}, True), ({"spill_bytes": 4}, True),
        ({"mma": {"QMMA": 65}}, False), ({"mma": {"QMMA": 16}}, False), ({"mma": {}}, True),
        ({"mma": {"HMMA": 128}}, True), ({"mma": {"QMMA": 64, "HMMA": 1}}, False),
        ({"copies": 11}, True), ({"copies": 13}, False), ({"copies": 0}, True),
        ({"wide_share": 0.895}, False), ({"wide_share": 0.88}, True), ({"wide_share": 1.0}, False),
        ({"issue_per_kmac": 2.09}, False), ({"issue_per_kmac": 2.11}, True),
        ({"issue_per_kmac": 1.0}, False), ({"issue_per_kmac": None}, True),
        ({"us": 10.49}, False), ({"us": 10.51}, True), ({"us": 5.0}, False),
        ({"us": math.inf}, True),
    ],
    ids=str,
)  # fmt: skip
def test_what_may_not_get_worse(change, fails, compared):
    (found,) = compared([_entry(**change)], [_entry()])
    assert found.fails == fails
    assert {found.figure: found.now} == change
    assert str(found).startswith(f"op flash-product k: {found.figure} was ")


@pytest.mark.parametrize(
    ("before", "after", "fails"),
    [
        # a quarter of the passes stands in the code
        (({"QMMA": 64}, 48), ({"QMMA": 16}, 24), False),
        (({"QMMA": 64}, 48), ({"QMMA": 16}, 12), False),
        (({"QMMA": 64}, 48), ({"QMMA": 16}, 11), True),
        (({"QMMA": 64, "HMMA": 64}, 48), ({"QMMA": 32, "HMMA": 32}, 24), False),
        (({"QMMA": 64, "HMMA": 64}, 48), ({"QMMA": 32, "HMMA": 64}, 24), True),
        (({"QMMA": 64}, 48), ({"QMMA": 128}, 49), False),
        (({"QMMA": 64}, 48), ({"QMMA": 128}, 47), True),
        (({"QMMA": 64}, 48), ({"QMMA": 1}, 0), True),
        (({}, 48), ({}, 47), True),
        (({}, 0), ({}, 0), False),
    ],
)  # fmt: skip
def test_products_unrolled_less_often_copy_less_often(before, after, fails, compared):
    old, new = (_entry(mma=mma, copies=copies) for mma, copies in (before, after))
    found = {change.figure: change.fails for change in compared([new], [old])}
    assert found.get("copies", False) == fails
    assert not found.get("mma", False)


def test_committed_spills_are_no_excuse(compared):
    for name, value in (("spill_bytes", 8), ("shared_bytes", 200_000)):
        (found,) = compared([_entry(**{name: value})], [_entry(**{name: value})])
        assert found.fails


def test_the_same_figures_are_no_change(compared):
    assert compared([_entry(), _entry()], [_entry(), _entry()]) == []
    assert compared([_entry(issue_per_kmac=None)], [_entry(issue_per_kmac=None)]) == []


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ([_entry()], []),
        ([_entry(), _entry()], [_entry()]),
        ([_entry(kernel="other")], [_entry()]),
    ],
)
def test_other_launches_fail(now, before, compared):
    (found,) = compared(now, before)
    assert found.fails
    assert found.figure == "launches"


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("flash-t1", True), ("flash-tp8-csa", True), ("flash-tp1-w2-t8", True),
        ("flash-tp2-csa", False), ("flash-tp4-t1", False), ("pro-tp8-m64", False),
        ("small", False), ("flash", True),
    ],
)  # fmt: skip
def test_which_cases_are_held(name, held):
    assert contract.is_held({"name": name}) == held


def test_a_case_without_a_name_is_not_held():
    assert not contract.is_held({"T": 3})


@needs_compiler
def test_what_is_written_is_read(sound, tmp_path):
    path = tmp_path / "contract.json"
    other = [dataclasses.replace(row, op="another") for row in sound]
    unheld = [dataclasses.replace(row, case={"name": "flash-tp4-x"}) for row in sound]
    assert contract.write([*sound, *other, *unheld], path) == 2
    read = contract.read(path)
    assert read.triton == triton.__version__
    assert sorted(read.launches) == [("another", "flash-product"), ("product", "flash-product")]
    assert read.changes(sound) == []
    assert read.changes([dataclasses.replace(sound[0], case={"name": "flash-new"})])[0].fails
    # one op alone leaves the others as they are
    assert contract.write(other * 2, path) == 3
    assert contract.read(path).of("product", CASE) == read.of("product", CASE)
    later = [dataclasses.replace(row, triton="9.9.9") for row in other]
    with pytest.raises(ValueError, match=r"^contract: triton is 9\.9\.9, expected "):
        contract.write(later, path)


def test_a_whole_write_leaves_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(contract, "entry", lambda row: _entry(ceiling_gb_per_s=1.0))
    path = tmp_path / "contract.json"
    row, other = _Row("rms_norm"), _Row("hadamard")
    assert contract.write([row, other], path) == 2
    assert contract.write([row], path) == 2
    path.write_text("damaged")
    with pytest.raises(ValueError, match=r"^contract: .* is unreadable"):
        contract.write([row], path)
    assert contract.write([row], path, others=False) == 1
    assert list(contract.read(path).launches) == [("rms_norm", "flash-x")]


@dataclasses.dataclass(frozen=True)
class _Row:
    op: str
    triton: str = "3.7.1"

    @property
    def case(self) -> dict[str, object]:
        return {"name": "flash-x"}


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    monkeypatch.setattr(contract, "entry", lambda row: _entry(ceiling_gb_per_s=1.0))
    path = tmp_path / "contract.json"
    contract.write([_Row("rms_norm")], path)
    before = path.read_text()

    def full(self, text, encoding):
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_text", full)
    with pytest.raises(OSError, match="No space"):
        contract.write([_Row("hadamard")], path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def _spec(name: str, *cases: str, launches: int = 1) -> KernelSpec:
    def op():
        raise NotImplementedError

    op.__name__ = name
    return KernelSpec(
        op=op, reference=op, cases=tuple({"name": case} for case in cases),
        inputs=lambda case: ((), {}), work=lambda *_: None, bytes_moved=lambda case: 0,
        flops=lambda case: 0, launches=lambda case: launches,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "number", "sentence"),
    [
        (("rms_norm", "flash-old"), 1, "case rms_norm flash-old has 1 launches, expected 0: "
         "ft-autotune inspect --write-contract rms_norm"),
        (("rms_norm", "flash-t1"), 0, "case rms_norm flash-t1 has 0 launches, expected 1: "
         "ft-autotune inspect --write-contract rms_norm"),
        (("rms_norm", "flash-t1"), 2, "case rms_norm flash-t1 has 2 launches, expected 1: "
         "ft-autotune inspect --write-contract rms_norm"),
        (("gone", "flash-t1"), 1, "case gone flash-t1 has 1 launches, expected 0: "
         "ft-autotune inspect --write-contract"),
    ],
)  # fmt: skip
def test_cases_that_are_left_over_or_missing_name_the_command(key, number, sentence):
    spec = _spec("rms_norm", "flash-t1", "flash-tp2-t1", "small")
    launches = {("rms_norm", "flash-t1"): [_entry()], ("hadamard", "flash-t1"): [_entry()]}
    assert contract.Contract("3.7.1", launches).strays([spec]) == []
    launches[key] = [_entry()] * number
    assert contract.Contract("3.7.1", launches).strays([spec]) == [f"contract: {sentence}"]


def test_launches_of_other_cases_are_left_out():
    specs = [
        _spec("rms_norm", "flash-t1", "flash-tp2-t1", "small"), _spec("linear", "pro", launches=3),
        dataclasses.replace(_spec("rope_tables", "small"), kernel=False),
    ]  # fmt: skip
    assert contract.num_left_out(specs) == 1 + 1 + 3
    assert contract.num_left_out(specs[:1]) == 2


def test_both_ways_out_are_named():
    assert contract.way_out("rms_norm") == (
        "contract: ft-autotune tune rms_norm when its source changed, "
        "ft-autotune inspect --write-contract rms_norm when the change is wanted"
    )


GPU = "nvidia_geforce_rtx_4090"
STALE = {**ENTRY, "source_hash": "0"}
SMALL = dataclasses.replace(TOY, cases=({"name": "small", "T": 300, "I": 128},))


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What is told of a spec's entries when `toy` has a file of such a text."""
    path = tmp_path / GPU / "toy.json"
    path.parent.mkdir()
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    monkeypatch.setattr(contract, "registry", lambda: [TOY, HOST])

    def told(spec, text):
        path.write_text(text)
        config.forget()
        return contract.ignored([spec])

    yield told
    config.forget()


def _file(*held: object) -> str:
    return json.dumps({"op": "toy", "gpu": GPU, "schema": config.SCHEMA, "entries": held})


@pytest.mark.filterwarnings("error")
def test_entries_that_lookups_ignore_are_told(told):
    sentence = (
        "contract: entries of toy are ignored, the figures are those of defaults: "
        "ft-autotune tune toy"
    )
    for text in (_file(ENTRY, STALE), _file(7), "damaged"):
        assert told(TOY, text) == sentence
        assert told(HOST, text) == sentence  # it looks up what `toy` does
        assert told(PLAIN, text) == ""
        assert told(SMALL, text) == ""  # not held
    assert told(TOY, _file(ENTRY)) == ""
    found = dataclasses.replace(TOY, cases=TOY.cases[2:3])
    assert told(found, _file(ENTRY, STALE)) == ""  # what it looks up has an entry


def test_the_shipped_contract_has_the_cases_that_are_held():
    strays = contract.read().strays(registry())
    assert not strays, "\n".join(strays)


def test_the_shipped_contract_is_of_the_pinned_triton():
    committed = contract.read()
    assert committed.triton.startswith("3.7.")
    assert len(committed.launches) > 200
    assert all(launch["spill_bytes"] == 0 for x in committed.launches.values() for launch in x)
