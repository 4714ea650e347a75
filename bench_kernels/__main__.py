"""``python -m bench_kernels``: see `bench_kernels/bench.py`."""

import signal
import sys

from bench_kernels.bench import main

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough is no error
sys.exit(main())
