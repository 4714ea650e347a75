"""A process in which one module of the library has other code, as far as hashes can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ftkernels import source


def changes(hashed: Callable[[], str], module: str) -> bool:
    """Whether a hash is another one once the module's code is."""
    before, real = hashed(), source._module

    def edited(name: str) -> source._Module:
        found = real(name)
        return replace(found, digest="other") if name == module else found

    source.source_hash.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "_module", edited)
        after = hashed()
    source.source_hash.cache_clear()
    return before != after
