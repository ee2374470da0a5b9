# A key of a namespace: equal for two namespaces iff they are equal, in type too, and made of built-in types alone, so
# that to hash and to compare keys runs no code of the caller. It keeps alive what it was made of.
cdef object key_of(object namespace)
