"""Checks and conversion of the arguments of the prefix tree: prefixes, insertions, retention."""

cimport cython
from libc.math cimport INFINITY, NAN, isfinite
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagecore.index._integers cimport Integers, as_int64, borrowed_integers, own
from pagecore.index._sealed cimport seal
from pagecore.index.radix._native cimport (
    Digest,
    HintRanges,
    Int32s,
    Mark,
    Marks,
    Offer,
    Query,
    RetentionHint,
    State,
    States,
)
from pagecore.native.std cimport vector

from operator import index

from pagecore.errors import InvalidBlock, ShapeError, UnsupportedDtype, UnsupportedOption, shown


def validate_namespace(namespace):
    """Raise UnsupportedDtype if `namespace` is not a valid namespace of a prefix tree."""
    if namespace is not None:
        key_of(namespace)


def validate_spans(spans):
    """Return spans as a tuple of (start, end, digest); raise ShapeError or UnsupportedDtype for invalid spans."""
    cdef vector[Mark] marks
    cdef Digest unused
    try:
        listed = [(as_int64(start, "a span's start"), as_int64(end, "a span's end"), digest)
                  for start, end, digest in spans]
    except (TypeError, ValueError) as error:
        raise ShapeError(f"expected spans as a list of (start, end, digest), got {shown(spans)}") from error
    frozen = tuple([(start, end, bytes(digest) if isinstance(digest, (bytearray, memoryview)) else digest)
                    for start, end, digest in listed])
    read_marks(frozen, 1 << 40, 0, marks)
    return frozen


cdef int set_digest(object digest, Digest* out) except -1:
    cdef bytes content
    if isinstance(digest, (bytes, bytearray, memoryview)):
        content = bytes(digest)
        if not 1 <= len(content) <= 32:
            raise ShapeError(f"a span's digest has {len(content)} bytes; give 1 to 32")
        out.kind = len(content)
    else:
        try:
            number = index(digest)
        except MemoryError:
            raise
        except Exception as error:  # __index__ of a foreign object may raise anything
            raise UnsupportedDtype(f"a span's digest is {type(digest).__name__}; give bytes or an int") from error
        try:
            content = int.to_bytes(number, 32, "little", signed=True)
        except OverflowError:
            raise ShapeError(
                f"a span's digest does not fit 256 bits: {shown(digest)}; give bytes or a smaller int"
            ) from None
        out.kind = -1
    memcpy(out.bytes.data(), <const char*> content, len(content))
    return 0


cdef list as_list(object values, str name):
    try:
        if not isinstance(values, (str, bytes, bytearray)):
            return list(values)
    except TypeError:
        pass
    raise ShapeError(f"{name} is {type(values).__name__}; give a list")


cdef bint is_bool(object value):
    """Return True for a bool of Python, and for scalars and arrays of bool."""
    if isinstance(value, (float, int)):
        return isinstance(value, bool)
    return str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool"


cdef double as_number(object value, str what) except? -1:
    cdef double number
    # float() also accepts numeric text and bools.
    if isinstance(value, (str, bytes, bytearray)) or is_bool(value):
        raise UnsupportedDtype(f"{what} is {shown(value)}; give a number")
    try:
        number = float(value)
    except MemoryError:
        raise
    except Exception as error:  # __float__ of a foreign object may raise anything
        raise UnsupportedDtype(f"{what} is {shown(value)}; give a number") from error
    if not isfinite(number):
        raise ShapeError(f"{what} is {shown(value)}; give a finite number")
    return number


@cython.freelist(16)
@cython.no_gc
cdef class Prefix:
    cdef Query query(self) noexcept:
        cdef Query query
        query.tokens = Int32s(self.tokens.data, <size_t> self.tokens.size)
        query.marks = Marks(self.marks.data(), self.marks.size())
        query.space = self.space
        return query


@cython.freelist(16)
@cython.no_gc
cdef class Insertion:
    cdef int fill(self, Offer* offer) except -1:
        offer.query = self.prefix.query()
        offer.states = States(self.states.data(), self.states.size())
        offer.hint = self.hint
        offer.ranges = HintRanges()
        offer.time = self.time
        offer.lanes.clear()
        for lane in self.lanes:
            offer.lanes.push_back((<Integers> lane).data)
        return 0


seal(Prefix)
seal(Insertion)


cdef Prefix read_prefix(int64_t block_size, object tokens, object namespace, object spans, object max_tokens):
    cdef Prefix prefix = Prefix.__new__(Prefix)
    cdef int64_t most
    prefix.tokens = borrowed_integers(tokens, "token", ShapeError)
    if prefix.tokens.is_scalar:
        raise ShapeError(f"tokens are {shown(tokens)}; give a list or a one-dimensional array")
    prefix.limit = prefix.tokens.size // block_size
    if max_tokens is not None:
        most = as_int64(max_tokens, "max_tokens")
        if most < 0:
            raise ShapeError(f"max_tokens is {max_tokens}; use 0 or more")
        prefix.limit = min(prefix.limit, most // block_size)
    prefix.space = 0
    if namespace is not None:
        prefix.key = key_of(namespace)
        prefix.space = -1
    if spans is not None:
        read_marks(spans, block_size, prefix.tokens.size // block_size, prefix.marks)
    return prefix


cdef int read_marks(object spans, int64_t block_size, int64_t blocks, vector[Mark]& marks) except -1:
    cdef Mark mark
    cdef int64_t begin, stop, block
    cdef int64_t before = 0
    checked = []
    try:
        for start, end, digest in spans:
            checked.append((as_int64(start, "a span's start"), as_int64(end, "a span's end"), digest))
    except (TypeError, ValueError) as error:
        raise ShapeError(f"expected spans as a list of (start, end, digest), got {shown(spans)}") from error
    checked.sort(key=lambda one: one[0])
    for start, end, digest in checked:
        begin, stop = start, end
        if begin < 0 or stop <= begin:
            raise ShapeError(f"a span runs from {start} to {end}; use 0 <= start < end")
        if begin < before:
            raise ShapeError(f"a span starts at {start} and another ends at {before}; give disjoint spans")
        before = stop
        mark.digest = Digest()
        set_digest(digest, &mark.digest)
        for block in range(begin // block_size, min(blocks, (stop - 1) // block_size + 1)):
            mark.block = <int32_t> block
            mark.start = begin - block * block_size
            mark.end = stop - block * block_size
            marks.push_back(mark)
    return 0


cdef double as_time(object time) except? -1:
    return -INFINITY if time is None else as_number(time, "time")


cdef int read_hint(RetentionHint* hint, double* now, str policy, object time, object priority, object time_to_live,
                   object rank) except -1:
    cdef double seconds
    hint.priority = NAN
    hint.expiry = INFINITY
    hint.rank = NAN
    now[0] = as_time(time)
    if priority is not None:
        if policy != "priority":
            raise UnsupportedOption(
                f"priority is {shown(priority)} and the policy is {policy!r}; use policy \"priority\""
            )
        hint.priority = as_number(priority, "priority")
        if not 0 <= hint.priority <= 100:
            raise ShapeError(f"priority is {priority}; use 0 to 100")
    if time_to_live is not None:
        if priority is None or time is None:
            raise UnsupportedOption(f"time_to_live is {time_to_live}; it requires priority and time")
        seconds = as_number(time_to_live, "time_to_live")
        if seconds < 0:
            raise ShapeError(f"time_to_live is {time_to_live}; use 0 or more")
        hint.expiry = now[0] + seconds
    if rank is not None:
        if policy != "rank":
            raise UnsupportedOption(f"rank is {shown(rank)} and the policy is {policy!r}; use policy \"rank\"")
        hint.rank = as_number(rank, "rank")
    return 0


cdef int own_insertion(Insertion insertion, int64_t block_size, int64_t first) except -1:
    own(insertion.prefix.tokens, min(first * block_size, insertion.prefix.tokens.size))
    for lane in insertion.lanes:
        own(<Integers> lane, min(first, (<Integers> lane).size))
    return 0


cdef Insertion read_insertion(
    int64_t block_size, int32_t num_lanes, object tokens, object blocks, object states, object namespace, object spans
):
    cdef Insertion insertion = Insertion.__new__(Insertion)
    cdef State state
    cdef Integers ids
    insertion.prefix = read_prefix(block_size, tokens, namespace, spans, None)
    insertion.lanes = []
    lanes = (blocks,) if num_lanes == 1 else tuple(blocks) if isinstance(blocks, (tuple, list)) else ()
    if len(lanes) != num_lanes:
        raise ShapeError(f"expected blocks as a tuple of {num_lanes} arrays, one for each lane, got "
                         f"{type(blocks).__name__}")
    for lane in lanes:
        ids = borrowed_integers(lane, "block", InvalidBlock)
        if ids.is_scalar or ids.size < insertion.prefix.limit:
            raise ShapeError(f"expected a list of at least {insertion.prefix.limit} blocks for "
                             f"{insertion.prefix.tokens.size} tokens, got {1 if ids.is_scalar else ids.size}")
        insertion.lanes.append(ids)
    if states is not None:
        pairs = []
        try:
            for length, id in states:
                pairs.append((as_int64(length, "a state's length"), as_int64(id, "a state")))
        except (TypeError, ValueError) as error:
            raise ShapeError(f"expected states as a list of (length, id), got {shown(states)}") from error
        for length, id in pairs:
            if length % block_size:
                raise ShapeError(f"a state follows {length} tokens; use multiples of the block size {block_size}")
            if not 0 <= id < 2**31:
                raise InvalidBlock(f"state {id} cannot be cached; use 0 to {2**31 - 1}")
            state.blocks = length // block_size
            state.id = id
            insertion.states.push_back(state)
    return insertion
