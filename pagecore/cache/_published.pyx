"""Rows of the block tables beside paths of the prefix cache, without an array for either."""

from libc.stdint cimport int32_t, uint64_t
from libcpp.span cimport span

from pagecore.cache._sequence cimport Sequence, num_whole
from pagecore.index._block_pool cimport BlockPool
from pagecore.index._block_tables cimport BlockTables
from pagecore.index._radix_tree cimport RadixTree, Receipt


cdef class Rows:
    """What the tree is offered, lane by lane: the rows of `tables` in the groups that its lanes stand for."""

    def __cinit__(self, RadixTree tree not None, BlockTables tables not None, list groups not None):
        self.tree = tree
        self.tables = tables
        self.groups = groups
        self.pools = tuple([tables.pools[group] for group in groups])
        self.lanes.resize(len(groups))
        self.met.resize(len(groups))
        self.meetings.resize(len(groups))

    cdef const int32_t* _blocks(self, Sequence sequence, size_t lane):
        return self.tables.row_raw(sequence.row, self.groups[lane]).data()

    def num_whole(self, Sequence sequence not None):
        """Leading blocks of a sequence that are full of computed tokens whose ids are known."""
        return num_whole(sequence, <int32_t> self.tree.block_size)

    def num_unshared(self, Sequence sequence not None, int32_t first, int32_t last):
        """How many blocks from `first` on, up to `last`, come before one that another row or the tree holds too."""
        cdef size_t lane
        cdef size_t count = <size_t> max(0, last - first)
        for lane in range(self.groups.size()):
            count = (<BlockPool> self.pools[lane]).num_unshared_raw(self._blocks(sequence, lane) + first, count)
        return count

    def extend(self, Sequence sequence not None, Receipt receipt not None, int32_t num_blocks):
        """Let the tree have the first blocks of a row, with a reference to each that it takes.

        The receipt, which holds what the sequence has published, moves to their end. Returns whether the tree keeps
        blocks of others for some of them.
        """
        cdef size_t lane
        cdef bint is_doubled = False
        for lane in range(self.groups.size()):
            self.lanes[lane] = self._blocks(sequence, lane)
        self.tree.extend_raw(receipt, sequence.ids, num_blocks * self.tree.block_size, self.lanes)
        for lane in range(self.groups.size()):
            (<BlockPool> self.pools[lane]).share_raw(
                self.tree.inserted.taken[lane].data(), self.tree.inserted.taken[lane].size()
            )
            is_doubled = is_doubled or self.tree.inserted.duplicates[lane].size() > 0
        return is_doubled

    def search(self):
        """Begin a search by `find_unused`, which meets each block once."""
        cdef size_t lane
        cdef int32_t block
        for lane in range(self.met.size()):
            for block in self.meetings[lane]:
                self.met[lane][block >> 6] = 0
            self.meetings[lane].clear()
            self.met[lane].resize((<size_t> (<BlockPool> self.pools[lane]).num_blocks >> 6) + 1)

    def find_unused(self, Receipt receipt not None, int32_t lane, int32_t first, int32_t last, int32_t end):
        """Where a path of `end` blocks has, from `first` up to `last`, blocks that nobody but the tree holds.

        Returns
        -------
        list of int
            Their places.
        """
        cdef int32_t place, block
        cdef uint64_t bit
        if first >= last:
            return []
        self.ids.resize(end - first)
        self.places.clear()
        self.tree.copy_tail_raw(receipt, lane, span[int32_t](self.ids.data(), self.ids.size()))
        (<BlockPool> self.pools[lane]).find_held_once_raw(self.ids.data(), <size_t> (last - first), self.places)
        found = []
        for place in self.places:
            block = self.ids[place]
            bit = (<uint64_t> 1) << (block & 63)
            if self.met[lane][block >> 6] & bit == 0:
                self.met[lane][block >> 6] |= bit
                self.meetings[lane].push_back(block)
                found.append(first + place)
        return found
