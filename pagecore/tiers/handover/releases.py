"""Releases: an importer gives an export up, so that the exporter need not wait for the end of the lease."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Listed

from pagecore.tiers.handover.acceptance import check_of_transport, deadline_at, decoded
from pagecore.tiers.handover.errors import LeaseExpired
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.transport import Transport

RELEASE_SECONDS = 2.0


def release_export(
    manifest: Manifest | bytes | Listed[Manifest | bytes], *, transport: Transport, deadline: float = RELEASE_SECONDS
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
            transport.release(each, until).run()
