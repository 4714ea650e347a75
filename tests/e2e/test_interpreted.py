"""The whole model with its kernels in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from ftkernels.testing import count_launches
from ftruntime import LLM, SamplingParams
with LLM(model=sys.argv[1], numerics=sys.argv[2], num_tokens=1024) as llm, count_launches() as seen:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    out = llm.generate([[5, 6, 7, 8, 9]], params)[0].outputs[0]
print(json.dumps([out.token_ids, [list(d.values())[0] for d in out.logprobs], sorted(set(seen))]))
"""


def run(directory, numerics, **env):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), numerics],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("numerics", ["exact", "official"])
def test_same_tokens_as_the_references(demos, numerics):
    """Under official numerics the interpreted run keeps FP8 and FP4 codes."""
    plain = {"TRITON_INTERPRET": ""}
    tokens, logprobs, launches = run(demos["tiny"], numerics, **plain)
    assert launches == []
    got, values, kernels = run(demos["tiny"], numerics, TRITON_INTERPRET="1")
    assert len(kernels) >= 8
    assert got == tokens
    tolerance = 1e-5 if numerics == "exact" else 0.1
    assert values == pytest.approx(logprobs, abs=tolerance)
