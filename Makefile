# From a fresh clone `make demo` and `make test` set up whatever is missing by themselves.
#   make demo        the whole pipeline over the local lab, with real numbers
#   make test        all tests but the slow ones;  make test-slow  the slow ones
#   make check       linter, formatter, types, import contract
#   make fla-env     the second environment of the slow tests: fla and triton without a GPU (1.1 GB)
#   make peers       the engines that benchmarks compare with, in .venv-peers
#   make test-system what some tests are skipped without: Chromium, PostgreSQL (as root)
#   make venv        only the set-up;  make lab, make lab-down  the local lab by hand
# Options: PYTHON=/path/to/python3 (3.11 or newer), ARGS="more arguments for pytest or the demo"

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
FLA   := .venv-fla
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$python; break; }; done)

# a thousand processes of the demo and the tests would each compile what they import
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow check venv fla-env peers system test-system lab lab-down clean

demo: $(STAMP)
	$(BIN)/dflash-ops demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow' -n 4 --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP) $(FLA)/.installed
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(STAMP)

# touched last, so that an install that failed is tried again
$(STAMP): pyproject.toml constraints.txt | system
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[model,ops,dev]'
	touch $(STAMP)

fla-env: $(FLA)/.installed

# shares the first environment's packages; torch for the CPU asks for no triton, and fla's own requirements would bring
# torch for CUDA
$(FLA)/.installed: $(STAMP)
	$(BIN)/python -m venv --clear $(FLA)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(FLA)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first.pth
	$(FLA)/bin/python -m pip install --no-deps \
		flash-linear-attention==0.6.0 fla-core==0.6.0 triton==3.9.0 einops==0.8.2
	touch $(FLA)/.installed

peers: $(PEERS)/.installed

$(PEERS)/.installed: peers.txt | system
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install -r peers.txt
	# asked for and not used here, and their wheels load with torch for CUDA only
	$(PEERS)/bin/python -m pip uninstall -y torchaudio torchcodec
	touch $(PEERS)/.installed

system:
	@PYTHON='$(PYTHON)' sh deploy/setup-debian.sh

test-system:
	@PYTHON='$(PYTHON)' sh deploy/setup-debian.sh chromium chromium-driver postgresql

lab: $(STAMP)
	$(BIN)/dflash-ops lab up

lab-down: $(STAMP)
	$(BIN)/dflash-ops lab down

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)*/*' -prune -exec rm -rf {} +
