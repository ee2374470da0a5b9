# Every target sets up all that it needs in .venv, and builds again what a changed source touches.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AARCH64_CXX ?= aarch64-linux-gnu-g++
AARCH64_RUN ?= qemu-aarch64
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

NATIVE := $(shell find pagecore cuda_src third_party \( -name '*.pyx' -o -name '*.pxd' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.h' \))
REQUIRES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
# pip would compile everything anew, in a folder that it throws away; the native parts are built in place by .built.
EDITABLE := PAGECORE_PREBUILT=1 PYTHONWARNINGS=ignore:Editable $(BIN)/python -m pip install --quiet --no-build-isolation --editable

.PHONY: demo test test-quick emulate lint bench sanitize sanitize-gpu test-aarch64 format build venv clean
.DELETE_ON_ERROR:

demo: $(VENV)/.cli build
	$(BIN)/pagecore demo

test: $(VENV)/.test build
	$(BIN)/python -m pytest

test-quick: $(VENV)/.test build
	$(BIN)/python -m pytest -q -m "not slow" -x

# The CUDA kernels on the host, every case of the matrix that make test takes a part of.
emulate: $(VENV)/.test build
	PAGECORE_EMULATE=full $(BIN)/python -m pytest tests/emulator

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint pagecore  # it calls pycodestyle by name
	$(BIN)/mypy
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.hpp' '*.cpp' '*.cuh' '*.cu' 'cuda_src/*.h')

# make bench BENCH="cpu_attention --quick": any names and options of `python -m bench`. Where torch (the extra "bench") is
# not in .venv, its controls are left out.
BENCH ?= index prefix cpu_write gather cpu_attention replay
bench: $(VENV)/.cli build
	$(BIN)/python -m bench $(BENCH)

# The native code under ASan, UBSan and TSan; needs g++ and make, and nothing of .venv.
sanitize:
	$(MAKE) -f tests/native/sanitize.mk --no-print-directory -j$(JOBS) --output-sync=target sanitize

# The tests of a GPU under compute-sanitizer, of the CUDA toolkit: TOOL=memcheck, racecheck, initcheck or synccheck.
TOOL ?= memcheck
sanitize-gpu: $(VENV)/.test $(VENV)/.cuda13 build
	@command -v compute-sanitizer > /dev/null || { echo >&2 "compute-sanitizer is not here; it comes with the CUDA toolkit"; exit 2; }
	PAGECORE_REQUIRE=gpu compute-sanitizer --tool $(TOOL) --error-exitcode 9 $(BIN)/python -m pytest tests/gpu -q

# The drivers of the native code with the kernels for NEON, run by an emulator; needs nothing of .venv.
test-aarch64:
	@for tool in $(AARCH64_CXX) $(AARCH64_RUN); do command -v $$tool > /dev/null || { echo >&2 \
	  "$$tool is not here; on Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 2; }; done
	$(MAKE) -f tests/native/sanitize.mk --no-print-directory -j$(JOBS) --output-sync=target plain \
	  CXX=$(AARCH64_CXX) LDFLAGS=-static LAUNCH=$(AARCH64_RUN) SCALE=$(or $(SCALE),0.1) TIMEOUT='timeout 1200'

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

# What builds the native parts.
$(VENV)/.tools: pyproject.toml | $(VENV)/.created
	$(BIN)/python -c '$(REQUIRES)' > $@.txt
	$(BIN)/python -m pip install --quiet --requirement $@.txt
	touch $@

$(VENV)/.built: $(NATIVE) setup.py $(VENV)/.tools
	$(BIN)/python setup.py --quiet build_clib -j$(JOBS) build_ext --inplace -j$(JOBS)
	touch $@

# The package, with the extra of the same name: what the command line, the tests, the linters or kernels for CUDA need.
$(VENV)/.cli $(VENV)/.test $(VENV)/.lint $(VENV)/.cuda12 $(VENV)/.cuda13: $(VENV)/.%: pyproject.toml setup.py $(VENV)/.tools
	$(EDITABLE) '.[$*]'
	touch $@
