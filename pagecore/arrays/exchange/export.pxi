"""DLPack export: managed tensors that keep an owner alive until their consumer calls the deleter.

A managed tensor, its shape and its strides are one malloc. `manager_ctx` holds one reference to the owner. A consumer
may call the deleter from any thread, and after the interpreter has been finalised.
"""

from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc

from pagecore.arrays.dtypes.codes cimport kDTypes
from pagecore.arrays.exchange.dlpack cimport (
    DLPACK_FLAG_BITMASK_IS_COPIED,
    DLPACK_FLAG_BITMASK_READ_ONLY,
    DLPACK_MAJOR_VERSION,
    DLPACK_MINOR_VERSION,
    DLDeviceType,
    DLManagedTensor,
    DLManagedTensorVersioned,
    DLTensor,
)
from pagecore.arrays.views.array_view cimport ArrayView, element_count, item_bytes

from pagecore.arrays.refusals import ExportRefused
from pagecore.errors import shown

cdef extern from "Python.h":
    bint Py_IsInitialized() nogil
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace)
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace)

cdef struct Axes:
    int64_t shape[8]
    int64_t strides[8]

cdef struct Versioned:
    DLManagedTensorVersioned managed
    Axes axes

cdef struct Unversioned:
    DLManagedTensor managed
    Axes axes


cdef void release_owner(void* owner) noexcept nogil:
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* trace
    if Py_IsInitialized():
        with gil:
            # The consumer may have an error pending. The owner's destructor must neither see it nor clear it.
            PyErr_Fetch(&kind, &value, &trace)
            Py_DECREF(<object><PyObject*>owner)
            PyErr_Restore(kind, value, trace)


cdef void delete_versioned(DLManagedTensorVersioned* managed) noexcept nogil:
    release_owner(managed.manager_ctx)
    free(managed)


cdef void delete_unversioned(DLManagedTensor* managed) noexcept nogil:
    release_owner(managed.manager_ctx)
    free(managed)


cdef void destroy_capsule(object capsule) noexcept:
    """Release the tensor if the capsule was never consumed: a consumer renames the capsule."""
    cdef DLManagedTensorVersioned* versioned
    cdef DLManagedTensor* unversioned
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        versioned = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        versioned.deleter(versioned)
    elif PyCapsule_IsValid(capsule, b"dltensor"):
        unversioned = <DLManagedTensor*>PyCapsule_GetPointer(capsule, b"dltensor")
        unversioned.deleter(unversioned)


cdef int fill(const ArrayView& view, DLTensor* out, Axes* axes) except -1:
    """Write the view as a DLTensor; raise ExportRefused if a stride is not a multiple of the item size."""
    cdef int item = item_bytes(view)
    cdef int64_t size = element_count(view.ndim, view.shape)
    cdef int64_t dense = 1
    cdef int i
    for i in range(view.ndim - 1, -1, -1):
        axes.shape[i] = view.shape[i]
        if size == 0 or view.shape[i] == 1:
            axes.strides[i] = dense  # the stride of such an axis is never used
        elif view.strides[i] % item != 0:
            raise ExportRefused(
                f"axis {i} has a stride of {view.strides[i]} bytes, which is not a multiple of the item size {item}; "
                "DLPack counts strides in elements: copy the tensor first"
            )
        else:
            axes.strides[i] = view.strides[i] // item
        dense *= max(view.shape[i], 1)
    out.data = view.data if size > 0 else NULL
    out.device.device_type = <DLDeviceType>view.device_type
    out.device.device_id = view.device_id
    out.ndim = view.ndim
    out.dtype.code = kDTypes[view.dtype].code
    out.dtype.bits = kDTypes[view.dtype].bits
    out.dtype.lanes = 1
    out.shape = axes.shape
    out.strides = axes.strides
    out.byte_offset = 0
    return 0


cdef DLManagedTensorVersioned* export_versioned(
    const ArrayView& view, object owner, uint64_t flags, int minor
) except NULL:
    """Return a managed tensor that the caller owns: it must call the deleter or pass the tensor on."""
    cdef Versioned* exported = <Versioned*>malloc(sizeof(Versioned))
    if exported == NULL:
        raise MemoryError
    try:
        fill(view, &exported.managed.dl_tensor, &exported.axes)
    except BaseException:
        free(exported)
        raise
    exported.managed.version.major = DLPACK_MAJOR_VERSION
    exported.managed.version.minor = minor
    exported.managed.flags = flags | (DLPACK_FLAG_BITMASK_READ_ONLY if view.readonly else 0)
    exported.managed.manager_ctx = <void*><PyObject*>owner
    exported.managed.deleter = delete_versioned
    Py_INCREF(owner)
    return &exported.managed


cdef DLManagedTensor* export_unversioned(const ArrayView& view, object owner) except NULL:
    if view.readonly:
        raise ExportRefused(
            "the tensor is read-only, which an unversioned DLPack capsule cannot express; pass max_version=(1, 0) or "
            "later, or copy the tensor"
        )
    cdef Unversioned* exported = <Unversioned*>malloc(sizeof(Unversioned))
    if exported == NULL:
        raise MemoryError
    try:
        fill(view, &exported.managed.dl_tensor, &exported.axes)
    except BaseException:
        free(exported)
        raise
    exported.managed.manager_ctx = <void*><PyObject*>owner
    exported.managed.deleter = delete_unversioned
    Py_INCREF(owner)
    return &exported.managed


cdef object export_capsule(const ArrayView& view, object owner, object max_version, bint copied):
    """Return a capsule of the newest version that `max_version` allows; None allows the unversioned form only."""
    cdef DLManagedTensorVersioned* versioned
    cdef DLManagedTensor* unversioned
    if max_version is None:
        max_version = (0, 0)
    try:
        major, minor = map(int, max_version)
    except MemoryError:
        raise
    except Exception as error:
        raise ExportRefused(f"max_version is {shown(max_version)}; it must be (major, minor) or None") from error
    if major < 1:
        unversioned = export_unversioned(view, owner)
        try:
            return PyCapsule_New(unversioned, b"dltensor", destroy_capsule)
        except BaseException:
            unversioned.deleter(unversioned)
            raise
    if major > DLPACK_MAJOR_VERSION or not 0 <= minor <= DLPACK_MINOR_VERSION:
        minor = DLPACK_MINOR_VERSION
    versioned = export_versioned(view, owner, DLPACK_FLAG_BITMASK_IS_COPIED if copied else 0, minor)
    try:
        return PyCapsule_New(versioned, b"dltensor_versioned", destroy_capsule)
    except BaseException:
        versioned.deleter(versioned)
        raise
