"""Tuned entries: which one applies, what it overlays, and what is ignored with one warning.

Mutants tried: bucket rounded down, an entry replacing the whole record, hash unchecked, warning
repeated at each lookup, booleans taken for sizes, pins leaking out of their context, pins without
their key, the first version of several only, the op's own module not hashed, the modelled entry
taken before the measured, the last of two alike taken, two alike without a word, nesting and NaN
not caught, another folder's entries remembered before or after its context.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton

from ftkernels import config, target

GPU = "nvidia_geforce_rtx_4090"
OP = "some_op"


@dataclass(frozen=True)
class Tiles:
    block_i: int
    num_splits: int
    num_warps: int


def default_tiles(key: dict[str, int]) -> Tiles:
    """Splits follow the key, so that a test sees which key the default was asked with."""
    return Tiles(block_i=64, num_splits=key["I"], num_warps=4)


class Store:
    """Writes entries as the tuner would, and counts the warnings of lookups."""

    def __init__(self, root: Path) -> None:
        self.path = root / GPU / f"{OP}.json"
        self.path.parent.mkdir(parents=True)
        self.entry: dict[str, Any] = {
            "key": {"I": 48, "T": 512},
            "config": {"block_i": 256},
            "us": 9.1,
            "source": "measured",
            "triton": triton.__version__,
            "source_hash": config.source_hash(default_tiles),
        }

    def write(self, *entries: object, **head: object) -> None:
        data = {"op": OP, "gpu": GPU, "schema": 1, "entries": list(entries), **head}
        self.path.write_text(json.dumps(data))
        config.forget()


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "_ROOT", tmp_path)
    config.forget()
    with target.offline(89):
        yield Store(tmp_path)
    config.forget()


def _lookup(**key: int) -> Tiles:
    return config.lookup(OP, key, default_tiles, grows="T")


DEFAULT = Tiles(64, 48, 4)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (8192, 8192), (10**6, 8192)],
)
def test_bucket(n, expected):
    assert config.bucket(n) == expected


def test_without_a_file_the_default_applies(store):
    assert _lookup(T=512, I=48) == DEFAULT


def test_exact_entry_overlays_the_default(store):
    store.write(store.entry)
    assert _lookup(T=512, I=48) == Tiles(256, 48, 4)
    assert _lookup(I=48, T=512) == Tiles(256, 48, 4)  # the order of the sizes does not matter


def test_another_folder_is_read_for_as_long_as_a_context_is_open(store, tmp_path):
    elsewhere = Store(tmp_path / "elsewhere")
    elsewhere.write({**elsewhere.entry, "config": {"block_i": 128}})
    store.write(store.entry)
    assert _lookup(T=512, I=48).block_i == 256
    with config.reading(tmp_path / "elsewhere"):
        assert config.folder() == tmp_path / "elsewhere"
        assert _lookup(T=512, I=48).block_i == 128
    assert config.folder() == tmp_path
    assert _lookup(T=512, I=48).block_i == 256


def test_bucket_entry_serves_the_sizes_below_it(store):
    store.write(store.entry)
    assert _lookup(T=257, I=48).block_i == 256
    assert _lookup(T=511, I=48).block_i == 256
    assert _lookup(T=256, I=48) == DEFAULT
    assert _lookup(T=513, I=48) == DEFAULT
    assert _lookup(T=512, I=47) == Tiles(64, 47, 4)  # only the growing size is bucketed


def test_exact_entry_goes_before_its_bucket(store):
    exact = {**store.entry, "key": {"I": 48, "T": 300}, "config": {"num_warps": 8}}
    store.write(store.entry, exact)
    assert _lookup(T=300, I=48) == Tiles(64, 48, 8)


def test_sizes_above_the_last_bucket_take_it(store):
    store.write({**store.entry, "key": {"I": 48, "T": 8192}})
    assert _lookup(T=70000, I=48).block_i == 256


def test_an_op_without_a_growing_size_is_matched_exactly(store):
    store.write(store.entry)
    assert config.lookup(OP, {"T": 500, "I": 48}, default_tiles) == DEFAULT
    assert config.lookup(OP, {"T": 512, "I": 48}, default_tiles).block_i == 256


def test_configs_follow_the_offline_target(store):
    store.write(store.entry)
    with target.offline(120):
        assert _lookup(T=512, I=48) == DEFAULT
    assert _lookup(T=512, I=48).block_i == 256


REFUSED = {
    "other source hash": {"source_hash": "0" * 16},
    "no source hash": {"source_hash": None},
    "older triton": {"triton": "3.5.0"},
    "no triton": {"triton": None},
    "unknown field": {"config": {"block_i": 256, "num_stages": 3}},
    "text for a size": {"config": {"block_i": "256"}},
    "truth for a size": {"config": {"num_warps": True}},
    "negative size": {"config": {"num_splits": -1}},
    "no power of two": {"config": {"block_i": 255}},
    "odd warps": {"config": {"num_warps": 3}},
    "more warps than a block has": {"config": {"num_warps": 64}},
    "more than a tensor has": {"config": {"block_i": 1 << 21}},
    "config is a list": {"config": [["block_i", 256]]},
    "key is a list": {"key": [["T", 512], ["I", 48]]},
    "text in the key": {"key": {"T": "512", "I": 48}},
    "other source": {"source": "guessed"},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_t13_a_bad_entry_is_ignored_with_one_warning(change, store):
    good = {**store.entry, "key": {"T": 1024, "I": 48}}
    store.write({**store.entry, **change}, good)
    with pytest.warns(UserWarning, match="entries ignored, 1 for") as caught:
        results = [_lookup(T=512, I=48), _lookup(T=511, I=48), _lookup(T=1024, I=48)]
    assert results == [DEFAULT, DEFAULT, Tiles(256, 48, 4)]
    assert len(caught) == 1
    assert str(store.path) in str(caught[0].message)


def test_the_warning_about_stale_entries_names_the_remedy(store):
    stale = {**store.entry, "source_hash": "0"}
    store.write(stale, 7, {**store.entry, "key": {"T": 1024, "I": 48}})
    with pytest.warns(UserWarning, match="entries ignored") as caught:
        _lookup(T=512, I=48)
    assert str(caught[0].message).endswith(
        ": entries ignored, 1 for another source hash, 1 for not being an object; "
        f"ft-autotune tune {OP} makes them anew"
    )
    store.write(7, store.entry)
    config.forget()
    with pytest.warns(UserWarning, match="1 for not being an object$"):
        _lookup(T=512, I=48)


HEADS: dict[str, dict[str, object]] = {
    "other schema": {"schema": 2},
    "other op": {"op": "another_op"},
    "other gpu": {"gpu": "nvidia_h200"},
    "entries missing": {"entries": None},
    "entries by name": {"entries": {"a": 1}},
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_t13_a_file_for_something_else_is_ignored_with_one_warning(head, store):
    store.write(store.entry, **head)
    with pytest.warns(UserWarning, match=r"config file .* ignored: ") as caught:
        assert [_lookup(T=512, I=48), _lookup(T=511, I=48)] == [DEFAULT, DEFAULT]
    assert len(caught) == 1


@pytest.mark.parametrize("keep", [0, 1, 40, -1], ids=str)
def test_t13_a_truncated_file_is_ignored_with_one_warning(keep, store):
    store.write(store.entry)
    store.path.write_text(store.path.read_text()[:keep])
    config.forget()
    with pytest.warns(UserWarning, match="ignored: ") as caught:
        assert [_lookup(T=512, I=48), _lookup(T=511, I=48)] == [DEFAULT, DEFAULT]
    assert len(caught) == 1


DAMAGED = {
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "null": b"null",
    "empty": b"{}",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a deep entry": b'{"schema": 1, "entries": [' + b"[" * 100_000,
    "no number": b'{"op": "some_op", "gpu": "nvidia_geforce_rtx_4090", "schema": 1, '
                 b'"entries": [], "us": NaN}',
    "a number of 5000 digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "a true schema": b'{"op": "some_op", "gpu": "nvidia_geforce_rtx_4090", "schema": true, '
                     b'"entries": []}',
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_t13_a_damaged_file_is_ignored_with_one_warning(content, store):
    store.path.write_bytes(content)
    config.forget()
    with pytest.warns(UserWarning, match="ignored: ") as caught:
        assert _lookup(T=512, I=48) == DEFAULT
    assert [str(x.message).startswith("config file ") for x in caught] == [True]


def test_an_entry_that_is_no_object_spoils_no_other(store):
    store.write(7, None, store.entry)
    with pytest.warns(UserWarning, match="entries ignored, 2 for not being an object"):
        assert _lookup(T=512, I=48).block_i == 256


@pytest.mark.parametrize("source", ["measured", "modelled"])
def test_of_two_entries_alike_the_second_is_ignored_with_a_warning(source, store):
    first = {**store.entry, "source": source}
    swapped = {"T": 512, "I": 48}
    store.write(first, {**first, "key": swapped, "config": {"block_i": 128}})
    with pytest.warns(UserWarning, match="1 for a key that an entry before it has") as caught:
        assert _lookup(T=512, I=48).block_i == 256
    assert len(caught) == 1


@pytest.mark.parametrize("measured_first", [True, False], ids=str)
def test_what_is_measured_goes_before_what_is_modelled(measured_first, store):
    modelled = {**store.entry, "source": "modelled", "config": {"num_warps": 8}}
    store.write(*[store.entry, modelled][:: 1 if measured_first else -1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _lookup(T=512, I=48) == Tiles(256, 48, 4)
    store.write({**store.entry, "triton": "9.1"}, modelled)
    with pytest.warns(UserWarning, match="1 for a Triton other than"):
        assert _lookup(T=512, I=48) == Tiles(64, 48, 8)


@pytest.mark.parametrize("size", [1 << 63, -(10**4000)], ids=["of 64 bits", "of 4000 digits"])
def test_huge_sizes_of_a_key_spoil_no_other(size, store):
    store.write({**store.entry, "key": {"T": size, "I": 48}}, store.entry)
    assert _lookup(T=512, I=48).block_i == 256


def test_good_files_warn_of_nothing(store):
    store.write(store.entry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _lookup(T=512, I=48).block_i == 256


def test_lookups_are_memoized(store):
    store.write(store.entry)
    first = _lookup(T=512, I=48)
    store.path.unlink()
    assert _lookup(T=512, I=48) is first
    config.forget()
    assert _lookup(T=512, I=48) == DEFAULT


def test_pin_holds_inside_its_context_only(store):
    outer, inner = Tiles(1, 1, 1), Tiles(2, 2, 2)
    with config.pin(OP, outer):
        with contextlib.suppress(KeyError), config.pin(OP, inner):
            assert _lookup(T=512, I=48) is inner
            raise KeyError
        assert _lookup(T=7, I=48) is outer
        other = config.lookup("another_op", {"I": 48}, default_tiles)
        assert other == DEFAULT
    assert _lookup(T=512, I=48) == DEFAULT


def test_a_pin_with_a_key_holds_for_the_sizes_its_entry_would_serve(store):
    pinned = Tiles(1, 1, 1)
    with config.pin(OP, pinned, key=config.entry_key({"T": 400, "I": 48}, "T")):
        assert _lookup(T=512, I=48) is pinned
        assert _lookup(T=257, I=48) is pinned
        assert _lookup(T=513, I=48) == DEFAULT
        assert _lookup(T=512, I=47) == Tiles(64, 47, 4)


def test_entry_keys_are_sorted_and_bucketed_by_what_grows():
    assert config.entry_key({"T": 400, "I": 48}, "T") == (("I", 48), ("T", 512))
    assert config.entry_key({"T": 400, "I": 48}) == (("I", 48), ("T", 400))
    assert config.entry_key({"I": 48}, "T") == (("I", 48),)


@pytest.mark.parametrize("place", ["{0}", "{0} 9.1", "9.1 {0}", "9.1 9.2 {0} 9.4.0"], ids=str)
def test_an_entry_may_be_good_for_several_versions(place, store):
    store.write({**store.entry, "triton": place.format(triton.__version__)})
    assert _lookup(T=512, I=48).block_i == 256


@pytest.mark.parametrize("versions", ["", "9.1", "9.1 9.2.0", "3"], ids=str)
def test_t13_an_entry_for_other_versions_only_is_ignored(versions, store):
    store.write({**store.entry, "triton": versions})
    with pytest.warns(UserWarning, match=r"1 for a Triton other than 3\."):
        assert _lookup(T=512, I=48) == DEFAULT


def test_watch_hears_where_a_config_came_from(store):
    store.write(store.entry)
    heard: list[config.Found] = []
    with config.watch(heard.append):
        _lookup(T=400, I=48)
        _lookup(T=2, I=48)
        with config.pin(OP, DEFAULT):
            _lookup(T=1, I=48)
    _lookup(T=3, I=48)
    assert [found.source for found in heard] == ["measured", "default", "pinned"]
    assert heard[0] == config.Found(OP, {"I": 48, "T": 400}, Tiles(256, 48, 4), "measured")


def test_entries_follow_from_the_op_and_its_default():
    """The two may stand in modules of their own, as those of `linear` do."""
    from ftkernels import linear
    from ftkernels.linear import products
    from ftkernels.norm import rms_norm

    both = config.made_from("linear", products.default_config)
    assert both == config.source_hash(linear, products.default_config)
    assert both != config.source_hash(products.default_config)
    assert both != config.made_from("linear", rms_norm.default_config)
    assert config.made_from("toy", default_tiles) == config.source_hash(default_tiles)
