"""The ``ftruntime`` command: the script that is installed, and ``python -m ftruntime``."""

from __future__ import annotations

import sys

from ftruntime.distribution import DISTRIBUTION

_FAILED = 1


def main() -> None:
    """Run the command line and exit; where it cannot be imported, `doctor` still looks why."""
    try:
        from ftruntime.cli import main as command
    except Exception as error:  # whatever a broken package raises
        if _is_ours(error):
            raise
        sys.exit(_without_command_line(sys.argv[1:], error))
    command()


def _is_ours(error: Exception) -> bool:
    return isinstance(error, ImportError) and str(error.name).startswith(("ftruntime", "ftkernels"))


def _without_command_line(args: list[str], error: Exception) -> int:
    if args[:1] == ["doctor"]:
        from ftruntime.doctor import examine

        return examine(print, as_json="--json" in args)
    words = str(error).splitlines() or [type(error).__name__]
    print(
        f"ftruntime cannot be imported ({words[0]}), expected: pip install "
        f"'{DISTRIBUTION}[serve]'; `ftruntime doctor` says what is missing",
        file=sys.stderr,
    )
    return _FAILED


if __name__ == "__main__":
    main()
