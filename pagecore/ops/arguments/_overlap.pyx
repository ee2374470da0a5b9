# cython: cdivision=True
"""Checks that written arrays share no memory with arrays that are read, or with themselves.

Kernels write in an unspecified order on several threads, so the result of overlapping arrays would be undefined.
"""

from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.arrays.views.overlap cimport Layout, SharedPair, find_shared, overlap, overlaps_itself
from pagecore.native.std cimport vector

from pagecore.errors import ShapeError, UnsupportedOption


cdef Layout layout_of(Tensor tensor) noexcept:
    cdef Layout layout
    layout.data, layout.item, layout.ndim = tensor.data, tensor.itemsize, tensor.ndim
    layout.shape, layout.strides = tensor.shape_, tensor.strides_
    return layout


cdef int check_own_elements(Tensor tensor, str name) except -1:
    if overlaps_elements(tensor):
        raise ShapeError(
            f"{name} has strides {tensor.strides} bytes for shape {tensor.shape}; elements share memory and would "
            "overwrite each other: pass an array with disjoint elements"
        )
    return 0


cdef int check_apart(Tensor written, str name, Tensor other, str other_name) except -1:
    if other is not None and shares_memory(written, other):
        raise shared(name, other_name)
    return 0


cdef int check_apart_or_same(Tensor written, str name, Tensor other, str other_name) except -1:
    if other is not None and shares_memory(written, other) and not is_same(written, other):
        raise UnsupportedOption(
            f"{name} shares memory with {other_name} and is not that array; pass {other_name} itself, or an array that "
            "does not overlap it"
        )
    return 0


cdef object shared(str name, str other_name):
    return UnsupportedOption(f"{name} shares memory with {other_name}; pass arrays that do not overlap")


cdef bint is_same(Tensor a, Tensor b) noexcept:
    cdef int i
    if a.data != b.data or a.ndim != b.ndim or a.dtype_code != b.dtype_code:
        return False
    for i in range(a.ndim):
        if a.shape_[i] != b.shape_[i] or a.shape_[i] > 1 and a.strides_[i] != b.strides_[i]:
            return False
    return True


cpdef bint shares_memory(Tensor a, Tensor b) except -1:
    """Return True if a byte belongs to both arrays. Memory is not read, so arrays may be on a device."""
    if not ranges_meet(range_of(a), range_of(b)) or a.device_type != b.device_type or a.device_id != b.device_id:
        return False
    if are_interleaved(a, b):
        return False
    return overlap(layout_of(a), layout_of(b))


cpdef bint overlaps_elements(Tensor tensor) except -1:
    """Return True if a byte belongs to two elements of the array."""
    return not are_nested(tensor) and overlaps_itself(layout_of(tensor))


cdef int check_all_apart(list written, str name, list read, str other_name, bint many) except -1:
    cdef vector[Layout] layouts
    cdef Tensor tensor
    if len(written) + len(read) < 2:
        return 0
    layouts.reserve(len(written) + len(read))
    for tensor in written:
        layouts.push_back(layout_of(tensor))
    for tensor in read:
        layouts.push_back(layout_of(tensor))
    if layouts.size() == 2 and not overlap(layouts[0], layouts[1]):
        return 0
    cdef SharedPair found = find_shared(layouts, len(written))
    if found.first >= 0:
        raise shared(labelled(name, found.first, many), second_name(name, len(written), other_name, found.second, many))
    return 0


cdef str labelled(str name, int64_t i, bint many):
    return f"{name}[{i}]" if many else name


cdef str second_name(str name, int64_t num_written, str other_name, int64_t i, bint many):
    return labelled(name, i, many) if i < num_written else labelled(other_name, i - num_written, many)
