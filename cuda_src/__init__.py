"""CUDA C++ sources of pagecore, as data: entry points (.cu), their parts (.cuh) and the shared structs (abi.h)."""
