# One place to install, run and check. `make serve` and `make test` are all a fresh machine needs.
PY ?= python3.11
BIN := .venv/bin
ARGS ?=
# Where PyTorch's CPU wheels come from, for machines without a card:
#   make serve TORCH_INDEX=<address of the CPU wheel index>
TORCH_INDEX ?=
PYTHON ?= $(BIN)/python
PIP_FLAGS := -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
WORKERS ?= 2
# processes that share the card in test-gpu, where pytest-xdist is installed
GPU_WORKERS ?=

# versions that test-triton runs besides the pinned one; TESTS are the interpreted files, and K is a
# pytest expression that narrows these and the compiles
TRITONS ?= 3.6.0 3.8.0 3.9.0
TESTS ?= tests/ftkernels
K ?=
# ops whose shipped entries test-triton verifies, all when empty
OPS ?=

.PHONY: serve test setup lint test-gpu test-triton compile-sm89 bench bench-decode \
  bench-load bench-scheduler sim

.venv/.ok-%: pyproject.toml constraints.txt
	@[ "$$(uname -s)-$$(uname -m)" = Linux-x86_64 ] || { \
	  echo "this project runs on Linux x86-64, and this is $$(uname -s) $$(uname -m)"; exit 1; }
	@test -x $(BIN)/python || command -v $(PY) >/dev/null || { \
	  echo "PY is $(PY), expected a Python 3.11 interpreter: make PY=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PY) -m venv .venv
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -e '.[$*]'
	touch $@

serve: .venv/.ok-serve
	$(BIN)/ftruntime serve $(ARGS)

setup: .venv/.ok-serve .venv/.ok-serve,test

lint: .venv/.ok-serve,test
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(THREADS) $(BIN)/python -m pytest -q -n $(WORKERS) tests/ftkernels
	$(THREADS) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/ftkernels
	$(THREADS) $(BIN)/python -m pytest -q -n $(WORKERS) tests --ignore tests/ftkernels

compile-sm89: .venv/.ok-serve,test
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/rules/test_compile_sm89.py

# each version lies in a folder of its own, first on PYTHONPATH; .venv keeps the pinned one
.venv/triton/%/.ok: .venv/.ok-serve,test
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(@D) triton==$*
	touch $@

test-triton: $(TRITONS:%=.venv/triton/%/.ok)
	@failed=; for version in $(TRITONS); do \
	  export PYTHONPATH=$(CURDIR)/.venv/triton/$$version; \
	  $(BIN)/python -c "import triton as t; assert t.__version__ == '$$version', t.__version__" \
	  && echo "triton $$version, interpreted" \
	  && $(THREADS) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n $(WORKERS) \
	    $(if $(K),-k '$(K)') $(TESTS) \
	  && echo "triton $$version, compiled for sm_89" \
	  && $(THREADS) $(BIN)/python -m pytest -q -n $(WORKERS) \
	    $(if $(K),-k '$(K)') tests/rules/test_compile_sm89.py \
	  && echo "triton $$version, shipped entries by value" \
	  && $(THREADS) $(BIN)/ft-autotune verify $(OPS) \
	  || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "failed on triton$$failed"; exit 1; }

# installs nothing: PYTHON is any interpreter that has torch with CUDA, triton and pytest
test-gpu:
	@$(PYTHON) -c 'import torch, triton, pytest' 2>/dev/null || { \
	  echo "PYTHON is $(PYTHON), expected an interpreter with torch, triton and pytest"; exit 1; }
	@$(PYTHON) -c 'import torch; exit(not torch.cuda.is_available())' || { \
	  echo "test-gpu needs a CUDA card, and there is none here"; exit 1; }
	$(PYTHON) -m pytest -q -p no:cacheprovider $(if $(GPU_WORKERS),-n $(GPU_WORKERS)) \
	  --durations 10 tests/ftkernels
	@command -v compute-sanitizer >/dev/null || { \
	  echo "compute-sanitizer is not on the PATH: memory was not checked"; exit 0; }; \
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
	  $(PYTHON) -m bench_kernels.small

# every op timed on the card, installs nothing either; without one what a static model says and the
# terms of a step: ARGS="--seconds 60 mla_decode"
bench:
	@$(PYTHON) -c 'import torch, triton' 2>/dev/null || { \
	  echo "PYTHON is $(PYTHON), expected an interpreter with torch and triton"; exit 1; }
	@$(PYTHON) -m bench_kernels $(ARGS)

# decode speed on the CPU as a ratio to transformers, on random demo weights
bench-decode: .venv/.ok-serve,test
	$(THREADS) $(BIN)/python -m tests.benchmarks.decode_ratio

# both expert loaders on a synthetic bank of 6 GB in a temporary directory; ARGS="--gb 2" for less
bench-load: .venv/.ok-serve,test
	$(PYTHON) -m tests.benchmarks.load_ratio $(ARGS)

# processor time of the scheduler for each step
bench-scheduler: .venv/.ok-serve,test
	$(THREADS) $(BIN)/python -m tests.benchmarks.scheduler_cost $(ARGS)

# a long prompt beside a running stream, on modelled step times: ARGS="--table 1,2,4,8,16"
sim: .venv/.ok-serve
	$(BIN)/ftruntime simulate $(ARGS)
