"""Leases of exports that importers end early or extend."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Listed

from pagecore.tiers.handover.acceptance import check_of_transport, deadline_at, decoded, lease_seconds
from pagecore.tiers.handover.errors import LeaseExpired
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.transport import Transport

# Seconds in which an exporter has to answer.
ANSWER_SECONDS = 2.0


def release_export(
    manifest: Manifest | bytes | Listed[Manifest | bytes], *, transport: Transport, deadline: float = ANSWER_SECONDS
) -> None:
    """Give an exported sequence up without importing it, so that its exporter gets its rows back before the lease ends.

    Each export counts one of its readers as served. An export that has ended already is left as it is.

    Parameters
    ----------
    manifest : Manifest or bytes, or a list of them
    transport : Transport
        Of the kind that the manifest names.
    deadline : float
        Seconds from now until the call fails.

    Raises
    ------
    UnsupportedOption, ShapeError
        A manifest that cannot be read, or of another transport.
    HandoverError
        PeerLost or DeadlineExceeded: the exporter does not answer. It gives the rows back when the lease ends.
    """
    manifests = decoded(manifest)
    until = deadline_at(deadline)
    check_of_transport(manifests, transport)
    for each in manifests:
        with contextlib.suppress(LeaseExpired):
            transport.change_lease(each, 0.0, until).run()


def extend_lease(
    manifest: Manifest | bytes | Listed[Manifest | bytes],
    *,
    transport: Transport,
    lease: float,
    deadline: float = ANSWER_SECONDS,
) -> None:
    """Let the lease of an export end no earlier than `lease` seconds from now.

    A request that waits for room in the importing cache renews the leases of its prompt now and then; if its process
    dies, the exporter soon gets its rows back.

    Parameters
    ----------
    manifest : Manifest or bytes, or a list of them
    transport : Transport
        Of the kind that the manifest names.
    lease : float
    deadline : float
        Seconds from now until the call fails.

    Raises
    ------
    UnsupportedOption, ShapeError
        A manifest that cannot be read, or of another transport; a lease out of range.
    HandoverError
        LeaseExpired, if the export has ended; PeerLost or DeadlineExceeded, if the exporter does not answer.
    """
    manifests = decoded(manifest)
    seconds, until = lease_seconds(lease), deadline_at(deadline)
    check_of_transport(manifests, transport)
    for each in manifests:
        transport.change_lease(each, seconds, until).run()
