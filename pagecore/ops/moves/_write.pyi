from typing import Any

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
