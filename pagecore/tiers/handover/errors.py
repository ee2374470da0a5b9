"""Errors of a hand-over. After each of them the importing cache is as it was before the import."""

from __future__ import annotations

from pagecore.errors import PagecoreError


class HandoverError(PagecoreError, OSError):
    """A hand-over failed; the importing cache is as before.

    The exporter keeps its rows until the lease ends, so that another import can try, or until `release_export`.
    """


class LeaseExpired(HandoverError):
    """The lease of the export has run out, or its exporter withdrew it; the exporter may have reused its blocks."""


class PeerLost(HandoverError):
    """The other process cannot be reached, or its connection ended before all bytes had arrived."""


class DeadlineExceeded(HandoverError, TimeoutError):
    """The deadline of the import passed before all bytes had arrived."""


class CorruptTransfer(HandoverError):
    """Bytes arrived whose sum is not that of the exporter, or a message that does not fit the request."""


class ImportCancelled(HandoverError):
    """The import was cancelled; the exporter is notified, and keeps its rows for other readers only."""
