"""Sources of events: prefix trees, each of one medium, and the groups whose blocks they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pagecore.cache.parts import CacheParts
from pagecore.errors import UnsupportedOption
from pagecore.index import Change, RadixTree
from pagecore.storage import LatentSpec
from pagecore.storage.checks import shown
from pagecore.storage.specs.attended import attended_keys
from pagecore.tiers.events.wire import REMOVED, STORED, Event, encodable
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.ledger import Ledger
from pagecore.tiers.manager.tiers import Tiers


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Description of one group of layers in events.

    Attributes
    ----------
    group : int
        Number of the group in the cache; the states of a cache come after its last group.
    kind : str
        vLLM's name of the kind of layers: "full_attention", "sliding_window", "chunked_local_attention", "mamba", and
        "mla_attention" or "sliding_window_mla" for latents.
    window : int or None
        Tokens before the end of a prefix that a hit needs, plus one; of chunked layers, the chunk.
    """

    group: int
    kind: str
    window: int | None = None


class Changes(Protocol):
    """Changes of a journal."""

    @property
    def has_overflowed(self) -> bool:
        """Changes were lost."""

    def to_list(self) -> list[Change]:
        """Return the changes in order."""


class Journal(Protocol):
    """A prefix tree, or the ledger of a store."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components."""

    def start_journal(self, *, max_bytes: int = ...) -> None:
        """Record changes from now on."""

    def stop_journal(self) -> None:
        """Record nothing any more."""

    def take_changes(self) -> Changes:
        """Return the changes since the last call."""

    def list_contents(self) -> Changes:
        """Return everything that is held."""


@dataclass(frozen=True, slots=True)
class Source:
    """One tree, its medium, and the groups of each of its components."""

    tree: Journal
    medium: str
    groups: tuple[tuple[GroupKind, ...], ...]

    def events_of(self, changes: Iterable[Change]) -> list[Event]:
        """Return an event for each change and group, in order."""
        return [
            self._stored(change, group) if change.is_stored else self._removed(change, group)
            for change in changes
            for group in self.groups[change.component]
        ]

    def announcements(self) -> list[Event]:
        """Return a `BlockStored` without blocks for each group, so that readers know the groups that a hit needs."""
        none = Change(True, 0, [])
        return [self._stored(none, group) for groups in self.groups for group in groups]

    def _removed(self, change: Change, group: GroupKind) -> Event:
        return {"type": REMOVED, "block_hashes": change.hashes, "medium": self.medium, "group_idx": group.group}

    def _stored(self, change: Change, group: GroupKind) -> Event:
        event: Event = {
            "type": STORED,
            "block_hashes": change.hashes,
            "parent_block_hash": change.parent,
            "token_ids": change.tokens,
            "block_size": self.tree.block_size,
            "lora_id": None,
            "medium": self.medium,
            "lora_name": encodable(change.namespace) if isinstance(change.namespace, str) else None,
        }
        if change.spans or (change.namespace is not None and change.first == 0):
            event["extra_keys"] = extra_keys(change)
        event["group_idx"] = group.group
        event["kv_cache_spec_kind"] = group.kind
        if group.window is not None:
            event["kv_cache_spec_sliding_window"] = group.window
        return event


def extra_keys(change: Change) -> list[list[object] | None]:
    """Return what the hash of each block depends on in addition to its tokens.

    The first block of a prefix has its namespace; a block that a span overlaps has [digest, start, end] of the span.
    Digests that are integers are decimal strings, since they may need 256 bits.
    """
    keys: list[list[object]] = [[] for _ in change.hashes]
    if change.namespace is not None and change.first == 0:
        keys[0].append(encodable(change.namespace) if isinstance(change.namespace, str) else change.namespace)
    for block, start, end, digest in change.spans:
        keys[block].append([digest if isinstance(digest, bytes) else str(digest), start, end])
    return [each or None for each in keys]


def groups_of(parts: CacheParts) -> tuple[tuple[GroupKind, ...], ...]:
    """Return the groups of each component of the cache's tree, in the order of the components."""
    full, limited = [], []
    for number, group in enumerate(parts.token_groups):
        if group.is_tail:  # the newest tokens next to sealed blocks, which no prefix has
            continue
        keys = attended_keys(group.spec)
        is_latent = isinstance(group.spec, LatentSpec)
        if keys.chunk is not None:
            limited.append((GroupKind(number, "chunked_local_attention", keys.chunk),))
        elif keys.window is not None:
            kind = "sliding_window_mla" if is_latent else "sliding_window"
            # A hit needs a key of every window, also of a window of one token.
            limited.append((GroupKind(number, kind, max(2, keys.window + keys.lookahead)),))
        else:
            full.append(GroupKind(number, "mla_attention" if is_latent else "full_attention"))
    components = [tuple(full), *limited]
    if parts.state_specs:
        components.append((GroupKind(len(parts.token_groups), "mamba"),))
    return tuple(components)


def sources_of(parts: CacheParts, tiers: object, medium: str) -> list[Source]:
    """Return the cache's tree, and those of its tiers, as sources.

    Parameters
    ----------
    tiers : object
        None, a host tier ("CPU"), `Tiers` ("CPU" and the media of its stores), or pairs of a tree and a medium.
    medium : str
        Medium of the cache's own tree.
    """
    if parts.prefix is None:
        raise UnsupportedOption("the cache has prefix_cache=False and therefore no events; leave prefix_cache out")
    groups = groups_of(parts)
    pairs = [(parts.prefix.tree, medium), *_trees_of(tiers)]
    for tree, name in pairs:
        if not isinstance(tree, RadixTree | Ledger) or not isinstance(name, str):
            raise UnsupportedOption(f"tiers has {shown((tree, name))}; expected pairs of a RadixTree and a medium")
        if len(tree.components) != len(groups) or tree.block_size != parts.block_size:
            raise UnsupportedOption(
                f"the tree of medium {name} has components {tree.components} and blocks of {tree.block_size} tokens; "
                f"expected {parts.prefix.tree.components} and {parts.block_size}, as in the cache"
            )
    return [Source(tree, name, groups) for tree, name in pairs]


def _trees_of(tiers: object) -> list[tuple[Journal, str]]:
    if tiers is None:
        return []
    if isinstance(tiers, Tiers):
        return [(tiers.host.tree, "CPU"), *tiers.ledgers]
    if isinstance(tiers, HostTier):
        return [(tiers.tree, "CPU")]
    try:
        return [(tree, medium) for tree, medium in tiers]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise UnsupportedOption(
            f"tiers is {shown(tiers)}; expected a host tier, Tiers, or pairs of a RadixTree and a medium"
        ) from None
