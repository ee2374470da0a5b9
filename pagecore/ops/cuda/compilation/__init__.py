"""Compilation of the CUDA kernels: sources, manifest, NVRTC and the cache of its results."""
