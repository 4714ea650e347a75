"""``python -m bench_kernels``: see `bench_kernels/bench.py`."""

import sys

from bench_kernels import text

try:
    from ftkernels import backend as backend
except ValueError as error:  # a setting that the library refuses
    sys.exit(str(error))

from bench_kernels.bench import main

text.run(main)
