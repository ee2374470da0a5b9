"""The CUDA kernels of cuda_src: compiled on first use for the device, cached on disk, launched.

Importing this package does nothing else: CuPy, NVRTC and a device are needed when a kernel is loaded.
"""
