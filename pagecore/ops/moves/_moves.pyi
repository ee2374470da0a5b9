from typing import Any

from pagecore.arrays import Tensor

def gather_blocks(
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    rows: Any = None,
    null_block: bool = True,
    out: Any = None,
    stream: Any = None,
) -> Any: ...
def scatter_blocks(
    values: Any,
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    rows: Any = None,
    null_block: bool = True,
    stream: Any = None,
) -> None: ...
def copy_blocks(caches: Any, pairs: Any, *, independent: bool = False, stream: Any = None) -> None: ...

class SlotMoves:
    """Moves of tokens between slots of the planes of one pool."""

    def __new__(
        cls, planes: list[Tensor], bounds: list[tuple[Tensor, Tensor, Tensor]], stream: int = 0
    ) -> SlotMoves: ...

def move_slots(caches: Any, source: Any, target: Any, *, stream: Any = None) -> None: ...
def write_kv(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    key_scale: Any = None,
    value_scale: Any = None,
    key_global_scale: float = 1.0,
    value_global_scale: float = 1.0,
    format: str | None = None,
    key_min: Any = None,
    key_max: Any = None,
    label: Any = None,
    label_channels: Any = None,
    stream: Any = None,
) -> None: ...
