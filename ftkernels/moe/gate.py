"""Router in one launch: the logits ``x @ weight.T`` in true fp32, and the routes they give.

`gate_topk` is `route_topk` of `linear`'s logits, `gate_hash` is `route_hash` of them, bit for bit
where a score is a function of its own logit (softmax: within the rounding of its sum).
Blocks write their part of the logits to scratch; of each tile of tokens the last block to finish
adds up the splits of K in order and chooses.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from ftkernels import backend, check, config
from ftkernels.linear import products
from ftkernels.linear.linear import check_operands, matmul_rows, wide
from ftkernels.linear.products import (
    MAX_ROWS,
    Pieces,
    ProductConfig,
    block_tile,
    gemv_tile,
    is_gemv,
    is_last,
)  # fmt: skip
from ftkernels.moe import hash_router, router
from ftkernels.moe.hash_router import hash_rows
from ftkernels.moe.router import Routes, check_routes, lanes, topk_rows
from ftkernels.spec import COUNTER_BYTES, Case, Inputs, KernelSpec
from ftkernels.target import Target
from ftkernels.testing import randn
from ftkernels.work import Work

_MOST_TOKENS = 1 << 20  # a counter for each tile
_LOGITS = 2048  # that a block looks at together


def gate_topk(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, topk: int,
    route_scale: float = 1.0, score: str = "sqrtsoftplus", num_tokens: torch.Tensor | None = None,
    path: str | None = None, out: Routes | None = None, scratch: torch.Tensor | None = None,
) -> Routes:  # fmt: skip
    """Choose ``topk`` experts for each token by the product of its row with the experts' rows.

    Args:
        x: ``[T, C]``, bf16/fp16/fp32, rows may be strided.
        weight: ``[E, C]``, bf16 or fp32; rows or columns contiguous.
        bias: ``[E]`` fp32 added to the scores for the choice, or None.
        topk, route_scale, score, num_tokens: as `route_topk` has them.
        path: "gemm" or "gemv", as `linear` has it.
        out: ``(topk_weights, topk_ids)``; allocated when omitted.
        scratch: as ``scratch_bytes("gate_topk", T=.., E=.., C=..)`` says; allocated when omitted.

    Returns:
        ``topk_weights [T, topk]`` fp32 and ``topk_ids [T, topk]`` int32.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride, topk or score outside the contract.

    Graph-safe when ``out`` and ``scratch`` are given. One launch; by "gemv" one for 256 rows each.
    """
    out = _checked_topk(x, weight, bias, topk, score, num_tokens, path, out)
    check.number("gate_topk", "route_scale", route_scale)
    more = (("bias", bias), ("num_tokens", num_tokens))
    scratch = _given_scratch("gate_topk", x, weight, out, scratch, *more)
    if x.shape[0] == 0:
        return out
    if backend.use_reference(x):
        return _topk(x, weight, bias, topk, route_scale, score, num_tokens, path, out)
    _launch("gate_topk", x, weight, path, out, scratch, num_tokens, route_scale, score, bias=bias)
    return out


def gate_hash(
    x: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor, *,
    route_scale: float = 1.0, score: str = "sqrtsoftplus", num_tokens: torch.Tensor | None = None,
    path: str | None = None, out: Routes | None = None, scratch: torch.Tensor | None = None,
) -> Routes:  # fmt: skip
    """Weigh the experts that a table gives for each token by its row times the experts' rows.

    Args:
        x: ``[T, C]``, bf16/fp16/fp32, rows may be strided.
        weight: ``[E, C]``, bf16 or fp32; rows or columns contiguous.
        token_ids, tid2eid, route_scale, score, num_tokens: as `route_hash` has them.
        path: "gemm" or "gemv", as `linear` has it.
        out: ``(topk_weights, topk_ids)``; allocated when omitted.
        scratch: as ``scratch_bytes("gate_hash", T=.., E=.., C=..)`` says; allocated when omitted.

    Returns:
        ``topk_weights [T, topk]`` fp32 and ``topk_ids [T, topk]`` int32.

    Raises:
        TypeError: unsupported dtype.
        ValueError: shape, stride or score outside the contract.

    Graph-safe when ``out`` and ``scratch`` are given. One launch; by "gemv" one for 256 rows each.
    """
    out = _checked_hash(x, weight, token_ids, tid2eid, score, num_tokens, path, out)
    check.number("gate_hash", "route_scale", route_scale)
    more = (("token_ids", token_ids), ("tid2eid", tid2eid), ("num_tokens", num_tokens))
    scratch = _given_scratch("gate_hash", x, weight, out, scratch, *more)
    if x.shape[0] == 0 or tid2eid.shape[1] == 0:
        return out
    if backend.use_reference(x):
        return _hash(x, weight, token_ids, tid2eid, route_scale, score, num_tokens, path, out)
    _launch(
        "gate_hash", x, weight, path, out, scratch, num_tokens, route_scale, score,
        token_ids=token_ids, table=tid2eid,
    )  # fmt: skip
    return out


def _checked_topk(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, topk: int, score: str,
    num_tokens: torch.Tensor | None, path: str | None, out: Routes | None,
) -> Routes:  # fmt: skip
    op = "gate_topk"
    _check(op, x, weight, path)
    num_experts = weight.shape[0]
    if bias is not None:
        check.tensor(op, "bias", bias, (torch.float32,), (num_experts,), "[E]", x)
    check.integer(op, "topk", topk, min(1, topk) if isinstance(topk, int) else 1)
    if not 1 <= topk <= num_experts:
        raise ValueError(f"{op}: topk is {topk}, expected 1 to {num_experts}")
    return check_routes(op, x, topk, score, num_tokens, out, (weight, bias, num_tokens))


def _checked_hash(
    x: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor,
    score: str, num_tokens: torch.Tensor | None, path: str | None, out: Routes | None,
) -> Routes:  # fmt: skip
    op = "gate_hash"
    _check(op, x, weight, path)
    hash_router.check_table(op, token_ids, tid2eid, x)
    inputs = (weight, token_ids, tid2eid, num_tokens)
    return check_routes(op, x, tid2eid.shape[1], score, num_tokens, out, inputs)


def _check(op: str, x: torch.Tensor, weight: torch.Tensor, path: str | None) -> None:
    check_operands(op, x, weight, path)
    if x.shape[0] > _MOST_TOKENS:
        raise ValueError(f"{op}: x is {tuple(x.shape)}, expected at most {_MOST_TOKENS} rows")


def _given_scratch(
    op: str, x: torch.Tensor, weight: torch.Tensor, out: Routes, scratch: torch.Tensor | None,
    *more: tuple[str, torch.Tensor | None],
) -> torch.Tensor | None:  # fmt: skip
    if scratch is None:
        return None
    others = (("x", x), ("weight", weight), ("topk_weights", out[0]), ("topk_ids", out[1]), *more)
    num_bytes = _scratch(T=x.shape[0], E=weight.shape[0], C=x.shape[1])
    return check.scratch(op, scratch, num_bytes, x, others)


def gate_topk_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, topk: int,
    route_scale: float = 1.0, score: str = "sqrtsoftplus", num_tokens: torch.Tensor | None = None,
    path: str | None = None, out: Routes | None = None,
) -> Routes:  # fmt: skip
    """The definition in plain torch: `linear`'s, then `route_topk`'s."""
    out = _checked_topk(x, weight, bias, topk, score, num_tokens, path, out)
    return _topk(x, weight, bias, topk, route_scale, score, num_tokens, path, out)


def _topk(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, topk: int,
    route_scale: float, score: str, num_tokens: torch.Tensor | None, path: str | None,
    out: Routes,
) -> Routes:  # fmt: skip
    logits = matmul_rows(wide(x), wide(weight), path)
    return router.choose_reference(logits, bias, topk, route_scale, score, num_tokens, out)


def gate_hash_reference(
    x: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor, *,
    route_scale: float = 1.0, score: str = "sqrtsoftplus", num_tokens: torch.Tensor | None = None,
    path: str | None = None, out: Routes | None = None,
) -> Routes:  # fmt: skip
    """The definition in plain torch: `linear`'s, then `route_hash`'s."""
    out = _checked_hash(x, weight, token_ids, tid2eid, score, num_tokens, path, out)
    if x.shape[0] == 0 or tid2eid.shape[1] == 0:
        return out
    return _hash(x, weight, token_ids, tid2eid, route_scale, score, num_tokens, path, out)


def _hash(
    x: torch.Tensor, weight: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor,
    route_scale: float, score: str, num_tokens: torch.Tensor | None, path: str | None,
    out: Routes,
) -> Routes:  # fmt: skip
    logits = matmul_rows(wide(x), wide(weight), path)
    return hash_router.weigh_table_reference(
        logits, token_ids, tid2eid, route_scale, score, num_tokens, out
    )


def default_config(key: Case) -> ProductConfig:
    """As `linear`'s; few tokens a block for the path "gemv", since one block chooses for them."""
    return products.default_config({**key, "T": min(key["T"], 8)} if key["gemv"] else key)


def candidates(key: Case, target: Target) -> Iterable[ProductConfig]:
    return products.candidates({**key, "T": min(key["T"], 8)} if key["gemv"] else key, target)


def _scratch(*, T: int, E: int, C: int) -> int:
    """Counters, then the logits of every split."""
    rows = max(T, min(T, MAX_ROWS) * Pieces.of(E, C).splits)
    return COUNTER_BYTES + 4 * rows * E


def _launch(
    op: str, x: torch.Tensor, weight: torch.Tensor, path: str | None, out: Routes,
    scratch: torch.Tensor | None, num_tokens: torch.Tensor | None, route_scale: float, score: str,
    *, bias: torch.Tensor | None = None, token_ids: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> None:  # fmt: skip
    total, width = x.shape
    num_experts = weight.shape[0]
    gemv = is_gemv(path, total)
    pieces = Pieces.of(num_experts, width) if gemv else Pieces(1, 1, 1)
    num_bytes = _scratch(T=total, E=num_experts, C=width)
    weights, ids = out
    with backend.on_device(x):
        scratch = check.scratch(op, scratch, num_bytes, x)
        key = products.product_key(x, weight, gemv)
        cfg = config.lookup(op, key, default_config, grows="T")
        tiles_n = triton.cdiv(num_experts, cfg.block_n)
        most = MAX_ROWS if gemv else total
        for first in range(0, total, most):
            end = min(first + most, total)
            _gate_kernel[tiles_n, triton.cdiv(end - first, cfg.block_t), pieces.splits](
                x, x.stride(0), weight, weight.stride(0), weight.stride(1),
                scratch[:COUNTER_BYTES].view(torch.int32),
                scratch[COUNTER_BYTES:num_bytes].view(torch.float32),
                bias, token_ids, 0 if token_ids is None else token_ids.stride(0),
                table, 0 if table is None else table.stride(0),
                weights, weights.stride(0), ids, ids.stride(0), num_tokens,
                first, end, num_experts, width, route_scale,
                BLOCK_T=cfg.block_t, BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k,
                EVEN_K=products.is_even(width, pieces, cfg), GEMV=gemv, SPLITS=pieces.splits,
                SLICES=pieces.slices, SIZE=pieces.size,
                DTYPE=products.operand_type(x, weight), SCORE=score, TOPK=ids.shape[1],
                LANES_K=lanes(ids.shape[1]), BLOCK_E=lanes(num_experts),
                BLOCK_R=_rows_together(total, num_experts, score),
                HAS_BIAS=bias is not None, HAS_TABLE=table is not None,
                HAS_COUNT=num_tokens is not None,
                num_warps=cfg.num_warps, num_stages=cfg.num_stages,
            )  # fmt: skip


def _rows_together(num_tokens: int, num_experts: int, score: str) -> int:
    """Tokens a block chooses for at a time; of softmax the same always, for its sum's sake."""
    most = min(8, max(1, _LOGITS // lanes(num_experts)))
    return most if score == "softmax" else min(most, triton.next_power_of_2(num_tokens))


@triton.jit(do_not_specialize=["T"])
def _gate_kernel(
    x_ptr, stride_xt,  # [T, C]
    w_ptr, stride_wn, stride_wk,  # [E, C]
    counters_ptr,  # [token tiles]
    partial_ptr,  # [SPLITS, T, E]
    bias_ptr,  # [E]
    token_ptr, stride_tt,  # [T]
    table_ptr, stride_bv,  # [V, topk]
    weights_ptr, stride_wt,  # [T, topk]
    ids_ptr, stride_it,  # [T, topk]
    count_ptr,  # [1]
    first, T, E, C, route_scale,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GEMV: tl.constexpr, SPLITS: tl.constexpr, SLICES: tl.constexpr, SIZE: tl.constexpr,
    DTYPE: tl.constexpr, SCORE: tl.constexpr, TOPK: tl.constexpr, LANES_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_TABLE: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    pid_n, pid_t, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = first + pid_t * BLOCK_T
    offs_t = start + tl.arange(0, BLOCK_T)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (split * (T - first) + offs_t - first).to(tl.int64) * E
    if GEMV:
        acc = gemv_tile(
            x_ptr, stride_xt, w_ptr, stride_wn, stride_wk, offs_t, offs_n, split, T, E, C,
            BLOCK_T, BLOCK_N, BLOCK_K, EVEN_K, SLICES, SIZE, DTYPE,
        )  # fmt: skip
        mask = (offs_n < E)[:, None] & (offs_t < T)[None, :]
        tl.store(partial_ptr + rows[None, :] + offs_n[:, None], acc, mask=mask)
    else:
        acc = block_tile(
            x_ptr, stride_xt, 1, offs_t, T, w_ptr, stride_wn, stride_wk, offs_n, E, C,
            BLOCK_T, BLOCK_N, BLOCK_K, EVEN_K, DTYPE,
        )  # fmt: skip
        mask = (offs_t < T)[:, None] & (offs_n < E)[None, :]
        tl.store(partial_ptr + rows[:, None] + offs_n[None, :], acc, mask=mask)
    if is_last(counters_ptr + pid_t, tl.num_programs(0) * SPLITS):
        offs_e = tl.arange(0, BLOCK_E)[:, None]
        for r in range(0, tl.minimum(BLOCK_T, T - start), BLOCK_R):
            tokens = start + r + tl.arange(0, BLOCK_R)
            live = tokens < T
            logits = tl.zeros((BLOCK_E, BLOCK_R), tl.float32)
            for s in tl.static_range(SPLITS):
                at = (s * (T - first) + tokens - first).to(tl.int64) * E
                logits += tl.load(
                    partial_ptr + at[None, :] + offs_e, mask=live[None, :] & (offs_e < E),
                    other=0.0, cache_modifier=".cg",
                )  # fmt: skip
            if HAS_TABLE:
                hash_rows(
                    logits, tokens, live, token_ptr, stride_tt, table_ptr, stride_bv,
                    weights_ptr, stride_wt, ids_ptr, stride_it, count_ptr, E, route_scale,
                    SCORE, TOPK, LANES_K, BLOCK_E, HAS_COUNT,
                )  # fmt: skip
            else:
                topk_rows(
                    logits, tokens, live, bias_ptr, weights_ptr, stride_wt, ids_ptr, stride_it,
                    count_ptr, E, route_scale, SCORE, TOPK, LANES_K, BLOCK_E, HAS_BIAS, HAS_COUNT,
                )  # fmt: skip


def _operands(case: Case, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float32 if case.get("fp32") else torch.bfloat16
    width = case["C"]
    x = randn(case["T"], width, dtype=dtype, device=device, seed=seed)
    scale = 2 * width**-0.5
    weight = randn(case["E"], width, dtype=dtype, device=device, scale=scale, seed=seed + 1)
    return x, weight


def _topk_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    bias = randn(case["E"], device=device, scale=0.5, seed=seed + 2)
    kwargs = {"topk": case["topk"], "route_scale": 1.5}
    return (*_operands(case, device, seed), bias), kwargs


def _hash_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    vocab, topk = case["V"], case["topk"]
    ids = torch.arange(case["T"], device=device, dtype=torch.int32) * 97 % vocab
    table = torch.arange(vocab * topk, device=device).view(vocab, -1) * 31 % case["E"]
    return (*_operands(case, device, seed), ids, table), {"route_scale": 1.5}


def _bytes(case: Case) -> int:
    size = 4 if case.get("fp32") else 2
    return size * case["C"] * (case["T"] + case["E"]) + 8 * case["T"] * case["topk"]


def _flops(case: Case) -> int:
    return 2 * case["T"] * case["E"] * case["C"]


def _work(case: Case, kernel: str, config: Case) -> Work:
    if not config["GEMV"]:
        config = {name: config[name] for name in ("BLOCK_T", "BLOCK_N", "BLOCK_K")}
    return products.work(case["T"], case["E"], case["C"], config)


_FLASH, _PRO = {"E": 256, "C": 4096, "topk": 6}, {"E": 384, "C": 7168, "topk": 6}
SPECS = (
    KernelSpec(
        op=gate_topk, reference=gate_topk_reference, default=default_config,
        candidates=candidates, inputs=_topk_inputs, tolerance=1e-5, grows="T", scratch=_scratch,
        cases=(
            {"name": "small", "T": 5, "E": 19, "C": 100, "topk": 4},
            *({"name": f"flash-t{T}", "T": T, **_FLASH} for T in (1, 8, 64, 3456)),
            {"name": "exact-t64", "T": 64, **_FLASH, "fp32": 1},
            *({"name": f"pro-t{T}", "T": T, **_PRO} for T in (1, 64, 3456)),
        ),
        bytes_moved=_bytes, flops=_flops, work=_work,
    ),
    KernelSpec(
        op=gate_hash, reference=gate_hash_reference, default=default_config,
        candidates=candidates, inputs=_hash_inputs, tolerance=1e-5, grows="T", scratch=_scratch,
        cases=(
            {"name": "small", "T": 5, "E": 19, "C": 100, "topk": 4, "V": 50},
            *({"name": f"flash-t{T}", "T": T, **_FLASH, "V": 129280} for T in (1, 8, 64, 3456)),
            *({"name": f"pro-t{T}", "T": T, **_PRO, "V": 129280} for T in (1, 3456)),
        ),
        bytes_moved=_bytes, flops=_flops, work=_work,
    ),
)  # fmt: skip
