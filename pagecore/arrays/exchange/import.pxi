"""DLPack import. A managed tensor is owned before its fields are checked, so that it is released exactly once."""

from cpython.pycapsule cimport PyCapsule_CheckExact, PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport uintptr_t

from pagecore.arrays.dtypes.codes cimport dtype_from_dlpack
from pagecore.arrays.exchange.dlpack cimport (
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
from pagecore.arrays.views.array_view cimport (
    ArrayView,
    check_layout,
    checked_element_count,
    item_bytes,
    kMaxDims,
    set_contiguous_strides,
)

from pagecore.arrays.dtypes.dtype import unsupported_dlpack_dtype
from pagecore.arrays.refusals import ExportRefused
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption

cdef extern from *:
    """
    #include "pagecore/arrays/exchange/exchange.hpp"
    namespace pagecore {
    inline int read_stream(const DLPackExchangeAPI* api, int device, void** out) {
      return guarded([&] { return api->current_work_stream(kDLCUDA, device, out); });
    }
    }
    """
    int read_stream "pagecore::read_stream"(const DLPackExchangeAPI* api, int device, void** out) except -1


cdef class Imported:
    """A managed tensor owned by pagecore; the destructor, after the last view is freed, calls the deleter."""

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.unversioned != NULL and self.unversioned.deleter != NULL:
            self.unversioned.deleter(self.unversioned)


cdef int read_tensor(const DLTensor* tensor, ArrayView* view) except -1:
    """Check a foreign DLTensor and write it to `view`."""
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
            "only the host (1) and CUDA (2) are supported"
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
        raise UnsupportedOption(f"{capsule!r} is not an unconsumed DLPack capsule; a capsule can be consumed once")
    read_tensor(tensor, view)
    return imported


cdef bint is_of_jax(object obj):
    return str(type(obj).__module__).partition(".")[0] in ("jax", "jaxlib")


cdef object capsule_of(object obj):
    """Return the newest capsule that a producer supports, without waiting for its streams."""
    cdef dict arguments = {}
    try:
        if int(obj.__dlpack_device__()[0]) != kDLCPU:
            # JAX uses -1 as the address of a stream, and waits on the host for None; 1 is its default stream.
            arguments["stream"] = 1 if is_of_jax(obj) else -1
        try:
            return obj.__dlpack__(max_version=(1, 3), **arguments)
        except TypeError:
            return obj.__dlpack__(**arguments)  # a producer older than DLPack 1.0
    except Exception as error:
        raise ExportRefused(f"the {type(obj).__name__} cannot be viewed: {error}") from error


cdef int refuse_negation(object obj) except -1:
    """Raise UnsupportedOption for a lazy negation (a view with its neg bit set), which torch exports unnegated."""
    is_neg = getattr(type(obj), "is_neg", None)
    if is_neg is not None and is_neg(obj):
        raise UnsupportedOption("the torch tensor is a lazy negation; pass tensor.resolve_neg()")
    return 0


cdef object import_producer(object obj, ArrayView* view):
    refuse_negation(obj)
    capsule = capsule_of(obj)
    if not PyCapsule_CheckExact(capsule):
        text = f"__dlpack__ of {type(obj).__name__} returned a {type(capsule).__name__}, not a capsule"
        raise UnsupportedOption(text)
    cdef Imported imported
    try:
        imported = import_capsule(capsule, view)
    finally:
        capsule = None  # frees the capsule while no error is pending that its destructor could see
    if is_of_jax(obj):
        view.readonly = True  # JAX arrays are immutable, which an unversioned capsule cannot express
    if view.device_type == kDLCUDA:
        imported.producer = obj
    return imported


cdef class Exchange:
    """The C exchange functions of a type, which export and import arrays without capsules."""


cdef Exchange last_exchange = None
cdef type last_type = None


cdef Exchange exchange_of(type producer):
    global last_exchange, last_type
    if producer is last_type:
        return last_exchange
    # A subclass inherits the attribute, but the functions accept the exact type only.
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
    """Return the handle of the current stream of the library of `array`; None if its type cannot report it."""
    cdef Exchange exchange = exchange_of(type(array))
    cdef void* stream = NULL
    if exchange is None:
        return None
    try:
        read_stream(exchange.api, device, &stream)
    except Exception:
        return None  # a build without CUDA; the framework's own functions raise the reason
    return <uintptr_t>stream


cdef object import_exchange(object obj, Exchange exchange, ArrayView* view):
    cdef DLTensor tensor
    if exchange.torch:
        # torch's C functions check neither gradients nor negation.
        if obj.requires_grad:
            raise UnsupportedOption("the torch tensor requires grad, which a view cannot keep; pass tensor.detach()")
        refuse_negation(obj)
    try:
        read_array(exchange.api, obj, &tensor)
    except Exception:
        # Not strided memory (sparse, meta ...): __dlpack__ raises the reason.
        return import_producer(obj, view)
    read_tensor(&tensor, view)
    return obj
