"""Sparse selection on CUDA: parameter structs and launches of its kernels."""

from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from pagecore.arrays.dtypes.codes cimport INT64
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport new_at
from pagecore.ops.cuda.launch cimport Grid, kThreads

from pagecore.arrays.cuda.current import runtime
from pagecore.arrays.tensors.uploads import upload
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.ops.cuda.compilation.kernels import kernel as load_kernel

cdef extern from "cuda_src/abi/sparse.h" nogil:
    cdef struct PcIndices:
        uint64_t data
        int64_t stride
        int32_t size
        int32_t wide

    cdef struct PcDivisor:
        pass

    cdef struct PcSummaryParams:
        pass

    cdef struct PcScoreParams:
        uint64_t scores
        int32_t width
        int32_t num_tokens
        int32_t num_kv_heads
        int32_t group
        int32_t dim
        int32_t causal
        int32_t mean

    cdef struct PcSelectParams:
        uint64_t scores
        int64_t score_stride
        uint64_t positions
        uint64_t counts
        PcIndices lens
        PcDivisor rows_per_length
        int32_t length
        int32_t num_rows
        int32_t width
        int32_t budget
        int32_t sinks
        int32_t recent
        int32_t threshold
        int32_t capacity
        int32_t ranked

    cdef struct PcSlotParams:
        PcIndices sources
        PcIndices targets

    enum:
        PC_SUMMARY_THREADS
        PC_SUMMARY_SHARED_BYTES
        PC_SCORE_THREADS
        PC_SCORE_ENTRIES
        PC_SELECT_THREADS
        PC_MAX_RANKED

    int pc_score_shared_bytes(int rows, int dim)
    int pc_select_shared_bytes(int ranked)

cdef extern from "pagecore/ops/cuda/sparse/sparse_launch.hpp" namespace "pagecore::cuda" nogil:
    const int64_t kMaxUnits

    cdef cppclass SlotLaunch:
        PcSlotParams params
        Grid grid

    PcDivisor make_divisor(int64_t divisor)
    PcIndices device_indices(const Indices& indices)
    void check_summary_sizes(const KeySummaryPlanes& planes, int64_t num_slots) except +raise_python_error
    PcSummaryParams summary_params(
        const KeySummaryPlanes& planes, const Indices& slots, int64_t num_blocks, int64_t block_size)
    PcScoreParams score_params(const ScoreSources& sources) except +raise_python_error
    vector[SlotLaunch] slot_launches(const vector[BlockArray]& arrays) except +raise_python_error

cdef enum:
    MAX_ROWS = 65535  # of the y axis of a grid
    SELECT_GRID = 1 << 16  # rows at a time
    NUM_TYPES = 3

# By DType, and by whether the summaries are bounds.
cdef tuple SCORES = tuple(
    (f"score_keys<{each},false>", f"score_keys<{each},true>") for each in ("float", "pc_half", "pc_bfloat16"))


cdef object loaded(str name, const Place* place):
    return load_kernel(name, place.device_id, place.stream)


cdef object summary_kernel(const Place* place):
    return loaded("summarise", place)


cdef int check_summary(const KeySummaryPlanes& planes, const Indices& slots) except -1:
    check_summary_sizes(planes, slots.size)
    return 0


cdef int summarise(
        object kernel, const KeySummaryPlanes& planes, const Indices& slots, int64_t num_blocks, int64_t block_size,
        const Place* place) except -1:
    cdef PcSummaryParams params = summary_params(planes, slots, num_blocks, block_size)
    if slots.size > 0:
        runtime().launch(kernel, (slots.size, 1, 1), PC_SUMMARY_THREADS, PC_SUMMARY_SHARED_BYTES, place.stream,
                         <uintptr_t>&params)
    return 0


cdef int score(const ScoreSources& sources, char* scores, bint causal, bint mean, const Place* place) except -1:
    cdef bint is_bounds = sources.low.data != NULL
    cdef PcScoreParams params = score_params(sources)
    params.scores = <uintptr_t>scores
    params.causal, params.mean = causal, mean
    if params.num_tokens == 0 or params.width == 0:
        return 0
    kernel = loaded(SCORES[<int>sources.high.type][is_bounds], place)
    cdef int rows = params.group if is_bounds and not mean else 1
    grid = (<int64_t>params.num_tokens * params.num_kv_heads,
            min(MAX_ROWS, (params.width + PC_SCORE_ENTRIES - 1) // PC_SCORE_ENTRIES), 1)
    runtime().launch(kernel, grid, PC_SCORE_THREADS, pc_score_shared_bytes(rows, params.dim), place.stream,
                     <uintptr_t>&params)
    return 0


cdef int select(const Selecting& call, const Indices& lens, const Place* place) except -1:
    cdef PcSelectParams params
    memset(&params, 0, sizeof(params))
    if max(call.num_rows, call.width, call.capacity) >= kMaxUnits:
        raise ShapeError(
            f"scores has {call.num_rows} rows of {call.width} and a selection {call.capacity} positions; on CUDA each "
            f"is below {kMaxUnits}: split the call"
        )
    if call.ranked and min(call.budget, call.width) > PC_MAX_RANKED:
        raise UnsupportedOption(
            f"k is {call.budget}; on CUDA it is at most {PC_MAX_RANKED}: use select, which does not sort, or the host"
        )
    if call.num_rows == 0:
        return 0
    params.scores, params.score_stride = <uintptr_t>call.scores, call.score_stride
    params.positions, params.counts = <uintptr_t>call.positions, <uintptr_t>call.counts
    params.lens = device_indices(lens)
    params.rows_per_length = make_divisor(max(1, call.rows_per_length))
    params.length, params.num_rows, params.width = <int32_t>call.length, <int32_t>call.num_rows, <int32_t>call.width
    params.budget, params.sinks = <int32_t>call.budget, <int32_t>call.sinks
    params.recent, params.threshold = <int32_t>call.recent, <int32_t>call.threshold
    params.capacity, params.ranked = <int32_t>call.capacity, call.ranked
    cdef int ranked = <int32_t>min(call.budget, call.width) if call.ranked else 0
    runtime().launch(loaded("select", place), (min(call.num_rows, SELECT_GRID), 1, 1), PC_SELECT_THREADS,
                     pc_select_shared_bytes(ranked), place.stream, <uintptr_t>&params)
    return 0


cdef class DeviceMoves:
    """Moves of tokens between slots on a device."""

    cdef int reserve(self, int64_t count) except -1:
        cdef int64_t shape[2]
        cdef size_t i
        for i in range(self.bounds.size()):
            check_summary_sizes(self.bounds[i], count)
        slot_launches(self.arrays)  # raises an error for arrays that no launch can move
        shape[0], shape[1] = 2, max(1, count)
        self.slots = new_at(2, shape, INT64, &self.place)
        self.kernel = loaded("move_slots", &self.place)
        self.summary = None if self.bounds.empty() else summary_kernel(&self.place)
        return 0

    cdef int run(self, const int64_t* sources, const int64_t* targets, int64_t count) except -1:
        cdef Tensor slots = self.slots
        cdef vector[SlotLaunch] launches = slot_launches(self.arrays)
        cdef Indices at
        cdef size_t i
        if count == 0:
            return 0
        at.size, at.stride, at.wide = count, 8, True
        for i in range(2):
            upload(<uintptr_t>(sources if i == 0 else targets), 8 * count, <uintptr_t>slots.data + 8 * count * i,
                   self.place.stream, self.place.device_id)
        for i in range(launches.size()):
            at.data = slots.data
            launches[i].params.sources = device_indices(at)
            at.data = slots.data + 8 * count
            launches[i].params.targets = device_indices(at)
            grid = (launches[i].grid.x, launches[i].grid.y, launches[i].grid.z)
            runtime().launch(self.kernel, grid, kThreads, 0, self.place.stream, <uintptr_t>&launches[i].params)
        for i in range(self.bounds.size()):
            summarise(self.summary, self.bounds[i], at, self.bounds[i].stored.num_blocks,
                      self.bounds[i].stored.block_size, &self.place)
        return 0
