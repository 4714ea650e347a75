"""What each launch of an op uses on a card, compiled without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import triton

from ftkernels import KernelSpec
from ftkernels.offline import Compiled, compile_launches
from ftkernels.spec import Case
from ftkernels.testing import sass


@dataclass(frozen=True)
class LaunchRow:
    """One launch of one case.

    Args:
        case: the name of the case and its sizes.
        config: the record the op looked up; without a lookup, how the kernel was launched.
        registers: of a thread.
        spill_bytes: of a thread, stores and loads together.
        shared_bytes: of a block; `fits` when the card gives a block that much.
        warps_per_sm: warps that one SM holds at a time.
        mma: the matrix instruction used most, None without any.
        issue_per_kmac, ceiling_tflops, bound: issue slots for 1024 multiply-accumulates, the rate
            that they allow and what sets it; None without matrix work.
        source: "default", or the entry's "measured" or "modelled".
    """

    op: str
    kernel: str
    case: Mapping[str, object]
    config: Mapping[str, object]
    triton: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    fits: bool
    warps_per_sm: int
    mma: str | None
    issue_per_kmac: float | None
    ceiling_tflops: float | None
    bound: str | None
    source: str

    @property
    def is_sound(self) -> bool:
        """Whether the kernel can be launched and spills nothing."""
        return self.fits and self.spill_bytes == 0

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def work_list(specs: Sequence[KernelSpec]) -> list[tuple[KernelSpec, Case]]:
    """Every case of every op, in the order of the registry."""
    return [(spec, case) for spec in specs for case in spec.cases]


def inspect(
    work: Sequence[tuple[KernelSpec, Case]], *, arch: int, advance: Callable[[str], None]
) -> list[LaunchRow]:
    """Compile every launch at its shipped or default config.

    Args:
        arch: compute capability times ten.
        advance: told the name of the op before each case.

    Raises:
        RuntimeError: kernels are interpreted in this process.
        ValueError: no facts are known for `arch`.
    """
    rows = []
    for spec, case in work:
        advance(spec.name)
        rows += [_row(spec.name, case, x) for x in compile_launches(spec, case, arch=arch)]
    return rows


def _row(op: str, case: Case, compiled: Compiled) -> LaunchRow:
    launch, found = compiled.launch, compiled.found
    report = launch.report
    launched = {name: launch.config[name] for name in ("num_warps", "num_stages")}
    has_mma = "mma." in report.ptx  # spares printing machine code that has none
    return LaunchRow(
        op=op,
        kernel=launch.name,
        case=dict(case),
        config=launched if found is None else dict(vars(found.config)),
        triton=triton.__version__,
        registers=report.regs,
        spill_bytes=report.spill_bytes,
        shared_bytes=report.shared,
        fits=report.fits,
        warps_per_sm=report.blocks_per_sm * report.num_warps,
        mma=sass.mma_kind(report.sass) if has_mma else None,
        issue_per_kmac=None,
        ceiling_tflops=None,
        bound=None,
        source="default" if found is None else found.source,
    )
