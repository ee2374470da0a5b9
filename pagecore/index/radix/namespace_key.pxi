"""Keys of namespaces.

A namespace is any hashable value. Two namespaces are the same iff they are equal in value and type, at every depth: 1,
True and 1.0 are three namespaces, and so are (1,), (True,) and (1.0,). Python's ``==`` ignores types, and it runs code
of the caller, which could call the tree in the middle of a lookup. Therefore each namespace is packed into bytes once:

    ("tenant", 7)   ->   ( 2 parts | s "tenant" | i 7 )

Tuples, named tuples, frozensets and the fields of data classes are packed part by part. An object of any other type is
interned: equal objects share a number, and the number is packed. `hash` and ``==`` of such an object run only while it
is packed.
"""

from cpython.bytes cimport PyBytes_CheckExact
from cpython.float cimport PyFloat_CheckExact
from cpython.long cimport PyLong_CheckExact
from cpython.unicode cimport PyUnicode_CheckExact
from libc.stdint cimport int64_t

from pagecore.index._sealed cimport seal
from pagecore.index.radix._native cimport hash_bytes

import dataclasses
import struct
import types
import weakref
from functools import partial

from pagecore.errors import UnsupportedDtype

MAX_DEPTH = 16

# These compare by their contents, whose types are not accessible.
OPAQUE_CONTAINERS = (slice, weakref.ref, types.GenericAlias, types.MappingProxyType)

cdef object double = struct.Struct("<d").pack

# (id of the type, hash) -> weak references to interned objects. Lists are short: their entries have equal hashes.
cdef dict interned = {}
cdef int64_t num_interned = 0  # total; never decreases


cdef class Interned:
    """Representative of all objects of one type that are equal."""
    cdef object value
    cdef int64_t number
    cdef object __weakref__


seal(Interned)


cdef object key_of(object namespace):
    cdef list held
    if PyUnicode_CheckExact(namespace):
        return namespace
    held = []
    packed = pack(namespace, MAX_DEPTH, held)
    held.sort(key=number)  # the iteration order of a frozenset varies
    return (packed, *held)  # the objects keep their numbers as long as the key lives


def number(Interned one):
    return one.number


cdef bytes pack(object value, int depth, list held):
    if value is None:
        return b"N"
    if PyUnicode_CheckExact(value):
        return sized(b"s", (<str> value).encode("utf-8", "surrogatepass"))
    if PyBytes_CheckExact(value):
        return sized(b"b", value)
    if PyLong_CheckExact(value):
        return sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if value is True or value is False:
        return b"T" if value is True else b"F"
    if PyFloat_CheckExact(value):
        check_equal_to_itself(value)
        return b"f" + double(value + 0.0)  # -0.0 equals 0.0
    return pack_object(value, depth, held)


cdef bytes sized(bytes tag, bytes content):
    return b"%b%d:%b" % (tag, len(content), content)


cdef bytes pack_object(object value, int depth, list held):
    kind = type(value)
    if kind is tuple:
        return b"(" + joined(pack_parts(value, depth, held))
    if inherits_equality(kind, tuple):
        return b"t" + number_of(kind, held) + joined(pack_parts(tuple.__iter__(value), depth, held))
    if inherits_equality(kind, frozenset):
        return b"{" + number_of(kind, held) + joined(sorted(pack_parts(frozenset.__iter__(value), depth, held)))
    if issubclass(kind, OPAQUE_CONTAINERS):
        raise UnsupportedDtype(f"the namespace contains a {kind.__name__}, whose parts cannot be compared by type; "
                               "use tuples of strings, bytes and ints")
    packed = b"o" + number_of(value, held)
    if getattr(kind, "__dataclass_params__", None) is not None and kind.__dataclass_params__.eq:
        fields = []
        for field in dataclasses.fields(kind):
            if field.compare and field.hash is not False:
                fields.append(getattr(value, field.name))
        packed += joined(pack_parts(fields, depth, held))
    return packed


cdef list pack_parts(object parts, int depth, list held):
    if depth == 0:
        raise UnsupportedDtype(f"the namespace is nested more than {MAX_DEPTH} levels deep; use a flatter one")
    cdef list packed = []  # no comprehension: if memory runs out, Cython's frees an element twice
    for part in parts:
        packed.append(pack(part, depth - 1, held))
    return packed


cdef bytes joined(list parts):
    return b"%d:" % len(parts) + b"".join(parts)


cdef bint inherits_equality(object kind, object base) except -1:
    """Return True for `base` and subclasses that keep its equality, such as named tuples."""
    return issubclass(kind, base) and kind.__eq__ is base.__eq__ and kind.__hash__ is base.__hash__


cdef bytes number_of(object value, list held):
    cdef Interned one = find_type(value) if issubclass(type(value), type) else find(value)
    held.append(one)
    return b"%d:" % one.number


cdef Interned find_type(object kind):
    """Return the interned entry of a type; types are compared by identity, ignoring their metaclass."""
    spot = (id(type), id(kind))
    for reference in interned.get(spot, ()):
        one = reference()
        if one is not None:
            return one
    return intern(spot, kind)


cdef Interned find(object value):
    cdef int64_t seen
    spot = (id(type(value)), hash_of(value))
    check_equal_to_itself(value)
    while True:
        seen = num_interned
        for reference in tuple(interned.get(spot, ())):
            one = reference()
            if one is not None and is_equal((<Interned> one).value, value):
                return one
        if seen == num_interned:  # comparing has interned nothing
            return intern(spot, value)


cdef Interned intern(object spot, object value):
    global num_interned
    cdef Interned one = Interned.__new__(Interned)
    one.value = value
    reference = weakref.ref(one, partial(forget, spot))
    interned.setdefault(spot, []).append(reference)
    num_interned += 1
    one.number = num_interned
    return one


def forget(spot, reference):
    """Remove the weak reference to an interned object that is gone."""
    references = interned.get(spot)
    if references is None:
        return
    for i in range(len(references)):
        if references[i] is reference:
            del references[i]
            break
    if not references:
        del interned[spot]


cdef object hash_of(object value):
    try:
        return hash(value)
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedDtype(f"the namespace contains a {type(value).__name__}, which is not hashable ({error}); use "
                               "tuples of strings, bytes and ints") from None


cdef bint is_equal(object one, object other) except -1:
    try:
        return one is other or bool(one == other)
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedDtype(f"the namespace contains a {type(other).__name__}, which cannot be compared ({error}); "
                               "use tuples of strings, bytes and ints") from None


cdef int check_equal_to_itself(object value) except -1:
    try:
        differs = bool(value != value)
    except MemoryError:
        raise
    except Exception:
        differs = True
    if differs:
        raise UnsupportedDtype(f"the namespace contains {value!r}, which is not equal to itself; use another value")
    return 0


cdef uint64_t root_of(object key) except? 0:
    cdef bytes packed
    if key is None:
        return 0
    if isinstance(key, str):
        packed = (<str> key).encode("utf-8", "surrogatepass")
        return hash_bytes(packed, len(packed), 1)
    packed = key[0]
    return hash_bytes(packed, len(packed), 2)
