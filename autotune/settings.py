"""Variables of the environment under which Triton compiles other code than it does without them.

They are those of a whole process: Triton reads some of them when it is imported, and what it has
compiled once it does not compile again.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

_SWITCHES = (
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3", "DISABLE_MMA_V5",
    "DISABLE_PTXAS_OPT", "TRITON_DEBUG", "TRITON_ENABLE_ASAN", "TRITON_ENABLE_EXPERIMENTAL_CONSAN",
    "TRITON_KERNEL_OVERRIDE",
)  # fmt: skip
_SWITCHES_ON = ("TRITON_DEFAULT_FP_FUSION",)
_TEXTS = (
    "LLVM_PASS_PLUGIN_PATH", "PTXAS_OPTIONS", "TRITON_CUOBJDUMP_PATH", "TRITON_F32_DEFAULT",
    "TRITON_INSTRUMENTATION_MODE", "TRITON_LIBDEVICE_PATH", "TRITON_MOCK_PTX_VERSION",
    "TRITON_NVDISASM_PATH", "TRITON_OVERRIDE_ARCH", "TRITON_PLUGIN_PATHS",
    "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH",
)  # fmt: skip
_OFF = ("", "0", "false", "off", "n", "no")
_ON = ("1", "true", "on", "y", "yes")
_DEFAULTS = {
    **dict.fromkeys(_SWITCHES, _OFF), **dict.fromkeys(_SWITCHES_ON, _ON),
    **dict.fromkeys(_TEXTS, ("",)),
}  # fmt: skip


def changed() -> dict[str, str]:
    """The variables that are set to something else than the default, by name."""
    found = {name: os.environ[name] for name in sorted(_DEFAULTS) if name in os.environ}
    return {name: value for name, value in found.items() if value.lower() not in _DEFAULTS[name]}


def identity() -> list[tuple[str, ...]]:
    """What is changed, and of files that are named when they were written."""
    return [(name, value, *_written(Path(value))) for name, value in changed().items()]


def _written(path: Path) -> tuple[str, ...]:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return ()
    return str(found.st_size), str(found.st_mtime_ns)


def require_default(what: str) -> None:
    """Refuse settings that are not those of whoever uses the result.

    Args:
        what: a clause that says what is done with it.

    Raises:
        ClickException: a setting is changed.
    """
    for name, value in changed().items():
        raise click.ClickException(
            f"{name} is {value}, expected it unset where {what}: it changes what is compiled"
        )


def tell_changed() -> None:
    """A sentence on stderr for each changed setting, where others' figures may be compared."""
    for name, value in changed().items():
        click.echo(
            f"ft-autotune: {name} is {value}, which changes what is compiled: figures are not "
            "those of a process without it",
            err=True,
        )
