"""The blocks of sequences, or of encoder outputs, that move between a cache and one of its swap spaces."""

from libc.stdint cimport INT32_MAX, int32_t
from libcpp.algorithm cimport lower_bound, sort, unique

from pagecore.cache.prefix._prefix cimport PrefixCache, num_complete, publish_one
from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.cache.state._state cimport StoredBlocks, copy_vector
from pagecore.index._integers cimport new_int32

from pagecore.ops import transfer_blocks


cdef class Transfer:
    """Sequences that move together between one space and the cache: their blocks before and after.

    A block that several of the sequences share is moved once.

    Parameters
    ----------
    space : SwapSpace
    sequences : list of Sequence
    pools : tuple of BlockPool
        Pools of the new blocks, one for each group.
    """

    def __cinit__(self, space, list sequences not None, tuple pools not None):
        self.space = space
        self.sequences = sequences
        self.arriving = []
        for _ in sequences:
            self.arriving.append(StoredBlocks(pools))
        self.lease = StoredBlocks(pools)

    cdef int plan(self) except -1:
        """List the distinct blocks of `old`, and allocate all memory that the new blocks need."""
        cdef size_t group, i
        cdef int32_t* data = NULL
        cdef size_t num_groups = len(self.lease.pools)
        cdef int32_t block
        self.distinct.resize(num_groups)
        self.published.resize(self.old.size())
        for i in range(self.old.size()):
            (<StoredBlocks>self.arriving[i]).reserve(self.old[i])
            for group in range(num_groups):
                for block in self.old[i][group]:
                    if block != 0:
                        self.distinct[group].push_back(block)
        self.pairs = []
        self.least.resize(num_groups)
        for group in range(num_groups):
            sort(self.distinct[group].begin(), self.distinct[group].end())
            self.distinct[group].erase(
                unique(self.distinct[group].begin(), self.distinct[group].end()), self.distinct[group].end()
            )
            self.least[group].assign(self.distinct[group].size(), INT32_MAX)
            array = new_int32(<Py_ssize_t>(2 * self.distinct[group].size()), &data)
            self.pair_data.push_back(data)
            self.pairs.append(array.reshape(-1, 2))
        self.lease.reserve(self.distinct)
        return 0

    def needed(self):
        """Return the number of new blocks that each group needs."""
        cdef size_t group
        counts = []
        for group in range(self.distinct.size()):
            counts.append(self.distinct[group].size())
        return counts

    cdef bint take(self) noexcept:
        """Take the new blocks and fill `pairs` and `arriving`; return False, with nothing taken, if some are short."""
        cdef size_t group, i, k, place
        cdef StoredBlocks arriving
        if not self.lease.allocate():
            return False
        for group in range(self.distinct.size()):
            for k in range(self.distinct[group].size()):
                self.pair_data[group][2 * k] = self.distinct[group][k]
                self.pair_data[group][2 * k + 1] = self.lease.blocks[group][k]
            for i in range(self.old.size()):
                arriving = <StoredBlocks>self.arriving[i]
                for k in range(arriving.blocks[group].size()):
                    if self.old[i][group][k] != 0:
                        place = self.index_of(group, self.old[i][group][k])
                        arriving.blocks[group][k] = self.lease.blocks[group][place]
        return True

    cdef int copy(self, planes) except -1:
        """Copy the bytes of the blocks; `planes` is the stream, and (group, sources, targets) of each plane."""
        stream, moved = planes
        try:
            for group, sources, targets in moved:
                transfer_blocks(sources, targets, self.pairs[group], stream=stream)
        finally:
            if stream is not None:  # also after some copies of a call that fails
                self.space.note_use()
        return 0

    cdef void publish(self, PrefixCache prefix) noexcept:
        """Publish the blocks of the sequences, which are in rows now.

        No other row holds the new blocks. One that several of the sequences hold is published if all of them publish
        it: otherwise a row would have a block of the tree that its receipt does not cover.
        """
        cdef size_t i
        self.count_published(prefix)
        for i in range(self.old.size()):
            publish_one(prefix, <Sequence>self.sequences[i], self.published[i])
        for i in range(self.old.size()):
            self.cover_shared(prefix, i)

    cdef void cover_shared(self, PrefixCache prefix, size_t index) noexcept:
        """Publish the blocks that another sequence has published if memory was short for all of a sequence's.

        The tree has these blocks, so that it takes only nodes for them, which `SwapIn.reserve` has reserved.
        """
        cdef Sequence sequence = <Sequence>self.sequences[index]
        cdef int32_t limit = sequence.hold.publish_limit
        cdef int32_t shared = 0, common
        cdef int32_t namespace_number = -1
        cdef size_t other
        if sequence.hold.published >= self.published[index]:
            return
        for other in range(self.old.size()):
            if other != index and (<Sequence>self.sequences[other]).hold.published != INT32_MAX:
                common = self.num_common(prefix, index, other)
                if common > shared:
                    shared = common
                    namespace_number = (<Sequence>self.sequences[other]).hold.namespace_number
        if shared > sequence.hold.published:
            if sequence.hold.namespace_number < 0:  # given up when it had published nothing
                sequence.hold.namespace_number = namespace_number
            sequence.hold.publish_limit = min(limit, shared)
            publish_one(prefix, sequence, shared)
            sequence.hold.publish_limit = limit

    cdef int32_t num_common(self, PrefixCache prefix, size_t index, size_t other) noexcept:
        """Return the leading blocks that another sequence has published, and that two sequences share."""
        cdef int32_t count = min(self.published[index], (<Sequence>self.sequences[other]).hold.published)
        cdef int32_t place
        cdef size_t group
        for place in range(count):
            for group in range(<size_t>prefix.num_lanes):
                if self.old[index][group][place] != self.old[other][group][place]:
                    return place
        return count

    cdef void count_published(self, PrefixCache prefix) noexcept:
        """Write the number of leading blocks of each sequence whose holders all publish them to `published`.

        A sequence that publishes fewer lowers the limits of all of its blocks from there on, and of their holders: with
        windows, those need not have the block that limits it. Repeat until nothing changes.
        """
        cdef Sequence sequence
        cdef size_t i
        cdef int32_t count
        cdef bint has_changed = True
        for i in range(self.old.size()):
            sequence = <Sequence>self.sequences[i]
            self.published[i] = 0 if sequence.hold.published == INT32_MAX else num_complete(prefix, sequence)
            self.lower_limits(prefix, i)
        while has_changed:
            has_changed = False
            for i in range(self.old.size()):
                count = self.num_shared(prefix, i)
                if count < self.published[i]:
                    self.published[i] = count
                    self.lower_limits(prefix, i)
                    has_changed = True

    cdef void lower_limits(self, PrefixCache prefix, size_t index) noexcept:
        """Lower `least` of the blocks of a sequence to the number of blocks that it publishes."""
        cdef int32_t block
        cdef int32_t* least
        cdef size_t group, k
        for group in range(<size_t>prefix.num_lanes):
            for k in range(self.old[index][group].size()):  # without an iterator, which copies the vector
                block = self.old[index][group][k]
                if block != 0:
                    least = &self.least[group][self.index_of(group, block)]
                    least[0] = min(least[0], self.published[index])

    cdef int32_t num_shared(self, PrefixCache prefix, size_t index) noexcept:
        """Return the number of leading blocks of a sequence, up to `published`, that all of their holders publish."""
        cdef int32_t block, place, most = self.published[index]
        cdef size_t group
        for group in range(<size_t>prefix.num_lanes):
            for place in range(min(most, <int32_t>self.old[index][group].size())):
                block = self.old[index][group][place]
                if block != 0 and self.least[group][self.index_of(group, block)] <= place:
                    most = place
                    break
        return most

    cdef size_t index_of(self, size_t group, int32_t block) noexcept:
        return <size_t>(
            lower_bound(self.distinct[group].begin(), self.distinct[group].end(), block) - self.distinct[group].begin()
        )


cdef list plan_transfers(list moving, list spaces, list stored, tuple pools):
    cdef Transfer transfer
    cdef size_t i
    cdef dict by_space = {}
    for number in range(len(moving)):
        by_space.setdefault(id(spaces[number]), []).append(number)
    transfers = []
    for numbers in by_space.values():
        some = []
        for number in numbers:
            some.append(moving[number])
        transfer = Transfer(spaces[numbers[0]], some, pools)
        transfer.old.resize(len(some))
        for i in range(transfer.old.size()):
            copy_vector(transfer.old[i], (<StoredBlocks>stored[numbers[i]]).blocks)
        transfer.plan()
        transfers.append(transfer)
    return transfers


cdef list needed_by(list transfers, size_t num_groups):
    cdef size_t group, count
    needed = []
    for group in range(num_groups):
        count = 0
        for each in transfers:
            count += (<Transfer>each).distinct[group].size()
        needed.append(count)
    return needed
