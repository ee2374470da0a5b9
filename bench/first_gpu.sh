#!/usr/bin/env bash
# First run on a GPU machine, in under nine minutes: facts, build in place, compiled kernels, benches and tests.
# Requires a C++ compiler and Python with cython, numpy, ml_dtypes, cupy, torch,
# pytest and pytest-xdist; needs neither network nor an installed pagecore. Writes to $OUT, or
# build/first_gpu/out. See `--help`.
#
#   PAGECORE_COMMIT=$(git rev-parse --short=12 HEAD) OUT=results bash bench/first_gpu.sh
#
# built.tar.gz holds the extensions and the compiled kernels. For another run on a bare machine of the same kind, unpack
# it in the root of the tree (tar xzof) and set PAGECORE_CACHE_DIR=build/first_gpu/cubins. The script makes this folder
# private; for other commands run `chmod -R go-w build/first_gpu/cubins`, because pagecore loads no kernels from a folder
# that other users own or can write.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m bench.first_gpu "$@"
