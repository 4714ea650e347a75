"""Captured launches: what is counted, what is not, and what a compiled kernel reports.

Mutants tried: counting views, counting an empty grid, two launches for an autotuned kernel, patches
left behind, spills unread, `fits` comparing with the SM instead of the block.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from ftkernels import backend, target
from ftkernels.testing import aot, count_launches, sass

pytestmark = pytest.mark.skipif(
    backend.interpreted(), reason="offline compiles need a process without TRITON_INTERPRET"
)


@pytest.fixture(autouse=True)
def _poison():
    """No poison here: filling an allocation would count as an operator."""
    return


@triton.jit
def _scale_kernel(x_ptr, y_ptr, n, s, BLOCK: tl.constexpr, ADD: tl.constexpr = 0):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, x * s + ADD, mask=offs < n)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, num_k, BLOCK: tl.constexpr):
    m, n = tl.arange(0, 64), tl.arange(0, 64)
    k = tl.arange(0, BLOCK)
    acc = tl.zeros((64, 64), dtype=tl.float32)
    for start in range(0, num_k, BLOCK):
        a = tl.load(a_ptr + m[:, None] * num_k + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * 64 + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + m[:, None] * 64 + n[None, :], acc)


@pytest.fixture(scope="module")
def tuned():
    configs = [
        triton.Config({"BLOCK": block}, num_warps=num_warps)
        for block, num_warps in ((256, 2), (512, 4))
    ]
    return triton.autotune(configs, key=["n"])(_scale_kernel)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("device", "guard"),
    [
        ("cpu", contextlib.nullcontext),
        ("meta", contextlib.nullcontext),
        ("meta", torch.inference_mode),
    ],
    ids=["cpu", "meta", "inference-mode"],
)
def test_counts_launches_and_operators(device, guard, tuned, group):
    with guard(), aot.capture_launches() as got:
        x, y = torch.empty(64, 64, device=device), torch.empty(64, 64, device=device)
        for _ in range(5):
            grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)  # noqa: E731
            _scale_kernel[grid](x, y, x.numel(), 3.0, BLOCK=1024, num_warps=8)
        _scale_kernel[(2, 3)](x, y, 4096, 3.0, 512, ADD=1)
        _scale_kernel[(0,)](x, y, 4096, 3.0, 512, ADD=1)
        _scale_kernel.warmup(x, y, 4096, 3.0, 512, ADD=1, grid=(1,))
        tuned[lambda meta: (4096 // meta["BLOCK"],)](x, y, 4096, 3.0)
        x.view(-1)[:8].unsqueeze_(0).t().reshape(2, 4).detach(), x.contiguous()
        x.zero_()
        x.fill_(2.0)
        y.copy_(x)
        x @ y
        x.t().contiguous()
        x.to(torch.bfloat16)
        torch.zeros(3, device=device)
        dist.all_reduce(x)
    names = [name.split(".")[1] for name in got.torch_ops]
    assert names == ["zero_", "fill_", "copy_", "mm", "clone", "_to_copy", "zeros", "allreduce_"]
    launches = [(x.grid, x.config["BLOCK"], x.config["num_warps"]) for x in got.launches]
    assert launches == [
        *[((4, 1, 1), 1024, 8)] * 5, ((2, 3, 1), 512, 4), ((16, 1, 1), 256, 2),
    ]  # fmt: skip
    assert [got.launches[i].config["ADD"] for i in (0, 5)] == [0, 1]
    assert got.launches[0].name == "_scale_kernel"
    assert got.launches[0].report is got.launches[4].report
    assert len(got) == 4  # both configs of the tuned kernel, and the two plain ones
    assert got.num_nodes == 7 + 8
    for report in got:
        assert report.check() is report
        assert report.ld128


def test_pick_leaves_configs_out(tuned):
    with aot.capture_launches(pick=lambda configs: configs[1:]) as got:
        x = torch.empty(4096, device="meta")
        tuned[lambda meta: (4096 // meta["BLOCK"],)](x, x, 4096, 3.0)
    assert [(x.grid, x.config["BLOCK"]) for x in got.launches] == [((8, 1, 1), 512)]
    assert len(got) == 1


def test_custom_operators_count_as_what_they_call():
    library = torch.library.Library("ftkernels_test_aot", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.define("box(Tensor x) -> Tensor")

    def twice(x):
        y = torch.empty_like(x)
        _scale_kernel[(4,)](x, y, x.numel(), 2.0, BLOCK=1024)
        return y.add_(1)

    library.impl("twice", twice, "CPU")
    library.impl("box", torch.empty_like, "CPU")
    ops = torch.ops.ftkernels_test_aot
    with aot.capture_launches() as got:
        x = torch.empty(4096)
        ops.twice(x)
        ops.box(x)
    assert [launch.name for launch in got.launches] == ["_scale_kernel"]
    assert got.torch_ops == ["aten.add_.Tensor", "ftkernels_test_aot.box.default"]


def test_nothing_is_left_behind():
    before = JITFunction.run, Autotuner.run, driver._active
    with pytest.raises(KeyError), aot.capture_launches() as got:
        raise KeyError
    assert (JITFunction.run, Autotuner.run, driver._active) == before
    torch.zeros(1).add_(1)
    assert got.torch_ops == []
    assert not got


def test_captured_kernels_are_counted_as_launches_too():
    x = torch.empty(4096, device="meta")
    with aot.capture_launches() as got, count_launches() as names:
        _scale_kernel[(4,)](x, x, 4096, 2.0, BLOCK=1024)
    assert names == ["_scale_kernel"] == [launch.name for launch in got.launches]


def test_unknown_arch_is_refused():
    with pytest.raises(ValueError, match="arch is 75, expected one of"), aot.capture_launches(75):
        pass


def test_compile_for_aligned_and_not():
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "s": "fp32"}
    aligned = aot.compile_for(_scale_kernel, signature, {"BLOCK": 1024, "ADD": 0})
    loose = aot.compile_for(
        _scale_kernel, signature, {"BLOCK": 1024, "ADD": 0}, unaligned=("x_ptr", "n")
    )
    assert (aligned.num_warps, aligned.num_stages, aligned.arch) == (4, 2, 89)
    assert aligned.ld128 == aligned.ldg == 2  # 1024 floats over 128 lanes, four at a time
    assert loose.ld128 == 0
    assert loose.ldg == 8
    assert aligned.regs > 0
    assert aligned.spill_bytes == aligned.spill_loads == 0


@pytest.mark.parametrize(
    ("dtype", "kind", "block"),
    [("*bf16", "HMMA.16816.F32.BF16", 64), ("*fp8e4nv", "QMMA.16832.F32.E4M3.E4M3", 64)],
)
def test_dot_report(dtype, kind, block):
    signature = {"a_ptr": dtype, "b_ptr": dtype, "out_ptr": "*fp32", "num_k": "i32"}
    report = aot.compile_for(_dot_kernel, signature, {"BLOCK": block}, num_stages=3).check()
    assert report.mma > 0
    assert report.cp_async > 0
    assert report.shared > 0
    assert sass.mma_kind(report.sass) == kind
    hot = sass.hot_loop(report.sass)
    assert hot[kind] > 0
    assert hot.total() < sass.opcodes(report.sass).total()


def test_spills_and_missing_shared_memory_are_told():
    signature = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32", "num_k": "i32"}
    spilling = aot.compile_for(_dot_kernel, signature, {"BLOCK": 64}, maxnreg=32)
    assert spilling.regs <= 32
    assert spilling.spill_bytes > 0
    with pytest.raises(AssertionError, match="local loads/stores"):
        spilling.check()
    large = aot.compile_for(_dot_kernel, signature, {"BLOCK": 128}, num_stages=6)
    assert large.shared > target.of_arch(89).shared_bytes_per_block
    assert not large.fits
    with pytest.raises(AssertionError, match="B shared > 101376 on sm_89"):
        large.check()


def test_occupancy_by_hand():
    def blocks(regs, shared, num_warps):
        return aot.Report("k", 89, num_warps, 1, shared, regs, 0, 0.0).blocks_per_sm

    assert blocks(regs=32, shared=0, num_warps=4) == 12  # 48 warps an SM
    assert blocks(regs=128, shared=0, num_warps=4) == 4  # 65536 registers
    assert blocks(regs=129, shared=0, num_warps=4) == 3  # a warp takes 4352, rounded up
    assert blocks(regs=32, shared=33000, num_warps=4) == 3  # 34024 bytes each of 102400
    assert blocks(regs=32, shared=25000, num_warps=4) == 3  # 26024, where 25000 alone would go in 4
    assert blocks(regs=16, shared=0, num_warps=1) == 24  # at most 24 blocks


LOOPS = """
.text.k:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R2, [R4.64] ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
        /*0040*/                   FFMA R1, R2, R3, R4 ;
        /*0050*/              @!P1 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
"""


def test_hot_loop_by_hand():
    assert sass.hot_loop(LOOPS) == {"HMMA.16816.F32.BF16": 1, "BRA": 1}
    without = LOOPS.replace("HMMA.16816.F32.BF16", "IADD3")
    assert sass.hot_loop(without) == {"LDG.E": 1, "FFMA": 1, "BRA": 1}
    assert sass.mma_kind(without) is None
    straight = "\n".join(line for line in LOOPS.splitlines() if "BRA" not in line)
    assert sass.hot_loop(straight).total() == 5
    assert sass.opcodes(LOOPS)["BRA"] == 3
