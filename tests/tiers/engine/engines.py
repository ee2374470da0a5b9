"""Layouts, pools and stores for tests of StorageEngine."""

from pagecore import AttentionSpec, KVLayout
from pagecore.tiers.engine import DeviceType

SPEC = AttentionSpec(2, 8, dtype="float16")
UNEQUAL = AttentionSpec(2, 8, 12, dtype="float16")
LAYERS, BLOCKS, SIZE = 3, 7, 4
CUDA, HOST, DISK, REMOTE = DeviceType
PADDED = KVLayout("blockwise", block_alignment=4096)
LAYOUTS = ["layerwise", "blockwise", PADDED, KVLayout("layerwise", "NHD"), "BNHD", "CBNHD", "LBNHD", "NBHD", "BNCHD"]


class Store:
    """The attributes of a store that a protocol check needs; nothing is called."""

    medium, name = "EXTERNAL", "s3://bucket"
    fileno = submit_lookup = submit_load = submit_store = unlock = cancel = poll = drain = close = stats = print


def order_of(layout):
    return layout if isinstance(layout, KVLayout) else KVLayout(layout)


def bound(layout="blockwise", spec=SPEC, layers=LAYERS, blocks=BLOCKS, size=SIZE):
    return order_of(layout).bind(spec, layers, blocks, size)
