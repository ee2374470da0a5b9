"""The protocol of transports: ways to move the pieces of an export from one process to another."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.offers import Offer
from pagecore.tiers.handover.pulls import Pull, PullRequest


@runtime_checkable
class Transport(Protocol):
    """A way to offer exported sequences to other processes, and to pull theirs.

    Attributes
    ----------
    name : str
        Name that manifests carry: both sides use transports of one name.
    address : str
        Address at which importers reach this transport; empty if it only imports.
    """

    name: str

    @property
    def address(self) -> str:
        """Address at which importers reach this transport; empty if it only imports."""

    def offer(self, offer: Offer) -> None:
        """Answer importers that know the export, until the last of its readers is served or its lease ends."""

    def withdraw(self, export: bytes) -> None:
        """End an offer early; its rows are given back when no read of it can follow."""

    def pull(self, request: PullRequest) -> Pull:
        """Begin to pull pieces into the caller's memory; return at once."""

    def change_lease(self, manifest: Manifest, lease: float, deadline: int) -> Pull:
        """Begin to extend a lease, or to give the export up for one reader with a lease of 0; return at once."""

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no offer and no pull is left; return False if `timeout` seconds pass first."""

    def close(self) -> None:
        """End all offers and pulls, threads and connections; a second call does nothing."""
