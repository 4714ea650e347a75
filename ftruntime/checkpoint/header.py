"""Headers of safetensors files: what lies where, checked against the size of the file.

Read here rather than by the safetensors library, so that a damaged file, or a storage type that the
installed library does not know, is reported by file, tensor and expectation before any weight is
read.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeGuard

_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
# bits of an element of every type in the safetensors format up to the version named below
_FORMAT_VERSION: Final = "0.6"
_DTYPE_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "C64": 64, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: bytes `[start, end)` of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: Path) -> list[TensorEntry]:
    """All tensors of one safetensors file, in file order.

    Raises:
        ValueError: not a safetensors file, shorter than its header says, overlapping or misplaced
            tensors, or a storage type this reader does not know.
    """
    size = file.stat().st_size
    header = _read_header_object(file, size)
    base = size - header.data_bytes
    entries = [
        _entry(file, name, fields, base, header.data_bytes)
        for name, fields in header.tensors.items()
    ]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    for before, after in itertools.pairwise(entries):
        if after.start < before.end:
            raise ValueError(
                f"{file}: tensor {after.name} starts at byte {after.start - base}, "
                f"expected it behind {before.name}, which ends at byte {before.end - base}"
            )
    return entries


@dataclass(frozen=True)
class _Header:
    tensors: Mapping[str, object]
    data_bytes: int


def _read_header_object(file: Path, size: int) -> _Header:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        room = min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES)
        if size < _LENGTH_BYTES or not 2 <= length <= room:
            raise ValueError(
                f"{file} is {size} bytes with a header length of {length}, "
                "expected a safetensors file (is it truncated, or a Git LFS pointer?)"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the safetensors header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(
            f"{file}: the safetensors header is a {type(header).__name__}, expected an object"
        )
    header.pop("__metadata__", None)
    return _Header(header, size - _LENGTH_BYTES - length)


def _entry(file: Path, name: str, fields: object, base: int, data_bytes: int) -> TensorEntry:
    dtype, shape, offsets = _fields(file, name, fields)
    if dtype not in _DTYPE_BITS:
        raise ValueError(
            f"{file}: tensor {name} has dtype {dtype!r}, expected one of safetensors "
            f"{_FORMAT_VERSION}; the file needs a reader of a newer safetensors version"
        )
    start, end = offsets
    num_bytes = math.prod(shape) * _DTYPE_BITS[dtype] // 8
    if start > end or end - start != num_bytes:
        raise ValueError(
            f"{file}: tensor {name} lies at bytes {start} to {end}, "
            f"expected {num_bytes} bytes for {storage_text(dtype, shape)}"
        )
    if end > data_bytes:
        raise ValueError(
            f"{file}: tensor {name} ends at byte {end} of the data, "
            f"expected at most {data_bytes}, what the file holds (is it truncated?)"
        )
    return TensorEntry(name, file, dtype, shape, base + start, base + end)


def _fields(file: Path, name: str, fields: object) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    if isinstance(fields, dict):
        dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if isinstance(dtype, str) and _sizes(shape) and _sizes(offsets) and len(offsets) == 2:
            return dtype, tuple(shape), (offsets[0], offsets[1])
    raise ValueError(
        f"{file}: the header entry of tensor {name} is {json.dumps(fields)[:200]}, "
        "expected dtype, shape and data_offsets"
    )


def _sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def storage_text(dtype: str, shape: tuple[int, ...]) -> str:
    """How error sentences show a stored tensor: `BF16 [512, 256]`."""
    return f"{dtype} {list(shape)}"
