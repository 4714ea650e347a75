"""Which weights learn, how fast, and in which blocks."""

from __future__ import annotations

from demo.model import weight_shapes
from ftruntime.model.config import ModelConfig

_HELD_STEPS, _RELEASE_STEPS = 60, 200


def rate_factor(name: str, step: int) -> float:
    """What multiplies the learning rate of a weight at a step.

    Queries and keys keep the start that `demo.wiring` gives them until what they find is of use.
    What sublayers add to the streams grows slower than the embedding, which would drown in it.
    """
    if name == "embed.weight":
        return 4.0
    if name.endswith((".wq_a.weight", ".attn.wq_b.weight", ".wkv.weight")):
        return min(1.0, max(0.0, (step - _HELD_STEPS) / _RELEASE_STEPS))
    return 0.3 if name.endswith((".wo_b.weight", ".w2", ".w2.weight")) else 1.0


def is_learnt(name: str) -> bool:
    """Whether a weight has a gradient: the hash tables and the routers' biases have none."""
    return not name.endswith((".tid2eid", "gate.bias"))


def matrix_blocks(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Which weights Muon moves, and in which blocks: experts, heads and groups are apart."""
    blocks = {}
    for name, (size, kind) in weight_shapes(config).items():
        rows, columns = size[-2:] if len(size) > 1 else (0, 0)
        if kind == "I8":
            parts = 2 if name.endswith("w13") else 1
            blocks[name] = (size[0] * parts, rows // parts, columns)
        elif name.endswith(".wq_b.weight"):
            heads = config.index_n_heads if ".indexer." in name else config.num_attention_heads
            blocks[name] = (heads, rows // heads, columns)
        elif name.endswith(".wo_a.weight"):
            blocks[name] = (config.o_groups, rows // config.o_groups, columns)
        elif kind == "F8_E4M3" or name.endswith((".wkv.weight", ".wgate.weight")):
            blocks[name] = (1, rows, columns)
    return blocks
