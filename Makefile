PYTHON ?= python3
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
SITE := docs/_build/html
PORT ?= 8000
RAY_STAMP := $(VENV)/.installed-ray

# One thread per test process: the tests are small, and threads would only compete. A file's tests
# stay together, so that what they share is made once.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-ray test-matrix campaign campaign-quick bench results-smoke report docs docs-serve upstream-patch check format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

train: $(STAMP) ## train MPO to swing a pole up, in about five minutes (ARGS="..." changes settings)
	@$(BIN)/python examples/mpo_dmc.py env.name=cartpole-swingup total_frames=40_000 eval.interval=5_000 $(ARGS)

test: $(STAMP) ## run the tests (ARGS="..." goes to pytest)
	@$(PYTEST) $(ARGS)

test-all: $(STAMP) ## run the tests, slow ones included
	@$(PYTEST) -m "not ray" $(ARGS)

test-ray: $(RAY_STAMP) ## run the tests on a Ray cluster, which they start and stop (about ten minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/runs/distributed $(ARGS)

test-matrix: $(STAMP) ## run the tests of losses and trainers with other versions, and say what was tried
	@$(BIN)/python -m tests.matrix $(ARGS)

campaign: $(STAMP) ## put the promises of docs/reliability.md to the test (at most 45 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign --minutes 44 --jobs $(JOBS) $(ARGS)

campaign-quick: $(STAMP) ## a sample of the campaign (at most 5 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign --quick --minutes 4.5 --jobs $(JOBS) $(ARGS)

bench: $(STAMP) ## run the quick benchmarks (ARGS="--cpu" on a busy machine)
	@$(BIN)/python benchmarks/quick.py $(ARGS)

results-smoke: $(STAMP) ## train each algorithm for a few minutes and see whether it still learns
	@$(BIN)/python benchmarks/learning.py $(ARGS)

report: $(STAMP) ## write a report about all runs in runs/ to report/ (ARGS="..." for its options)
	@$(BIN)/python -m minerva_torchrl.report runs --out report $(ARGS)

docs: $(DOCS_STAMP) ## build the documentation into docs/_build/html, without a network
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs $(SITE) $(ARGS)
	@echo "$(SITE)/index.html"

docs-serve: docs ## build the documentation and show it on http://localhost:8000 (PORT=...)
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) $(PORT)

upstream-patch: $(STAMP) ## write the losses into a checkout of TorchRL, a branch per pull request (TORCHRL=path)
	@$(BIN)/python docs/upstream/patch.py "$(TORCHRL)"

check: $(STAMP) ## lint, check the formatting and the types
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

format: $(STAMP) ## format the code and apply safe lint fixes
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

clean: ## remove .venv, caches and build products (never results of runs)
	@rm -rf docs/_build docs/auto_tutorials docs/api/generated
	@rm -rf $(VENV) .matrix build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp exists only after a complete install. Without it the environment is made
# from scratch; with an old one the environment is brought up to date.
$(STAMP): pyproject.toml constraints.txt
	@if [ -f $@ ]; then \
		echo "updating $(VENV) ..."; \
	else \
		echo "creating $(VENV) (a few minutes the first time) ..."; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	@rm -f $@
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# Only who builds the documentation needs its tools.
$(DOCS_STAMP): $(STAMP)
	@echo "installing the documentation's tools ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	@touch $@

$(RAY_STAMP): $(STAMP)
	@echo "installing Ray and what sweeps need into $(VENV) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev,ray,sweep]"
	@touch $@
