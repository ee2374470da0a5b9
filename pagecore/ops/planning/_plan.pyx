"""AttentionPlan and plan_attention: work items of a batch, planned once for all layers of a step."""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.arguments._arguments cimport chunk_of, index_tensor, read_flag, read_reach, read_sink_tokens
from pagecore.ops.cuda.plan._plan cimport CudaPlan
from pagecore.ops.plan cimport PcWorkItem, PlanBatch, PlanOptions, check_plan_batch

from operator import index
from sys import modules

import numpy as np

from pagecore.arrays.cuda.current import runtime
from pagecore.arrays.cuda.devices import check_device, device_index
from pagecore.arrays.tensors.streams import stream_handle
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption, shown

cdef extern from "pagecore/ops/cpu/ops.hpp" namespace "pagecore::cpu" nogil:
    PlanOptions host_plan_options(int64_t num_query_heads, int64_t num_kv_heads)

ITEM = np.dtype([(name, np.int32) for name in (
    "sequence", "query_begin", "query_count", "key_begin", "key_end", "partial", "split", "num_splits")])


@cython.embedsignature(False)  # the docstring begins with a signature
cdef class AttentionPlan:
    """AttentionPlan(*, num_query_heads, num_kv_heads, causal=True, window=None, chunk=None, \
sink_tokens=None, tree=False, batch_invariant=False, num_workers=None, device='cpu', max_sequences=None, \
max_tokens=None)\n--\n\n\
Work items of the attention of one batch.

    `plan_attention` returns a plan, and every layer of a step with the same heads, causality and window reuses it. The
    plan records its lengths; on the host `paged_attention` raises for a batch of other lengths.

    On CUDA the plan is in device memory, as is the workspace for partial results, which the first call allocates. Calls
    with one plan and calls that replan it must be ordered by one stream.

    Parameters
    ----------
    num_query_heads, num_kv_heads : int
    causal, window, chunk, sink_tokens
        As in `paged_attention`. On CUDA sink tokens take two partial rows of memory for each query row; a
        batch-invariant plan takes one more for each 1024 keys of the window.
    tree : bool
        The calls pass `tree_mask`; see `plan_attention`.
    batch_invariant : bool
        Results of a row do not depend on other rows; see `plan_attention`.
    num_workers : int, optional
        Workers that share the work, at least 1. None is `num_threads` at the time of planning on the host, and the
        number of resident CTAs on CUDA.
    device : str
        "cpu", "cuda" or "cuda:N".
    max_sequences, max_tokens : int, optional
        For CUDA, both or neither: the maximum of sequences and query rows of a batch. Device memory is allocated by the
        constructor, which waits until every stream may use it. Addresses, heads, `batch_invariant` and workers are then
        fixed, so a captured graph is valid for every later plan. Without them the plan grows, and a capture with it is
        an error.

    Raises
    ------
    ShapeError
        A head count is below 1, the counts do not divide, or one capacity is given without the other.
    UnsupportedOption
        The window, the chunk, the sink tokens or the number of workers is invalid.
    DeviceError
        The device does not exist, or its current stream is being captured.
    NotEnoughMemory
        The device cannot allocate the plan.
    """

    def __init__(self, *, num_query_heads, num_kv_heads, causal=True, window=None, chunk=None, sink_tokens=None,
                 tree=False, batch_invariant=False, num_workers=None, device="cpu", max_sequences=None,
                 max_tokens=None):
        cdef int64_t left, right
        cdef int64_t query_heads = count_of(num_query_heads, "num_query_heads", ShapeError)
        cdef int64_t kv_heads = count_of(num_kv_heads, "num_kv_heads", ShapeError)
        if query_heads % kv_heads != 0:
            raise ShapeError(
                f"num_query_heads is {query_heads} and num_kv_heads {kv_heads}; the first must be a multiple of the "
                "second"
            )
        cdef int64_t workers = 0 if num_workers is None else count_of(num_workers, "num_workers", UnsupportedOption)
        cdef bint is_causal = read_flag(causal, "causal"), is_invariant = read_flag(batch_invariant, "batch_invariant")
        cdef bint is_tree = read_flag(tree, "tree")
        read_reach(window, chunk, &left, &right)
        number = device_index(device)
        cdef int64_t num_sinks = read_sink_tokens(sink_tokens, chunk, left)
        if (max_sequences is None) != (max_tokens is None) or (max_tokens is not None and number is None):
            raise ShapeError("max_sequences and max_tokens must be passed together, and for a plan on CUDA only")
        cdef int64_t sequences = 0, tokens = 0
        if max_sequences is not None:
            sequences = count_of(max_sequences, "max_sequences", ShapeError)
            tokens = count_of(max_tokens, "max_tokens", ShapeError)
        cdef CudaPlan cuda = None
        if number is not None:
            check_device(number)
            cuda = CudaPlan(number, sequences, tokens)
        self.check_unread()
        cdef PlanOptions options = host_plan_options(query_heads, kv_heads)
        options.causal = is_causal
        options.window_left = left
        options.window_right = right
        options.sink_tokens = num_sinks
        options.batch_invariant = is_invariant
        options.tree = is_tree
        # A plan that is initialised again stays as it was if the rest fails.
        cdef PlanOptions options_before = self.plan.options
        cdef int64_t workers_before = self.num_workers_given
        cdef CudaPlan cuda_before = self.cuda
        self.plan.options, self.num_workers_given, self.cuda = options, workers, cuda
        try:
            if cuda is None:
                self.replan(NULL, NULL, 0)
            elif cuda.is_fixed:
                stream = runtime().current_stream(number)
                self.replan(NULL, NULL, 0, stream)
                runtime().synchronize(stream, number)  # a later plan on another stream does not wait for the empty one
        except BaseException:
            self.plan.options, self.num_workers_given, self.cuda = options_before, workers_before, cuda_before
            raise

    cdef int check_unread(self) except -1:
        if self.num_readers > 0:
            raise UnsupportedOption(
                f"the plan is in use by {self.num_readers} attention calls of other threads; replan it when they are "
                "done, or use another plan"
            )
        return 0

    cdef void set_tree(self, bint tree) noexcept:
        self.plan.options.tree = tree
        if self.cuda is not None:
            self.cuda.options.tree = tree

    cdef int replan(
            self, const int32_t* cu_query_lens, const int32_t* seq_lens, int num_sequences, size_t stream=0) except -1:
        cdef PlanBatch batch
        self.check_unread()
        batch.cu_query_lens = cu_query_lens
        batch.seq_lens = seq_lens
        batch.num_sequences = num_sequences
        if self.cuda is not None:
            check_plan_batch(batch)
            return self.cuda.replan(self.plan.options, self.num_workers_given, batch, stream)
        cdef int64_t before = self.plan.options.num_workers
        self.plan.options.num_workers = self.num_workers_given or threads_of_a_call()
        try:
            self.plan.replan(batch)
        except BaseException:
            self.plan.options.num_workers = before
            raise
        return 0

    @property
    def num_query_heads(self):
        """Number of query heads."""
        return self.plan.options.num_query_heads

    @property
    def num_kv_heads(self):
        """Number of key-value heads."""
        return self.plan.options.num_kv_heads

    @property
    def causal(self):
        """True if queries do not attend to later keys."""
        return self.plan.options.causal

    @property
    def window(self):
        """(left, right) in keys; -1 is unbounded."""
        return max(self.plan.options.window_left, -1), self.plan.options.window_right

    @property
    def chunk(self):
        """Keys of a chunk of chunked local attention, or None."""
        return chunk_of(self.plan.options.window_left)

    @property
    def sink_tokens(self):
        """First keys that are attended to in addition to the window."""
        return self.plan.options.sink_tokens

    @property
    def tree(self):
        """True if the calls may pass `tree_mask` with a window or chunks."""
        return self.plan.options.tree

    @property
    def batch_invariant(self):
        """True if results of a row do not depend on other rows; see `plan_attention`."""
        return self.plan.options.batch_invariant

    @property
    def device(self):
        """Device of the plan: "cpu" or "cuda:N"."""
        return "cpu" if self.cuda is None else f"cuda:{self.cuda.device}"

    @property
    def num_workers(self):
        """Workers that share the work; on CUDA the CTAs for each key-value head."""
        return self.plan.options.num_workers if self.cuda is None else max(self.cuda.num_workers)

    @property
    def num_sequences(self):
        """Number of sequences in the planned batch."""
        return self.plan.num_sequences() if self.cuda is None else self.cuda.num_sequences

    @property
    def num_items(self):
        """Number of work items, each for all heads; on CUDA each for the query heads of one key-value head."""
        return self.plan.counts().num_items if self.cuda is None else sum(self.cuda.num_items)

    @property
    def num_partial_rows(self):
        """Number of partial rows: rows of queries whose keys are split among items."""
        return self.plan.counts().num_partial_rows if self.cuda is None else sum(self.cuda.num_partial_rows)

    @property
    def nbytes(self):
        """Bytes held on the host and the device."""
        return self.plan.num_bytes() if self.cuda is None else self.cuda.nbytes

    @property
    def items(self):
        """A copy of the work items: a structured array with the fields of PcWorkItem (cuda_src/abi/types.h)."""
        if self.cuda is not None:
            return np.concatenate([self.cuda.items(section)[0] for section in range(2)]).view(ITEM)[:, 0]
        cdef int64_t num_bytes = self.plan.counts().num_items * <int64_t>sizeof(PcWorkItem)
        return np.frombuffer(bytearray((<const char*>self.plan.items())[:num_bytes]), ITEM)

    def __repr__(self):
        return (f"AttentionPlan({self.num_sequences} sequences, {self.num_items} items, "
                f"{self.num_query_heads}/{self.num_kv_heads} heads)")


cdef int64_t count_of(object number, str name, object error) except -1:
    try:
        if isinstance(number, bool):
            raise TypeError("a bool is not an integer")
        count = index(number)
    except MemoryError:
        raise
    except Exception as raised:
        raise error(f"{name} is {shown(number)}; it must be a whole number") from raised
    if not 1 <= count <= INT32_MAX:
        raise error(f"{name} is {shown(count)}; it must be 1 to {INT32_MAX}")
    return count


cdef int copy_lens(Tensor lens, str name, vector[int32_t]& out) except -1:
    """See _plan.pxd."""
    cdef int64_t i, value
    cdef char* at = lens.data
    out.resize(lens.shape_[0])
    for i in range(lens.shape_[0]):
        value = (<int64_t*>at)[0] if lens.itemsize == 8 else (<int32_t*>at)[0]
        if not -INT32_MAX <= value <= INT32_MAX:
            raise ShapeError(f"{name}[{i}] is {value}; lengths are 0 to {INT32_MAX}")
        out[i] = <int32_t>value
        at += lens.strides_[0]
    return 0


cdef object framework_array(object lens):
    """Return the lengths, or None for a tensor of a torch built without CUDA, which has no streams."""
    torch = modules.get("torch")
    if torch is not None and isinstance(lens, torch.Tensor) and not torch.backends.cuda.is_built():
        return None
    return lens


def plan_attention(
    cu_query_lens,
    seq_lens,
    *,
    num_query_heads,
    num_kv_heads,
    causal=True,
    window=None,
    chunk=None,
    sink_tokens=None,
    tree=False,
    batch_invariant=False,
    num_workers=None,
    device=None,
    out=None,
    stream=None,
):
    """Plan the attention of one batch: cut it into work items, and split long contexts among workers.

    Parameters
    ----------
    cu_query_lens : integers, [B + 1], or None
        As in `paged_attention`; None is one query for each sequence.
    seq_lens : integers, [B]
        Keys of each sequence, including those of the new tokens.
    num_query_heads, num_kv_heads, causal, window, chunk, sink_tokens
        Those of the calls that use the plan.
    tree : bool
        The calls pass `tree_mask`. Required if they also have a window or chunks, which count from the positions of
        the tree: an item then begins with the first key that the first new token of its sequence sees.
    batch_invariant : bool
        The bits of a row depend only on its query, keys and values, on which of its tokens are in sealed blocks, and on
        the kernel, which dtypes, shapes and on CUDA the alignment of rows select: not on the rest of the batch, the
        chunks in which its prompt is computed, or `num_workers`. Splits have a fixed length, and decode multiplies
        packed copies as prefill does, which is slower if keys and values are in the processor's cache.
    num_workers : int, optional
        Workers that share the work. None is the present `num_threads` on the host, and the number of resident CTAs on
        CUDA.
    device : str, optional
        "cpu", "cuda" or "cuda:N": the device of the arrays of the calls. By default that of `out`, otherwise the host.
        Lengths must be on the host; the plan is copied to the device without waiting.
    out : AttentionPlan, optional
        A plan to replace with these lengths and options, in its own buffers; it is returned. Another thread must not
        attend with it meanwhile.
    stream : int or a stream, optional
        For CUDA, the stream of the copy; the calls must follow it. By default the current stream of the framework of
        `seq_lens`, which is CuPy's for lists and NumPy arrays: pass `stream` if the calls use a stream of torch.

    Returns
    -------
    AttentionPlan

    Raises
    ------
    ShapeError
        Lengths are negative, cu_query_lens decreases, they do not match, or they exceed an `out` of fixed size. After
        every error `out` is unchanged.
    UnsupportedOption
        An option is invalid, or another thread attends with `out`.
    DeviceError
        The device does not exist; lengths are on a device; `out` or the stream belongs to another device; or the stream
        is being captured: plan before the capture.
    NotEnoughMemory
        The device cannot allocate a plan that grows.

    Notes
    -----
    Splitting long contexts over idle workers is FlashDecoding (Dao et al., 2023); fixed splits for reproducible bits
    follow "Defeating Nondeterminism in LLM Inference" (He et al., 2025).

    Examples
    --------
    >>> import pagecore
    >>> pagecore.plan_attention(None, [100, 8192], num_query_heads=32, num_kv_heads=8, num_workers=2).num_items
    9
    """
    if out is not None and not isinstance(out, AttentionPlan):
        raise UnsupportedOption(f"out is a {type(out).__name__}; it must be an AttentionPlan")
    place = "cpu" if device is None and out is None else out.device if device is None else device
    number = device_index(place)
    cdef AttentionPlan plan = AttentionPlan(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        causal=causal,
        window=window,
        chunk=chunk,
        sink_tokens=sink_tokens,
        tree=tree,
        batch_invariant=batch_invariant,
        num_workers=num_workers,
        device="cpu" if out is not None else place,
    )
    cdef vector[int32_t] lens, cu
    copy_lens(index_tensor(seq_lens, "seq_lens", 1, "[num_sequences]", NULL), "seq_lens", lens)
    if cu_query_lens is not None:
        copy_lens(index_tensor(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]", NULL), "cu_query_lens", cu)
        if cu.size() != lens.size() + 1:
            raise ShapeError(f"cu_query_lens has {cu.size()} entries and seq_lens {lens.size()}; it must have one more")
    cdef AttentionPlan target = plan if out is None else <AttentionPlan>out
    if device_index(target.device) != number:
        raise DeviceError(
            f"out is a plan on {target.device} and device is {shown(place)}; leave device out, or pass another out"
        )
    cdef size_t handle = 0
    if number is not None:
        handle = stream_handle(stream, framework_array(seq_lens), number)
    elif stream is not None:
        raise UnsupportedOption(f"stream is {shown(stream)}; a plan on the host has no stream: leave stream out")
    target.check_unread()
    cdef PlanOptions before = target.plan.options
    cdef int64_t given_before = target.num_workers_given
    target.plan.options = plan.plan.options
    target.num_workers_given = plan.num_workers_given
    cdef const int32_t* offsets = NULL
    if cu_query_lens is not None:
        offsets = cu.data()
    try:
        target.replan(offsets, lens.data(), <int>lens.size(), handle)
    except BaseException:
        target.plan.options = before
        target.num_workers_given = given_before
        raise
    return target
