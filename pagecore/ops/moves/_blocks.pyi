from typing import Any

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
