"""The model's round trips, layer by layer on the reference's own inputs (teacher forcing)."""

from __future__ import annotations

import json

import pytest
import torch

import ftkernels
from ftruntime.model.numerics import Numerics
from tests.support.direct import Direct
from tests.support.hf_model import read_dequantized
from tests.support.official import OfficialLayer

LENGTH = 300


@pytest.fixture(scope="module", params=["small", "tiny"])
def case(request, demos):
    """Our model in fp32 maths with round trips, ids, and the reference's streams by layer."""
    directory = demos[request.param]
    cfg = json.loads((directory / "config.json").read_text())
    tensors = read_dequantized(directory)
    ours = Direct(directory, Numerics(torch.float32, round_trips=True))
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, cfg["vocab_size"], (LENGTH,), generator=generator).tolist()
    streams = [tensors["embed.weight"][ids][:, None].expand(-1, cfg["hc_mult"], -1)]
    with torch.no_grad():
        for number in range(cfg["num_hidden_layers"]):
            streams.append(OfficialLayer(cfg, tensors, number)(streams[-1], ids))
    return ours, ids, streams


@torch.inference_mode()
def layer_errors(ours: Direct, ids: list[int], streams: list[torch.Tensor]) -> list[torch.Tensor]:
    """For each layer the error of each token, relative to its largest channel."""
    from ftruntime.types import StepPlan

    layers = ours.config.num_hidden_layers
    batch = ours.builder.build(StepPlan(0, "prefill", (ours.part(ids, 0, len(ids)),), (0, layers)))
    errors = []
    for number in range(layers):
        got = ours.model.forward(streams[number].clone(), batch, ours.storage, (number, number + 1))
        expected = streams[number + 1]
        errors.append((got - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2)))
    return errors


def test_layers_agree(case):
    ours, ids, streams = case
    for number, error in enumerate(layer_errors(ours, ids, streams)):
        assert error.median() < 1e-6, number
        # a rounding that falls the other way is visible; in a compressed row, to every later token
        assert (error > 1e-3).float().mean() < 0.25, number


@pytest.mark.parametrize(
    "name", ["index_query", "store_kv", "append_kv", "compress_kv", "fp8_linear", "moe_fp4"]
)
def test_a_missing_round_trip_is_noticed(case, name, monkeypatch):
    ours, ids, streams = case
    right = getattr(ftkernels, name)
    without = {
        "index_query": {"round_trip": False}, "store_kv": {"round_trip": False},
        "append_kv": {"round_trip": False}, "compress_kv": {"store": "raw"},
        "fp8_linear": {"activation": "bf16"}, "moe_fp4": {"activation": "bf16"},
    }  # fmt: skip
    fixed = without[name]
    monkeypatch.setattr(ftkernels, name, lambda *a, **k: right(*a, **{**k, **fixed}))
    worst = max(float(error.quantile(0.99)) for error in layer_errors(ours, ids, streams))
    assert worst > 1e-3


def test_bf16_maths_stays_near(demos, case):
    """bf16 activations, as served: the noise floor of random weights, no more."""
    ours, ids, streams = case
    directory = next(d for d in demos.values() if d.name == _preset(ours))
    served = Direct(directory, Numerics.of("official"))
    errors = layer_errors(served, ids, [s.bfloat16() for s in streams])
    assert max(float(error.median()) for error in errors) < 0.05


def _preset(ours: Direct) -> str:
    return "tiny" if ours.config.head_dim == 64 else "small"
