from pagecore.index.radix._radix_core cimport RadixCore

# Calls of RadixTree for all sequences of a step: all succeed, or none does.
cdef list read_prefixes(RadixCore tree, object prefixes, object namespaces, object spans, object max_tokens)
cdef list match_each(RadixCore tree, list prefixes)
cdef list lock_each(RadixCore tree, list prefixes, double now)
cdef int release_each(RadixCore tree, object receipts, object time) except -1
cdef list insert_each(RadixCore tree, object entries, object time)
