"""Two products of the same rows in one launch: with an FP8 matrix and, in true fp32, with another.

The first result is `fp8_linear`'s, the second `linear`'s, bit for bit. Few rows (the path "gemv")
take one launch with two kinds of block, those of the other matrix first, as they read more each;
the path "gemm" launches one product after the other.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.linear import fp8_kernels, fp8_product, products
from ftkernels.linear.fp8_kernels import BLOCK
from ftkernels.linear.fp8_kernels import gemv_block as fp8_block
from ftkernels.linear.fp8_linear import check_weight, fp8_linear, product_reference
from ftkernels.linear.fp8_product import GEMV_TOKENS, Rows, takes_gemv
from ftkernels.linear.linear import WEIGHTS, check_path, linear, matmul_rows, wide
from ftkernels.linear.products import gemv_block as dense_block
from ftkernels.spec import COUNTER_BYTES, Case, Inputs, KernelSpec
from ftkernels.testing import randn
from ftkernels.work import Work, either

Pair = tuple[torch.Tensor, torch.Tensor]


def mixed_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, dense: torch.Tensor,
    *, x_fp8: torch.Tensor | None = None, x_scale: torch.Tensor | None = None,
    activation: str = "fp8", path: str | None = None, out_dtype: torch.dtype = torch.bfloat16,
    out: Pair | None = None, scratch: torch.Tensor | None = None,
) -> Pair:  # fmt: skip
    """Multiply rows by a block-scaled FP8 matrix, and by another in fp32.

    Args:
        x: ``[T, K]`` bf16/fp16/fp32.
        weight, weight_scale, activation: as `fp8_linear` has them.
        dense: ``[N2, K]``, bf16 or fp32; rows or columns contiguous.
        x_fp8, x_scale: ``[T, K]`` e4m3 and ``[T, ceil(K/128)]`` uint8, what `quantize_fp8` makes of
            ``x``; made on the way when omitted. Not with ``activation="bf16"``.
        path: "gemm" or "gemv", as both ops have it.
        out_dtype: element type of the FP8 matrix's product.
        out: both results; allocated when omitted.
        scratch: as ``scratch_bytes("mixed_linear", T=.., N=.., N2=.., K=..)`` says; allocated when
            omitted.

    Returns:
        ``[T, N]`` of ``out_dtype`` and ``[T, N2]`` fp32.

    Raises:
        TypeError, ValueError: an argument outside the contract, by name.

    Graph-safe when ``out`` and ``scratch`` are given. One launch for every 64 rows by "gemv".
    """
    out = _checked(
        x, weight, weight_scale, dense, x_fp8, x_scale, activation, path, out_dtype, out
    )
    rows = _rows(x, x_fp8, x_scale, activation)
    if scratch is not None:
        size = _num_bytes(rows, weight, dense, path) if weight_scale is not None else 0
        others = (("x", x), ("out", out[0]), ("out", out[1]))
        check.scratch("mixed_linear", scratch, size, x, others)
    if backend.use_reference(x):
        return _products(
            x, weight, weight_scale, dense, x_fp8, x_scale, activation, path, out_dtype, out
        )
    gemv = takes_gemv(path, x.shape[0])
    if not (gemv and x.numel() and out[0].numel() and out[1].numel()) or weight_scale is None:
        given = x if x_fp8 is None or x_scale is None else (x_fp8, x_scale)
        path = "gemv" if gemv else "gemm"
        fp8_linear(
            given, weight, weight_scale, activation=activation, path=path, out_dtype=out_dtype,
            out=out[0], scratch=scratch,
        )  # fmt: skip
        linear(x, dense, out_dtype=torch.float32, path=path, out=out[1])
        return out
    with backend.on_device(x):
        if scratch is None:
            scratch = check.scratch("mixed_linear", None, _num_bytes(rows, weight, dense, path), x)
        for begin in range(0, x.shape[0], GEMV_TOKENS):
            cut = slice(begin, min(begin + GEMV_TOKENS, x.shape[0]))
            part = rows.cut(cut.start, cut.stop)
            results = (out[0][cut], out[1][cut])
            _launch(part, x[cut], weight, weight_scale, dense, results, scratch)
    return out


def _checked(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, dense: torch.Tensor,
    x_fp8: torch.Tensor | None, x_scale: torch.Tensor | None, activation: str, path: str | None,
    out_dtype: torch.dtype, out: Pair | None,
) -> Pair:  # fmt: skip
    op = "mixed_linear"
    check.tensor(op, "x", x, check.FLOATS, (None, None), "[T, K]")
    num_tokens, k = x.shape
    check_weight(op, weight, weight_scale, k, x)
    check.matrix(op, "dense", dense, WEIGHTS, (None, k), "[N2, K]", x)
    check_path(op, path)
    check.out_dtype(op, out_dtype)
    if activation not in ("fp8", "bf16"):
        raise ValueError(f"{op}: activation is {activation!r}, expected 'fp8' or 'bf16'")
    if (x_fp8 is None) != (x_scale is None):
        raise ValueError(f"{op}: x_fp8 and x_scale are partly given, expected both")
    if x_fp8 is not None:
        if activation != "fp8":
            raise ValueError(f"{op}: x_fp8 is given with activation {activation!r}, expected None")
        check.tensor(op, "x_fp8", x_fp8, (torch.float8_e4m3fn,), (num_tokens, k), "[T, K]", x)
        size = (num_tokens, -(-k // BLOCK))
        check.tensor(op, "x_scale", x_scale, (torch.uint8,), size, "[T, ceil(K/128)]", x)
    given = check.parts(op, out, 2)
    inputs = (weight, weight_scale, dense, x_fp8, x_scale)
    first = check.output(
        op, given[0], (num_tokens, weight.shape[0]), like=x, dtype=out_dtype, name="out[0]",
        inputs=inputs,
    )  # fmt: skip
    second = check.output(
        op, given[1], (num_tokens, dense.shape[0]), like=x, dtype=torch.float32, name="out[1]",
        inputs=(*inputs, first),
    )  # fmt: skip
    return first, second


def mixed_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, dense: torch.Tensor,
    *, x_fp8: torch.Tensor | None = None, x_scale: torch.Tensor | None = None,
    activation: str = "fp8", path: str | None = None, out_dtype: torch.dtype = torch.bfloat16,
    out: Pair | None = None,
) -> Pair:  # fmt: skip
    """The definition in plain torch: `fp8_linear`'s and `linear`'s."""
    out = _checked(
        x, weight, weight_scale, dense, x_fp8, x_scale, activation, path, out_dtype, out
    )
    return _products(
        x, weight, weight_scale, dense, x_fp8, x_scale, activation, path, out_dtype, out
    )


def _products(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor | None, dense: torch.Tensor,
    x_fp8: torch.Tensor | None, x_scale: torch.Tensor | None, activation: str, path: str | None,
    out_dtype: torch.dtype, out: Pair,
) -> Pair:  # fmt: skip
    given = x if x_fp8 is None or x_scale is None else (x_fp8, x_scale)
    product_reference(
        given, weight, weight_scale, activation, None, 0.0, None, path, out_dtype, out[0]
    )
    out[1].copy_(matmul_rows(wide(x), wide(dense), path))
    return out


def _rows(
    x: torch.Tensor, x_fp8: torch.Tensor | None, x_scale: torch.Tensor | None, activation: str
) -> Rows:
    """What the FP8 matrix is multiplied with."""
    if x_fp8 is not None:
        return Rows(x_fp8[:, None], x_scale)
    return Rows(x[:, None], None, activation == "fp8")


def _num_bytes(rows: Rows, weight: torch.Tensor, dense: torch.Tensor, path: str | None) -> int:
    """The FP8 product's scratch, then the sums of the other where both are in one launch."""
    size, count = fp8_product.rows_bytes(rows, weight[None], path), rows.x.shape[0]
    if not takes_gemv(path, count):
        return size
    return _aligned(size) + products.sums_bytes(min(count, GEMV_TOKENS), *dense.shape)


def _aligned(num_bytes: int) -> int:
    return 16 * triton.cdiv(num_bytes, 16)


def _scratch(*, T: int, N: int, N2: int, K: int) -> int:
    """For every form of a call; above 64 rows also for ``path="gemv"``."""
    size = fp8_product.num_bytes(T, 1, N, K, item=4, gemv=True, gemm=True)
    return _aligned(size) + products.sums_bytes(min(T, GEMV_TOKENS), N2, K)


def default_config(key: Case) -> object:
    """That of the op whose rows a launch multiplies, or of `linear`'s where it is both."""
    return (fp8_kernels if "bits" in key else products).default_config(key)


def _launch(
    rows: Rows, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dense: torch.Tensor,
    out: Pair, scratch: torch.Tensor,
) -> None:  # fmt: skip
    op, (count, k) = "mixed_linear", x.shape
    key = {
        "G": 1, "N": weight.shape[0], "K": k, "bits": 8 * rows.operand.itemsize, "gemv": 1,
        "T": count,
    }  # fmt: skip
    fp8_cfg = config.lookup("fp8_linear", key, fp8_kernels.default_config, grows="T")
    fp8_grid, fp8_arguments, fp8_constants = fp8_product.gemv_call(
        op, fp8_cfg, rows, weight[None], scale, out[0][:, None], scratch
    )
    dense_key = products.product_key(x, dense, True)
    cfg = config.lookup("linear", dense_key, products.default_config, grows="T")
    num_counters = 4 * triton.cdiv(fp8_grid[0] * fp8_grid[1], 4)
    first_byte = _aligned(fp8_product.rows_bytes(rows, weight[None], "gemv"))
    grid, arguments, constants = products.gemv_call(
        cfg, x, dense, out[1], scratch, num_counters, first_byte
    )
    check.require(
        num_counters + grid[0] * grid[1] <= COUNTER_BYTES // 4,
        lambda: f"{op}: weight is {tuple(weight.shape)}, expected fewer rows",
    )
    _mixed_gemv_kernel[(math.prod(grid) + math.prod(fp8_grid),)](
        *grid[:2], math.prod(grid), *arguments, *fp8_grid[:2], *fp8_arguments,
        **constants, **{f"FP8_{name}": value for name, value in fp8_constants.items()},
        num_warps=cfg.num_warps, num_stages=cfg.num_stages, maxnreg=255,
    )  # fmt: skip


@triton.jit
def _mixed_gemv_kernel(
    tiles_n, tiles_t, num_dense,
    x_ptr, stride_xt,  # [T, K]
    w_ptr, stride_wn, stride_wk,  # [N2, K]
    out2_ptr, stride_o2,  # [T, N2]
    T, N2, K,
    counters2_ptr, partial_ptr,  # [row tiles, weight tiles], [splits, T, N2]
    fp8_tiles_t, fp8_chunks,
    x8_ptr, stride_8t, stride_8g,  # [T, 1, K]
    x_scale_ptr, stride_st,  # [T, ceil(K/128)]
    weight_ptr, stride_wg, stride_wr,  # [1, N, K]
    scale_ptr, stride_s,  # [ceil(N/128), ceil(K/128)]
    out_ptr, stride_ot, stride_og,  # [T, 1, N]
    counters_ptr, sums_ptr, stride_us, stride_ut,  # [chunks, row tiles], [splits, T, N]
    T8, N, K8, chunks, norm_ptr, eps, limit,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr, SLICES: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
    FP8_NORM: tl.constexpr, FP8_SWIGLU: tl.constexpr, FP8_QUANTIZE: tl.constexpr,
    FP8_DTYPE: tl.constexpr, FP8_SCALED: tl.constexpr, FP8_SPLITS: tl.constexpr,
    FP8_SLICES: tl.constexpr, FP8_TILES: tl.constexpr, FP8_EVEN_K: tl.constexpr,
    FP8_ROW_SCALES: tl.constexpr, FP8_BLOCK_T: tl.constexpr, FP8_LIVE_T: tl.constexpr,
    FP8_BLOCK_N: tl.constexpr, FP8_STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < num_dense:
        tile = pid // tiles_n
        dense_block(
            pid % tiles_n, tiles_n, tile % tiles_t, tile // tiles_t,
            x_ptr, stride_xt, w_ptr, stride_wn, stride_wk, out2_ptr, stride_o2, T, N2, K,
            counters2_ptr, partial_ptr, BLOCK_T, BLOCK_N, BLOCK_K, EVEN_K, SPLITS, SLICES, SIZE,
            DTYPE,
        )  # fmt: skip
    else:
        pid -= num_dense
        tile = pid // fp8_tiles_t
        fp8_block(
            pid % fp8_tiles_t, fp8_tiles_t, tile % fp8_chunks, tile // fp8_chunks,
            x8_ptr, stride_8t, stride_8g, x_scale_ptr, stride_st,
            weight_ptr, stride_wg, stride_wr, scale_ptr, stride_s, out_ptr, stride_ot, stride_og,
            counters_ptr, sums_ptr, stride_us, stride_ut, T8, N, K8, chunks, norm_ptr, eps, limit,
            FP8_NORM, FP8_SWIGLU, FP8_QUANTIZE, FP8_DTYPE, FP8_SCALED, FP8_SPLITS, FP8_SLICES,
            FP8_TILES, FP8_EVEN_K, FP8_ROW_SCALES, FP8_BLOCK_T, FP8_LIVE_T, FP8_BLOCK_N,
            FP8_STAGES,
        )  # fmt: skip


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    count, k, n = case["T"], case["K"], case["N"]
    dtype = torch.float32 if case.get("form") == "fp32" else torch.bfloat16
    x = randn(count, k, dtype=dtype, device=device, seed=seed)
    weight = randn(n, k, device=device, seed=seed + 1).to(torch.float8_e4m3fn)
    scale = torch.full((-(-n // BLOCK), -(-k // BLOCK)), 120, dtype=torch.uint8, device=device)
    dense = randn(case["N2"], k, dtype=dtype, device=device, seed=seed + 2)
    kwargs: dict[str, object] = {}
    if case.get("form") == "quantized":
        kwargs["x_fp8"] = (x / 4).to(torch.float8_e4m3fn)
        size = (count, -(-k // BLOCK))
        kwargs["x_scale"] = torch.full(size, 129, dtype=torch.uint8, device=device)
    elif case.get("form"):
        kwargs["activation"] = "bf16"
    return (x, weight, scale, dense), kwargs


def _launches(case: Case) -> int:
    if takes_gemv(None, case["T"]):
        return 1
    return 2 if case.get("form") else 3


def _work(case: Case, kernel: str, config: Case) -> Work | None:
    rows, k = case["T"], case["K"]
    if kernel == "_linear_gemm_kernel":
        return products.work(rows, case["N2"], k, config)
    if kernel != "_mixed_gemv_kernel":
        return fp8_kernels.work(rows, 1, case["N"], k, kernel, config)
    mine = {name.removeprefix("FP8_"): x for name, x in config.items() if "FP8_" in name}
    fp8 = fp8_kernels.work(rows, 1, case["N"], k, "gemv_kernel", mine)
    return either(products.work(rows, case["N2"], k, config), fp8)


_CSA, _HCA = 2 * 1024 + 2 * 256 + 64, 2 * 512
SPEC = KernelSpec(
    op=mixed_linear, reference=mixed_linear_reference, default=default_config, inputs=_inputs,
    tolerance=5e-3, grows="T", scratch=_scratch, launches=_launches,
    cases=(
        {"name": "small", "T": 3, "K": 200, "N": 130, "N2": 40},
        {"name": "small-quantized", "T": 9, "K": 200, "N": 130, "N2": 40, "form": "quantized"},
        {"name": "small-bf16", "T": 3, "K": 600, "N": 130, "N2": 40, "form": "bf16"},
        {"name": "small-fp32", "T": 3, "K": 600, "N": 130, "N2": 40, "form": "fp32"},
        *({"name": f"flash-{kind}-t{T}", "T": T, "K": 4096, "N": 1536, "N2": rows,
           "form": "quantized"} for kind, rows in (("csa", _CSA), ("hca", _HCA))
          for T in (1, 8, 64, 3456)),
        {"name": "flash-csa-dense-t8", "T": 8, "K": 4096, "N": 1536, "N2": _CSA},
        {"name": "pro-csa-t8", "T": 8, "K": 7168, "N": 2048, "N2": _CSA, "form": "quantized"},
        {"name": "pro-hca-t8", "T": 8, "K": 7168, "N": 2048, "N2": _HCA, "form": "quantized"},
    ),
    bytes_moved=lambda c: c["K"] * (c["N"] + 2 * c["N2"] + 3 * c["T"])
    + c["T"] * (2 * c["N"] + 4 * c["N2"]),
    flops=lambda c: 2 * c["T"] * (c["N"] + c["N2"]) * c["K"], work=_work,
)  # fmt: skip
