"""Several tensor-parallel ranks on CPU give what one rank gives.

Expectations come from one rank. `exact`: prompt log-probabilities within 1e-5, the same greedy
text while long prompts arrive; with experts in host memory every rank copies the same experts, each
its share of the bytes. RUN_SLOW=1: four ranks and 500 tokens, else two and 120.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from ftruntime import LLM, SamplingParams
from tests.support.live import children_of

SLOW = os.environ.get("RUN_SLOW") == "1"
RANKS = (2, 4) if SLOW else (2,)
LENGTHS = {40: 500 if SLOW else 120, 300: 60, 700: 60, 450: 40}  # tokens -> tokens to generate
FLAGS = {
    "numerics": "exact", "num_tokens": 4096, "max_running_requests": 3, "max_prefill_length": 128,
    "decode_interleave_every": 1, "stall_timeout_s": 60,
}  # fmt: skip


def tokens(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(2, 512, (count,), generator=generator).tolist()


def run(model: object, ranks: int, lengths: dict[int, int] = LENGTHS, **flags: object):
    with LLM(model=model, tp=ranks, **{**FLAGS, **flags}) as llm:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, prompt_logprobs=0)
            for count in lengths.values()
        ]
        outs = llm.generate([tokens(count) for count in lengths], params)
        stats = llm.stats()
    assert stats["integrity"] == "ok"
    assert (stats["used_pages"], stats["used_window_pages"]) == (0, 0)
    return outs, stats


OFFLOAD = {"moe_backend": "offload", "moe_cache_rate": 0.3}


@pytest.mark.parametrize("moe", [OFFLOAD, {}] if SLOW else [OFFLOAD], ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_equal_one_rank(ranks, moe, demos):
    expected, one = run(demos["tiny"], 1, **moe)
    got, several = run(demos["tiny"], ranks, **moe)
    check(got, expected)
    for phase in ("decode", "prefill"):
        ours, theirs = several["experts"][phase], one["experts"][phase]
        assert (ours["hits"], ours["misses"]) == (theirs["hits"], theirs["misses"])
        assert ours["bytes_h2d"] * ranks == theirs["bytes_h2d"]


def check(got, expected) -> None:
    scores = zip(
        (x for out in got for x in out.prompt_logprobs[1:]),
        (x for out in expected for x in out.prompt_logprobs[1:]), strict=True,
    )  # fmt: skip
    worst = max(abs(a - b) for x, y in scores for a, b in zip(x.values(), y.values(), strict=True))
    print(f"\nprompt log-probabilities differ by at most {worst:.1e}")
    for own, other in zip(got, expected, strict=True):
        assert own.outputs[0].token_ids == other.outputs[0].token_ids
        for score, wanted in zip(own.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert score == pytest.approx(wanted, abs=1e-5)


def test_a_prompt_in_halves_equals_one_rank(demos):
    """Chunks of 640 tokens, whose halves each look their experts up."""
    lengths, chunk = {700: 20, 900: 20}, {"max_prefill_length": 640, "num_tokens": 65536}
    expected, one = run(demos["tiny"], 1, lengths, **chunk, **OFFLOAD)
    got, several = run(demos["tiny"], 2, lengths, **chunk, **OFFLOAD)
    check(got, expected)
    ours, theirs = (stats["experts"]["prefill"] for stats in (several, one))
    assert ours["hits"] + ours["misses"] > theirs["hits"] + theirs["misses"]


def spoil_first_row(directory: Path) -> None:
    """NaN for the first scale of an expert, in the rows that rank 0 alone reads."""
    name = "layers.3.ffn.experts.2.w1.scale"
    for shard in directory.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if name in header:
            data[8 + size + header[name]["data_offsets"][0]] = 255
            shard.write_bytes(data)


def test_a_start_that_fails_leaves_no_rank(demos, tmp_path):
    """Rank 0 meets the damage while it reads; the other rank is whole, and waits for it."""
    directory = tmp_path / "damaged"
    shutil.copytree(demos["tiny"], directory)
    spoil_first_row(directory)
    before = set(children_of(os.getpid()))
    with pytest.raises(ValueError, match=r"the scale code 255 \(NaN\)"):
        LLM(model=directory, tp=2, **FLAGS)
    assert set(children_of(os.getpid())) <= before
    with LLM(model=demos["tiny"], tp=2, **FLAGS) as llm:
        assert llm.stats()["integrity"] == "ok"
