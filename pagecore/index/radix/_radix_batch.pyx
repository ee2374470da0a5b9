"""Calls of the prefix tree for all sequences of a step."""

from libc.stdint cimport int32_t
from libcpp.vector cimport vector

from pagecore.index.radix._radix_core cimport RadixCore, Receipt, as_receipt
from pagecore.index.radix._radix_native cimport NativeBatch, NativeMatch, Offers
from pagecore.index.radix._radix_query cimport Insertion, Offer, Prefix, RetentionHint, read_hint
from pagecore.index.radix._radix_values cimport Inserted

from collections.abc import Mapping

from pagecore.errors import DoubleFree, ShapeError, UnsupportedDtype


cdef list read_prefixes(RadixCore tree, object prefixes, object namespaces, object spans, object max_tokens):
    cdef list listed = as_list(prefixes, "prefixes")
    cdef list columns = []
    cdef list read = []
    for name, values in (("namespaces", namespaces), ("spans", spans), ("max_tokens", max_tokens)):
        values = [None] * len(listed) if values is None else as_list(values, name)
        if len(values) != len(listed):
            raise ShapeError(f"expected {len(listed)} {name}, one for each prefix, got {len(values)}")
        columns.append(values)
    for tokens, namespace, marked, most in zip(listed, *columns, strict=True):
        read.append(tree._prefix(tokens, namespace, marked, most))
    return read


cdef list match_each(RadixCore tree, list prefixes):
    cdef list matches = []
    for prefix in prefixes:
        matches.append(tree._match(<Prefix> prefix))
    return matches


cdef list lock_each(RadixCore tree, list prefixes, double now):
    cdef vector[NativeMatch] found
    cdef Py_ssize_t i
    cdef list receipts = []
    for prefix in prefixes:
        receipts.append(tree._new_receipt(<Prefix> prefix))
    found.resize(len(receipts))
    for i in range(len(receipts)):
        tree._find(<Prefix> prefixes[i], &found[i])
        tree._fill((<Receipt> receipts[i]).match, found[i])
    tree._reserve_locks(len(receipts))
    for i in range(len(receipts)):
        tree._lock(found[i], <Receipt> receipts[i], now)
    tree.advance_raw(now)  # also for an empty list
    return receipts


cdef int release_each(RadixCore tree, object receipts, object time) except -1:
    cdef RetentionHint hint
    cdef double now = 0
    cdef list given = as_list(receipts, "receipts")
    read_hint(&hint, &now, tree.policy, time, None, None, None)
    for each in given:
        as_receipt(each)
    num_different = len(set(map(id, given)))
    for each in given:
        tree._check_receipt(<Receipt> each)
    if num_different < len(given):
        raise DoubleFree("a receipt is in the list twice; release each receipt once")
    tree.advance_raw(now)  # also for an empty list
    for each in given:
        tree._unlock(<Receipt> each, tree.every_component, hint, now)
    tree._forget_dead()
    return 0


cdef list insert_each(RadixCore tree, object entries, object time):
    cdef Insertion insertion
    cdef NativeBatch batch
    cdef vector[Offer] offers
    cdef int32_t space
    cdef Py_ssize_t i
    cdef list checked = []
    cdef list done = []
    for each in as_list(entries, "entries"):
        if not isinstance(each, Mapping):
            raise UnsupportedDtype(f"expected a dict of insert's arguments, got {type(each).__name__}")
        checked.append(tree._insertion(time, **dict(each)))
    for _ in range(len(checked)):
        done.append(Inserted.__new__(Inserted))
    offers.resize(len(checked))
    for i in range(len(checked)):
        insertion = <Insertion> checked[i]
        insertion.fill(&offers[i])
        if insertion.receipt is not None:
            tree._check_receipt(<Receipt> insertion.receipt)
    try:
        for i in range(len(checked)):
            insertion = <Insertion> checked[i]
            insertion.prefix.space = tree._space(insertion.prefix.key)
            offers[i].query.space = insertion.prefix.space
        tree._prepare_all(Offers(offers.data(), offers.size()), batch)
        for i in range(len(checked)):  # nothing fails from here on
            insertion = <Insertion> checked[i]
            tree._insert_prepared(offers[i], <Receipt> insertion.receipt, batch, i, <Inserted> done[i])
    finally:
        for i in range(len(checked)):
            space = (<Insertion> checked[i]).prefix.space
            if space > 0:
                tree.drop_space_raw(space)
        tree._forget_dead()
    for i in range(len(checked)):
        insertion = <Insertion> checked[i]
        if insertion.receipt is not None and (<Inserted> done[i]).num_tokens > 0:
            (<Receipt> insertion.receipt).key = insertion.prefix.key
    return done


cdef list as_list(object values, str name):
    try:
        return list(values)
    except TypeError:
        raise ShapeError(f"{name} is {type(values).__name__}; give a list") from None
