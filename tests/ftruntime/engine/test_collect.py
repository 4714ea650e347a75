from __future__ import annotations

import gc

import pytest

from ftruntime.engine.collect import fewer_collections


def _interrupted() -> tuple[int, int, int]:
    try:
        with fewer_collections():
            inside = gc.get_threshold()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return inside


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (50_000, 5, 5)])
def test_the_threshold_is_raised_and_comes_back(before: tuple[int, int, int]) -> None:
    kept = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        inside = _interrupted()
        assert gc.get_threshold() == before
        assert inside[0] == (0 if not before[0] else max(before[0], 20_000))
        assert inside[1:] == before[1:]
    finally:
        gc.set_threshold(*kept)
