"""CUDA devices: the runtime in use, names of devices, and their memory."""

from pagecore.arrays.cuda.current import runtime, use_runtime

__all__ = ["runtime", "use_runtime"]
