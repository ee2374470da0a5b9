"""Buffers of a step."""

from pagecore.index._integers cimport as_int64
from pagecore.index._native_view cimport view_of
from pagecore.index._sealed cimport seal
from pagecore.index.tables._native cimport NativeStepBuffers, SlotType

from pagecore.errors import UnsupportedOption, shown


cdef class StepMemory:
    pass


seal(StepMemory)


cdef class StepBuffers:
    """StepBuffers(max_sequences, max_tokens, num_groups=1, slot_dtype='int64', tree_words=0, sealed=False)\n--\n\n\
Metadata of a forward pass, in arrays allocated once at fixed addresses.

    `BlockTables.prepare` fills the arrays. Entries after the sequences and tokens of the step are padding: rows are the
    null row of the tables, lengths and positions are 0, `cu_query_lens` repeats the total, and slots are -1.

    Parameters
    ----------
    max_sequences, max_tokens : int
        Size of the largest step, S and T below.
    num_groups : int
        Groups of layers, as in the tables.
    slot_dtype : {"int64", "int32"}
        int32 is for kernels without 64-bit indices, up to 2**31 slots.
    tree_words : int
        64-bit words of a row of `tree_mask`, for steps with trees of drafts; 0 for steps without.
    sealed : bool
        Have the array `sealed_lens`, for caches with sealed blocks.

    Attributes
    ----------
    rows : numpy.ndarray
        int32 [S], rows of the block tables.
    query_lens, seq_lens : numpy.ndarray
        int32 [S], number of new tokens, and of tokens after the step.
    cu_query_lens : numpy.ndarray
        int32 [S + 1], index of the first new token of each sequence, then the total.
    positions : numpy.ndarray
        int32 [T], positions of the new tokens in their sequences.
    token_ids : numpy.ndarray
        int32 [T], ids of the new tokens: -1 until the caller writes them; padding is 0.
    sealed_lens : numpy.ndarray or None
        int32 [S], first tokens of each sequence, in sealed blocks: the caller writes them; padding is 0.
    slot_mappings : tuple of numpy.ndarray
        `slot_dtype` [T] for each group, slots of the new tokens; padding is -1.
    num_sequences, num_tokens : int
        Size of the last step.

    Raises
    ------
    ShapeError
        A size is out of range.
    UnsupportedOption
        `slot_dtype` is unknown.
    """

    def __cinit__(self, max_sequences, max_tokens, num_groups=1, slot_dtype="int64", tree_words=0, sealed=False):
        self.slot_dtype = str(slot_dtype)
        if self.slot_dtype not in ("int64", "int32"):
            raise UnsupportedOption(f"slot_dtype is {shown(slot_dtype)}; use int64 or int32")
        cdef bint is_wide = self.slot_dtype == "int64"
        self.memory = StepMemory.__new__(StepMemory)
        self.memory.native.reset(new NativeStepBuffers(
            as_int64(max_sequences, "max_sequences"), as_int64(max_tokens, "max_tokens"),
            as_int64(num_groups, "num_groups"), SlotType.Int64 if is_wide else SlotType.Int32,
            as_int64(tree_words, "tree_words"), bool(sealed),
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
        self.tree_mask = self._tree_array()
        self.sealed_lens_data = self.native.sealed_lens()
        if self.sealed_lens_data != NULL:
            self.sealed_lens = self._array(self.sealed_lens_data, self.native.max_sequences())
        mappings = []
        for group in range(self.native.num_groups()):
            mappings.append(self._array(self.native.slots(group), self.native.max_tokens(), is_wide))
        self.slot_mappings = tuple(mappings)

    cdef object _array(self, void* data, Py_ssize_t size, bint is_wide=False):
        return view_of(self.memory, data, 1, &size, is_wide, False)

    cdef object _tree_array(self):
        cdef Py_ssize_t[2] shape
        shape[0], shape[1] = self.native.max_tokens(), self.native.tree_words()
        if shape[1] == 0:
            return None
        return view_of(self.memory, self.native.tree_mask(), 1 if shape[1] == 1 else 2, shape, True, False)

    @property
    def max_sequences(self):
        """Most sequences of a step."""
        return self.native.max_sequences()

    @property
    def max_tokens(self):
        """Most tokens of a step."""
        return self.native.max_tokens()

    @property
    def num_groups(self):
        """Groups of layers."""
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
        """Raise PagecoreError if the padding is wrong."""
        self.native.check_invariants()
