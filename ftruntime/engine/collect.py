"""Garbage collection of a step loop, whose thousands of tensors reference counts free."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_FIRST_GENERATION = 20_000


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Look for cycles less often while the context is open, and as before afterwards."""
    before = gc.get_threshold()
    if before[0]:  # 0: the program has switched collection off
        gc.set_threshold(max(before[0], _FIRST_GENERATION), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
