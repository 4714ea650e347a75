"""Cycles that an SM's pipes are held by one pass of a block: throughput, no latency.

Rates are those of sm_89 and near enough for the others: per clock and SM 128 lanes of fp32 adds and
multiplies, 64 of integer multiplies, packed halves, logic and compares, 16 of special functions and
conversions, 32 of shared memory and of the path to L1. Matrix instructions run at the card's peak.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftkernels.target import Target
from ftkernels.testing.sass import WARP, Counts, lane_bytes, mma_macs

SUB_CORES = 4
_FP32 = ("FFMA", "FADD", "FMUL")
_HEAVY = ("IMAD", "HFMA2", "HADD2", "HMUL2", "IDP")
_SPECIAL = ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "FRND")
_MEMORY = ("LDG", "LDGSTS", "STG", "LDS", "STS", "LDL", "STL")
_ONE_WORD = ("SHFL", "ATOMG", "RED", "ATOMS")
_CONTROL = ("BRA", "BAR", "NOP", "EXIT", "WARPSYNC", "BSSY", "BSYNC", "DEPBAR", "LDGDEPBAR", "S2R",
            "LDC", "CS2R", "YIELD")  # fmt: skip
_WORD_BYTES = 4  # of a lane; wider accesses take the path for as many cycles


def cycles(counts: Counts, num_warps: int, card: Target) -> dict[str, float]:
    """Cycles of each pipe, for all warps of a block together."""
    tensor = sum(mma_cycles(op, card) * n for op, n in counts.mma.items())
    fp32 = heavy = logic = special = path = 0
    for opcode, number in counts.opcodes.items():
        name = opcode.split(".", 1)[0]
        if name in _MEMORY:
            path += number * max(1, lane_bytes(opcode) // _WORD_BYTES)
        elif name == "LDSM":
            path += number * (4 if ".4" in opcode else 2 if ".2" in opcode else 1)
        elif name in _ONE_WORD:
            path += number
        elif name in _FP32:
            fp32 += number
        elif name in _HEAVY:
            heavy += number
        elif name in _SPECIAL:
            special += number
        elif not (name.endswith("MMA") or name.startswith("U") or name in _CONTROL):
            logic += number
    warps = num_warps / SUB_CORES
    return {
        "tensor": tensor * warps, "issue": counts.slots * warps,
        "fma": max(2 * heavy, fp32 + heavy) * warps, "alu": 2 * logic * warps,
        "special": 8 * special * warps, "memory": float(path * num_warps),
    }  # fmt: skip


def mma_cycles(opcode: str, card: Target) -> float:
    """Cycles one matrix instruction of a warp holds its sub-core's tensor pipe."""
    narrow = opcode.startswith(("QMMA", "QGMMA", "IMMA", "OMMA"))
    tflops = card.fp8_tflops if narrow else card.bf16_tflops
    if ".TF32" in opcode:
        tflops /= 2
    return mma_macs(opcode) / (macs_per_cycle(tflops, card) / SUB_CORES)


def macs_per_cycle(tflops: float, card: Target) -> float:
    """Multiply-adds of one SM in a clock at a rate of the whole card."""
    return tflops * 1e3 / (2 * card.num_sms * card.ghz)


def tflops(macs: float, num_cycles: float, card: Target) -> float:
    """Rate of the card when each SM does so many multiply-adds in so many cycles."""
    return 2e-3 * macs / num_cycles * card.num_sms * card.ghz


def bound(pipes: Mapping[str, float]) -> str:
    """The pipe that is held longest."""
    return max(pipes, key=lambda name: pipes[name])


__all__ = ["SUB_CORES", "WARP", "bound", "cycles", "macs_per_cycle", "mma_cycles", "tflops"]
