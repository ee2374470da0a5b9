from typing import Any

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
