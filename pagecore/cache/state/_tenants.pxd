from libc.stdint cimport int32_t, int64_t

from pagecore.cache.sequences._sequence cimport Sequence
from pagecore.index.tables._block_tables cimport BlockTables
from pagecore.index.tables._block_tables_native cimport BlockCopy
from pagecore.native.std cimport vector


cdef class Tenants:
    cdef BlockTables tables
    cdef int32_t block_size
    cdef vector[vector[int64_t]] last       # of each group and block: the tenant whose values it may hold, or a mark
    cdef readonly dict numbers              # number of a tenant by the key of its namespace
    cdef int64_t next_number
    cdef size_t limit                       # number of namespaces at which those without a block are forgotten
    cdef readonly int64_t num_scrubbed_blocks

    # Returns the tenant's number; `key` is the result of `key_of`, or None for sequences without a namespace.
    cdef int64_t number_of(self, object key) except -1
    # Before a step takes blocks: lists the number of blocks from the next token's on, and their ids, by row and group.
    cdef int note_held(self, list sequences, vector[int32_t]& held) except -1
    # After it took them: lists the blocks to be zeroed, as the targets of pairs, and marks targets of copies doubtful.
    cdef int list_stale(
        self, list sequences, const vector[int32_t]& held, const vector[vector[BlockCopy]]& copies,
        vector[vector[BlockCopy]]& stale
    ) except -1
    # After the blocks are zeroed and copied: marks the blocks from each row's next token on with the row's tenant.
    cdef void settle(self, list sequences, const vector[vector[BlockCopy]]& stale) noexcept
    # Marks blocks that are about to be overwritten as a whole as doubtful.
    cdef void doubt(self, const vector[vector[int32_t]]& blocks) noexcept
    # Marks the blocks of a row that were all overwritten as a whole with its tenant.
    cdef void own_row(self, int32_t row, int64_t tenant) noexcept
    cdef void mark(self, int32_t row, size_t first, int64_t tenant) noexcept
    cdef void mark_targets(self, const vector[vector[BlockCopy]]& copies) noexcept
    cdef bint is_clean_for(self, int64_t tenant, int64_t last) noexcept
    cdef void doubt_copied(self, const vector[vector[BlockCopy]]& copies) noexcept
    cdef int compare_rows(
        self, list sequences, const vector[int32_t]& held, vector[vector[BlockCopy]]& stale
    ) except -1
    cdef size_t first_block(self, Sequence sequence) noexcept
    cdef int forget_unused(self) except -1
