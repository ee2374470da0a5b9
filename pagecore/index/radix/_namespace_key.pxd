from libc.stdint cimport uint64_t

cdef extern from "pagecore/index/radix/nodes/content_hash.hpp" namespace "pagecore::radix" nogil:
    uint64_t hash_bytes(const char* bytes, size_t size, uint64_t seed)

# The key of a namespace. Keys are equal iff the namespaces are equal in value and type. Keys consist of built-in types
# only, so that hashing and comparing them runs no code of the caller. A key keeps the objects of its namespace alive.
cdef object key_of(object namespace)

# The content hash of the namespace with a key; the hashes of its blocks begin with it.
cdef uint64_t root_of(object key) except? 0
