"""Acceptance of manifests: an importer refuses those that are not of its sequence, transport, model or namespace."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

from pagecore.cache.lifecycle._lifecycle import namespace_digest
from pagecore.errors import InvalidSequence, ShapeError, UnsupportedOption
from pagecore.storage.checks import as_float, shown
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.offers import LEASE_SECONDS_MAX
from pagecore.tiers.handover.transport import Transport

OTHER_SEQUENCES = "the manifests are of different sequences; pass those of one sequence's ranks"
DEADLINE_SECONDS_MAX = 7 * 24 * 3600.0


def decoded(given: object) -> list[Manifest]:
    """Return the manifests that a caller passed: one, or those of several ranks, encoded or not."""
    listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not listed:
        raise ShapeError("the list of manifests is empty; pass one, or those of all ranks of the exporter")
    return [each if isinstance(each, Manifest) else Manifest.decode(each) for each in listed]


def deadline_at(deadline: float) -> int:
    """Return the time of a deadline, in nanoseconds of `time.monotonic_ns`."""
    seconds = as_float("deadline", deadline)
    if not 0 < seconds <= DEADLINE_SECONDS_MAX:
        raise ShapeError(f"deadline is {seconds} seconds; use more than 0 and at most {DEADLINE_SECONDS_MAX:.0f}")
    return time.monotonic_ns() + int(seconds * 1e9)


def lease_seconds(lease: float) -> float:
    """Return the seconds of a lease."""
    seconds = as_float("lease", lease)
    if not 0 < seconds <= LEASE_SECONDS_MAX:
        raise ShapeError(f"lease is {seconds} seconds; use more than 0 and at most {LEASE_SECONDS_MAX:.0f}")
    return seconds


def check_transport(transport: object) -> None:
    """Raise UnsupportedOption for an object that is not a transport."""
    if not isinstance(transport, Transport):
        raise UnsupportedOption(
            f"transport is {shown(transport)}; expected a transport, such as pagecore.tiers.SocketTransport"
        )


def check_of_transport(manifests: list[Manifest], transport: Transport) -> None:
    """Raise UnsupportedOption unless manifests are of this transport."""
    check_transport(transport)
    for manifest in manifests:
        if manifest.transport != transport.name:
            raise UnsupportedOption(
                f"the manifest is of transport {manifest.transport!r} and {transport!r} is {transport.name!r}; use the "
                "same kind on both sides"
            )


def check_manifests(manifests: list[Manifest], transport: Transport, model: str, namespace: Hashable) -> None:
    """Raise an error unless manifests are of one sequence, and of this transport, model and namespace."""
    check_of_transport(manifests, transport)
    first = manifests[0]
    for manifest in manifests:
        manifest.check()
        if model and manifest.model and manifest.model != model:
            raise UnsupportedOption(
                f"the manifest is of model {shown(manifest.model)}, and this cache serves {shown(model)}; import it "
                "into a cache of its own model"
            )
        if _identity(manifest) != _identity(first):
            raise UnsupportedOption(OTHER_SEQUENCES)
    own = namespace_digest(namespace)
    if None not in (first.namespace, own) and first.namespace != own:
        raise InvalidSequence(
            f"namespace is {shown(namespace)}, which is not that of the exported sequence; pass the same namespace and "
            "cross_digest"
        )


def _identity(manifest: Manifest) -> tuple[object, ...]:
    return manifest.ids, manifest.num_computed, manifest.namespace


def encoder_tokens(manifests: list[Manifest]) -> tuple[int | None, bool]:
    """Return the encoder tokens of a sequence, and whether exporters have their keys and values.

    Stages without cross attention know of neither. Raise UnsupportedOption if the others disagree.
    """
    found = {(manifest.cross, manifest.has_cross) for manifest in manifests if manifest.geometry.is_crossed}
    if len(found) > 1:
        raise UnsupportedOption(OTHER_SEQUENCES)
    return found.pop() if found else (None, False)


def sealed_tokens(manifests: list[Manifest]) -> int:
    """Return the tokens of a sequence in sealed blocks; 0 if no exporter has such layers.

    Stages without them count none. Raise UnsupportedOption if the others disagree.
    """
    found = {manifest.sealed for manifest in manifests if manifest.geometry.is_sealed}
    if len(found) > 1:
        raise UnsupportedOption(
            f"the exporters have sealed {' and '.join(map(str, sorted(found)))} tokens of the sequence; export it from "
            "all ranks after the same step"
        )
    return found.pop() if found else 0


def check_spans(block_size: int, manifest: Manifest, own: bytes | None) -> None:
    """Raise InvalidSequence if the spans differ from the exporter's; blocks of another size are not compared."""
    known = manifest.spans is not None and own is not None and block_size == manifest.geometry.block_size
    if known and manifest.spans != own:
        raise InvalidSequence("spans are not those of the exported sequence; pass the same spans and digests")
