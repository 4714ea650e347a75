#!/usr/bin/env python3
r"""sass_report: compile a Triton kernel for sm_89 WITHOUT a GPU and report what its machine code
costs.

    sass_report.py pkg/mod.py:kernel --arg q_ptr='*bf16' --arg T=i32 --arg stride=i32:16 \
        --arg s1=1 --const D=512 --const OUT=tl.float32 --num-warps 8 --num-stages 2
    sass_report.py --spec case.json | --selftest
        # {"kernel": "mod.py:fn", "args": {...}, "const": {...}, "num_warps": 8}

Argument kinds, as Triton specialises them at run time: '*bf16' pointer (16-byte aligned; write
'*bf16:1' for an unaligned one), 'i32' plain integer, 'i32:16' integer divisible by 16, an integer
literal 1 (Triton folds ==1 to a constant), 'fp32'.  Output is JSON on stdout.

EVERY loop counts.  `loops` lists, in program order, each loop of the machine code that contains MMA
or holds over 5 % of the kernel's global-load bytes or of the issue slots of all loops, less the
significant loops inside it; `outside` is the rest, run once.  ptxas may unroll or split a source
loop: read `loops` first.  `hottest` is the index of the one with the most MMA work, repeated as
`loop` and `bound`.  `--useful-macs` (multiply-accumulates one pass of one block has to do) and
`--ideal-bytes` (distinct bytes it has to read) take N for the hottest loop, N0,N1,.. in loop order,
or 0=N,outside=N.  `--trips N0,N1,..` (passes of each loop per block, in all) adds `kernel_ceiling`:
useful work over bound cycles summed over the kernel; quote that, not one loop's ceiling.  A claim
above the multiply-accumulates that a loop's MMAs issue, hence any above the MMA peak, is refused
(exit 2).

THIS IS A STATIC MODEL.  It reads SASS; nothing runs.  It does not see trip counts, cache hits, bank
conflicts, uncoalesced access, latency, barriers or the scheduler.  Cycle figures are lower bounds
from the published pipe rates of the RTX 4090; only the ratio between two kernels at the same work
is meaningful, and a real GPU must confirm it.
"""

import argparse, collections, contextlib, importlib.util, io, json, os, re, subprocess, sys
import tempfile

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NOTE = (
    "static model from SASS of an offline sm_89 compile; nothing was executed. Cycles are "
    "throughput lower bounds (no latency, barriers, bank conflicts, cache misses or trip counts); "
    "compare kernels, do not quote as time."
)

# RTX 4090 (AD102, sm_89). Limits: CUDA programming guide, compute capability 8.9. Rates: NVIDIA Ada
# whitepaper dense tensor peaks at 2.52 GHz x 128 SM (FP16/BF16 with FP32 accumulate 165.2 T, FP16
# acc 330.3 T, FP8 330.3/660.6 T, TF32 82.6 T, INT8 660.6 T).  GeForce parts run FP32-accumulate MMA
# at half the FP16-accumulate rate.  l2_gbs and dram_ns (load latency) are rounded third-party
# microbenchmark figures, not specifications.
GPU = dict(
    name="RTX 4090 (sm_89)",
    sms=128,
    ghz=2.52,
    regs_sm=65536,
    smem_sm=102400,
    smem_block=101376,
    smem_reserved=1024,
    warps_sm=48,
    blocks_sm=24,
    threads_block=1024,
    dram_gbs=1008.0,
    l2_gbs=5000.0,
    dram_ns=600.0,
)

# cycles one warp instruction holds its sub-core's tensor pipe (4 sub-cores per SM), and its FLOPs
MMA = [  # (regex on the opcode, flops, cycles)
    (r"HMMA\.16816\.F32", 4096, 32),
    (r"HMMA\.16816\.F16", 4096, 16),
    (r"HMMA\.1688\.F32\.TF32", 2048, 32),
    (r"HMMA\.1684\.F32\.TF32", 1024, 16),
    (r"HMMA\.1688\.F32", 2048, 16),
    (r"HMMA\.1688\.F16", 2048, 8),
    (r"QMMA\.16832\.F32", 8192, 32),
    (r"QMMA\.16832\.F16", 8192, 16),
    (r"QMMA\.16816\.F32", 4096, 16),
    (r"QMMA\.16816\.F16", 4096, 8),
    (r"IMMA\.16832\.", 8192, 16),
    (r"IMMA\.16816\.", 4096, 8),
]
FP32 = ("FFMA", "FADD", "FMUL")  # 128 lanes/clk/SM
FMAH = ("IMAD", "HFMA2", "HADD2", "HMUL2", "IDP")  # 64 lanes/clk/SM, FMA-heavy pipe
XU = ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "FRND")  # 16 lanes/clk/SM
FMA_MACS = dict(
    FFMA=32, FADD=32, FMUL=32, IMAD=32, HFMA2=64, HADD2=64, HMUL2=64, IDP=128
)  # per warp, generous
NO_ALU = "BRA BAR NOP EXIT WARPSYNC BSSY BSYNC DEPBAR LDGDEPBAR S2R LDC CS2R YIELD".split()
WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class Refused(ValueError):
    """A claim the machine code cannot back, or input that does not fit its loops."""


# ---------------------------------------------------------------- compile
class _OfflineDriver:
    """Just enough of a driver for kernels that ask the active target at compile time."""

    def __init__(self, cap):
        self.get_current_target = lambda: GPUTarget("cuda", cap, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device=None: 0
        self.get_active_torch_device = lambda: importlib.import_module("torch").device("cpu")


def use_offline_driver(cap=89):
    triton.runtime.driver.set_active(_OfflineDriver(cap))


def load_kernel(ref):
    """'path/to/mod.py:fn' or 'package.mod:fn' -> JITFunction (autotune/heuristics wrappers are
    unwrapped)."""
    mod, _, name = ref.rpartition(":")
    if mod.endswith(".py"):
        spec = importlib.util.spec_from_file_location("sass_report_" + re.sub(r"\W", "_", mod), mod)
        m = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = m
        spec.loader.exec_module(m)
    else:
        m = importlib.import_module(mod)
    fn = getattr(m, name)
    while not isinstance(fn, triton.runtime.JITFunction):
        fn = fn.fn
    return fn


def compile_kernel(fn, args, const, num_warps=4, num_stages=3, cap=89, **options):
    sig, consts, attrs = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in const:
            v = const[name]
            sig[name], consts[name] = (
                "constexpr",
                (eval(v, {"tl": tl}) if isinstance(v, str) and v.startswith("tl.") else v),
            )
            continue
        if name not in args:
            raise SystemExit(f"{fn.__name__}: argument {name!r} given neither in args nor in const")
        v = args[name]
        if isinstance(v, int) or v is None:  # Triton folds integer 1 (and None) into the kernel
            sig[name], consts[name] = "constexpr", v
            continue
        sig[name], _, div = v.partition(":")
        if (v[0] == "*" and div != "1") or div == "16":
            attrs[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn=fn, signature=sig, constexprs=consts, attrs=attrs),
        target=GPUTarget("cuda", cap, 32),
        options=dict(num_warps=num_warps, num_stages=num_stages, **options),
    )


# ---------------------------------------------------------------- disassemble
def disassemble(cubin):
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin), f.flush()
        run = lambda *a: (
            subprocess.run([tool, *a, f.name], capture_output=True, text=True, check=True).stdout
        )
        return run("-sass"), run("-res-usage")


Ins = collections.namedtuple("Ins", "addr op text pred")
base = lambda x: x.op.split(".")[0]
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*([^;]*);")


def parse_sass(text):
    return [
        Ins(int(m[1], 16), m[3], m[4].strip(), m[2])
        for m in map(_LINE.search, text.splitlines())
        if m
    ]


# ---------------------------------------------------------------- loops
def reach(edges, start, stop=()):
    seen, todo = set(stop), [start]
    while todo:
        i = todo.pop()
        if i not in seen:
            seen.add(i)
            todo += edges[i]
    return seen


def loops(ins):
    """Every loop as the set of its instructions, in program order, an outer one before the
    loops inside it."""
    at, succ, pred = {x.addr: i for i, x in enumerate(ins)}, [], [set() for _ in ins]
    for i, x in enumerate(ins):
        b, h = base(x), re.findall(r"0x([0-9a-f]+)", x.text)
        jump = (
            at.get(int(h[-1], 16)) if h and b in ("BRA", "JMP", "CALL") else None
        )  # ptxas leaves some loops by CALL
        ends = not x.pred and (
            b in ("EXIT", "RET") or b in ("BRA", "JMP") and x.text.startswith("0x")
        )
        succ.append({jump} - {None} | ({i + 1} if not ends and i + 1 < len(ins) else set()))
        for j in succ[i]:
            pred[j].add(i)
    live, found = reach(succ, 0), set()
    for t in {j for i in live for j in succ[i] - {i + 1}}:
        free, after = reach(succ, 0, {t}), reach(succ, t) & live
        back = pred[t] & after
        if back - free:  # t always runs before these jumps to it: a natural loop
            found.add(frozenset(set().union(*(reach(pred, i, {t}) for i in back - free)) & after))
        if any(
            i >= t for i in back & free
        ):  # a jump back in a cycle that has another entry: take the whole cycle
            found.add(frozenset(reach(pred, t) & after))
    return sorted(found, key=lambda b: (min(b), -len(b)))


def regions(ins):
    """Significant loops as [(own instructions, why)], the instructions outside them, and the
    loops left out."""
    found, seq = loops(ins), lambda idx: [ins[i] for i in sorted(idx)]
    all_bytes, slots, big, small = (
        count(ins, 1)["global_load_bytes"] or 1,
        len(set().union(*found)),
        [],
        [],
    )
    for body in found:
        c = count(seq(body), 1)
        pct = {
            "load bytes": 100.0 * c["global_load_bytes"] / all_bytes,
            "loop issue slots": 100.0 * len(body) / slots,
        }
        why = ["MMA"] * bool(c["mma_macs_issued"]) + [
            f"{v:.0f} % of {k}" for k, v in pct.items() if v > 5
        ]
        (big if why else small).append((body, why))
    own = [body.difference(*(b for b, _ in big if len(b) < len(body))) for body, _ in big]
    rest = set(range(len(ins))).difference(*own)
    return (
        [(seq(o), why) for o, (_, why) in zip(own, big) if o],
        seq(rest),
        [seq(b) for b, _ in small],
    )


# ---------------------------------------------------------------- count
def mma_info(op):
    return next(((flops, cycles) for rx, flops, cycles in MMA if re.match(rx, op)), (0, 0))


def mem_bytes(op):  # per lane
    return next((WIDTH[p] for p in op.split(".")[1:] if p in WIDTH), 4)


def ldsm_bytes(op):  # per warp
    return 128 * (4 if ".4" in op else 2 if ".2" in op else 1)


def count(body, warps):
    """Sums over one pass through `body` by every warp of a block."""
    h, ldg = collections.Counter(), collections.Counter()
    flops = mma = simd = tensor = fp32 = fmah = alu = xu = lsu = gbytes = sbytes = 0
    for x in body:
        b = base(x)
        f, c = mma_info(x.op)
        simd += FMA_MACS.get(b, 0)
        if b.endswith("MMA"):
            if not f:
                raise Refused(f"{x.op} is not in the MMA table, so its cycles would count as zero.")
            key = x.op
            flops, mma, tensor = flops + f, mma + f // 2, tensor + c
        elif b in ("LDG", "LDGSTS", "STG", "LDS", "STS", "LDL", "STL"):
            w = mem_bytes(x.op)
            key = (
                "LDG.%s" % {1: "U8", 2: "U16", 4: "32", 8: "64", 16: "128"}[w]
                if b == "LDG"
                else "%s.%d" % (b, 8 * w)
            )
            lsu += max(1, w // 4)
            if b in ("LDG", "LDGSTS"):
                ldg[w] += 1
                gbytes += 32 * w
            sbytes += 32 * w * (b == "STG")
        elif b == "LDSM":
            key = "LDSM.x%d%s" % (ldsm_bytes(x.op) // 128, ".T" if ".MT" in x.op else "")
            lsu += ldsm_bytes(x.op) // 128
        else:
            key = b
            if b in ("SHFL", "ATOMG", "RED", "ATOMS"):
                lsu += 1
            elif b in FP32:
                fp32 += 1
                flops += 64 if b == "FFMA" else 32
            elif b in FMAH:
                fmah += 1
            elif b in XU:
                xu += 1
            elif not b.startswith("U") and b not in NO_ALU:
                alu += 1
        h[key] += 1
    n = len(body)
    sub = warps / 4.0  # warps per sub-core
    return dict(
        histogram=dict(h.most_common()),
        issue_slots_per_warp=n,
        issue_slots_per_block=n * warps,
        flops_issued=flops * warps,
        mma_macs_issued=mma * warps,
        simd_macs_issued=simd * warps,
        global_load_bytes=gbytes * warps,
        global_store_bytes=sbytes * warps,
        load_instr_by_bytes_per_lane={str(k): v * warps for k, v in sorted(ldg.items())},
        mean_load_width_bytes=round(
            sum(k * v for k, v in ldg.items()) / max(1, sum(ldg.values())), 2
        ),
        cycles=dict(
            tensor=tensor * sub,
            issue=n * sub,
            fma=max(2 * fmah, fp32 + fmah) * sub,
            alu=2 * alu * sub,
            mufu_cvt=8 * xu * sub,
            lsu_smem=lsu * warps,
        ),
    )


def hottest(segs):
    """Index of the instruction list with the most MMA work (then the most FP work, then the
    shortest)."""
    fp = FP32 + ("HFMA2", "HMUL2", "HADD2")
    score = lambda s: (sum(mma_info(x.op)[0] for x in s), sum(base(x) in fp for x in s), -len(s))
    return max(range(len(segs)), key=lambda i: score(segs[i]))


# ---------------------------------------------------------------- model
def occupancy(regs, smem, warps):
    r = (max(regs, 1) + 7) // 8 * 8
    by_regs = (GPU["regs_sm"] // 4 // (r * 32)) * 4 // warps if regs <= 255 else 0
    used = (smem + GPU["smem_reserved"] + 127) // 128 * 128
    lim = dict(
        registers=by_regs,
        shared_memory=GPU["smem_sm"] // used,
        warps=GPU["warps_sm"] // warps,
        blocks=GPU["blocks_sm"],
    )
    b = min(lim.values())
    return dict(
        blocks_per_sm=b,
        warps_per_sm=b * warps,
        pct=round(100.0 * b * warps / GPU["warps_sm"], 1),
        limited_by=min(lim, key=lim.get),
    )


def in_flight(c, warps, occ):
    """Little's law: bytes an SM must keep in flight to fill its share of DRAM, and the most one
    iteration can offer."""
    need = GPU["dram_gbs"] * GPU["dram_ns"] / GPU["sms"]
    have = c["global_load_bytes"] * (occ["blocks_per_sm"] if occ else 0)
    return dict(
        bytes_needed_per_sm=round(need),
        bytes_offered_per_sm=have,
        note="upper bound: every load of one iteration "
        "of every resident block outstanding at once; loads that depend on loads cannot reach it",
    )


def tflops(macs, cycles):
    return 2 * macs / max(cycles, 1e-9) * GPU["ghz"] * GPU["sms"] / 1e3


def bound(c, useful_macs=None, ideal_bytes=None):
    core, bpc = c["cycles"], lambda gbs: gbs / GPU["ghz"] / GPU["sms"]  # bytes per clock per SM
    nbytes, top = c["global_load_bytes"] + c["global_store_bytes"], max(core, key=core.get)
    dram = (ideal_bytes or nbytes) / bpc(GPU["dram_gbs"])
    cyc = dict(
        core,
        l2_if_all_requests_reach_it=nbytes / bpc(GPU["l2_gbs"]),
        dram_if_every_byte_misses=dram,
    )
    out = dict(
        cycles_per_sm_per_block_iteration={k: round(v, 1) for k, v in cyc.items()},
        on_chip_bound=top,
        on_chip_cycles=round(core[top], 1),
        compute_to_dram_ratio=round(core[top] / max(1e-9, dram), 2),
    )
    macs = c["flops_issued"] / 2 if useful_macs is None else useful_macs
    if macs:
        out["macs_counted"], out["macs_are"] = (
            int(macs),
            "issued" if useful_macs is None else "claimed",
        )
        out["issue_slots_per_kmac"] = round(1024.0 * c["issue_slots_per_block"] / macs, 3)
        out["tflops_ceiling_of_this_loop"] = round(tflops(macs, core[top]), 1)
    if useful_macs:
        out["useful_fraction_of_issued_flops"] = round(
            2.0 * useful_macs / max(1, c["flops_issued"]), 3
        )
    if ideal_bytes:
        out["load_request_bytes_over_ideal"] = round(c["global_load_bytes"] / ideal_bytes, 2)
        out["stream_gbs_ceiling_of_this_loop"] = round(
            ideal_bytes / core[top] * GPU["ghz"] * GPU["sms"], 0
        )
    return out


def per_loop(spec, n, hot, what):
    """A number (hottest loop), a list in loop order or {"0": .., "outside": ..} -> n + 1
    values, the last for `outside`."""
    one = isinstance(spec, (int, float))
    d = {hot: spec} if one else spec if isinstance(spec, dict) else dict(enumerate(spec or ()))
    d = {n if k == "outside" else int(k): v for k, v in d.items()}
    if not set(d) <= set(range(n + 1)) or any(v is not None and not v >= 0 for v in d.values()):
        raise Refused(
            f"{what} {spec} is negative or names more than the {n} significant loops and `outside`."
        )
    return [d.get(i) for i in range(n + 1)]


def region(name, seg, warps, why, useful, ideal):
    """The entry of one loop (or of the code outside loops); refuses useful work that its
    instructions cannot do."""
    c = count(seg, warps)
    b, mma = bound(c, useful, ideal), c["mma_macs_issued"]
    if useful and useful > (
        mma or c["simd_macs_issued"]
    ):  # so no ceiling can pass the MMA peak either
        raise Refused(
            f"{useful:.6g} useful MACs claimed a pass of {name}, but its "
            + (
                f"MMAs issue only {mma} (the claim would be {b['tflops_ceiling_of_this_loop']} "
                f"TF/s, their peak is "
                f"{tflops(mma, c['cycles']['tensor']):.1f})."
                if mma
                else f"FMA pipes can do only {c['simd_macs_issued']}."
            )
        )
    return dict(
        name=name,
        first=hex(seg[0].addr),
        last=hex(seg[-1].addr),
        instructions=len(seg),
        why=why,
        mma=sum(bool(mma_info(x.op)[0]) for x in seg),
        fp32=sum(base(x) in FP32 for x in seg),
        spill_instructions={o: sum(base(x) == o for x in seg) for o in ("LDL", "STL")},
        counts=c,
        bound=b,
    )


def kernel_ceiling(parts, trips, useful, ideal):
    """Useful work over bound cycles of one whole block."""
    cyc = [t * p["bound"]["on_chip_cycles"] for p, t in zip(parts, trips)]
    claimed, total = (
        any(u is not None for u in useful),
        lambda k: sum(t * p["counts"][k] for p, t in zip(parts, trips)),
    )
    macs = sum(
        t * ((u or 0) if claimed else p["counts"]["mma_macs_issued"])
        for p, t, u in zip(parts, trips, useful)
    )
    return dict(
        macs_per_block=int(macs),
        macs_are="claimed" if claimed else "issued",
        cycles_per_block=round(sum(cyc), 1),
        trips={p["name"]: t for p, t in zip(parts, trips)},
        cycles_share={p["name"]: round(c / sum(cyc), 3) for p, c in zip(parts, cyc)},
        load_bytes_per_block=total("global_load_bytes"),
        tflops_ceiling=round(tflops(macs, sum(cyc)), 1),
        issue_slots_per_kmac=round(1024 * total("issue_slots_per_block") / macs, 3)
        if macs
        else None,
        stream_gbs_ceiling=round(
            500 * tflops(sum(t * (i or 0) for t, i in zip(trips, ideal)), sum(cyc))
        )
        or None,
    )


def analyse(
    fn,
    args,
    const,
    num_warps=4,
    num_stages=3,
    useful_macs=None,
    ideal_bytes=None,
    cap=89,
    keep_sass=None,
    trips=None,
    **opt,
):
    """The whole report for one kernel as a dict."""
    k = compile_kernel(fn, args, const, num_warps, num_stages, cap, **opt)
    sass, res = disassemble(k.asm["cubin"])
    if keep_sass:
        open(keep_sass, "w").write(sass)
    ins, warps, dyn = parse_sass(sass), k.metadata.num_warps, k.metadata.shared
    use = {
        m[1]: int(m[2])
        for m in re.finditer(r"(REG|STACK|SHARED|LOCAL):(\d+)", res.split("Function")[-1])
    }
    static, (big, rest, small) = use.get("SHARED", 0), regions(ins)
    segs = big or [(rest, [])]
    n, hot = len(segs), hottest([s for s, _ in segs])
    useful, ideal = (
        per_loop(useful_macs, n, hot, "useful_macs"),
        per_loop(ideal_bytes, n, hot, "ideal_bytes"),
    )
    parts = [
        region(f"loop {i}" if big else "whole kernel (no loop)", s, warps, why, useful[i], ideal[i])
        for i, (s, why) in enumerate(segs)
    ]
    outside = [region("outside", rest, warps, [], useful[n], ideal[n])] if big else []
    passes = per_loop(trips if big else [1], n, hot, "trips")[:n]
    if trips is not None and None in passes:
        raise Refused(f"trips must name all {n} significant loops.")
    ceiling = f"not computed: give --trips for the {n} loops; `bound` below is loop {hot} alone"
    if None not in passes:
        ceiling = kernel_ceiling(parts + outside, passes + [1] * len(outside), useful, ideal)
    h, whole, fits = parts[hot], count(ins, warps), dyn + static <= GPU["smem_block"]
    occ = occupancy(use.get("REG", 255), dyn + static, warps) if fits else None
    return dict(
        kernel=fn.__name__,
        target="sm_%d" % cap,
        num_warps=warps,
        num_stages=num_stages,
        model=NOTE,
        const={a: str(b) for a, b in const.items()},
        registers_per_thread=use.get("REG"),
        stack_bytes=use.get("STACK", 0),
        local_bytes=use.get("LOCAL", 0),
        spill_instructions={o: sum(base(x) == o for x in ins) for o in ("LDL", "STL")},
        spill_instructions_in_loop=h["spill_instructions"],
        shared_bytes=dict(dynamic=dyn, static=static, limit=GPU["smem_block"]),
        fits_sm89=fits,
        occupancy=occ,
        sass_instructions=len(ins),
        kernel_ceiling=ceiling,
        hottest=hot if big else None,
        analysed="loop %s..%s" % (h["first"], h["last"]) if big else h["name"],
        loop=h["counts"],
        bound=h["bound"],
        memory_parallelism=in_flight(h["counts"], warps, occ),
        loops=parts if big else [],
        outside=outside[0] if big else None,
        small_loops=[
            dict(
                first=hex(s[0].addr),
                last=hex(s[-1].addr),
                instructions=len(s),
                global_load_bytes=count(s, warps)["global_load_bytes"],
            )
            for s in small
        ],
        whole_kernel={
            k: whole[k] for k in ("histogram", "global_load_bytes", "load_instr_by_bytes_per_lane")
        },
    )


# ---------------------------------------------------------------- self-test
@triton.jit
def _probe(a_ptr, b_ptr, u_ptr, c_ptr, KT, UT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for i in range(KT):
        a = tl.load(a_ptr + m[:, None] * 4096 + i * K + k[None, :])
        b = tl.load(b_ptr + n[:, None] * 4096 + i * K + k[None, :])
        acc = tl.dot(a, tl.trans(b), acc)
    for i in range(UT):
        acc += tl.load(u_ptr + i * 4096 + m[:, None] * N + n[None, :]).to(tl.float32)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


def selftest():
    use_offline_driver()
    mac = 64 * 64 * 64

    def dot(
        ty="*bf16", m=64, n=64, k=64, stages=2, u="*bf16", KT=None, UT=0, **kw
    ):  # UT=0: no second loop
        const = dict(M=m, N=n, K=k, **{a: v for a, v in (("KT", KT), ("UT", UT)) if v is not None})
        return analyse(
            _probe,
            dict(a_ptr=ty, b_ptr=ty, u_ptr=u, c_ptr="*fp32", KT="i32", UT="i32"),
            const,
            4,
            stages,
            **kw,
        )

    for ty, op, per, size, rate in (
        ("*bf16", "HMMA.16816.F32.BF16", 2048, 2, 512),
        ("*fp32", "HMMA.1688.F32.TF32", 1024, 4, 256),
        ("*fp8e4nv", "QMMA.16832.F32.E4M3.E4M3", 4096, 1, 1024),
    ):
        r = dot(ty, useful_macs=mac)
        c = r["loop"]
        assert c["histogram"][op] * 4 * per == mac, (ty, c)  # every MAC is issued exactly once
        assert r["bound"]["useful_fraction_of_issued_flops"] == 1.0 and len(r["loops"]) == 1
        assert (
            c["global_load_bytes"] == 2 * 64 * 64 * size and c["cycles"]["tensor"] == 2 * mac / rate
        ), c
        assert c["mean_load_width_bytes"] == 16 and "LDGSTS.128" in c["histogram"]
        assert (
            r["fits_sm89"]
            and r["occupancy"]["blocks_per_sm"] >= 1
            and not r["spill_instructions"]["LDL"]
        )
    assert (
        dot(m=8, useful_macs=8 * 64 * 64)["bound"]["useful_fraction_of_issued_flops"] == 0.5
    )  # M=8 is padded to an m16 tile
    una, ali = (dot(t, KT=1) for t in ("*bf16:1", "*bf16"))  # one pass: Triton leaves no loop
    assert una["loop"]["mean_load_width_bytes"] == 2 and ali["loop"]["mean_load_width_bytes"] == 16
    assert (
        ali["analysed"].startswith("whole")
        and ali["loop"]["global_load_bytes"] == 16384
        and ali["loops"] == []
    )
    big = dot(m=128, n=128, k=128, stages=4)
    assert not big["fits_sm89"] and big["occupancy"] is None
    assert occupancy(255, 0, 4)["blocks_per_sm"] == 2 and occupancy(32, 0, 4)["warps_per_sm"] == 48
    assert occupancy(128, 101376, 4) == dict(
        blocks_per_sm=1, warps_per_sm=4, pct=8.3, limited_by="shared_memory"
    )
    # a clean MMA loop and a loop of 2-byte loads: the hottest alone looks perfect, the kernel does
    # not
    two = lambda **kw: dot(UT=None, u="*bf16:1", **kw)
    r = two(useful_macs=mac)
    (a, b), alone, width = (
        r["loops"],
        r["bound"]["tflops_ceiling_of_this_loop"],
        lambda p: p["counts"]["mean_load_width_bytes"],
    )
    assert (
        r["hottest"] == 0
        and r["loop"] is a["counts"]
        and a["mma"]
        and not b["mma"]
        and (width(a), width(b)) == (16, 2)
    )
    assert alone == 165.2 and isinstance(r["kernel_ceiling"], str)
    c = two(useful_macs=[mac, 0], trips=[64, 256])["kernel_ceiling"]
    want = sum(t * p["bound"]["on_chip_cycles"] for t, p in zip((64, 256, 1), (a, b, r["outside"])))
    assert (
        c["macs_per_block"] == 64 * mac
        and abs(c["cycles_per_block"] - want) < 1
        and c["tflops_ceiling"] < 100
    ), c
    for kw in (
        dict(useful_macs=10 * mac),
        dict(useful_macs={"1": 1e9}),
        dict(useful_macs=[0, 0, 0, 1]),
        dict(trips=[1]),
    ):
        try:
            raise AssertionError(two(**kw)["kernel"])
        except Refused:
            pass
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(
            [
                __file__ + ":_probe",
                *(f"--arg={x}_ptr=*bf16" for x in "abuc"),
                "--arg=KT=i32",
                "--arg=UT=i32",
                *(f"--const={x}=64" for x in "MNK"),
                "--num-stages=2",
                f"--useful-macs=0={10 * mac}",
            ]
        )
    assert (
        code == 2 and err.getvalue().startswith("refused:") and err.getvalue().count("\n") == 1
    ), err.getvalue()
    print(
        f"{err.getvalue()}two loops, load widths {width(a)} and {width(b)} B: hottest "
        f"alone {alone} TF/s, kernel "
        f"{c['tflops_ceiling']} TF/s\nselftest ok"
    )


def work(s):  # 5e6 | 5e6,0 | 0=5e6,outside=100
    if "=" in s:
        return {k: float(v) for k, v in (x.split("=") for x in s.split(","))}
    return [float(v) for v in s.split(",")] if "," in s else float(s)


def main(argv=None):
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("kernel", nargs="?")
    p.add_argument("--arg", action="append", default=[])
    p.add_argument("--const", action="append", default=[])
    p.add_argument("--num-warps", type=int, default=4)
    p.add_argument("--num-stages", type=int, default=3)
    for o in ("--useful-macs", "--ideal-bytes", "--trips"):
        p.add_argument(o, type=work, help="N, or N0,N1,.. in loop order, or 0=N,1=N,outside=N")
    p.add_argument("--spec", help="JSON file with the same fields (a dict, or a list of dicts)")
    p.add_argument("--keep-sass", help="also write the SASS here")
    p.add_argument("--selftest", action="store_true")
    a = p.parse_args(argv)
    if a.selftest:
        return selftest()
    use_offline_driver()
    val = lambda s: {"True": True, "False": False, "None": None}.get(
        s,
        int(s) if re.fullmatch(r"-?\d+", s) else float(s) if re.fullmatch(r"-?\d*\.\d+", s) else s,
    )
    if a.spec:
        spec = json.load(open(a.spec))
        cases = spec if isinstance(spec, list) else [spec]
    elif a.kernel:
        kv = lambda xs: {k: val(v) for k, v in (x.split("=", 1) for x in xs)}
        cases = [
            dict(
                kernel=a.kernel,
                args=kv(a.arg),
                const=kv(a.const),
                num_warps=a.num_warps,
                num_stages=a.num_stages,
                useful_macs=a.useful_macs,
                ideal_bytes=a.ideal_bytes,
                trips=a.trips,
            )
        ]
    else:
        p.error("give a kernel, --spec or --selftest")
    out = []
    try:
        for c in map(dict, cases):
            out.append(
                analyse(
                    load_kernel(c.pop("kernel")),
                    c.pop("args"),
                    c.pop("const", {}),
                    keep_sass=a.keep_sass,
                    **c,
                )
            )
    except Refused as e:
        print("refused:", e, file=sys.stderr)
        return 2
    print(json.dumps(out if len(out) > 1 else out[0], indent=1))


if __name__ == "__main__":
    sys.exit(main())
