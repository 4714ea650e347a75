"""The training forward against transformers, and its hand-written gradients against differences.

Mutants run, each noticed: compressed rows visible one token late, a window of 64, no sink, the mix
untransposed, a column step less, gate and up swapped, no YaRN, every row selected, rows seen
though taken away, the worst rows being the best, mixes kept on the node that makes them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo import mhc, model
from demo.attention import Selection, _SinkAttention
from demo.parts import grouped_linear
from demo.rounding import Rounding, fp4_matrix, fp8_matrix
from ftruntime.demo import make_demo
from ftruntime.model.config import ModelConfig
from tests.support.hf_model import build_hf, read_dequantized


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("forward") / "demo"
    make_demo(path, preset="tiny", seed=2)
    return path


@pytest.fixture(scope="module")
def config(directory):
    return ModelConfig.from_dir(directory)


@pytest.fixture(scope="module")
def weights(directory, config):
    """The checkpoint's weights with its experts in banks."""
    tensors = read_dequantized(directory)
    found = {name: tensors[name] for name in model.weight_shapes(config) if name in tensors}
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}.ffn.experts."
        experts = range(config.n_routed_experts)
        w1, w2, w3 = (
            torch.stack([tensors[f"{prefix}{e}.{m}.weight"] for e in experts])
            for m in ("w1", "w2", "w3")
        )
        found[f"{prefix}w13"] = torch.cat((w1, w3), dim=1)
        found[f"{prefix}w2"] = w2
    return found


def ids_of(config, size, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (size, tokens), generator=generator)


@torch.no_grad()
def test_logits_are_those_of_transformers(directory, config, weights):
    ids = ids_of(config, 2, 384)  # 96 rows, of which 16 are selected
    logits, loads, losses = model.forward(
        config, model.cast(weights, config, torch.float32, False), ids
    )
    expected = build_hf(directory)(ids).logits
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
    assert losses == []
    assert [int(load.sum()) for load in loads] == [2 * 384 * 4] * config.num_hidden_layers


@torch.no_grad()
def test_rounded_weights_of_a_checkpoint_are_its_weights(config, weights):
    plain = model.cast(weights, config, torch.float32, False)
    rounded = model.cast(weights, config, torch.float32, True)
    assert all(torch.equal(plain[name], rounded[name]) for name in plain)


def test_every_weight_learns(config, weights):
    """A gradient reaches all but the hash tables and the routers' biases."""
    w = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in weights.items()}
    logits, _, losses = model.forward(
        config, model.cast(w, config, torch.bfloat16, True), ids_of(config, 1, 256),
        selection=Selection(sparse=True, learn=True), rounding=Rounding(True),
    )  # fmt: skip
    assert len(losses) == config.num_layers_of(4)
    (logits.square().mean() + sum(losses)).backward()
    still = {n for n, t in w.items() if t.grad is None or not t.grad.abs().sum() > 0}
    assert {name for name in still if not name.endswith(("gate.bias", "tid2eid"))} == set()


def test_gradient_of_sinkhorn():
    logits = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mhc.sinkhorn(x, 20, 1e-6), (logits,))


def test_sinkhorn_by_its_definition():
    logits = torch.randn(4, 4, 5, dtype=torch.float64)
    for token in range(5):
        c = torch.softmax(logits[..., token], dim=1) + 1e-6
        c = c / (c.sum(0, keepdim=True) + 1e-6)
        for _ in range(19):
            c = c / (c.sum(1, keepdim=True) + 1e-6)
            c = c / (c.sum(0, keepdim=True) + 1e-6)
        torch.testing.assert_close(mhc.sinkhorn(logits, 20, 1e-6)[..., token], c)


def test_gradient_of_attention_with_a_sink():
    generator = torch.Generator().manual_seed(0)
    q, keys = (
        torch.randn(2, rows, 5, dtype=torch.float64, generator=generator, requires_grad=True)
        for rows in (6, 7)
    )
    sink = torch.randn(3, dtype=torch.float64, generator=generator, requires_grad=True)
    mask = torch.zeros(2, 2, 1, 7, dtype=torch.float64)
    mask[0, 0, 0, 2], mask[1, 1, 0, :4] = float("-inf"), float("-inf")
    last = torch.ones(1, 7, 1, dtype=torch.float64)
    last[0, -1] = 0  # the sink's key

    def attend(q, keys, sink):
        return _SinkAttention.apply(q, keys * last, mask, sink)[0]

    assert torch.autograd.gradcheck(attend, (q, keys, sink))
    with torch.no_grad():
        scores = (q @ (keys * last).mT).view(2, 2, 3, 7)[..., :-1] + mask[..., :-1]
        shares = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sink.exp()[:, None])
        expected = shares.view(2, 6, 6) @ keys[:, :-1]
        torch.testing.assert_close(attend(q, keys, sink), expected)


def test_gradient_of_grouped_products():
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 6, 7])  # the second expert has no row
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, offsets), (x, weight))
    for row, expert in enumerate((0, 0, 2, 2, 2, 2, 3)):
        expected = weight[expert] @ x[row]
        torch.testing.assert_close(grouped_linear(x, weight, offsets)[row], expected)


def test_the_hash_table_spreads_the_text_evenly(config):
    counts = torch.arange(config.vocab_size).square()
    table = model.hash_table(counts, config, torch.Generator().manual_seed(0))
    assert table.shape == (config.vocab_size, config.num_experts_per_tok)
    assert all(len(set(row.tolist())) == len(row) for row in table)
    load = torch.zeros(config.n_routed_experts).index_add(
        0, table.flatten(), counts.float().repeat_interleave(table.shape[1])
    )
    assert load.max() < 1.02 * load.mean()


def test_round_trips_by_their_formats():
    """One magnitude a group: codes and scales are then known without a quantizer."""
    x = torch.full((2, 192), 448.0)
    x[:, 64:128], x[:, 130] = 1.03, 0.3
    rounded = Rounding(True).row(x, 64)
    assert torch.equal(rounded[:, :64], x[:, :64])
    assert torch.equal(rounded[:, 64:128], torch.full((2, 64), 1.0))  # steps of 1/8 at 1
    assert torch.equal(rounded[:, 128:], x[:, 128:])
    assert Rounding(False).row(x, 64) is x
    # the amax of the first 128 sets a scale of 1, and e4m3 is as fine there
    expected = torch.where(x == 1.03, 1.0, x)
    expected[:, 128:] = torch.where(x[:, 128:] == 0.3, 0.3125, 448.0)
    assert torch.equal(Rounding(True).activation(x), expected)


def test_index_round_trip_keeps_products_of_rows_that_fp4_holds():
    """In the turned basis one channel of 6 is a code, and the turn back is exact."""
    turned = torch.zeros(2, 32)
    turned[0, 3], turned[1, 7] = 6.0, -1.5
    signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(32)] for i in range(32)])
    x = turned @ signs * 32**-0.5
    torch.testing.assert_close(Rounding(True).index(x), x)
    noisy = Rounding(True).index(x + 0.02 * torch.randn(2, 32))
    assert (noisy @ signs * 32**-0.5).unique().numel() < 16


@pytest.mark.parametrize("rounded", [fp4_matrix, fp8_matrix])
def test_gradients_pass_straight_through(rounded):
    weight = torch.randn(130, 64, requires_grad=True)
    out = rounded(weight)
    out.backward(torch.full_like(out, 2.0))
    assert 0 < (out - weight).abs().max() < 1
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))


@torch.no_grad()
def test_what_is_taken_away_is_gone(config, weights):
    """Each variant follows from its own definition: distant tokens stop to matter, or matter
    otherwise.
    """
    w = model.cast(weights, config, torch.float32, False)
    ids = ids_of(config, 1, 384)
    changed = ids.clone()
    changed[0, :64] = (ids[0, :64] + 1) % config.vocab_size

    def last(x, selection):
        return model.forward(config, w, x, selection=selection)[0][0, -1]

    def moved(selection):
        return float((last(ids, selection) - last(changed, selection)).abs().max())

    assert moved(Selection()) > 1e-3
    # six layers of a window of 50 reach 294 tokens back, and 320 are needed
    assert moved(Selection(rows=False, window=50)) < 1e-5 < moved(Selection(rows=False))
    whole = last(ids, Selection())
    for selection in (Selection(sparse=False), Selection(worst=True), Selection(window=64)):
        assert (last(ids, selection) - whole).abs().max() > 1e-3


def test_nothing_of_a_step_stays():
    """A result that its own node holds is never freed: here 10 MB a step."""
    logits = torch.randn(4, 4, 16384, requires_grad=True)

    def held_mb(steps):
        for _ in range(steps):
            mhc.sinkhorn(logits, 5, 1e-6).sum().backward()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    before = held_mb(5)
    assert held_mb(30) < before + 60
