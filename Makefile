# Every target sets up all that it needs in .venv, and builds again what a changed source touches.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

NATIVE := $(shell find pagecore cuda_src third_party \( -name '*.pyx' -o -name '*.pxd' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.h' \))
PACKAGES := $(shell find pagecore -name __init__.py)

.PHONY: demo test test-quick lint bench format build venv clean
.DELETE_ON_ERROR:

demo: $(VENV)/.cli build
	$(BIN)/pagecore demo

test: $(VENV)/.test build
	$(BIN)/python -m pytest

test-quick: $(VENV)/.test build
	$(BIN)/python -m pytest -q -m "not slow" -x

lint: $(VENV)/.lint build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint pagecore  # it calls pycodestyle by name
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.hpp' '*.cpp' '*.cuh' '*.cu' 'cuda_src/*.h')

# make bench BENCH="prepare attention"; attention wants torch in .venv, its control.
BENCH ?= prepare
bench: $(VENV)/.bench build
	$(BIN)/python -m bench $(BENCH)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .
	$(BIN)/clang-format -i $$(git ls-files '*.hpp' '*.cpp' '*.cuh' '*.cu' 'cuda_src/*.h')

venv: $(VENV)/.created

build: $(VENV)/.built

clean:
	rm -rf build $(VENV) *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find pagecore -name '*.so' -delete

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# What builds the native parts, so that they can be built again in place.
$(VENV)/.tools: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install --quiet "setuptools>=77" "cython>=3.2,<3.4"
	touch $@

$(VENV)/.installed: pyproject.toml setup.py $(PACKAGES) | $(VENV)/.tools
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	touch $@

$(VENV)/.built: $(NATIVE) $(VENV)/.tools $(VENV)/.installed
	$(BIN)/python setup.py --quiet build_clib build_ext --inplace -j$(JOBS)
	touch $@

# The extras of the same name: what the command line, the tests or the linters need.
$(VENV)/.cli $(VENV)/.test $(VENV)/.lint $(VENV)/.bench: $(VENV)/.%: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[$*]'
	touch $@
