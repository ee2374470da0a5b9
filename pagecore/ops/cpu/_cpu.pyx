"""Calls of the host kernels: C++ errors become exceptions, and work runs without the GIL.

This module alone links the kernels. Those in `calls` fill the arguments from Tensors.
"""

from pagecore.ops.cpu.args cimport HostCalls, native_calls

include "attention.pxi"
include "codecs.pxi"
include "moves.pxi"
include "checks.pxi"
include "sparse.pxi"
include "latent.pxi"
include "instruction_sets.pxi"


cdef const HostCalls* host_calls() noexcept:
    return &native_calls()
