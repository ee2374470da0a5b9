from libc.stdint cimport uint64_t

from pagecore.arrays.exchange.dlpack cimport DLManagedTensorVersioned
from pagecore.arrays.views.array_view cimport ArrayView


cdef DLManagedTensorVersioned* export_versioned(
    const ArrayView& view, object owner, uint64_t flags, int minor) except NULL
cdef object export_capsule(const ArrayView& view, object owner, object max_version, bint copied)
