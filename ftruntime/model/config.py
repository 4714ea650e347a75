"""The shape of a checkpoint as data: the official ``config.json`` fields, checked for consistency.

Every refusal is one ``ValueError`` sentence: ``<file>: <field> is <value>, expected <what>``. No
torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NoReturn

WINDOW_TOKENS: Final = 128
COMPRESS_RATIOS: Final = (0, 4, 128)
SCORING_FUNCS: Final = ("sqrtsoftplus",)
# input width of an FP4 matrix comes in scale groups of this many channels
FP4_GROUP: Final = 32
# no size is as large: products of a few stay exact and printable
_LIMIT: Final = 2**40
_MOST: Final[Mapping[str, int]] = {"num_hidden_layers": 1024, "n_routed_experts": 4096}

# the arithmetic here is right for these values only; absent fields mean the same
_FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "model_type": ("deepseek_v4",),
    "num_key_value_heads": (1,),
    "norm_topk_prob": (True,),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "topk_method": ("noaux_tc",),
}
_QUANTIZATION: Final[Mapping[str, object]] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
_INT_FIELDS: Final = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim",
    "index_topk", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
    "num_hash_layers", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings", "bos_token_id",
)  # fmt: skip
_FLOAT_FIELDS: Final = (
    "routed_scaling_factor", "swiglu_limit", "rope_theta", "compress_rope_theta",
)  # fmt: skip
_INT_DEFAULTS: Final[Mapping[str, int]] = {"sliding_window": WINDOW_TOKENS, "n_shared_experts": 1}
_FLOAT_DEFAULTS: Final[Mapping[str, float]] = {"hc_eps": 1e-6, "rms_norm_eps": 1e-6}
_STR_DEFAULTS: Final[Mapping[str, str]] = {"scoring_func": "sqrtsoftplus", "expert_dtype": "fp4"}


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN scaling of the rotary frequencies in compressed layers (``rope_scaling``)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one DeepSeek-V4 checkpoint, under the names of its ``config.json``.

    ``compress_ratios`` has one entry a layer (the entries of draft layers are gone), each 0, 4 or
    128. ``eos_token_ids`` holds the one or several ``eos_token_id`` of the file. ``source`` is the
    file that error sentences name.

    Raises:
        ValueError: a value outside its range, or two values that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnConfig | None
    max_position_embeddings: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    sliding_window: int = WINDOW_TOKENS
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    expert_dtype: str = "fp4"
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    source: str = field(default="config.json", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_values(self)
        _check_consistency(self)

    @property
    def eos_token_id(self) -> int:
        """The first end-of-sequence id."""
        return self.eos_token_ids[0]

    def num_layers_of(self, ratio: int) -> int:
        """Layers whose compress ratio is ``ratio`` (0, 4 or 128)."""
        return self.compress_ratios.count(ratio)

    def share(self, ranks: int) -> ModelConfig:
        """The sizes that one of several tensor-parallel ranks computes with."""
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // ranks,
            o_groups=self.o_groups // ranks,
            moe_intermediate_size=self.moe_intermediate_size // ranks,
        )

    @staticmethod
    def from_dict(data: Mapping[str, object], *, source: str = "config.json") -> ModelConfig:
        """Read a parsed ``config.json``; unknown fields are ignored, absent ones mostly refused."""
        return _parse(data, source)

    @staticmethod
    def from_dir(path: str | Path) -> ModelConfig:
        """Read ``path/config.json``.

        Raises:
            OSError: no such directory, no ``config.json`` in it, or not readable.
            ValueError: not a JSON object, or a field as in :class:`ModelConfig`.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise FileNotFoundError(f"{directory} is not a directory, expected a checkpoint")
        file = directory / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist, expected the checkpoint's config.json")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise OSError(f"{file} cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not valid JSON ({error})") from error
        if not isinstance(data, dict):
            raise ValueError(f"{file} holds a {type(data).__name__}, expected a JSON object")
        return _parse(data, str(file))


def builtin(name: str) -> ModelConfig:
    """The shape of the published checkpoints: ``"flash"`` or ``"pro"``."""
    if name not in _SHAPES:
        raise ValueError(f"model is {name!r}, expected one of {', '.join(_SHAPES)}")
    return _parse({**_PUBLISHED, **_SHAPES[name]}, name)


_PUBLISHED: Final[Mapping[str, object]] = {
    "model_type": "deepseek_v4", "vocab_size": 129280, "head_dim": 512, "qk_rope_head_dim": 64,
    "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128,
    "num_experts_per_tok": 6, "n_shared_experts": 1, "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576, "bos_token_id": 0, "eos_token_id": 1,
    "expert_dtype": "fp4", "quantization_config": _QUANTIZATION,
}  # fmt: skip
_SHAPES: Final[Mapping[str, Mapping[str, object]]] = {
    "flash": {
        "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
        "q_lora_rank": 1024, "o_groups": 8, "index_topk": 512, "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    },
    "pro": {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "q_lora_rank": 1536, "o_groups": 16, "index_topk": 1024, "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5, "compress_ratios": [128, *[128, 4] * 30, 0],
    },
}  # fmt: skip


def _parse(data: Mapping[str, object], source: str) -> ModelConfig:
    reader = _Reader(data, source)
    for name, allowed in _FIXED.items():
        if name in data and data[name] not in allowed:
            reader.refuse(name, data[name], json.dumps(allowed[0]))
    _check_quantization(reader)
    num_layers = reader.integer("num_hidden_layers")
    ints = {name: reader.integer(name) for name in _INT_FIELDS}
    ints |= {name: reader.integer(name, default) for name, default in _INT_DEFAULTS.items()}
    floats = {name: reader.number(name) for name in _FLOAT_FIELDS}
    floats |= {name: reader.number(name, default) for name, default in _FLOAT_DEFAULTS.items()}
    strings = {name: reader.string(name, default) for name, default in _STR_DEFAULTS.items()}
    ratios = reader.integers("compress_ratios")
    if len(ratios) < num_layers:
        reader.refuse(
            "compress_ratios",
            f"{len(ratios)} entries",
            f"at least num_hidden_layers ({num_layers})",
        )
    parts: dict[str, object] = {
        **ints, **floats, **strings,
        "compress_ratios": ratios[:num_layers],
        "rope_scaling": _parse_yarn(reader),
        "eos_token_ids": reader.integers("eos_token_id"),
        "source": source,
    }  # fmt: skip
    return ModelConfig(**parts)  # type: ignore[arg-type]


class _Reader:
    """Typed access to a JSON object; every refusal names the file and the (dotted) field."""

    def __init__(self, data: Mapping[str, object], source: str, prefix: str = "") -> None:
        self.data = data
        self.source = source
        self.prefix = prefix

    def refuse(self, name: str, value: object, expected: str) -> NoReturn:
        shown = value if isinstance(value, str) and " " in value else repr(value)
        raise ValueError(f"{self.source}: {self.prefix}{name} is {shown}, expected {expected}")

    def get(self, name: str, default: object = None) -> object:
        if name not in self.data and default is None:
            raise ValueError(f"{self.source}: {self.prefix}{name} is missing")
        return self.data.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, value, "an integer")
        if abs(value) >= _LIMIT:
            self.refuse(name, value, "an integer below 2^40")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LIMIT:
            self.refuse(name, value, "a number below 2^40")
        return float(value)

    def string(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            self.refuse(name, value, "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        items = value if isinstance(value, list | tuple) else [value]
        if not items or any(isinstance(i, bool) or not isinstance(i, int) for i in items):
            self.refuse(name, value, "integers")
        return tuple(items)


def _parse_yarn(reader: _Reader) -> YarnConfig | None:
    value = reader.data.get("rope_scaling")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        reader.refuse("rope_scaling", value, "null or an object of type yarn")
    inner = _Reader(value, reader.source, "rope_scaling.")
    kind = value.get("type", value.get("rope_type"))
    if kind != "yarn":
        inner.refuse("type", kind, "'yarn'")
    return YarnConfig(
        factor=inner.number("factor"),
        original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
    )


def _check_quantization(reader: _Reader) -> None:
    value = reader.get("quantization_config")
    if not isinstance(value, Mapping):
        reader.refuse("quantization_config", value, "an object with quant_method 'fp8'")
    inner = _Reader(value, reader.source, "quantization_config.")
    inner.get("quant_method")
    for name, expected in _QUANTIZATION.items():
        if name in value and value[name] != expected:
            inner.refuse(name, value[name], repr(expected))


def _check_values(config: ModelConfig) -> None:
    """Each field alone: its range."""
    positive = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "index_n_heads",
        "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok",
        "moe_intermediate_size", "hc_mult", "max_position_embeddings",
    )  # fmt: skip
    for name in positive:
        _require(config, name, getattr(config, name) >= 1, "at least 1")
    for name, most in _MOST.items():
        _require(config, name, getattr(config, name) <= most, f"at most {most}")
    _require(config, "hc_sinkhorn_iters", config.hc_sinkhorn_iters <= 1000, "at most 1000")
    most = config.max_position_embeddings
    _require(config, "index_topk", config.index_topk <= most, f"at most the context, {most}")
    for name in ("num_hash_layers", "hc_sinkhorn_iters", "swiglu_limit"):
        _require(config, name, getattr(config, name) >= 0, "at least 0")
    for name in ("rope_theta", "compress_rope_theta"):
        _require(config, name, getattr(config, name) > 1, "a number above 1")
    for name in ("hc_eps", "rms_norm_eps", "routed_scaling_factor"):
        _require(config, name, getattr(config, name) > 0, "a number above 0")
    for name in ("hidden_size", "moe_intermediate_size", "index_head_dim"):
        _require(config, name, getattr(config, name) % FP4_GROUP == 0, f"a multiple of {FP4_GROUP}")
    _require(config, "sliding_window", config.sliding_window == WINDOW_TOKENS, str(WINDOW_TOKENS))
    _require(config, "n_shared_experts", config.n_shared_experts == 1, "1")
    _require(
        config, "scoring_func", config.scoring_func in SCORING_FUNCS, " or ".join(SCORING_FUNCS)
    )
    _require(config, "expert_dtype", config.expert_dtype == "fp4", "'fp4'")
    size = config.index_head_dim
    _require(config, "index_head_dim", size & (size - 1) == 0, "a power of two")
    unknown = [ratio for ratio in config.compress_ratios if ratio not in COMPRESS_RATIOS]
    _require(config, "compress_ratios", not unknown, "0, 4 or 128 for each layer")


def _check_consistency(config: ModelConfig) -> None:
    """Fields against each other."""
    layers, heads, vocab = config.num_hidden_layers, config.num_attention_heads, config.vocab_size
    ratios, rope = config.compress_ratios, config.qk_rope_head_dim
    _require(config, "compress_ratios", len(ratios) == layers, f"{layers} entries, one a layer")
    _require(
        config, "o_groups", heads % config.o_groups == 0,
        f"a divisor of num_attention_heads ({heads})",
    )  # fmt: skip
    _require(
        config, "qk_rope_head_dim", rope % 2 == 0 and rope < config.head_dim,
        f"an even number below head_dim ({config.head_dim})",
    )  # fmt: skip
    _require(
        config, "index_head_dim", config.index_head_dim >= rope,
        f"at least qk_rope_head_dim ({rope})",
    )  # fmt: skip
    _require(
        config, "num_experts_per_tok", config.num_experts_per_tok <= config.n_routed_experts,
        f"at most n_routed_experts ({config.n_routed_experts})",
    )  # fmt: skip
    _require(
        config, "num_hash_layers", config.num_hash_layers <= layers,
        f"at most num_hidden_layers ({layers})",
    )  # fmt: skip
    _require(
        config,
        "bos_token_id",
        0 <= config.bos_token_id < vocab,
        f"an id below vocab_size ({vocab})",
    )
    if not config.eos_token_ids or any(not 0 <= i < vocab for i in config.eos_token_ids):
        shown = list(config.eos_token_ids)
        raise ValueError(
            f"{config.source}: eos_token_id is {shown}, expected ids below vocab_size ({vocab})"
        )
    yarn = config.rope_scaling
    if yarn is not None:
        _require_yarn(config, "factor", yarn.factor, yarn.factor >= 1, "at least 1")
        original = yarn.original_max_position_embeddings
        _require_yarn(
            config, "original_max_position_embeddings", original,
            1 <= original <= config.max_position_embeddings,
            f"1 to max_position_embeddings ({config.max_position_embeddings})",
        )  # fmt: skip
        _require_yarn(
            config, "beta_fast", yarn.beta_fast, yarn.beta_fast > yarn.beta_slow > 0,
            f"above beta_slow ({yarn.beta_slow})",
        )  # fmt: skip


def _require(config: ModelConfig, name: str, condition: bool, expected: str) -> None:
    if not condition:
        value = getattr(config, name)
        shown = list(value) if isinstance(value, tuple) else value
        raise ValueError(f"{config.source}: {name} is {shown!r}, expected {expected}")


def _require_yarn(
    config: ModelConfig, name: str, value: float, condition: bool, expected: str
) -> None:
    if not condition:
        raise ValueError(f"{config.source}: rope_scaling.{name} is {value!r}, expected {expected}")
