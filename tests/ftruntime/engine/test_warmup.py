"""After the warm-up no request launches a kernel that was not launched before.

A variant of a kernel is what the compiler makes another kernel of, see `tests.support.launches`.
The engine is one for a card but for where it computes: codes, scratch and the whole warm-up.

Mutants run, each noticed: prefill of powers of two only, or of the longest chunk only; decode of
one row only; no step of two sequences; no row that starts behind a page; none that picks rows;
without adjusted logits or log-probabilities; arrays of a step back to back, whatever their
alignment; strides of block tables that a kernel specializes on.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from ftkernels import backend
from ftruntime import LLM, SamplingParams
from ftruntime.config import RuntimeConfig
from ftruntime.demo import make_demo
from ftruntime.engine import build
from ftruntime.engine.warmup import steps
from ftruntime.facts import probe
from ftruntime.model.config import ModelConfig
from ftruntime.plan import resolve
from tests.support.launches import noted, unlike

FLAGS = {
    "num_tokens": 32768, "max_running_requests": 50, "max_prefill_length": 640,
    "max_model_len": 2048, "numerics": "official",
}  # fmt: skip
ENGINES = {
    "resident": {"decode_interleave_every": 1},
    "offload": {"moe_backend": "offload", "moe_cache_size": 20},
    "naive": {"cache_type": "naive", "prefill_layer_groups": 3},
}
# kernels with FP4 experts on the device, by the ops that launch them
KERNELS = {
    "_embed_kernel", "_hc_mix_kernel", "_hc_post_kernel", "_rms_norm_kernel", "_apply_rope_kernel",
    "_store_kv_kernel", "_append_kv_kernel", "csa_kernel", "_load_carry_kernel",
    "_index_query_kernel", "index_split_kernel", "index_stream_kernel",
    "_mla_prefill_kernel", "_mla_decode_kernel",
    "prepare_kernel", "gemm_kernel", "gemv_kernel", "_mixed_gemv_kernel",
    "_linear_gemm_kernel", "_linear_gemv_kernel",
    "_gate_kernel", "_moe_align_kernel", "_moe_gemm_fp4_kernel", "_moe_gemv_fp4_kernel",
    "_moe_combine_kernel",
    "_sample_kernel", "_adjust_logits_kernel", "_top_logprobs_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """Queries of the first chunk pick all rows that they see."""
    path = tmp_path_factory.mktemp("demo") / "tiny"
    make_demo(path, preset="tiny")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "index_topk": 256}))
    return path


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 512, (count,), generator=generator).tolist()


def requests():
    """Prompts asked together, and how their tokens are drawn."""
    head = tokens(300, 0)
    yield [tokens(1, 1)], {}
    yield [head + tokens(470, 2)], {}
    yield [head + tokens(9, 3)], {}
    yield [tokens(130, 4), tokens(3, 5)], {}
    yield [tokens(7 * n + 1, n) for n in range(6, 12)], {"max_tokens": 9}
    for count in (3, 13, 16, 23, 33, 48):
        yield [head[:140] + tokens(11 * n % 97 + 1, n) for n in range(count)], {}
    yield [tokens(5 * n + 1, 90 + n) for n in range(52)], {}
    yield [tokens(1900, 91), tokens(700, 92)], {}
    yield [tokens(16, 21)], {"temperature": 0}
    yield [tokens(17, 22)] * 2, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}
    yield [tokens(33, 23)], {"presence_penalty": 1, "repetition_penalty": 1.5}
    yield [tokens(5, 24)] * 3, {"logit_bias": {n: 1.0 for n in range(16)}}
    for count in (0, 1, 16, 20):
        yield [tokens(6, 25)], {"logprobs": count}
        yield [tokens(290, 26)], {"prompt_logprobs": count}


@pytest.mark.skipif(
    backend.interpreted(), reason="launches on meta tensors need a process without TRITON_INTERPRET"
)
@pytest.mark.parametrize("flags", ENGINES.values(), ids=ENGINES)
def test_requests_launch_nothing_new(flags, demo, monkeypatch):
    monkeypatch.setattr(build, "_runs_kernels", lambda plan: True)
    whole = build.warm_up
    monkeypatch.setattr(build, "warm_up", lambda *a, **k: whole(*a, **{**k, "every": True}))
    with noted() as seen, LLM(model=demo, **FLAGS, **flags) as llm:
        warm = set(seen)
        if flags == ENGINES["resident"]:
            assert {name for name, *_ in warm} == KERNELS
        for prompts, params in requests():
            params = {"max_tokens": 4, "ignore_eos": True, "seed": 3, **params}
            llm.generate(prompts, SamplingParams(**params))
            new = [unlike(variant, warm) for variant in seen - warm]
            assert not new, (len(prompts), len(prompts[0]), params, *new)


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize(
    ("context", "chunk", "running"),
    [(1, 128, 1), (2, 128, 3), (128, 384, 2), (129, 128, 1), (130, 256, 5), (5000, 640, 17)],
)
def test_steps_are_ones_that_serving_could_plan(context, chunk, running, every, demo):
    shape = ModelConfig.from_dir(demo)
    plan = resolve(RuntimeConfig.from_flags(model=str(demo)), shape, probe("cpu"))
    plan = dataclasses.replace(
        plan, max_model_len=context, chunk_tokens=chunk, max_running=running
    )  # fmt: skip
    counts = {"prefill": [], "decode": []}
    for kind, seqs in steps(plan, 4 * shape.index_topk, every):
        counts[kind].append(sum(len(seq.token_ids) for seq in seqs))
        assert counts[kind][-1] <= (chunk if kind == "prefill" else running)
        for seq in seqs:
            assert seq.row == running, "the padding row"
            assert 0 <= seq.start < seq.start + len(seq.token_ids) <= max(1, context)
            last = seq.start + len(seq.token_ids) - 1
            assert seq.new_pages == tuple((page, 0, 0) for page in range(last // 128 + 1))
    assert max(counts["decode"]) == (running if every else 1)
    assert max(counts["prefill"]) == (chunk if every else 3 if context > 3 else max(1, context - 1))
