# Index arrays and masks as Tensors; see _indices.pyx. `name` and `axes` are for messages.
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._place cimport Place


# int32 or int64 of `ndim` axes on the device of the call; the last of two axes is contiguous. Lists and host arrays are
# copied to the device. A device array on the host (place is NULL) is a DeviceError.
cdef Tensor index_tensor(object array, str name, int ndim, str axes, const Place* place)

# The same array where the caller has it: on the host or on the device of the call.
cdef Tensor given_indices(object array, str name, int ndim, str axes, const Place* place)

# A view of an array; None for lists and for dtypes that a Tensor cannot have.
cdef Tensor viewed(object array, str name)

# A flat mask of bool, on the host or on the device of the call.
cdef Tensor flat_mask(object array, const Place* place)
