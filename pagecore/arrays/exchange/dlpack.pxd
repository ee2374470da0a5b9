from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "third_party/dlpack.h" nogil:
    const uint32_t DLPACK_MAJOR_VERSION
    const uint32_t DLPACK_MINOR_VERSION
    const uint64_t DLPACK_FLAG_BITMASK_READ_ONLY
    const uint64_t DLPACK_FLAG_BITMASK_IS_COPIED

    ctypedef enum DLDeviceType:
        kDLCPU
        kDLCUDA
        kDLCUDAHost
        kDLCUDAManaged

    ctypedef struct DLDevice:
        DLDeviceType device_type
        int32_t device_id

    ctypedef struct DLDataType:
        uint8_t code
        uint8_t bits
        uint16_t lanes

    ctypedef struct DLTensor:
        void* data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset

    ctypedef struct DLPackVersion:
        uint32_t major
        uint32_t minor

    ctypedef struct DLManagedTensor:
        DLTensor dl_tensor
        void* manager_ctx
        void (*deleter)(DLManagedTensor*) noexcept

    ctypedef struct DLManagedTensorVersioned:
        DLPackVersion version
        void* manager_ctx
        void (*deleter)(DLManagedTensorVersioned*) noexcept
        uint64_t flags
        DLTensor dl_tensor

    ctypedef struct DLPackExchangeAPIHeader:
        DLPackVersion version

    ctypedef struct DLPackExchangeAPI:
        DLPackExchangeAPIHeader header
        void* dltensor_from_py_object_no_sync  # only compared with NULL; exchange.hpp calls it


cdef extern from "pagecore/arrays/exchange/exchange.hpp" namespace "pagecore":
    int read_array(const DLPackExchangeAPI* api, object array, DLTensor* out) except -1
    object make_array(const DLPackExchangeAPI* api, DLManagedTensorVersioned* managed)
