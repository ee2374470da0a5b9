"""The instruction set that the host kernels use."""

from libcpp.string cimport string

from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.cpu.args cimport current_isa

from pagecore.errors import UnsupportedOption, shown

cdef extern from "pagecore/ops/cpu/dispatch.hpp" namespace "pagecore::cpu" nogil:
    void choose_isa "pagecore::cpu::set_isa"(const string& name) except +raise_python_error
    vector[string] list_isas "pagecore::cpu::available_isas"() except +raise_python_error


cpdef str isa():
    """Return the instruction set that the host kernels use: one of `available_isas`."""
    return current_isa().decode()


cpdef str set_isa(object name):
    """Select the instruction set of the host kernels, and return it.

    Parameters
    ----------
    name : str or None
        One of `available_isas`. None selects the environment variable PAGECORE_ISA if it is set, else the one that
        takes the least time: the widest, except for x86-64-v4-bf16 on Intel's processors.

    Raises
    ------
    UnsupportedOption
        The instruction set is not available on this machine or in this build. Nothing has changed.
    """
    if name is not None and (not isinstance(name, str) or not name.isascii() or not 0 < len(name) < 80):
        raise UnsupportedOption(
            f"instruction set {shown(name)} is unknown; this machine has {', '.join(available_isas())}"
        )
    cdef bytes encoded = b"" if name is None else (<str>name).encode()
    cdef str answer = encoded.decode()  # before anything changes: memory may run out
    cdef string chosen, before
    chosen.assign(<const char*>encoded, <size_t>len(encoded))
    if name is not None:
        choose_isa(chosen)
        return answer
    before.assign(current_isa())
    choose_isa(chosen)
    try:
        return isa()
    except MemoryError:
        choose_isa(before)
        raise


cpdef tuple available_isas():
    """Return the names of the instruction sets that this machine and this build have, the widest first."""
    cdef vector[string] found = list_isas()
    cdef size_t i
    names = []
    for i in range(found.size()):
        names.append(found[i].c_str()[:found[i].size()].decode())
    return tuple(names)
