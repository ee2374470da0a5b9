#!/usr/bin/env bash
# On a machine with a GPU: builds in place, compiles the kernels, tests and times them; needs no network and no installed
# pagecore, but Python with cython, numpy, ml_dtypes, cupy, torch and pytest. Writes JSON to bench/results, or where
# --out says. See `--help`.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m bench.gpu_check "$@"
