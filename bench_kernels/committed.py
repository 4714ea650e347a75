"""The committed figures of a static model, `contract.json`: none of them is a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkernels import registry
from ftkernels.spec import Case, KernelSpec
from ftkernels.testing import figures

Launches = Sequence[Mapping[str, Any]]
PATH = Path(__file__).with_name("contract.json")
_FP8 = "E4M3"


@dataclass(frozen=True)
class Committed:
    """Figures of the launches of each op and case, in order.

    Args:
        triton: the version that compiled them.
        launches: by op and name of the case.
    """

    triton: str
    launches: Mapping[tuple[str, str], Launches]

    def of(self, op: str, case: str) -> Launches:
        """The launches of a case; none when it is not committed."""
        return self.launches.get((op, case), ())

    def ceiling_tflops(self, op: str, case: str) -> float | None:
        """Lowest ceiling among the launches of products, None without any."""
        found = [x["ceiling_tflops"] for x in self.of(op, case) if x["ceiling_tflops"]]
        return min(found, default=None)

    def us(self, op: str, case: str) -> float | None:
        """Modelled microseconds of a call on the static model's card, None when not committed."""
        found = [x.get("us") for x in self.of(op, case)]
        known = [float(us) for us in found if us is not None]
        return sum(known) if found and len(known) == len(found) else None

    def multiplies_fp8(self, op: str, case: str) -> bool:
        """Whether a launch of a case multiplies FP8 numbers, by any case where it is unknown."""
        every = [x for (name, _), part in self.launches.items() if name == op for x in part]
        return any(_FP8 in kind for x in self.of(op, case) or every for kind in x["mma"])


def read(path: Path = PATH) -> Committed:
    """The committed figures.

    Raises:
        ValueError: there are none, or the file is damaged.
    """
    return Committed(*figures.read(path))


def static_table(committed: Committed, ops: Sequence[str] = ()) -> list[dict[str, object]]:
    """A row for each op and case with committed figures; useful work by the op's `KernelSpec`."""
    return [
        _row(spec, case, committed)
        for spec in registry()
        for case in spec.cases
        if (not ops or spec.name in ops) and committed.of(spec.name, str(case.get("name")))
    ]


def _row(spec: KernelSpec, case: Case, committed: Committed) -> dict[str, object]:
    name = str(case["name"])
    launches = committed.of(spec.name, name)
    dearest = max(launches, key=lambda x: x.get("us") or 0.0)
    return {
        "op": spec.name, "case": name, "launches": len(launches),
        "modelled_us": committed.us(spec.name, name), "bound": dearest["bound"],
        "ceiling_tflops": committed.ceiling_tflops(spec.name, name),
        "ceiling_gb_per_s": dearest.get("ceiling_gb_per_s"),
        "useful_mb": spec.bytes_moved(case) / 1e6, "useful_gflop": spec.flops(case) / 1e9,
    }  # fmt: skip
