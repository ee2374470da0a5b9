"""The device and stream of a call: its memory, the order of its work, and copies of arrays between host and device."""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport CPU, UINT8
from pagecore.arrays.tensors._make cimport new_cuda_tensor
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor, contiguous, new_tensor, size_of, tensor_of
from pagecore.arrays.views.array_view cimport ArrayView, Extent, checked_extent

from sys import modules

import numpy as np

from pagecore.arrays import cuda, like
from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.arrays.tensors import results, streams
from pagecore.arrays.tensors.uploads import upload
from pagecore.errors import DeviceError, UnsupportedOption, shown


cdef int find_place(Place* place, Tensor first, str name, object example, object stream) except -1:
    place.device_type = first.device_type
    place.device_id = first.device_id
    place.stream = 0
    place.name = <void*>name
    if first.device_type != CPU:
        place.stream = streams.stream_handle(stream, example, place.device_id)
        return 0
    if stream is not None:
        raise UnsupportedOption(
            f"stream is {shown(stream)}; calls on the host have no stream: leave stream out"
        )
    return 0


cdef str device_of(const Place* place):
    return "cpu" if place == NULL or place.device_type == CPU else f"cuda:{place.device_id}"


cdef int check_place(Tensor tensor, str name, const Place* place) except -1:
    if tensor.device_type != place.device_type or tensor.device_id != place.device_id:
        raise DeviceError(
            f"{name} is on {tensor.device} and {<str>place.name} on {device_of(place)}; the arrays of a call must "
            f"be on one device: pass a copy of {name} on {device_of(place)}"
        )
    return 0


cdef int check_reachable(Tensor tensor, str name, const Place* place) except -1:
    if place == NULL:
        raise DeviceError(f"{name} is on {tensor.device}; the host reads it: pass a copy on the host")
    return check_place(tensor, name, place)


# ---- memory of the call

cdef Tensor new_at(int ndim, const int64_t* shape, int dtype_code, const Place* place):
    if place.device_type == CPU:
        return new_tensor(ndim, shape, dtype_code, False)
    return new_on_device(ndim, shape, dtype_code, place)


cdef Tensor new_on_device(int ndim, const int64_t* shape, int dtype_code, const Place* place):
    return new_cuda_tensor(ndim, shape, dtype_code, place.device_id, place.stream, False)


cdef Tensor new_result(int ndim, const int64_t* shape, int dtype_code, object example, const Place* place):
    if place.device_type == CPU:
        return new_tensor(ndim, shape, dtype_code, False)
    lengths = tuple([shape[i] for i in range(ndim)])
    return results.new_result(lengths, DTYPES[dtype_code], example, place.device_id, place.stream)


cdef object finished(Tensor result, object example, const Place* place):
    if place.device_type == CPU:
        return like(result, example)
    return results.finished_result(result, example, place.stream)


# ---- order of work

cdef int await_arrays(tuple arrays, const Place* place) except -1:
    # JAX alone does not expose its streams; arrays of other frameworks are ordered by the stream that the call uses.
    if "jax" not in modules:
        return 0
    for array in arrays:
        if isinstance(array, (list, tuple)):
            await_arrays(tuple(array), place)
        else:
            streams.await_producer(array, place.stream)
    return 0


cdef int note_written(Tensor tensor, const Place* place) except -1:
    streams.note_work(tensor, place.stream)
    return 0


# ---- copies

cdef Tensor to_device(Tensor tensor, str name, const Place* place):
    if place == NULL or place.device_type == tensor.device_type:
        return tensor
    return copy_to_device(tensor, name, place)


cdef Tensor copy_to_device(Tensor host, str name, const Place* place):
    if cuda.runtime().is_capturing(place.stream):
        raise UnsupportedOption(
            f"{name} is on the host and the stream is being captured; the graph would read host memory that is freed "
            f"before it runs: pass an array on {device_of(place)}"
        )
    if not contiguous(host):
        host = as_tensor(np.ascontiguousarray(host.numpy()))
    cdef Tensor copied = new_at(host.ndim, host.shape_, host.dtype_code, place)
    if size_of(host) > 0:
        upload(
            <uintptr_t>host.data, size_of(host) * host.itemsize, <uintptr_t>copied.data, place.stream, place.device_id)
    return copied


cdef bint are_on_host(tuple tensors) noexcept:
    for each in tensors:
        if each is not None and (<Tensor>each).device_type != CPU:
            return False
    return True


cdef Tensor to_host(Tensor tensor, const Place* place):
    if tensor is None or tensor.device_type == CPU:
        return tensor
    cdef ArrayView view = tensor.view()
    cdef Extent extent = checked_extent(view)
    cdef int64_t num_bytes = extent.high - extent.low
    cdef Tensor held = new_tensor(1, &num_bytes, UINT8, False)
    runtime = cuda.runtime()
    if num_bytes > 0:
        runtime.copy(<uintptr_t>held.data, <uintptr_t>(tensor.data + extent.low), num_bytes, place.stream)
    runtime.synchronize(place.stream, place.device_id)
    view.data = held.data - extent.low
    view.device_type = CPU
    view.device_id = 0
    return tensor_of(view, held)
