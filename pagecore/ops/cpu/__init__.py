"""The host kernels: compiled for every instruction set, dispatched at run time, multi-threaded."""

from pagecore.ops._threads import num_threads, set_num_threads
from pagecore.ops.cpu._cpu import available_isas, isa, set_isa

__all__ = ["available_isas", "isa", "num_threads", "set_isa", "set_num_threads"]
