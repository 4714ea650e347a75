"""Shapes and element types of what every op returns, from its arguments; what a tracer needs.

All of them are pure functions of sizes. Results are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch

from ftkernels.attention.pools import PACKED_HEAD_DIM

Form = tuple[Sequence[int], torch.dtype]
Forms = Callable[[SimpleNamespace], tuple[Form, ...]]

_FP32, _INT32, _U8, _E4M3 = torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn
_GROUP, _FOLDED = 32, 128


def _as(name: str) -> Forms:
    """One result of the shape and type of an argument."""

    def forms(a: SimpleNamespace) -> tuple[Form, ...]:
        x = getattr(a, name)
        return ((x.shape, x.dtype),)

    return forms


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _packed(a: SimpleNamespace) -> tuple[Form, ...]:
    *lead, rows, half = a.packed.shape
    if a.fold:
        return (a.packed.shape, _U8), ((*lead, _cdiv(2 * half, _FOLDED), rows), _INT32)
    return (a.packed.shape, _U8), ((*lead, 2 * half // _GROUP, rows), _U8)


def _unpacked(a: SimpleNamespace) -> tuple[Form, ...]:
    *lead, half = a.weight.shape
    return (a.weight.shape, _U8), ((*lead, 2 * half // _GROUP), _U8)


def _routes(rows: torch.Tensor, topk: int) -> tuple[Form, ...]:
    size = (rows.shape[0], topk)
    return (size, _FP32), (size, _INT32)


def _aligned(a: SimpleNamespace) -> tuple[Form, ...]:
    routes = a.topk_ids.shape[0] * a.topk_ids.shape[1]
    blocks = _cdiv(routes + a.num_experts * (a.block_m - 1), a.block_m)
    return ((blocks * a.block_m,), _INT32), ((blocks,), _INT32), ((1,), _INT32)


def _expert_rows(a: SimpleNamespace, routes: int) -> tuple[Form, ...]:
    width = a.weight.shape[1]
    return (((routes, width if a.swiglu_limit is None else width // 2), a.out_dtype),)


def _attended(a: SimpleNamespace) -> tuple[Form, ...]:
    return (a.q.shape, a.q.dtype), (a.q.shape[:2], _FP32)


def _mixes(a: SimpleNamespace) -> tuple[Form, ...]:
    tokens, hc, width = a.streams.shape
    return ((tokens, width), a.streams.dtype), ((tokens, hc), _FP32), ((tokens, hc, hc), _FP32)


def _logprobs(a: SimpleNamespace) -> tuple[Form, ...]:
    rows = a.logits.shape[0]
    return ((rows,), _FP32), ((rows, a.num_top), _INT32), ((rows, a.num_top), _FP32)


RESULTS: Mapping[str, Forms] = {
    "quantize_fp8": lambda a: (
        (a.x.shape, _E4M3), ((a.x.shape[0], _cdiv(a.x.shape[1], a.group)), _U8),
    ),
    "quantize_fp4": lambda a: (
        ((a.x.shape[0], a.x.shape[1] // 2), _U8),
        ((a.x.shape[0], a.x.shape[1] // a.group), _U8),
    ),
    "dequantize_fp8": lambda a: ((a.x_fp8.shape, a.dtype),),
    "dequantize_fp4": lambda a: (((a.packed.shape[0], 2 * a.packed.shape[1]), a.dtype),),
    "quant_round_trip": _as("x"),
    "pack_fp4": _packed,
    "unpack_fp4": _unpacked,
    "hadamard": _as("x"),
    "rms_norm": _as("x"),
    "rope_tables": lambda a: (((a.max_positions, a.dim // 2), _FP32),) * 2,
    "apply_rope": _as("x"),
    "embed": lambda a: (
        ((a.token_ids.shape[0], a.hc, a.weight.shape[1]), a.weight.dtype),
    ),
    "linear": lambda a: (((a.x.shape[0], a.weight.shape[0]), a.out_dtype or a.x.dtype),),
    "fp8_linear": lambda a: (((a.x.shape[0], a.weight.shape[0]), a.out_dtype),),
    "mixed_linear": lambda a: (
        ((a.x.shape[0], a.weight.shape[0]), a.out_dtype), ((a.x.shape[0], a.dense.shape[0]), _FP32),
    ),
    "grouped_linear": lambda a: (
        ((a.x.shape[0], *a.weight.shape[:2]), a.out_dtype or a.x.dtype),
    ),
    "route_topk": lambda a: _routes(a.router_logits, a.topk),
    "route_hash": lambda a: _routes(a.router_logits, a.tid2eid.shape[1]),
    "gate_topk": lambda a: _routes(a.x, a.topk),
    "gate_hash": lambda a: _routes(a.x, a.tid2eid.shape[1]),
    "moe_align": _aligned,
    "count_missing": lambda a: (((1,), _INT32),),
    "moe_gemm_fp4": lambda a: _expert_rows(a, a.num_routes),
    "moe_gemv_fp4": lambda a: _expert_rows(a, a.topk_ids.shape[0] * a.topk_ids.shape[1]),
    "swiglu_clamp": lambda a: (
        ((a.gate_up.shape[0], a.gate_up.shape[1] // 2), a.gate_up.dtype),
    ),
    "moe_combine": lambda a: (
        ((a.routed.shape[0], a.routed.shape[2]), a.out_dtype or a.routed.dtype),
    ),
    "moe_fp4": lambda a: (
        (a.x.shape, a.out_dtype or (a.x.dtype if a.x_scale is None else torch.bfloat16)),
    ),
    "store_kv": lambda a: (),
    "load_kv": lambda a: (
        (
            (a.slots.shape[0], a.pool.shape[2] if a.kv_format == "bf16" else PACKED_HEAD_DIM),
            a.dtype,
        ),
    ),
    "compress_kv": lambda a: (),
    "append_kv": lambda a: (),
    "load_carry": lambda a: (),
    "index_query": _as("q"),
    "index_select": lambda a: (((a.index_q.shape[0], a.topk), _INT32),),
    "mla_prefill": _attended,
    "mla_decode": _attended,
    "merge_splits": lambda a: (
        (a.partial.shape[1:], a.out_dtype), (a.partial.shape[1:3], _FP32),
    ),
    "hc_pre": _mixes,
    "hc_post": _as("streams"),
    "hc_post_pre": lambda a: ((a.streams.shape, a.streams.dtype), *_mixes(a)),
    "hc_head": lambda a: (
        ((a.streams.shape[0], a.streams.shape[2]), a.streams.dtype),
    ),
    "sample": lambda a: (((a.logits.shape[0],), _INT32),),
    "top_logprobs": _logprobs,
    "adjust_logits": _as("logits"),
}  # fmt: skip
