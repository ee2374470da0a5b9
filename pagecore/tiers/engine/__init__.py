"""The memory of every medium under one roof: handles by device type and id, and sharing between processes."""

from pagecore.tiers.engine.files import DiskFiles
from pagecore.tiers.engine.handle import DeviceType, StorageHandle
from pagecore.tiers.engine.ipc import IpcHandle, export_ipc, open_ipc
from pagecore.tiers.engine.registry import StorageEngine
from pagecore.tiers.engine.share import export_pool, open_pool

__all__ = [
    "DeviceType",
    "DiskFiles",
    "IpcHandle",
    "StorageEngine",
    "StorageHandle",
    "export_ipc",
    "export_pool",
    "open_ipc",
    "open_pool",
]
