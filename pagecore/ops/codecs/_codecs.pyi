from typing import Any

from pagecore.arrays import Tensor
from pagecore.ops.arguments.sealed_blocks import SealedBlocks

class Conversions: ...

def quantize(
    x: Any,
    format: str,
    scale: Any = None,
    *,
    axis: int | None = None,
    group_size: int | None = None,
    stream: Any = None,
) -> tuple[Any, Any]: ...
def dequantize(
    codes: Any,
    format: str,
    scales: Any = None,
    scale: Any = None,
    dtype: Any = "float32",
    *,
    axis: int | None = None,
    stream: Any = None,
) -> Any: ...
def quantize_state(state: Any, *, stream: Any = None) -> tuple[Any, Any]: ...
def dequantize_state(codes: Any, scales: Any, *, out: Any = None, stream: Any = None) -> Any: ...
def convert_slots(
    planes: list[tuple[Tensor, Tensor, Tensor]], pairs: Any, restores: bool, stream: object = None
) -> None: ...
def transfer_blocks(
    source_caches: Any,
    target_caches: Any,
    pairs: Any,
    *,
    source_scales: Any = None,
    target_scales: Any = None,
    independent: bool = False,
    null_block: bool = True,
    stream: Any = None,
) -> None: ...
def seal_kv(
    key_cache: Any,
    value_cache: Any,
    sealed: SealedBlocks,
    pairs: Any,
    *,
    null_block: bool = True,
    stream: None = None,
) -> None: ...
def unseal_kv(
    sealed: SealedBlocks,
    key_cache: Any,
    value_cache: Any,
    pairs: Any,
    *,
    null_block: bool = True,
    stream: Any = None,
) -> None: ...
def hadamard(x: Any, *, out: Any = None, stream: Any = None) -> Any: ...
def rotate_rows(array: Any, name: str, out: Any, stream: Any) -> Any: ...
def rotation_block(dim: int) -> int: ...
