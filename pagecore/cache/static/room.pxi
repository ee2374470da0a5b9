"""StaticRoom: the arrays of a static cache, and the writes of the next tokens of a batch."""

from libc.stdint cimport int64_t
from libc.string cimport memset

from pagecore.arrays.dtypes.codes cimport LAST_FLOAT, CPU
from pagecore.arrays.tensors._tensor cimport Tensor, last_axis_contiguous, tensor_of
from pagecore.arrays.views.array_view cimport ArrayView
from pagecore.ops.arguments._arguments cimport any_tensor, check_rank
from pagecore.ops.arguments._overlap cimport shares_memory

import numpy as np

from pagecore.arrays import cuda
from pagecore.arrays.tensors.streams import await_producer, stream_handle
from pagecore.arrays.tensors.uploads import to_device
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import shown


cdef class StaticRoom:
    """The arrays of a static cache, and the number of tokens in each layer.

    Attributes
    ----------
    keys, values : Tensor
        ``[layers, batch, heads, length, dim]``, C-contiguous, on one device; only `dim` may differ.
    key_scales, value_scales : Tensor or None
        Stored scales of a format, ``[layers, batch, heads, length, groups]``.
    lengths : list of int
        End of the last update of each layer.
    written : list of int
        Largest end of any update of each layer since `reset`.
    """

    cdef readonly Tensor keys
    cdef readonly Tensor values
    cdef readonly Tensor key_scales
    cdef readonly Tensor value_scales
    cdef readonly list lengths
    cdef readonly list written
    cdef Tensor slots  # 0, 1, 2 ...; grows on the host, and has the largest needed size on a device
    cdef list write_options  # of each layer: factors and format, as arguments of write_kv; None without a format
    cdef list has_head_factors  # of each layer: a factor differs from head to head
    cdef int64_t key_codes_per_byte
    cdef int64_t value_codes_per_byte

    def __init__(
            self, Tensor keys not None, Tensor values not None, Tensor key_scales=None, Tensor value_scales=None,
            list write_options=None, int64_t key_codes_per_byte=1, int64_t value_codes_per_byte=1):
        self.keys = keys
        self.values = values
        self.key_scales = key_scales
        self.value_scales = value_scales
        self.write_options = write_options
        self.has_head_factors = [False] * keys.shape[0]
        for layer, options in enumerate(write_options or ()):
            self.has_head_factors[layer] = any([isinstance(each, Tensor) for each in options.values()])
        self.key_codes_per_byte = key_codes_per_byte
        self.value_codes_per_byte = value_codes_per_byte
        self.lengths = [0] * keys.shape[0]
        self.written = [0] * keys.shape[0]
        most = 1 if keys.device_type == CPU else keys.shape_[1] * max(keys.shape_[2], keys.shape_[3])
        self.slots = to_device(np.arange(most), keys.device)

    def reset(self, stream=None):
        """Forget every token, and zero the written part."""
        cdef Py_ssize_t index
        handle = self.stream_of(stream, None)
        if handle is None:
            self.zero_written()
        else:
            self.fill_written(handle)
        for index in range(len(self.lengths)):
            self.lengths[index] = self.written[index] = 0

    cdef void zero_written(self) noexcept:
        """Zero the written tokens on the host; allocates nothing."""
        self.zero(self.keys)
        self.zero(self.values)
        self.zero(self.key_scales)
        self.zero(self.value_scales)

    cdef void zero(self, Tensor array) noexcept:
        cdef int64_t index, i, k
        cdef size_t size
        cdef char* layer
        if array is None:
            return
        for index in range(array.shape_[0]):
            layer = array.data + index * array.strides_[0]
            size = <size_t>(<int64_t>self.written[index] * array.strides_[3])
            for i in range(array.shape_[1] if size > 0 else 0):
                for k in range(array.shape_[2]):
                    memset(layer + i * array.strides_[1] + k * array.strides_[2], 0, size)

    cdef int fill_written(self, object handle) except -1:
        """Zero the layers with written tokens on a device, in the order of a stream."""
        for index, end in enumerate(self.written):
            for array in (self.keys, self.values, self.key_scales, self.value_scales):
                if array is not None and end > 0:
                    cuda.runtime().fill(array[index].pointer, 0, array[index].nbytes, handle)
        return 0

    def update(
            self, Py_ssize_t index, object key, object value, object position, object stream=None,
            bint is_fixed=True):
        """Write ``[batch, heads, tokens, dim]`` arrays from `position` on; return views of all tokens up to them.

        `is_fixed` is False if the caller passed the position as an array, whose value may change between graph replays.
        """
        cdef Tensor keys = self.fitting(key, "key", self.keys, self.key_codes_per_byte)
        cdef Tensor values = self.fitting(value, "value", self.values, self.value_codes_per_byte)
        cdef int64_t batch = keys.shape_[BATCH], count = keys.shape_[TOKENS]
        if values.shape_[BATCH] != batch or values.shape_[TOKENS] != count:
            raise ShapeError(
                f"value has shape {values.shape} and key {keys.shape}; batch and tokens must be the same in both"
            )
        cdef int64_t begin = self.begin(position, count)
        end, written = begin + count, max(begin + count, self.written[index])
        handle = self.stream_of(stream, key)
        if handle is not None:
            if not is_fixed and cuda.runtime().is_capturing(handle):
                raise UnsupportedOption(
                    f"position is an array and stream {handle:#x} is being captured; every replay would write at "
                    f"position {position}, even after the array changes: pass an int and capture a graph for each "
                    "position, or use a PagedKVCache, whose slots are read on the device"
                )
            await_producer(key, handle)
            await_producer(value, handle)
        cdef list writes = []
        if count > 0 and batch > 0:  # arrays without elements may have any strides
            self.list_writes(writes, index, self.readable(keys), self.readable(values), begin, handle)
        views = self.part(self.keys, index, 0, batch, 0, end, False), self.part(
            self.values, index, 0, batch, 0, end, False)
        self.written[index] = written  # first: a device that fails may have written a part
        for each in writes:
            (<RowWrite>each).run()
        self.lengths[index] = end
        return views

    def stream_of(self, stream, example):
        """Return the handle of the stream of a call; None on the host."""
        if self.keys.device_type != CPU:
            return stream_handle(stream, example, self.keys.device_id)
        if stream is not None:
            raise UnsupportedOption(f"stream is {shown(stream)}; a cache on the host has no streams: leave it out")
        return None

    cdef Tensor fitting(self, object array, str name, Tensor room, int64_t codes_per_byte):
        """Return the array as a tensor without a copy; raise an error unless its shape fits `room`."""
        cdef Tensor tensor = any_tensor(array, name)
        if tensor.device_type != room.device_type or tensor.device_id != room.device_id:
            raise DeviceError(f"{name} is on {tensor.device} and the cache on {room.device}: copy it there first")
        if tensor.dtype_code > LAST_FLOAT:
            raise UnsupportedDtype(f"{name} is {tensor.dtype}; float32, float16 and bfloat16 are served: convert it")
        check_rank(tensor, name, 4, "[batch, num_kv_heads, tokens, head_dim]")
        cdef int64_t heads = room.shape_[2], dim = room.shape_[4] * codes_per_byte, batch = room.shape_[1]
        if tensor.shape_[HEADS] != heads or tensor.shape_[DIM] != dim:
            raise ShapeError(
                f"{name} has shape {tensor.shape}; the cache holds {heads} heads of {dim}: it must be "
                f"[batch, {heads}, tokens, {dim}]"
            )
        if tensor.shape_[BATCH] > batch:
            raise ShapeError(
                f"{name} has a batch of {tensor.shape_[BATCH]}; the cache has room for {batch}: raise max_batch_size"
            )
        return tensor

    cdef int64_t begin(self, object position, int64_t count) except -1:
        """Return `position`; raise ShapeError unless `count` tokens fit from there on."""
        cdef int64_t length = self.keys.shape_[3]
        if not 0 <= position <= length - count:
            raise ShapeError(
                f"position is {shown(position)} and {count} tokens are given; the cache has positions 0 to "
                f"{length - 1}: write fewer tokens, or make it with a larger max_length"
            )
        return position

    cdef Tensor readable(self, Tensor tensor):
        """Return the tensor, or a copy if it has gaps in its last axis, is misaligned, or aliases the cache."""
        cdef int64_t odd = <int64_t>tensor.data | tensor.strides_[0] | tensor.strides_[1] | tensor.strides_[2]
        if (
            last_axis_contiguous(tensor)
            and odd % tensor.itemsize == 0
            and not shares_memory(tensor, self.keys)
            and not shares_memory(tensor, self.values)
            and (self.key_scales is None or not shares_memory(tensor, self.key_scales))
            and (self.value_scales is None or not shares_memory(tensor, self.value_scales))
        ):
            return tensor
        if self.keys.device_type != CPU:
            raise UnsupportedOption(
                f"an array has shape {tensor.shape} and strides of {tensor.strides} bytes; on a device its last axis "
                "must be contiguous, and it must not be a view of this cache: pass a copy"
            )
        return copied(tensor)

    cdef int list_writes(
            self, list writes, Py_ssize_t index, Tensor key, Tensor value, int64_t begin, object stream) except -1:
        """Add the writes of an update: slot-mapped scatters whose row axis is two merged axes of the source.

            tokens next  source [batch * tokens, heads, dim]  target [batch, tokens, heads, dim]
            heads next   source [batch * heads, tokens, dim]  target [batch, heads, tokens, dim]

        The target is the region of the new tokens, viewed as blocks of slots, so that row i of the source has slot i.
        Tokens come next if the stride of tokens is at least that of heads, as in the output of a projection, and in
        decode, where any strides can be merged. Otherwise heads come next, and the tokens of a head are contiguous. If
        the strides do not allow the merge, each sequence has a write of its own.

        On the host, all that may fail is done here: of several writes, all are made or none.
        """
        cdef int64_t batch = key.shape_[BATCH], count = key.shape_[TOKENS], i
        cdef bint tokens_next = count == 1 or abs(key.strides_[TOKENS]) >= abs(key.strides_[HEADS])
        tokens_next = tokens_next or self.has_head_factors[index]  # write_kv takes a factor for each entry of one axis
        cdef int axis = TOKENS if tokens_next else HEADS
        cdef bint is_one = is_merged(key, axis) and is_merged(value, axis)
        if is_one:
            writes.append(self.row_write(
                merged(key, axis, 0, batch), merged(value, axis, 0, batch), index, 0, batch, begin, count, tokens_next,
                self.first_slots(batch * key.shape_[axis]), stream))
            return 0
        for i in range(batch):
            writes.append(self.row_write(
                merged(key, axis, i, 1), merged(value, axis, i, 1), index, i, 1, begin, count, tokens_next,
                self.first_slots(key.shape_[axis]), stream))
        return 0

    cdef RowWrite row_write(
            self, Tensor key, Tensor value, Py_ssize_t index, int64_t first, int64_t batch, int64_t begin,
            int64_t count, bint tokens_next, Tensor slots, object stream):
        """Return the write of merged rows to `batch` sequences from `first` on, tokens from `begin` on."""
        cdef int64_t end = begin + count
        cdef RowWrite made = RowWrite.__new__(RowWrite)
        cdef Tensor keys = self.part(self.keys, index, first, batch, begin, end, tokens_next)
        cdef Tensor values = self.part(self.values, index, first, batch, begin, end, tokens_next)
        cdef dict options = None
        made.key, made.value, made.slots = key, value, slots
        if self.write_options is not None:
            options = dict(self.write_options[index])
            for name, scales in (("key_scale", self.key_scales), ("value_scale", self.value_scales)):
                if scales is not None:
                    options[name] = self.part(scales, index, first, batch, begin, end, tokens_next)
        if stream is None:
            made.read(keys, values, options)
        else:
            made.options = {"key_cache": keys, "value_cache": values, "stream": stream, **(options or {})}
        return made

    cdef Tensor part(
            self, Tensor array, Py_ssize_t index, int64_t first, int64_t batch, int64_t begin, int64_t end,
            bint tokens_next):
        """Return the view of `batch` sequences from `first` on, tokens [begin, end), of one layer of an array."""
        cdef ArrayView view = array.view()
        cdef int heads = 2 if tokens_next else 1
        cdef int tokens = 3 - heads
        view.data += index * array.strides_[0] + first * array.strides_[1] + begin * array.strides_[3]
        view.ndim = 4
        view.shape[0], view.strides[0] = batch, array.strides_[1]
        view.shape[heads], view.strides[heads] = array.shape_[2], array.strides_[2]
        view.shape[tokens], view.strides[tokens] = end - begin, array.strides_[3]
        view.shape[3], view.strides[3] = array.shape_[4], array.strides_[4]
        return tensor_of(view, array.owner)

    cdef Tensor first_slots(self, int64_t count):
        """Return the slots 0 to ``count - 1``: a prefix of one array, which grows by doubling."""
        cdef Tensor slots = self.slots
        if count > slots.shape_[0]:
            self.slots = slots = to_device(np.arange(max(count, 2 * slots.shape_[0])), self.keys.device)
        cdef ArrayView view = slots.view()
        view.shape[0] = count
        return tensor_of(view, slots.owner)
