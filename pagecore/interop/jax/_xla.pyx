"""Native parts of `pagecore.interop.jax`: the handlers of the custom calls, and checks shared with `pagecore.ops`."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t
from libcpp.atomic cimport atomic

from pagecore.ops._threads cimport threads_address
from pagecore.ops.arguments._arguments cimport finite_number, read_reach, read_sink_tokens
from pagecore.ops.cpu._cpu cimport host_calls
from pagecore.ops.cpu.args cimport HostCalls

cdef extern from "pagecore/interop/jax/handlers.hpp" nogil:
    const int XLA_FFI_API_MAJOR
    const int XLA_FFI_API_MINOR

cdef extern from "pagecore/interop/jax/handlers.hpp" namespace "pagecore::xla" nogil:
    cdef cppclass Host:
        const HostCalls* calls
        const atomic[int64_t]* num_threads

    Host host
    void paged_attention()
    void write_kv()
    void seal_kv()
    void unseal_kv()
    void addresses()


def handlers():
    """Return a dict from the name of each custom call to the capsule of its handler."""
    host.calls = host_calls()
    host.num_threads = threads_address()
    return {
        "pagecore_paged_attention": PyCapsule_New(<void*>&paged_attention, NULL, NULL),
        "pagecore_write_kv": PyCapsule_New(<void*>&write_kv, NULL, NULL),
        "pagecore_seal_kv": PyCapsule_New(<void*>&seal_kv, NULL, NULL),
        "pagecore_unseal_kv": PyCapsule_New(<void*>&unseal_kv, NULL, NULL),
        "pagecore_addresses": PyCapsule_New(<void*>&addresses, NULL, NULL),
    }


def api_version():
    """Return (major, minor) of the version of XLA's interface that the handlers were compiled for."""
    return XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR


def limits(window, chunk, sink_tokens):
    """Return (left, right, sink tokens) of the options: -1 for no bound, and a left side below -1 for chunks."""
    cdef int64_t left, right
    read_reach(window, chunk, &left, &right)
    return left, right, read_sink_tokens(sink_tokens, chunk, left)


def number(value, name):
    """Return `value` as a float; raise UnsupportedOption unless it is finite as a float32."""
    return finite_number(value, name)
