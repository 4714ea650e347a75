"""The whole model with its kernels in Triton's interpreter, in a process of its own.

mHC runs its reference in the short runs: a Sinkhorn takes the interpreter longer than a layer's
attention. With RUN_SLOW=1 every kernel is interpreted, over the lengths of the plain checks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ftruntime.model.numerics import Numerics
from tests.e2e.test_against_transformers import LOGIT_TOL, prompt, relative
from tests.support.direct import Direct

ROOT = Path(__file__).parents[2]
SLOW = os.environ.get("RUN_SLOW") == "1"
GENERATE = """
import json, sys
from ftkernels.testing import count_launches
from ftruntime import LLM, SamplingParams
with LLM(model=sys.argv[1], numerics="exact", num_tokens=1024) as llm, count_launches() as seen:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    out = llm.generate([[5, 6, 7, 8, 9]], params)[0].outputs[0]
print(json.dumps([out.token_ids, [list(d.values())[0] for d in out.logprobs], sorted(set(seen))]))
"""
RUN_MODEL = """
import json, sys
from pathlib import Path
import torch
import ftkernels
from ftkernels.testing import count_launches
from tests.e2e import test_interpreted
directory, numerics, what, source, target, whole = sys.argv[1:]
if not int(whole):
    for name in ("hc_pre", "hc_post_pre"):
        reference = getattr(ftkernels, f"{name}_reference")
        setattr(ftkernels, name, lambda *a, op=reference, scratch=None, **k: op(*a, **k))
torch.set_num_threads(1)
model = test_interpreted.served(Path(directory), numerics)
with count_launches() as seen:
    result = getattr(test_interpreted, what)(model, torch.load(source))
torch.save(result, target)
print(json.dumps(sorted(set(seen))))
"""
KERNELS = {
    "_store_kv_kernel", "_append_kv_kernel", "csa_kernel", "_index_query_kernel",
    "index_split_kernel",
}  # fmt: skip


def process(program: str, *args: object, **env: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)], env={**os.environ, **env}, cwd=ROOT,
        capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def served(directory: Path, numerics: str) -> Direct:
    """With "exact" or "official" numerics, or "round trips": the latter's in fp32 maths. Codes stay
    codes but for "exact"."""
    chosen = (
        Numerics(torch.float32, round_trips=True)
        if numerics == "round trips"
        else Numerics.of(numerics)
    )
    return Direct(directory, chosen, quantized=numerics != "exact")


def chunked(model: Direct, ids: list[int]) -> torch.Tensor:
    return model.logits(ids, tuple(range(128, len(ids), 128)))


def token_by_token(model: Direct, ids: list[int]) -> torch.Tensor:
    return model.decoded(ids, 0)


@torch.inference_mode()
def layer_by_layer(
    model: Direct, given: tuple[list[int], dict[int, torch.Tensor]]
) -> dict[int, torch.Tensor]:
    """Streams after each layer of a prefill; with inputs of the layers, each on its own input."""
    from ftruntime.types import StepPlan

    ids, inputs = given
    layers = model.config.num_hidden_layers
    plan = StepPlan(0, "prefill", (model.part(ids, 0, len(ids)),), (0, layers))
    batch = model.builder.build(plan)
    streams = {0: model.model.embed(batch)}
    for layer in range(layers):
        x = inputs.get(layer, streams[layer]).clone()
        streams[layer + 1] = model.model.forward(x, batch, model.storage, (layer, layer + 1))
    return streams


def interpreted(tmp_path: Path, directory: Path, numerics: str, what: str, given: object):
    """What ``what`` gives with kernels interpreted."""
    source, target = tmp_path / "given.pt", tmp_path / "result.pt"
    torch.save(given, source)
    kernels = process(
        RUN_MODEL, directory, numerics, what, source, target, int(SLOW), TRITON_INTERPRET="1"
    )
    expected = KERNELS | (
        {"_mla_decode_kernel"} if what == "token_by_token" else {"_mla_prefill_kernel"}
    )
    if numerics != "exact":
        expected |= {"_moe_gemm_fp4_kernel", "gemm_kernel"}
    assert set(kernels) >= expected, sorted(expected - set(kernels))
    return torch.load(target)


def test_same_tokens_as_the_references(demos):
    plain = {"TRITON_INTERPRET": ""}
    tokens, logprobs, launches = process(GENERATE, demos["tiny"], **plain)
    assert launches == []
    got, values, kernels = process(GENERATE, demos["tiny"], TRITON_INTERPRET="1")
    assert {"_mla_decode_kernel", "_mla_prefill_kernel", *KERNELS} <= set(kernels)
    assert got == tokens
    assert values == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("what", "length", "whole_length"), [("chunked", 130, 300), ("token_by_token", 9, 129)]
)
def test_logits_against_transformers(demos, oracles, tmp_path, what, length, whole_length):
    ids = prompt(whole_length if SLOW else length, 512)
    got = interpreted(tmp_path, demos["tiny"], "exact", what, ids)
    with torch.no_grad():
        expected = oracles["tiny"](torch.tensor([ids])).logits[0]
    error = relative(got, expected)
    print(f"\n{len(ids)} tokens, {what}: {error:.2e} of the largest logit")
    assert error < LOGIT_TOL


@pytest.mark.parametrize(("numerics", "bound"), [("round trips", 1e-5), ("official", 0.05)])
def test_layers_on_the_references_own_inputs(demos, tmp_path, numerics, bound):
    """In bf16 maths probabilities are rounded too, and what a rounding flips is visible."""
    ids = prompt(40 if SLOW else 20, 512)
    expected = layer_by_layer(served(demos["tiny"], numerics), (ids, {}))
    got = interpreted(tmp_path, demos["tiny"], numerics, "layer_by_layer", (ids, expected))
    for layer in range(1, len(expected)):
        want, have = expected[layer].float(), got[layer].float()
        error = (have - want).abs().amax((1, 2)) / want.abs().amax((1, 2))
        print(f"layer {layer - 1}: median {error.median():.2e}, largest {error.max():.2e}")
        assert error.median() < bound, layer
