"""The kernels of cuda_src: compiled for the device at hand when they are first asked for, kept on disk, launched.

Nothing happens at import: CuPy, NVRTC and a device are looked for when a kernel is.
"""
