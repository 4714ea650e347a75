"""Runs shipped entries by value, through the lookup that serving uses.

An entry is right when the cases it is for find it, and nothing else, and when the op then gives
what its reference gives. Sizes that the key does not fix are made small, so that an interpreter
gets through them. Where even then there is much to do, because the entry stands for a bucket of
many tokens, the lookup is checked at the bucket's size and the values with fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from triton.errors import TritonError

from autotune.entries import Entry, Found
from autotune.search import Problem, lookups, problems
from autotune.values import disagreement
from ftkernels import KernelSpec, config, registry, target
from ftkernels.config import FrozenKey
from ftkernels.spec import Case

# just above the powers of two, where buckets begin
_SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025, 2049, 4097)
# of the most work: above it a case is run with fewer tokens than its bucket's
_MUCH = 1 / 16
_FREE = ("S", "V", "T", "pos0", "length", "n", "N", "H")


@dataclass(frozen=True)
class Checked:
    """One entry: `error` says what is wrong with it, `ran` whether it was run by value."""

    op: str
    key: Mapping[str, int]
    error: str
    ran: bool


def smallest_keys(found: Sequence[tuple[str, Entry]], count: int) -> list[tuple[str, Entry]]:
    """The entries of each op with the smallest products of sizes, `count` of them."""
    kept: list[tuple[str, Entry]] = []
    for op in dict.fromkeys(op for op, _ in found):
        mine = [entry for name, entry in found if name == op]
        mine.sort(key=lambda entry: math.prod(max(1, n) for n in entry["key"].values()))
        kept += [(op, entry) for entry in mine[:count]]
    return kept


def cases(arch: int) -> dict[tuple[str, FrozenKey], Problem]:
    """What the ops look up at the model's shapes, by op and key."""
    specs = [spec for spec in registry() if spec.kernel]
    return {(x.op, x.key): x for x in problems(specs, arch=arch)}


def verify(
    found: Found, by_key: Mapping[tuple[str, FrozenKey], Problem], *, arch: int, device: str,
    most_work: float, advance: Callable[[str], None],
) -> list[Checked]:  # fmt: skip
    """Check entries one by one, as they stand in the files that lookups read.

    Args:
        by_key: see `cases`.
        most_work: cases with more of it, see `work`, are looked up but not run, and those with
            more than a sixteenth of it are run with fewer tokens where they can be.
        advance: told the name of the op after each entry.
    """
    checked = []
    for op, entry in (*found.taken, *found.spare):
        problem = by_key.get((op, config.entry_key(entry["key"])))
        if problem is None:
            error, ran = "no case of the registry looks it up", False
        elif replace(problem.default, **entry["config"]) not in problem.candidates:  # type: ignore[type-var]
            error, ran = "its config is neither the default nor a candidate", False
        elif any(entry is other for _, other in found.spare):
            error, ran = "", False
        else:
            error, ran = _checked(op, entry, problem, arch, device, most_work)
        checked.append(Checked(op, entry["key"], error, ran))
        advance(op)
    return checked


def _checked(
    op: str, entry: Entry, problem: Problem, arch: int, device: str, most_work: float
) -> tuple[str, bool]:
    """What is wrong with an entry, and whether it was run by value."""
    name, case = problem.users[0]
    by_name = {spec.name: spec for spec in registry()}
    spec, grows = by_name[name], by_name[op].grows
    case = smallest(spec, case, op, problem.key, grows, arch)
    heard: list[config.Found] = []
    if work(spec, case) <= most_work * _MUCH:
        with target.offline(arch), config.watch(heard.append):
            error = _wrong_values(spec, case, device)
        return error or wrong_lookup(heard, op, entry, grows), True
    error = wrong_lookup(lookups(spec, case, arch), op, entry, grows)
    fewer = smallest(spec, case, op, problem.key, grows, arch, any_bucket=True)
    if error or work(spec, fewer) > most_work:
        return error, False
    sizes = dict(problem.key)
    record = replace(problem.default, **entry["config"])  # type: ignore[type-var]
    with target.offline(arch), config.pin(op, record), config.watch(heard.append):
        error = _wrong_values(spec, fewer, device)
    if not error and not any(x.op == op and _same(x.key, sizes, grows) for x in heard):
        error = "fewer rows take another path"
    return error, True


def _wrong_values(spec: KernelSpec, case: Case, device: str) -> str:
    try:
        return disagreement(spec, case, device=device)
    except (TritonError, RuntimeError, ValueError, TypeError) as error:
        first = (str(error).splitlines() or [""])[0]
        return f"it does not run, {type(error).__name__}: {first}"


def wrong_lookup(heard: Sequence[config.Found], op: str, entry: Entry, grows: str) -> str:
    """Why what was looked up is not the entry; empty when it is."""
    key = config.entry_key(entry["key"])
    mine = [x for x in heard if x.op == op and config.entry_key(x.key, grows) == key]
    if not mine:
        return "the op does not look it up"
    for found in mine:
        # fields that the entry leaves to the default are none of its business
        expected = replace(found.config, **entry["config"])
        if found.source != entry["source"] or found.config != expected:
            return f"the lookup gives {found.config} ({found.source})"
    return ""


def work(spec: KernelSpec, case: Case) -> float:
    """Flops and ten times the bytes of a call: about what an interpreter's time follows."""
    return spec.flops(case) + 10.0 * spec.bytes_moved(case)


def smallest(
    spec: KernelSpec, case: Case, op: str, key: FrozenKey, grows: str, arch: int, *,
    any_bucket: bool = False,
) -> Case:  # fmt: skip
    """The case with every size as small as it can be while it still looks the key up.

    Args:
        any_bucket: the size that grows may be in another bucket.
    """
    sizes = dict(key)

    def looks_up(smaller: Case) -> bool:
        if not _has_rows_to_pick(smaller):
            return False
        try:
            found = [x for x in lookups(spec, smaller, arch) if x.op == op]
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError):
            return False
        if any_bucket:
            return any(_same(x.key, sizes, grows) for x in found)
        return any(config.entry_key(x.key, grows) == key for x in found)

    for name in _FREE:
        # a list of entries keeps the places it is spread over
        if type(case.get(name)) is not int or (name == "V" and "N" in case):
            continue
        tried = ({**case, name: size} for size in _SIZES if size < case[name])
        case = next(filter(looks_up, tried), case)
    return case


def _has_rows_to_pick(case: Case) -> bool:
    """Whether the context has as many compressed rows as each query picks."""
    ratio, context = case.get("ratio"), case.get("length") or case.get("pos0", 0) + case.get("T", 0)
    return not ratio or case.get("topk", 0) <= context // ratio


def _same(key: Mapping[str, int], sizes: Mapping[str, int], grows: str) -> bool:
    return {**key, grows: 0} == {**sizes, grows: 0}
