from typing import Any

from pagecore.arrays import Tensor

class RowWrite: ...

class StaticRoom:
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    lengths: list[int]
    written: list[int]
    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
        write_options: list[dict[str, Any]] | None = None,
        key_codes_per_byte: int = 1,
        value_codes_per_byte: int = 1,
    ) -> None: ...
    def stream_of(self, stream: object, example: object) -> int | None: ...
    def reset(self, stream: object = None) -> None: ...
    def update(
        self, index: int, key: Any, value: Any, position: int, stream: object = None, is_fixed: bool = True
    ) -> tuple[Tensor, Tensor]: ...
