"""FP4 weights in the order the FP8-MMA kernels read them, and back: the same bits, moved at load.

Weight layout, for each matrix ``[N, K/2]`` of the leading dimensions (row order after ``gated``):
the rows are cut into tiles of 64 and the columns into steps of 64; the bytes of one tile and step,
``rows * 32`` of them, lie together, tile after tile and step after step within a tile. A row's 32
bytes of a step are 8 little-endian words. Word ``j`` holds columns ``4j .. 4j+3`` of the step's
first half (A) and of its second half (B): the magnitude code of A's column ``i`` in bits
``4i .. 4i+2``, of B's in bits ``16+4i .. 16+4i+2``, A's sign in bit ``8i+7``, B's in bit
``8i+3``. So ``word & 0x7777`` selects A's bytes for one ``prmt``, ``(word >> 16) & 0x7777`` B's,
and the signs are in place after ``word & 0x80808080`` and ``(word << 4) & 0x80808080``. The last
tile may have fewer rows and the last step 32 columns (4 words); nothing is padded, the tensor
keeps its shape.

Metadata, ``fold=True``: int32 ``[..., ceil(K/128), N]``. For the four scale codes ``s_j`` of 128
columns of a row, of maximum ``m``: bits ``4j .. 4j+3`` hold ``c_j = 11 - (m - s_j)``, bits 23..30
hold ``m - 6``, so ``meta & 0x7F800000`` is the fp32 number ``2^(m - 133)`` and a weight is
``e2m1 * 2^(c_j - 5) * 2^(m - 133)``, its first factors an E4M3 number. Those past K count as ``m``.
``fold=False``: the scale bytes, uint8 ``[..., K/32, N]``.
"""

from __future__ import annotations

import torch

from ftkernels import check
from ftkernels.quant.act_quant import Pair, split_pair
from ftkernels.quant.formats import pack_nibbles, unpack_nibbles
from ftkernels.spec import Case, Inputs, KernelSpec

GROUP = 32
TILE_ROWS = 64
STEP = 64
FOLDED_GROUPS = 4
MAX_OCTAVES = 11
LEAST_LARGEST_CODE = 7

_SHOWN_ROWS = 8
# codes packed at a time: what passes between the operations stays in a core's cache
_BLOCK_BYTES = 1 << 19


def pack_fp4(
    packed: torch.Tensor, scale: torch.Tensor, *, gated: bool = False, fold: bool = True,
    out: Pair | None = None,
) -> Pair:  # fmt: skip
    """Put FP4 weights and their scales into the kernels' order.

    Args:
        packed: ``[..., N, K/2]`` uint8, low nibble = even column, ``K`` a multiple of 32.
        scale: ``[..., N, K/32]`` uint8 UE8M0 codes.
        gated: interleave the first and the second half of the rows: 0, N/2, 1, N/2 + 1, ...; what
            the expert ops expect of gate and up.
        fold: four neighbouring scales become one int32; False keeps the scale bytes, as a block of
            zeros beside others takes (``quantize_fp4`` gives it code 1).
        out: ``(weight, meta)`` as returned, contiguous, not overlapping an input.

    Returns:
        ``weight [..., N, K/2]`` uint8 and ``meta``, int32 ``[..., ceil(K/128), N]`` or uint8
        ``[..., K/32, N]``, both contiguous and laid out as the module says.

    Raises:
        TypeError: wrong dtype, or ``out`` is not a pair of tensors.
        ValueError: shape, stride or device outside the contract; or scales that the fold cannot
            hold, more than 11 octaves apart or of a largest code below 7.

    Reads the scales on the host when folding: for loading, not for graphs.
    """
    op = "pack_fp4"
    check.dtype(op, "packed", packed, (torch.uint8,))
    check.require(
        packed.ndim >= 2 and packed.shape[-1] % (GROUP // 2) == 0,
        lambda: (
            f"{op}: packed is {tuple(packed.shape)}, expected [..., N, K/2] with K a multiple of 32"
        ),
    )
    check.last_contiguous(op, "packed", packed)
    *lead, num_rows, half = packed.shape
    size = (*lead, num_rows, half // (GROUP // 2))
    check.tensor(op, "scale", scale, (torch.uint8,), size, "[..., N, K/32]", packed)
    _check_gated(op, "packed", packed, num_rows, gated)
    weight, meta = split_pair(op, out)
    weight = _output(op, "out[0]", weight, tuple(packed.shape), torch.uint8, packed, (scale,))
    meta_size, meta_dtype = _meta_form(lead, num_rows, half, fold)
    meta = _output(op, "out[1]", meta, meta_size, meta_dtype, packed, (scale, weight))
    if packed.numel() == 0:
        return weight, meta
    if gated:
        packed, scale = _interleave(packed), _interleave(scale)
    codes = scale.transpose(-1, -2)
    meta.copy_(_fold(op, codes, gated) if fold else codes)
    _pack_weight(packed, weight)
    return weight, meta


def unpack_fp4(
    weight: torch.Tensor, meta: torch.Tensor, *, gated: bool = False, fold: bool | None = None,
    out: Pair | None = None,
) -> Pair:  # fmt: skip
    """The exact inverse of `pack_fp4`.

    Args:
        weight, meta: as `pack_fp4` returns them.
        gated: as it was packed, which the tensors do not tell.
        fold: as it was packed; None reads it off ``meta``'s dtype.
        out: ``(packed, scale)``, contiguous, not overlapping an input.

    Returns:
        ``packed [..., N, K/2]`` and ``scale [..., N, K/32]`` uint8.

    Raises:
        TypeError: wrong dtype, or ``out`` is not a pair of tensors.
        ValueError: shape, stride or device outside the contract, or ``fold`` contradicts ``meta``.
    """
    op = "unpack_fp4"
    check.dtype(op, "weight", weight, (torch.uint8,))
    check.require(
        weight.ndim >= 2 and weight.shape[-1] % (GROUP // 2) == 0 and weight.is_contiguous(),
        lambda: (
            f"{op}: weight is {tuple(weight.shape)} with strides {weight.stride()}, "
            "expected a contiguous [..., N, K/2] with K a multiple of 32"
        ),
    )
    *lead, num_rows, half = weight.shape
    check.dtype(op, "meta", meta, (torch.int32, torch.uint8))
    folded = meta.dtype == torch.int32
    check.require(
        fold is None or fold == folded,
        lambda: f"{op}: fold is {fold}, expected {folded} for {meta.dtype} metadata",
    )
    size, dtype = _meta_form(lead, num_rows, half, folded)
    check.tensor(op, "meta", meta, (dtype,), size, "[..., groups, N]", weight)
    _check_gated(op, "weight", weight, num_rows, gated)
    packed, scale = split_pair(op, out)
    packed = _output(op, "out[0]", packed, tuple(weight.shape), torch.uint8, weight, (meta,))
    num_groups = half // (GROUP // 2)
    size = (*lead, num_rows, num_groups)
    scale = _output(op, "out[1]", scale, size, torch.uint8, weight, (meta, packed))
    if weight.numel() == 0:
        return packed, scale
    codes = (unfold(meta, num_groups) if folded else meta).transpose(-1, -2)
    scale.copy_(_deinterleave(codes) if gated else codes)
    rows = _unpack_weight(weight)
    packed.copy_(_deinterleave(rows) if gated else rows)
    return packed, scale


def pack_fp4_reference(
    packed: torch.Tensor, scale: torch.Tensor, *, gated: bool = False, fold: bool = True,
    out: Pair | None = None,
) -> Pair:  # fmt: skip
    """The op itself: packing runs once, in plain torch on every device."""
    return pack_fp4(packed, scale, gated=gated, fold=fold, out=out)


def unpack_fp4_reference(
    weight: torch.Tensor, meta: torch.Tensor, *, gated: bool = False, fold: bool | None = None,
    out: Pair | None = None,
) -> Pair:  # fmt: skip
    """The op itself: unpacking runs in plain torch on every device."""
    return unpack_fp4(weight, meta, gated=gated, fold=fold, out=out)


def foldable(scale: torch.Tensor) -> bool:
    """Whether `pack_fp4` can fold these scales ``[..., N, K/32]``; reads them on the host."""
    return scale.is_meta or not bool(_out_of_range(*_fours(scale.transpose(-1, -2))).any())


def _fours(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[..., K/32, N]`` in fours, ``[..., ceil(K/128), 4, N]``, and the largest of each."""
    tail = -codes.shape[-2] % FOLDED_GROUPS
    if tail:
        # a missing scale counts as the largest of its block
        block = codes[..., -(codes.shape[-2] % FOLDED_GROUPS) :, :]
        codes = torch.cat((codes, *[block.amax(-2, keepdim=True)] * tail), dim=-2)
    fours = codes.unflatten(-2, (-1, FOLDED_GROUPS))
    return fours, fours.amax(-2)


def _out_of_range(fours: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    return (largest - fours.amin(-2) > MAX_OCTAVES) | (largest < LEAST_LARGEST_CODE)


def _check_gated(op: str, name: str, x: torch.Tensor, num_rows: int, gated: bool) -> None:
    check.require(
        not gated or num_rows % 2 == 0,
        lambda: f"{op}: {name} is {tuple(x.shape)}, expected an even number of rows when gated",
    )


def _meta_form(
    lead: list[int], num_rows: int, half: int, fold: bool
) -> tuple[tuple[int, ...], torch.dtype]:
    num_groups = half // (GROUP // 2)
    if fold:
        return (*lead, -(-num_groups // FOLDED_GROUPS), num_rows), torch.int32
    return (*lead, num_groups, num_rows), torch.uint8


def _output(
    op: str, name: str, out: torch.Tensor | None, size: tuple[int, ...], dtype: torch.dtype,
    like: torch.Tensor, inputs: tuple[torch.Tensor, ...],
) -> torch.Tensor:  # fmt: skip
    out = check.output(op, out, size, like=like, dtype=dtype, name=name, inputs=inputs)
    check.require(
        out.is_contiguous(),
        lambda: (
            f"{op}: {name} is {tuple(out.shape)} with strides {out.stride()}, expected contiguous"
        ),
    )
    return out


def _interleave(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(x.chunk(2, dim=-2), dim=-2).flatten(-3, -2)


def _deinterleave(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., 0::2, :], x[..., 1::2, :]), dim=-2)


def _fold(op: str, codes: torch.Tensor, gated: bool) -> torch.Tensor:
    """Scale codes `[..., K/32, N]` to metadata `[..., ceil(K/128), N]`."""
    fours, largest = _fours(codes.contiguous())
    _check_foldable(op, _out_of_range(fours, largest).any(-2), gated)
    folded = (largest.int() - (LEAST_LARGEST_CODE - 1)) << 23
    for place, code in enumerate(fours.unbind(-2)):
        folded |= (MAX_OCTAVES - (largest - code)).int() << (4 * place)
    return folded


def _check_foldable(op: str, bad: torch.Tensor, gated: bool) -> None:
    if bad.device.type == "meta" or not bad.any():
        return
    if gated:
        bad = _deinterleave(bad.unsqueeze(-1)).squeeze(-1)
    rows = [tuple(row) if len(row) > 1 else row[0] for row in bad.nonzero().tolist()]
    shown = ", ".join(str(row) for row in rows[:_SHOWN_ROWS]) + (
        ", ..." if len(rows) > _SHOWN_ROWS else ""
    )
    raise ValueError(
        f"{op}: scale is out of the fold's range in {len(rows)} rows ({shown}), expected four "
        f"neighbouring codes at most {MAX_OCTAVES} apart and the largest at least "
        f"{LEAST_LARGEST_CODE}; fold=False keeps the scale bytes"
    )


def unfold(meta: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Folded metadata ``[..., ceil(K/128), N]`` as the scale bytes ``[..., K/32, N]`` it was made
    of; ``num_groups`` is ``K/32``."""
    shifts = torch.arange(0, 4 * FOLDED_GROUPS, 4, dtype=torch.int32, device=meta.device)
    largest = ((meta >> 23) & 0xFF) + (LEAST_LARGEST_CODE - 1)
    table = (meta.unsqueeze(-2) >> shifts.unsqueeze(-1)) & 15
    codes = largest.unsqueeze(-2) - MAX_OCTAVES + table
    return codes.flatten(-3, -2)[..., :num_groups, :].to(torch.uint8)


def _pieces(num_rows: int, half: int) -> list[tuple[slice, slice, slice]]:
    """(rows, bytes of a row, bytes of the matrix) of the regions of equal shape: see the module."""
    full_rows = num_rows - num_rows % TILE_ROWS
    full_bytes = half - half % (STEP // 2)
    pieces = []
    for first, last in ((0, full_rows), (full_rows, num_rows)):
        if first == last:
            continue
        pieces.append((slice(first, last), slice(0, full_bytes), slice(full_bytes, half)))
    return pieces


def _pack_weight(packed: torch.Tensor, weight: torch.Tensor) -> None:
    *lead, num_rows, half = packed.shape
    flat = weight.view(*lead, num_rows * half)
    for rows, steps, tail in _pieces(num_rows, half):
        tile_rows = min(TILE_ROWS, rows.stop - rows.start)
        size, cut = tile_rows * half, tile_rows * steps.stop
        source = packed[..., rows, :].unflatten(-2, (-1, tile_rows))
        target = flat[..., rows.start * half : rows.stop * half].unflatten(-1, (-1, size))
        count = max(1, _BLOCK_BYTES // size)
        for tiles, out in zip(source.split(count, -3), target.split(count, -2), strict=True):
            words = _to_words(tiles[..., steps].unflatten(-1, (-1, STEP // 2)))
            stepped = out[..., :cut].unflatten(-1, (-1, tile_rows, STEP // 2))
            stepped.copy_(words.transpose(-2, -3))
            if tail.start < tail.stop:
                out[..., cut:] = _to_words(tiles[..., tail]).flatten(-2)


def _unpack_weight(weight: torch.Tensor) -> torch.Tensor:
    *lead, num_rows, half = weight.shape
    flat = weight.view(*lead, num_rows * half)
    packed = torch.empty_like(weight)
    for rows, steps, tail in _pieces(num_rows, half):
        tile_rows = min(TILE_ROWS, rows.stop - rows.start)
        tiles = flat[..., rows.start * half : rows.stop * half].unflatten(
            -1, (-1, tile_rows * half)
        )
        target = packed[..., rows, :].unflatten(-2, (-1, tile_rows))
        cut = tile_rows * steps.stop
        stepped = tiles[..., :cut].unflatten(-1, (-1, tile_rows, STEP // 2)).transpose(-2, -3)
        target[..., steps] = _from_words(stepped).flatten(-2)
        if tail.start < tail.stop:
            target[..., tail] = _from_words(tiles[..., cut:].unflatten(-1, (tile_rows, -1)))
    return packed


def _to_words(packed: torch.Tensor) -> torch.Tensor:
    """Bytes of a step in checkpoint order to its words' bytes, along the last dimension."""
    # a number is four codes; copies start at an even byte and have no gaps, which views need not
    first, second = (
        half.clone(memory_format=torch.contiguous_format).view(torch.int16)
        for half in packed.chunk(2, dim=-1)
    )
    # both halves of a word take two signs of each side: of columns 0 and 1, then of 2 and 3
    low = (first & 0x7777) | ((first & 8) << 4) | ((first & 0x80) << 8)
    low |= (second & 8) | ((second & 0x80) << 4)
    high = (second & 0x7777) | ((first & 0x800) >> 4) | (first & -0x8000)
    high |= ((second & 0x800) >> 8) | ((second >> 4) & 0x800)
    return torch.stack((low, high), dim=-1).flatten(-2).view(torch.uint8)


def _from_words(words: torch.Tensor) -> torch.Tensor:
    byte = words.unflatten(-1, (-1, 4))
    first, second = unpack_nibbles(byte & 0x77).chunk(2, dim=-1)
    first, second = first | ((byte >> 4) & 8), second | (byte & 8)
    return pack_nibbles(torch.cat((first.flatten(-2), second.flatten(-2)), dim=-1))


def _inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    size = (case["S"], case["N"], case["K"] // 2)
    scale_size = (case["S"], case["N"], case["K"] // GROUP)
    if device == "meta":
        empty = [torch.empty(s, dtype=torch.uint8, device="meta") for s in (size, scale_size)]
        return tuple(empty), {"gated": case["gated"]}
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    scale = torch.randint(115, 126, scale_size, dtype=torch.uint8, generator=generator)
    return (packed.to(device), scale.to(device)), {"gated": case["gated"]}


def _unpack_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    args, kwargs = _inputs(case, device=device, seed=seed)
    return pack_fp4(*args, **kwargs), kwargs


_CASES = (
    {"name": "small", "S": 2, "N": 70, "K": 96, "gated": False},
    {"name": "flash-w13", "S": 1, "N": 4096, "K": 4096, "gated": True},
    {"name": "flash-w2", "S": 1, "N": 4096, "K": 2048, "gated": False},
)


def _bytes_moved(case: Case) -> int:
    return int(case["S"] * case["N"] * case["K"] * 17 // 16)


SPECS = (
    KernelSpec(
        op=pack_fp4, reference=pack_fp4_reference, cases=_CASES, inputs=_inputs,
        bytes_moved=_bytes_moved, launches=lambda case: 0, kernel=False,
    ),
    KernelSpec(
        op=unpack_fp4, reference=unpack_fp4_reference, cases=_CASES, inputs=_unpack_inputs,
        bytes_moved=_bytes_moved, launches=lambda case: 0, kernel=False,
    ),
)  # fmt: skip
