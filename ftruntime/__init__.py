"""The serving runtime. Importing it costs no torch: `LLM` is loaded when it is first named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftruntime.types import SamplingParams

if TYPE_CHECKING:
    from ftruntime.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # a plain import keeps `import ftruntime` cheap for the HTTP front and the policy tests
    from ftruntime.llm import LLM

    return LLM
