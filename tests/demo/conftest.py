"""A folder to train in: a text of a few repeated words, a small shape, two short stages."""

from __future__ import annotations

import itertools

import pytest

from demo import shape, train
from demo.attention import Selection
from demo.text import Chapter

SMALL = {
    "hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4, "head_dim": 64,
    "qk_rope_head_dim": 16, "o_lora_rank": 16, "index_head_dim": 32, "index_topk": 16,
    "hc_sinkhorn_iters": 3, "vocab_size": 300, "compress_ratios": [0, 4, 128],
    "num_hidden_layers": 3,
}  # fmt: skip
STAGES = (
    train.Stage(0.6, 1, 256, Selection(sparse=False)),
    train.Stage(1.0, 1, 256, Selection(sparse=True, learn=True), rounding=True),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    small = shape.config(**SMALL)
    monkeypatch.setattr(shape, "config", lambda: small)
    monkeypatch.setattr(shape, "VOCAB_SIZE", 300)
    monkeypatch.setattr(train, "STAGES", STAGES)
    chapters = [
        Chapter(f"Ruth {c}", tuple(f"And Naomi {c} said unto Ruth {n}: Go." for n in range(40)))
        for c in range(1, 24)
    ]
    lines = itertools.chain.from_iterable(
        (c.heading, *(f"  {n} {verse}" for n, verse in enumerate(c.verses, 1))) for c in chapters
    )
    (tmp_path / "kjv.txt").write_text("\n".join(lines))
    return tmp_path
