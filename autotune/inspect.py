"""What each launch of an op uses on a card, compiled without one, and what a static model says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import triton

from autotune.search import lookups
from autotune.static import LaunchFigures, figures
from autotune.trials import COMPILE_ERRORS, silent, stopped
from autotune.workers import work_through
from ftkernels import KernelSpec, registry, target
from ftkernels.offline import Compiled, compile_launches
from ftkernels.spec import Case


@dataclass(frozen=True)
class Item:
    """One case to compile, at a config of its op or at the one that a lookup gives."""

    op: str
    case: Case
    config: object = None


@dataclass(frozen=True)
class LaunchRow:
    """One launch of one case.

    Args:
        case: the name of the case and its sizes.
        config: the record the op looked up; without a lookup, how the kernel was launched.
        source: "default", the entry's "measured" or "modelled", or "candidate".
        figures: what it uses, and the static model's figures.
    """

    op: str
    case: Mapping[str, object]
    config: Mapping[str, object]
    triton: str
    source: str
    figures: LaunchFigures

    @property
    def is_sound(self) -> bool:
        """Whether the kernel can be launched and spills nothing."""
        return self.figures.fits and self.figures.spill_bytes == 0

    def as_dict(self) -> dict[str, object]:
        """For JSON. `source` is the config's; the figures' own is said beside them."""
        x = self.figures
        return {
            "op": self.op, "kernel": x.kernel, "case": dict(self.case),
            "config": dict(self.config), "triton": self.triton, "registers": x.registers,
            "spill_bytes": x.spill_bytes, "shared_bytes": x.shared_bytes, "fits": x.fits,
            "warps_per_sm": x.warps_per_sm, "mma": x.mma, "issue_per_kmac": x.issue_per_kmac,
            "ceiling_tflops": x.ceiling_tflops, "bound": x.bound, "source": self.source,
            "figures_source": "modelled", "static_model": {"source": "modelled", **asdict(x)},
        }  # fmt: skip


def work_list(
    specs: Sequence[KernelSpec], *, arch: int = 89, candidates: bool = False
) -> list[Item]:
    """Every case of every op, in the order of the registry; with `candidates` at each of them."""
    items = []
    for spec in specs:
        for case in spec.cases:
            items.append(Item(spec.name, case))
            if candidates:
                items += [Item(spec.name, case, x) for x in _candidates(spec, case, arch)]
    return items


def _candidates(spec: KernelSpec, case: Case, arch: int) -> list[object]:
    card, found = target.of_arch(arch), lookups(spec, case, arch)
    keys = [x.key for x in found if x.op == spec.name]
    used = [x.config for x in found]
    tried = [record for key in keys[:1] for record in spec.candidates(key, card)]
    return [record for record in tried if record not in used]


def inspect(
    work: Sequence[Item], *, arch: int, advance: Callable[[str], None], jobs: int | None = None
) -> list[LaunchRow]:
    """Compile every launch of the given cases.

    Args:
        arch: compute capability times ten.
        advance: told the name of the op after each case, in any order.
        jobs: processes that compile, None for one a core; with 1 this process does.

    Returns:
        The rows of every case, in the order of `work`.

    Raises:
        Stopped: the compiler or the machine failed.
        ValueError: no facts are known for `arch`, or an op claims more work than it does.
    """
    rows: dict[int, list[LaunchRow]] = {}

    def done(job: _Job, found: list[LaunchRow]) -> None:
        rows[job.index] = found
        advance(job.item.op)

    items = [_Job(index, item, arch) for index, item in enumerate(work)]
    work_through(items, _compiled, done, num_workers=jobs or os.cpu_count() or 1, name=str)
    return [row for index in range(len(work)) for row in rows[index]]


@dataclass(frozen=True)
class _Job:
    """An item and its place."""

    index: int
    item: Item
    arch: int

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.item.case.items())
        return f"{self.item.op} ({sizes})"


def _compiled(job: _Job) -> list[LaunchRow]:
    try:
        with silent():
            return rows_of(job.item, job.arch)
    except COMPILE_ERRORS as error:
        raise stopped(str(job), error) from None


def rows_of(item: Item, arch: int) -> list[LaunchRow]:
    """The launches of one case."""
    spec = _specs()[item.op]
    compiled = compile_launches(spec, item.case, arch=arch, config=item.config)
    return launch_rows(spec, item.case, compiled)


def launch_rows(
    spec: KernelSpec, case: Case, compiled: Sequence[Compiled]
) -> list[LaunchRow]:  # fmt: skip
    """The launches of one case that are compiled already."""
    found = figures(spec, case, compiled)
    return [_row(spec.name, case, x, y) for x, y in zip(compiled, found, strict=True)]


@cache
def _specs() -> Mapping[str, KernelSpec]:
    return {spec.name: spec for spec in registry()}


def _row(op: str, case: Case, compiled: Compiled, found: LaunchFigures) -> LaunchRow:
    lookup, launch = compiled.found, compiled.launch
    launched = {name: launch.config[name] for name in ("num_warps", "num_stages")}
    source = "default" if lookup is None else lookup.source
    return LaunchRow(
        op=op, case=dict(case), config=launched if lookup is None else dict(vars(lookup.config)),
        triton=triton.__version__, source="candidate" if source == "pinned" else source,
        figures=found,
    )  # fmt: skip
