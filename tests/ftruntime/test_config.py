"""Settings: defaults of the contract, and the same sentence for a bad flag and a bad keyword.

Mutants tried and seen red: an open bound made closed, the multiple of 128 not checked, the group
check dropped, `nearest` rounded the wrong way, explicit names lost in the round trip, fused with
slots accepted.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from ftruntime.cli import main
from ftruntime.config import RuntimeConfig, flag_specs

# the table of the command line contract: name, default
DEFAULTS = {
    "model": None, "tensor_parallel_size": 1, "disable_pynccl": False, "moe_backend": "auto",
    "moe_cache_auto": False, "moe_cache_size": None, "moe_cache_rate": None,
    "kv_reserve_tokens": 8192, "num_tokens": None, "num_pages": None, "swa_full_tokens_ratio": 0.2,
    "memory_ratio": 0.9, "max_running_requests": 4, "cuda_graph_max_bs": None,
    "max_prefill_length": 8192, "max_model_len": None, "cache_type": "radix",
    "admission": "reserve", "max_waiting_requests": 256, "max_waiting_tokens": None,
    "request_timeout_s": 0.0, "shutdown_timeout_s": 30.0, "stall_timeout_s": 120.0,
    "max_body_mb": 32.0, "api_key": None, "expert_load": "auto", "expert_prefetch": 2,
    "moe_prefetch_layers": 1, "moe_prefill_hit_d2d": False, "enable_cache_report": False,
    "decode_log_interval": 40, "decode_interleave_every": None, "max_decode_gap_ms": None,
    "prefill_layer_groups": None, "served_model_name": None, "host": "127.0.0.1", "port": 1919,
    "device": "auto", "numerics": "official", "kv_format": "bf16",
}  # fmt: skip


def test_defaults_are_those_of_the_contract():
    config = RuntimeConfig()
    assert {name: getattr(config, name) for name in flag_specs()} == DEFAULTS
    assert config.explicit == frozenset()


# flag, its word on the command line, the same value in Python, the sentence after the flag's name
WRONG = [
    ("--tensor-parallel-size", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--tensor-parallel-size", "two", "two", "is two, expected an integer >= 1"),
    ("--moe-backend", "offlod", "offlod",
     "is offlod, expected one of auto, fused, offload (nearest: offload)"),
    ("--moe-cache-size", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--moe-cache-rate", "1.5", 1.5, "is 1.5, expected a number in [0, 1] (nearest: 1)"),
    ("--moe-cache-rate", "-0.1", -0.1, "is -0.1, expected a number in [0, 1] (nearest: 0)"),
    ("--kv-reserve-tokens", "-1", -1, "is -1, expected an integer >= 0 (nearest: 0)"),
    ("--num-tokens", "1000", 1000,
     "is 1000, expected a multiple of 128 >= 128 (nearest: 896, 1024)"),
    ("--num-tokens", "0", 0, "is 0, expected a multiple of 128 >= 128 (nearest: 128)"),
    ("--num-tokens", "1_024", "1_024", "is 1_024, expected a multiple of 128 >= 128"),
    ("--num-pages", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--swa-full-tokens-ratio", "0", 0,
     "is 0, expected a number in (0, 1] (for example 0.2)"),
    ("--swa-full-tokens-ratio", "1.01", 1.01, "is 1.01, expected a number in (0, 1] (nearest: 1)"),
    ("--memory-ratio", "1", 1, "is 1, expected a number in (0, 1) (for example 0.9)"),
    ("--memory-ratio", "nan", float("nan"), "is nan, expected a number in (0, 1)"),
    ("--memory-ratio", "90%", "90%", "is 90%, expected a number in (0, 1)"),
    ("--max-running-requests", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--max-running-requests", "2.5", 2.5, "is 2.5, expected an integer >= 1 (nearest: 2, 3)"),
    ("--cuda-graph-max-bs", "-4", -4, "is -4, expected an integer >= 0 (nearest: 0)"),
    ("--max-prefill-length", "127", 127, "is 127, expected an integer >= 128 (nearest: 128)"),
    ("--max-model-len", "0", 0, "is 0, expected an integer >= 2 (nearest: 2)"),
    ("--cache-type", "Radix", "Radix", "is Radix, expected one of radix, naive (nearest: radix)"),
    ("--admission", "always", "always", "is always, expected one of reserve, optimistic"),
    ("--max-waiting-requests", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--max-waiting-tokens", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--request-timeout-s", "-1", -1, "is -1, expected a number >= 0 (nearest: 0)"),
    ("--shutdown-timeout-s", "inf", float("inf"), "is inf, expected a number >= 0, below 2^40"),
    ("--shutdown-timeout-s", "1e300", 1e300, "is 1e+300, expected a number >= 0, below 2^40"),
    ("--max-waiting-tokens", "9" * 400, 10**400 - 1,
     f"is {'9' * 400}, expected an integer >= 1, below 2^40"),
    ("--stall-timeout-s", "0", 0, "is 0, expected a number in (0, 100000] (for example 120.0)"),
    ("--max-body-mb", "0", 0, "is 0, expected a number > 0 (for example 32.0)"),
    ("--expert-load", "fast", "fast", "is fast, expected one of auto, serial, parallel"),
    ("--expert-prefetch", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--moe-prefetch-layers", "-1", -1, "is -1, expected an integer >= 0 (nearest: 0)"),
    ("--decode-log-interval", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--decode-interleave-every", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--decode-interleave-every", "8.0x", "8.0x", "is 8.0x, expected an integer >= 1"),
    ("--max-decode-gap-ms", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--prefill-layer-groups", "0", 0, "is 0, expected an integer >= 1 (nearest: 1)"),
    ("--served-model-name", "", "", "is '', expected a non-empty string"),
    ("--host", "", "", "is '', expected a non-empty string"),
    ("--port", "65536", 65536, "is 65536, expected an integer in [1, 65535] (nearest: 65535)"),
    ("--port", "http", "http", "is http, expected an integer in [1, 65535]"),
    ("--device", "gpu", "gpu", "is gpu, expected one of auto, cuda, cpu (nearest: cpu)"),
    ("--numerics", "exakt", "exakt", "is exakt, expected one of official, exact (nearest: exact)"),
    ("--kv-format", "fp4", "fp4", "is fp4, expected one of bf16, fp8 (nearest: fp8)"),
    ("--api-key", "", "", "is '', expected a non-empty string"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "word", "value", "sentence"), WRONG, ids=[f"{w[0]}={w[1][:9]}" for w in WRONG]
)
def test_bad_value_is_the_same_sentence_everywhere(flag, word, value, sentence):
    name = flag.removeprefix("--").replace("-", "_")
    for build in (RuntimeConfig.from_flags, RuntimeConfig):
        with pytest.raises(ValueError) as refusal:
            build(**{name: value})
        assert str(refusal.value) == f"{flag} {sentence}"
    for command in ("serve", "inspect"):
        result = CliRunner().invoke(main, [command, "flash", f"{flag}={word}"])
        assert (result.exit_code, result.stderr) == (2, f"{flag} {sentence}\n")
        assert result.stdout == ""


def test_every_flag_is_in_the_table_of_wrong_values():
    free = {
        "model",
        "disable_pynccl",
        "moe_cache_auto",
        "moe_prefill_hit_d2d",
        "enable_cache_report",
    }
    covered = {row[0].removeprefix("--").replace("-", "_") for row in WRONG}
    assert covered | free == set(flag_specs())


CONFLICTS = [
    ({"num_tokens": 1024, "num_pages": 8},
     "--num-pages is 8, expected only one of --num-tokens and --num-pages"),
    ({"moe_cache_auto": True, "moe_cache_size": 9},
     "--moe-cache-size is 9, expected only one of --moe-cache-auto and --moe-cache-size"),
    ({"moe_cache_size": 9, "moe_cache_rate": 0.0},
     "--moe-cache-rate is 0.0, expected only one of --moe-cache-size and --moe-cache-rate"),
    ({"moe_backend": "fused", "moe_cache_size": 9},
     "--moe-cache-size is 9, expected it unset with --moe-backend fused, which has no slots"),
    ({"moe_backend": "fused", "moe_cache_rate": 0.5},
     "--moe-cache-rate is 0.5, expected it unset with --moe-backend fused, which has no slots"),
    ({"kv_format": "fp8", "numerics": "exact"},
     "--kv-format is fp8, expected bf16 with --numerics exact, which rounds no KV row"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "sentence"), CONFLICTS, ids=[" ".join(c[0]) for c in CONFLICTS])
def test_flags_that_exclude_each_other(flags, sentence):
    with pytest.raises(ValueError) as refusal:
        RuntimeConfig.from_flags(**flags)
    assert str(refusal.value) == sentence
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in flags.items()
    ]
    result = CliRunner().invoke(main, ["serve", *words])
    assert (result.exit_code, result.stderr) == (2, sentence + "\n")


def test_keywords_are_the_flags():
    config = RuntimeConfig.from_flags(
        tp=2, max_running_requests=8, memory_ratio=0.5, num_tokens=None
    )
    assert (config.tensor_parallel_size, config.max_running_requests) == (2, 8)
    assert config.explicit == {"tensor_parallel_size", "max_running_requests", "memory_ratio"}
    with pytest.raises(ValueError, match=r"^max_seqs is not a setting"):
        RuntimeConfig.from_flags(max_seqs=4)
    with pytest.raises(ValueError, match=r"nearest: max_model_len"):
        RuntimeConfig.from_flags(max_model_length=4)
    with pytest.raises(ValueError, match="expected only one of"):
        RuntimeConfig.from_flags(tensor_parallel_size=2, tp=2)
    with pytest.raises(ValueError, match="--disable-pynccl is 1, expected true or false"):
        RuntimeConfig.from_flags(disable_pynccl=1)
    with pytest.raises(ValueError, match="--port is True, expected an integer"):
        RuntimeConfig.from_flags(port=True)


def test_round_trip_through_json_keeps_values_and_explicit_names():
    config = RuntimeConfig.from_flags(
        model="m", cache_type="radix", num_tokens=1024, moe_cache_rate=0.25, api_key="k"
    )
    data = json.loads(json.dumps(config.to_dict()))
    for again in (RuntimeConfig.from_dict(data), RuntimeConfig.from_flags(**data)):
        assert again == config
        assert again.explicit == config.explicit
        assert "cache_type" in again.explicit
    with pytest.raises(ValueError, match="colour is not a setting"):
        RuntimeConfig.from_dict({**data, "colour": 1})


def test_the_key_is_not_shown():
    assert "s3cret" not in repr(RuntimeConfig(api_key="s3cret"))


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RuntimeConfig().port = 1  # type: ignore[misc]
