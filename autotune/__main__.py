"""`python -m autotune` is `ft-autotune`."""

from autotune.cli import main

if __name__ == "__main__":  # worker processes import this file
    main()
