from pagecore.cache.prefix._cache cimport PrefixCache
from pagecore.cache.sequences._sequence cimport Sequence

# Number the namespace of each sequence that may publish its first block. The numbers are valid until code of the caller
# may run or the lock is released: publish before that.
cdef int number_namespaces(PrefixCache prefix, list sequences) except -1

# Offer the full, computed and known blocks of sequences to the tree, and extend their receipts over them; cannot fail.
# Blocks that other rows share are published only with `may_share`: the caller then publishes those rows too.
# Call `number_namespaces` before.
cdef void publish(PrefixCache prefix, list sequences, bint may_share) noexcept
cdef void publish_one(PrefixCache prefix, Sequence sequence, bint may_share) noexcept

# Give the published blocks of a sequence that is being removed the values of its options: they may all come from other
# sequences, and their time to live begins now.
cdef void renew_values(PrefixCache prefix, Sequence sequence) noexcept
