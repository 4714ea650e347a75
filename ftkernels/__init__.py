"""Kernels for DeepSeek-V4 on consumer cards: plain tensors in, plain tensors out.

Every op stands here with its plain-torch twin, ``<op>`` and ``<op>_reference``.
"""

from ftkernels import backend  # first: fixes interpretation before any kernel is decorated
from ftkernels.attention.append import append_kv, append_kv_reference
from ftkernels.attention.carry import load_carry, load_carry_reference
from ftkernels.attention.compressor import (
    compress_kv, compress_kv_reference, compressor_state_shape,
)  # fmt: skip
from ftkernels.attention.decode import mla_decode, mla_decode_reference
from ftkernels.attention.index_query import index_query, index_query_reference
from ftkernels.attention.indexer import index_select, index_select_reference
from ftkernels.attention.kv_store import (
    load_kv, load_kv_reference, store_kv, store_kv_reference,
)  # fmt: skip
from ftkernels.attention.merge import merge_splits, merge_splits_reference
from ftkernels.attention.pools import empty_pool
from ftkernels.attention.prefill import mla_prefill, mla_prefill_reference
from ftkernels.backend import UnsupportedDeviceError
from ftkernels.linear.embed import embed, embed_reference
from ftkernels.linear.fp8_linear import fp8_linear, fp8_linear_reference
from ftkernels.linear.grouped_linear import grouped_linear, grouped_linear_reference
from ftkernels.linear.linear import linear, linear_reference
from ftkernels.linear.mixed_linear import mixed_linear, mixed_linear_reference
from ftkernels.mhc.head import hc_head, hc_head_reference
from ftkernels.mhc.post import hc_post, hc_post_reference
from ftkernels.mhc.post_pre import hc_post_pre, hc_post_pre_reference
from ftkernels.mhc.pre import hc_pre, hc_pre_reference
from ftkernels.moe.align import moe_align, moe_align_reference
from ftkernels.moe.bank import ExpertBank
from ftkernels.moe.combine import moe_combine, moe_combine_reference
from ftkernels.moe.count_missing import count_missing, count_missing_reference
from ftkernels.moe.expert_cache import ExpertCache
from ftkernels.moe.gate import (
    gate_hash, gate_hash_reference, gate_topk, gate_topk_reference,
)  # fmt: skip
from ftkernels.moe.gemm_fp4 import moe_gemm_fp4, moe_gemm_fp4_reference
from ftkernels.moe.gemv_fp4 import moe_gemv_fp4, moe_gemv_fp4_reference
from ftkernels.moe.hash_router import route_hash, route_hash_reference
from ftkernels.moe.moe_fp4 import moe_fp4, moe_fp4_reference
from ftkernels.moe.router import route_topk, route_topk_reference
from ftkernels.moe.swiglu import swiglu_clamp, swiglu_clamp_reference
from ftkernels.norm.rms_norm import rms_norm, rms_norm_reference
from ftkernels.offline import compile_for
from ftkernels.quant.act_quant import quantize_fp8, quantize_fp8_reference
from ftkernels.quant.hadamard import hadamard, hadamard_reference
from ftkernels.quant.pack import (
    pack_fp4, pack_fp4_reference, unpack_fp4, unpack_fp4_reference,
)  # fmt: skip
from ftkernels.quant.round_trip import quant_round_trip, quant_round_trip_reference
from ftkernels.quant.weight_quant import (
    dequantize_fp4, dequantize_fp4_reference, dequantize_fp8, dequantize_fp8_reference,
    quantize_fp4, quantize_fp4_reference,
)  # fmt: skip
from ftkernels.rope.rope import (
    apply_rope, apply_rope_reference, rope_tables, rope_tables_reference,
)  # fmt: skip
from ftkernels.sampling.adjust import adjust_logits, adjust_logits_reference
from ftkernels.sampling.logprobs import top_logprobs, top_logprobs_reference
from ftkernels.sampling.sample import sample, sample_reference
from ftkernels.spec import KernelSpec, registry, scratch_bytes
from ftkernels import library  # last: registers every op under torch.ops.ftkernels

__version__ = "0.1.0"
__all__ = [
    "ExpertBank", "ExpertCache", "KernelSpec", "UnsupportedDeviceError", "__version__",
    "adjust_logits", "adjust_logits_reference", "append_kv", "append_kv_reference", "apply_rope",
    "apply_rope_reference", "backend", "compile_for",
    "compress_kv", "compress_kv_reference", "compressor_state_shape", "count_missing",
    "count_missing_reference", "dequantize_fp4",
    "dequantize_fp4_reference", "dequantize_fp8", "dequantize_fp8_reference", "embed",
    "embed_reference", "empty_pool", "fp8_linear", "fp8_linear_reference", "gate_hash",
    "gate_hash_reference", "gate_topk", "gate_topk_reference", "grouped_linear",
    "grouped_linear_reference", "hadamard", "hadamard_reference", "hc_head", "hc_head_reference",
    "hc_post", "hc_post_pre", "hc_post_pre_reference", "hc_post_reference", "hc_pre",
    "hc_pre_reference", "index_query", "index_query_reference", "index_select",
    "index_select_reference", "library", "linear", "linear_reference",
    "load_carry", "load_carry_reference", "load_kv", "load_kv_reference",
    "merge_splits", "merge_splits_reference", "mixed_linear", "mixed_linear_reference",
    "mla_decode", "mla_decode_reference", "mla_prefill",
    "mla_prefill_reference", "moe_align", "moe_align_reference", "moe_combine",
    "moe_combine_reference", "moe_fp4", "moe_fp4_reference", "moe_gemm_fp4",
    "moe_gemm_fp4_reference", "moe_gemv_fp4", "moe_gemv_fp4_reference", "pack_fp4",
    "pack_fp4_reference", "quant_round_trip", "quant_round_trip_reference", "quantize_fp4",
    "quantize_fp4_reference", "quantize_fp8", "quantize_fp8_reference", "registry", "rms_norm",
    "rms_norm_reference", "rope_tables", "rope_tables_reference", "route_hash",
    "route_hash_reference", "route_topk", "route_topk_reference", "sample", "sample_reference",
    "scratch_bytes", "store_kv", "store_kv_reference", "swiglu_clamp", "swiglu_clamp_reference",
    "top_logprobs", "top_logprobs_reference", "unpack_fp4", "unpack_fp4_reference",
]  # fmt: skip
