"""What there is to try for the model's shapes, what is out of the question, and what is best.

A *problem* is one key of one op: every case that looks this key up gets the same config. Of its
candidates those go that a card cannot run well, by the machine's own limits or next to the
default; of the rest the fastest wins, if it is faster by more than the figures can tell. All of it
follows from the inputs, so that every rank of a TP group and every run chooses the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any
from unittest import mock

from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from ftkernels import KernelSpec, config, registry, target
from ftkernels.config import Found, FrozenKey
from ftkernels.spec import Case

User = tuple[str, Case]
_FLASH = "flash"
_WIDE_TOLERANCE = 0.01  # a remainder or a mask's load more is no loss
_RANKS = re.compile(r"\btp(\d+)\b")


@dataclass(frozen=True)
class Problem:
    """One key of one op.

    Args:
        users: the op's own cases of this key, as names of the op and cases.
        hosts: cases of ops that launch this one's kernels inside theirs under this key.
        candidates: the default first, then the others in a fixed order.
    """

    op: str
    key: FrozenKey
    users: tuple[User, ...]
    hosts: tuple[User, ...]
    candidates: tuple[object, ...]

    @property
    def default(self) -> object:
        return self.candidates[0]


@dataclass(frozen=True)
class Launch:
    """What a compiled kernel uses; `mma` is the operand types of its matrix instruction.

    `copies` counts asynchronous copies to shared memory; `wide` is the share of the bytes of all
    load instructions that come 16 a thread.
    """

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps_per_sm: int
    fits: bool
    mma: str | None
    copies: int
    wide: float


@dataclass(frozen=True)
class Trial:
    """A config tried on all users of its problem.

    Args:
        us: of each user, modelled or measured.
        launches: of all users, in order.
        error: the rule that it breaks before anything is compared; empty when it runs.
        can_tell: False where loops run that no SPEC describes, whose modelled figure is a guess.
    """

    us: tuple[float, ...] = ()
    launches: tuple[Launch, ...] = ()
    error: str = ""
    can_tell: bool = True


@dataclass
class Choice:
    """What was found for a problem.

    Args:
        default_us: None where the default is unsound, with which nothing can be compared.
        ranking: the sound configs, the best first.
        tried: configs that were compiled.
    """

    problem: Problem
    config: object
    us: float
    default_us: float | None
    ranking: tuple[object, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    tried: int = 0

    @property
    def gain(self) -> float | None:
        """By how much the modelled or measured time falls, as a share of the default's."""
        return 1 - self.us / self.default_us if self.default_us else None


def lookups(spec: KernelSpec, case: Case, arch: int) -> list[Found]:
    """Every config lookup of a call of the op, found without a launch or a compile."""
    found: list[Found] = []
    with (
        target.offline(arch),
        config.watch(found.append),
        mock.patch.object(JITFunction, "run", return_value=None),
        mock.patch.object(GridExecutor, "__call__", return_value=None),
    ):
        args, kwargs = spec.inputs(case, device="meta", seed=0)
        spec.op(*args, **kwargs)
    return found


def problems(
    specs: Sequence[KernelSpec], *, arch: int, ranks: Iterable[int] = (1, 2, 4, 8)
) -> list[Problem]:
    """The distinct keys of the named ops at the model's shapes, in the order of the registry.

    Args:
        ranks: sizes of the TP group; cases without one in their name are always in.
    """
    by_name = {spec.name: spec for spec in registry()}
    found = _places(by_name, arch, set(ranks))
    return [
        _problem(by_name[op], key, place, arch)
        for spec in specs
        for (op, key), place in found.items()
        # a key that only hosts look up is tuned where it is their main work
        if op == spec.name and (place.users or spec.flops(spec.cases[0]))
    ]


def known_ranks() -> list[int]:
    """The sizes of the TP group that the model's cases are named for."""
    names = [str(case.get("name", "")) for spec in registry() for case in spec.cases]
    named = [_RANKS.search(name) for name in names if name.startswith(_FLASH)]
    return sorted({int(match[1]) for match in named if match})


@dataclass
class _Place:
    sizes: Mapping[str, int]  # of the first lookup: an entry's key may be a bucket
    users: list[User] = field(default_factory=list)
    hosts: list[User] = field(default_factory=list)


def _places(
    by_name: Mapping[str, KernelSpec], arch: int, ranks: set[int]
) -> dict[tuple[str, FrozenKey], _Place]:
    places: dict[tuple[str, FrozenKey], _Place] = {}
    for spec in by_name.values():
        for case in (c for c in spec.cases if spec.kernel and _is_in(c, ranks)):
            found = {_key(x, by_name[x.op]): x for x in reversed(lookups(spec, case, arch))}
            is_host = all(op != spec.name for op, _ in found)
            for key, lookup in found.items():
                place = places.setdefault(key, _Place(lookup.key))
                if key[0] == spec.name:
                    place.users.append((spec.name, case))
                elif is_host:
                    place.hosts.append((spec.name, case))
    return {key: place for key, place in places.items() if place.users or place.hosts}


def _problem(spec: KernelSpec, key: FrozenKey, place: _Place, arch: int) -> Problem:
    assert spec.default is not None
    default = spec.default(place.sizes)
    others = set(spec.candidates(place.sizes, target.of_arch(arch))) - {default}
    # where only another op's launch looks the key up, that launch is what is judged
    users, hosts = (place.users, place.hosts) if place.users else (place.hosts, [])
    ordered = sorted(others, key=_order)
    return Problem(spec.name, key, tuple(users), tuple(hosts), (default, *ordered))


def _order(record: Any) -> tuple[Any, ...]:
    return astuple(record)


def _is_in(case: Case, ranks: set[int]) -> bool:
    name = str(case.get("name", ""))
    named = _RANKS.search(name)
    return name.startswith(_FLASH) and (named is None or int(named[1]) in ranks)


def _key(found: Found, spec: KernelSpec) -> tuple[str, FrozenKey]:
    return found.op, config.entry_key(found.key, spec.grows)


def traits(ptx: str) -> tuple[str | None, int, float]:
    """MMA operand types, asynchronous copies, and the share of loads that are 16 bytes wide."""
    kinds = re.findall(r"\b(?:mma|wgmma\.mma_async)\.sync\.aligned\.m\d+n\d+k\d+\.([\w.]+)", ptx)
    types = sorted({kind.replace("row.col.", "") for kind in kinds})
    copies = re.findall(r"cp\.async\.(?:cg|ca)\.shared\S*\s.*?,\s*(0x[0-9a-f]+|\d+)\s*[,;]", ptx)
    loads = re.findall(r"ld\.global\S*?(?:\.v([248]))?\.[bfsu](8|16|32|64)\s", ptx)
    widths = [int(size, 0) for size in copies]
    widths += [int(count or 1) * int(bits) // 8 for count, bits in loads]
    wide = sum(width for width in widths if width >= 16)
    return "+".join(types) or None, len(copies), wide / sum(widths) if widths else 0.0


def refusal(trial: Trial, default: Trial) -> str:
    """The rule that drops a trial; empty when it stays. The default is held to limits only."""
    if trial.error:
        return trial.error
    for launch in trial.launches:
        if not launch.fits:
            return "does not fit"
        if launch.spill_bytes:
            return "spills"
    if default.error:
        return ""
    if len(trial.launches) != len(default.launches):
        return "other launches"
    for launch, before in zip(trial.launches, default.launches, strict=True):
        if launch.mma != before.mma:
            return "lost its MMA kind"
        if before.copies and not launch.copies:
            return "lost pipelining"
        if launch.wide < before.wide - _WIDE_TOLERANCE:
            return "lost 16-byte loads"
    return ""


def choose(problem: Problem, trials: Mapping[object, Trial], *, margin: float) -> Choice | None:
    """The fastest sound config; a sound default where none is known to be faster by `margin`.

    A config's figure is its time relative to the default's, averaged over the users, so that a
    decode step counts as much as a long prompt. Without a sound default it is relative to the
    least time of each user. None when no config is sound.
    """
    default = trials[problem.default]
    dropped: dict[str, int] = {}
    sound: list[object] = []
    for record in (x for x in problem.candidates if x in trials):
        rule = refusal(trials[record], default)
        if rule:
            dropped[rule] = dropped.get(rule, 0) + 1
        else:
            sound.append(record)
    if not sound:
        return None
    can_compare = problem.default in sound
    times = [trials[record].us for record in sound]
    base = default.us if can_compare else tuple(map(min, zip(*times, strict=True)))
    ratios = {record: _ratio(trials[record].us, base) for record in sound}
    # sorted keeps equals in the order of the candidates, the default first
    ranking = tuple(sorted(sound, key=lambda record: ratios[record]))
    best = ranking[0]
    is_known = trials[best].can_tell and default.can_tell and ratios[best] < 1 - margin
    if can_compare and not is_known:
        best = problem.default
    us, default_us = sum(trials[best].us), sum(default.us) if can_compare else None
    return Choice(problem, best, us, default_us, ranking, dropped, len(trials))


def can_gain(problem: Problem, default: Trial, arch: int, *, margin: float) -> bool:
    """Whether a modelled figure could make another config than the default the choice.

    Not where the figure is a guess, nor where the default is within `margin` of what the card's
    bandwidth and peak allow any config.
    """
    if refusal(default, default):
        return True
    floors = [_floor_us(op, case, target.of_arch(arch)) for op, case in problem.users]
    return default.can_tell and _ratio(floors, default.us) < 1 - margin


def _floor_us(op: str, case: Case, card: target.Target) -> float:
    spec = next(spec for spec in registry() if spec.name == op)
    bytes_us = spec.bytes_moved(case) / card.memory_gb_per_s * 1e-3
    return max(bytes_us, spec.flops(case) / card.fp8_tflops * 1e-6)


def _ratio(us: Sequence[float], base: Sequence[float]) -> float:
    # rounded, so that the last bits of a sum decide nothing
    return round(sum(a / b for a, b in zip(us, base, strict=True)) / len(us), 6)
