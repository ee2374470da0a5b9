"""DLPack in: a managed tensor is taken over first and judged then, so that it is released once whatever it holds."""

from cpython.pycapsule cimport PyCapsule_CheckExact, PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport uintptr_t

from pagecore.arrays.array_view cimport (
    ArrayView,
    check_layout,
    checked_element_count,
    dtype_from_dlpack,
    item_bytes,
    kMaxDims,
    set_contiguous_strides,
)
from pagecore.arrays.dlpack cimport (
    DLPACK_FLAG_BITMASK_READ_ONLY,
    DLPACK_MAJOR_VERSION,
    DLManagedTensor,
    DLManagedTensorVersioned,
    DLPackExchangeAPI,
    DLTensor,
    kDLCPU,
    kDLCUDA,
    kDLCUDAHost,
    kDLCUDAManaged,
    read_array,
)

from pagecore.arrays.dtypes import unsupported_dlpack_dtype
from pagecore.arrays.refusals import ExportRefused
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption

cdef extern from *:
    """
    #include "pagecore/arrays/exchange.hpp"
    namespace pagecore {
    inline int read_stream(const DLPackExchangeAPI* api, int device, void** out) {
      return guarded([&] { return api->current_work_stream(kDLCUDA, device, out); });
    }
    }
    """
    int read_stream "pagecore::read_stream"(const DLPackExchangeAPI* api, int device, void** out) except -1


cdef class Imported:
    """A managed tensor taken over from its producer; dies with the last view of it, calling the deleter."""

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.unversioned != NULL and self.unversioned.deleter != NULL:
            self.unversioned.deleter(self.unversioned)


cdef int read_tensor(const DLTensor* tensor, ArrayView* view) except -1:
    """Judge a foreign DLTensor and say where its elements lie."""
    cdef int i, item
    view.dtype = dtype_from_dlpack(tensor.dtype.code, tensor.dtype.bits)
    if tensor.dtype.lanes != 1 or view.dtype < 0:
        raise unsupported_dlpack_dtype(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    if tensor.device.device_type == kDLCPU or tensor.device.device_type == kDLCUDAHost:
        view.device_type = kDLCPU  # pinned memory is host memory
    elif tensor.device.device_type == kDLCUDA or tensor.device.device_type == kDLCUDAManaged:
        view.device_type = kDLCUDA
        view.device_id = tensor.device.device_id
    else:
        raise DeviceError(
            f"the array is on DLPack device type {<int>tensor.device.device_type}; "
            "only the host (1) and CUDA (2) are served"
        )
    if tensor.ndim < 0 or tensor.ndim > kMaxDims:
        raise ShapeError(f"the array has {tensor.ndim} axes; a tensor has at most {kMaxDims}")
    if tensor.ndim > 0 and tensor.shape == NULL:
        raise ShapeError(f"the DLPack array has {tensor.ndim} axes but no shape; its producer is broken")
    item = item_bytes(view[0])
    view.ndim = tensor.ndim
    for i in range(tensor.ndim):
        view.shape[i] = tensor.shape[i]
    checked_element_count(view.ndim, view.shape, item)
    if tensor.strides == NULL:
        set_contiguous_strides(view[0])
    else:
        for i in range(tensor.ndim):
            if not -(2 ** 58) <= tensor.strides[i] <= 2 ** 58:
                raise ShapeError(f"axis {i} has a stride of {tensor.strides[i]} elements; the limit is 2^58")
            view.strides[i] = tensor.strides[i] * item
    view.data = <char*>tensor.data
    if view.data != NULL:
        view.data += tensor.byte_offset
    check_layout(view[0])
    return 0


cdef Imported import_capsule(object capsule, ArrayView* view):
    cdef Imported imported = Imported.__new__(Imported)
    cdef DLTensor* tensor
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        imported.versioned = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        PyCapsule_SetName(capsule, b"used_dltensor_versioned")
        if imported.versioned.version.major != DLPACK_MAJOR_VERSION:
            raise UnsupportedOption(
                f"the capsule is of DLPack {imported.versioned.version.major}.{imported.versioned.version.minor}; "
                f"this version reads major version {DLPACK_MAJOR_VERSION}"
            )
        view.readonly = imported.versioned.flags & DLPACK_FLAG_BITMASK_READ_ONLY != 0
        tensor = &imported.versioned.dl_tensor
    elif PyCapsule_IsValid(capsule, b"dltensor"):
        imported.unversioned = <DLManagedTensor*>PyCapsule_GetPointer(capsule, b"dltensor")
        PyCapsule_SetName(capsule, b"used_dltensor")
        tensor = &imported.unversioned.dl_tensor
    else:
        raise UnsupportedOption(f"{capsule!r} is no fresh DLPack capsule; one can be consumed once only")
    read_tensor(tensor, view)
    return imported


cdef bint is_of_jax(object obj):
    return str(type(obj).__module__).partition(".")[0] in ("jax", "jaxlib")


cdef object capsule_of(object obj):
    """Ask a producer for the newest capsule it knows, without waiting for its streams."""
    cdef dict arguments = {}
    try:
        if int(obj.__dlpack_device__()[0]) != kDLCPU:
            # JAX takes -1 for the address of a stream, and None for "wait on the host": its default stream waits.
            arguments["stream"] = 1 if is_of_jax(obj) else -1
        try:
            return obj.__dlpack__(max_version=(1, 3), **arguments)
        except TypeError:
            return obj.__dlpack__(**arguments)  # a producer from before DLPack 1.0
    except Exception as error:
        raise ExportRefused(f"the {type(obj).__name__} cannot be viewed: {error}") from error


cdef int refuse_negation(object obj) except -1:
    """torch exports the bare memory of a lazy negation (a view with its neg bit set), whatever it stands for."""
    is_neg = getattr(type(obj), "is_neg", None)
    if is_neg is not None and is_neg(obj):
        raise UnsupportedOption("the torch tensor is a lazy negation; pass tensor.resolve_neg()")
    return 0


cdef object import_producer(object obj, ArrayView* view):
    refuse_negation(obj)
    capsule = capsule_of(obj)
    if not PyCapsule_CheckExact(capsule):
        raise UnsupportedOption(f"__dlpack__ of {type(obj).__name__} gave a {type(capsule).__name__}, not a capsule")
    cdef Imported imported
    try:
        imported = import_capsule(capsule, view)
    finally:
        capsule = None  # here no error is pending that the capsule's destructor could stumble over
    if is_of_jax(obj):
        view.readonly = True  # JAX arrays never change, which its unversioned capsules cannot say
    if view.device_type == kDLCUDA:
        imported.producer = obj
    return imported


cdef class Exchange:
    """The C functions by which one type gives and takes arrays without capsules."""


cdef Exchange last_exchange = None
cdef type last_type = None


cdef Exchange exchange_of(type producer):
    global last_exchange, last_type
    if producer is last_type:
        return last_exchange
    # A subclass inherits the attribute, but the functions answer for the exact type only.
    capsule = producer.__dict__.get("__dlpack_c_exchange_api__")
    if capsule is None or not PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        return None
    cdef Exchange exchange = Exchange.__new__(Exchange)
    exchange.api = <DLPackExchangeAPI*>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    cdef bint readable = exchange.api.header.version.major == DLPACK_MAJOR_VERSION
    if not readable or exchange.api.dltensor_from_py_object_no_sync == NULL:
        return None
    exchange.torch = producer.__module__ == "torch"
    last_exchange = exchange
    last_type = producer
    return exchange


def work_stream(object array, int device):
    """Return the handle of the stream that the library of `array` works on now; None where its type does not say."""
    cdef Exchange exchange = exchange_of(type(array))
    cdef void* stream = NULL
    if exchange is None:
        return None
    try:
        read_stream(exchange.api, device, &stream)
    except Exception:
        return None  # a build without CUDA; whoever asks then says why
    return <uintptr_t>stream


cdef object import_exchange(object obj, Exchange exchange, ArrayView* view):
    """The object itself keeps its memory alive."""
    cdef DLTensor tensor
    if exchange.torch:
        # torch's C functions check neither of these.
        if obj.requires_grad:
            raise UnsupportedOption("the torch tensor requires grad, which a view would lose; pass tensor.detach()")
        refuse_negation(obj)
    try:
        read_array(exchange.api, obj, &tensor)
    except Exception:
        # Not plain memory (sparse, meta ...): __dlpack__ says why.
        return import_producer(obj, view)
    read_tensor(&tensor, view)
    return obj
