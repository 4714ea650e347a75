"""`python -m autotune` is `ft-autotune`."""

from autotune.cli import main

main()
