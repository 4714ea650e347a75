"""``python -m bench_kernels``: see `bench_kernels/bench.py`."""

from bench_kernels import text
from bench_kernels.bench import main

text.run(main)
