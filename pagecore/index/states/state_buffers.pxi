"""State slots of a step."""

from pagecore.index._integers cimport as_int64
from pagecore.index._native_view cimport view_of
from pagecore.index._sealed cimport seal
from pagecore.index.states._native cimport NativeStateBuffers


cdef class StateMemory:
    pass


seal(StateMemory)


cdef class StateBuffers:
    """StateBuffers(max_sequences, draft_tokens=0)\n--\n\n\
Slots that a forward pass reads and writes recurrent states in, in arrays allocated once at fixed addresses.

    `StateTable.prepare` fills the arrays. Entries after the sequences of the step, and those of a sequence without new
    tokens, are 0, the null slot. Before the pass, zero the slots `zeros` and copy `copies` (`StatePool`). If
    checkpoints are quantised, restore `loads` before it, too (`CheckpointPool`).

    Parameters
    ----------
    max_sequences : int
        Sequences of the largest step, S below.
    draft_tokens : int
        Draft tokens of the table, k below.

    Attributes
    ----------
    state_read, state_write : numpy.ndarray
        int32 [S], slot of the state before the new tokens of each sequence, and slot for the state after them; the same
        slot if the table works in place.
    checkpoint_write, checkpoint_lengths : numpy.ndarray
        int32 [S], slot for a checkpoint, and the number of tokens of the sequence, from its start, that it covers; 0
        for none. At the end of the step, or after a token with a slot in `draft_write`, the slot is that one.
    draft_read, draft_write : numpy.ndarray or None
        int32 [S, 1 + k], slots of the states before and after each token of a step of up to 1 + k tokens; zeros for
        longer steps. None without drafts.
    zeros : numpy.ndarray
        int32 [n], slots to zero before the pass.
    copies : numpy.ndarray
        int32 [n, 2], rows of (source, target) to copy before the pass, in any order.
    loads : numpy.ndarray
        int32 [n, 2], rows of (checkpoint, slot) to restore before the pass.
    saves : numpy.ndarray
        int32 [n, 2], rows of (slot, checkpoint) that the owner of the bytes quantised, or has to quantise, when the
        step was committed.
    num_sequences : int
        Sequences of the last step.

    Raises
    ------
    ShapeError
        A size is out of range.
    """

    def __cinit__(self, max_sequences, draft_tokens=0):
        self.memory = StateMemory.__new__(StateMemory)
        self.memory.native.reset(new NativeStateBuffers(
            as_int64(max_sequences, "max_sequences"), as_int64(draft_tokens, "draft_tokens")
        ))
        self.native = self.memory.native.get()
        cdef Py_ssize_t size = self.native.max_sequences()
        self.state_read = self._array(self.native.state_read(), size)
        self.state_write = self._array(self.native.state_write(), size)
        self.checkpoint_write = self._array(self.native.checkpoint_write(), size)
        self.checkpoint_lengths = self._array(self.native.checkpoint_lengths(), size)
        self.all_zeros = self._array(self.native.zeros(), size)
        self.all_copies = self._array(self.native.copies(), size, 2)
        self.all_loads = self._array(self.native.loads(), size, 2)
        self.all_saves = self._array(self.native.saves(), size, 2)
        if self.native.draft_tokens() > 0:
            self.draft_read = self._array(self.native.draft_read(0), size, 1 + self.native.draft_tokens())
            self.draft_write = self._array(self.native.draft_write(0), size, 1 + self.native.draft_tokens())

    cdef object _array(self, void* data, Py_ssize_t size, Py_ssize_t width=0):
        cdef Py_ssize_t[2] shape = [size, width]
        return view_of(self.memory, data, 2 if width else 1, shape, False, False)

    @property
    def zeros(self):
        """Slots to zero before the pass: int32 [n], a view that the next step overwrites."""
        return self.all_zeros[:self.native.num_zeros()]

    @property
    def copies(self):
        """Rows of (source, target) to copy before the pass: int32 [n, 2], a view that the next step overwrites."""
        return self.all_copies[:self.native.num_copies()]

    @property
    def loads(self):
        """Rows of (checkpoint, slot) to restore before the pass: int32 [n, 2], a view that the next step overwrites."""
        return self.all_loads[:self.native.num_loads()]

    @property
    def saves(self):
        """Rows of (slot, checkpoint) of the last commit: int32 [n, 2], a view that the next step overwrites."""
        return self.all_saves[:self.native.num_saves()]

    @property
    def max_sequences(self):
        """Most sequences of a step."""
        return self.native.max_sequences()

    @property
    def draft_tokens(self):
        """Draft tokens of the table."""
        return self.native.draft_tokens()

    @property
    def num_sequences(self):
        """Sequences of the last step."""
        return self.native.num_sequences()

    @property
    def nbytes(self):
        """Bytes of all arrays."""
        return self.native.nbytes()

    def check_invariants(self):
        """Raise PagecoreError if the padding is wrong."""
        self.native.check_invariants()
