"""Training on a small shape: it learns, goes on where it stopped, and exports what it trained.

Mutants run, each noticed: optimizer state left out of the file, the step number left out, the
second half of a bank exported as the first, Adam's mean over half as many steps, factors left out
of either optimizer, nothing held or never let go.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from demo import cli, export, learning, model, shape, train
from demo.model import Ops
from demo.optimizer import Optimizer, orthogonal
from ftruntime.llm import LLM
from ftruntime.model.config import ModelConfig
from ftruntime.types import SamplingParams

RECIPE = train.Recipe(total_tokens=8 * 256, warmup_steps=1)


def test_it_learns_goes_on_and_is_what_is_served(folder):
    run = train.Run(folder, RECIPE, Ops())
    start = run.train_step()[0]
    for _ in range(3):
        run.train_step()
    run.save()
    other = train.Run(folder, RECIPE, Ops())
    assert (other.step, other.tokens) == (4, 1024)
    while run.done < 1:
        assert run.train_step() == pytest.approx(other.train_step(), nan_ok=True, rel=1e-6)
    end = run.train_step()[0]
    assert end < start - 1.0
    run.save()

    with pytest.raises(ValueError, match="--seed is 1, expected 0 as the run"):
        train.Run(folder, replace(RECIPE, seed=1), Ops())

    trained = cli.trained(folder, unfinished=False)
    export.export(trained, folder / "model")
    held_out = trained.held_out
    with LLM(folder / "model", numerics="exact", num_tokens=1024) as llm:
        ids = llm.tokenizer.encode(held_out)[:383]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (output,) = llm.generate([0, *ids], params)
    served = [entry[token] for token, entry in zip(ids, output.prompt_logprobs[1:], strict=True)]
    config = ModelConfig.from_dict(shape.config())
    with torch.no_grad():
        kept = {n: w.bfloat16().float() if bf16(n, config) else w for n, w in run.weights.items()}
        row = torch.tensor([[0, *ids]])
        logits, _, _ = model.forward(config, model.cast(kept, config, torch.float32, True), row)
    expected = torch.log_softmax(logits[0, :-1], -1).gather(1, row[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(served), expected, rtol=1e-4, atol=1e-4)


def bf16(name, config):
    return model.weight_shapes(config)[name][1] == "BF16"


def test_the_rate_rises_and_falls():
    recipe = train.Recipe(warmup_steps=10, cooldown=0.5)
    assert recipe.rate(0, 0.0) == pytest.approx(0.1)
    assert recipe.rate(9, 0.1) == recipe.rate(500, 0.5) == 1
    assert recipe.rate(500, 0.75) == pytest.approx(0.5)
    assert 0 < recipe.rate(500, 1.0) < 0.05


def test_stages_follow_the_tokens():
    recipe = train.Recipe()
    assert recipe.stage(0.0) == train.STAGES[0]
    assert recipe.stage(1.0) == recipe.stage(0.9999) == train.STAGES[-1]
    assert [stage.until for stage in train.STAGES] == sorted({s.until for s in train.STAGES})
    assert all(stage.tokens % 128 == 0 for stage in train.STAGES)


@pytest.mark.parametrize("size", [(3, 8, 20), (2, 20, 8), (1, 16, 16)])
def test_orthogonal(size):
    noise = torch.randn(size, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(noise))
    assert values.min() > 0.4
    assert values.max() < 1.3


def test_adam_by_hand():
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    optimizer = Optimizer({"w": weight}, {})
    weight.grad = torch.tensor([0.5, -3.0])
    optimizer.step(1, lr=0.1, matrix_lr=9.0, decay=9.0, factor=lambda name: 1.0)
    assert weight.grad is None
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, 2.1]))


def test_a_factor_is_on_the_rate_of_its_weight():
    weights = {name: torch.ones(4, 4, requires_grad=True) for name in ("m", "half", "still", "v")}
    optimizer = Optimizer(weights, {name: (1, 4, 4) for name in ("m", "half", "still")})
    for weight in weights.values():
        weight.grad = torch.eye(4)
    factors = {"m": 1.0, "half": 0.5, "still": 0.0, "v": 2.0}
    optimizer.step(1, lr=0.1, matrix_lr=0.2, decay=0.0, factor=factors.__getitem__)
    moved = {name: weight.detach() - 1 for name, weight in weights.items()}
    torch.testing.assert_close(moved["half"], moved["m"] / 2)
    assert (moved["m"].diagonal() < -0.1).all()
    assert not moved["still"].any()
    torch.testing.assert_close(moved["v"].diagonal(), torch.full((4,), -0.2))


def test_queries_and_keys_wait_and_sublayers_are_slow():
    attn = "layers.1.attn."
    held = [f"{attn}wq_a.weight", f"{attn}wq_b.weight", f"{attn}compressor.wkv.weight"]
    for name in held:
        assert [learning.rate_factor(name, step) for step in (1, 60, 160, 260, 999)] == [
            0, 0, 0.5, 1, 1,
        ]  # fmt: skip
    ffn = "layers.0.ffn."
    slow = [f"{attn}wo_b.weight", f"{ffn}experts.w2", f"{ffn}shared_experts.w2.weight"]
    assert [learning.rate_factor(name, 5) for name in slow] == [0.3] * 3
    others = [f"{attn}indexer.wq_b.weight", f"{attn}wo_a.weight", f"{ffn}experts.w13"]
    assert [learning.rate_factor(name, 5) for name in others] == [1.0] * 3
    assert learning.rate_factor("embed.weight", 5) == 4


def test_every_matrix_is_moved_in_blocks_of_its_size():
    config = ModelConfig.from_dict(shape.config())
    blocks, shapes = learning.matrix_blocks(config), model.weight_shapes(config)
    for name, block in blocks.items():
        rows = torch.Size(shapes[name][0]).numel()
        assert torch.Size(block).numel() == rows
    assert blocks["layers.0.ffn.experts.w13"] == (32, 256, 256)
    assert blocks["layers.1.attn.wq_b.weight"] == (8, 512, 64)
    assert not [n for n in blocks if "embed" in n or "head" in n or "ffn.gate" in n or "norm" in n]
