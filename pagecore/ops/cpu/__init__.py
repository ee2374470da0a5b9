"""The host's kernels: one source for every instruction set, picked at run time."""

from pagecore.ops.cpu._cpu import available_isas, isa, set_isa

__all__ = ["available_isas", "isa", "set_isa"]
