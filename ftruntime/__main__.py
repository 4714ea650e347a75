"""``python -m ftruntime`` is the ``ftruntime`` command."""

from __future__ import annotations

from ftruntime.cli import main

main()
