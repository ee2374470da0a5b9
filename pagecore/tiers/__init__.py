"""Memory beyond the device: host, disk and remote tiers, hand-over between processes, and events.

Names are loaded at their first use (PEP 562): importing the package loads none of its modules, and none of their
optional libraries is needed before it is used. ``from pagecore.tiers import DiskStore`` loads the disk store alone.
"""

from typing import TYPE_CHECKING

from pagecore.lazy import lazy_names

if TYPE_CHECKING:
    from pagecore.tiers.disk import DiskStore
    from pagecore.tiers.engine import (
        DeviceType,
        DiskFiles,
        IpcHandle,
        StorageEngine,
        StorageHandle,
        export_ipc,
        export_pool,
        open_ipc,
        open_pool,
    )
    from pagecore.tiers.events import EventPublisher, Mirror, Subscriber
    from pagecore.tiers.guard import Breaker, Deadline, Guard
    from pagecore.tiers.handover.errors import (
        CorruptTransfer,
        DeadlineExceeded,
        HandoverError,
        ImportCancelled,
        LeaseExpired,
        PeerLost,
    )
    from pagecore.tiers.handover.exports import export_sequence
    from pagecore.tiers.handover.imports import import_sequence, start_import
    from pagecore.tiers.handover.leases import extend_lease, release_export
    from pagecore.tiers.handover.transports.mooncake import MooncakeTransport
    from pagecore.tiers.handover.transports.nixl import NixlTransport
    from pagecore.tiers.handover.transports.sockets import SocketTransport
    from pagecore.tiers.host.tier import HostTier
    from pagecore.tiers.keys import Fingerprint, content_chain, lane_keys
    from pagecore.tiers.manager.tiers import Tiers
    from pagecore.tiers.remote.mooncake import MooncakeStore
    from pagecore.tiers.remote.objects import ObjectStore
    from pagecore.tiers.remote.resp import RespStore
    from pagecore.tiers.store import (
        BlockStore,
        EntryLister,
        EntryRemover,
        EntryTaker,
        EntryToucher,
        EvictionReporter,
        PrefixKeeper,
        StoreStats,
    )

__all__ = [
    "BlockStore",
    "Breaker",
    "CorruptTransfer",
    "Deadline",
    "DeadlineExceeded",
    "DeviceType",
    "DiskFiles",
    "DiskStore",
    "EntryLister",
    "EntryRemover",
    "EntryTaker",
    "EntryToucher",
    "EventPublisher",
    "EvictionReporter",
    "Fingerprint",
    "Guard",
    "HandoverError",
    "HostTier",
    "ImportCancelled",
    "IpcHandle",
    "LeaseExpired",
    "Mirror",
    "MooncakeStore",
    "MooncakeTransport",
    "NixlTransport",
    "ObjectStore",
    "PeerLost",
    "PrefixKeeper",
    "RespStore",
    "SocketTransport",
    "StorageEngine",
    "StorageHandle",
    "StoreStats",
    "Subscriber",
    "Tiers",
    "content_chain",
    "export_ipc",
    "export_pool",
    "export_sequence",
    "extend_lease",
    "import_sequence",
    "lane_keys",
    "open_ipc",
    "open_pool",
    "release_export",
    "start_import",
]

_MODULES = {
    "disk": ("DiskStore",),
    "engine": (
        "DeviceType",
        "DiskFiles",
        "IpcHandle",
        "StorageEngine",
        "StorageHandle",
        "export_ipc",
        "export_pool",
        "open_ipc",
        "open_pool",
    ),
    "events": ("EventPublisher", "Mirror", "Subscriber"),
    "guard": ("Breaker", "Deadline", "Guard"),
    "handover.errors": (
        "CorruptTransfer",
        "DeadlineExceeded",
        "HandoverError",
        "ImportCancelled",
        "LeaseExpired",
        "PeerLost",
    ),
    "handover.exports": ("export_sequence",),
    "handover.imports": ("import_sequence", "start_import"),
    "handover.leases": ("extend_lease", "release_export"),
    "handover.transports.mooncake": ("MooncakeTransport",),
    "handover.transports.nixl": ("NixlTransport",),
    "handover.transports.sockets": ("SocketTransport",),
    "host.tier": ("HostTier",),
    "keys": ("Fingerprint", "content_chain", "lane_keys"),
    "manager.tiers": ("Tiers",),
    "remote.mooncake": ("MooncakeStore",),
    "remote.objects": ("ObjectStore",),
    "remote.resp": ("RespStore",),
    "store": (
        "BlockStore",
        "EntryLister",
        "EntryRemover",
        "EntryTaker",
        "EntryToucher",
        "EvictionReporter",
        "PrefixKeeper",
        "StoreStats",
    ),
}

if not TYPE_CHECKING:  # type checkers read the imports above, and report names that are not among them
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
