from typing import Any

def merge_attention(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None, stream: Any = None
) -> tuple[Any, Any]: ...
