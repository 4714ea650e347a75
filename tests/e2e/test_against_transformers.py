"""The model in fp32 without round trips against transformers, whole, cut and token by token."""

from __future__ import annotations

import pytest
import torch

import ftkernels
from ftkernels.testing import assert_close
from ftruntime.model.numerics import Numerics
from tests.support.direct import Direct

PRESETS = ("small", "tiny")
LENGTHS = (5, 127, 128, 129, 300, 700)
LOGIT_TOL = 5e-6


def prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=PRESETS)
def pair(request, demos, oracles):
    """Our model, the oracle's logits as a function of ids, and the vocabulary."""
    ours = Direct(demos[request.param], Numerics.of("exact"))
    oracle = oracles[request.param]
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(ids):
        key = tuple(ids)
        if key not in known:
            with torch.no_grad():
                known[key] = oracle(torch.tensor([ids])).logits[0]
        return known[key]

    return ours, logits, ours.config.vocab_size


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("length", LENGTHS)
def test_k02_prompt_logprobs(pair, length):
    ours, oracle, vocab = pair
    ids = prompt(length, vocab)
    got, expected = (torch.log_softmax(x.double(), -1) for x in (ours.logits(ids), oracle(ids)))
    targets = torch.tensor(ids[1:])[:, None]
    error = (got[:-1].gather(1, targets) - expected[:-1].gather(1, targets)).abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("chunk", [128, 256, None])
def test_chunks_on_page_edges(pair, chunk):
    ours, oracle, vocab = pair
    ids = prompt(700, vocab)
    cuts = range(chunk, 700, chunk) if chunk else ()
    assert relative(ours.logits(ids, tuple(cuts)), oracle(ids)) < LOGIT_TOL


@pytest.mark.parametrize("cuts", [(1, 2, 5, 131, 299), (3, 4, 7, 8, 127, 250), (97, 194, 291)])
def test_unaligned_cuts(pair, cuts):
    ours, oracle, vocab = pair
    ids = prompt(300, vocab)
    got = ours.logits(ids, cuts)
    assert relative(got, oracle(ids)) < LOGIT_TOL
    assert torch.equal(got, ours.logits(ids)), "prefill under any cut gives the same bits"


@pytest.mark.parametrize("start", [0, 130])
def test_token_by_token(pair, start):
    ours, oracle, vocab = pair
    ids = prompt(300, vocab)
    assert relative(ours.decoded(ids, start), oracle(ids)[start:]) < LOGIT_TOL


def test_two_sequences_in_one_step_equal_each_alone(pair):
    """Bit for bit, prefill and decode, for prompts of differing length."""
    ours, _, vocab = pair
    first, second = prompt(261, vocab, 1), prompt(140, vocab, 2)
    alone = ours.logits(first[:260]), ours.logits(second[:139])
    alone_next = ours.decoded(first, 260), ours.decoded(second, 139)
    both = ours.step(ours.part(first, 0, 260), ours.part(second, 0, 139, row=1))
    assert torch.equal(both, torch.cat(alone))
    step = ours.step(ours.part(first, 260, 261), ours.part(second, 139, 140, row=1), kind="decode")
    assert torch.equal(step, torch.cat(alone_next))


def test_quantized_weights_give_the_bits_of_dequantized_ones(demos):
    ids = prompt(40, 512)
    for numerics in (Numerics.of("exact"), Numerics.of("official")):
        raw = Direct(demos["tiny"], numerics, quantized=True)
        wide = Direct(demos["tiny"], numerics)
        assert_close(raw.logits(ids), wide.logits(ids), rtol=1e-6, atol=1e-6)


def _wrap(name, change):
    """A mutant: the library's op with changed arguments or result."""

    def mutate(monkeypatch):
        right = getattr(ftkernels, name)
        monkeypatch.setattr(ftkernels, name, lambda *a, **k: change(right, a, k))

    return mutate


def _with(name, **fixed):
    return _wrap(name, lambda op, a, k: op(*a, **{**k, **fixed}))


def _late(op, args, kwargs):
    picks = op(*args, **kwargs)
    return torch.where(picks == picks.amax(1, keepdim=True), -1, picks).to(torch.int32)


def _no_relu(op, args, kwargs):
    q, weights, *rest = args
    both = torch.cat((q, -q), 1), torch.cat((weights, -weights), 1)
    return op(*both, *rest, **kwargs)


def _post_without_two(op, args, kwargs):
    x, post, comb = op(*args, **kwargs)
    return x, post / 2, comb


def _hc_post_transposed(op, args, kwargs):
    y, streams, post, comb = args
    return op(y, streams, post, comb.transpose(1, 2).contiguous(), **kwargs)


def _swap_series(op, args, kwargs):
    if kwargs["compress_ratio"] == 4:
        args = tuple(x.roll(x.shape[1] // 2, 1) if i < 3 else x for i, x in enumerate(args))
    return op(*args, **kwargs)


def _swap_appended_series(op, args, kwargs):
    if kwargs["compress_ratio"] == 4:
        args = tuple(x.roll(x.shape[1] // 2, 1) if 3 <= i < 6 else x for i, x in enumerate(args))
    return op(*args, **kwargs)


def _no_ape(op, args, kwargs):
    return op(*args[:2], torch.zeros_like(args[2]), *args[3:], **kwargs)


def _no_appended_ape(op, args, kwargs):
    return op(*args[:5], torch.zeros_like(args[5]), *args[6:], **kwargs)


def _no_window_norm(op, args, kwargs):
    return op(*args, **{**kwargs, "row_norm_weight": torch.ones_like(kwargs["row_norm_weight"])})


def _between_transposed(op, args, kwargs):
    y, streams, post, comb, *rest = args
    return op(y, streams, post, comb.transpose(1, 2).contiguous(), *rest, **kwargs)


def _bias_in_weights(op, args, kwargs):
    (x, weight, bias), path = args, kwargs.pop("path")
    kwargs.pop("scratch")
    logits = ftkernels.linear(x, weight, out_dtype=torch.float32, path=path)
    return ftkernels.route_topk(logits if bias is None else logits + bias, None, **kwargs)


def _half_split_rope(op, args, kwargs):
    x, positions, cos, sin = args
    r = 2 * cos.shape[1]
    order = torch.arange(r).view(2, -1).T.flatten()
    turned = op(
        torch.cat((x[..., :-r], x[..., -r:][..., order]), -1), positions, cos, sin, **kwargs
    )
    back = turned[..., -r:][..., order.argsort()]
    return torch.cat((turned[..., :-r], back), -1)


def _first_norm_only(op, args, kwargs):
    return args[0] if args[1] is None else op(*args, **kwargs)


MUTANTS = {
    "window off by one": _wrap("mla_prefill", lambda op, a, k: op(*a, **{**k, "window": 127})),
    "no sink": _with("mla_prefill", sink=None),
    "no inverse rotation": _with("mla_prefill", cos=None, sin=None),
    "attention scale": _wrap(
        "mla_prefill", lambda op, a, k: op(*a, **{**k, "softmax_scale": k["softmax_scale"] * 1.1})
    ),
    "last pick lost": _wrap("index_select", _late),
    "no relu in the indexer": _wrap("index_select", _no_relu),
    "comb untransposed": _wrap("hc_post", _hc_post_transposed),
    "comb untransposed inside": _wrap("hc_post_pre", _between_transposed),
    "post without factor two": _wrap("hc_pre", _post_without_two),
    "one sinkhorn iteration": _with("hc_pre", sinkhorn_iters=1),
    "no yarn": _with("rope_tables", yarn=None),
    "one rope base": _with("rope_tables", theta=10000.0),
    "half-split rotation": _wrap("apply_rope", _half_split_rope),
    "index series swapped": _wrap("compress_kv", _swap_series),
    "no index position bias": _wrap("compress_kv", _no_ape),
    "series swapped": _wrap("append_kv", _swap_appended_series),
    "no position bias": _wrap("append_kv", _no_appended_ape),
    "no norm of window rows": _wrap("append_kv", _no_window_norm),
    "bias in the weights": _wrap("gate_topk", _bias_in_weights),
    "no route scale": _with("gate_topk", route_scale=1.0),
    "no hash scale": _with("gate_hash", route_scale=1.0),
    "no clamp": _with("moe_fp4", swiglu_limit=0.0),
    "no shared expert": _with("moe_fp4", shared=None),
    "no head norm": _wrap("rms_norm", _first_norm_only),
    "no final norm": _with("hc_head", norm_weight=None),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_formulas_are_noticed(name, pair, monkeypatch):
    ours, oracle, vocab = pair
    ids = prompt(300, vocab)
    MUTANTS[name](monkeypatch)
    ours.reset()
    error = relative(ours.logits(ids), oracle(ids))
    monkeypatch.undo()
    ours.reset()
    assert error > 100 * LOGIT_TOL
