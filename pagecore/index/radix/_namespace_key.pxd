# The key of a namespace. Keys are equal iff the namespaces are equal in value and type. Keys consist of built-in types
# only, so that hashing and comparing them runs no code of the caller. A key keeps the objects of its namespace alive.
cdef object key_of(object namespace)
