"""Submission of a part of a batch to a store: the call for each kind of part."""

from __future__ import annotations

from pagecore.errors import UnsupportedOption
from pagecore.tiers.guard.batch import Kind, Part
from pagecore.tiers.store import BlockStore, EntryRemover, Pieces, PrefixKeeper


def submitted(store: BlockStore, part: Part, pieces: Pieces | None) -> int:
    """Hand a part to the store, with the memory of its payloads; return the ticket."""
    if part.kind is Kind.REMOVE:
        return remover_of(store).submit_remove(part.keys)
    if pieces is None:
        return store.submit_lookup(part.keys)
    if part.kind is Kind.LOAD:
        return store.submit_load(part.keys, pieces)
    if part.before is None:
        return store.submit_store(part.keys, pieces)
    return keeper_of(store).submit_store(part.keys, pieces, before=part.before)


def keeper_of(store: BlockStore) -> PrefixKeeper:
    """Return a store that keeps the order of a prefix; raise UnsupportedOption for another one."""
    if not (isinstance(store, PrefixKeeper) and store.keeps_prefixes):
        raise UnsupportedOption(f"{store.name} does not link entries; leave `before` out")
    return store


def remover_of(store: BlockStore) -> EntryRemover:
    """Return a store that deletes entries on request; raise UnsupportedOption for another one."""
    if not (isinstance(store, EntryRemover) and store.can_remove):
        raise UnsupportedOption(f"{store.name} deletes no entries on request; let it evict them")
    return store
