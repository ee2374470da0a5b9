"""CUDA C++ sources of pagecore, as data: entry points (.cu), their parts (.cuh), structs that the host shares (.h)."""
