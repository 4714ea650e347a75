"""Compile Triton kernels for a GPU this machine does not have, and read off registers, spills, shared memory.

Needs a process WITHOUT TRITON_INTERPRET=1. Works with Triton 3.6 - 3.9.

  compile_for(fn, signature, constexprs, num_warps, num_stages, arch=89) -> Report
  with capture_launches(arch=89) as got: my_op(tensors on the meta device)
      -> got: list[Report], one per distinct compiled kernel; got.launches: every launch in order; got.torch_ops: every
         torch operator that would run on the device, in order; got.num_nodes: how many of both

`python aot.py` runs the self-test.
"""
import contextlib, dataclasses, hashlib, json, os, re, subprocess, tempfile, time
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

SMEM_MAX = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}   # opt-in bytes per block
REGS_PER_SM, WARPS_PER_SM = 65536, {80: 64, 86: 48, 89: 48, 90: 64, 120: 48}
SMEM_PER_SM = {80: 167936, 86: 102400, 89: 102400, 90: 233472, 120: 102400}


@dataclasses.dataclass
class Report:
    name: str
    arch: int
    num_warps: int
    num_stages: int
    shared: int
    regs: int
    spill_loads: int      # LDL in SASS (static count)
    spill_stores: int     # STL in SASS
    stack: int            # bytes of local memory per thread
    mma: int              # HMMA/QMMA/IMMA/HGMMA in SASS
    ld128: int            # LDG.E.128
    ldg: int              # all LDG
    cp_async: int         # LDGSTS (all); cp.async of 16 bytes = LDGSTS.E.BYPASS.128
    blocks_per_sm: int
    seconds: float
    constexprs: dict = dataclasses.field(default_factory=dict)
    ptx: str = dataclasses.field(default="", repr=False)
    sass: str = dataclasses.field(default="", repr=False)

    @property
    def fits(self): return self.shared <= SMEM_MAX[self.arch]

    def check(self, max_spills=0):
        assert self.fits, f"{self.name}: {self.shared} B shared > {SMEM_MAX[self.arch]} on sm_{self.arch}"
        n = self.spill_loads + self.spill_stores
        assert n <= max_spills, f"{self.name}: {n} local loads/stores in SASS ({self.stack} B stack), {self.regs} regs"
        return self


def _tool(name):
    t = getattr(triton.knobs.nvidia, name)          # bundled with the triton wheel
    return getattr(t, "path", t)


def _report(c, arch, seconds, constexprs=None):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(c.asm["cubin"]); f.flush()
        res = subprocess.run([_tool("cuobjdump"), "-res-usage", f.name], capture_output=True, text=True).stdout
        sass = subprocess.run([_tool("nvdisasm"), "-c", f.name], capture_output=True, text=True).stdout
    m = re.search(r"REG:(\d+) STACK:(\d+)", res)
    regs, stack = (int(m[1]), int(m[2])) if m else (-1, -1)
    md = c.metadata
    n = lambda p: len(re.findall(p, sass))
    regs_block = -(-max(regs, 1) * 32 // 256) * 256 * md.num_warps      # allocated per warp, in 256s
    occ = min(24 if arch in (86, 89, 120) else 32, REGS_PER_SM // regs_block, WARPS_PER_SM[arch] // md.num_warps,
              SMEM_PER_SM[arch] // (md.shared + 1024))
    return Report(md.name, arch, md.num_warps, md.num_stages, md.shared, regs, n(r"\bLDL[. ]"), n(r"\bSTL[. ]"), stack,
                  n(r"\b(?:HMMA|QMMA|IMMA|HGMMA|QGMMA|OMMA)\b"), n(r"\bLDG\.E\.[\w.]*128\b"), n(r"\bLDG\b"), n(r"\bLDGSTS\b"),
                  occ, seconds, dict(constexprs or {}), c.asm["ptx"], sass)


def jit_of(fn):
    """The JITFunction below @triton.autotune / @triton.heuristics."""
    while not isinstance(fn, JITFunction):
        fn = fn.fn
    return fn


def compile_for(fn, signature, constexprs, num_warps=4, num_stages=2, arch=89, unaligned=(), **options):
    """signature: {'x': '*bf16', 'n': 'i32', ...} for the run-time arguments only, in any order.
    Pointers and i32/i64 scalars get the divisible-by-16 hint the launcher would give, unless named in `unaligned`."""
    fn = jit_of(fn)
    sig, attrs, cst = {}, {}, {}
    for i, p in enumerate(fn.arg_names):
        if p in constexprs:
            sig[p], cst[p] = "constexpr", constexprs[p]
        else:
            sig[p] = signature[p]
            if p not in unaligned and (sig[p][0] == "*" or sig[p] in ("i32", "i64")):
                attrs[(i,)] = [["tt.divisibility", 16]]
    t = time.time()
    c = triton.compile(ASTSource(fn=fn, signature=sig, constexprs=cst, attrs=attrs), target=GPUTarget("cuda", arch, 32),
                       options=dict(num_warps=num_warps, num_stages=num_stages, **options))
    return _report(c, arch, time.time() - t, constexprs)


class FakeCuda:
    """Enough of a driver for JITFunction.run(warmup=True): it names a target and launches nothing."""
    def __init__(self, arch): self.arch = arch
    def get_current_device(self): return 1000 + self.arch        # own slot in JITFunction.device_caches
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", self.arch, 32)
    def get_active_torch_device(self): import torch; return torch.device("cpu")


@dataclasses.dataclass
class Launch:
    name: str
    grid: tuple           # always three numbers
    config: dict          # num_warps, num_stages and the constexprs
    report: Report


class Captured(list):
    """Reports of the distinct kernels, and the nodes one run would put into a CUDA graph (at least: one torch operator,
    a sort for example, may be several kernels)."""
    def __init__(self): super().__init__(); self.launches, self.torch_ops = [], []
    @property
    def num_nodes(self): return len(self.launches) + len(self.torch_ops)


TORCH = ("aten", "prim", "prims", "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "profiler")
NO_NODE = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_unsafe_view", "device",
           "record_stream", "wait_tensor", "_wrap_tensor_autograd", "_assert_scalar", "_record_function_enter_new"}


def _op_counter(got):
    """A mode that lists in got.torch_ops every operator that launches something: copies, fills, matmuls, collectives,
    but no view, no metadata, no bare allocation. Composite operators, and custom ones, count as what they call."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kw, name, before = kwargs or {}, func._schema.name.split("::")[1], got.num_nodes
            with self: r = func.decompose(*args, **kw)          # under inference_mode composites arrive whole
            if r is not NotImplemented: return r
            if func.namespace not in TORCH:                     # a custom operator: look inside; black boxes count as one
                dev = next((a.device.type for a in torch.utils._pytree.tree_leaves((args, kw)) if isinstance(a, torch.Tensor)), "cpu")
                key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(dev))
                with self: r = func.redispatch(torch._C.DispatchKeySet(key), *args, **kw)
                if got.num_nodes == before: got.torch_ops.append(str(func))
                return r
            if not (func.is_view or torch.Tag.inplace_view in func.tags or name in NO_NODE or name.startswith(("sym_", "is_"))):
                got.torch_ops.append(str(func))
            return func(*args, **kw)
    return Counter()


@contextlib.contextmanager
def capture_launches(arch=89, pick=lambda configs: configs):
    """Run wrappers with CPU or meta tensors: every kernel launch is compiled for `arch` with the very signature,
    alignment hints and constexprs the launch has, and nothing is executed. An autotuned kernel compiles each config
    that `pick` leaves, and counts as one launch of the first. An empty grid and k.warmup() launch nothing."""
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    got, seen, run0, arun0, old = Captured(), {}, JITFunction.run, Autotuner.run, driver._active
    def run(self, *args, grid, warmup, **kw):
        t = time.time(); c = run0(self, *args, grid=grid, warmup=True, **kw)
        if hasattr(c, "result"): c = c.result()
        cst = {k: v for k, v in kw.items() if k in self.arg_names}
        if c is not None and id(c) not in seen: got.append(_report(c, arch, time.time() - t, cst)); seen[id(c)] = (c, got[-1])
        if c is not None and not warmup:
            b = {p.name: p.default for p in self.params if p.has_default} | dict(zip(self.arg_names, args)) | cst
            g = tuple(grid(b) if callable(grid) else grid); g += (1,) * (3 - len(g))
            cfg = dict(num_warps=c.metadata.num_warps, num_stages=c.metadata.num_stages, **{p.name: b[p.name] for p in self.params if p.is_constexpr})
            if min(g) > 0: got.launches.append(Launch(self.__name__, g, cfg, seen[id(c)][1]))
        return c
    def arun(self, *args, **kw):
        for i, cfg in enumerate(pick(list(self.configs))):
            self.fn.run(*args, **{**kw, **cfg.all_kwargs(), "warmup": i > 0 or kw.get("warmup", False)})
    driver.set_active(FakeCuda(arch)); JITFunction.run, Autotuner.run = run, arun
    try:
        with _op_counter(got): yield got
    finally: JITFunction.run, Autotuner.run = run0, arun0; driver._active = old


def ptxas_v(ptx, arch=89):
    """Independent register/spill figures in bytes, from `ptxas -v`."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx); f.flush()
        return subprocess.run([_tool("ptxas"), "-v", f"--gpu-name=sm_{arch}", f.name, "-o", os.devnull], capture_output=True, text=True).stderr


# ---------------------------------------------------------------- self-test: python aot.py
@triton.jit
def _scale(x_ptr, y_ptr, n, s, B: tl.constexpr, ADD: tl.constexpr = 0):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n, other=0.0) * s + ADD, mask=o < n)


def _selftest():
    import torch, torch.distributed as dist
    _tuned = triton.autotune([triton.Config({"B": b}, num_warps=w) for b, w in ((256, 2), (512, 4))], key=["n"])(_scale)
    lib = torch.library.Library("aot_selftest", "DEF")
    lib.define("twice(Tensor x) -> Tensor"); lib.define("box(Tensor x) -> Tensor")
    def twice(x):
        y = torch.empty_like(x); _scale[(4,)](x, y, x.numel(), 2.0, B=1024); return y.add_(1)
    lib.impl("twice", twice, "CPU"); lib.impl("box", torch.empty_like, "CPU")
    @torch.library.custom_op("aot_selftest::scale_", mutates_args={"x"})
    def scale_(x: torch.Tensor) -> None: _scale[(4,)](x, x, x.numel(), 2.0, B=1024); x.neg_()
    if not dist.is_initialized(): dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run0 = JITFunction.run
    for dev, guard in (("cpu", contextlib.nullcontext), ("meta", contextlib.nullcontext), ("meta", torch.inference_mode)):
        with guard(), capture_launches() as got:
            x, y = torch.empty(64, 64, device=dev), torch.empty(64, 64, device=dev)       # allocations and views: no nodes
            for _ in range(5): _scale[lambda m: (triton.cdiv(m["n"], m["B"]),)](x, y, x.numel(), 3.0, B=1024, num_warps=8)
            _scale[(2, 3)](x, y, 4096, 3.0, 512, ADD=1)
            _scale[(0,)](x, y, 4096, 3.0, 512, ADD=1)                                      # empty grid: no launch
            _scale.warmup(x, y, 4096, 3.0, 512, ADD=1, grid=(1,))                          # compiles only
            _tuned[lambda m: (4096 // m["B"],)](x, y, 4096, 3.0)                           # two configs, one launch
            x.view(-1)[:8].unsqueeze_(0).t().reshape(2, 4).detach(), x.contiguous()
            x.zero_(); x.fill_(2.0); y.copy_(x); x @ y; x.t().contiguous(); x.to(torch.bfloat16); torch.zeros(3, device=dev)
            dist.all_reduce(x)
        ops = [n.split(".")[1] for n in got.torch_ops]
        assert ops == ["zero_", "fill_", "copy_", "mm", "clone", "_to_copy", "zeros", "allreduce_"], got.torch_ops
        assert [(n.grid, n.config["B"], n.config["num_warps"]) for n in got.launches] == \
            [((4, 1, 1), 1024, 8)] * 5 + [((2, 3, 1), 512, 4), ((16, 1, 1), 256, 2)], got.launches
        assert got.launches[5].config["ADD"] == 1 and got.launches[0].config["ADD"] == 0 and got.launches[0].name == "_scale"
        assert len(got) == 4 and got.num_nodes == 7 + 8, (len(got), got.num_nodes)
        for r in got: r.check(); assert r.ld128
    with capture_launches() as got:
        x = torch.empty(4096)
        torch.ops.aot_selftest.twice(x)      # one launch and one add inside the operator, not the operator itself
        torch.ops.aot_selftest.scale_(x)     # the same through torch.library.custom_op
        torch.ops.aot_selftest.box(x)        # nothing to see inside: counted as one
    assert len(got) == 1 and len(got.launches) == 2, got.launches
    assert got.torch_ops == ["aten.add_.Tensor", "aten.neg_.default", "aot_selftest.box.default"], got.torch_ops
    x.add_(1); assert len(got.torch_ops) == 3 and JITFunction.run is run0      # nothing is counted outside
    print(f"selftest ok on Triton {triton.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    _selftest()
