# Every target sets up what it needs in .venv and rebuilds what depends on a changed source.
#
# Each step of the setup prints one line. Its warnings and errors go to build/logs and are shown if the step fails; make V=1
# shows all commands and their output.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AARCH64_CXX ?= aarch64-linux-gnu-g++
AARCH64_RUN ?= qemu-aarch64
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Dependencies are installed while the native code compiles. Goals, as those of make clean build, run one after another.
MAKEFLAGS += -j$(JOBS)
ifneq ($(word 2,$(MAKECMDGOALS)),)
.NOTPARALLEL:
endif

NATIVE := $(shell find pagecore cuda_src third_party \( -name '*.pyx' -o -name '*.px[di]' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.h' \))
REQUIRES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
# Python compiles modules at their first import: of the dependencies, most are never imported.
PIP_INSTALL = $(BIN)/python -m pip install $(QUIET) --no-compile
# pip would compile the native parts again in a temporary folder; .built compiles them in place. One pip runs at a time.
EDITABLE = PAGECORE_PREBUILT=1 PYTHONWARNINGS=ignore:Editable flock $(VENV)/.lock $(PIP_INSTALL) --no-build-isolation --editable

V ?= 0
LOGS := build/logs
# $(call logged,NAME,COMMANDS) runs commands with their output in a log. Compilers run in parallel, so the first error need
# not be at the end of the log.
ifeq ($(V),1)
logged = $(2)
else
Q := @
QUIET := --quiet
logged = mkdir -p $(LOGS); { $(2); } > $(LOGS)/$(1).log 2>&1 || { status=$$?; { \
  grep -i -B 3 -A 5 -m 10 'error:' $(LOGS)/$(1).log; echo ...; tail -n 5 $(LOGS)/$(1).log; \
  echo "$@ failed; the log is $(LOGS)/$(1).log, and make V=1 shows all output"; } >&2; exit $$status; }
endif
# $(call about,TIME) is the expected time of a step that has not run here before.
about = $(if $(wildcard $@),, (about $(1)))

# The tests start hundreds of interpreters and rewrite the assertions of 350 modules: without stored bytecode, each run compiles
# all of them again in each process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: servers demo test test-quick emulate kernels lint bench sanitize sanitize-gpu test-aarch64 format build venv clean
.DELETE_ON_ERROR:

# A build with the kernels of this processor alone takes a quarter less time.
demo: $(VENV)/.cli $(VENV)/.native
	@echo 'Serving two dozen chat requests and verifying every token (about 3 s)'
	$(Q)$(BIN)/pagecore demo

# One process per core; then, in one process, the tests that measure time or fork.
PARALLEL := -n auto --dist worksteal
test: $(VENV)/.test build
	$(BIN)/python -m pytest $(PARALLEL) -m "not serial"
	$(BIN)/python -m pytest -m serial $$(grep -rlw mark.serial tests --include='test_*.py')

test-quick: $(VENV)/.test build
	$(BIN)/python -m pytest -q -x $(PARALLEL) -m "not slow and not serial" --cases 1 --ignore tests/interop

# Servers for the tests of remote stores, into build/servers; a test whose server is missing is skipped.
servers: $(VENV)/.created
	@echo 'Installing Redis, Valkey, moto, Azurite and Mooncake, unless they are installed (about 1 min)'
	$(Q)$(call logged,servers,tests/tiers/install_servers.sh)

# Every case of the matrix of CUDA kernels in the emulator (about 10 min on two cores); make test runs a part of it.
emulate: $(VENV)/.test build
	PAGECORE_EMULATE=full $(BIN)/python -m pytest $(PARALLEL) tests/cuda tests/emulator --runtime emulator

# Compile every CUDA kernel for every architecture, and record its registers and spills (about 20 min on two cores).
kernels: $(VENV)/.test $(VENV)/.cuda13 build
	$(BIN)/python -m tests.ops.cuda.usage_record

# The linters run at the same time, the longest first. stubtest imports the native modules and compares them with their
# stubs; that of interop needs JAX, which may be missing. cython-lint would start pycodestyle once for each file, and
# checks the parts of modules (.pxi) only under the name of a module.
STUBTEST := --concise --mypy-config-file tests/stubtest.ini --allowlist tests/stubtest_allowlist.txt \
            --ignore-disjoint-bases --ignore-positional-only
NOT_FOR_CYTHON := E121,E123,E126,E133,E203,E211,E225,E226,E227,E241,E242,E251,E271,E272,E275,E4,E704,E9,W5
LINTERS := mypy stubtest cython ruff codespell clang-format
.PHONY: $(LINTERS:%=lint-%)
lint: $(LINTERS:%=lint-%)
$(LINTERS:%=lint-%): $(VENV)/.lint build
lint-mypy:
	$(BIN)/mypy
lint-stubtest:
	$(BIN)/stubtest $(STUBTEST) $$(git ls-files 'pagecore/*.pyi' ':!pagecore/interop' | sed 's/\.pyi$$//; s,/,.,g')
lint-cython:
	$(BIN)/cython-lint --no-pycodestyle pagecore
	rm -rf build/parts
	for part in $$(git ls-files 'pagecore/*.pxi'); do install -D -m 644 $$part build/parts/$${part%.pxi}.pyx; done
	$(BIN)/cython-lint --no-pycodestyle $$(find build/parts -name '*.pyx')
	$(BIN)/pycodestyle --max-line-length 120 --ignore $(NOT_FOR_CYTHON) $$(git ls-files 'pagecore/*.pyx' 'pagecore/*.px[di]')
lint-ruff:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
lint-codespell:
	$(BIN)/codespell $$(git ls-files ':!third_party')
lint-clang-format:
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.hpp' '*.cpp' '*.cuh' '*.cu' 'cuda_src/*.h')

# BENCH takes names and options of `python -m bench`, such as make bench BENCH="cpu_attention --quick". Without torch (the
# extra "bench") in .venv, the controls of torch are left out.
BENCH ?= index prefix cpu_write gather cpu_attention replay
bench: $(VENV)/.cli build
	$(BIN)/python -m bench $(BENCH)

# The native code under ASan, UBSan and TSan; needs g++ and make, but not .venv.
sanitize:
	$(MAKE) -f tests/native/sanitize.mk --no-print-directory --output-sync=target sanitize

# The GPU tests under compute-sanitizer from the CUDA toolkit: TOOL=memcheck, racecheck, initcheck or synccheck.
TOOL ?= memcheck
sanitize-gpu: $(VENV)/.test $(VENV)/.cuda13 build
	@command -v compute-sanitizer > /dev/null || { echo >&2 "compute-sanitizer is not installed; it comes with the CUDA toolkit"; exit 2; }
	PAGECORE_REQUIRE=gpu compute-sanitizer --tool $(TOOL) --error-exitcode 9 $(BIN)/python -m pytest tests/gpu -q

# The native test drivers with the NEON kernels in an emulator; does not need .venv.
test-aarch64:
	@for tool in $(AARCH64_CXX) $(AARCH64_RUN); do command -v $$tool > /dev/null || { echo >&2 \
	  "$$tool is not installed; on Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 2; }; done
	$(MAKE) -f tests/native/sanitize.mk --no-print-directory --output-sync=target plain \
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
	@echo 'Setting up $(VENV)$(call about,10 s)'
	$(Q)$(call logged,venv,$(PYTHON) -m venv $(VENV) && $(PIP_INSTALL) --upgrade pip)
	$(Q)touch $@

# Build tools of the native parts.
$(VENV)/.tools: pyproject.toml | $(VENV)/.created
	@echo 'Installing Cython and setuptools$(call about,5 s)'
	$(Q)$(BIN)/python -c '$(REQUIRES)' > $@.txt
	$(Q)$(call logged,tools,$(PIP_INSTALL) --requirement $@.txt)
	$(Q)touch $@

COMPILE = $(BIN)/python setup.py $(QUIET) build_clib -j$(JOBS) build_ext --inplace -j$(JOBS)
$(VENV)/.built: $(NATIVE) setup.py $(VENV)/.tools
	@echo 'Compiling the native code$(call about,3 min on two cores)'
	$(Q)$(call logged,build,$(COMPILE))
	$(Q)touch $(VENV)/.native $@

$(VENV)/.native: $(NATIVE) setup.py $(VENV)/.tools
	@echo 'Compiling the native code for this processor$(call about,2 min on two cores)'
	$(Q)$(call logged,native,PAGECORE_BUILD_ISA=native $(COMPILE))
	$(Q)touch $@

# The package with the extra of the same name: dependencies of the command line, the tests, the linters or CUDA kernels.
$(VENV)/.cli $(VENV)/.test $(VENV)/.lint $(VENV)/.cuda12 $(VENV)/.cuda13: $(VENV)/.%: pyproject.toml setup.py $(VENV)/.tools
	@echo 'Installing pagecore[$*] and its dependencies$(call about,15 s)'
	$(Q)$(call logged,install-$*,$(EDITABLE) '.[$*]')
	$(Q)touch $@
