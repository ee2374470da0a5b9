"""The journal of a prefix tree, its changes as Python objects, and the content hashes that name blocks."""

from libc.stdint cimport int64_t, uint64_t

from pagecore.index._integers cimport as_int64, own
from pagecore.index.radix._native cimport Digest, Marks, hash_block
from pagecore.native.std cimport vector

import numpy as np

from pagecore.errors import ShapeError
from pagecore.index.radix.changes import Change


cdef object digest_of(const Digest& digest):
    cdef bytes content = (<const char*> (<Digest*> &digest).bytes.data())[:32]
    return content[:digest.kind] if digest.kind > 0 else int.from_bytes(content, "little", signed=True)


cdef class ChangeLog:
    """Changes of a tree between two calls of `RadixTree.take_changes`; reading it does not use the tree.

    Attributes
    ----------
    has_overflowed : bool
        The journal was full, so that changes were lost; list the contents of the tree instead.
    """

    @property
    def has_overflowed(self):
        """Changes were lost."""
        return self.native.has_overflowed

    def __len__(self):
        return <Py_ssize_t> self.native.records.size()

    def to_list(self):
        """Return the changes in order, as a list of Change."""
        cdef size_t record, i
        cdef size_t hash_at = 0, token_at = 0, mark_at = 0
        changes = []
        for record in range(self.native.records.size()):
            one = self.native.records[record]
            hashes = []
            for i in range(<size_t> one.count):
                hashes.append(self.native.hashes[hash_at + i])
            hash_at += <size_t> one.count
            if not one.is_stored:
                changes.append(Change(False, one.component, hashes))
                continue
            tokens = []
            for i in range(<size_t> (one.count * self.block_size)):
                tokens.append(self.native.tokens[token_at + i])
            token_at += <size_t> (one.count * self.block_size)
            spans = []
            for i in range(<size_t> one.num_marks):
                mark = self.native.marks[mark_at + i]
                spans.append((mark.block, mark.start, mark.end, digest_of(mark.digest)))
            mark_at += <size_t> one.num_marks
            key = None if one.root == 0 else self.keys.get(one.root)
            namespace = key if key is None or isinstance(key, str) else key[0]
            parent = None if one.first == 0 else one.parent
            changes.append(Change(True, one.component, hashes, one.first, parent, tokens, namespace, spans))
        return changes


cdef class RadixJournal(RadixInsertion):
    """Methods of the journal, off by default: every change of the tree, for readers outside of the process."""

    @property
    def has_journal(self):
        """The tree keeps a journal of its changes."""
        return self.native.has_journal()

    def start_journal(self, *, max_bytes=64 << 20):
        """Record every change from now on, for readers outside of the process.

        Each block gets a content hash (see `chain_hashes`), 8 bytes of memory that stay with the tree. What the tree
        holds already is not in the journal; see `list_contents`.

        Parameters
        ----------
        max_bytes : int
            Size of changes that are not taken. A journal that would grow beyond it drops them; `take_changes` then
            reports an overflow.

        Raises
        ------
        NotEnoughMemory
            The hashes do not fit in memory.
        ShapeError
            `max_bytes` is not positive.
        UnsupportedOption
            The tree has a journal.
        """
        cdef int64_t limit = as_int64(max_bytes, "max_bytes")
        cdef vector[uint64_t] roots
        if limit < 1:
            raise ShapeError(f"max_bytes is {max_bytes}; use 1 or more")
        root_keys = {}
        for key in self.space_keys:
            roots.push_back(root_of(key))
            root_keys[roots.back()] = key
        self.native.start_journal(<size_t> limit, roots)
        self.root_keys = root_keys
        self.most_root_keys = 2 * len(root_keys) + FEW_ROOTS

    def stop_journal(self):
        """Stop recording, and drop what was not taken."""
        self.native.stop_journal()
        self.root_keys = {}

    def take_changes(self):
        """Return the changes since the last call as a ChangeLog; the journal is empty then.

        The call moves memory and converts nothing. A tree without a journal has no changes.
        """
        cdef ChangeLog log = ChangeLog.__new__(ChangeLog)
        log.block_size = self.block_size
        log.keys = self.root_keys
        if len(self.root_keys) > 2 * len(self.spaces) + FEW_ROOTS:
            self._forget_roots()  # first, because it may fail; the log has the dictionary before
        self.native.take_changes(log.native)
        return log

    def list_contents(self):
        """Return everything that the tree holds as a ChangeLog of stored blocks, parents before their children.

        Raises
        ------
        UnsupportedOption
            The tree has no journal, and therefore no hashes.
        """
        cdef ChangeLog log = ChangeLog.__new__(ChangeLog)
        log.block_size = self.block_size
        log.keys = self.root_keys
        self.native.list_contents(log.native)
        return log


def chain_hashes(tokens, block_size, *, namespace=None, spans=None):
    """Return the content hash of each whole block of a sequence, as trees with a journal compute them.

    The hash of a block is ``xxh3_64(int32 tokens, seed=hash of the block before)``. The seed of the first block is 0,
    or a hash of the namespace. For each span that overlaps the block, the hash becomes ``xxh3_64(start, end, kind,
    digest, seed=hash)``, with positions relative to the block. Namespaces made of strings, bytes, numbers and tuples of
    them have the same hash in every process.

    Parameters
    ----------
    tokens : array_like of int
        [num_tokens].
    block_size : int
        Tokens in a block.
    namespace, spans
        As in `RadixTree.match`.

    Returns
    -------
    numpy.ndarray
        uint64 [num_tokens // block_size], new.

    Raises
    ------
    ShapeError, UnsupportedDtype
        As in `RadixTree.match`; or `block_size` is below 1.
    """
    cdef int64_t size = as_int64(block_size, "block_size")
    cdef int64_t block
    cdef uint64_t parent
    cdef Prefix prefix
    cdef Marks marks
    if not 1 <= size <= 1 << 20:
        raise ShapeError(f"block_size is {block_size}; use 1 to {1 << 20}")
    prefix = read_prefix(size, tokens, namespace, spans, None)
    own(prefix.tokens, 0)
    marks = Marks(prefix.marks.data(), prefix.marks.size())
    parent = root_of(prefix.key)
    hashes = np.empty(prefix.limit, np.uint64)
    cdef uint64_t[::1] out = hashes
    for block in range(prefix.limit):
        parent = hash_block(parent, prefix.tokens.data + block * size, size, marks, block)
        out[block] = parent
    return hashes
