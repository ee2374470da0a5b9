"""Import: pull an exported sequence into a cache."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Listed
from typing import Any

from pagecore.cache.lifecycle._lifecycle import content_identity, limit_publishing
from pagecore.cache.lifecycle.cross_request import cross_namespace, require_cross
from pagecore.cache.paged import PagedKVCache
from pagecore.cache.parts import parts_of
from pagecore.cache.prefix.retention import Priority, Spans, validate_spans
from pagecore.cache.sequences._sequences import Sequence
from pagecore.tiers.handover.acceptance import (
    check_manifests,
    check_spans,
    deadline_at,
    decoded,
    encoder_tokens,
    sealed_tokens,
)
from pagecore.tiers.handover.geometry import check_served, describe
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.matching import match_geometry
from pagecore.tiers.handover.plans import plan_import
from pagecore.tiers.handover.sequence_import import SequenceImport
from pagecore.tiers.handover.transport import Transport


def import_sequence(
    cache: PagedKVCache,
    manifest: Manifest | bytes | Listed[Manifest | bytes],
    *,
    transport: Transport,
    deadline: float = 30.0,
    id: object = None,
    namespace: Hashable = None,
    spans: Spans | None = None,
    max_tokens: int | None = None,
    priority: Priority | None = None,
    time_to_live: float | None = None,
    rank: float | None = None,
    cross_digest: bytes | int | None = None,
    model: str = "",
    num_kv_heads: int | None = None,
    first_layer: int | None = None,
) -> Sequence:
    """Pull an exported sequence into a cache, and return it when all its bytes have arrived and were verified.

    The cache reuses what its prefix cache has; only the other blocks are pulled. Blocks arrive with the holes of their
    windows, and states with the running state and the exporter's checkpoint, if a slot is free for it. Heads may be
    split over other numbers of ranks, and layers over other pipeline stages: pieces are cut at heads and layers. Blocks
    of another size are cut at tokens, except in groups with a window or with planes per block. The layouts of the pools
    may differ.

    Parameters
    ----------
    cache : PagedKVCache
        A cache of the exporter's model. On CUDA the bytes arrive in host memory, and are copied to the
        device in the order of the cache's stream.
    manifest : Manifest or bytes, or a list of them
        Several manifests are those of the ranks and stages that hold the heads and layers of this one together.
    transport : Transport
        Of the kind that the manifest names.
    deadline : float
        Seconds from now until the import fails.
    id, namespace, spans, max_tokens, priority, time_to_live, rank
        As for `PagedKVCache.add_sequence`. Pass the namespace and the spans of the exported sequence.
    cross_digest : bytes or int, optional
        As for `PagedKVCache.add_sequence`: that of the exported sequence. Encoder outputs that the cache has under it
        are not pulled.
    model : str
        Name and revision of the model; compared with that of the manifest if both are given.
    num_kv_heads : int, optional
        Key-value heads of the whole model; only needed where every rank of both sides has one head and the numbers of
        ranks differ.
    first_layer : int, optional
        For a cache that has the layers of a pipeline stage: the number of its first layer among the cache layers of the
        whole model.

    Returns
    -------
    Sequence
        Idle, with the known tokens of the exporter, of which the same number is computed.

    Raises
    ------
    UnsupportedOption, ShapeError
        A manifest that cannot be read, or of another version, model or geometry; a cache that is not served.
    InvalidSequence
        A namespace or spans other than the exporter's; an id in use.
    OutOfBlocks, OutOfRows
        The cache has no room.
    HandoverError
        LeaseExpired, PeerLost, DeadlineExceeded or CorruptTransfer. After every error the cache is as before, except
        that cached blocks may have been evicted to make room.
    """
    return start_import(
        cache,
        manifest,
        transport=transport,
        deadline=deadline,
        id=id,
        namespace=namespace,
        spans=spans,
        max_tokens=max_tokens,
        priority=priority,
        time_to_live=time_to_live,
        rank=rank,
        cross_digest=cross_digest,
        model=model,
        num_kv_heads=num_kv_heads,
        first_layer=first_layer,
    ).result()


def start_import(
    cache: PagedKVCache,
    manifest: Manifest | bytes | Listed[Manifest | bytes],
    *,
    transport: Transport,
    deadline: float = 30.0,
    id: object = None,
    namespace: Hashable = None,
    spans: Spans | None = None,
    max_tokens: int | None = None,
    priority: Priority | None = None,
    time_to_live: float | None = None,
    rank: float | None = None,
    cross_digest: bytes | int | None = None,
    model: str = "",
    num_kv_heads: int | None = None,
    first_layer: int | None = None,
) -> SequenceImport:
    """Begin to pull an exported sequence and return at once; arguments and errors are those of `import_sequence`.

    Rows and blocks are taken before the function returns, so that a lack of room is known at once. The sequence is in
    flight until `SequenceImport.poll` returns True: every operation but `remove` refuses it, and `remove` waits for
    the end of the pull.
    """
    parts = parts_of(cache)
    check_served(parts)
    spans = None if spans is None else validate_spans(spans)
    if cross_digest is not None:
        require_cross(parts)
    manifests = decoded(manifest)
    until = deadline_at(deadline)
    check_manifests(manifests, transport, model, cross_namespace(namespace, cross_digest))
    num_cross_tokens, has_cross = encoder_tokens(manifests)
    shares = match_geometry(describe(parts, first_layer), manifests, num_kv_heads)
    if parts.cross is None:  # a stage without cross attention
        num_cross_tokens, has_cross = None, False
    first = manifests[0]
    options: dict[str, Any] = {
        "id": id,
        "namespace": namespace,
        "spans": spans,
        "priority": priority,
        "time_to_live": time_to_live,
        "rank": rank,
        "cross_tokens": num_cross_tokens,
        "cross_digest": cross_digest,
    }
    sequence = _added(cache, first, has_cross, max_tokens, options)
    batch = sealed = None
    try:
        check_spans(parts_of(cache).block_size, first, content_identity(parts.state, sequence)[1])
        lacking = first.num_computed - sequence.num_computed_tokens
        if lacking > 0:
            limits = [each.publishable for each in manifests if each.publishable is not None]
            limit_publishing(parts.state, sequence, min(limits, default=None))
            sealed = sealed_tokens(manifests) if parts.seals_blocks else None
            batch = cache.prepare_arrival(sequence, lacking, num_sealed_tokens=sealed)
        plan = plan_import(parts, sequence, batch, manifests, shares, sealed, has_cross, until)
        return SequenceImport(cache, sequence, batch, plan, transport, (namespace, spans, cross_digest))
    except BaseException:
        if batch is not None:
            cache.abandon(batch)
        cache.remove(sequence)
        raise


def _added(
    cache: PagedKVCache, manifest: Manifest, has_cross: bool, max_tokens: int | None, options: dict[str, Any]
) -> Sequence:
    """Add the sequence; its cached prefix leaves a token to pull where encoder tokens are lacking."""
    sequence = cache.add_sequence(manifest.tokens, max_tokens=max_tokens, **options)
    lacks_cross = has_cross and not sequence.is_cross_written
    if lacks_cross and sequence.num_computed_tokens >= manifest.num_computed:
        cache.remove(sequence)
        sequence = cache.add_sequence(manifest.tokens, max_tokens=manifest.num_computed - 1, **options)
    return sequence
