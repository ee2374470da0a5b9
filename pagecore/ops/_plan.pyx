"""AttentionPlan and plan_attention: how a batch is cut into work items, once for all layers of a step."""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libcpp.vector cimport vector

from pagecore.arrays._tensor cimport Tensor
from pagecore.ops._indices cimport index_tensor
from pagecore.ops._numbers cimport read_flag, read_window
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.cuda._plan cimport CudaPlan
from pagecore.ops.plan cimport PcWorkItem, PlanBatch, PlanOptions, check_plan_batch

from operator import index
from sys import modules

import numpy as np

from pagecore.arrays.cuda import runtime
from pagecore.arrays.devices import check_device, device_index
from pagecore.arrays.refusals import brief
from pagecore.arrays.streams import stream_handle
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption

cdef extern from "pagecore/ops/cpu/ops.hpp" namespace "pagecore::cpu" nogil:
    PlanOptions host_plan_options(int64_t num_query_heads, int64_t num_kv_heads)

ITEM = np.dtype([(name, np.int32) for name in (
    "sequence", "query_begin", "query_count", "key_begin", "key_end", "partial", "split", "num_splits")])


@cython.embedsignature(False)  # its docstring begins with one
cdef class AttentionPlan:
    """AttentionPlan(*, num_query_heads, num_kv_heads, causal=True, window=None, batch_invariant=False, \
num_workers=None, device='cpu', max_sequences=None, max_tokens=None)\n--\n\n\
How the attention of one batch is split into work items.

    Made by `plan_attention` and reused by every layer of a step that has these heads, this causality and this window.
    It remembers the lengths that it was made for, and on the host `paged_attention` refuses it for others.

    On CUDA the plan lies in device memory, beside the memory for partial results that its first call allocates; calls
    with one plan, and what plans it anew, follow each other on one stream.

    Parameters
    ----------
    num_query_heads, num_kv_heads : int
    causal, window : as `paged_attention` has them
    batch_invariant : bool
        A row's bits depend on the row alone; see `plan_attention`.
    num_workers : int, optional
        What shares the work, at least 1; None is what the backend has (the host: `num_threads` when it is planned,
        CUDA: the CTAs that the device holds at a time).
    device : str
        "cpu", "cuda" or "cuda:N".
    max_sequences, max_tokens : int, optional
        Both, for CUDA: the most sequences and query rows of a batch. Device memory is allocated now, and the host waits
        until every stream may use it. No address changes from then on, nor do heads, `batch_invariant` and workers, so
        that a graph which was captured once serves every later plan. Without them the plan grows, and a capture refuses
        it.

    Raises
    ------
    ShapeError
        Head counts below 1 or that do not divide; one capacity without the other.
    UnsupportedOption
        A window or a number of workers that makes no sense.
    DeviceError
        A device that is not there, or memory taken there while the current stream is being captured.
    NotEnoughMemory
        No room on the device.
    """

    def __init__(self, *, num_query_heads, num_kv_heads, causal=True, window=None, batch_invariant=False,
                 num_workers=None, device="cpu", max_sequences=None, max_tokens=None):
        cdef int64_t left, right
        cdef int64_t query_heads = count_of(num_query_heads, "num_query_heads", ShapeError)
        cdef int64_t kv_heads = count_of(num_kv_heads, "num_kv_heads", ShapeError)
        if query_heads % kv_heads != 0:
            raise ShapeError(
                f"num_query_heads is {query_heads}, no multiple of num_kv_heads {kv_heads}; each key-value head serves "
                "the same number of query heads"
            )
        cdef int64_t workers = 0 if num_workers is None else count_of(num_workers, "num_workers", UnsupportedOption)
        cdef bint is_causal = read_flag(causal, "causal"), is_invariant = read_flag(batch_invariant, "batch_invariant")
        read_window(window, &left, &right)
        self.check_unread()
        cdef Plan* plan = &self.plan
        plan.options = host_plan_options(query_heads, kv_heads)
        plan.options.causal = is_causal
        plan.options.window_left = left
        plan.options.window_right = right
        plan.options.batch_invariant = is_invariant
        self.num_workers_given = workers
        number = device_index(device)
        if (max_sequences is None) != (max_tokens is None) or (max_tokens is not None and number is None):
            raise ShapeError("max_sequences and max_tokens are given together, and for a plan on CUDA only")
        if number is not None:
            check_device(number)
            self.cuda = CudaPlan(
                number,
                0 if max_sequences is None else count_of(max_sequences, "max_sequences", ShapeError),
                0 if max_tokens is None else count_of(max_tokens, "max_tokens", ShapeError),
            )
        if number is None:
            self.replan(NULL, NULL, 0)
        elif self.cuda.is_fixed:
            stream = runtime().current_stream(number)
            self.replan(NULL, NULL, 0, stream)
            runtime().synchronize(stream, number)  # no stream that plans it anew would wait for the empty plan

    cdef int check_unread(self) except -1:
        if self.num_readers > 0:
            raise UnsupportedOption(
                f"the plan is in use by {self.num_readers} attention calls of other threads; plan anew when they are "
                "done, or into another plan"
            )
        return 0

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
        """Query heads of the call."""
        return self.plan.options.num_query_heads

    @property
    def num_kv_heads(self):
        """Key heads of the call."""
        return self.plan.options.num_kv_heads

    @property
    def causal(self):
        """Whether queries attend to no later keys."""
        return self.plan.options.causal

    @property
    def window(self):
        """(left, right) in keys; -1 is no bound."""
        return self.plan.options.window_left, self.plan.options.window_right

    @property
    def batch_invariant(self):
        """Whether a row's bits depend on the row alone; see `plan_attention`."""
        return self.plan.options.batch_invariant

    @property
    def device(self):
        """Where the plan lies: "cpu", or "cuda:N"."""
        return "cpu" if self.cuda is None else f"cuda:{self.cuda.device}"

    @property
    def num_workers(self):
        """What the work was shared among; on CUDA the CTAs of each key head."""
        return self.plan.options.num_workers if self.cuda is None else max(self.cuda.num_workers)

    @property
    def num_sequences(self):
        """Sequences of the planned batch."""
        return self.plan.num_sequences() if self.cuda is None else self.cuda.num_sequences

    @property
    def num_items(self):
        """Work items, each for all heads; on CUDA each for all heads of a group."""
        return self.plan.counts().num_items if self.cuda is None else sum(self.cuda.num_items)

    @property
    def num_partial_rows(self):
        """Query rows of splits that a merge joins."""
        return self.plan.counts().num_partial_rows if self.cuda is None else sum(self.cuda.num_partial_rows)

    @property
    def nbytes(self):
        """Bytes that the plan holds."""
        return self.plan.num_bytes() if self.cuda is None else self.cuda.nbytes

    @property
    def items(self):
        """A copy of the work items: a structured array with the fields of PcWorkItem (cuda_src/abi.h)."""
        if self.cuda is not None:
            return np.concatenate([self.cuda.items(section)[0] for section in range(2)]).view(ITEM)[:, 0]
        cdef int64_t num_bytes = self.plan.counts().num_items * <int64_t>sizeof(PcWorkItem)
        return np.frombuffer(bytearray((<const char*>self.plan.items())[:num_bytes]), ITEM)

    def __repr__(self):
        return (f"AttentionPlan({self.num_sequences} sequences, {self.num_items} items, "
                f"{self.num_query_heads}/{self.num_kv_heads} heads)")


cdef int64_t count_of(object number, str name, object error) except -1:
    try:
        count = index(number)
    except MemoryError:
        raise
    except Exception:
        raise error(f"{name} is {brief(number)}; it must be a whole number") from None
    if not 1 <= count <= INT32_MAX:
        raise error(f"{name} is {count}; it must be 1 to {INT32_MAX}")
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
    """The lengths where their framework has streams; a torch for the host alone has none."""
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
    batch_invariant=False,
    num_workers=None,
    device=None,
    out=None,
    stream=None,
):
    """Plan the attention of one batch: which work items, how long contexts are split.

    Parameters
    ----------
    cu_query_lens : integers, [B + 1], or None
        As `paged_attention` has it; None is one query for each sequence.
    seq_lens : integers, [B]
        Keys of each sequence, the new ones included.
    num_query_heads, num_kv_heads, causal, window
        As the calls will have them.
    batch_invariant : bool
        A row's bits depend on its own query, keys and values alone: not on the rest of the batch, on how much of its
        prompt is computed at once, or on `num_workers`. Splits have a fixed length, and decode multiplies packed copies
        as prompts do, which is slower where keys and values come from the processor's cache.
    num_workers : int, optional
        What shares the work; None is what the backend has (the host: `num_threads` now, CUDA: the CTAs that the device
        holds at a time).
    device : str, optional
        "cpu", "cuda" or "cuda:N", where the arrays of the calls are; by default that of `out`, else the host. The
        lengths are read on the host in any case, and the plan is copied to the device without waiting.
    out : AttentionPlan, optional
        Is planned anew with these lengths and options, in its own buffers, and returned. Refused while another thread
        attends with it.
    stream : int or a stream, optional
        For CUDA: what the copy is given to; the calls must come behind it. By default the current stream of the
        framework of `seq_lens`, and CuPy's for lists and NumPy arrays: pass `stream` where the calls go to torch's.

    Returns
    -------
    AttentionPlan

    Raises
    ------
    ShapeError
        Lengths that are negative, fall, or do not fit each other; what does not fit an `out` of fixed size. As with
        every error, `out` is unchanged.
    UnsupportedOption
        An option that makes no sense.
    DeviceError
        A device that is not there, lengths on a device, `out` on another one, a stream of another one or one that is
        being captured: plan before the capture.
    NotEnoughMemory
        No room on the device for a plan that grows.

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
            f"out is a plan on {target.device} and device is {brief(place)}; plan there, or leave device out"
        )
    cdef size_t handle = 0
    if number is not None:
        handle = stream_handle(stream, framework_array(seq_lens), number)
    elif stream is not None:
        raise UnsupportedOption(f"stream is {brief(stream)}; a plan on the host is made at once: leave stream out")
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
