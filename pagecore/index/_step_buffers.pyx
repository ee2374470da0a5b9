"""The buffers of a step."""

from pagecore.index._integers cimport as_int64
from pagecore.index._native_view cimport view_of
from pagecore.index._sealed cimport seal

from pagecore.errors import UnsupportedOption


cdef class StepMemory:
    pass


seal(StepMemory)


cdef class StepBuffers:
    """StepBuffers(max_sequences, max_tokens, num_groups=1, slot_dtype='int64')\n--\n\n\
What one forward pass must know of its sequences, in arrays made once and at fixed addresses.

    `BlockTables.prepare` fills them. Behind the sequences and tokens of the step everything is padding: rows name the
    tables' null row, lengths are 0, `cu_query_lens` repeats the total, positions are 0 and slots -1.

    Parameters
    ----------
    max_sequences, max_tokens : int
        The largest step, S and T below.
    num_groups : int
        Groups of the tables.
    slot_dtype : {"int64", "int32"}
        int32 serves users without 64-bit integers, up to 2**31 slots.

    Attributes
    ----------
    rows : numpy.ndarray
        int32 [S], rows of the block tables.
    query_lens, seq_lens : numpy.ndarray
        int32 [S], new tokens, and tokens after the step.
    cu_query_lens : numpy.ndarray
        int32 [S + 1], where the new tokens of each sequence start.
    positions : numpy.ndarray
        int32 [T], of the new tokens in their sequences.
    token_ids : numpy.ndarray
        int32 [T], ids of the new tokens: -1 until the caller writes them, padding is 0.
    slot_mappings : tuple of numpy.ndarray
        `slot_dtype` [T] for each group, slots of the new tokens.
    num_sequences, num_tokens : int
        Of the last step.

    Raises
    ------
    ShapeError
        A size is out of range.
    UnsupportedOption
        `slot_dtype` is unknown.
    """

    def __cinit__(self, max_sequences, max_tokens, num_groups=1, slot_dtype="int64"):
        self.slot_dtype = str(slot_dtype)
        if self.slot_dtype not in ("int64", "int32"):
            raise UnsupportedOption(f"slot_dtype is {slot_dtype!r}; use int64 or int32")
        cdef bint is_wide = self.slot_dtype == "int64"
        self.memory = StepMemory.__new__(StepMemory)
        self.memory.native.reset(new NativeStepBuffers(
            as_int64(max_sequences, "max_sequences"), as_int64(max_tokens, "max_tokens"),
            as_int64(num_groups, "num_groups"), SlotType.Int64 if is_wide else SlotType.Int32,
        ))
        self.native = self.memory.native.get()
        self.rows_data = self.native.rows()
        self.query_lens_data = self.native.query_lens()
        self.cu_query_lens_data = self.native.cu_query_lens()
        self.seq_lens_data = self.native.seq_lens()
        self.positions_data = self.native.positions()
        self.token_ids_data = self.native.token_ids()
        self.rows = self._array(self.rows_data, self.native.max_sequences())
        self.query_lens = self._array(self.query_lens_data, self.native.max_sequences())
        self.cu_query_lens = self._array(self.cu_query_lens_data, self.native.max_sequences() + 1)
        self.seq_lens = self._array(self.seq_lens_data, self.native.max_sequences())
        self.positions = self._array(self.positions_data, self.native.max_tokens())
        self.token_ids = self._array(self.token_ids_data, self.native.max_tokens())
        mappings = []
        for group in range(self.native.num_groups()):
            mappings.append(self._array(self.native.slots(group), self.native.max_tokens(), is_wide))
        self.slot_mappings = tuple(mappings)

    cdef object _array(self, void* data, Py_ssize_t size, bint is_wide=False):
        return view_of(self.memory, data, 1, &size, is_wide, False)

    @property
    def max_sequences(self):
        """The most sequences of a step."""
        return self.native.max_sequences()

    @property
    def max_tokens(self):
        """The most tokens of a step."""
        return self.native.max_tokens()

    @property
    def num_groups(self):
        """Groups that slots are kept for."""
        return self.native.num_groups()

    @property
    def num_sequences(self):
        """Sequences of the last step."""
        return self.native.num_sequences()

    @property
    def num_tokens(self):
        """Tokens of the last step."""
        return self.native.num_tokens()

    @property
    def nbytes(self):
        """Bytes of all arrays."""
        return self.native.nbytes()

    def check_invariants(self):
        """Raise PagecoreError where the padding is not what it should be."""
        self.native.check_invariants()
